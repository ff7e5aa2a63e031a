"""Known-answer screening on a cluster, and the probation that lifts a quarantine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

from dask_sdc.cluster.auditor import Auditor
from dask_sdc.cluster.worker_plugin import NAME
from dask_sdc.evidence.ledger import read
from dask_sdc.exceptions import InputError
from dask_sdc.faults.plan import Fault, FaultPlan
from dask_sdc.faults.plugin import FaultInjector
from tests.cluster.sums import Sums, integer_blocks
from tests.cluster.waiting import until_async

FOUR = [("127.0.0.1", 1)] * 4
BLOCKS = integer_blocks(16)
TOTAL = np.concatenate(BLOCKS).sum(axis=0)

WRONG = Fault("one_bit", "compute", domain="2", role="witness")


async def inject(client: Client, *faults: Fault) -> FaultInjector:
    injector = FaultInjector(FaultPlan(list(faults)))
    await client.register_plugin(injector)
    return injector


@asynccontextmanager
async def comes_back(s: Scheduler, name: str) -> AsyncIterator[Worker]:
    async with Worker(s.address, name=name, nthreads=1) as worker:
        await until_async(lambda: worker.address in s.plugins[NAME].fingerprints)
        yield worker


@gen_cluster(client=True, nthreads=FOUR, timeout=250)
async def test_sound_workers_agree(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with Auditor(c, seed=1, domain="worker") as auditor:
        found = await auditor.screen(repeats=2)

    assert (found.outliers, found.unresolved, found.unchecked) == ((), (), ())
    assert not auditor.quarantined and len(s.workers) == 4


@pytest.mark.parametrize("where", ["compute", "sealed", "model", "frame"])
def test_a_worker_with_wrong_answers_is_removed(where: str, tmp_path: Path) -> None:
    @gen_cluster(client=True, nthreads=FOUR, timeout=250)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        async with Auditor(c, seed=1, domain="worker", ledger=tmp_path / "ledger") as auditor:
            await inject(c, Fault("one_bit", where, domain="2", role="witness"))
            found = await auditor.screen(repeats=1)
            state = await auditor.accumulate(Sums(), BLOCKS)

        assert found.suspects == ("2",)
        assert set(auditor.quarantined) == {"2"} and len(s.workers) == 3
        assert auditor.quarantined["2"].startswith("wrong known answers: ")
        np.testing.assert_array_equal(state["sum"], TOTAL)

    run()
    assert next(iter(read(tmp_path / "ledger"))).kind == "screening"


@gen_cluster(client=True, nthreads=FOUR, timeout=250)
async def test_without_quarantine_a_suspect_is_only_named(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with Auditor(c, seed=1, domain="worker", quarantine=False) as auditor:
        await inject(c, WRONG)
        found = await auditor.screen(repeats=1)

    assert found.suspects == ("2",)
    assert not auditor.quarantined and len(s.workers) == 4


@gen_cluster(client=True, nthreads=FOUR[:2], timeout=250)
async def test_of_two_domains_neither_is_named(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with Auditor(c, seed=1, domain="worker") as auditor:
        await inject(c, Fault("one_bit", "compute", domain="0", role="witness"))
        found = await auditor.screen(repeats=1)

    assert not found.outliers and found.unresolved
    assert not auditor.quarantined and len(s.workers) == 2


@gen_cluster(client=True, nthreads=FOUR, timeout=250)
async def test_a_clean_probation_lets_a_domain_in_again(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with Auditor(c, audit_rate=0.5, seed=1, domain="worker") as auditor:
        injector = await inject(c, WRONG)
        await auditor.screen(repeats=1)
        await c.unregister_worker_plugin(injector.name)
        async with comes_back(s, "2") as back:
            assert back.address not in auditor._session.addresses()

            assert await auditor.release("2", repeats=1) is True

            assert not auditor.quarantined
            await auditor.accumulate(Sums(), BLOCKS)
            assert auditor.rounds[-1].domains == 4


@gen_cluster(client=True, nthreads=FOUR, timeout=250)
async def test_a_failed_probation_keeps_a_domain_out(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with Auditor(c, audit_rate=0.5, seed=1, domain="worker") as auditor:
        await inject(c, WRONG)
        await auditor.screen(repeats=1)
        async with comes_back(s, "2") as back:
            assert await auditor.release("2", repeats=1) is False

            assert set(auditor.quarantined) == {"2"}
            assert s.workers[back.address] not in s.running
            await auditor.accumulate(Sums(), BLOCKS)
            assert auditor.rounds[-1].domains == 3


@gen_cluster(client=True, nthreads=FOUR[:3], timeout=250)
async def test_probation_among_too_few_is_no_proof(c: Client, s: Scheduler, *workers: Worker) -> None:
    """With one domain left to compare with, a wrong answer cannot be told from a right one."""
    async with Auditor(c, audit_rate=0.5, seed=1, domain="worker") as auditor:
        await inject(c, WRONG)
        await auditor.screen(repeats=1)
        await s.remove_worker(workers[1].address, stimulus_id="test")
        async with comes_back(s, "2"):
            assert await auditor.release("2", repeats=1) is False
            assert set(auditor.quarantined) == {"2"}


@gen_cluster(client=True, nthreads=FOUR, timeout=250)
async def test_only_what_is_in_quarantine_can_be_released(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with Auditor(c, seed=1, domain="worker") as auditor:
        with pytest.raises(InputError, match=r"expected a domain in quarantine \(\[\]\), got '2'"):
            await auditor.release("2")
        for repeats in (0, True, 1.5):
            with pytest.raises(InputError, match="repeats"):
                auditor.screen(repeats=repeats)  # type: ignore[arg-type]
