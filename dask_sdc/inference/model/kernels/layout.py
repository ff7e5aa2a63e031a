"""How weights are packed for the kernels.

Inputs of projections are padded with zeros to whole vectors, heads likewise; what belongs together lies
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "GELU",
    "LANES",
    "LINEAR",
    "NO_TREE",
    "SWIGLU",
    "Block",
    "Geometry",
    "Linear",
    "Norm",
    "branches",
    "padded",
]

Array = Any

#: Elements of a vector of the row kernels.
LANES = 16

#: What follows a projection.
LINEAR, GELU, SWIGLU = 0, 1, 2


def padded(size: int) -> int:
    """Return a size rounded up to whole vectors."""
    return -(-size // LANES) * LANES


def branches(parents: Sequence[int]) -> Any:
    """Return which rows of a tree of drafts each row sees.

    Parameters
    ----------
    parents : sequence of int
        Of the N nodes, which are the rows 1, 2, …: the node that each follows, -1 for the row 0.

    Returns
    -------
    ndarray of int64, shape (N + 1, 1 + deepest)
        Per row how many rows its branch has, itself included, and which, from the row 0 on.
    """
    paths = [[0]]
    for node, parent in enumerate(parents):
        paths.append([*paths[parent + 1], node + 1])
    table = np.zeros((len(paths), 1 + max(map(len, paths))), np.int64)
    for row, path in enumerate(paths):
        table[row, : 1 + len(path)] = [len(path), *path]
    return table


#: Every row follows the one before it.
NO_TREE: Any = np.empty((0, 0), np.int64)


class Norm(NamedTuple):
    """RMSNorm, or LayerNorm with a shift: gain and shift (D,) float32; an empty shift is none."""

    gain: Array
    shift: Array


class Linear(NamedTuple):
    """A projection: weight (O, K) in storage type, bias (O,) float32 or empty, and what follows it."""

    weight: Array
    bias: Array
    activation: int = LINEAR

    @property
    def outputs(self) -> int:
        """Width of the result: SwiGLU makes one of two."""
        return int(self.weight.shape[0]) // (2 if self.activation == SWIGLU else 1)


class Block(NamedTuple):
    """One layer: ``qkv`` has (H + 2·KV)·W outputs, ``up`` the gate before the way up."""

    layer: int
    attention_norm: Norm
    qkv: Linear
    o: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


class Geometry(NamedTuple):
    """What attention and norms have to know beside the arrays."""

    heads: int
    kv_heads: int
    width: int
    sinks: int
    scale: float
    eps: float
