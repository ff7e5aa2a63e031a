"""Launches of ``scatter.cu`` around the matrix products of cuBLAS."""

from __future__ import annotations

import numpy as np

from dask_sdc.statistics.kernels import to_host
from dask_sdc.statistics.kernels.cuda.device import FOLDER, Device
from dask_sdc.statistics.kernels.cuda.shapes import THREADS, Array, blocks, element, pieces

__all__ = ["VARIANTS", "accumulate", "centred", "cuda_products"]

SOURCE = FOLDER / "scatter.cu"

#: float64 of a centred piece: 16 MiB, which stay in the second-level cache between centring and product.
_PIECE = 1 << 21

VARIANTS = ("scatter_centre<float>", "scatter_centre<double>", "scatter_add")


def centred(device: Device, x: Array, pilot: Array, roots: Array | None, out: Array) -> Array:
    """Write roots·(x - pilot) of a native piece (n, d) to the first n rows of ``out``, and return them."""
    n, d = x.shape
    across = min(1 << (d - 1).bit_length(), 128)
    down = THREADS // across
    z = out[:n]
    device.launch(
        SOURCE,
        f"scatter_centre<{element(x)}>",
        (blocks(d, across), blocks(n, 4 * down, 2048)),
        (across, down),
        (x, pilot, roots, np.int64(n), np.int64(d), z),
    )
    return z


def accumulate(device: Device, product: Array, high: Array, low: Array) -> None:
    """Add a product to the pair (high, low) in place."""
    args = device.xp.ascontiguousarray(product), np.int64(product.size), high, low
    device.launch(SOURCE, "scatter_add", (blocks(product.size),), (THREADS,), args)


def cuda_products(
    device: Device, x: Array, pilot: Array, roots: Array | None, vector: Array | None, offset: int = 0
) -> tuple[Array, Array, Array | None]:
    """Scatter and sums of a block about a pilot, piece by piece.

    Parameters
    ----------
    device : Device
        Where the block lies.
    x : array
        Shape (n, d), n >= 1; any real dtype and layout.
    pilot : numpy.ndarray
        Shape (d,), float64, on the host.
    roots : numpy.ndarray or None
        √w, shape (n,), float64, on the host.
    vector : numpy.ndarray or None
        Of the check, shape (d,), on the host.
    offset : int
        Subtracted from 64-bit integers, before the pilot.

    Returns
    -------
    scatter : numpy.ndarray
        Σw(x - pilot)(x - pilot)ᵀ, shape (d, d).
    deviation : numpy.ndarray
        Σw(x - pilot), shape (d,).
    check : numpy.ndarray or None
        The scatter times the vector by products that never form it, shape (d,).
    """
    xp, d = device.xp, x.shape[1]
    rows = max(_PIECE // d, 1)
    scatter, deviation, check = xp.zeros((2, d, d)), xp.zeros((2, d)), xp.zeros((2, d))
    z = xp.empty((min(rows, len(x)), d))
    centre, v = xp.asarray(pilot), None if vector is None else xp.asarray(vector)
    for piece, root in pieces(device, x, roots, rows, offset):
        tile = centred(device, piece, centre, root, z)
        accumulate(device, xp.matmul(tile.T, tile), *scatter)
        accumulate(device, tile.sum(axis=0) if root is None else root @ tile, *deviation)
        if v is not None:
            accumulate(device, (tile @ v) @ tile, *check)
    return (
        to_host(scatter[0] + scatter[1]),
        to_host(deviation[0] + deviation[1]),
        None if v is None else to_host(check[0] + check[1]),
    )
