"""Workers that die or freeze in any role, shards that kill, and clusters that go away and come back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

from dask_sdc.cluster.auditor import Auditor
from dask_sdc.exceptions import AuditWarning, ShardError
from dask_sdc.faults.plan import Fault, FaultPlan
from dask_sdc.faults.plugin import FaultInjector, delivered
from dask_sdc.statistics.moments import Moments
from tests.cluster.oddities import Slow, produced
from tests.cluster.sums import Sums, integer_blocks
from tests.cluster.waiting import until

BLOCKS = integer_blocks()
TOTAL = np.concatenate(BLOCKS).sum(axis=0)

Make = Callable[[int], Client]


@pytest.fixture(scope="module")
def mending() -> Iterator[Client]:
    """Four worker processes whose nannies put back whoever dies."""
    with (
        # A cluster takes a worker for lost that a loaded machine needs long to start.
        dask.config.set({"distributed.deploy.lost-worker-timeout": "120s"}),
        LocalCluster(n_workers=4, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def whole(mending: Client) -> Client:
    """The same, complete."""
    mending.wait_for_workers(4, timeout=60)
    return mending


def inject(client: Client, *faults: Fault) -> FaultInjector:
    injector = FaultInjector(FaultPlan(list(faults)))
    client.register_plugin(injector)
    return injector


def check(state: dict[str, Any]) -> None:
    assert state["n"] == 32 * 50
    np.testing.assert_array_equal(state["sum"], TOTAL)


# -- death and silence in every role -----------------------------------------------------------


@pytest.mark.parametrize("role", ["primary", "audit", "witness", "rerun", "heal"])
def test_a_worker_that_is_killed_in_a_role_costs_a_retry(whole: Client, role: str) -> None:
    # A worker that lies makes witnesses, reruns and staging necessary.
    faults = [Fault("killed", "compute", role=role, times=1)]
    if role in ("witness", "rerun", "heal"):
        faults.append(Fault("value", "compute", domain="2", role={"primary", "audit", "rerun"}))
    with Auditor(whole, audit_rate=0.25, seed=1, quarantine=False) as auditor:
        injector = inject(whole, *faults)
        try:
            state = auditor.accumulate(Sums(), BLOCKS)
        finally:
            whole.unregister_worker_plugin(injector.name)
        counted = [d.kind for d in whole.run_on_scheduler(delivered, run=injector.run)]

    check(state)
    assert counted.count("killed") == 1
    assert {d for r in auditor.receipts for d in r.suspected_domains} <= {"2"}


@pytest.mark.slow
@pytest.mark.parametrize("role", ["primary", "audit", "witness", "rerun", "heal"])
def test_a_worker_that_freezes_in_a_role_is_given_up(fresh_cluster: Make, role: str) -> None:
    client = fresh_cluster(4)
    faults = [Fault("frozen", "compute", role=role, times=1)]
    if role in ("witness", "rerun", "heal"):
        faults.append(Fault("value", "compute", domain="2", role={"primary", "audit", "rerun"}))
    with Auditor(client, audit_rate=0.25, seed=1, quarantine=False, worker_timeout_s=5) as auditor:
        injector = inject(client, *faults)
        state = auditor.accumulate(Sums(), BLOCKS)
        counted = [d.kind for d in client.run_on_scheduler(delivered, run=injector.run)]

    check(state)
    assert counted.count("frozen") == 1
    assert {d for r in auditor.receipts for d in r.suspected_domains} <= {"2"}


@contextmanager
def held_up(auditor: Auditor, folder: Path, shard_ids: Iterable[int]) -> Iterator[Callable[[], Any]]:
    """Accumulate in a thread; yield, once a shard is held up, a function that lets it go and waits."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(auditor.accumulate, Slow(folder, frozenset(shard_ids)), BLOCKS)

        def finish() -> Any:
            (folder / "go").touch()
            return done.result(100)

        try:
            until(lambda: started(folder) or done.done())
            yield finish
        finally:
            (folder / "go").touch()


