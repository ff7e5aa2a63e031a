"""Linear least squares by orthogonal factors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.statistics.base import ShardInfo, State, Statistic
from dask_sdc.statistics.blocks import feature_count, real_block, weighted_rows
from dask_sdc.statistics.kernels.least_squares import block_factor, merge_factor

Array = np.ndarray[Any, Any]

_U = 2.0**-53


@dataclass(frozen=True)
class LinearRegressionResult:
    """A linear least-squares fit; arrays lose the target axis where targets are scalars.

    Attributes
    ----------
    coef : ndarray of float64, shape (t, d) or (d,)
        Coefficients; the shortest ones where several fit equally well.
    intercept : ndarray of float64, shape (t,), or float
        Zero without an intercept.
    rss : ndarray of float64, shape (t,), or float
        Σw·residual².
    r2 : ndarray of float64, shape (t,), or float
        1 - rss / tss, with tss about the mean if there is an intercept; NaN where tss is zero.
    coef_std, intercept_std : ndarray of float64, shaped as coef and intercept
        Standard errors for independent residuals of equal variance, weights counting as repeats;
        NaN without degrees of freedom. With l2 > 0 those of the shrunk coefficients.
    rank : int
        Numerical rank of the (centred) features.
    singular_values : ndarray of float64, shape (d,)
        Of the (centred, √w-weighted) features.
    count : int
        Samples of positive weight.
    warning : str
        Empty, or why the coefficients are not the only solution.
    """

    coef: Any
    intercept: Any
    rss: Any
    r2: Any
    coef_std: Any
    intercept_std: Any
    rank: int
    singular_values: Array
    count: int
    warning: str = ""

    def predict(self, x: Array) -> Array:
        """Return the fitted values of samples (n, d): (n,) or (n, t)."""
        fitted: Array = np.asarray(x, np.float64) @ np.transpose(self.coef) + self.intercept
        return fitted


@dataclass(frozen=True)
class LinearRegression(Statistic):
    """Ordinary or ridge least squares of one or more targets on samples of shape (d,).

    The state is the triangular factor R of the centred [X y], combined by factoring stacked factors
    (TSQR: Demmel, Grigori, Hoemmen and Langou 2012). The condition number enters once, not squared
    as with normal equations, and coefficients come from the singular values of R.

    Parameters
    ----------
    fit_intercept : bool
        Whether to fit an intercept; it is never shrunk.
    l2 : float
        Ridge penalty ``l2 * ||coef||²``, as scikit-learn's ``Ridge(alpha)``.

    Raises
    ------
    InputError
        If ``l2`` is not finite and at least zero.
    """

    fit_intercept: bool = True
    l2: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.fit_intercept, bool | np.bool_):
            raise InputError(f"expected fit_intercept True or False, got {self.fit_intercept!r}")
        if isinstance(self.l2, bool) or not isinstance(self.l2, int | float) or not 0 <= self.l2 < np.inf:
            raise InputError(f"expected a finite l2 >= 0, got {self.l2!r}")

    def init(self, info: ShardInfo) -> State:
        """Return the state of no samples.

        Raises
        ------
        InputError, InputTypeError
            If samples are not of shape (d,), targets not of shape () or (t,), or samples complex.
        """
        d = feature_count(info.shape, "LinearRegression")
        if np.dtype(info.dtype).kind == "c":
            raise InputTypeError(f"LinearRegression needs real samples, got {info.dtype}")
        shape = info.target_shape
        if shape is None or len(shape) > 1 or 0 in shape:
            raise InputError(f"LinearRegression needs targets of shape () or (t,) as target=, got {shape}")
        p = d + (shape[0] if shape else 1)
        return {
            "features": d,
            "scalar": not shape,
            "count": 0,
            "weight": 0.0,
            **{f: np.zeros(p) for f in ("sum", "low", "squares")},
            "factor": np.zeros((p, p)),
        }

    def update(self, state: State, x: Any, weights: Any = None, target: Any = None) -> State:
        """Add a real block of shape (n, d), targets of shape (n,) or (n, t), and weights (n,) or none.

        Raises
        ------
        InputError, InputTypeError
            If there is no target, or block, target or weights do not fit.
        """
        if target is None:
            raise InputError("LinearRegression needs a target, got None")
        d, p = state["features"], len(state["sum"])
        x = real_block(x, (d,), "LinearRegression")
        y = real_block(target, () if state["scalar"] else (p - d,), "LinearRegression")
        if y.shape[0] != x.shape[0]:
            raise InputError(f"expected {x.shape[0]} targets, one per sample, got {y.shape[0]}")
        x, weights, y = weighted_rows(x, weights, y)
        if x.shape[0] == 0:
            return state
        block = block_factor(x, y.reshape((-1, p - d)), weights, bool(self.fit_intercept))
        return self.combine(state, {"count": int(x.shape[0]), **block})

    def combine(self, a: State, b: State) -> State:
        """Merge two states into the memory of the first."""
        return {**a, **merge_factor(a, b, bool(self.fit_intercept)), "count": a["count"] + b["count"]}

    def finalize(self, state: State) -> LinearRegressionResult:
        """Solve the least-squares problem of the triangular factor.

        Raises
        ------
        InputError
            If there is no sample.
        """
        d, weight, factor = state["features"], state["weight"], state["factor"]
        if not weight > 0:
            raise InputError("LinearRegression needs at least one sample, got none")
        rxx, rxy = factor[:d, :d], factor[:d, d:]
        left, s, right = np.linalg.svd(rxx)
        rank = int((s > s[0] * max(state["count"], d) * 2 * _U).sum())
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = np.where(np.arange(d) < rank, s / (s**2 + self.l2), 0.0)
        coef = right.T @ (gain[:, None] * (left.T @ rxy))
        rss = ((rxy - rxx @ coef) ** 2).sum(axis=0) + (factor[d:, d:] ** 2).sum(axis=0)
        tss = (factor[:, d:] ** 2).sum(axis=0)
        mean = (state["sum"] + state["low"]) / weight
        intercept = mean[d:] - mean[:d] @ coef if self.fit_intercept else np.zeros(len(rss))
        freedom = weight - rank - bool(self.fit_intercept)
        noise = rss / freedom if freedom > 0 else np.full(len(rss), np.nan)
        spread = right.T * gain
        coef_var = (spread**2).sum(axis=1)
        shift_var = 1 / weight + ((mean[:d] @ spread) ** 2).sum() if self.fit_intercept else 0.0
        with np.errstate(divide="ignore", invalid="ignore"):
            r2 = np.where(tss > 0, 1 - rss / tss, np.nan)
        fields = {
            "coef": coef.T,
            "intercept": intercept,
            "rss": rss,
            "r2": r2,
            "coef_std": np.sqrt(np.outer(noise, coef_var)),
            "intercept_std": np.sqrt(noise * shift_var),
        }
        if state["scalar"]:
            fields = {name: value[0] for name, value in fields.items()}
        few = f"rank {rank} of {d} features: the shortest solution is returned"
        return LinearRegressionResult(
            **fields,
            rank=rank,
            singular_values=s,
            count=state["count"],
            warning="" if rank == d or self.l2 > 0 else few,
        )

    def magnitudes(self, state: State) -> dict[str, Any]:
        """Return Σ|terms|; the factor's errors grow with the condition of the columns.

        ``||ΔR|| <= κ·||ΔA||`` to first order for columns of unit norm (Stewart 1977).
        """
        weight, squares = state["weight"], state["squares"]
        mean = state["sum"] / max(weight, 1e-300)
        norms = np.sqrt(squares + (_U * weight * mean**2 if self.fit_intercept else 0.0))
        unit = state["factor"] / np.where(norms > 0, norms, 1.0)
        s = np.linalg.svd(unit, compute_uv=False) if np.isfinite(unit).all() else np.zeros(1)
        condition = min(s[0] / max(s[-1], 1e-300), 1 / _U)
        sums = np.sqrt(weight) * np.sqrt(squares + weight * mean**2)
        sizes = {"weight": weight, "sum": sums, "low": sums, "squares": norms**2}
        return sizes | {"factor": np.broadcast_to(condition * norms, unit.shape)}

    def terms(self, state: State) -> float:
        """Return the number of samples."""
        return float(max(state["count"], 1))

    def invariants(self, state: State) -> Iterator[str]:
        """Yield where the factor is not triangular or has not the norms of the columns."""
        factor, squares, weight = state["factor"], state["squares"], state["weight"]
        if state["count"] < 0 or (weight > 0) != (state["count"] > 0):
            yield f"expected weight > 0 where count > 0, got {weight} and {state['count']}"
        if np.tril(factor, -1).any() or not np.all(factor.diagonal() >= 0):
            yield "expected an upper triangular factor with a diagonal >= 0"
        norms = (factor**2).sum(axis=0)
        # Orthogonal transforms keep norms; measured: below 1/50 of the bound.
        floor = weight * (state["sum"] / max(weight, 1e-300)) ** 2 * _U if self.fit_intercept else 0.0
        bound = 8 * _U * np.sqrt(64 + self.terms(state)) * (squares + floor)
        off = np.abs(norms - squares)
        if not np.all(off <= bound):
            worst = int(np.argmax(np.where(np.isnan(off), np.inf, off - bound)))
            yield f"expected column {worst} of the factor to have norm² {squares[worst]}, got {norms[worst]}"
