"""A long text through a pipeline in a process of its own, which says what memory that took.

``python -m tests.inference.pipeline.long_context STORE SPILL`` prints one line of JSON.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from dataclasses import replace

import numpy as np
import psutil

from dask_sdc.inference.model.config import ModelConfig
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.pipeline.worker import NAME
from tests.inference.weights.tiny import LLAMA

#: One full layer of seven.
CONFIG: ModelConfig = replace(
    LLAMA,
    vocab_size=61,
    hidden_size=256,
    n_layers=7,
    n_heads=2,
    n_kv_heads=2,
    head_dim=32,
    intermediate_size=64,
    max_context=40_000,
    sliding_window=(64, 64, 64, None, 64, 64, 64),
)
CUT, LENGTH, COUNT, CHUNK, JOURNAL = 3, 32_768, 4, 256, 2**20


def prompt(length: int = LENGTH) -> tuple[int, ...]:
    """Return the first ids of the text."""
    return tuple(np.random.default_rng(5).integers(0, CONFIG.vocab_size, LENGTH)[:length].tolist())


class Peak:
    """Watches the memory of this process, as the peak of `getrusage` is that of loading and compiling."""

    def __init__(self) -> None:
        self._process, self._over = psutil.Process(), threading.Event()
        self.began = self.most = self._process.memory_info().rss
        self._watch = threading.Thread(target=self._look)
        self._watch.start()

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.most = max(self.most, self._process.memory_info().rss)

    def grown(self) -> int:
        """Stop, and return the bytes by which memory had grown at most."""
        self._over.set()
        self._watch.join()
        return self.most - self.began


def main(store: str, spill: str) -> None:
    """Generate from a short prefix, so that all is loaded and compiled, and then from the whole text."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=2, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        Pipeline(
            client, store, boundaries=[CUT], spares=0, prefill_chunk=CHUNK, journal_bytes=JOURNAL, spill=spill
        ) as pipeline,
    ):
        short = pipeline.generate(prompt(1024), COUNT, stop=())
        gc.collect()
        peak, tokens = Peak(), list[int]()
        plugins = [worker.plugins[NAME] for worker in cluster.workers.values()]
        for token in pipeline.stream(prompt(), COUNT, stop=()):
            tokens.append(token)
            if len(tokens) == 1:
                seats = [seat.host for plugin in plugins for seat in plugin.seats.values()]
                held = [one for host in sorted(seats, key=lambda h: h.number) for one in host._held.values()]
                journals = [one.journal for one in held if one.journal is not None]
                said = {
                    "caches": [one.state.nbytes for one in held],
                    "positions": [one.state.length for one in held],
                    "journals": [journal.nbytes for journal in journals],
                    "spilled": [journal.spilled for journal in journals],
                }
        said |= {"short": short.ids, "tokens": tokens, "grown": peak.grown()}
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
