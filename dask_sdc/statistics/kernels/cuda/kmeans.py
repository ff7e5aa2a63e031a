"""Launches of ``kmeans.cu``."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_sdc.statistics.kernels import to_host
from dask_sdc.statistics.kernels.cuda.device import FOLDER, Device
from dask_sdc.statistics.kernels.cuda.shapes import (
    THREADS,
    Array,
    blocks,
    element,
    fold_block,
    pieces,
    rows_of_parts,
)

__all__ = ["MOST_CLUSTERS", "VARIANTS", "assign", "cuda_lloyd"]

SOURCE = FOLDER / "kmeans.cu"

#: Rows of a tile, one to a thread.
_TILE = 128
#: Centres whose distances a thread has in registers.
_GROUP = 8
#: Shared memory of a block in bytes.
_SHARED = 48 << 10
#: Columns of a partial result before those of the features.
_WEIGHT, _INERTIA, _FAR, _FAR_ROW, _FEATURES = range(5)
#: float64 of the partial results of all parts: 64 MiB.
_PARTIAL = 1 << 23

#: More clusters have no room for one column of their sums in shared memory.
MOST_CLUSTERS = _SHARED // 16

VARIANTS = (
    *(f"{name}<{t}>" for name in ("kmeans_assign", "kmeans_sums") for t in ("float", "double")),
    "kmeans_fold",
    "kmeans_far",
)


def assign(device: Device, x: Array, centres: Array) -> tuple[Array, Array]:
    """Return labels (int32) and squared distances (float64) of the rows of a native block, on the device."""
    (n, d), k = x.shape, len(centres)
    chunk = min(d, 256 // x.dtype.itemsize)
    label, distance = device.xp.empty(n, dtype=device.xp.int32), device.xp.empty(n)
    device.launch(
        SOURCE,
        f"kmeans_assign<{element(x)}>",
        (blocks(n, _TILE),),
        (_TILE,),
        (x, np.int64(n), np.int32(d), centres, np.int32(k), np.int32(chunk), label, distance),
        8 * _GROUP * chunk + _TILE * (chunk | 1) * x.dtype.itemsize,
    )
    return label, distance


def cuda_lloyd(device: Device, x: Array, weights: Array | None, centres: Array) -> tuple[Array, ...]:
    """Return the fields of `dask_sdc.statistics.kernels.kmeans.LloydSums` of a block, on the host.

    Parameters
    ----------
    device : Device
        Where the block lies.
    x : array
        Shape (n, d); any real dtype and layout.
    weights : array or None
        Positive float64 weights of shape (n,).
    centres : numpy.ndarray
        Shape (k, d), float64, on the host; k at most `MOST_CLUSTERS`.
    """
    k, d = centres.shape
    table, far, far_rows = np.zeros((k, _FEATURES + d)), np.full((k, 2), -1.0), np.zeros((k, d))
    far[:, 1] = 0.0
    on_device = device.xp.ascontiguousarray(device.xp.asarray(centres))
    for piece, w in pieces(device, x, weights):
        sums, apart = _piece(device, piece, w, on_device)
        table += sums
        farther = np.flatnonzero(apart[:, 0] > far[:, 0])
        rows = apart[farther, 1].astype(np.int64)
        far[farther, 0] = apart[farther, 0]
        far[farther, 1] = 1.0 if w is None else to_host(w[device.xp.asarray(rows)])
        far_rows[farther] = to_host(piece[device.xp.asarray(rows)])
    columns = table[:, _WEIGHT], table[:, _FEATURES:], table[:, _INERTIA], far[:, 0], far[:, 1], far_rows
    return tuple(np.ascontiguousarray(column) for column in columns)


def _piece(device: Device, x: Array, weights: Array | None, centres: Array) -> tuple[Any, Any]:
    xp, (n, d), k = device.xp, x.shape, len(centres)
    columns = _FEATURES + d
    label, distance = assign(device, x, centres)
    wide = min(32, 1 << (columns - 1).bit_length())
    while k * (wide + 1) * 8 > _SHARED:
        wide //= 2
    down = min(THREADS // wide, _SHARED // (k * (wide + 1) * 8))
    rows, parts = rows_of_parts(n, min(max(_PARTIAL // (k * columns), 16), 1024, -(-n // 256)))
    # Nobody writes the row of a farthest one in a cluster without rows.
    partial = xp.zeros((parts, k, columns))
    device.launch(
        SOURCE,
        f"kmeans_sums<{element(x)}>",
        (parts, -(-columns // wide)),
        (wide, down),
        (
            *(x, weights, label, distance, np.int64(n), np.int32(d), centres, np.int32(k)),
            *(np.int64(rows), np.int64(parts), partial),
        ),
        down * k * (wide + 1) * 8,
    )
    cells = k * columns
    sums, far = xp.empty((2, k, columns)), xp.empty((k, 2))
    across, tall = fold_block(cells)
    device.launch(
        SOURCE,
        "kmeans_fold",
        (-(-cells // across),),
        (across, tall),
        (partial, np.int64(parts), np.int64(cells), sums),
        2 * across * tall * 8,
    )
    far_args = partial, np.int64(parts), np.int32(k), np.int32(d), far
    device.launch(SOURCE, "kmeans_far", (k,), (THREADS,), far_args, 2 * THREADS * 8)
    return to_host(sums[0]), to_host(far)
