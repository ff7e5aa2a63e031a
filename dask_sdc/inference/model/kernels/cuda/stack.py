"""Layers on a CUDA device: everything between the products fused, and those of few rows too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_sdc.inference.model.kernels.arrays import ArrayKernels
from dask_sdc.inference.model.kernels.cuda.attention import attend_chunk, attend_rows, chunk_memory
from dask_sdc.inference.model.kernels.cuda.products import multiply
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
        Whether a row has the same bits whatever chunk and batch it comes in: products are then those of
        ``products.cu``, and attention is split along the positions, in splits that the row's own position
        alone decides.
    at : array of int64 or None
        On the device, shape (1,): where the kernels find the positions before the chunk, of one position per
        sequence. What `run` is told is then the most that they may be.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        geometry: Geometry,
        device: Device,
        *,
        by_row: bool = False,
        at: Array | None = None,
    ) -> None:
        super().__init__(blocks, geometry, device.xp, by_row=by_row)
        self._device, self._at = device, at

    def part(self, begin: int, end: int) -> CudaKernels:
        """Return the kernels of some of the layers, counted from the first of these."""
        return CudaKernels(self._blocks[begin:end], self._geometry, self._device, by_row=self._by_row)

    def _project(self, x: Array, norm: Norm | None, linear: Linear) -> Array:
        """Return ``activation(norm(x) · wᵀ + bias)``: (R, O) for x (R, D)."""
        if linear.activation == LINEAR:
            return self._products(x, norm, linear.weight, linear.bias)
        y = self._products(x, norm, linear.weight)
        return activate(self._device, y, linear.bias, linear.activation == SWIGLU)

    def _added(self, x: Array, y: Array, linear: Linear) -> Array:
        """Return x and the projection of y."""
        return self._products(y, None, linear.weight, linear.bias, x)

    def _products(
        self, x: Array, norm: Norm | None, weight: Array, bias: Array | None = None, add: Array | None = None
    ) -> Array:
        """Return ``norm(x) · wᵀ + bias + add``, contiguous."""
        h = self._xp.ascontiguousarray(x)
        if norm is not None:
            h = normalise(self._device, h, norm.gain, norm.shift, self._geometry.eps)
        if self._by_row:
            return multiply(self._device, h, weight, bias, add)
        y = self._xp.ascontiguousarray(self._matmul(h, weight))
        if bias is not None and bias.size:
            y += bias
        return y if add is None else add + y

    def _attention(
        self, x: Array, block: Block, steps: int, cos: Array, sin: Array, layer: Any, length: int, tree: Array
    ) -> Array:
        """Append keys and values of rows (B·T, D) to the layer, return their mix (B·T, H·W)."""
        geometry, sinks = self._geometry, self._geometry.sinks
        qkv = self._products(x, block.attention_norm, block.qkv.weight)
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
            length,
            layer.base,
            self._at,
        )
        if self._tiles(steps, tree):
            return attend_chunk(self._device, q, layer, steps, length, sinks)
        branches = self._xp.asarray(np.ascontiguousarray(tree)) if tree.size else None
        return attend_rows(self._device, q, layer, steps, length, sinks, branches, self._at)

    def _tiles(self, steps: int, tree: Array) -> bool:
        if self._by_row or tree.size or steps < _TILED_FROM or self._geometry.width > _WIDEST:
            return False
        return chunk_memory(self._geometry.width) <= self._device.shared_limit
