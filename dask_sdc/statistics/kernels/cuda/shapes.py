"""How blocks are cut into parts: by their shape alone, so that results depend neither on grid nor device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import dask.config
from dask.utils import parse_bytes

from dask_sdc.exceptions import InputError
from dask_sdc.statistics.kernels.cuda.device import Device
from dask_sdc.statistics.kernels.tiles import as_float

__all__ = ["Array", "blocks", "element", "fold_block", "native", "pieces", "rows_of_parts", "workspace"]

Array = Any

#: Threads of most blocks.
THREADS = 256


@cache
def workspace() -> int:
    """Return the bytes that a block is converted in at a time, of ``sdc.device.workspace``.

    Sums are taken piece by piece, so their bits depend on it: it is read once in a process, and part of the
    environment's fingerprint on machines with a GPU.

    Raises
    ------
    InputError
        If it is less than 1 MiB.
    """
    size = parse_bytes(dask.config.get("sdc.device.workspace"))
    if size < 1 << 20:
        raise InputError(f"sdc.device.workspace: expected at least 1 MiB, got {size} bytes")
    return int(size)


def native(x: Array) -> bool:
    """Whether kernels can read a block in place: float32 or float64, C-contiguous."""
    return bool(x.dtype.char in "fd" and x.dtype.isnative and x.flags.c_contiguous)


def element(x: Array) -> str:
    """Return the C++ type of the elements of a native block."""
    return "float" if x.dtype.itemsize == 4 else "double"


def pieces(
    device: Device, x: Array, weights: Array | None, rows: int = 0, offset: int = 0
) -> Iterator[tuple[Array, Array | None]]:
    """Yield native pieces of a block (n, d) with their weights on the device.

    Parameters
    ----------
    device : Device
        Where the block lies.
    x : array
        Shape (n, d); any real dtype and layout. Without rows there are no pieces.
    weights : array or None
        Shape (n,), float64, host or device.
    rows : int
        Most rows of a piece; 0 is all of a native block. Others are converted in pieces of bounded
        size, float16 and integers of up to 16 bits to float32, which holds them exactly, the rest to
        float64.
    offset : int
        Subtracted from 64-bit integers, see `dask_sdc.statistics.kernels.tiles.exact_offset`.
    """
    xp, ready = device.xp, native(x)
    w = None if weights is None else xp.ascontiguousarray(xp.asarray(weights, dtype=xp.float64))
    narrow = x.dtype.kind == "b" or x.dtype.itemsize <= 2 or x.dtype.char == "f"
    most = max(workspace() // (8 * max(x.shape[1], 1)), 1)
    step = max(min(rows or len(x), len(x) if ready else most), 1)
    for start in range(0, len(x), step):
        piece = x[start : start + step]
        if not ready:
            converted = xp.empty(piece.shape, dtype=xp.float32 if narrow else xp.float64)
            as_float(piece, offset, converted)
            piece = converted
        yield piece, None if w is None else w[start : start + step]


def rows_of_parts(n: int, parts: int, multiple: int = 1) -> tuple[int, int]:
    """Return the rows of a part, a multiple of ``multiple``, and how many of at most ``parts`` cover n."""
    rows = -(-n // parts)
    rows = max(-(-rows // multiple), 1) * multiple
    return rows, -(-n // rows)


def fold_block(cells: int) -> tuple[int, int]:
    """Return the threads that fold cells of many parts: side by side on cells, the others down the parts."""
    across = min(32, 1 << max(cells - 1, 0).bit_length())
    return across, THREADS // across


def blocks(count: int, threads: int = THREADS, most: int = 4096) -> int:
    """Return the blocks of a grid-stride loop over ``count`` items."""
    return max(min(-(-count // threads), most), 1)
