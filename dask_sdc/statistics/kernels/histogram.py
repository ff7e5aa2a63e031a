"""Which bin a sample falls in, exactly as comparing it with the edges says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_sdc.statistics.kernels import is_numpy, jit, namespace, to_host
from dask_sdc.statistics.kernels.tiles import frozen, is_flat, scratch_tiles

Array = np.ndarray[Any, Any]

#: Samples that are located before they are counted: their bins stay in the first-level cache.
_TILE = 1024
#: Up to this many bins, neighbours are counted in four copies: equal bins in a row would wait for
#: each other's store.
_COPIES_UP_TO = 1 << 12
#: Cells per bin that are tried, finer ones where edges are spaced unevenly.
_CELLS_PER_BIN = (1, 4, 16)


@dataclass(frozen=True)
class Axis:
    """One axis of n bins [e₀, e₁), …, [e₍ₙ₋₁₎, eₙ], and slots for what lies below, above and is NaN.

    A sample is compared with few edges only: equal cells, of the value or of its logarithm, say how
    many edges are surely below it. As the cell of a value never falls when the value rises, those
    are the edges of lower cells, whatever rounding does; a binary search goes through the others.

    Attributes
    ----------
    edges : numpy.ndarray
        n + 1 rising float64 edges.
    padded : numpy.ndarray
        -inf, the edges, and NaN, which nothing compares with.
    table : numpy.ndarray of uint32
        Edges in lower cells, for each cell and one more on both sides, and the slot of NaN.
    ranked : bool
        Whether cells divide `_ranks` of values instead of values.
    scale : float
        Cells per unit.
    steps : int
        Steps of the binary search.
    """

    edges: Array
    padded: Array
    table: Array
    ranked: bool
    scale: float
    steps: int

    @classmethod
    def of(cls, edges: Array) -> Axis:
        """Prepare rising float64 edges with the cells that need the fewest comparisons."""
        choices = [cls._with_cells(edges, k, ranked) for k in _CELLS_PER_BIN for ranked in (False, True)]
        return min(choices, key=lambda axis: axis.steps)

    @classmethod
    def _with_cells(cls, edges: Array, per_bin: int, ranked: bool) -> Axis:
        n = len(edges) - 1
        cells = min(n * per_bin, 1 << 20)
        points = _ranks(edges) if ranked else edges
        with np.errstate(over="ignore", invalid="ignore"):
            span = points[-1] - points[0]
            scale = float(cells / span) if 0 < span < np.inf and cells / span < np.inf else 0.0
            cell = np.floor(np.clip((points - points[0]) * scale, -1.0, cells)) if scale else np.zeros(n + 1)
        table = np.searchsorted(cell, np.arange(-1, cells + 1), side="left")
        steps = int(np.bincount(cell.astype(np.int64) + 1).max()).bit_length()
        padded = np.concatenate(([-np.inf], edges, np.full(1 + (1 << steps), np.nan)))
        return cls(edges, padded, np.append(table, n + 2).astype(np.uint32), ranked, scale, steps)

    @property
    def slots(self) -> int:
        """Slots: below, the bins, above, NaN."""
        return len(self.edges) + 2


@jit()
def _ranks(values):  # type: ignore[no-untyped-def]
    """Rank float64 values among all float64: a piecewise linear logarithm on both sides of zero."""
    bits, ranks = values.view(np.int64), np.empty(len(values))
    for i in range(len(values)):
        ranks[i] = np.float64(bits[i] if bits[i] >= 0 else np.int64(-9223372036854775808) - bits[i])
    return ranks


@jit()
def _slots(values, axis, stride, cell, slots):  # type: ignore[no-untyped-def]
    """Add ``stride`` times the slot of each value: the edges in lower cells, then compare."""
    padded, table, ranked, scale, steps, bins = axis
    low, high = padded[1], padded[bins + 1]
    top, nan = float(len(table) - 3), np.uint32(len(table) - 1)
    n = len(values)
    points = values
    if ranked:
        points = _ranks(values)
        low = _ranks(padded[1:2])[0]
    for i in range(n):
        t = (points[i] - low) * scale
        t = t if t > -1.0 else -1.0
        t = t if t < top else top
        place = np.uint32(np.int32(np.floor(t)) + np.int32(1))
        cell[i] = nan if values[i] != values[i] else place
    first = np.uint64(1) << np.uint64(steps) >> np.uint64(1)
    for i in range(n):
        v = values[i]
        slot, half = np.uint64(table[cell[i]]), first
        while half > np.uint64(0):
            slot += half * np.uint64(v >= padded[slot + half])
            half >>= np.uint64(1)
        slots[i] += np.uint64(stride) * (slot - np.uint64(v == high))  # the last bin is closed


@jit()
def _count(flat, n, first, axes, strides, weights, share, counts, sums):  # type: ignore[no-untyped-def]
    """Count ``n`` samples, the first of which has the weight first // share.

    ``axes`` holds the fields of one axis after the other, arrays with where they start;
    ``counts`` has shape (copies, slots).
    """
    padded, starts, tables, cells, ranked, scales, steps, bins = axes
    dims, copies = len(bins), counts.shape[0]
    values, cell, slots = np.empty(_TILE), np.empty(_TILE, np.uint32), np.empty(_TILE, np.uint64)
    for begin in range(0, n, _TILE):
        size = min(_TILE, n - begin)
        slots[:] = 0
        for d in range(dims):
            for i in range(size):
                values[i] = flat[(begin + i) * dims + d]
            table = tables[cells[d] : cells[d + 1]]
            axis = padded[starts[d] : starts[d + 1]], table, ranked[d], scales[d], steps[d], bins[d]
            _slots(values[:size], axis, strides[d], cell, slots)
        for k in range(copies):
            row = counts[k]
            for i in range(k, size, copies):
                row[slots[i]] += 1
        if weights is not None:
            for i in range(size):
                sums[slots[i]] += weights[(first + begin + i) // share]


def count_block(x: Any, axes: tuple[Axis, ...], weights: Array | None, share: int) -> tuple[Array, Array | None]:
    """Count a real block.

    Parameters
    ----------
    x : array
        Shape (n, d) with d = len(axes); NumPy or another array library's.
    axes : tuple of Axis
        Bins of each coordinate.
    weights : numpy.ndarray or None
        Float64 weights, one for every ``share`` samples in a row.

    Returns
    -------
    counts : numpy.ndarray of int64, shape (slots of axis 1, ..., slots of axis d)
        Samples in each slot.
    sums : numpy.ndarray of float64 or None
        Weights added up likewise.
    """
    shape = tuple(axis.slots for axis in axes)
    slots = int(np.prod(shape))
    if not is_numpy(x):
        return _array_api_count(x, axes, weights, share, shape)
    counts = np.zeros((4 if slots <= _COPIES_UP_TO else 1, slots), np.int64)
    sums = np.zeros(0 if weights is None else slots)
    strides = np.array([int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape))])
    w, packed = None if weights is None else frozen(weights), _packed(axes)
    for first, flat in [(0, frozen(x))] if is_flat(x) else scratch_tiles(x, 1):
        _count(flat, len(flat) // len(axes), first, packed, strides, w, share, counts, sums)
    return counts.sum(axis=0).reshape(shape), None if weights is None else sums.reshape(shape)


def _packed(axes: tuple[Axis, ...]) -> tuple[Array, ...]:
    return (
        np.concatenate([axis.padded for axis in axes]),
        np.cumsum([0, *(len(axis.padded) for axis in axes)]),
        np.concatenate([axis.table for axis in axes]),
        np.cumsum([0, *(len(axis.table) for axis in axes)]),
        np.array([axis.ranked for axis in axes]),
        np.array([axis.scale for axis in axes]),
        np.array([axis.steps for axis in axes]),
        np.array([len(axis.edges) - 1 for axis in axes]),
    )


def _array_api_count(
    x: Any, axes: tuple[Axis, ...], weights: Array | None, share: int, shape: tuple[int, ...]
) -> tuple[Array, Array | None]:
    """Do as the Numba kernel by the array API standard and ``bincount``."""
    xp = namespace(x)
    x = xp.astype(x, xp.float64)
    slot = xp.zeros(x.shape[0], dtype=xp.int64)
    for d, axis in enumerate(axes):
        v = x[:, d]
        place = xp.searchsorted(xp.asarray(axis.edges), v, side="right")
        place = place - xp.astype(v == axis.edges[-1], xp.int64)
        slot = slot * axis.slots + xp.where(xp.isnan(v), axis.slots - 1, place)
    slots = int(np.prod(shape))
    counts = to_host(xp.bincount(slot, minlength=slots)).astype(np.int64).reshape(shape)
    if weights is None:
        return counts, None
    return counts, to_host(xp.bincount(slot, xp.asarray(np.repeat(weights, share)), slots)).reshape(shape)
