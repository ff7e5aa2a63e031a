"""Launches of ``rows.cu``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dask_sdc.statistics.kernels.cuda.device import Device, pointer

__all__ = ["VARIANTS", "activate", "normalise", "turn"]

Array = Any

SOURCE = Path(__file__).with_name("rows.cu")

_THREADS = 256
#: Blocks along the rows of an activation; grids are no larger in this direction.
_MOST_ROWS = 65535

VARIANTS = (
    *(f"row_norm<{v}>" for v in (1, 4)),
    *(f"row_activation<{v}, {gated}>" for v in (1, 4) for gated in ("false", "true")),
    "row_turn",
)


def _vector(size: int, *arrays: Array) -> int:
    """Return how many elements of rows of ``size`` are loaded at once."""
    return 4 if size % 4 == 0 and all(pointer(array) % 16 == 0 for array in arrays) else 1


def _given(bias: Array) -> Array | None:
    return bias if bias.size else None


def normalise(device: Device, x: Array, gain: Array, shift: Array, eps: float) -> Array:
    """Return RMSNorm, or LayerNorm with a shift, of rows (R, D) float32."""
    rows, size = x.shape
    h = device.xp.empty_like(x)
    vector = _vector(size, x)
    threads = min(_THREADS, -(-size // (32 * vector)) * 32)
    args = x, gain, _given(shift), np.int32(size), np.float64(eps), h
    device.launch(SOURCE, f"row_norm<{vector}>", (rows,), (threads,), args, threads // 32 * 8)
    return h


def activate(device: Device, y: Array, bias: Array, gated: bool) -> Array:
    """Return SwiGLU of rows (R, 2 I), or GELU of rows (R, I), of products and a bias that may be empty."""
    rows, size = y.shape[0], y.shape[1] // (2 if gated else 1)
    out = device.xp.empty((rows, size), dtype=device.xp.float32)
    vector = _vector(size, y)
    device.launch(
        SOURCE,
        f"row_activation<{vector}, {'true' if gated else 'false'}>",
        (-(-size // (_THREADS * vector)), min(rows, _MOST_ROWS)),
        (_THREADS,),
        (y, _given(bias), np.int32(rows), np.int32(size), out),
    )
    return out


def turn(
    device: Device,
    qkv: Array,
    bias: Array,
    turns: tuple[Array, Array],
    steps: int,
    heads: int,
    scale: float,
    k: Array,
    v: Array,
    length: int,
    base: int,
    at: Array | None = None,
) -> Array:
    """Turn queries and keys, append keys and values to the cache; return queries (R, H, W).

    Parameters
    ----------
    device : Device
        Where the arrays lie.
    qkv : array
        Products (R, (H + 2·KV)·W) float32 without their bias.
    bias : array
        Of as many elements as a row, or empty.
    turns : tuple of array
        Cosine and sine, shape (T, half).
    steps, heads : int
        T and H.
    scale : float
        Of queries.
    k, v : array
        The cache, shape (B, KV, slots, W).
    length, base : int
        The first row of the chunk goes to the slot ``length - base``.
    at : array of int64 or None
        On the device, shape (1,): where the kernel finds the length instead.
    """
    _, kv_heads, slots, width = k.shape
    rows = qkv.shape[0]
    q = device.xp.empty((rows, heads, width), dtype=device.xp.float32)
    across = min(width, _THREADS)
    half = turns[0].shape[1] if turns[0].size else 0
    tables = tuple(device.xp.ascontiguousarray(table) if half else None for table in turns)
    device.launch(
        SOURCE,
        "row_turn",
        (rows,),
        (across, min(_THREADS // across, heads + 2 * kv_heads)),
        (
            *(
                qkv,
                _given(bias),
                *tables,
                np.int32(steps),
                np.int32(heads),
                np.int32(kv_heads),
                np.int32(width),
            ),
            *(np.int32(half), np.float32(scale), np.int64(slots), np.int64(length)),
            *(at, np.int64(base), q, k, v),
        ),
    )
    return q