def started(folder: Path) -> list[int]:
    """Process ids of the workers that hold a shard."""
    return [int(path.name.split("-")[2]) for path in folder.glob("started-*")]


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_signal_from_outside_costs_a_retry(fresh_cluster: Make, tmp_path: Path, number: int) -> None:
    client = fresh_cluster(3)
    with (
        Auditor(client, audit_rate=0.25, seed=1, worker_timeout_s=6) as auditor,
        held_up(auditor, tmp_path, {5}) as finish,
    ):
        os.kill(started(tmp_path)[0], number)
        check(finish())

    assert not auditor.receipts
    assert len(auditor.rounds[0].failed) == 1


@pytest.mark.slow
def test_a_worker_that_freezes_while_it_compiles_is_given_up(fresh_cluster: Make) -> None:
    client = fresh_cluster(3)
    with Auditor(client, audit_rate=0.25, seed=1, worker_timeout_s=3) as auditor:
        check(auditor.accumulate(Sums(), BLOCKS))
        os.kill(next(iter(client.run(os.getpid).values())), signal.SIGSTOP)
        mean = auditor.accumulate(Moments(), BLOCKS).mean

    np.testing.assert_allclose(mean, TOTAL / (32 * 50), rtol=1e-12, atol=1e-12)
    assert not auditor.receipts
    assert len(auditor.rounds[1].failed) == 1


def test_work_of_others_is_not_killed_to_get_on(fresh_cluster: Make, tmp_path: Path) -> None:
    client = fresh_cluster(3)
    addresses = list(client.scheduler_info()["workers"])
    theirs = client.submit(wait_for, tmp_path / "go", workers=addresses[:1], pure=False)
    with Auditor(client, audit_rate=0.25, seed=1, worker_timeout_s=3) as auditor:
        check(auditor.accumulate(Sums(), BLOCKS))
        assert not theirs.done()
        (tmp_path / "go").touch()
        assert theirs.result(30) == "done"
        assert not auditor.receipts and not auditor.quarantined
    assert list(client.scheduler_info()["workers"]) == addresses


def wait_for(path: Path) -> str:
    until(path.exists)
    return "done"


# -- shards that kill ----------------------------------------------------------------------------


def test_a_shard_that_kills_every_worker_is_named(fresh_cluster: Make) -> None:
    client = fresh_cluster(3)
    with Auditor(client, audit_rate=0, seed=1, max_retries=2) as auditor:
        # Late, so that what was done before it has come back and takes no part of the blame.
        inject(client, Fault("delayed", shard=7, delay=0.5), Fault("killed", shard=7))
        with pytest.raises(ShardError, match="shard 7: failed 3 times") as caught:
            auditor.accumulate(Sums(), BLOCKS)
    assert caught.value.shard_id == 7


# -- workers that come -----------------------------------------------------------------------------


def test_a_worker_that_joins_in_the_middle_is_used(fresh_cluster: Make, tmp_path: Path) -> None:
    client = fresh_cluster(1)
    with (
        pytest.warns(AuditWarning, match="no audit"),
        Auditor(client, audit_rate=0.25, seed=1) as auditor,
        held_up(auditor, tmp_path, {1}) as finish,
    ):
        client.cluster.scale(2)
        # The first worker is held up in shard 1, so that only the newcomer can do another.
        until(lambda: "1" in client.run_on_scheduler(produced))
        check(finish())

    assert auditor.rounds[0].domains == 1


# -- restarts --------------------------------------------------------------------------------------


def restart(client: Client) -> None:
    """Restart all workers; on a busy machine a nanny may lose its own, and three are enough to judge."""
    client.restart(wait_for_workers=False)
    client.wait_for_workers(3, timeout=60)


def test_a_restart_of_the_workers_between_rounds_changes_nothing(
    fresh_cluster: Callable[[int], Client],
) -> None:
    client = fresh_cluster(4)
    with Auditor(client, audit_rate=0.25, seed=1) as auditor:
        check(auditor.accumulate(Sums(), BLOCKS))
        restart(client)
        check(auditor.accumulate(Sums(), BLOCKS))
    before, after = (record.domains for record in auditor.rounds)
    assert (before, after >= 3) == (4, True)


def test_a_restart_of_the_workers_during_a_round_costs_retries(
    fresh_cluster: Callable[[int], Client], tmp_path: Path
) -> None:
    client = fresh_cluster(4)
    with (
        Auditor(client, audit_rate=0.25, seed=1) as auditor,
        held_up(auditor, tmp_path, {3, 4}) as finish,
    ):
        restart(client)
        check(finish())
    assert not auditor.receipts
