"""Half an hour of sessions while stages are killed, frozen, fail and lose messages at random.

Four clients at a time on one pipeline of three stages: greedy and sampled texts, whole, streamed, and streams
that are closed early. Every token is that of an unfailed run, every fault is found at its stage, and nothing
grows: memory and open files of this process and of workers, tasks of the scheduler, sessions on the stages.
All is drawn from one seed. With ``--quick`` it is one minute, which says little of leaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from _bench import Bench, main
from _stages import plain, write_store
from distributed import Client, LocalCluster

from dask_sdc.faults.stages import StageFault, arm_stage_fault
from dask_sdc.inference.pipeline import Pipeline

STAGES, WORKERS, CLIENTS, TOKENS, CHUNK, TIMEOUT, SEED = 3, 7, 4, 40, 16, 4.0, 11
KINDS = ("kill", "freeze", "raise", "drop")
WAYS = ("whole", "streamed", "closed early")
#: Seconds between a recovery and the next fault, and for which a process is warm before it is measured.
PAUSE, WARM = (0.2, 8.0), 10.0
#: Growth that is no leak: arenas of an allocator, connections to workers that have just come.
MIB, FILES = 64.0, 24


@dataclass(frozen=True)
class Text:
    """A text that is asked for, and what an unfailed run makes of it."""

    prompt: tuple[int, ...]
    settings: dict[str, Any]
    expected: tuple[int, ...]


@dataclass
class Tally:
    """What happened so far."""

    sessions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))
    wrong: int = 0
    faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    astray: list[str] = field(default_factory=list)
    over: bool = False


@dataclass
class Samples:
    """Memory (MiB) and open files of processes over their lives."""

    pids: list[int] = field(default_factory=list)
    seen: dict[int, list[tuple[float, float, int]]] = field(default_factory=dict)

    async def take(self) -> None:
        """Measure processes every second; one that is gone is left out."""
        while True:
            for pid in self.pids:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    row = (time.monotonic(), process.memory_info().rss / 2**20, process.num_fds())
                    self.seen.setdefault(pid, []).append(row)
            await asyncio.sleep(1.0)

    def growth(self, pid: int) -> tuple[float, int] | None:
        """Return the growth from the first to the last third of a process's warm life, None if too short."""
        rows = self.seen.get(pid, [])
        warm = [row for row in rows if row[0] > rows[0][0] + WARM]
        if len(warm) < 6:
            return None
        third = len(warm) // 3
        early, late = warm[:third], warm[-third:]
        memory, files = (
            statistics.median(row[k] for row in late) - statistics.median(row[k] for row in early)
            for k in (1, 2)
        )
        return memory, int(files)


def texts(path: Path) -> list[Text]:
    """Return texts of several lengths, every other one sampled."""
    store, found = write_store(path), []
    for k in range(10):
        prompt = tuple((37 * i + 101 * k) % 512 for i in range(5 + 9 * k))
        settings: dict[str, Any] = {"temperature": 0.9, "seed": k} if k % 2 else {}
        found.append(Text(prompt, settings, plain(store, prompt, TOKENS, CHUNK, **settings)))
    return found


async def talk(pipeline: Pipeline, choices: list[Text], rng: random.Random, tally: Tally) -> None:
    """Ask for one text after the other."""
    while not tally.over:
        text, way = rng.choice(choices), rng.choice(WAYS)
        most = TOKENS if way != "closed early" else rng.randrange(1, TOKENS)
        if way == "whole":
            ids = (await pipeline.generate(text.prompt, TOKENS, stop=[], **text.settings)).ids
        else:
            ids = await streamed(pipeline, text, most)
        tally.sessions[way] += 1
        tally.wrong += tuple(ids) != text.expected[:most]


async def streamed(pipeline: Pipeline, text: Text, most: int) -> list[int]:
    """Take some tokens of a stream and close it."""
    ids: list[int] = []
    stream = pipeline.stream(text.prompt, TOKENS, stop=[], **text.settings)
    async with contextlib.aclosing(stream):
        async for token in stream:
            ids.append(token)
            if len(ids) == most:
                break
    return ids


