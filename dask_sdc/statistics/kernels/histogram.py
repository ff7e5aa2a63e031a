"""Which bin a sample falls in, exactly as comparing it with the edges says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_sdc.statistics.kernels import inner, is_numpy, jit, namespace, to_host
from dask_sdc.statistics.kernels.cuda import cupy_device, is_cupy
from dask_sdc.statistics.kernels.cuda.histogram import cuda_count
from dask_sdc.statistics.kernels.tiles import frozen, is_flat, scratch_tiles

Array = np.ndarray[Any, Any]

#: Samples that are located before they are counted: their bins stay in the first-level cache.
_TILE = 1024
#: Up to this many bins, neighbours are counted in four copies: equal bins in a row would wait for
#: each other's store.
_COPIES_UP_TO = 1 << 12
#: How near to an edge, in bins, a value of a uniform axis is compared with it.
_NEAR = 1e-9
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
        -inf, the edges, the last one moved up by one float64 as its bin is closed, and NaN, which
        nothing compares with.
    table : numpy.ndarray of uint32
        Edges in lower cells, for each cell and one above, and the slot of NaN.
    ranked : bool
        Whether cells divide `_ranks` of values instead of values.
    origin, scale : float
        Where cells begin, and cells per unit.
    steps : int
        Steps of the binary search.
    aligned : float
        Origin that puts edge k within `_NEAR` / 2 of k + 1 cells, or NaN where there is none: then a
        value that is not that near to a whole number of cells needs no comparison at all.
    """

    edges: Array
    padded: Array
    table: Array
    ranked: bool
    origin: float
    scale: float
    steps: int
    aligned: float

    @classmethod
    def of(cls, edges: Array) -> Axis:
        """Prepare rising float64 edges with the cells that need the fewest comparisons."""
        choices = [cls._with_cells(edges, k, ranked) for k in _CELLS_PER_BIN for ranked in (False, True)]
        return min(choices, key=lambda axis: axis.steps)

    @classmethod
    def _with_cells(cls, edges: Array, per_bin: int, ranked: bool) -> Axis:
        n = len(edges) - 1
        cells = min(n * per_bin, 1 << 20)
        points = _ranks_of(edges) if ranked else edges
        with np.errstate(over="ignore", invalid="ignore"):
            span = points[-1] - points[0]
            scale = float(cells / span) if 0 < span < np.inf and cells / span < np.inf else 0.0
            # Edges of uniform bins fall in the middle of cells, clear of rounding.
            origin = float(points[0] - 0.5 / scale) if scale else 0.0
            place = (points - origin) * scale if scale else np.zeros(n + 1)
        cell = np.clip(place, 0.0, cells + 1.0).astype(np.int64)
        table = np.append(np.searchsorted(cell, np.arange(cells + 2)), n + 2).astype(np.uint32)
        steps = int(np.bincount(cell).max()).bit_length()
        top = np.nextafter(edges[-1], np.inf) if edges[-1] < np.inf else np.nan
        padded = np.concatenate(([-np.inf], edges[:-1], [top], np.full(1 + (1 << steps), np.nan)))
        aligned = np.nan if ranked or per_bin > 1 else _aligned_origin(edges, scale)
        return cls(edges, padded, table, ranked, origin, scale, steps, aligned)

    @property
    def slots(self) -> int:
        """Slots: below, the bins, above, NaN."""
        return len(self.edges) + 2


def _aligned_origin(edges: Array, scale: float) -> float:
    if scale == 0.0:
        return np.nan
    aligned = float(edges[0] - 1.0 / scale)
    off = (edges - aligned) * scale - np.arange(1.0, len(edges) + 1)
    return aligned if np.abs(off).max() < _NEAR / 2 else np.nan


@inner()
def _ranks(values: Any) -> Any:
    """Rank float64 values among all float64: a piecewise linear logarithm on both sides of zero."""
    bits, ranks = values.view(np.int64), np.empty(len(values))
    for i in range(len(values)):
        ranks[i] = np.float64(bits[i] if bits[i] >= 0 else np.int64(-9223372036854775808) - bits[i])
    return ranks


@jit()
def _ranks_of(values: Any) -> Any:
    return _ranks(values)


@inner()
def _cells(values: Any, points: Any, axis: Any, cell: Any) -> None:
    """Write the place in the table of each value, of which ``points`` are the ranks or itself."""
    table, origin, scale = axis[1], axis[3], axis[4]
    top, nan = float(len(table) - 2), float(len(table) - 1)
    for i in range(len(values)):
        t = (points[i] - origin) * scale
        t = t if t > 0.0 else 0.0
        t = t if t < top else top
        t = nan if values[i] != values[i] else t
        cell[i] = np.uint32(np.int32(t))


@inner()
def _slots(values: Any, axis: Any, stride: Any, cell: Any, slots: Any) -> None:
    """Add ``stride`` times the slot of each value: the edges in lower cells, then a search."""
    padded, table, ranked, _, _, steps = axis
    _cells(values, _ranks(values) if ranked else values, axis, cell)
    for i in range(len(values)):
        cell[i] = table[cell[i]]
    half = np.uint32(1) << np.uint32(steps - 1)
    while half > 0:
        # Step by step over all values: searches of neighbours do not wait for each other.
        for i in range(len(values)):
            cell[i] += half * np.uint32(values[i] >= padded[np.uint64(cell[i]) + np.uint64(half)])
        half >>= np.uint32(1)
    for i in range(len(values)):
        slots[i] += np.uint64(stride) * np.uint64(cell[i])


