"""Launches of ``attention.cu``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dask_sdc.statistics.kernels.cuda.device import Device

__all__ = ["SPLIT", "VARIANTS", "attend_chunk", "attend_rows", "chunk_memory"]

Array = Any

SOURCE = Path(__file__).with_name("attention.cu")

#: Positions of a split, threads of its block, queries that it takes together.
SPLIT, _THREADS, _QUERIES = 128, 128, 8
#: Rows and keys of a tile of the prefill.
_TILE, _KEYS = 64, 64
#: What stands for no window: more positions than there can be.
_NO_WINDOW = 1 << 40
#: Bytes of the partial results of some rows; rows of a launch are limited by this and by the grid.
_PIECE = 64 << 20
_MOST_ROWS = 65535

VARIANTS = ("attention_splits", "attention_combine", *(f"attention_chunk<{c}>" for c in (4, 8, 16)))


def attend_rows(
    device: Device,
    q: Array,
    layer: Any,
    steps: int,
    length: int,
    sinks: int,
    tree: Array | None,
    at: Array | None = None,
) -> Array:
    """Attend row by row, split along the positions; a row has the same bits in every chunk and batch.

    Parameters
    ----------
    device : Device
        Where the arrays lie.
    q : array
        Shape (B·T, H, W) float32, turned and scaled.
    layer : LayerCache
        Keys and values, those of the chunk among them.
    steps : int
        T.
    length : int
        Positions before the chunk.
    sinks : int
        Positions that every row sees.
    tree : array of int64 or None
        On the device, see `dask_sdc.inference.model.kernels.branches`.
    at : array of int64 or None
        On the device, shape (1,): where the kernel finds the positions before the chunk instead. ``length``
        is then the most that it may be; the bits are those of the true one.

    Returns
    -------
    array
        Shape (B·T, H·W).
    """
    xp, (rows, heads, width) = device.xp, q.shape
    kv_heads, slots = layer.k.shape[1:3]
    group = heads // kv_heads
    splits = -(-(length + steps) // SPLIT)
    out = xp.empty((rows, heads * width), dtype=xp.float32)
    # Whole sequences at a time, or rows of one of them.
    per_row = heads * splits * (width + 2) * 4
    most = max(1, min(_MOST_ROWS, _PIECE // per_row))
    for begin, end, b, t in _pieces(rows, steps, most):
        count = end - begin
        partial = xp.empty((count, heads, splits, width + 2), dtype=xp.float32)
        queries = min(group, _QUERIES)
        branch = None if tree is None else tree[t : t + min(steps, count)]
        device.launch(
            SOURCE,
            "attention_splits",
            (splits, kv_heads * -(-group // _QUERIES), count),
            (_THREADS,),
            (
                *(
                    q[begin:end],
                    layer.k[b:],
                    layer.v[b:],
                    branch,
                    np.int32(0 if tree is None else tree.shape[1]),
                ),
                *(np.int32(min(steps, count)), np.int32(heads), np.int32(kv_heads), np.int32(width)),
                *(
                    np.int64(slots),
                    np.int64(length),
                    at,
                    np.int64(0 if tree is not None else t),
                    np.int64(layer.base),
                ),
                *(np.int64(_NO_WINDOW if layer.window is None else layer.window), np.int32(sinks), partial),
            ),
            4 * (queries * (width + SPLIT + 4 * _THREADS) + 2 * _QUERIES),
        )
        device.launch(
            SOURCE,
            "attention_combine",
            (heads, count),
            (min(_THREADS, width),),
            (partial, np.int32(heads), np.int32(width), np.int32(splits), out[begin:end]),
        )
    return out


def _pieces(rows: int, steps: int, most: int) -> list[tuple[int, int, int, int]]:
    """Return (first row, end, sequence, step of the first row) of launches of at most ``most`` rows."""
    if steps <= most:
        size = most // steps * steps
        return [(i, min(i + size, rows), i // steps, 0) for i in range(0, rows, size)]
    return [
        (b + t, min(b + t + most, b + steps), b // steps, t)
        for b in range(0, rows, steps)
        for t in range(0, steps, most)
    ]


def chunk_memory(width: int) -> int:
    """Return the shared memory in bytes that the prefill of heads of this width takes."""
    return 4 * ((_TILE + _KEYS) * (width + 1) + _TILE * (_KEYS + 1))


def attend_chunk(device: Device, q: Array, layer: Any, steps: int, length: int, sinks: int) -> Array:
    """Attend the rows of a chunk in tiles; parameters and result as of `attend_rows`."""
    xp, (rows, heads, width) = device.xp, q.shape
    batch, kv_heads, slots, _ = layer.k.shape
    out = xp.empty((rows, heads * width), dtype=xp.float32)
    columns = next(c for c in (4, 8, 16) if width <= 16 * c)
    device.launch(
        SOURCE,
        f"attention_chunk<{columns}>",
        (-(-steps // _TILE), heads, batch),
        (256,),
        (
            *(q, layer.k, layer.v, np.int32(steps), np.int32(heads), np.int32(kv_heads), np.int32(width)),
            *(np.int64(slots), np.int64(length), np.int64(layer.base)),
            *(np.int64(_NO_WINDOW if layer.window is None else layer.window), np.int32(sinks), out),
        ),
        chunk_memory(width),
    )
    return out
