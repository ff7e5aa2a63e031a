"""Layers on a CUDA device: products by cuBLAS, everything between them fused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_sdc.inference.model.kernels.arrays import ArrayKernels
from dask_sdc.inference.model.kernels.cuda.attention import attend_chunk, attend_rows, chunk_memory
from dask_sdc.inference.model.kernels.cuda.rows import activate, normalise, turn
from dask_sdc.inference.model.kernels.layout import LINEAR, SWIGLU, Block, Geometry, Linear, Norm
from dask_sdc.statistics.kernels.cuda.device import Device

__all__ = ["CudaKernels"]

Array = Any

#: Rows from which on a chunk is taken in tiles, where it may be: fewer do not fill one.
_TILED_FROM = 16
#: Widest head that the prefill takes.
_WIDEST = 256


class CudaKernels(ArrayKernels):
    """`ArrayKernels` with the kernels of this folder.

    Parameters
    ----------
    blocks : sequence of Block
        The layers.
    geometry : Geometry
        What they share.
    device : Device
        Where they lie.
    by_row : bool
        Whether a row has the same bits whatever chunk and batch it comes in: products are then taken row by
        row, and attention is split along the positions, in splits that the row's own position alone decides.
    """

    def __init__(
        self, blocks: Sequence[Block], geometry: Geometry, device: Device, *, by_row: bool = False
    ) -> None:
        super().__init__(blocks, geometry, device.xp, by_row=by_row)
        self._device = device

    def _project(self, x: Array, norm: Norm | None, linear: Linear) -> Array:
        """Return ``activation(norm(x) · wᵀ + bias)``: (R, O) for x (R, D)."""
        y = self._products(x, norm, linear)
        if linear.activation != LINEAR:
            return activate(self._device, y, linear.bias, linear.activation == SWIGLU)
        if linear.bias.size:
            y += linear.bias
        return y

    def _products(self, x: Array, norm: Norm | None, linear: Linear) -> Array:
        """Return ``norm(x) · wᵀ``, contiguous."""
        h = self._xp.ascontiguousarray(x)
        if norm is not None:
            h = normalise(self._device, h, norm.gain, norm.shift, self._geometry.eps)
        if self._by_row and len(h) > 1:
            rows = [self._matmul(h[r : r + 1], linear.weight) for r in range(len(h))]
            return self._xp.concatenate(rows, axis=0)
        return self._xp.ascontiguousarray(self._matmul(h, linear.weight))

    def _attention(
        self, x: Array, block: Block, steps: int, cos: Array, sin: Array, layer: Any, length: int, tree: Array
    ) -> Array:
        """Append keys and values of rows (B·T, D) to the layer, return their mix (B·T, H·W)."""
        geometry, sinks = self._geometry, self._geometry.sinks
        qkv = self._products(x, block.attention_norm, block.qkv)
        q = turn(
            self._device,
            qkv,
            block.qkv.bias,
            (cos, sin),
            steps,
            geometry.heads,
            geometry.scale,
            layer.k,
            layer.v,
            length - layer.base,
        )
        if self._tiles(steps, tree):
            return attend_chunk(self._device, q, layer, steps, length, sinks)
        branches = self._xp.asarray(np.ascontiguousarray(tree)) if tree.size else None
        return attend_rows(self._device, q, layer, steps, length, sinks, branches)

    def _tiles(self, steps: int, tree: Array) -> bool:
        if self._by_row or tree.size or steps < _TILED_FROM or self._geometry.width > _WIDEST:
            return False
        return chunk_memory(self._geometry.width) <= self._device.shared_limit
