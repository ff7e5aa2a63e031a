"""Loading all of a source as workers do; imported by workers, so it imports little."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import numpy as np

from dask_sdc.graph.block import Block
from dask_sdc.graph.sources import Loader, Source

RNG = np.random.default_rng(20261129)


def loaded(source: Source, batch: int = 3) -> list[Block]:
    """Load all shards in batches that went through pickle, as on a worker; no futures."""
    result = []
    for start in range(0, source.n_shards, batch):
        ids = range(start, min(start + batch, source.n_shards))
        loader = pickle.loads(cloudpickle.dumps(source.batch(ids)))
        assert loader.shard_ids == tuple(ids)
        seen = run_loader(loader)
        assert [k for k, _ in seen] == list(ids)
        result += [block for _, block in seen]
    return result


def column(source: Source, name: str = "x") -> np.ndarray[Any, Any]:
    """Return one column of all shards, after checking each against the declaration."""
    blocks = [getattr(block, name) for block in loaded(source)]
    assert tuple(len(block) for block in blocks) == source.rows
    return np.concatenate(blocks)


def random_array(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    return (RNG.normal(size=shape) * 50).astype(dtype)


def run_loader(loader: Loader, *deps: Any) -> list[tuple[int, Block]]:
    """Return copies of all blocks of a batch: those that a reader yields do not outlive the next one."""
    return [(k, Block(*(None if c is None else np.array(c) for c in b))) for k, b in loader.blocks(deps)]
