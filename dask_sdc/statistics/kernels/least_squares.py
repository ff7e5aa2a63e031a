"""Triangular factors of tall blocks: TSQR (Demmel, Grigori, Hoemmen and Langou 2012, section 3)."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_sdc.statistics.kernels import is_numpy, to_host
from dask_sdc.statistics.kernels.covariance import Centred
from dask_sdc.statistics.kernels.pairs import merge_sums

Array = np.ndarray[Any, Any]


def block_factor(x: Any, y: Any, weights: Array | None, centre: bool) -> dict[str, Any]:
    """Factor the (centred, √w-weighted) columns [x y] of a real block.

    Parameters
    ----------
    x, y : array
        Shapes (n, d) and (n, t), n >= 1; blocks of other array libraries are copied to the host,
        as factoring is a small part of what loading them costs.
    weights : array or None
        Positive float64 weights of shape (n,).
    centre : bool
        Whether columns are taken about their means.

    Returns
    -------
    dict
        ``weight`` float; ``sum`` and ``low`` (d + t,); ``squares`` (d + t,), Σw of squared
        (deviations of) columns; ``factor`` (d + t, d + t), upper triangular, diagonal >= 0.
    """
    tiles = Centred(_side_by_side(x, y), None if weights is None else to_host(weights), centre)
    factor, deviation, squares = _factor(tiles, centre)
    offset = deviation / tiles.weight
    with np.errstate(over="ignore"):
        pilot_missed = centre and np.any(offset**2 * tiles.weight > 0.5 * squares)
    if pilot_missed:
        # The sampled rows did not tell where the mean is, and digits were lost: now it is known.
        tiles.pilot = np.where(np.isfinite(offset), tiles.pilot + offset, 0.0)
        factor, deviation, squares = _factor(tiles, centre)
        offset = deviation / tiles.weight
    s, low = tiles.total(deviation)
    if centre:
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.maximum(squares - tiles.weight * offset**2, 0.0)
    return {"weight": tiles.weight, "sum": s, "low": low, "squares": squares, "factor": factor}


def _side_by_side(x: Any, y: Any) -> Array:
    parts = [part if is_numpy(part) else to_host(part) for part in (x, y)]
    if any(part.dtype.kind in "iu" and part.dtype.itemsize == 8 for part in parts):
        parts = [part.astype(np.float64) for part in parts]
    return np.concatenate(parts, axis=1)


def _factor(tiles: Centred, centre: bool) -> tuple[Array, Array, Array]:
    """Factor tile by tile, with a column √w in front where the mean is to be taken out.

    The first row of such a factor is √W·(1, mean), the rest the factor of the centred columns.
    """
    p = tiles.x.shape[1]
    extra = int(centre)
    factor, deviation, squares = np.zeros((p + extra, p + extra)), np.zeros(p), np.zeros(p)
    for tile, roots in tiles:
        rows = np.concatenate((roots[:, None], tile), axis=1) if centre else tile
        factor = triangle(np.concatenate((factor, rows)))
        with np.errstate(over="ignore", invalid="ignore"):
            deviation += roots @ tile
            squares += np.einsum("ij,ij->j", tile, tile)
    return triangle(factor[extra:, extra:]), deviation, squares


def triangle(a: Array) -> Array:
    """Return the square upper triangular factor of ``a`` (m, p), m >= p, with a diagonal >= 0."""
    if not np.isfinite(a).all():
        return np.full((a.shape[1], a.shape[1]), np.nan)
    r: Array = np.asarray(np.linalg.qr(a, mode="r"))
    r = r * np.where(r.diagonal() < 0, -1.0, 1.0)[:, None]
    return r + 0.0  # no negative zeros, which compare equal and are other bits


def merge_factor(a: dict[str, Any], b: dict[str, Any], centre: bool) -> dict[str, Any]:
    """Merge the factor ``b`` into ``a``; what the means differ by is one more row to factor."""
    fields = ("weight", "sum", "low", "squares", "factor")
    a, b = {f: a[f] for f in fields}, {f: b[f] for f in fields}
    wa, wb = a["weight"], b["weight"]
    if wb == 0.0:
        return a
    if wa == 0.0:
        return {f: np.array(v) if isinstance(v, np.ndarray) else v for f, v in b.items()}
    a = {
        f: np.require(v, np.float64, ["C", "A", "W"]) if isinstance(v, np.ndarray) else v
        for f, v in a.items()
    }
    offset = np.empty(len(a["sum"]))
    b_sum, b_low = (np.require(b[f], np.float64, ["C", "A", "W"]) for f in ("sum", "low"))
    merge_sums(a["sum"], a["low"], wa, b_sum, b_low, wb, offset)
    between = np.sqrt(wa * wb / (wa + wb)) * offset if centre else np.zeros_like(offset)
    a["factor"] = triangle(np.concatenate((a["factor"], b["factor"], between[None, :])))
    a["squares"] += b["squares"] + between**2
    a["weight"] = wa + wb
    return a
