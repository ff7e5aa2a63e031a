"""Launches of ``histogram.cu``, and the tables that it looks bins up in."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dask_sdc.statistics.kernels import to_host
from dask_sdc.statistics.kernels.cuda.device import FOLDER, Device, pointer
from dask_sdc.statistics.kernels.cuda.shapes import THREADS, Array, blocks, element, pieces

__all__ = ["VARIANTS", "Table", "cuda_count"]

SOURCE = FOLDER / "histogram.cu"

#: Shared memory of a block in bytes: what every device gives without being asked.
_SHARED = 48 << 10
#: Cells per bin that are tried, finer ones where edges are spaced unevenly.
_CELLS_PER_BIN = (1, 4, 16)

VARIANTS = (
    *(f"histogram_line<{t}, {v}>" for t, wide in (("float", 4), ("double", 2)) for v in (1, wide)),
    *(f"histogram_joint<{t}>" for t in ("float", "double")),
)


class Table(NamedTuple):
    """One axis in the type of the samples, see `dask_sdc.statistics.kernels.histogram.Axis`.

    Parameters
    ----------
    edges : numpy.ndarray
        -inf, the edges rounded up to the type, the last one just above itself, and NaN.
    table : numpy.ndarray of uint32
        Edges in lower cells, for each cell and one above, and the slot of NaN.
    ranked : bool
        Whether cells divide ranks of values instead of values.
    place : numpy.ndarray
        Where cells begin, and cells per unit, shape (2,).
    steps : int
        Steps of the binary search.
    """

    edges: Array
    table: Array
    ranked: bool
    place: Array
    steps: int

    @classmethod
    def of(cls, edges: Array, dtype: np.dtype) -> Table:
        """Prepare rising float64 edges with the cells that need the fewest comparisons."""
        return _tables(edges.tobytes(), dtype.char)

    def plan(self, edges_at: int, table_at: int, stride: int) -> list[int]:
        """Return the integers of the axis, in the order of the kernel."""
        return [edges_at, table_at, int(self.ranked), self.steps, stride, len(self.table) - 2]

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return int(self.edges.nbytes + self.table.nbytes)


@lru_cache(maxsize=64)
def _tables(edges: bytes, char: str) -> Table:
    compared = _compared(np.frombuffer(edges), np.dtype(char))
    choices = [_with_cells(compared, k, ranked) for k in _CELLS_PER_BIN for ranked in (False, True)]
    return min(choices, key=lambda axis: axis.steps)


def _compared(edges: Array, dtype: np.dtype) -> Array:
    """Return for each edge the least value of a type that is not below it, for the last one that is above.

    A value of the type is not below an edge if and only if it is not below that.
    """
    edges = edges.copy()
    edges[-1] = np.nextafter(edges[-1], np.inf) if edges[-1] < np.inf else np.nan
    with np.errstate(over="ignore"):
        near = edges.astype(dtype)
    low = near.astype(np.float64) < edges
    near[low] = np.nextafter(near[low], dtype.type(np.inf))
    return near


def _ranks(values: Array) -> Array:
    """Return ranks as the kernel does: a float's bits as an integer, rounded to a float."""
    integers = np.dtype(f"i{values.dtype.itemsize}")
    bits = values.view(integers)
    with np.errstate(over="ignore"):
        return np.where(bits >= 0, bits, np.iinfo(integers).min - bits).astype(values.dtype)


def _with_cells(compared: Array, per_bin: int, ranked: bool) -> Table:
    n, dtype = len(compared) - 1, compared.dtype
    cells = min(n * per_bin, 1 << 20)
    # No value is above an edge that is not there.
    known = np.where(np.isnan(compared), dtype.type(np.inf), compared)
    points = _ranks(known) if ranked else known
    with np.errstate(over="ignore", invalid="ignore"):
        span = points[-1] - points[0]
        scale = dtype.type(cells) / span if 0 < span < np.inf else dtype.type(0)
        scale = scale if scale < np.inf else dtype.type(0)
        # Edges of uniform bins fall in the middle of cells, clear of rounding.
        origin = points[0] - dtype.type(0.5) / scale if scale > 0 else dtype.type(0)
        place = (points - origin) * scale if scale > 0 else np.zeros_like(points)
    cell = np.clip(np.nan_to_num(place, nan=0.0), 0, cells + 1).astype(np.int64)
    table = np.append(np.searchsorted(cell, np.arange(cells + 2)), n + 2).astype(np.uint32)
    steps = int(np.bincount(cell).max()).bit_length()
    padding = np.full(1 + (1 << steps), np.nan, dtype)
    edges = np.concatenate((np.array([-np.inf], dtype), compared, padding))
    return Table(edges, table, ranked, np.array([origin, scale], dtype), steps)


