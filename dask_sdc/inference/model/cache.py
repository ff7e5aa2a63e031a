"""Keys and values of the positions that a model has seen, with a bound on the memory that they take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_sdc.exceptions import ContextOverflow, InputError
from dask_sdc.inference.model.config import ModelConfig
from dask_sdc.inference.model.kernels.layout import padded

__all__ = ["ROLLBACK", "KVCache", "LayerCache"]

#: Speculated positions that `KVCache.truncate` can take back where a layer keeps only a window.
ROLLBACK = 64

_BLOCK = 256  # positions; the least by which a layer grows
_FLOAT32 = np.dtype(np.float32)


@dataclass(eq=False)
class LayerCache:
    """Keys and values of one layer.

    Position ``p`` lies in slot ``p`` if it is a sink (``p < sinks``), in slot ``p - base`` otherwise.

    Attributes
    ----------
    k, v : ndarray of float32, shape (B, n_kv, slots, W)
        W is head_dim padded with zeros to a multiple of 16.
    window : int or None
        Keys that a row sees; None sees all.
    base : int
        Positions that were dropped between the sinks and the window.
    """

    k: Any
    v: Any
    window: int | None
    base: int = 0

    @property
    def slots(self) -> int:
        """Positions that there is room for."""
        return int(self.k.shape[2])


class KVCache:
    """Keys and values of a block of layers for one session.

    Full layers grow in blocks up to the capacity. A layer with a sliding window keeps its sinks, its window,
    `rollback` more positions and the current chunk.

    Parameters
    ----------
    config : ModelConfig
        The model.
    layers : range
        Its layers that this cache serves.
    batch : int
        Sequences that go together, all of the same length.
    capacity : int or None
        Most positions; None is the model's context.
    dtype : dtype
        float32 is supported.
    xp : module
        Array namespace; NumPy by default.
    rollback : int
        Positions that `truncate` can always take back.

    Raises
    ------
    ContextOverflow
        If the capacity is larger than the model's context.
    InputError
        If another argument is not supported.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        batch: int = 1,
        capacity: int | None = None,
        dtype: Any = np.float32,
        xp: Any = np,
        *,
        rollback: int = ROLLBACK,
    ) -> None:
        capacity = config.max_context if capacity is None else capacity
        if batch < 1 or capacity < 1 or rollback < 0:
            raise InputError(
                "KV cache: expected batch >= 1, capacity >= 1, rollback >= 0, "
                f"got {batch}, {capacity}, {rollback}"
            )
        if capacity > config.max_context:
            raise ContextOverflow(
                f"capacity: expected at most {config.max_context} positions, got {capacity}"
            )
        if np.dtype(dtype) != _FLOAT32:
            raise InputError(f"KV cache: expected dtype float32, got {np.dtype(dtype)}")
        self.config, self.layers, self.batch, self.capacity = config, layers, batch, capacity
        self.rollback = rollback
        self.length = 0
        self._xp = xp
        self._layers = [self._empty(config.sliding_window[i]) for i in layers]
        #: Outputs (B, T, D) of layers that are wanted, chunk by chunk.
        self.taps: dict[int, list[Any]] = {}

    def _empty(self, window: int | None) -> LayerCache:
        return LayerCache(self._zeros(0), self._zeros(0), window)

    def _zeros(self, slots: int) -> Any:
        shape = (self.batch, self.config.n_kv_heads, slots, padded(self.config.head_dim))
        return self._xp.zeros(shape, dtype=self._xp.float32)

    @property
    def cached(self) -> list[LayerCache]:
        """The layers in their order."""
        return self._layers

    def layer(self, index: int) -> LayerCache:
        """Return the cache of layer ``index`` of the model."""
        return self._layers[index - self.layers.start]

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated now."""
        return sum(int(layer.k.nbytes + layer.v.nbytes) for layer in self._layers)

    @staticmethod
    def bytes_per_token(config: ModelConfig, layers: Iterable[int]) -> int:
        """Return the bytes that one more position of one sequence takes where no window is full."""
        per_layer = 2 * config.n_kv_heads * padded(config.head_dim) * _FLOAT32.itemsize
        return sum(1 for _ in layers) * per_layer

    @staticmethod
    def bytes_at(
        config: ModelConfig, layers: Iterable[int], capacity: int, *, batch: int = 1, chunk: int = _BLOCK
    ) -> int:
        """Return a bound on the bytes of a whole cache.

        Parameters
        ----------
        config : ModelConfig
            The model.
        layers : iterable of int
            Its layers that the cache serves.
        capacity : int
            Positions.
        batch : int
            Sequences.
        chunk : int
            Longest chunk that will come at once.
        """
        slots = 0
        for i in layers:
            window = config.sliding_window[i]
            kept = capacity if window is None else config.sinks + window + ROLLBACK + max(chunk, _BLOCK)
            slots += min(capacity, kept)
        return batch * slots * KVCache.bytes_per_token(config, (0,))

    def reserve(self, count: int) -> None:
        """Make room for a chunk of ``count`` more positions in every layer.

        Raises
        ------
        ContextOverflow
            If they do not fit into the capacity; nothing changed.
        """
        if self.length + count > self.capacity:
            raise ContextOverflow(
                f"KV cache: expected at most {self.capacity} positions, got {self.length} + {count}"
            )
        for layer in self._layers:
            self._reserve(layer, self.length + count)

    def _reserve(self, layer: LayerCache, end: int) -> None:
        if layer.window is not None:
            self._drop(layer, end)
        if end - layer.base <= layer.slots:
            return
        slots = max(end - layer.base, layer.slots + max(_BLOCK, layer.slots // 2))
        if layer.window is not None:
            slots = max(end - layer.base, self._kept(layer.window) + _BLOCK)
        slots = min(slots, self.capacity)
        used = self.length - layer.base
        for name in ("k", "v"):
            grown = self._zeros(slots)
            grown[:, :, :used] = getattr(layer, name)[:, :, :used]
            setattr(layer, name, grown)

    def _kept(self, window: int) -> int:
        """Slots that a layer with a window keeps beside the current chunk."""
        return self.config.sinks + window - 1 + self.rollback

    def _drop(self, layer: LayerCache, end: int) -> None:
        """Move the window down to the sinks once the room for one is used up."""
        assert layer.window is not None
        sinks, used = self.config.sinks, self.length - layer.base
        room = max(layer.slots, self._kept(layer.window) + _BLOCK)
        if end - layer.base <= room or used <= self._kept(layer.window):
            return
        excess = used - self._kept(layer.window)
        for array in (layer.k, layer.v):
            array[:, :, sinks : used - excess] = array[:, :, sinks + excess : used].copy()
        layer.base += excess

    def truncate(self, length: int) -> None:
        """Take back the positions from ``length`` on.

        Raises
        ------
        InputError
            If there are fewer positions, or a window is no longer complete.
        """
        if not 0 <= length <= self.length:
            raise InputError(f"KV cache: expected to truncate to 0..{self.length}, got {length}")
        for index, layer in zip(self.layers, self._layers, strict=True):
            oldest = layer.base + self.config.sinks
            if layer.base and (layer.window is None or length - layer.window + 1 < oldest):
                raise InputError(
                    f"KV cache: layer {index} keeps positions from {oldest} on, "
                    f"too few for a window of {layer.window} at {length}"
                )
        self.length = length
        for index in self.taps:
            self.taps[index] = [self.tapped(index)[:, :length]]

    def tap(self, layers: Iterable[int]) -> None:
        """Keep what these layers put out from now on, those of them that are here."""
        self.taps = {index: [] for index in layers if index in self.layers}

    def tapped(self, layer: int) -> Any:
        """Return what a layer put out at all positions: (B, T, D)."""
        nothing = self._xp.zeros((self.batch, 0, self.config.hidden_size), dtype=self._xp.float32)
        return self._xp.concatenate([nothing, *self.taps[layer]], axis=1)

    def keep(self, position: int, rows: Sequence[int]) -> None:
        """Let some of the positions from ``position`` on take the place of all, in their order.

        Parameters
        ----------
        position : int
            Where the last chunk began, a tree of drafts.
        rows : sequence of int
            Rows of that chunk that were right, ascending.

        Raises
        ------
        InputError
            If the cache has no such rows.
        """
        chosen = [position + row for row in rows]
        if (
            position < 0
            or chosen != sorted(set(chosen))
            or not all(position <= p < self.length for p in chosen)
        ):
            raise InputError(
                f"KV cache: expected rising positions from {position} to {self.length - 1}, got {chosen}"
            )
        for layer in self._layers:
            begin = position - layer.base
            for array in (layer.k, layer.v):
                array[:, :, begin : begin + len(chosen)] = array[:, :, [p - layer.base for p in chosen]]
        self.length = position + len(chosen)

    def snapshot(self) -> dict[str, Any]:
        """Return the positions that later rows can see, as canonical-encodable arrays on the host.

        Returns
        -------
        dict
            ``length`` and, per layer of the model, ``first`` (position of the first key that is no sink) and
            ``k``, ``v`` of float32, shape (B, n_kv, positions, head_dim). The same positions give the same
            snapshot whatever the chunks they came in.
        """
        found: dict[str, Any] = {"length": self.length}
        for index, layer in zip(self.layers, self._layers, strict=True):
            sinks = min(self.config.sinks, self.length)
            first = 0 if layer.window is None else max(self.length - layer.window + 1, sinks)
            sinks = min(sinks, first)
            parts = [slice(0, sinks), slice(first - layer.base, self.length - layer.base)]
            found[f"layer{index}"] = {
                "first": first,
                "k": self._host(layer.k, parts),
                "v": self._host(layer.v, parts),
            }
        return found

    def _host(self, array: Any, parts: list[slice]) -> Any:
        pieces = [array[:, :, part, : self.config.head_dim] for part in parts]
        joined = self._xp.concatenate(pieces, axis=2)
        return joined.get() if hasattr(joined, "get") else np.asarray(joined)
