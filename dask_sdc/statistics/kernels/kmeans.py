"""Kernels of Lloyd's round of k-means.

Every CPU kernel uses plain IEEE operations in one fixed order, without contraction or reassociation:
labels, and so counts, are the same bits on every CPU, whatever its vector width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dask_sdc.statistics.kernels import inner, is_numpy, jit, namespace, to_host
from dask_sdc.statistics.kernels.cuda import cupy_device, is_cupy
from dask_sdc.statistics.kernels.cuda.kmeans import MOST_CLUSTERS, cuda_lloyd
from dask_sdc.statistics.kernels.rows import LANES, Array, padded, pieces

__all__ = ["LloydSums", "array_api_lloyd", "labels", "lloyd"]

#: Tiles whose sums are added up before they join the block's: two levels keep the rounding of long
#: sums small.
_GROUP = 32

#: Rows that the array-API path takes at once.
_ROWS = 1 << 20


class LloydSums(NamedTuple):
    """What one block adds to a round, float64 on the host.

    Parameters
    ----------
    counts : numpy.ndarray
        Σw per cluster, shape (k,).
    sums : numpy.ndarray
        Σw·(x − c) per cluster, shape (k, d).
    inertia : numpy.ndarray
        Σw·‖x − c‖² per cluster, shape (k,).
    far_distance : numpy.ndarray
        Largest ‖x − c‖² of a row of positive weight, −1 where the cluster is empty, shape (k,).
    far_weight : numpy.ndarray
        Weight of that row, shape (k,).
    far_rows : numpy.ndarray
        That row, shape (k, d).
    """

    counts: Array
    sums: Array
    inertia: Array
    far_distance: Array
    far_weight: Array
    far_rows: Array


@inner()
def _load(x: Any, start: int, rows: int, tile: Any) -> None:
    """Transpose rows into the tile; lanes past the end repeat the last row."""
    for j in range(x.shape[1]):
        for t in range(rows):
            tile[j, t] = x[start + t, j]
        for t in range(rows, LANES):
            tile[j, t] = x[start + rows - 1, j]


@inner()
def _nearest(tile: Any, centres: Any, distance: Any, best: Any, label: Any) -> None:
    """Find the nearest centre per lane; a tie goes to the lower index, NaN stays in ``best``."""
    for k in range(centres.shape[0]):
        for t in range(LANES):
            distance[t] = 0.0
        for j in range(0, centres.shape[1], 4):
            c0, c1, c2, c3 = centres[k, j], centres[k, j + 1], centres[k, j + 2], centres[k, j + 3]
            x0, x1, x2, x3 = tile[j], tile[j + 1], tile[j + 2], tile[j + 3]
            for t in range(LANES):
                z0, z1, z2, z3 = x0[t] - c0, x1[t] - c1, x2[t] - c2, x3[t] - c3
                distance[t] = distance[t] + z0 * z0 + z1 * z1 + z2 * z2 + z3 * z3
        if k == 0:
            for t in range(LANES):
                best[t] = distance[t]
                label[t] = 0.0
        else:
            number = float(k)
            for t in range(LANES):
                closer = distance[t] < best[t]
                best[t] = distance[t] if closer else best[t]
                label[t] = number if closer else label[t]


@inner()
def _flush(partial: Any, total: Any) -> None:
    for i in range(partial.shape[0]):
        for j in range(partial.shape[1]):
            total[i, j] += partial[i, j]
            partial[i, j] = 0.0


@jit()
def _lloyd(x: Any, weights: Any, centres: Any, total: Any, far: Any, far_rows: Any) -> None:
    """Add a piece to ``total`` (k, 2 + d): counts, inertia, sums; keep the farthest rows in ``far``."""
    n, d = x.shape
    tile = np.zeros((centres.shape[1], LANES))
    distance, best, label = np.empty(LANES), np.empty(LANES), np.empty(LANES)
    partial = np.zeros_like(total)
    for start in range(0, n, LANES):
        rows = min(LANES, n - start)
        _load(x, start, rows, tile)
        _nearest(tile, centres, distance, best, label)
        for t in range(rows):
            k = int(label[t])
            w = weights[start + t] if weights.shape[0] else 1.0
            partial[k, 0] += w
            partial[k, 1] += w * best[t]
            for j in range(d):
                partial[k, 2 + j] += w * (x[start + t, j] - centres[k, j])
            if best[t] > far[k, 0] and w > 0.0:
                far[k, 0] = best[t]
                far[k, 1] = w
                for j in range(d):
                    far_rows[k, j] = x[start + t, j]
        if (start // LANES) % _GROUP == _GROUP - 1:
            _flush(partial, total)
    _flush(partial, total)


@jit()
def _labels(x: Any, centres: Any, out: Any) -> None:
    n = x.shape[0]
    tile = np.zeros((centres.shape[1], LANES))
    distance, best, label = np.empty(LANES), np.empty(LANES), np.empty(LANES)
    for start in range(0, n, LANES):
        rows = min(LANES, n - start)
        _load(x, start, rows, tile)
        _nearest(tile, centres, distance, best, label)
        for t in range(rows):
            out[start + t] = int(label[t])


def lloyd(x: Any, weights: Any, centres: Array) -> LloydSums:
    """Assign the rows of a block to their nearest centres and add them up.

    Parameters
    ----------
    x : array
        Shape (n, d); NumPy or any array-API block, host or device.
    weights : array or None
        Shape (n,), non-negative.
    centres : numpy.ndarray
        Shape (k, d), float64.

    Returns
    -------
    LloydSums
    """
    if is_cupy(x) and len(centres) <= MOST_CLUSTERS:
        return LloydSums(*cuda_lloyd(cupy_device(), x, weights, centres))
    if not is_numpy(x):
        return array_api_lloyd(namespace(x), x, weights, centres)
    k, d = centres.shape
    total, far, far_rows = np.zeros((k, 2 + d)), np.full((k, 2), -1.0), np.zeros((k, d))
    padded_centres = padded(centres, 1)
    for rows, w in pieces(x, weights):
        _lloyd(rows, w, padded_centres, total, far, far_rows)
    far[far[:, 0] < 0, 1] = 0.0
    columns = (total[:, 0], total[:, 2:], total[:, 1], far[:, 0], far[:, 1], far_rows)
    return LloydSums(*(np.ascontiguousarray(column) for column in columns))


def labels(x: Array, centres: Array) -> Array:
    """Return the index of the nearest centre of each row, shape (n,), int64; ties to the lower one."""
    out = np.empty(len(x), dtype=np.int64)
    padded_centres, start = padded(centres, 1), 0
    for rows, _ in pieces(x, None):
        _labels(rows, padded_centres, out[start : start + len(rows)])
        start += len(rows)
    return out


def array_api_lloyd(xp: Any, x: Any, weights: Any, centres: Array) -> LloydSums:
    """`lloyd` for any array library, by its array-API namespace ``xp``."""
    k, d = centres.shape
    sums = LloydSums(
        np.zeros(k), np.zeros((k, d)), np.zeros(k), np.full(k, -1.0), np.zeros(k), np.zeros((k, d))
    )
    for start in range(0, x.shape[0], _ROWS):
        end = min(start + _ROWS, x.shape[0])
        rows = xp.astype(x[start:end, :], xp.float64)
        w = None if weights is None else xp.asarray(weights[start:end], dtype=xp.float64)
        _array_api_rows(xp, rows, xp.ones_like(rows[:, 0]) if w is None else w, centres, sums)
    return sums


def _array_api_rows(xp: Any, x: Any, w: Any, centres: Array, sums: LloydSums) -> None:
    best, label = _array_api_nearest(xp, x, centres)
    for k, centre in enumerate(centres):
        z = x - xp.asarray(centre)
        inside = label == k
        mine = xp.where(inside, w, xp.zeros_like(w))
        sums.counts[k] += float(xp.sum(mine))
        sums.inertia[k] += float(mine @ best)
        sums.sums[k] += to_host(mine @ z)
        apart = xp.where(inside & (w > 0), best, xp.full_like(best, -1.0))
        farthest = int(xp.argmax(apart))
        if float(apart[farthest]) > sums.far_distance[k]:
            sums.far_distance[k] = float(apart[farthest])
            sums.far_weight[k] = float(w[farthest])
            sums.far_rows[k] = to_host(x[farthest, :])


def _array_api_nearest(xp: Any, x: Any, centres: Array) -> tuple[Any, Any]:
    best = label = None
    for k, centre in enumerate(centres):
        z = x - xp.asarray(centre)
        distance = xp.sum(z * z, axis=1)
        if best is None:
            best, label = distance, xp.zeros(distance.shape, dtype=xp.int64)
            continue
        closer = distance < best
        best = xp.where(closer, distance, best)
        label = xp.where(closer, xp.full_like(label, k), label)
    return best, label