@inner()
def _count_uniform(values: Any, axis: Any, aligned: Any, cell: Any, counts: Any) -> Any:
    """Count the values of a single uniform axis, or return False if one of them is near an edge."""
    scale, nan = axis[4], float(len(axis[1])) - 0.5
    near = 0
    for i in range(len(values)):
        t = (values[i] - aligned) * scale
        t = t if t > 0.5 else 0.5
        t = t if t < nan - 1.0 else nan - 1.0
        t = nan if values[i] != values[i] else t
        near += abs(t - np.floor(t) - 0.5) > 0.5 - _NEAR
        cell[i] = np.uint32(np.int32(t))
    if near > 0:
        return False
    c0, c1, c2, c3 = counts[0], counts[1], counts[2], counts[3]
    even = len(values) // 4 * 4
    for i in range(0, even, 4):
        c0[cell[i]] += 1
        c1[cell[i + 1]] += 1
        c2[cell[i + 2]] += 1
        c3[cell[i + 3]] += 1
    for i in range(even, len(values)):
        c0[cell[i]] += 1
    return True


@inner()
def _count_line(values: Any, axis: Any, cell: Any, counts: Any) -> None:
    """Count the values of a single axis of one step, in four copies."""
    padded, table, ranked, _, _, _ = axis
    _cells(values, _ranks(values) if ranked else values, axis, cell)
    for i in range(len(values)):
        cell[i] = table[cell[i]]
    c0, c1, c2, c3 = counts[0], counts[1], counts[2], counts[3]
    one, even = np.uint64(1), len(values) // 4 * 4
    for i in range(0, even, 4):
        s0, s1 = np.uint64(cell[i]), np.uint64(cell[i + 1])
        s2, s3 = np.uint64(cell[i + 2]), np.uint64(cell[i + 3])
        c0[s0 + np.uint64(values[i] >= padded[s0 + one])] += 1
        c1[s1 + np.uint64(values[i + 1] >= padded[s1 + one])] += 1
        c2[s2 + np.uint64(values[i + 2] >= padded[s2 + one])] += 1
        c3[s3 + np.uint64(values[i + 3] >= padded[s3 + one])] += 1
    for i in range(even, len(values)):
        slot = np.uint64(cell[i])
        c0[slot + np.uint64(values[i] >= padded[slot + one])] += 1


@jit()
def _count(
    flat: Any, n: Any, first: Any, axes: Any, strides: Any, weights: Any, share: Any, counts: Any, sums: Any
) -> Any:
    """Count ``n`` samples, the first of which has the weight first // share.

    ``axes`` holds the fields of one axis after the other, arrays with where they start;
    ``counts`` has shape (copies, slots).
    """
    padded, starts, tables, cells, ranked, origins, scales, steps, aligned = axes
    dims, copies = len(steps), len(counts)
    simple = dims == 1 and steps[0] == 1 and copies == 4 and weights is None
    values, cell, slots = np.empty(_TILE), np.empty(_TILE, np.uint32), np.empty(_TILE, np.uint64)
    for begin in range(0, n, _TILE):
        size = min(_TILE, n - begin)
        slots[:] = 0
        for d in range(dims):
            for i in range(size):
                values[i] = flat[(begin + i) * dims + d]
            table = tables[cells[d] : cells[d + 1]]
            edges = padded[starts[d] : starts[d + 1]]
            axis = edges, table, ranked[d], origins[d], scales[d], steps[d]
            if simple:
                even_spaced = aligned[0] == aligned[0]
                if not (even_spaced and _count_uniform(values[:size], axis, aligned[0], cell, counts)):
                    _count_line(values[:size], axis, cell, counts)
            else:
                _slots(values[:size], axis, strides[d], cell, slots)
        if simple:
            continue
        even = size - size % copies
        for i in range(0, even, copies):
            for k in range(copies):
                counts[k, slots[i + k]] += 1
        for i in range(even, size):
            counts[0, slots[i]] += 1
        if weights is not None:
            for i in range(size):
                sums[slots[i]] += weights[(first + begin + i) // share]


def count_block(
    x: Any, axes: tuple[Axis, ...], weights: Array | None, share: int
) -> tuple[Array, Array | None]:
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
    if is_cupy(x):
        return cuda_count(cupy_device(), x, tuple(axis.edges for axis in axes), weights, share)
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
        np.array([axis.origin for axis in axes]),
        np.array([axis.scale for axis in axes]),
        np.array([axis.steps for axis in axes]),
        np.array([axis.aligned for axis in axes]),
    )


def _array_api_count(
    x: Any, axes: tuple[Axis, ...], weights: Array | None, share: int, shape: tuple[int, ...]
) -> tuple[Array, Array | None]:
    """Do as the Numba kernel by the array API standard; it has no ``bincount``, so the host counts."""
    xp = namespace(x)
    x = xp.astype(x, xp.float64)
    slot = xp.zeros(x.shape[0], dtype=xp.int64)
    for d, axis in enumerate(axes):
        v = x[:, d]
        place = xp.astype(xp.searchsorted(xp.asarray(axis.edges), v, side="right"), xp.int64)
        place = place - xp.astype(v == float(axis.edges[-1]), xp.int64)
        slot = slot * axis.slots + xp.where(xp.isnan(v), xp.asarray(axis.slots - 1, dtype=xp.int64), place)
    slots, found = int(np.prod(shape)), to_host(slot)
    counts = np.bincount(found, minlength=slots).reshape(shape)
    if weights is None:
        return counts, None
    return counts, np.bincount(found, np.repeat(to_host(weights), share), slots).reshape(shape)
