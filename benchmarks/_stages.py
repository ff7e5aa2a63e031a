"""A small random model in a weight store, and what plain generation in one process makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dask_sdc.inference.model import ModelConfig
from dask_sdc.inference.model.sampling import sample
from dask_sdc.inference.stage import TransformerStage
from dask_sdc.inference.weights import WeightStore, convert, shapes

LAYERS = 6
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=512,
    hidden_size=128,
    n_layers=LAYERS,
    n_heads=8,
    n_kv_heads=4,
    head_dim=16,
    intermediate_size=256,
    max_context=512,
    tied_embeddings=True,
    sliding_window=(None,) * LAYERS,
)


@dataclass
class RandomSource:
    """A `TensorSource` of normal deviates."""

    config: ModelConfig

    def __post_init__(self) -> None:
        self._shapes = shapes(self.config)

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self._shapes)

    def dtype_of(self, name: str) -> str:
        """Return the format of a tensor."""
        return "float32"

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """Return a tensor, the same each time."""
        rng = np.random.default_rng(self.names.index(name))
        return rng.normal(0, 0.3, self._shapes[name]).astype(np.float32)

    def tokenizer(self) -> bytes | None:
        """Return None: there are ids only."""
        return None


def write_store(path: Path) -> WeightStore:
    """Write the model and open it."""
    return convert(RandomSource(CONFIG), path)


def plain(
    store: WeightStore, prompt: tuple[int, ...], count: int, chunk: int, **settings: Any
) -> tuple[int, ...]:
    """Generate in this process, with the prefill in chunks."""
    stage = TransformerStage(store, range(store.config.n_layers))
    stage.load()
    state, tokens = stage.init(), []
    for begin in range(0, len(prompt), chunk):
        logits = stage.forward(np.asarray([prompt[begin : begin + chunk]]), state, rows=1)
    while True:
        tokens.append(sample(logits[0, -1], state.length, **settings))
        if len(tokens) == count:
            return tuple(tokens)
        logits = stage.forward(np.asarray([tokens[-1:]]), state, rows=1)
