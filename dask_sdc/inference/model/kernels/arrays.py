"""The forward pass over an array namespace: BLAS for long chunks on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dask_sdc.inference.model.kernels.layout import GELU, NO_TREE, SWIGLU, Block, Geometry, Linear, Norm

__all__ = ["ArrayKernels", "widen"]

Array = Any

#: Bytes of attention scores, or of widened weights, that exist at a time.
_PIECE = 32 << 20

#: Products that BLAS sums at a time.
_RUN = 128


def widen(weights: Array, xp: Any = np) -> Array:
    """Return stored weights as float32: bfloat16 comes as uint16, float16 as such or as int16."""
    if weights.dtype == xp.uint16:
        return (weights.astype(xp.uint32) << 16).view(xp.float32)
    if weights.dtype == xp.int16:
        return weights.view(xp.float16).astype(xp.float32)
    return weights.astype(xp.float32, copy=False)


class ArrayKernels:
    """Kernels of a stack of layers for any array library with NumPy's interface.

    Parameters
    ----------
    blocks : sequence of Block
        The layers.
    geometry : Geometry
        What they share.
    xp : module
        Array namespace.
    by_row : bool
        Whether to compute row by row, so that a row has the same bits whatever chunk it comes in.
    """

    def __init__(
        self, blocks: Sequence[Block], geometry: Geometry, xp: Any = np, *, by_row: bool = False
    ) -> None:
        self._blocks, self._geometry, self._xp, self._by_row = blocks, geometry, xp, by_row

    def part(self, begin: int, end: int) -> ArrayKernels:
        """Return the kernels of some of the layers, counted from the first of these."""
        return ArrayKernels(self._blocks[begin:end], self._geometry, self._xp, by_row=self._by_row)

    def run(
        self,
        x: Array,
        steps: int,
        cos: Array,
        sin: Array,
        cached: Sequence[Any],
        length: int,
        tree: Array = NO_TREE,
    ) -> Array:
        """Run rows (R, D) through all layers; see `RowKernels.run`."""
        for block, layer in zip(self._blocks, cached, strict=True):
            mixed = self._attention(x, block, steps, cos, sin, layer, length, tree)  # (R, H·W)
            x = self._added(x, mixed, block.o)  # (R, D)
            inner = self._project(x, block.mlp_norm, block.up)  # (R, I)
            x = self._added(x, inner, block.down)  # (R, D)
        return x

    def logits(self, x: Array, norm: Norm, linear: Linear) -> Array:
        """Return the logits (R, V) of rows (R, D)."""
        return self._project(x, norm, linear)

    def _added(self, x: Array, y: Array, linear: Linear) -> Array:
        """Return x (R, D) and the projection of y (R, K)."""
        return x + self._project(y, None, linear)

    def _project(self, x: Array, norm: Norm | None, linear: Linear) -> Array:
        """Return ``activation(norm(x) · wᵀ + bias)``: (R, O) for x (R, D)."""
        if self._by_row and x.shape[0] > 1:
            rows = [self._project(x[r : r + 1], norm, linear) for r in range(x.shape[0])]
            return self._xp.concatenate(rows, axis=0)
        y = self._matmul(x if norm is None else self._norm(x, norm), linear.weight)
        if linear.bias.size:
            y += linear.bias
        if linear.activation == SWIGLU:
            gate, up = y[:, : linear.outputs], y[:, linear.outputs :]
            return gate * self._sigmoid(gate) * up
        if linear.activation == GELU:
            # 0.5·(1 + tanh u) = sigmoid(2u)
            return y * self._sigmoid(np.float32(1.5957691216057308) * (y + np.float32(0.044715) * y * y * y))
        return y

    def _norm(self, x: Array, norm: Norm) -> Array:
        xp = self._xp
        wide = x.astype(xp.float64)
        if norm.shift.size:
            wide = wide - wide.mean(axis=1, keepdims=True)
        scale = 1.0 / xp.sqrt((wide * wide).mean(axis=1, keepdims=True) + self._geometry.eps)
        h = (wide * scale).astype(xp.float32) * norm.gain
        return h + norm.shift if norm.shift.size else h

    def _sigmoid(self, x: Array) -> Array:
        return 1 / (1 + self._xp.exp(-self._xp.maximum(x, np.float32(-87.0))))

    def _matmul(self, x: Array, weight: Array) -> Array:
        """x (R, D) times w (O, K), whose columns from D on are zero."""
        weight = weight[:, : x.shape[1]]
        if weight.dtype == self._xp.float32:
            return self._product(x, weight)
        step = max(1, _PIECE // (4 * weight.shape[1]))
        parts = [
            self._product(x, widen(weight[o : o + step], self._xp)) for o in range(0, weight.shape[0], step)
        ]
        return self._xp.concatenate(parts, axis=1)

    def _product(self, x: Array, weight: Array) -> Array:
        """Return x · wᵀ, on the host summed in runs: the longer a sum in float32, the more it rounds."""
        size = x.shape[1]
        run = _RUN if self._xp is np else size
        y = x[:, :run] @ weight[:, :run].T
        for begin in range(run, size, run):
            y += x[:, begin : begin + run] @ weight[:, begin : begin + run].T
        return y

    def _attention(
        self, x: Array, block: Block, steps: int, cos: Array, sin: Array, layer: Any, length: int, tree: Array
    ) -> Array:
        """Append keys and values of rows (B·T, D) to the layer, return their mix (B·T, H·W)."""
        geometry = self._geometry
        qkv = self._project(x, block.attention_norm, block.qkv)  # (R, (H + 2·KV)·W)
        batch, kv_heads, _, width = layer.k.shape
        per_row = qkv.reshape(batch, steps, geometry.heads + 2 * kv_heads, width).transpose(0, 2, 1, 3)
        q, k, v = per_row[:, : -2 * kv_heads], per_row[:, -2 * kv_heads : -kv_heads], per_row[:, -kv_heads:]
        slot = length - layer.base
        layer.k[:, :, slot : slot + steps] = self._turn(k, cos, sin)
        layer.v[:, :, slot : slot + steps] = v
        q = self._turn(q, cos, sin) * np.float32(geometry.scale)
        mixed = self._mixed(q.reshape(batch, kv_heads, -1, steps, width), layer, length, geometry.sinks, tree)
        # (B, KV, G, T, W) -> (B, T, KV, G, W) -> (B·T, H·W)
        return mixed.transpose(0, 3, 1, 2, 4).reshape(batch * steps, geometry.heads * width)

    def _turn(self, x: Array, cos: Array, sin: Array) -> Array:
        """Rotate (…, T, W) by its positions."""
        half = cos.shape[1]
        if not half:
            return x
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return self._xp.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)

    def _mixed(self, q: Array, layer: Any, length: int, sinks: int, tree: Array) -> Array:
        """Attend in pieces of bounded size: q (B, KV, G, T, W)."""
        batch, kv_heads, group, steps, _ = q.shape
        if self._by_row and batch > 1:
            alone = [replace(layer, k=layer.k[b : b + 1], v=layer.v[b : b + 1]) for b in range(batch)]
            one = [self._mixed(q[b : b + 1], alone[b], length, sinks, tree) for b in range(batch)]
            return self._xp.concatenate(one, axis=0)
        if tree.size:
            slot = length - layer.base
            paths = [slot + tree[t, 1 : 1 + tree[t, 0]] for t in range(steps)]
            parts = [
                self._piece(q[:, :, :, t : t + 1], layer, length + len(path) - 1, sinks, path)
                for t, path in enumerate(paths)
            ]
            return self._xp.concatenate(parts, axis=3)
        piece = max(1, _PIECE // (4 * batch * kv_heads * group * (length + steps - layer.base)))
        piece = 1 if self._by_row else piece
        parts = [
            self._piece(q[:, :, :, t : t + piece], layer, length + t, sinks) for t in range(0, steps, piece)
        ]
        return self._xp.concatenate(parts, axis=3)

    def _piece(self, q: Array, layer: Any, first: int, sinks: int, path: Array | None = None) -> Array:
        """Attend rows at positions ``first``, …, or one that ends a ``path`` of slots: q (B, KV, G, t, W)."""
        xp = self._xp
        batch, kv_heads, group, steps, width = q.shape
        end = first + steps
        oldest = 0 if layer.window is None else max(0, first - layer.window + 1)
        parts: list[Any] = [slice(0, min(sinks, oldest)), slice(oldest - layer.base, end - layer.base)]
        if path is not None:
            # Keys of its own chunk lie where its branch does, the others at their positions.
            begin = end - len(path)
            slots = np.concatenate([np.arange(begin) - (np.arange(begin) >= sinks) * layer.base, path])
            parts = [slots[: min(sinks, oldest)], slots[oldest:end]]
        k, v = (xp.concatenate([array[:, :, part] for part in parts], axis=2) for array in (layer.k, layer.v))
        keys = xp.concatenate([xp.arange(min(sinks, oldest)), xp.arange(oldest, end)])[None, :]
        rows = xp.arange(first, end)[:, None]
        seen = keys <= rows
        if layer.window is not None:
            seen &= (keys > rows - layer.window) | (keys < sinks)
        scores = q.reshape(batch, kv_heads, group * steps, width) @ k.transpose(0, 1, 3, 2)
        scores = xp.where(seen, scores.reshape(batch, kv_heads, group, steps, -1), np.float32(-np.inf))
        scores = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = scores.reshape(batch, kv_heads, group * steps, -1) @ v
        return mixed.reshape(batch, kv_heads, group, steps, width)
