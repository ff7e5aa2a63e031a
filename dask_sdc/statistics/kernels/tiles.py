"""Blocks of any dtype and memory layout as flat float tiles, without a copy where there need be none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: Elements of one scratch tile (512 KiB in float64): it stays in the second-level cache.
TILE = 1 << 16
#: Rows spread over a block that say where its mean is: then it is off by more than a standard
#: deviation in hardly one of a million columns of independent samples.
PILOT_ROWS = 32


def is_flat(x: Array) -> bool:
    """Whether kernels can read ``x`` in place: native float32/64, C-contiguous, aligned."""
    return bool(x.dtype.char in "fd" and x.dtype.isnative and x.flags.c_contiguous and x.flags.aligned)


def frozen(x: Array) -> Array:
    """Return a flat read-only view: read-only arrays are another type to Numba, so make all so."""
    flat = x.reshape(-1).view(np.ndarray)
    flat.flags.writeable = False
    return flat


def exact_offset(x: Array) -> int:
    """Return the integer to subtract from 64-bit integers before they become float64.

    Zero where float64 holds every value, or where the spread is so wide that rounding to float64
    is small against it. Otherwise (say, nanoseconds since 1970) rounding would swamp the spread.
    """
    if x.dtype.kind not in "iu" or x.dtype.itemsize < 8 or x.size == 0:
        return 0
    low, high = int(x.min()), int(x.max())
    if max(-low, high) <= 1 << 53 or high - low >= 1 << 62:
        return 0
    return low + (high - low) // 2


def as_float(x: Array, offset: int, out: Array) -> None:
    """Write ``x - offset`` to ``out`` (float64), exactly where float64 can hold it."""
    if offset:
        # Two's complement wraps, so that the difference is right even where an operand does not fit.
        delta = x.astype(np.uint64) - np.uint64(offset % (1 << 64))
        out[...] = delta.view(np.int64)
    else:
        out[...] = x


def scratch_tiles(x: Array, multiple: int, offset: int = 0) -> Iterator[tuple[int, Array]]:
    """Yield ``(first row, flat read-only float64 copy)`` of pieces that cover a real block.

    One scratch buffer serves all pieces. A piece has a multiple of ``multiple`` rows, so that a
    kernel that works in steps of ``multiple`` rows gives the same bits for every memory layout.

    Parameters
    ----------
    x : numpy.ndarray
        Shape (n, ...).
    multiple : int
        Rows per step of the kernel.
    offset : int
        Subtracted from every element, see `exact_offset`.
    """
    width = max(int(np.prod(x.shape[1:], dtype=np.int64)), 1)
    rows = min(max(TILE // width // multiple, 1) * multiple, len(x))
    scratch = np.empty((rows, *x.shape[1:]))
    for first in range(0, len(x), max(rows, 1)):
        piece = scratch[: min(rows, len(x) - first)]
        as_float(x[first : first + rows], offset, piece)
        yield first, frozen(piece)
