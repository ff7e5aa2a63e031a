"""Pipelined speculation over a long ring: chunks in flight side by side against one at a time.

Three stages on processes of their own, on a small random model whose text repeats itself. What the head and
the middle send arrives 50 ms later each: a traversal of the ring takes 100 ms and more. The synchronous path
drafts with the same drafter and waits for each answer before it feeds the next chunk; the pipelined one has
several chunks in flight. Both, and the path without a drafter, have to give the tokens of one process. Texts
take turns. The link takes messages at once: what it costs a sender to wait for a distant receiver's
acknowledgement is not in these figures.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from _bench import Bench, interleave, main
from _stages import plain, write_store
from distributed import Client, LocalCluster

from dask_sdc.faults.stages import arm_link_delay
from dask_sdc.inference.pipeline import Generation, Pipeline
from dask_sdc.inference.speculative import NGramDrafter

STAGES, CHUNK, DELAY = 3, 32, 0.05
WIDTH, DEPTH = 4, 6
#: Five ids again and again; the model goes on with a text that settles into a short loop.
PROMPT = (412, 11, 413, 240, 263) * 8


@contextmanager
def paths(client: Client, path: Path) -> Iterator[dict[str, Pipeline]]:
    """Start a pipeline for each way to decode, on the same workers, all with slow links."""
    drafter = NGramDrafter(width=WIDTH)
    settings = {
        "plain": {},
        "synchronous": {"drafter": drafter, "depth": 1},
        "pipelined": {"drafter": drafter, "depth": DEPTH},
    }
    with ExitStack() as stack:
        found = {}
        for name, given in settings.items():
            pipeline = Pipeline(
                client, path, stages=STAGES, spares=0, timeout=30.0, prefill_chunk=CHUNK, **given
            )
            found[name] = stack.enter_context(pipeline)
            for stage in range(STAGES - 1):
                arm_link_delay(pipeline, stage, DELAY)
        yield found


def measure(bench: Bench) -> None:
    """Generate in turns, and compare."""
    logging.getLogger("dask_sdc").setLevel(logging.ERROR)
    count, rounds = (96, 2) if bench.quick else (240, 7)
    done: dict[str, Generation] = {}
    wanted = {"plain": count // 4, "synchronous": count, "pipelined": count}  # the plain path is slow

    def generate(name: str, pipeline: Pipeline) -> None:
        done[name] = pipeline.generate(PROMPT, wanted[name], stop=[])

    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            n_workers=STAGES, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=60
        ) as cluster,
        Client(cluster) as client,
    ):
        path = Path(folder) / "model.zarr"
        expected = plain(write_store(path), PROMPT, count, CHUNK)
        with paths(client, path) as pipelines:
            contestants = {name: partial(generate, name, one) for name, one in pipelines.items()}
            slow = {"plain": contestants.pop("plain")}
            times = interleave(contestants, rounds)
            alone = interleave(slow, 1, warmup=0)
    bench.figure("ring_round_trip_ms", 1e3 * DELAY * (STAGES - 1))
    bench.figure("tokens", count)
    bench.figure(
        "different_texts", sum(one.ids != expected[: wanted[name]] for name, one in done.items()), equal=0
    )
    bench.figure("plain_tokens_per_s", wanted["plain"] / alone.median("plain"))
    for name in contestants:
        bench.figure(f"{name}_tokens_per_s", count / times.median(name))
        bench.figure(f"{name}_tokens_per_traversal", done[name].statistics.tokens_per_traversal)
        bench.figure(f"{name}_acceptance", done[name].statistics.acceptance)
    bench.figure("pipelined_of_synchronous", times.ratio("synchronous", "pipelined"), at_least=2.2)


if __name__ == "__main__":
    main("speculation", measure, __doc__)
