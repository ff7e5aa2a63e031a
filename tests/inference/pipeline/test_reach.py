"""Workers that cannot dial each other, encrypted comms, labels, and slow machines."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster, Scheduler, Security, Worker
from distributed.utils_test import gen_cluster

from dask_sdc.exceptions import NoDomainError
from dask_sdc.faults.machines import arm_slowness, arm_unreachable, cut_off
from dask_sdc.faults.stages import StageFault, arm_stage_fault
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.pipeline.placement import LABEL
from dask_sdc.inference.session import LossKind
from dask_sdc.inference.weights.store import WeightStore
from tests.inference.pipeline.models import PROMPT, THREADS_OF_ZARR, generated

LABELLED = [("127.0.0.1", 1, {"resources": {LABEL: 1}})] * 3
#: Three workers for stages, and one beside them.
FOUR = [*LABELLED, ("127.0.0.1", 1)]


def in_cluster(body: Any) -> None:
    """Run a coroutine function with a client and its four workers, all in this process."""

    @gen_cluster(client=True, nthreads=FOUR, timeout=250, clean_kwargs=THREADS_OF_ZARR)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        await body(c, workers)

    run()


def counted_relays(worker: Worker) -> list[str]:
    """Return a list that every method relayed by a worker is added to."""
    seen = list[str]()
    for name in ("sdc_stage_relay", "sdc_stage_pipe"):
        worker.handlers[name] = _counting(worker.handlers[name], seen)
    return seen


def _counting(handler: Any, seen: list[str]) -> Any:
    async def relay(to: str, method: str, arguments: Any) -> Any:
        seen.append(method)
        return await handler(to=to, method=method, arguments=arguments)

    async def pipe(comm: Any, to: str, method: str, arguments: Any) -> Any:
        seen.append(method)
        return await handler(comm, to=to, method=method, arguments=arguments)

    return pipe if handler.__name__ == "pipe" else relay


def test_only_labelled_workers_hold_stages(store: WeightStore) -> None:
    async def body(c: Client, workers: tuple[Worker, ...]) -> None:
        async with Pipeline(c, store, stages=2, spares=4) as pipeline:
            holders = {*pipeline.workers, *pipeline.spares}
            assert holders == {worker.address for worker in workers[:3]}
        with pytest.raises(NoDomainError, match="expected 4 workers for as many stages, got 3"):
            await Pipeline(c, store, stages=4, spares=0)

    in_cluster(body)


def test_a_worker_that_comes_later_becomes_a_spare(store: WeightStore) -> None:
    @gen_cluster(client=True, nthreads=LABELLED[:2], timeout=250, clean_kwargs=THREADS_OF_ZARR)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        async with Pipeline(c, store, stages=2, spares=1) as pipeline:
            assert pipeline.spares == ()
            async with Worker(s.address, resources={LABEL: 1}) as newcomer:
                while pipeline.spares != (newcomer.address,):
                    await asyncio.sleep(0.05)  # the cluster's deadline ends it
                await arm_stage_fault(pipeline, StageFault("raise", 0, 4))
                assert (await pipeline.generate(PROMPT, 8)).ids == generated(store, PROMPT, 8)
                assert pipeline.workers[0] == newcomer.address

    run()


def test_stages_that_cannot_dial_each_other_are_relayed_and_healed(store: WeightStore) -> None:
    expected = generated(store, PROMPT, 16)

    async def body(c: Client, workers: tuple[Worker, ...]) -> None:
        for one, other in permutations(workers[:3], 2):
            await arm_unreachable(c, one.address, other.address)
        async with Pipeline(c, store, stages=2, spares=1) as pipeline:
            assert workers[3].address not in pipeline.workers
            passed = counted_relays(workers[3])
            assert (await pipeline.generate(PROMPT, 16)).ids == expected
            assert passed == ["take"]  # one connection for all chunks
            await arm_stage_fault(pipeline, StageFault("raise", 1, 8))
            assert (await pipeline.generate(PROMPT, 16)).ids == expected
            [report] = pipeline.recoveries
            assert [(loss.stage, loss.kind) for loss in report.losses] == [(1, LossKind.FAILED)]
            assert "replay" in passed

    in_cluster(body)


def test_a_stage_that_the_client_cannot_dial_is_relayed(store: WeightStore) -> None:
    async def body(c: Client, workers: tuple[Worker, ...]) -> None:
        for worker in workers[:3]:
            cut_off(c.rpc, worker.address)
        async with Pipeline(c, store, stages=3, spares=0) as pipeline:
            passed = counted_relays(workers[3])
            assert (await pipeline.generate(PROMPT, 16)).ids == generated(store, PROMPT, 16)
            assert (passed.count("take"), passed.count("tell")) == (1, 1)

    in_cluster(body)


def test_without_a_relay_the_error_says_who_cannot_be_reached(store: WeightStore) -> None:
    async def body(c: Client, workers: tuple[Worker, ...]) -> None:
        for worker in workers:
            cut_off(c.rpc, worker.address)
        with pytest.raises(NoDomainError, match="expected 2 workers for as many stages, got 0"):
            await Pipeline(c, store, stages=2, spares=0)

    in_cluster(body)


@pytest.fixture
def encrypted() -> Iterator[Client]:
    """Client of four worker processes whose comms are encrypted."""
    pytest.importorskip("cryptography", reason="certificates are made by cryptography")
    security = Security.temporary()
    options = {"n_workers": 4, "threads_per_worker": 1, "dashboard_address": ":0", "protocol": "tls"}
    with (
        LocalCluster(**options, processes=True, security=security) as cluster,
        Client(cluster, security=security) as client,
    ):
        client.wait_for_workers(4, timeout=30)
        yield client


def test_encrypted_comms_generate_and_heal(encrypted: Client, folder: Path, store: WeightStore) -> None:
    expected = generated(store, PROMPT, 16)
    with Pipeline(encrypted, folder, stages=3, spares=1) as pipeline:
        assert all(address.startswith("tls://") for address in pipeline.workers)
        pid = encrypted.run(os.getpid, workers=[pipeline.workers[1]])[pipeline.workers[1]]
        tokens = []
        for token in pipeline.stream(PROMPT, 16):
            tokens.append(token)
            if len(tokens) == 6:
                os.kill(pid, signal.SIGKILL)
        assert tuple(tokens) == expected
        assert [loss.stage for report in pipeline.recoveries for loss in report.losses] == [1]


def test_a_slow_worker_gets_fewer_layers(
    fresh_cluster: Callable[[int], Client], folder: Path, store: WeightStore
) -> None:
    client = fresh_cluster(2)
    slow = sorted(client.scheduler_info()["workers"])[0]
    arm_slowness(client, slow, 0.25)
    with Pipeline(client, folder, stages=2, spares=0) as pipeline:
        layers = [b - a for a, b in pairwise((0, *pipeline.boundaries, store.config.n_layers))]
        assert pipeline.workers[1] == slow  # the fastest come first
        assert layers == [5, 1]
        assert pipeline.generate(PROMPT, 4).ids == generated(store, PROMPT, 4)
