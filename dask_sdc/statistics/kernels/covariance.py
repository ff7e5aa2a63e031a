"""Scatter matrices: BLAS on tiles that are centred while they are in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from dask_sdc.statistics.kernels import is_numpy, namespace, to_host
from dask_sdc.statistics.kernels.cuda import Device, cupy_device, is_cupy
from dask_sdc.statistics.kernels.cuda.scatter import cuda_products
from dask_sdc.statistics.kernels.pairs import merge_sums, scaled
from dask_sdc.statistics.kernels.tiles import PILOT_ROWS, TILE, as_float, exact_offset

Array = np.ndarray[Any, Any]

#: From this width on the matrix product is checked on every shard.
CHECKED_FROM = 128
#: Least rows of a tile: fewer leave BLAS too little to do between two additions of its result.
_ROWS = 2048


def check_vector(d: int) -> Array:
    """Return the fixed vector of the product check, |v| in [0.5, 1.5), shape (d,).

    A random vector that every shard shares (Freivalds 1977), so that the check of a merged state
    is the merged check.
    """
    rng = np.random.default_rng(d)
    v: Array = rng.choice([-1.0, 1.0], d) * rng.uniform(0.5, 1.5, d)
    return v


class Centred:
    """Tiles of √w·(x - pilot) of a real NumPy block (n, d), in one scratch buffer.

    Parameters
    ----------
    x : numpy.ndarray
        Shape (n, d), n >= 1.
    weights : numpy.ndarray or None
        Positive float64 weights of shape (n,).
    centre : bool
        Whether to subtract a pilot near the mean.
    """

    def __init__(self, x: Array, weights: Array | None, centre: bool = True) -> None:
        self.x = x
        self.roots = None if weights is None else np.sqrt(weights)
        self.weight = float(len(x) if weights is None else weights.sum())
        self.offset = exact_offset(x) if centre else 0
        self.pilot = self._sample_mean() if centre else np.zeros(x.shape[1])

    def _sample_mean(self) -> Array:
        rows = np.unique(np.linspace(0, len(self.x) - 1, min(len(self.x), PILOT_ROWS)).astype(np.int64))
        sample = np.empty((len(rows), self.x.shape[1]))
        as_float(self._sample(rows), self.offset, sample)
        with np.errstate(invalid="ignore", over="ignore"):
            # About the first row, so that the pilot of a constant column is its value.
            pilot = sample[0] + (sample - sample[0]).mean(axis=0)
        return np.where(np.isfinite(pilot), pilot, 0.0)

    def _sample(self, rows: Array) -> Array:
        return self.x[rows]

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        """Yield ``(tile, roots)`` of shapes (r, d) and (r,), valid until the next one."""
        n, d = self.x.shape
        step = min(max(TILE // d, _ROWS), n)
        scratch, ones = np.empty((step, d)), np.ones(step)
        for first in range(0, n, step):
            piece = self.x[first : first + step]
            tile = scratch[: len(piece)]
            self._subtract(piece, tile)
            if self.roots is None:
                yield tile, ones[: len(tile)]
            else:
                roots = self.roots[first : first + step]
                tile *= roots[:, None]
                yield tile, roots

    def _subtract(self, piece: Array, tile: Array) -> None:
        """Write ``piece - pilot`` to ``tile``."""
        even = 0
        if self.offset:
            as_float(piece, self.offset, tile)
            piece = tile
        elif piece.flags.c_contiguous:
            # Rows side by side: NumPy's inner loop would be no longer than one row.
            d = piece.shape[1]
            repeat = max(256 // d, 1)
            even = len(piece) // repeat * repeat
            wide = piece[:even].reshape(-1, repeat * d)
            np.subtract(wide, np.tile(self.pilot, repeat), out=tile[:even].reshape(wide.shape))
        np.subtract(piece[even:], self.pilot, out=tile[even:])

    def products(self) -> tuple[Array, Array, Array | None]:
        """Return scatter and sums about the pilot, and from `CHECKED_FROM` on the check."""
        d = self.x.shape[1]
        vector = check_vector(d) if d >= CHECKED_FROM else None
        scatter, product = np.zeros((d, d)), np.empty((d, d))
        deviation, check = np.zeros(d), None if vector is None else np.zeros(d)
        with np.errstate(invalid="ignore", over="ignore"):
            for tile, roots in self:
                scatter += np.matmul(tile.T, tile, out=product)  # NumPy calls syrk: half the work, symmetric
                deviation += roots @ tile
                if vector is not None:
                    check += (tile @ vector) @ tile
        return scatter, deviation, check

    def total(self, deviation: Array) -> tuple[Array, Array]:
        """Return Σwx as pairs, given Σw·(x - pilot)."""
        s, low = scaled(self.pilot, np.full(len(self.pilot), self.weight), deviation)
        if self.offset:
            for i in range(len(s)):
                exact = Fraction(float(s[i])) + Fraction(float(low[i])) + Fraction(self.weight) * self.offset
                s[i] = float(exact)
                low[i] = float(exact - Fraction(float(s[i])))
        return s, low


class DeviceCentred(Centred):
    """`Centred` of a block of a CUDA device, which leaves it in sums only.

    Parameters
    ----------
    device : Device
        Where the block lies.
    x : array
        Shape (n, d), n >= 1.
    weights : array or None
        Positive float64 weights of shape (n,), where the block is.
    """

    def __init__(self, device: Device, x: Any, weights: Array | None) -> None:
        self.device = device
        super().__init__(x, weights)

    def _sample(self, rows: Array) -> Array:
        return to_host(self.x[self.device.xp.asarray(rows)])

    def products(self) -> tuple[Array, Array, Array | None]:
        """Return scatter and sums about the pilot, and from `CHECKED_FROM` on the check."""
        d = self.x.shape[1]
        vector = check_vector(d) if d >= CHECKED_FROM else None
        return cuda_products(self.device, self.x, self.pilot, self.roots, vector, self.offset)


def block_scatter(x: Any, weights: Array | None) -> dict[str, Any]:
    """Weight, sums and scatter about the mean of a real block.

    Parameters
    ----------
    x : array
        Shape (n, d), n >= 1 and d >= 1; NumPy or another array library's.
    weights : array or None
        Positive float64 weights of shape (n,).

    Returns
    -------
    dict
        ``weight`` float; ``sum`` and ``low`` (d,); ``scatter`` (d, d), exactly symmetric; ``check``
        (d,), the scatter times `check_vector` by products that never form the matrix, or None.
    """
    if not is_numpy(x) and not is_cupy(x):
        return _array_api_scatter(x, weights)
    tiles = Centred(x, weights) if is_numpy(x) else DeviceCentred(cupy_device(), x, weights)
    return scatter_of(tiles)


def scatter_of(tiles: Centred) -> dict[str, Any]:
    """Return what `block_scatter` does of a block that is to be centred."""
    scatter, deviation, check = tiles.products()
    offset = deviation / tiles.weight
    with np.errstate(over="ignore"):
        pilot_missed = np.any(offset**2 * tiles.weight > 0.5 * scatter.diagonal())
    if pilot_missed:
        # The sampled rows did not tell where the mean is, and digits were lost: now it is known.
        tiles.pilot = np.where(np.isfinite(offset), tiles.pilot + offset, 0.0)
        scatter, deviation, check = tiles.products()
        offset = deviation / tiles.weight
    return _about_mean(tiles.weight, tiles.total(deviation), scatter, check, offset)


def _about_mean(
    weight: float, sums: tuple[Array, Array], scatter: Array, check: Array | None, offset: Array
) -> dict[str, Any]:
    with np.errstate(invalid="ignore", over="ignore"):
        scatter -= np.outer(offset * weight, offset)
        scatter = np.maximum(scatter, scatter.T)
        diagonal = np.einsum("ii->i", scatter)
        np.maximum(diagonal, 0.0, out=diagonal)
        if check is not None:
            check = check - offset * (weight * (offset @ check_vector(len(offset))))
    return {"weight": weight, "sum": sums[0], "low": sums[1], "scatter": scatter, "check": check}


def _array_api_scatter(x: Any, weights: Array | None) -> dict[str, Any]:
    xp = namespace(x)
    x = xp.astype(x, xp.float64)
    w = xp.ones(x.shape[0], dtype=xp.float64) if weights is None else xp.asarray(weights)
    weight = float(xp.sum(w))
    mean = w @ x / weight
    z = (x - mean) * xp.sqrt(w)[:, None]
    deviation = to_host(xp.sqrt(w) @ z)
    d = x.shape[1]
    vector = xp.asarray(check_vector(d)) if d >= CHECKED_FROM else None
    check = None if vector is None else to_host((z @ vector) @ z)
    sums = scaled(to_host(mean), np.full(d, weight), deviation)
    return _about_mean(weight, sums, to_host(xp.matmul(z.T, z)).copy(), check, deviation / weight)


def merge_scatter(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Merge the scatter ``b`` into ``a`` (Chan, Golub and LeVeque 1983, eq. 2.1b), reusing its memory."""
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
    scaled_offset = offset * (wa * wb / (wa + wb))
    outer = np.outer(scaled_offset, offset)
    a["scatter"] += b["scatter"]
    a["scatter"] += np.maximum(outer, outer.T)  # the two triangles may differ in the last bit
    if a["check"] is not None:
        a["check"] += b["check"] + scaled_offset * (offset @ check_vector(len(offset)))
    a["weight"] = wa + wb
    return a
