"""A stage: a contiguous part of a model that takes chunks, keeps a state per session and passes chunks on."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dask_sdc.exceptions import InputError
from dask_sdc.inference.model.cache import KVCache
from dask_sdc.inference.model.config import ModelConfig
from dask_sdc.inference.model.transformer import ROWS, Transformer
from dask_sdc.inference.weights.naming import tensors_of
from dask_sdc.inference.weights.store import WeightStore
from dask_sdc.statistics.kernels.cuda import cupy_device

__all__ = ["DEVICES", "Stage", "TransformerStage"]

Array = np.ndarray[Any, Any]

#: Where a stage may compute.
DEVICES = ("cpu", "cuda")


class Stage(ABC):
    """One stage of an autoregressive or streaming model.

    A stage before `load` is a small picklable description; `load` brings the weights and proves them. A
    chunk is an array whose first two axes are (B, T): B sequences that go together, T consecutive positions.
    All that `forward` returns must follow from the state and the chunk alone, bit for bit, or a replay
    cannot be proved.
    """

    @abstractmethod
    def load(self) -> None:
        """Read what the stage computes with, and prove it.

        Raises
        ------
        SDCError
            If it is missing or damaged; the stage must then not serve.
        """

    def cached(self, folder: str) -> Stage:
        """Copy what `load` reads into a folder, and return a description of the stage that loads from there.

        A spare may keep a stage so until it is needed. The default, which copies nothing and returns the
        stage itself, is right for one that carries its arrays with it.

        Parameters
        ----------
        folder : str
            A path on a local disk where nothing is yet; removed by whoever asked, when all is over.

        Returns
        -------
        Stage
            Not loaded, with the same digest. Its `load` proves again what it reads.

        Raises
        ------
        SDCError
            If what is to be copied is missing or damaged.
        OSError
            If it cannot be read, or the copy cannot be written.
        """
        return self

    @abstractmethod
    def init(self, *, batch: int = 1, capacity: int | None = None) -> Any:
        """Return the state of a new session.

        Parameters
        ----------
        batch : int
            Sequences that go together.
        capacity : int or None
            Most positions that will come; None is whatever the model can do.

        Raises
        ------
        ContextOverflow
            If the model has not that many positions.
        """

    @abstractmethod
    def forward(self, chunk: Array, state: Any, *, rows: int | None = None) -> Array:
        """Take a chunk, update the state, and return the chunk for the next stage.

        Parameters
        ----------
        chunk : ndarray, shape (B, T, ...)
            The next T positions.
        state : object
            What `init` returned; updated in place.
        rows : int or None
            Last positions whose output is wanted, which the last stage may use to compute no others; None is
            all.
        """

    def forward_rounded(self, chunk: Array, state: Any, *, rows: int | None = None) -> Array:
        """Take a long chunk in less time than `forward`, with the same result but for rounding.

        Fast replays go through it; one that gives the bits of `forward`, as the default does, is right too.
        """
        return self.forward(chunk, state, rows=rows)

    def forward_tree(self, chunk: Array, state: Any, parents: Sequence[int]) -> Array:
        """Take a tree of drafts; every row comes out as it does at the end of its branch alone.

        Parameters
        ----------
        chunk : ndarray, shape (B, N + 1, ...)
            The next position, and N nodes behind it; see `DraftTree`.
        state : object
            What `init` returned; updated in place, to be put right by `keep` or `truncate`.
        parents : sequence of int
            The node that each of the N follows, -1 for the first row.

        Raises
        ------
        InputError
            If the stage cannot, as is the default.
        """
        raise InputError(f"{type(self).__name__} cannot take a tree of drafts, got {len(parents)} of them")

    def keep(self, state: Any, position: int, rows: Sequence[int]) -> None:
        """Keep these rows of the tree that was taken at ``position``, and no others."""
        raise InputError(
            f"{type(self).__name__} cannot take a tree of drafts, was to keep {len(rows)} of one"
        )

    def tap(self, state: Any, layers: Sequence[int]) -> None:
        """Keep what some layers of the model put out from now on, those of them that are in this stage.

        Raises
        ------
        InputError
            If the stage has none, as is the default.
        """
        raise InputError(f"{type(self).__name__} has no layers, asked for the outputs of {list(layers)}")

    def tapped(self, state: Any) -> dict[int, Array]:
        """Return what was kept: per layer an array (B, T, ...) of all positions."""
        return {}

    @abstractmethod
    def position(self, state: Any) -> int:
        """Return how many positions a state has seen."""

    @abstractmethod
    def snapshot(self, state: Any) -> Any:
        """Return what later outputs depend on, as a value that `evidence.codec.encode` takes."""

    def truncate(self, state: Any, position: int) -> None:
        """Take back the positions from ``position`` on: they were speculated, or lost further on.

        Raises
        ------
        InputError
            If the stage cannot, as is the default. After a loss elsewhere it is then fed anew from the start.
        """
        raise InputError(f"{type(self).__name__} cannot take back positions, asked for {position}")

    @property
    def xp(self) -> Any:
        """Array namespace of what `forward` takes and returns, NumPy unless the stage is on a device.

        Chunks travel as NumPy arrays; whoever holds the stage carries them over and back.
        """
        return np

    @property
    @abstractmethod
    def digest(self) -> str:
        """sha256 in hexadecimal of what the stage computes with, proved by `load`."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that `load` brings into memory."""

    @property
    def bytes_per_position(self) -> int:
        """Bytes by which a state grows with every position of one sequence; 0 for a state of fixed size."""
        return 0

    @property
    def invariant_width(self) -> int:
        """Longest chunk in which a position gets the same bits whatever else is in the chunk; 0 for none."""
        return 0


