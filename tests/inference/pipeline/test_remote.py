"""A coordinator on a worker: the same tokens, and a typed end from which others go on when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client, LocalCluster, Scheduler, Worker
from distributed.utils_test import gen_cluster

from dask_sdc.exceptions import (
    ClosedError,
    ClusterError,
    CorruptionError,
    GenerationInterrupted,
    InputError,
    InputTypeError,
    NoDomainError,
)
from dask_sdc.inference.pipeline import Pipeline, RemotePipeline
from dask_sdc.inference.pipeline.placement import LABEL
from dask_sdc.inference.session import LossKind
from dask_sdc.inference.weights.store import WeightStore
from tests.inference.pipeline.models import PROMPT, THREADS_OF_ZARR, generated, left_over

LABELLED = [("127.0.0.1", 1, {"resources": {LABEL: 1}})] * 3


def pid_of(client: Client, address: str) -> int:
    pid: int = client.run(os.getpid, workers=[address])[address]
    return pid


def test_a_worker_coordinates_and_heals(
    fresh_cluster: Callable[[int], Client], folder: Path, store: WeightStore
) -> None:
    client, expected = fresh_cluster(5), generated(store, PROMPT, 24)
    with RemotePipeline(client, str(folder), stages=2, spares=1) as remote:
        assert remote.coordinator == sorted(client.scheduler_info(n_workers=-1)["workers"])[-1]
        done = remote.generate(PROMPT, 24)
        assert (done.ids, done.prompt, done.text) == (expected, PROMPT, None)
        drawn = remote.generate(PROMPT, 12, temperature=0.9, top_p=0.8, seed=3).ids
        assert drawn == generated(store, PROMPT, 12, seed=3, temperature=0.9, top_p=0.8)
        state = remote.state()
        lost = next(k for k, worker in enumerate(state.workers) if worker != remote.coordinator)
        tokens = []
        for token in remote.stream(PROMPT, 24):
            tokens.append(token)
            if len(tokens) == 4:
                os.kill(pid_of(client, state.workers[lost]), signal.SIGKILL)
        assert tuple(tokens) == expected
        losses = [loss for report in remote.state().recoveries for loss in report.losses]
        assert [(loss.stage, loss.kind) for loss in losses] == [(lost, LossKind.UNREACHABLE)]
    assert not any(client.run(left_over).values())
    with pytest.raises(ClosedError, match="end was asked for"):
        remote.generate(PROMPT, 4)


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_lost_coordinator_ends_in_a_checkpoint(
    fresh_cluster: Callable[[int], Client], folder: Path, store: WeightStore, end: signal.Signals
) -> None:
    client, expected = fresh_cluster(4), generated(store, PROMPT, 200)
    remote = RemotePipeline(client, str(folder), stages=2, spares=0, timeout=4.0)
    pid, tokens = pid_of(client, remote.coordinator), []
    try:
        with pytest.raises(GenerationInterrupted, match=r"coordinator .* was lost") as info:
            for token in remote.stream(PROMPT, 200):
                tokens.append(token)
                if len(tokens) == 3:
                    os.kill(pid, end)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    error = info.value
    assert 3 <= len(error.committed) < 200
    assert error.committed[: len(tokens)] == tuple(tokens)
    assert error.committed == expected[: len(error.committed)] == error.checkpoint.committed
    with pytest.raises(ClosedError, match=r"coordinator .* was lost"):
        remote.generate(PROMPT, 4)
    remote.close()
    while remote.coordinator in client.scheduler_info(n_workers=-1)["workers"]:
        time.sleep(0.05)  # the test's time limit ends it
    left = 40 - len(error.committed) if len(error.committed) < 40 else 4
    wanted = expected[len(error.committed) : len(error.committed) + left]
    with Pipeline(client, str(folder), stages=2, spares=0) as pipeline:
        assert pipeline.generate(PROMPT, left, resume=error.checkpoint).ids == wanted
    with RemotePipeline(client, str(folder), stages=2, spares=0) as again:
        assert again.generate(PROMPT, left, resume=error.checkpoint).ids == wanted


def test_bad_input_is_named_before_any_work(store: WeightStore) -> None:
    @gen_cluster(client=True, nthreads=LABELLED, timeout=250, clean_kwargs=THREADS_OF_ZARR)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        with pytest.raises(InputError, match=r"worker: expected one of .* got 'tcp://nowhere:1'"):
            await RemotePipeline(c, store, worker="tcp://nowhere:1")
        with pytest.raises(InputError, match="replay: expected 'exact' or 'fast', got 'slow'"):
            await RemotePipeline(c, store, stages=2, replay="slow")
        with pytest.raises(NoDomainError, match="expected 4 workers for as many stages, got 3"):
            await RemotePipeline(c, store, stages=4)
        async with RemotePipeline(c, store, stages=2, worker=workers[0].address) as remote:
            with pytest.raises(InputError, match="expected settings among"):
                await remote.generate(PROMPT, 4, beams=2)
            with pytest.raises(InputError, match="max_new_tokens: expected an int"):
                await remote.generate(PROMPT, 0)
            with pytest.raises(InputError, match=r"seed: expected an int below 2\*\*64"):
                await remote.generate(PROMPT, 4, seed=2**64)
            with pytest.raises(InputTypeError, match="request: expected what can be pickled"):
                await remote.generate(PROMPT, 4, stop=threading.Lock())
            assert (await remote.generate(PROMPT, 4)).ids == generated(store, PROMPT, 4)
        assert not any(left_over(worker) for worker in workers)

    run()


def test_a_start_that_fails_or_takes_too_long_leaves_nothing(
    store: WeightStore, damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @gen_cluster(client=True, nthreads=LABELLED, timeout=250, clean_kwargs=THREADS_OF_ZARR)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        with pytest.raises(CorruptionError, match=r"layers\.1\.mlp\.up\.weight is damaged"):
            await RemotePipeline(c, str(damaged), stages=2)
        assert not any(left_over(worker) for worker in workers)
        monkeypatch.setattr("dask_sdc.inference.pipeline.remote._START", 0.01)
        with pytest.raises(ClusterError, match=r"no sign of life within 0\.01 s, before it could coordinate"):
            await RemotePipeline(c, store, stages=2)
        plugins = [worker.plugins["dask_sdc-coordinators"] for worker in workers]
        while any(plugin._starting for plugin in plugins) or any(map(left_over, workers)):
            await asyncio.sleep(0.01)  # the time limit ends it

    run()


def test_an_unlabelled_worker_coordinates_where_stages_have_labels(store: WeightStore) -> None:
    @gen_cluster(
        client=True, nthreads=[("127.0.0.1", 1), *LABELLED[:2]], timeout=250, clean_kwargs=THREADS_OF_ZARR
    )
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        async with RemotePipeline(c, store, stages=2, spares=0) as remote:
            assert remote.coordinator == workers[0].address
            assert workers[0].address not in (await remote.state()).workers
            ids = [token async for token in remote.stream(PROMPT, 8)]
            assert tuple(ids) == generated(store, PROMPT, 8)

    run()


def test_workers_in_this_process_coordinate_too(store: WeightStore) -> None:
    options = {"n_workers": 3, "threads_per_worker": 1, "dashboard_address": ":0", "processes": False}
    with (
        LocalCluster(**options) as cluster,
        Client(cluster) as client,
        RemotePipeline(client, store, stages=2, spares=0) as remote,
    ):
        for _ in range(2):
            assert remote.generate(PROMPT, 6).ids == generated(store, PROMPT, 6)


@pytest.mark.slow
def test_an_idle_coordinator_that_dies_is_noticed_and_leaves_nothing(
    fresh_cluster: Callable[[int], Client], folder: Path
) -> None:
    client = fresh_cluster(4)
    remote = RemotePipeline(client, str(folder), stages=2, spares=1, timeout=3.0)
    os.kill(pid_of(client, remote.coordinator), signal.SIGKILL)
    with pytest.raises(ClusterError, match=r"coordinator .* was lost"):
        remote.state()
    remote.close()
    while remote.coordinator in client.scheduler_info(n_workers=-1)["workers"]:
        time.sleep(0.05)  # the test's time limit ends it
    assert not any(client.run(left_over).values())
