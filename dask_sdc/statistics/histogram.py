"""Histograms of given edges, in any number of dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.statistics.base import ShardInfo, State, Statistic
from dask_sdc.statistics.blocks import real_block, weighted_rows
from dask_sdc.statistics.kernels import reshaped
from dask_sdc.statistics.kernels.histogram import Axis, count_block

Array = np.ndarray[Any, Any]

#: Most slots of a histogram: 1 GiB of counts.
_MOST_SLOTS = 1 << 27


@dataclass(frozen=True)
class HistogramResult:
    """Counts of samples in bins.

    Attributes
    ----------
    counts : ndarray of int64, shape (b₁, …, bₖ)
        Samples in each bin; bins are closed on the left, the last one on both sides.
    sums : ndarray of float64 of the same shape, or None
        Σw in each bin; None without weights.
    edges : tuple of ndarray
        The edges of each axis.
    below, above, nan : ndarray of int64, shape (k,)
        Samples below the first and above the last edge of each axis, infinities included, and NaN.
    total : int
        All samples.
    """

    counts: Array
    sums: Array | None
    edges: tuple[Array, ...]
    below: Array
    above: Array
    nan: Array
    total: int

    def density(self) -> Array:
        """Return the probability density in each bin, as ``numpy.histogram(density=True)``."""
        values = self.counts if self.sums is None else self.sums
        density: Array = values / values.sum()
        for d, edges in enumerate(self.edges):
            density = density / np.diff(edges).reshape((-1,) + (1,) * (len(self.edges) - 1 - d))
        return density


@dataclass(frozen=True, eq=False)
class Histogram(Statistic):
    """Histogram with the semantics of ``numpy.histogram`` and ``numpy.histogramdd``.

    Counts are exact integers and equal to NumPy's, values on edges included. What lies outside of
    the edges is counted too, so that the total always equals the number of samples.

    Parameters
    ----------
    edges : array_like or sequence of array_like
        One 1-d array of rising edges: every element of a block ``(n, *shape)`` is one sample. A
        sequence of k such arrays: blocks have shape (n, k).

    Raises
    ------
    InputError
        If edges are not rising, are fewer than two, hold NaN, or make more than 2**27 slots.
    """

    edges: Any

    def __post_init__(self) -> None:
        edges = self.edges
        joint = isinstance(edges, Sequence) and len(edges) > 0 and np.ndim(edges[0]) == 1
        rows = tuple(edges) if joint else (edges,)
        checked = tuple(_checked_edges(e) for e in rows)
        object.__setattr__(self, "edges", checked if joint else checked[0])
        slots = np.prod([float(len(e) + 1) for e in checked])
        if slots > _MOST_SLOTS:
            raise InputError(f"expected at most {_MOST_SLOTS} slots, got {slots:.0f}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return (self._joint, *(axis.edges.tobytes() for axis in self._axes))

    @property
    def _joint(self) -> bool:
        return isinstance(self.edges, tuple)

    @cached_property
    def _axes(self) -> tuple[Axis, ...]:
        return tuple(Axis.of(e) for e in (self.edges if self._joint else (self.edges,)))

    def init(self, info: ShardInfo) -> State:
        """Return the state of no samples.

        Raises
        ------
        InputError, InputTypeError
            If samples are complex, or not of shape (k,) for k arrays of edges.
        """
        if np.dtype(info.dtype).kind == "c":
            raise InputTypeError(f"Histogram needs real samples, got {info.dtype}")
        if self._joint and tuple(info.shape) != (len(self._axes),):
            raise InputError(f"expected samples of shape ({len(self._axes)},), got {tuple(info.shape)}")
        counts = np.zeros(tuple(axis.slots for axis in self._axes), np.int64)
        return {"shape": tuple(info.shape), "total": 0, "counts": counts, "sums": None}

    def update(self, state: State, x: Any, weights: Any = None) -> State:
        """Add a real block of shape ``(n, *shape)``, with weights of shape (n,) or none.

        Raises
        ------
        InputError, InputTypeError
            If the block or its weights do not fit.
        """
        x = real_block(x, tuple(state["shape"]), "Histogram")
        x, weights = weighted_rows(x, weights)
        if x.shape[0] == 0 or (x.size == 0 and not self._joint):
            return (
                state if weights is None or state["sums"] is not None else {**state, "sums": _as_sums(state)}
            )
        samples = x if self._joint else reshaped(x, (-1, 1))
        share = samples.shape[0] // x.shape[0]
        counts, sums = count_block(samples, self._axes, weights, share)
        block = {"shape": state["shape"], "total": int(samples.shape[0]), "counts": counts, "sums": sums}
        return self.combine(state, block)

    def combine(self, a: State, b: State) -> State:
        """Add two states; where one of them has no weights, its samples weigh one."""
        sums = None
        if a["sums"] is not None or b["sums"] is not None:
            sums = _as_sums(a) + _as_sums(b)
        counts = a["counts"] + b["counts"]
        return {"shape": a["shape"], "total": a["total"] + b["total"], "counts": counts, "sums": sums}

    def finalize(self, state: State) -> HistogramResult:
        """Return counts without the slots outside, which are returned by axis."""
        counts, inner = state["counts"], (slice(1, -2),) * len(self._axes)
        sides = [np.moveaxis(counts, d, 0) for d in range(counts.ndim)]
        return HistogramResult(
            counts[inner],
            None if state["sums"] is None else state["sums"][inner],
            tuple(axis.edges for axis in self._axes),
            np.array([side[0].sum() for side in sides]),
            np.array([side[-2].sum() for side in sides]),
            np.array([side[-1].sum() for side in sides]),
            state["total"],
        )

    def magnitudes(self, state: State) -> dict[str, Any]:
        """Return the sums of weights: they have no negative terms."""
        return {} if state["sums"] is None else {"sums": state["sums"]}

    def terms(self, state: State) -> float:
        """Return the number of samples."""
        return float(max(state["total"], 1))

    def invariants(self, state: State) -> Iterator[str]:
        """Yield where the counts do not add up to the samples."""
        counts, sums = state["counts"], state["sums"]
        if counts.min() < 0:
            yield f"expected counts >= 0, got {counts.min()}"
        if int(counts.sum()) != state["total"]:
            yield f"expected counts that add up to {state['total']} samples, got {counts.sum()}"
        if sums is not None and not np.array_equal(sums > 0, counts > 0):
            yield "expected weight in exactly the bins that have samples"


def _as_sums(state: State) -> Any:
    return state["counts"].astype(np.float64) if state["sums"] is None else state["sums"]


def _checked_edges(edges: Any) -> Array:
    try:
        e = np.array(edges, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputTypeError(f"expected edges that are real numbers, got {edges!r:.200}") from error
    if e.ndim != 1 or len(e) < 2 or not np.all(e[1:] > e[:-1]):
        raise InputError(f"expected a 1-d array of at least 2 rising edges, got {edges!r:.200}")
    e.flags.writeable = False
    return e