def cuda_count(
    device: Device, x: Array, edges: tuple[Array, ...], weights: Array | None, share: int
) -> tuple[Array, Array | None]:
    """Count a block; see `dask_sdc.statistics.kernels.histogram.count_block`.

    Parameters
    ----------
    device : Device
        Where the block lies.
    x : array
        Shape (n, d), n >= 1; any real dtype and layout.
    edges : tuple of numpy.ndarray
        Rising float64 edges of each coordinate.
    weights : array or None
        Positive float64 weights, host or device, one for every ``share`` samples in a row.
    share : int
        See there.
    """
    xp, shape = device.xp, tuple(len(e) + 2 for e in edges)
    slots = int(np.prod(shape))
    counts = xp.zeros(slots, dtype=xp.uint64)
    scales, sums = _scales(weights, len(x)), xp.zeros((2, slots), dtype=xp.uint64)
    spread = weights
    if weights is not None and share > 1:
        spread = xp.repeat(xp.asarray(weights), share)
    for piece, w in pieces(device, x, spread):
        axes = [Table.of(e, np.dtype(piece.dtype)) for e in edges]
        copies = 0 if len(axes) > 1 or w is not None else _copies(axes[0], slots)
        if copies:
            _line(device, piece, axes[0], copies, counts)
        else:
            _joint(device, piece, axes, shape, w, scales, counts, sums)
    found = to_host(counts).astype(np.int64).reshape(shape)
    if weights is None:
        return found, None
    high, low = to_host(sums).astype(np.float64).reshape((2, *shape))
    return found, high / scales[0] + low / scales[1] / scales[0]


def _copies(axis: Table, slots: int) -> int:
    """Return how many copies of each counter fit beside the tables in shared memory; 0 is none."""
    room = (_SHARED - axis.nbytes) // (4 * slots)
    return 0 if room < 1 else min(32, 1 << (room.bit_length() - 1))


def _scales(weights: Array | None, n: int) -> tuple[float, float]:
    """Return the units per weight and their fractions: sums of ``n`` of each stay below 2**63."""
    if weights is None:
        return 1.0, 1.0
    bits = 62 - int(n * 1.0).bit_length()
    most = int(np.ceil(np.log2(float(weights.max())))) if len(weights) else 0
    return 2.0 ** min(bits - most, 1000), 2.0 ** min(bits, 52)


def _line(device: Device, x: Array, axis: Table, copies: int, counts: Array) -> None:
    xp, kind = device.xp, element(x)
    vector = 16 // x.dtype.itemsize if pointer(x) % 16 == 0 else 1
    tables = (
        xp.asarray(axis.edges),
        np.int32(len(axis.edges)),
        xp.asarray(axis.table),
        np.int32(len(axis.table)),
    )
    plan = xp.asarray(np.array(axis.plan(0, 0, 1), dtype=np.int64))
    device.launch(
        SOURCE,
        f"histogram_line<{kind}, {vector}>",
        (blocks(x.size, 16 * THREADS * vector, 1024),),
        (THREADS,),
        (
            *(x, np.int64(x.size), *tables, plan, xp.asarray(axis.place)),
            *(np.int32(counts.size), np.int32(copies), counts),
        ),
        axis.nbytes + 4 * counts.size * copies,
    )


def _joint(
    device: Device,
    x: Array,
    axes: list[Table],
    shape: tuple[int, ...],
    weights: Array | None,
    scales: tuple[float, float],
    counts: Array,
    sums: Array,
) -> None:
    xp = device.xp
    starts = [
        np.cumsum([0, *(len(part) for part in parts)]) for parts in zip(*(a[:2] for a in axes), strict=True)
    ]
    strides = [int(np.prod(shape[d + 1 :], dtype=np.int64)) for d in range(len(shape))]
    plan = [axis.plan(int(starts[0][d]), int(starts[1][d]), strides[d]) for d, axis in enumerate(axes)]
    device.launch(
        SOURCE,
        f"histogram_joint<{element(x)}>",
        (blocks(len(x)),),
        (THREADS,),
        (
            *(x, np.int64(len(x)), np.int32(len(axes))),
            xp.asarray(np.concatenate([axis.edges for axis in axes])),
            xp.asarray(np.concatenate([axis.table for axis in axes])),
            xp.asarray(np.array(plan, dtype=np.int64)),
            xp.asarray(np.concatenate([axis.place for axis in axes])),
            *(np.int64(counts.size), weights, np.float64(scales[0]), np.float64(scales[1])),
            *(counts, sums),
        ),
    )
