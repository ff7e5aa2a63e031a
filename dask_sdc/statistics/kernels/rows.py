"""How a NumPy block reaches the row-tiled kernels: C-contiguous, aligned, native, read-only rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["LANES", "constant", "padded", "pieces"]

Array = np.ndarray[Any, Any]

#: Rows that lie side by side in a tile: 16 features and their scratch stay in a 32 KiB L1 cache.
LANES = 128

#: Rows that are converted at once where a block does not have the layout that the kernels take.
_CONVERTED = 64 * LANES


def constant(array: Array) -> Array:
    """Return a read-only view: blocks off the wire are read-only, and one type compiles once."""
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view


def padded(array: Array, *axes: int) -> Array:
    """Return a read-only float64 copy whose given axes are filled with zeros to a multiple of four.

    Kernels take four features at a time; a zero feature with a zero coefficient changes no result.
    """
    widths = [(0, -size % 4 if axis in axes else 0) for axis, size in enumerate(array.shape)]
    return constant(np.ascontiguousarray(np.pad(np.asarray(array, dtype=np.float64), widths)))


def pieces(x: Array, weights: Array | None) -> Iterator[tuple[Array, Array]]:
    """Yield ``(rows, weights)`` of a block as the kernels take them.

    Parameters
    ----------
    x : numpy.ndarray
        Shape (n, d), any real dtype and layout.
    weights : numpy.ndarray or None
        Shape (n,), float64; None is passed on as an array of length 0.

    Yields
    ------
    rows, weights : numpy.ndarray
        ``rows`` is float32 for a float32 block, else float64. All but the last piece have a multiple
        of `LANES` rows, so that a result does not depend on the layout of the block.
    """
    dtype = np.dtype(np.float32 if x.dtype.newbyteorder("=") == np.float32 else np.float64)
    ready = x.dtype == dtype and x.flags.c_contiguous and x.flags.aligned
    step = max(len(x), 1) if ready else _CONVERTED
    for start in range(0, max(len(x), 1), step):
        rows = np.require(x[start : start + step], dtype=dtype, requirements=["C", "A"])
        w = np.empty(0) if weights is None else weights[start : start + step]
        yield constant(rows), constant(np.require(w, dtype=np.float64, requirements=["C", "A"]))
