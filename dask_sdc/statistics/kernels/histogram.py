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
#: Most edges in a cell of an axis: what a sample is compared with at worst.
_MOST_IN_CELL = 4


@dataclass(frozen=True)
class Axis:
    """One axis of n bins [e₀, e₁), …, [e₍ₙ₋₁₎, eₙ], and slots for what lies below, above and is NaN.

    A sample is compared with few edges only: uniform cells say how many edges are surely below it.
    As the cell of a value never falls when the value rises, those are the edges of lower cells,
    whatever rounding does.

    Attributes
    ----------
    edges : numpy.ndarray
        n + 1 rising float64 edges.
    padded : numpy.ndarray
        -inf, the edges, and NaN, which nothing compares with, up to one more than a power of two.
    scale : float
        Cells per unit; 0 where edges are spaced too unevenly for cells: then search.
    table : numpy.ndarray of uint32
        Edges in lower cells, for each cell and one more on both sides, and the slot of NaN.
    rounds : int
        Most edges in a cell.
    """

    edges: Array
    padded: Array
    scale: float
    table: Array
    rounds: int

    @classmethod
    def of(cls, edges: Array) -> Axis:
        """Prepare rising float64 edges."""
        n = len(edges) - 1
        size = 1 << (n + 2).bit_length()
        padded = np.concatenate(([-np.inf], edges, np.full(size - len(edges), np.nan)))
        for cells in (n, 4 * n, 16 * n):
            with np.errstate(all="ignore"):
                scale = float(cells / (edges[-1] - edges[0]))
                if not 0 < scale < np.inf:
                    break
                cell = np.floor(np.clip((edges - edges[0]) * scale, -1.0, cells))
            rounds = int(np.bincount(cell.astype(np.int64) + 1).max())
            if rounds <= _MOST_IN_CELL:
                table = np.searchsorted(cell, np.arange(-1, cells + 1), side="left")
                return cls(edges, padded, scale, np.append(table, n + 2).astype(np.uint32), rounds)
        return cls(edges, padded, 0.0, np.zeros(1, np.uint32), 0)

    @property
    def slots(self) -> int:
        """Slots: below, the bins, above, NaN."""
        return len(self.edges) + 2


@jit()
def _guess(flat, at, step, n, padded, bins, scale, table, rounds, stride, slots, cell):  # type: ignore[no-untyped-def]
    """Add ``stride`` times the slot of each sample: the edges in lower cells, then compare."""
    low, high, top = padded[1], padded[bins + 1], float(len(table) - 3)
    nan = float(len(table) - 2)
    for i in range(n):
        v = np.float64(flat[at + i * step])
        t = (v - low) * scale
        t = t if t > -1.0 else -1.0
        t = t if t < top else top
        t = nan if v != v else t
        cell[i] = np.uint32(np.int32(np.floor(t)) + np.int32(1))
    for i in range(n):
        v = np.float64(flat[at + i * step])
        slot = np.uint64(table[cell[i]])
        for _ in range(rounds):
            slot += np.uint64(v >= padded[slot + np.uint64(1)])
        slots[i] += np.uint64(stride) * (slot - np.uint64(v == high))  # the last bin is closed


@jit()
def _search(flat, at, step, n, padded, bins, stride, slots):  # type: ignore[no-untyped-def]
    """Add ``stride`` times the slot of each sample by a binary search without branches."""
    high = padded[bins + 1]
    for i in range(n):
        v = np.float64(flat[at + i * step])
        slot, half = np.uint64(0), np.uint64((padded.size - 1) // 2)
        while half > np.uint64(0):
            slot += half * np.uint64(v >= padded[slot + half])
            half >>= np.uint64(1)
        slot -= np.uint64(v == high)
        slots[i] += np.uint64(stride) * (slot + np.uint64(bins + 2) * np.uint64(v != v))


@jit()
def _count(flat, n, first, axes, strides, weights, share, counts, sums):  # type: ignore[no-untyped-def]
    """Count ``n`` samples, the first of which has the weight first // share.

    ``axes`` holds, one axis after the other, padded edges and where they start, bins, scales,
    tables and where they start, and rounds. ``counts`` has shape (copies, slots).
    """
    padded, starts, bins, scales, tables, cells, rounds = axes
    dims, copies = len(bins), counts.shape[0]
    slots, cell = np.empty(_TILE, np.uint64), np.empty(_TILE, np.uint32)
    for begin in range(0, n, _TILE):
        size = min(_TILE, n - begin)
        slots[:] = 0
        for d in range(dims):
            edges, at = padded[starts[d] : starts[d + 1]], begin * dims + d
            if scales[d] > 0.0:
                table = tables[cells[d] : cells[d + 1]]
                _guess(flat, at, dims, size, edges, bins[d], scales[d], table, rounds[d], strides[d], slots, cell)
            else:
                _search(flat, at, dims, size, edges, bins[d], strides[d], slots)
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
        np.array([len(axis.edges) - 1 for axis in axes]),
        np.array([axis.scale for axis in axes]),
        np.concatenate([axis.table for axis in axes]),
        np.cumsum([0, *(len(axis.table) for axis in axes)]),
        np.array([axis.rounds for axis in axes]),
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
