"""Workers that read their input wrongly are found and named; those that read it rightly are not."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

from dask_sdc.cluster.auditor import Auditor
from dask_sdc.exceptions import CorruptionError
from dask_sdc.faults.plan import Fault, FaultPlan
from dask_sdc.faults.plugin import FaultInjector
from dask_sdc.statistics.kmeans import KMeans
from tests.cluster.sums import Sums, integer_blocks

FOUR = [("127.0.0.1", 1)] * 4
BLOCKS = integer_blocks(32)
X = np.concatenate(BLOCKS)


class HashedSums(Sums):
    """Sums that have their input hashed in every round."""

    hash_input = True


def given(client: Client, kind: str) -> Any:
    """The same blocks, as a list or in the memory of the workers."""
    if kind == "list":
        return BLOCKS
    return client.persist(da.from_array(X, chunks=(50, -1)))


@pytest.mark.parametrize(("kind", "times"), [("list", 1), ("list", None), ("persisted", None)])
def test_a_worker_that_reads_wrongly_is_named(kind: str, times: int | None) -> None:
    @gen_cluster(client=True, nthreads=FOUR, timeout=250)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        data = given(c, kind)
        async with Auditor(c, audit_rate=1.0, seed=1, domain="worker") as auditor:
            fault = Fault("value", "input", domain="2", role="primary" if times else None, times=times)
            await c.register_plugin(FaultInjector(FaultPlan([fault])))
            state = await auditor.accumulate(HashedSums(), data)
        np.testing.assert_array_equal(state["sum"], X.sum(axis=0))
        assert {d for r in auditor.receipts for d in r.suspected_domains} == {"2"}
        assert set(auditor.quarantined) == {"2"}

    run()


def test_a_persisted_block_that_was_read_wrongly_once_is_read_again_and_at_most_its_reader_is_named() -> None:
    @gen_cluster(client=True, nthreads=FOUR, timeout=250)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        data = given(c, "persisted")
        async with Auditor(c, audit_rate=1.0, seed=1, domain="worker") as auditor:
            await c.register_plugin(FaultInjector(FaultPlan([Fault("value", "input", domain="2", times=1)])))
            state = await auditor.accumulate(HashedSums(), data)
        np.testing.assert_array_equal(state["sum"], X.sum(axis=0))
        # Whether it changed in memory or was misread shows only if results are compared.
        assert auditor.receipts and set(auditor.quarantined) <= {"2"}
        assert {d for r in auditor.receipts for d in r.suspected_domains} <= {"2"}

    run()


@pytest.mark.parametrize("kind", ["list", "persisted"])
def test_an_input_that_was_read_wrongly_in_an_earlier_round_blames_no_sound_worker(kind: str) -> None:
    @gen_cluster(client=True, nthreads=FOUR, timeout=250)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        data = given(c, kind)
        estimator = KMeans(2, seed=3)
        async with Auditor(c, audit_rate=0.1, seed=1, domain="worker") as auditor:
            clean = await auditor.fit(estimator, data, max_iter=4, tol=0)
        async with Auditor(c, audit_rate=0.1, seed=1, domain="worker") as auditor:
            fault = Fault("value", "input", domain="2", round=1, times=1, role="primary")
            await c.register_plugin(FaultInjector(FaultPlan([fault])))
            fitted = await auditor.fit(estimator, data, max_iter=4, tol=0)
        assert {d for r in auditor.receipts for d in r.suspected_domains} <= {"2"}
        assert set(auditor.quarantined) <= {"2"}
        np.testing.assert_array_equal(fitted.result.centres, clean.result.centres)

    run()


def test_a_scattered_block_that_changes_is_an_error_that_names_the_shard() -> None:
    @gen_cluster(client=True, nthreads=FOUR, timeout=250)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        futures = await c.scatter(BLOCKS[:8])
        data = da.concatenate([da.from_delayed(f, (50, 3), float) for f in futures])
        async with Auditor(c, audit_rate=1.0, seed=1, domain="worker") as auditor:
            await c.register_plugin(FaultInjector(FaultPlan([Fault("value", "input", domain="2", times=1)])))
            with pytest.raises(CorruptionError, match=r"shard \d: its block changed in memory and cannot"):
                await auditor.accumulate(HashedSums(), data)

    run()
