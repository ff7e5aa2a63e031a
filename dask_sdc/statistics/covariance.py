"""Covariance and correlation matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_sdc.exceptions import InputError
from dask_sdc.statistics.base import ShardInfo, State, Statistic
from dask_sdc.statistics.blocks import feature_count, real_block, weighted_rows
from dask_sdc.statistics.kernels.covariance import CHECKED_FROM, block_scatter, check_vector, merge_scatter

Array = np.ndarray[Any, Any]

_U = 2.0**-53


@dataclass(frozen=True)
class CovarianceResult:
    """Covariance of the features of (n, d) samples.

    Attributes
    ----------
    count : int
        Samples of positive weight.
    weight : float
        Σw, the count without weights.
    mean : ndarray of float64, shape (d,)
        NaN without samples.
    scatter : ndarray of float64, shape (d, d)
        Σw(x - mean)(x - mean)ᵀ, exactly symmetric.
    covariance : ndarray of float64, shape (d, d)
        scatter / (Σw - ddof); NaN where the divisor is not positive.
    """

    count: int
    weight: float
    mean: Array
    scatter: Array
    covariance: Array

    @property
    def correlation(self) -> Array:
        """Pearson correlation, shape (d, d); NaN for features of no variance."""
        spread = np.sqrt(self.scatter.diagonal())
        with np.errstate(divide="ignore", invalid="ignore"):
            correlation = self.scatter / spread[:, None] / spread
        np.fill_diagonal(correlation, np.where(spread > 0, 1.0, np.nan))
        return np.clip(correlation, -1.0, 1.0)


class ScatterStatistic(Statistic):
    """What `Covariance` and `PCA` share: the scatter matrix and all that guards it."""

    ddof: float

    def __post_init__(self) -> None:
        if (
            isinstance(self.ddof, bool)
            or not isinstance(self.ddof, int | float)
            or not np.isfinite(self.ddof)
        ):
            raise InputError(f"expected a finite real ddof, got {self.ddof!r}")

    def init(self, info: ShardInfo) -> State:
        """Return the state of no samples of shape (d,)."""
        d = feature_count(info.shape, type(self).__name__)
        return {
            "count": 0,
            "weight": 0.0,
            "sum": np.zeros(d),
            "low": np.zeros(d),
            "scatter": np.zeros((d, d)),
            "check": np.zeros(d) if d >= CHECKED_FROM else None,
        }

    def update(self, state: State, x: Any, weights: Any = None) -> State:
        """Add a real block of shape (n, d), with weights of shape (n,) or none.

        Raises
        ------
        InputError, InputTypeError
            If the block or its weights do not fit.
        """
        x = real_block(x, state["sum"].shape, type(self).__name__)
        x, weights = weighted_rows(x, weights)
        if x.shape[0] == 0:
            return state
        return self.combine(state, {"count": int(x.shape[0]), **block_scatter(x, weights)})

    def combine(self, a: State, b: State) -> State:
        """Merge two states into the memory of the first."""
        return {**merge_scatter(a, b), "count": a["count"] + b["count"]}

    def covariance(self, state: State) -> CovarianceResult:
        """Return mean, scatter and covariance of a state."""
        weight, divisor = state["weight"], state["weight"] - self.ddof
        mean = (state["sum"] + state["low"]) / weight if weight > 0 else np.full(len(state["sum"]), np.nan)
        covariance = state["scatter"] / divisor if divisor > 0 else np.full_like(state["scatter"], np.nan)
        return CovarianceResult(state["count"], weight, mean, state["scatter"], covariance)

    def magnitudes(self, state: State) -> dict[str, Any]:
        """Return Σ|terms|: Σw|xᵢxⱼ| ≤ √(Sᵢᵢ·Sⱼⱼ) (Cauchy-Schwarz), with a floor for the rounding of x."""
        weight, mean = state["weight"], state["sum"] / max(state["weight"], 1e-300)
        diagonal = state["scatter"].diagonal()
        rms = np.sqrt(diagonal / max(weight, 1e-300) + mean**2)
        spread = np.sqrt(diagonal + _U * weight * rms**2)
        scatter = np.outer(spread, spread)
        sizes = {"weight": weight, "sum": weight * rms, "low": weight * rms, "scatter": scatter}
        return (
            sizes if state["check"] is None else sizes | {"check": scatter @ np.abs(check_vector(len(mean)))}
        )

    def terms(self, state: State) -> float:
        """Return the number of samples."""
        return float(max(state["count"], 1))

    def invariants(self, state: State) -> Iterator[str]:
        """Yield what no scatter matrix can break, and a wrong matrix product from d = 128 on."""
        scatter, check = state["scatter"], state["check"]
        diagonal = scatter.diagonal()
        if state["count"] < 0 or (state["weight"] > 0) != (state["count"] > 0):
            yield f"expected weight > 0 where count > 0, got {state['weight']} and {state['count']}"
        if not np.array_equal(scatter, scatter.T):
            yield "expected a symmetric scatter matrix"
        if not np.all(diagonal >= 0):
            yield f"expected a diagonal >= 0, got {diagonal.min()}"
            return
        sizes = self.magnitudes(state)
        if not np.all(np.abs(scatter) <= sizes["scatter"] * (1 + 1e-9)):
            yield "expected |S[i, j]| <= sqrt(S[i, i] * S[j, j])"
        if check is None:
            return
        # Rounding of both sides, which grows with the tiles that were added; measured: below 1/50 of it.
        bound = 8 * _U * np.sqrt(64 + self.terms(state) / 256) * sizes["check"]
        residual = np.abs(scatter @ check_vector(len(diagonal)) - check)
        if not np.all(residual <= bound):
            worst = int(np.argmax(np.where(np.isnan(residual), np.inf, residual - bound)))
            off = residual[worst]
            yield f"expected scatter @ v within {bound[worst]:.3g} of its check, row {worst} is {off:.3g} off"


@dataclass(frozen=True)
class Covariance(ScatterStatistic):
    """Covariance matrix of samples of shape (d,).

    Blocks are centred near their mean before BLAS multiplies them; scatters are merged by Chan,
    Golub and LeVeque (1983). From d = 128 on, the state carries the scatter times a fixed random
    vector, got without the matrix, so that a wrong product is seen on every shard and after every
    merge.

    Parameters
    ----------
    ddof : float
        Subtracted from Σw in the divisor of the covariance; weights count as repeats.

    Raises
    ------
    InputError
        If ``ddof`` is not a finite real number.
    """

    ddof: float = 1.0

    def finalize(self, state: State) -> CovarianceResult:
        """Return mean, scatter and covariance."""
        return self.covariance(state)
