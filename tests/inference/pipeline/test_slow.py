"""Stages that take long are not taken for lost where they need not be; else the error says what to do."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from typing import Any

import numpy as np
import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

from dask_sdc.exceptions import NoSpareError
from dask_sdc.faults.stages import StageFault, arm_stage_fault
from dask_sdc.inference.pipeline import ArrayPipeline, coordinator
from dask_sdc.inference.session import LossKind
from dask_sdc.inference.stage import Stage
from tests.inference.pipeline.models import THREADS_OF_ZARR

Array = np.ndarray[Any, Any]

#: What stages of this process wait for that are stuck.
GO_ON = threading.Event()


class Slow(Stage):
    """Adds one, and takes its time for it; stuck from a position on, if there is one."""

    def __init__(self, seconds: float = 0.0, stuck: int | None = None) -> None:
        self.seconds, self.stuck = seconds, stuck

    def load(self) -> None:
        pass

    def init(self, *, batch: int = 1, capacity: int | None = None) -> list[int]:
        return [0]

    def forward(self, chunk: Array, state: list[int], *, rows: int | None = None) -> Array:
        time.sleep(self.seconds)
        if self.stuck is not None and state[0] >= self.stuck:
            GO_ON.wait(60)
        state[0] += chunk.shape[1]
        return chunk + 1

    def position(self, state: list[int]) -> int:
        return state[0]

    def snapshot(self, state: list[int]) -> list[int]:
        return list(state)

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr((self.seconds, self.stuck)).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        return 8


def test_a_stage_that_is_slower_than_the_timeout_is_told_from_one_that_is_lost() -> None:
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, timeout=250, clean_kwargs=THREADS_OF_ZARR)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        GO_ON.clear()
        try:
            async with ArrayPipeline(c, [Slow(), Slow(stuck=1)], spares=1, timeout=1.0, depth=1) as pipeline:
                expected = (
                    r"stage 1: expected a spare, got none left; .*stage 1 answered, but took longer than "
                    r"timeout=1 s for a chunk on each of 2 workers: raise timeout if that is what it takes$"
                )
                with pytest.raises(NoSpareError, match=expected):
                    async for _ in pipeline.run(np.zeros((1, 1, 2)) for _ in range(3)):
                        pass
                GO_ON.set()
        finally:
            GO_ON.set()

    run()


def test_a_replay_that_takes_longer_than_the_timeout_in_all_is_no_loss() -> None:
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, timeout=250, clean_kwargs=THREADS_OF_ZARR)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        async with ArrayPipeline(c, [Slow(), Slow(0.05)], spares=1, timeout=1.0, depth=1) as pipeline:
            made = 0
            async for part in pipeline.run(np.full((1, 1, 2), k) for k in range(41)):
                assert (part == made + 2).all()
                made += 1
                if made == 40:
                    await next(w for w in workers if w.address == pipeline.workers[1]).close()
            assert made == 41
            [report] = pipeline.recoveries
            assert (report.attempts, report.replays[0].chunks) == (1, 40)

    run()


def test_where_all_workers_are_gone_there_is_no_spare_until_there_are_others() -> None:
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, timeout=250, clean_kwargs=THREADS_OF_ZARR)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        async with ArrayPipeline(c, [Slow(), Slow()], spares=1, timeout=2.0, depth=1) as pipeline:
            await asyncio.gather(*(worker.close() for worker in workers))
            with pytest.raises(NoSpareError, match="stage 0: expected a spare, got none left"):
                async for _ in pipeline.run([np.zeros((1, 1, 2))]):
                    pass
            async with Worker(s.address), Worker(s.address):
                await c.wait_for_workers(2)
                [part] = [part async for part in pipeline.run([np.zeros((1, 1, 2))])]
                assert (part == 2).all()

    run()


def test_a_stage_that_takes_in_a_large_chunk_may_answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_INTAKE", 1)  # so that a chunk of some bytes takes long

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, timeout=250, clean_kwargs=THREADS_OF_ZARR)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        async with ArrayPipeline(c, [Slow(), Slow()], spares=1, timeout=4.0, depth=1) as pipeline:
            before = pipeline.workers
            tail = next(worker for worker in workers if worker.address == before[1])
            stop = tail.handlers["sdc_stage_stop"]

            async def late(**arguments: Any) -> None:
                await asyncio.sleep(1.0)  # longer than stages of small chunks have
                await stop(**arguments)

            tail.handlers["sdc_stage_stop"] = late
            await arm_stage_fault(pipeline, StageFault("drop", 0, 1))
            made = [part async for part in pipeline.run(np.full((1, 1, 2), k) for k in range(3))]
            assert [part[0, 0, 0] for part in made] == [2, 3, 4]
            [report] = pipeline.recoveries
            assert [loss.kind for loss in report.losses] == [LossKind.GAP]
            assert pipeline.workers == before

    run()
