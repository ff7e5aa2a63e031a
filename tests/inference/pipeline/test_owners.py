"""What becomes of the stages of a driver that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from dask_sdc.inference.pipeline import Pipeline, owners
from dask_sdc.inference.weights.store import WeightStore
from tests.cluster.waiting import until
from tests.inference.pipeline.models import PROMPT, generated, left_over

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