async def harm(
    client: Client, pipeline: Pipeline, rng: random.Random, tally: Tally, samples: Samples, until: float
) -> None:
    """Let one fault after the other strike, each after the one before was healed."""
    deck: list[str] = []
    while time.monotonic() < until:
        await ready(pipeline)
        pids = await client.run(os.getpid, on_error="ignore")
        samples.pids = [os.getpid(), *pids.values()]
        deck = deck or rng.sample(KINDS, len(KINDS))
        kind, stage = deck.pop(), rng.randrange(STAGES)
        if kind == "drop":
            stage = rng.randrange(STAGES - 1)  # the tail sends nothing on
        healed, before = len(pipeline.recoveries), pipeline.workers
        await arm_stage_fault(pipeline, StageFault(kind, stage, rng.randrange(60)))
        await eventually(lambda healed=healed: len(pipeline.recoveries) > healed, f"{kind} of stage {stage}")
        tally.faults[kind] += 1
        account(pipeline, kind, stage, healed, tally)
        for was, now in zip(before, pipeline.workers, strict=True):
            if was != now and was in pids:  # frozen, or not trusted any more: its nanny starts another
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[was], signal.SIGKILL)
        await asyncio.sleep(rng.uniform(*PAUSE))
    tally.over = True


def account(pipeline: Pipeline, kind: str, stage: int, healed: int, tally: Tally) -> None:
    """Hold a recovery against the fault that caused it."""
    reports = pipeline.recoveries[healed:]
    lost = [loss.stage for report in reports for loss in report.losses]
    if lost != [stage + (kind == "drop")]:  # the stage after it has a gap
        tally.astray.append(
            f"{kind} of stage {stage} was told as {[str(report.losses) for report in reports]}"
        )


async def ready(pipeline: Pipeline) -> None:
    """Wait until a spare holds every stage."""
    await eventually(
        lambda: any(len(pipeline._crew._prepared[address]) == STAGES for address in pipeline.spares),
        "a spare with every stage",
    )


async def eventually(condition: Any, what: str) -> None:
    """Wait for something, two minutes at most."""
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected {what} within 120 s")
        await asyncio.sleep(0.05)


def left_over(name: str, dask_worker: Any) -> int:
    """Return the sessions and messages that a worker's stage still holds."""
    seat = dask_worker.plugins["dask_sdc-stages"].seats.get(name)
    if seat is None:
        return 0
    return len(seat.host.sessions) + len(seat._inbox) + len(seat._outbox)


async def soak(bench: Bench, folder: str) -> None:
    """Run it all on one event loop, scheduler and coordinator included."""
    path, seconds = Path(folder) / "model.zarr", 25.0 if bench.quick else 1800.0
    choices = await asyncio.to_thread(texts, path)
    tally, samples = Tally(), Samples()
    async with (
        LocalCluster(
            n_workers=WORKERS,
            threads_per_worker=1,
            processes=True,
            dashboard_address=":0",
            silence_logs=60,
            asynchronous=True,
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
        Pipeline(client, path, stages=STAGES, spares=2, timeout=TIMEOUT, prefill_chunk=CHUNK) as pipeline,
    ):
        until = time.monotonic() + seconds
        talks = [
            asyncio.ensure_future(talk(pipeline, choices, random.Random(f"{SEED}-{k}"), tally))
            for k in range(CLIENTS)
        ]
        sampling = asyncio.ensure_future(samples.take())
        await harm(client, pipeline, random.Random(SEED), tally, samples, until)
        await asyncio.gather(*talks)
        sampling.cancel()
        held = sum((await client.run(left_over, pipeline.name)).values())
        running = pipeline._running
        held += len(running._sessions) + len(running._waiting) + running._taken
        tasks = len(cluster.scheduler.tasks)
        recoveries = len(pipeline.recoveries)
    report(bench, tally, samples)
    bench.figure("recoveries", recoveries, equal=sum(tally.faults.values()))
    bench.figure("left_on_stages", held, equal=0)
    bench.figure("tasks_in_scheduler", tasks, equal=0)


def report(bench: Bench, tally: Tally, samples: Samples) -> None:
    """Hand in figures of tokens, faults and leaks."""
    for line in tally.astray:
        bench.say(line)
    for way, count in tally.sessions.items():
        bench.figure(f"sessions_{way.replace(' ', '_')}", count)
    bench.figure("wrong", tally.wrong, equal=0)
    for kind, count in tally.faults.items():
        bench.figure(f"faults_{kind}", count)
    bench.figure("astray", len(tally.astray), equal=0)
    growths = {pid: growth for pid in samples.seen if (growth := samples.growth(pid)) is not None}
    bench.figure("processes_measured", len(growths))
    here = {"driver": [os.getpid()], "worker": growths.keys() - {os.getpid()}}
    for name, pids in here.items():
        grown = [growths[pid] for pid in pids if pid in growths]
        bench.figure(f"{name}_growth_mib", max((one[0] for one in grown), default=0.0), at_most=MIB)
        bench.figure(f"{name}_open_files_growth", max((one[1] for one in grown), default=0), at_most=FILES)


def measure(bench: Bench) -> None:
    """Run the soak."""
    logging.getLogger("dask_sdc").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(soak(bench, folder))


if __name__ == "__main__":
    main("stage_soak", measure, __doc__)
