"""A small model in stages, and what plain generation in one process makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dask_sdc.inference.model.sampling import sample
from dask_sdc.inference.stage import TransformerStage
from dask_sdc.inference.weights.store import WeightStore, convert
from tests.inference.weights.tiny import LLAMA, MemorySource

CONFIG = replace(
    LLAMA,
    vocab_size=97,
    hidden_size=32,
    n_layers=6,
    head_dim=8,
    intermediate_size=48,
    max_context=256,
    sliding_window=(None,) * 6,
)
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)

#: For `gen_cluster`: whoever reads a store first, perhaps a test, starts threads of Zarr that stay.
THREADS_OF_ZARR = {"threads": False}


def write_store(path: Path) -> WeightStore:
    """Write the model and open it."""
    convert(MemorySource(CONFIG, text=None), path)
    return WeightStore.open(path)


def left_over(dask_worker: Any) -> list[str]:
    """Return what pipelines left on a worker."""
    plugins = dask_worker.plugins
    stages, coordinators = plugins["dask_sdc-stages"], plugins.get("dask_sdc-coordinators")
    hosted = coordinators.pipelines if coordinators is not None else ()
    return [*stages.seats, *stages.spares, *stages.shadows, *hosted]


def generated(
    store: WeightStore,
    prompt: tuple[int, ...],
    count: int,
    *,
    seed: int = 0,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> tuple[int, ...]:
    """Generate one token after the other in this process."""
    stage = TransformerStage(store, range(store.config.n_layers))
    stage.load()
    state, tokens = stage.init(), []
    logits = stage.forward(np.asarray([prompt]), state, rows=1)
    while True:
        tokens.append(sample(logits[0, -1], state.length, seed, temperature, top_p))
        if len(tokens) == count:
            return tuple(tokens)
        logits = stage.forward(np.asarray([tokens[-1:]]), state, rows=1)
