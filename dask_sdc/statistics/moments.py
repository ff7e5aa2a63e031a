"""Count, mean, central moments and extremes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.statistics.base import ShardInfo, State, Statistic
from dask_sdc.statistics.blocks import checked_block, weighted_rows
from dask_sdc.statistics.kernels import dtype_of, is_numpy, namespace, reshaped
from dask_sdc.statistics.kernels.moments import block_moments, merge

Array = np.ndarray[Any, Any]

_U = 2.0**-53
_HUGE = float(np.finfo(np.float64).max)


@dataclass(frozen=True)
class MomentsResult:
    """Moments over the sample axis, elementwise.

    Attributes
    ----------
    count : int or ndarray of int64
        Samples; per element, of shape ``shape``, where NaN was skipped.
    weight : float or ndarray of float64
        Σw, shaped as ``count``; equal to it without weights.
    mean : ndarray of float64 or complex128, shape ``shape``
        Σwx / Σw; NaN without samples. Scalars where a sample is a scalar, as in all fields.
    M2, M3, M4 : ndarray of float64, shape ``shape``
        Σw|x - mean|², Σw(x - mean)³, Σw(x - mean)⁴; M3 and M4 are None below order 4.
    min, max : ndarray of float64, shape ``shape``
        Extremes; NaN without samples, None for complex samples.
    """

    count: Any
    weight: Any
    mean: Any
    M2: Any
    M3: Any = None
    M4: Any = None
    min: Any = None
    max: Any = None

    def variance(self, ddof: float = 0.0) -> Any:
        """Return M2 / (Σw - ddof): weights count as repeats; NaN where the divisor is not positive."""
        divisor = self.weight - ddof
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(divisor > 0, self.M2 / divisor, np.nan)[()]

    def std(self, ddof: float = 0.0) -> Any:
        """Return the square root of `variance`."""
        return np.sqrt(self.variance(ddof))

    @property
    def skew(self) -> Any:
        """Fisher-Pearson skewness g1 = (M3/W) / (M2/W)^1.5; NaN where the variance is zero.

        Raises
        ------
        InputTypeError
            If M3 was not accumulated: order below 4, or complex samples.
        """
        return self._ratio(self.M3, "skew", 1.5)

    @property
    def kurtosis(self) -> Any:
        """Excess kurtosis g2 = (M4/W) / (M2/W)² - 3; NaN where the variance is zero.

        Raises
        ------
        InputTypeError
            If M4 was not accumulated: order below 4, or complex samples.
        """
        return self._ratio(self.M4, "kurtosis", 2.0) - 3.0

    def _ratio(self, moment: Any, name: str, power: float) -> Any:
        if moment is None:
            raise InputTypeError(
                f"{name} needs real samples and order 4, got {np.result_type(self.mean)} without it"
            )
        with np.errstate(divide="ignore", invalid="ignore"):
            return (moment / self.weight) / (self.M2 / self.weight) ** power


@dataclass(frozen=True)
class Moments(Statistic):
    """Count, mean, M2, M3, M4, minimum and maximum of each element over the sample axis.

    Sums are compensated, so that the mean is right to a few rounding errors of the result however
    much cancels; central moments are taken about a value near the mean and merged by the formulas
    of Pébay (2008, SAND2008-6212). All is accumulated in float64, and 64-bit integers above 2**53
    from an integer offset, so that they lose nothing against their spread.

    Parameters
    ----------
    order : {4, 2}
        Highest central moment; 2 leaves out M3 and M4 and is a fifth faster. With order 4, ``|x - mean|``
        must stay below about 1e76, as its fourth power has to fit in float64.
    skipna : bool
        Whether NaN counts as no sample, per element. Without it NaN is an error at its shard.

    Raises
    ------
    InputError
        If ``order`` is another one.
    """

    order: int = 4
    skipna: bool = False

    def __post_init__(self) -> None:
        if self.order not in (2, 4) or isinstance(self.order, bool):
            raise InputError(f"expected order 2 or 4, got {self.order!r}")
        if not isinstance(self.skipna, bool | np.bool_):
            raise InputError(f"expected skipna True or False, got {self.skipna!r}")

    def init(self, info: ShardInfo) -> State:
        """Return the state of no samples; complex samples are two reals on a last axis."""
        is_complex = np.dtype(info.dtype).kind == "c"
        shape = (*info.shape, 2) if is_complex else tuple(info.shape)
        counts = shape if self.skipna else ()
        state = {
            "complex": is_complex,
            "count": np.zeros(counts, np.int64),
            "weight": np.zeros(counts),
            **{f: np.zeros(shape) for f in ("sum", "low", "M2")},
        }
        if self.order == 4 and not is_complex:
            state |= {f: np.zeros(shape) for f in ("M3", "M4")}
        return state | {"min": np.full(shape, _HUGE), "max": np.full(shape, -_HUGE)}

    def update(self, state: State, x: Any, weights: Any = None) -> State:
        """Add a block of shape ``(n, *shape)``, with weights of shape (n,) or none.

        Raises
        ------
        InputError, InputTypeError
            If the block or its weights do not fit, see `checked_block` and `weighted_rows`.
        """
        shape = state["sum"].shape
        x = checked_block(x, shape[:-1] if state["complex"] else shape)
        x, weights = weighted_rows(x, weights)
        if (dtype_of(x).kind == "c") != state["complex"]:
            raise InputTypeError(
                f"expected {'complex' if state['complex'] else 'real'} samples, got {x.dtype}"
            )
        if state["complex"]:
            x = self._parts(x)
        size = state["sum"].size
        if x.shape[0] == 0 or size == 0:
            return state
        block = block_moments(reshaped(x, (x.shape[0], size)), weights, "M4" in state, self.skipna)
        if not self.skipna:
            block |= {"count": block["count"][:1], "weight": block["weight"][:1]}
        return self._merged(state, block)

    def _parts(self, x: Any) -> Any:
        """View complex samples as (real, imaginary); NaN in one part is NaN in both."""
        xp = np if is_numpy(x) else namespace(x)
        parts = xp.stack((xp.real(x), xp.imag(x)), axis=-1)
        if self.skipna:
            parts = xp.where(xp.isnan(x)[..., None], xp.asarray(xp.nan, dtype=parts.dtype), parts)
        return parts

    def combine(self, a: State, b: State) -> State:
        """Merge two states into the memory of the first."""
        return self._merged(a, {f: v for f, v in b.items() if f != "complex"})

    def _merged(self, a: State, b: Mapping[str, Any]) -> State:
        fields = {f: v for f, v in a.items() if f != "complex"}
        return {"complex": a["complex"], **merge(fields, dict(b))}

    def finalize(self, state: State) -> MomentsResult:
        """Return the moments; scalars where a sample is a scalar."""
        count, weight, M2 = state["count"], state["weight"], state["M2"]
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.where(weight > 0, (state["sum"] + state["low"]) / weight, np.nan)
        if state["complex"]:
            mean = np.ascontiguousarray(mean).view(np.complex128)[..., 0]
            count, weight = (c[..., 0] if self.skipna else c for c in (count, weight))
            return MomentsResult(count[()], weight[()], mean[()], M2.sum(axis=-1)[()])
        least, greatest = (np.where(weight > 0, state[f], np.nan) for f in ("min", "max"))
        M3, M4 = (state[f][()] if f in state else None for f in ("M3", "M4"))
        return MomentsResult(count[()], weight[()], mean[()], M2[()], M3, M4, least[()], greatest[()])

    def magnitudes(self, state: State) -> dict[str, Array]:
        """Return Σ|terms|; sums by rms·Σw ≥ Σw|x|, M3 by √(M2·M4) ≥ Σw|d|³ (Cauchy-Schwarz).

        Deviations carry the rounding of x itself, so that spreads have a floor of u·Σw·x².
        """
        weight, M2 = state["weight"], state["M2"]
        mean = state["sum"] / np.maximum(weight, 1e-300)
        rms = np.sqrt(M2 / np.maximum(weight, 1e-300) + mean**2)
        spread = M2 + _U * weight * rms**2
        sizes = {"sum": weight * rms, "low": weight * rms, "M2": spread}
        if "M4" in state:
            fourth = state["M4"] + _U * rms**2 * spread
            sizes |= {"M3": np.sqrt(spread * fourth), "M4": fourth}
        return sizes | {"weight": weight}

    def terms(self, state: State) -> float:
        """Return the largest number of samples of an element."""
        return float(np.max(state["count"], initial=1))

    def invariants(self, state: State) -> Iterator[str]:
        """Yield what cannot hold of any samples, rounding allowed for."""
        count, weight = state["count"], state["weight"]
        yield from _where("count >= 0", count >= 0)
        yield from _where("weight > 0 where count > 0", (weight > 0) == (count > 0))
        some = np.broadcast_to(weight > 0, state["sum"].shape)
        if not some.any():
            return
        w, s, M2, least, greatest = (
            np.broadcast_to(state.get(f, weight), some.shape)[some]
            for f in ("weight", "sum", "M2", "min", "max")
        )
        mean, size = s / w, np.maximum(np.abs(least), np.abs(greatest))
        slack = 4 * _U * size
        # Powers of small numbers lose their bits long before they are zero.
        lost = w * np.finfo(np.float64).tiny
        yield from _where("min <= mean", least - slack <= mean)
        yield from _where("mean <= max", mean <= greatest + slack)
        yield from _where("M2 >= 0", M2 >= 0)
        with np.errstate(over="ignore"):
            # Popoviciu 1935: the variance is at most a quarter of the squared range.
            most = w * (greatest - least + slack) ** 2 / 4 + lost
            yield from _where("M2 <= weight * (max - min)**2 / 4", _at_most(M2, most))
            if "M4" in state:
                M3, fourth = state["M3"][some], state["M4"][some] + w * slack**4 + lost
                yield from _where("M2**2 <= weight * M4", _at_most(M2 / w, np.sqrt(fourth / w)))
                most = np.sqrt(M2 + w * slack**2) * np.sqrt(fourth)
                yield from _where("M3**2 <= M2 * M4", _at_most(np.abs(M3), most))


def _at_most(a: Array, b: Array) -> Array:
    return np.asarray(a <= b * (1 + 1e-9))


def _where(claim: str, holds: Array) -> Iterator[str]:
    """Yield a line that names the first element, in memory order, where a claim does not hold."""
    if not np.all(holds):
        bad = ~np.atleast_1d(holds).reshape(-1)
        yield f"expected {claim}, which {int(bad.sum())} elements break, first {int(bad.argmax())}"
