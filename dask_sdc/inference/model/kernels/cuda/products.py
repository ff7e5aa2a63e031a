"""Launches of ``products.cu``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dask_sdc.statistics.kernels.cuda.device import Device, pointer

__all__ = ["VARIANTS", "multiply"]

Array = Any

SOURCE = Path(__file__).with_name("products.cu")

_THREADS = 256
#: Rows that share a read of the weights, where there is more than one.
_ROWS = 8
#: Blocks along the rows; grids are no larger in this direction.
_MOST = 65535

#: What weights of a stored type are in C++: bfloat16 comes as uint16, float16 as int16.
_TYPES = {"float32": "float", "uint16": "unsigned short", "int16": "short"}

VARIANTS = tuple(
    f"row_product<{kind}, {whole}, {rows}>"
    for kind in _TYPES.values()
    for whole in ("false", "true")
    for rows in (1, _ROWS)
)


def multiply(
    device: Device, x: Array, weight: Array, bias: Array | None = None, add: Array | None = None
) -> Array:
    """Return ``x · wᵀ + bias + add``; a row has the same bits whatever rows come with it.

    Parameters
    ----------
    device : Device
        Where the arrays lie.
    x : array
        Rows (R, D) float32, C-contiguous.
    weight : array
        Shape (O, K) in storage type, K >= D a multiple of 16; columns from D on are zero.
    bias : array or None
        Shape (O,) float32; an empty one is none.
    add : array or None
        Shape (R, O) float32.
    """
    (rows, size), (outputs, pitch) = x.shape, weight.shape
    y = device.xp.empty((rows, outputs), dtype=device.xp.float32)
    together = 1 if rows == 1 else _ROWS
    whole = "true" if size % 4 == 0 and pointer(x) % 16 == 0 else "false"
    device.launch(
        SOURCE,
        f"row_product<{_TYPES[str(weight.dtype)]}, {whole}, {together}>",
        (-(-outputs // (_THREADS // 32)), min(-(-rows // together), _MOST)),
        (_THREADS,),
        (
            *(x, weight, bias if bias is not None and bias.size else None, add),
            *(np.int32(rows), np.int32(size), np.int32(pitch), np.int32(outputs), y),
        ),
    )
    return y
