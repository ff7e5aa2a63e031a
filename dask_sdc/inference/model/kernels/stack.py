"""Layers as one call of a row kernel: a token costs no Python per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_sdc.inference.model.kernels.crew import share
from dask_sdc.inference.model.kernels.layout import NO_TREE, SWIGLU, Block, Geometry, Linear, Norm
from dask_sdc.inference.model.kernels.rows import CACHE_FIELDS, PHASES, WEIGHT_FIELDS, head, layers, normed
from dask_sdc.inference.model.kernels.work import address, new_job

__all__ = ["RowKernels"]

Array = Any

#: Products below which a second thread costs more than it brings.
_SMALL = 1 << 20
#: What stands for no window: more positions than there can be.
_NO_WINDOW = 1 << 40


class RowKernels:
    """Batch-invariant kernels of a stack of layers, for NumPy arrays.

    Parameters
    ----------
    blocks : sequence of Block
        The layers; weights of their projections all of one type. They must outlive the kernels.
    geometry : Geometry
        What they share.
    """

    def __init__(self, blocks: Sequence[Block], geometry: Geometry) -> None:
        self._blocks, self._geometry = blocks, geometry
        self._weights = np.zeros((len(blocks), WEIGHT_FIELDS), np.int64)
        for row, block in zip(self._weights, blocks, strict=True):
            arrays = [*block.attention_norm, *block.mlp_norm]
            arrays += [array for linear in _linears(block) for array in linear[:2]]
            row[:] = [address(array) for array in arrays]
        self._products = sum(linear.weight.size for block in blocks for linear in _linears(block))

    def part(self, begin: int, end: int) -> RowKernels:
        """Return the kernels of some of the layers, counted from the first of these."""
        return RowKernels(self._blocks[begin:end], self._geometry)

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
        """Run rows through all layers.

        Parameters
        ----------
        x : ndarray of float32, shape (R, D)
            Rows of a chunk, T of a sequence one after the other; overwritten.
        steps : int
            T.
        cos, sin : ndarray of float32, shape (T, head_dim / 2)
            Of the angles of their positions.
        cached : sequence of LayerCache
            Keys and values of every layer, with room for the chunk.
        length : int
            Positions in the cache.
        tree : ndarray of int64
            See `branches`; empty where every row follows the one before it.

        Returns
        -------
        ndarray of float32, shape (R, D)
            The rows after the last layer.
        """
        if not self._blocks:
            return x
        g, first = self._geometry, self._blocks[0]
        widths = (first.qkv.weight.shape[1], first.qkv.outputs, g.heads * g.width, first.up.outputs)
        h, qkv, mixed, inner = (np.empty((x.shape[0], width), np.float32) for width in widths)
        normed(x, *first.attention_norm, g.eps, h)
        args = (
            new_job(PHASES * len(self._blocks)),
            self._weights,
            _cache_table(cached),
            np.empty(0, first.qkv.weight.dtype),
            x,
            np.empty_like(x),
            h,
            qkv,
            mixed,
            inner,
            steps,
            length,
            cos,
            sin,
            g.kv_heads,
            g.width,
            g.sinks,
            np.float32(g.scale),
            g.eps,
            first.up.activation == SWIGLU,
            tree,
        )
        (share if x.shape[0] * self._products > _SMALL else _alone)(layers, *args)
        return x

    def logits(self, x: Array, norm: Norm, linear: Linear) -> Array:
        """Return the logits (R, V) of rows (R, D)."""
        h = np.empty((x.shape[0], linear.weight.shape[1]), np.float32)
        normed(x, *norm, self._geometry.eps, h)
        out = np.empty((x.shape[0], linear.outputs), np.float32)
        (share if x.shape[0] * linear.weight.size > _SMALL else _alone)(
            head, new_job(1), h, linear.weight, out
        )
        return out


def _alone(function: Any, *args: Any) -> None:
    function(*args)


def _linears(block: Block) -> tuple[Linear, ...]:
    return block.qkv, block.o, block.up, block.down


def _cache_table(cached: Sequence[Any]) -> Array:
    table = np.empty((len(cached), CACHE_FIELDS), np.int64)
    for row, layer in zip(table, cached, strict=True):
        window = _NO_WINDOW if layer.window is None else layer.window
        row[:] = (address(layer.k), address(layer.v), layer.slots, layer.base, window)
    return table
