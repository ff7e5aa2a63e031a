"""The forward pass of a decoder, or of a block of its layers.

Shapes: B sequences, T positions of a chunk, D hidden_size, H heads and KV key-value heads of width W
(head_dim padded to whole vectors), I intermediate_size, V vocab_size; rows R = B·T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.inference.model.cache import KVCache
from dask_sdc.inference.model.config import ModelConfig
from dask_sdc.inference.model.kernels import (
    NO_TREE,
    ArrayKernels,
    Block,
    Geometry,
    Linear,
    Norm,
    RowKernels,
    array_kernels,
    branches,
    widen,
)
from dask_sdc.inference.model.kernels.layout import GELU, LINEAR, SWIGLU, padded
from dask_sdc.statistics.kernels import place_of

__all__ = ["ROWS", "Transformer"]

Array = Any

#: Longest chunk that always goes through the row kernels: decoding, and verifying what was drafted.
ROWS = 16


class Transformer:
    """A contiguous block of a model's layers, with embedding and head where they belong.

    Parameters
    ----------
    config : ModelConfig
        The model.
    layers : range
        Layers of this block.
    first : bool
        Whether the embedding comes before them; `forward` then takes token ids.
    last : bool
        Whether norm and head come after them; `forward` then returns logits.
    tensors : mapping of str to ndarray
        Weights by their names (`dask_sdc.inference.weights`), linear ones (out, in). float32, float16, or
        bfloat16 as uint16. They are packed into new arrays, so that the mapping can be dropped.
    invariant : bool
        Whether long chunks too go through the row kernels, where a row gets the same bits whatever its
        chunk. If not, chunks of more than `ROWS` positions go through BLAS, whose rounding depends on their
        length.
    xp : module
        Array namespace; NumPy by default.

    Attributes
    ----------
    weights : dict of str to ndarray
        The packed arrays that `forward` reads, by the name of their layer and part.

    Raises
    ------
    InputError
        If a tensor is missing or has the wrong shape or dtype, naming it.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        first: bool,
        last: bool,
        tensors: Mapping[str, Array],
        *,
        invariant: bool = True,
        xp: Any = np,
    ) -> None:
        if layers.step != 1 or not 0 <= layers.start <= layers.stop <= config.n_layers:
            raise InputError(f"layers: expected a range within 0..{config.n_layers}, got {layers}")
        self.config, self.layers, self.first, self.last = config, layers, first, last
        self.invariant = invariant
        self.weights: dict[str, Array] = {}
        self._xp, self._tensors = xp, tensors
        blocks = self._pack()
        geometry = Geometry(
            config.n_heads,
            config.n_kv_heads,
            padded(config.head_dim),
            config.sinks,
            1.0 / math.sqrt(config.head_dim),
            config.norm_eps,
        )
        self._rows = (
            RowKernels(blocks, geometry) if xp is np else array_kernels(blocks, geometry, xp, by_row=True)
        )
        self._wide = array_kernels(blocks, geometry, xp)
        self._bulk = self._rows if invariant else self._wide
        self._inverse = rotary_frequencies(config)
        self._turns = (np.empty((0, 0), np.float32),) * 2

    # -- packing ---------------------------------------------------------------------------------

    def _pack(self) -> list[Block]:
        config = self.config
        tied = self.last and config.tied_embeddings
        if self.first or tied:
            self._embed = self._keep(
                "embed", self._padded("embed.weight", config.vocab_size, config.hidden_size)
            )
        if self.first and config.architecture == "gpt2":
            table = self._tensor("position.weight", (config.max_context, config.hidden_size))
            self._position = self._keep("position", widen(table, self._xp))
        blocks = [self._block(i) for i in self.layers]
        if self.last:
            self._norm = self._read_norm("norm")
            shape = config.vocab_size, config.hidden_size
            head = self._embed if tied else self._keep("head", self._padded("head.weight", *shape))
            self._head = Linear(head, self._none())
        del self._tensors
        return self._alike(blocks)

    def _none(self) -> Array:
        return self._frozen(self._xp.empty(0, dtype=self._xp.float32))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Array:
        """Return a tensor of this shape, float16 as int16."""
        if name not in self._tensors:
            raise InputError(f"tensor {name} is missing")
        found = self._tensors[name]
        if tuple(found.shape) != shape:
            raise InputError(f"tensor {name}: expected shape {shape}, got {tuple(found.shape)}")
        if str(found.dtype) == "bfloat16":
            found = found.view(np.uint16)
        if str(found.dtype) not in ("float32", "float16", "uint16"):
            raise InputError(f"tensor {name}: expected float32, float16 or bfloat16, got {found.dtype}")
        found = self._xp.asarray(found)
        return found.view(np.int16) if found.dtype == np.float16 else found

    def _keep(self, name: str, array: Array) -> Array:
        array = self._xp.ascontiguousarray(array)
        self.weights[name] = array
        return self._frozen(array)

    def _frozen(self, array: Array) -> Array:
        """Return a read-only view, as weights of either kind would have kernels compiled for both."""
        view = array.view()
        if self._xp is np:
            view.flags.writeable = False
        return view

    def _padded(self, name: str, outputs: int, inputs: int, out_pad: int = 0) -> Array:
        """Return a weight (out, in), inputs padded to whole vectors, and ``out_pad`` more outputs."""
        found = self._tensor(name, (outputs, inputs))
        extra = padded(inputs) - inputs
        return self._xp.pad(found, ((0, out_pad), (0, extra))) if extra or out_pad else found

    def _headwise(self, array: Array, heads: int, axis: int) -> Array:
        """Pad every head along an axis with zeros to W."""
        size = self.config.head_dim
        extra = padded(size) - size
        if not extra:
            return array
        shape = (*array.shape[:axis], heads, size, *array.shape[axis + 1 :])
        widths = [(0, extra) if i == axis + 1 else (0, 0) for i in range(len(shape))]
        wide = self._xp.pad(array.reshape(shape), widths)
        return wide.reshape((*array.shape[:axis], heads * padded(size), *array.shape[axis + 1 :]))

    def _joined(self, parts: list[Array]) -> Array:
        """Stack weights; those of mixed types as float32."""
        if len({str(part.dtype) for part in parts}) > 1:
            parts = [widen(part, self._xp) for part in parts]
        return self._xp.concatenate(parts, axis=0)

    def _read_norm(self, name: str) -> Norm:
        config, shift = self.config, self._none()
        gain = widen(self._tensor(f"{name}.weight", (config.hidden_size,)), self._xp)
        if config.architecture == "gpt2":
            shift = self._keep(
                f"{name}.shift", widen(self._tensor(f"{name}.bias", (config.hidden_size,)), self._xp)
            )
        return Norm(self._keep(f"{name}.gain", gain), shift)

    def _linear(self, name: str, weight: Array, biases: list[Array], activation: int = LINEAR) -> Linear:
        bias = self._keep(f"{name}.bias", self._xp.concatenate(biases)) if biases else self._none()
        return Linear(self._keep(name, weight), bias, activation)

    def _block(self, i: int) -> Block:
        at = f"layers.{i}"
        qkv, o = self._read_attention(at)
        up, down = self._read_mlp(at)
        norms = self._read_norm(f"{at}.attention_norm"), self._read_norm(f"{at}.mlp_norm")
        return Block(i, norms[0], qkv, o, norms[1], up, down)

    def _alike(self, blocks: list[Block]) -> list[Block]:
        """Widen projections of mixed types to float32, since one kernel runs all layers."""
        names = ("qkv", "o", "up", "down")
        if len({getattr(block, name).weight.dtype for block in blocks for name in names}) < 2:
            return blocks
        alike = []
        for block in blocks:
            wide = {}
            for name in names:
                linear = getattr(block, name)
                weight = self._keep(f"layers.{block.layer}.{name}", widen(linear.weight, self._xp))
                wide[name] = linear._replace(weight=weight)
            alike.append(block._replace(**wide))
        return alike

    def _read_attention(self, at: str) -> tuple[Linear, Linear]:
        config = self.config
        heads = {"q": config.n_heads, "k": config.n_kv_heads, "v": config.n_kv_heads}
        weights = [
            self._headwise(
                self._padded(f"{at}.attention.{part}.weight", n * config.head_dim, config.hidden_size), n, 0
            )
            for part, n in heads.items()
        ]
        o = self._tensor(f"{at}.attention.o.weight", (config.hidden_size, config.q_size))
        biases, o_bias = [], []
        if config.attention_bias:
            biases = [
                self._headwise(self._bias(f"{at}.attention.{part}", n * config.head_dim), n, 0)
                for part, n in heads.items()
            ]
            o_bias = [self._bias(f"{at}.attention.o", config.hidden_size)]
        return (
            self._linear(f"{at}.qkv", self._joined(weights), biases),
            self._linear(f"{at}.o", self._headwise(o, config.n_heads, 1), o_bias),
        )

    def _read_mlp(self, at: str) -> tuple[Linear, Linear]:
        config = self.config
        hidden, size = config.hidden_size, config.intermediate_size
        extra = padded(size) - size
        names = ["gate", "up"] if config.architecture == "llama" else ["up"]
        weights = [self._padded(f"{at}.mlp.{part}.weight", size, hidden, extra) for part in names]
        biases, down_bias = [], []
        if config.mlp_bias:
            biases = [self._xp.pad(self._bias(f"{at}.mlp.{part}", size), (0, extra)) for part in names]
            down_bias = [self._bias(f"{at}.mlp.down", hidden)]
        return (
            self._linear(f"{at}.up", self._joined(weights), biases, SWIGLU if len(names) == 2 else GELU),
            self._linear(f"{at}.down", self._padded(f"{at}.mlp.down.weight", hidden, size), down_bias),
        )

    def _bias(self, name: str, size: int) -> Array:
        return widen(self._tensor(f"{name}.bias", (size,)), self._xp)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(int(array.nbytes) for array in self.weights.values())

    # -- forward ---------------------------------------------------------------------------------

    def forward(
        self,
        x: Array,
        cache: KVCache,
        *,
        rows: int | None = None,
        rounded: bool = False,
        parents: Sequence[int] = (),
    ) -> Array:
        """Run a chunk through the block and append it to the cache.

        Parameters
        ----------
        x : ndarray
            Token ids (B, T) of an integer type if this is the first block, else activations (B, T, D)
            float32.
        cache : KVCache
            Of the same layers; its length is the position of the chunk.
        rows : int or None
            Last positions of the chunk whose logits are wanted, where this is the last block; None is all.
        rounded : bool
            Whether the chunk may go through BLAS even so, whose rounding depends on its length.
        parents : sequence of int
            Where the rows behind the first are the nodes of a tree (see `DraftTree`): the node that each
            follows, -1 for the first row. A row then has the bits that it has at the end of its branch alone.
            Its key and value lie in the order of rows; see `KVCache.keep`.

        Returns
        -------
        ndarray of float32
            Activations (B, T, D), or logits (B, rows, V) from the last block.

        Raises
        ------
        ContextOverflow
            If the chunk does not fit into the cache.
        InputError
            If the chunk or the cache has another shape or type.
        InputTypeError
            If one of them is on the host and the model on a device, or the other way round.
        """
        self._check(x, cache)
        steps, size = x.shape[1], self.config.hidden_size  # T, D
        tree = branches(parents) if parents else NO_TREE
        if parents and len(tree) != steps:
            raise InputError(f"chunk: expected {len(tree)} rows of a tree, got {steps}")
        depths = self._xp.asarray(tree[:, 0] - 1) if parents else slice(0, steps)
        kernels = self._kernels(steps, rounded, bool(parents))
        cache.reserve(steps)
        h = self._embedded(x, cache.length, depths) if self.first else self._given(x)  # (R, D)
        cos, sin = self._rotation(cache.length, steps, depths)  # (T, head_dim / 2)
        h = self._through(kernels, h, steps, cos, sin, cache, tree)  # (R, D)
        cache.length += steps
        h = h.reshape(-1, steps, size)  # (B, T, D)
        if not self.last:
            return h
        rows = steps if rows is None else rows
        return self._logits(h, rows, self._kernels(rows, rounded, bool(parents)))

    def _through(
        self,
        kernels: RowKernels | ArrayKernels,
        h: Array,
        steps: int,
        cos: Array,
        sin: Array,
        cache: KVCache,
        tree: Array,
    ) -> Array:
        """Run rows (R, D) through the layers, with a stop where the output of one is wanted."""
        if not cache.taps:
            return kernels.run(h, steps, cos, sin, cache.cached, cache.length, tree)
        begin = 0
        for layer in sorted({*cache.taps, self.layers.stop - 1}):
            end = layer + 1 - self.layers.start
            part = kernels.part(begin, end)
            h = part.run(h, steps, cos, sin, cache.cached[begin:end], cache.length, tree)
            begin = end
            if layer in cache.taps:
                cache.taps[layer].append(self._xp.array(h, copy=True).reshape(-1, steps, h.shape[1]))
        return h

    def _kernels(self, rows: int, rounded: bool, tree: bool) -> RowKernels | ArrayKernels:
        if rounded:
            return self._wide
        return self._rows if tree or rows <= ROWS else self._bulk

    def _logits(self, h: Array, rows: int, kernels: RowKernels | ArrayKernels) -> Array:
        """Return the logits of the last ``rows`` positions: (B, rows, V)."""
        if not 0 <= rows <= h.shape[1]:
            raise InputError(f"rows: expected 0..{h.shape[1]} of the chunk, got {rows}")
        flat = self._xp.ascontiguousarray(h[:, h.shape[1] - rows :]).reshape(-1, h.shape[2])  # (B·rows, D)
        logits = kernels.logits(flat, self._norm, self._head)
        return logits.reshape(h.shape[0], rows, self.config.vocab_size)

    def _check_places(self, x: Array, cache: KVCache) -> None:
        """Refuse what is not where the model is."""
        model = "device" if self._xp.__name__ == "cupy" else "host"
        arrays = {"chunk": x, **({"KV cache": cache.cached[0].k} if cache.cached else {})}
        found = {name: place_of(array) for name, array in arrays.items()}
        if set(found.values()) - {model}:
            where = ", ".join(f"the {name} on the {place}" for name, place in found.items())
            raise InputTypeError(f"expected chunk and KV cache on the {model}, as the model is, got {where}")

    def _check(self, x: Array, cache: KVCache) -> None:
        self._check_places(x, cache)
        steps = x.shape[1] if x.ndim > 1 else 1
        shape = (cache.batch, steps) if self.first else (cache.batch, steps, self.config.hidden_size)
        kind = "iu" if self.first else "f"
        if tuple(x.shape) != shape or x.shape[1] < 1:
            raise InputError(
                f"chunk: expected shape {shape} with at least one position, got {tuple(x.shape)}"
            )
        if x.dtype.kind not in kind or (kind == "f" and x.dtype != np.float32):
            raise InputError(f"chunk: expected {'integer ids' if self.first else 'float32'}, got {x.dtype}")
        if cache.layers != self.layers:
            raise InputError(f"KV cache: expected one of {self.layers}, got {cache.layers}")
        if self.first and not (int(x.min()) >= 0 and int(x.max()) < self.config.vocab_size):
            raise InputError(
                f"chunk: expected ids in 0..{self.config.vocab_size - 1}, got {int(x.min())}..{int(x.max())}"
            )

    def _embedded(self, ids: Array, start: int, depths: Any) -> Array:
        h = widen(self._embed[self._xp.asarray(ids).reshape(-1)], self._xp)[
            :, : self.config.hidden_size
        ]  # (R, D)
        if self.config.architecture == "gpt2":
            table = self._position[start : start + ids.shape[1]][depths]  # (T, D)
            h = (h.reshape(*ids.shape, -1) + table).reshape(h.shape)
        return self._xp.ascontiguousarray(h)

    def _given(self, x: Array) -> Array:
        """Return activations (R, D) that may be overwritten."""
        return self._xp.array(x, copy=True).reshape(-1, x.shape[2])

    def _rotation(self, start: int, steps: int, depths: Any) -> tuple[Array, Array]:
        """Return cosine and sine of the angles of positions ``start``, …: (T, head_dim / 2) each."""
        # A local name: several threads may come here, each of whom makes a table that is long enough.
        turns, end = self._turns, start + steps
        if not self._inverse.size:
            return turns
        if len(turns[0]) < end:
            count = min(self.config.max_context, max(end, 2 * len(turns[0]), 256))
            # The angle is rounded to float32 as everywhere else: at far positions that is most of its error.
            angle = (np.arange(count, dtype=np.float32)[:, None] * self._inverse).astype(np.float64)
            cosine, sine = (
                self._xp.asarray(turn.astype(np.float32)) for turn in (np.cos(angle), np.sin(angle))
            )
            self._turns = turns = (cosine, sine)
        return turns[0][start:end][depths], turns[1][start:end][depths]


def rotary_frequencies(config: ModelConfig) -> Array:
    """Return the angles per position of the pairs of a head: (head_dim / 2,) float32, or none for gpt2.

    theta^(-2i/d) (Su et al. 2021, section 3.2.2). ``linear`` divides by a factor; ``llama3`` divides those
    whose wave is longer than the original context by ``low_freq_factor``, keeps those that go round more than
    ``high_freq_factor`` times, and blends between.
    """
    if config.architecture == "gpt2":
        return np.empty(0, np.float32)
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequency = config.rope_theta**-exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequency.astype(np.float32)
    if scaling.kind == "linear":
        return (frequency / scaling.factor).astype(np.float32)
    turns = scaling.original_context * frequency / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * frequency / scaling.factor + blend * frequency).astype(np.float32)