class TransformerStage(Stage):
    """A block of layers of a decoder.

    Parameters
    ----------
    store : WeightStore
        The weights; the stage reads its own block only.
    layers : range
        Layers of the block.
    first : bool or None
        Whether the stage embeds token ids; None is whether it has the first layer.
    last : bool or None
        Whether the stage computes logits; None is whether it has the last layer.
    invariant : bool
        See `Transformer`.
    progress : callable or None
        Called with each tensor's name and bytes once it was proved; must be picklable to be sent.
    device : {"cpu", "cuda"}
        Where weights, keys and values are, and what computes.

    Raises
    ------
    InputError
        If the layers are not a run of the model's, or the device is another.
    """

    def __init__(
        self,
        store: WeightStore,
        layers: range,
        first: bool | None = None,
        last: bool | None = None,
        *,
        invariant: bool = True,
        progress: Callable[[str, int], None] | None = None,
        device: str = "cpu",
    ) -> None:
        if device not in DEVICES:
            raise InputError(f"device: expected one of {', '.join(DEVICES)}, got {device!r}")
        self.store, self.layers, self.device = store, layers, device
        self.first = layers.start == 0 if first is None else first
        self.last = layers.stop == store.config.n_layers if last is None else last
        self.invariant, self.progress = invariant, progress
        self.names = tensors_of(store.config, layers, self.first, self.last)
        self._model: Transformer | None = None

    @property
    def config(self) -> ModelConfig:
        """Description of the model."""
        return self.store.config

    def __getstate__(self) -> dict[str, Any]:
        # Weights are read where they are needed, never sent.
        return {**self.__dict__, "_model": None}

    def load(self) -> None:
        """Read the block's tensors, each proved by its sha256, pack them, and compile what they need.

        Raises
        ------
        CorruptionError
            If a tensor is damaged or missing, naming it.
        DeviceError
            If the stage is to be on a device, and there is none that CuPy can use.
        """
        self._model, xp = None, self.xp
        reader = _BlockReader(self.store, self.names, self.progress)
        self._model = Transformer(
            self.config, self.layers, self.first, self.last, reader, invariant=self.invariant, xp=xp
        )
        self._warm()

    def cached(self, folder: str) -> TransformerStage:
        """Copy the block's tensors, and no others, into a weight store there; see `WeightStore.copy`."""
        return TransformerStage(
            self.store.copy(self.names, folder),
            self.layers,
            self.first,
            self.last,
            invariant=self.invariant,
            progress=self.progress,
            device=self.device,
        )

    def _warm(self) -> None:
        """Run a short and a long chunk, so that no session waits for a compiler."""
        for steps in (1, min(ROWS + 1, self.config.max_context)):
            shape = (1, steps) if self.first else (1, steps, self.config.hidden_size)
            chunk = self.xp.zeros(shape, np.int64 if self.first else np.float32)
            self.forward(chunk, self.init(capacity=steps), rows=1)

    @property
    def xp(self) -> Any:
        """NumPy or CuPy, as the device is."""
        return np if self.device == "cpu" else cupy_device().xp

    @property
    def model(self) -> Transformer:
        """The loaded block.

        Raises
        ------
        InputError
            If it is not loaded.
        """
        if self._model is None:
            raise InputError(f"stage of {self.layers} is not loaded; call load() first")
        return self._model

    def init(self, *, batch: int = 1, capacity: int | None = None) -> KVCache:
        """Return an empty KV cache."""
        return KVCache(self.config, self.layers, batch, capacity, xp=self.xp)

    def forward(self, chunk: Array, state: KVCache, *, rows: int | None = None) -> Array:
        """Return activations (B, T, D), or logits (B, rows, V); see `Transformer.forward`."""
        y: Array = self.model.forward(chunk, state, rows=rows)
        return y

    def forward_rounded(self, chunk: Array, state: KVCache, *, rows: int | None = None) -> Array:
        """Return what `forward` does, through BLAS."""
        y: Array = self.model.forward(chunk, state, rows=rows, rounded=True)
        return y

    def forward_tree(self, chunk: Array, state: KVCache, parents: Sequence[int]) -> Array:
        """Return activations, or logits, of a tree of drafts."""
        y: Array = self.model.forward(chunk, state, parents=parents)
        return y

    def keep(self, state: KVCache, position: int, rows: Sequence[int]) -> None:
        """Keep these keys and values of a tree; see `KVCache.keep`."""
        state.keep(position, rows)

    def tap(self, state: KVCache, layers: Sequence[int]) -> None:
        """Keep what some layers put out from now on."""
        state.tap(layers)

    def tapped(self, state: KVCache) -> dict[int, Array]:
        """Return what was kept: activations (B, T, D)."""
        return {layer: state.tapped(layer) for layer in state.taps}

    def position(self, state: KVCache) -> int:
        """Return the positions in the cache."""
        return state.length

    def truncate(self, state: KVCache, position: int) -> None:
        """Take back speculated positions; see `KVCache.truncate`."""
        state.truncate(position)

    def snapshot(self, state: KVCache) -> dict[str, Any]:
        """Return keys and values; see `KVCache.snapshot`."""
        return state.snapshot()

    @property
    def digest(self) -> str:
        """sha256 over the digests of the stage's blocks, which the store proves tensor by tensor."""
        blocks = [*["embed"] * self.first, *(f"layers.{i}" for i in self.layers), *["head"] * self.last]
        text = "\n".join(f"{block} {self.store.block_digest(block)}" for block in blocks)
        return hashlib.sha256(f"transformer stage\n{text}".encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of the block's tensors."""
        return self.store.nbytes(self.names)

    @property
    def bytes_per_position(self) -> int:
        """Bytes of keys and values per position and sequence."""
        return KVCache.bytes_per_token(self.config, self.layers)

    @property
    def invariant_width(self) -> int:
        """`ROWS`: what goes through the row kernels in any case."""
        return ROWS


class _BlockReader(Mapping[str, Array]):
    """Tensors of a store, read a block at a time, so that packing holds one block twice and not all."""

    def __init__(
        self, store: WeightStore, names: list[str], progress: Callable[[str, int], None] | None
    ) -> None:
        self._store, self._names, self._progress = store, names, progress
        self._held: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._held:
            block = [other for other in self._names if _block_of(other) == _block_of(name)]
            self._held = self._store.load(block, self._progress)
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _block_of(name: str) -> str:
    """Return what is read together: a layer, or a tensor outside of all layers."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else name
