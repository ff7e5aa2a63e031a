"""What becomes of the stages of a driver that is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

from dask_sdc.inference.pipeline import Pipeline, owners
from dask_sdc.inference.weights.store import WeightStore
from tests.cluster.waiting import until
from tests.inference.pipeline.models import PROMPT, THREADS_OF_ZARR, generated, left_over

DRIVER = """
import sys, time
from distributed import Client
from dask_sdc.inference.pipeline import {kind}

if __name__ == "__main__":
    pipeline = {kind}(Client(sys.argv[1]), sys.argv[2], stages=2, spares=1)
    print(next(pipeline.stream([3, 1, 4], 200)), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["Pipeline", pytest.param("RemotePipeline", marks=pytest.mark.slow)])
def test_stages_of_a_killed_driver_are_let_go(
    fresh_cluster: Callable[[int], Client],
    folder: Path,
    store: WeightStore,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owners, "GRACE", 0.1)
    client = fresh_cluster(3)
    scheduler: Any = client.scheduler
    command = [sys.executable, "-c", DRIVER.format(kind=kind), scheduler.address, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline().strip().isdigit()
        assert sum(map(len, client.run(left_over).values())) >= 3
        os.kill(driver.pid, signal.SIGKILL)
    until(lambda: not any(client.run(left_over).values()))
    with Pipeline(client, folder, stages=2, spares=1) as pipeline:
        assert pipeline.generate(PROMPT, 4).ids == generated(store, PROMPT, 4)


def test_a_worker_that_is_frozen_when_a_pipeline_closes_hears_of_it_later(store: WeightStore) -> None:
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, timeout=250, clean_kwargs=THREADS_OF_ZARR)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        async with Pipeline(c, store, stages=2, spares=1, name="same") as other:
            pipeline = await Pipeline(c, store, stages=2, spares=1, name="same", timeout=1.0)
            frozen = next(w for w in workers if w.address == pipeline.workers[1])
            leave, thawed = frozen.handlers["sdc_stage_leave"], asyncio.Event()

            async def lost(**arguments: Any) -> None:
                frozen.handlers["sdc_stage_leave"] = leave
                await thawed.wait()

            frozen.handlers["sdc_stage_leave"] = lost
            await pipeline.close()
            assert frozen.handlers["sdc_stage_leave"] is leave
            while pipeline.name in left_over(frozen):
                await asyncio.sleep(0.01)
            assert (await other.generate(PROMPT, 4)).ids == generated(store, PROMPT, 4)
            thawed.set()
        assert not any(map(left_over, workers))

    run()
