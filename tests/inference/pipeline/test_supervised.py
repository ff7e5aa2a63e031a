"""The command that a supervisor starts a worker for stages with: what it prints, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

from dask_sdc.exceptions import ClusterError, CorruptionError
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.pipeline.supervised import preflight
from dask_sdc.inference.weights.store import WeightStore
from tests.inference.pipeline.models import PROMPT, generated


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dask", "sdc", "stage", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_preflight_proves_weights_and_counts_layers(folder: Path, store: WeightStore) -> None:
    found = preflight(folder)
    assert (found.digest, found.layers) == (store.digest, store.config.n_layers)
    assert found.bytes_per_second > 0
    whole = store.nbytes()
    assert 0 < preflight(folder, memory=whole // 2).layers < store.config.n_layers
    with pytest.raises(ClusterError, match="bytes of memory for a stage of one layer, got 1000"):
        preflight(folder, memory=1000)


def test_preflight_names_a_damaged_tensor(damaged: Path) -> None:
    with pytest.raises(CorruptionError, match=r"layers\.1\.mlp\.up\.weight is damaged"):
        preflight(damaged)


def test_the_command_checks_and_says_what_is_fatal(damaged: Path, folder: Path) -> None:
    with started(str(damaged)) as process:
        assert line(process).startswith("FATAL layers.1.mlp.up.weight is damaged")
    assert process.returncode == 1
    with started(str(folder)) as process:
        assert line(process).startswith("CHECKED sha256 ")
    assert process.returncode == 0
    with started(str(folder), "tcp://127.0.0.1:9", "--timeout", "1") as process:
        assert line(process).startswith("CHECKED ")
        assert line(process).startswith("FATAL no scheduler at tcp://127.0.0.1:9 within 1 s")
    assert process.returncode == 1


@pytest.mark.slow
def test_a_supervised_worker_holds_stages_and_ends_as_it_is_told(folder: Path, store: WeightStore) -> None:
    cluster = LocalCluster(n_workers=0, dashboard_address=":0", silence_logs=50)
    with Client(cluster) as client:
        address = cluster.scheduler_address
        processes = [started(str(folder), address, "--nthreads", "1") for _ in range(3)]
        try:
            ready = [(line(process), line(process)) for process in processes]
            assert all(first.startswith("CHECKED ") for first, _ in ready)
            with Pipeline(client, folder, stages=2, spares=0) as pipeline:
                assert {f"READY {worker}" for worker in pipeline.workers} < {last for _, last in ready}
                assert pipeline.generate(PROMPT, 8).ids == generated(store, PROMPT, 8)
            # Told by a signal, and by the scheduler.
            processes[0].send_signal(signal.SIGTERM)
            assert processes[0].wait(60) == 0
            client.retire_workers([ready[1][1].removeprefix("READY ")])
            assert processes[1].wait(60) == 0
        finally:
            cluster.close()
            last = line(processes[2])
            code = processes[2].wait(60)
            for process in processes:
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGKILL)
                process.communicate()
        # A scheduler that closes tells its workers; nothing is left to restart for.
        assert (last, code) == ("", 0)
