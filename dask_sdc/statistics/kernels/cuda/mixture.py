"""Launches of ``mixture.cu`` and of what stands around the matrix products of full and tied components."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_sdc.statistics.kernels import to_host
from dask_sdc.statistics.kernels.cuda.device import FOLDER, Device
from dask_sdc.statistics.kernels.cuda.scatter import accumulate, centred
from dask_sdc.statistics.kernels.cuda.shapes import (
    THREADS,
    Array,
    blocks,
    element,
    fold_block,
    pieces,
    rows_of_parts,
)

__all__ = ["VARIANTS", "cuda_density", "cuda_expectation"]

SOURCE = FOLDER / "mixture.cu"

#: Kinds of components, as of `dask_sdc.statistics.kernels.mixture_cpu`.
_DIAGONAL, _FULL, _TIED = 0, 1, 2
#: Rows of a tile, one to a thread, and components whose distances a thread has in registers.
_TILE, _GROUP = 128, 8
#: float64 of the log densities of a piece, or of its centred rows: 32 MiB.
_PIECE = 1 << 22

VARIANTS = (
    *(f"{name}<{t}>" for name in ("mixture_joint", "mixture_sums") for t in ("float", "double")),
    "mixture_normalise",
    "mixture_fold",
)


class _Model:
    """A mixture on the device, and the scratch of its pieces.

    ``components`` has the fields of `dask_sdc.statistics.kernels.mixture.Components`.
    """

    def __init__(self, device: Device, components: Any, n: int) -> None:
        xp = device.xp
        self.device, self.kind = device, components.kind
        self.k, self.d = components.means.shape
        self.means, self.factors, self.constants, self.shift, self.white = (
            xp.ascontiguousarray(xp.asarray(array))
            for array in (
                components.means,
                components.factors,
                components.constants,
                components.shift,
                components.whitened_means(),
            )
        )
        self.rows = max(_PIECE // max(self.k, self.d), 1)
        most = min(self.rows, max(n, 1))
        self.joint, self.size = xp.empty((self.k, most)), xp.empty(most)
        self.z = xp.empty((0 if self.kind == _DIAGONAL else most, self.d))
        self.zero = xp.zeros(self.d)

    def fill_joint(self, x: Array) -> None:
        """Write log weight·density of a piece to ``joint``."""
        if self.kind == _DIAGONAL:
            self._joint(x, self.means, self.factors, self.constants, self.joint)
        elif self.kind == _TIED:
            y = centred(self.device, x, self.shift, None, self.z) @ self.factors[0]
            self._joint(y, self.white, None, self.constants, self.joint)
        else:
            for k in range(self.k):
                y = centred(self.device, x, self.means[k], None, self.z) @ self.factors[k]
                self._joint(y, self.zero, None, self.constants[k : k + 1], self.joint[k])

    def _joint(self, x: Array, means: Array, scales: Array | None, constants: Array, joint: Array) -> None:
        n, d = x.shape
        chunk = min(d, 256 // x.dtype.itemsize)
        self.device.launch(
            SOURCE,
            f"mixture_joint<{element(x)}>",
            (blocks(n, _TILE),),
            (_TILE,),
            (
                *(x, np.int64(n), np.int32(d), means, scales, constants, np.int32(constants.size)),
                *(np.int32(chunk), np.int64(self.joint.shape[1]), joint),
            ),
            16 * _GROUP * chunk + _TILE * (chunk | 1) * x.dtype.itemsize,
        )

    def normalise(self, n: int, weights: Array | None) -> Array:
        """Turn ``joint`` into responsibilities, fill ``size``; return totals of the parts (parts, 3)."""
        rows, parts = rows_of_parts(n, 2048, THREADS)
        partial = self.device.xp.empty((parts, 3))
        self.device.launch(
            SOURCE,
            "mixture_normalise",
            (parts,),
            (THREADS,),
            (
                *(self.joint, weights, np.int64(n), np.int32(self.k), np.int64(self.joint.shape[1])),
                *(np.int64(rows), np.int64(parts), self.size, partial),
            ),
            THREADS // 32 * 8,
        )
        return partial

    def sums(self, x: Array) -> Array:
        """Return Σr, Σr|log p|, Σrz and Σrz² of a piece, (k, 2 + 2d); the first two alone if full."""
        xp, n, d = self.device.xp, len(x), 0 if self.kind == _FULL else self.d
        pairs = self.k * (d + 2)
        wide = min(THREADS, max(32, 1 << (pairs - 1).bit_length()))
        rows, parts = rows_of_parts(n, min(1024, max(-(-n // 512), 1)))
        cells = self.k * (2 + 2 * d)
        partial, out = xp.empty((parts, cells)), xp.empty((2, cells))
        self.device.launch(
            SOURCE,
            f"mixture_sums<{element(x)}>",
            (parts, -(-pairs // wide)),
            (wide, THREADS // wide),
            (
                *(x, self.joint, self.size, self.means, np.int64(n), np.int32(d), np.int32(self.k)),
                *(np.int64(self.joint.shape[1]), np.int64(rows), np.int64(parts), partial),
            ),
            2 * THREADS * 8,
        )
        across, tall = fold_block(cells)
        self.device.launch(
            SOURCE,
            "mixture_fold",
            (-(-cells // across),),
            (across, tall),
            (partial, np.int64(parts), np.int64(cells), out),
            2 * THREADS * 8,
        )
        return out[0].reshape((self.k, 2 + 2 * d))


def cuda_density(device: Device, components: Any, x: Array, weights: Array | None) -> tuple[float, ...]:
    """Return the fields of `dask_sdc.statistics.kernels.mixture.Density` of a block."""
    model, totals = _Model(device, components, len(x)), []
    for piece, w in pieces(device, x, weights, model.rows):
        model.fill_joint(piece)
        totals.append(to_host(model.normalise(len(piece), w)))
    return _totals(totals)


def cuda_expectation(device: Device, components: Any, x: Array, weights: Array | None) -> tuple[Any, ...]:
    """Return the fields of `dask_sdc.statistics.kernels.mixture.Expectation` of a block, on the host.

    Parameters
    ----------
    device : Device
        Where the block lies.
    components : Components
        The mixture, on the host.
    x : array
        Shape (n, d); any real dtype and layout.
    weights : array or None
        Positive float64 weights of shape (n,).
    """
    model, totals, (k, d) = _Model(device, components, len(x)), [], components.means.shape
    xp, kind = device.xp, components.kind
    counts, first, second = np.zeros((k, 2)), np.zeros((k, d)), np.zeros((k, d))
    matrices = xp.zeros((2, *((k, d, d) if kind == _FULL else (d, d) if kind == _TIED else (0,))))
    for piece, w in pieces(device, x, weights, model.rows):
        model.fill_joint(piece)
        totals.append(to_host(model.normalise(len(piece), w)))
        if kind == _TIED:
            _add_scatter(model, piece, model.shift, None if w is None else xp.sqrt(w), matrices)
        sums = to_host(model.sums(piece))
        counts += sums[:, :2]
        if kind != _FULL:
            first += sums[:, 2 : 2 + d]
            second += sums[:, 2 + d :]
            continue
        for c in range(k):
            roots = xp.sqrt(model.joint[c, : len(piece)])
            first[c] += to_host(_add_scatter(model, piece, model.means[c], roots, matrices[:, c]))
    log_density, _, largest = _totals(totals)
    moments = second if kind == _DIAGONAL else _symmetric(to_host(matrices[0] + matrices[1]))
    responsibility, condition = (np.ascontiguousarray(column) for column in counts.T)
    return responsibility, condition, first, moments, log_density, largest


def _add_scatter(model: _Model, x: Array, centre: Array, roots: Array | None, total: Array) -> Array:
    """Add Σ roots²·(x - centre)(x - centre)ᵀ to a pair; return Σ roots²·(x - centre) if there are roots."""
    z = centred(model.device, x, centre, roots, model.z)
    accumulate(model.device, z.T @ z, total[0], total[1])
    return None if roots is None else roots @ z


def _symmetric(matrices: Array) -> Array:
    """Copy the lower triangles to the upper ones, so that symmetry is exact."""
    lower = np.tril(matrices)
    return np.ascontiguousarray(lower + np.swapaxes(np.tril(lower, -1), -1, -2))


def _totals(parts: list[Array]) -> tuple[float, float, float]:
    if not parts:
        return 0.0, 0.0, 0.0
    table = np.concatenate(parts)
    return float(table[:, 0].sum()), float(table[:, 1].sum()), float(table[:, 2].max())
