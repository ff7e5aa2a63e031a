"""A worker that computes, stores or receives wrongly is found, named, removed, and healed from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from distributed import Client

from dask_sdc.cluster.auditor import Auditor
from dask_sdc.evidence.ledger import read, verify
from dask_sdc.faults.plan import Fault, FaultPlan
from dask_sdc.faults.plugin import FaultInjector
from tests.cluster.sums import Sums, integer_blocks

BLOCKS = integer_blocks()
TOTAL = np.concatenate(BLOCKS).sum(axis=0)

Make = Callable[[int], Client]


def inject(client: Client, *faults: Fault) -> None:
    client.register_plugin(FaultInjector(FaultPlan(list(faults))))


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("one_bit", "compute"),
        pytest.param("nan", "compute", marks=pytest.mark.slow),
        ("one_bit", "sealed"),
        ("one_bit", "model"),
        pytest.param("one_bit", "frame", marks=pytest.mark.slow),
        ("one_bit", "input"),
    ],
)
def test_a_persistent_fault_is_named_and_healed(fresh_cluster: Make, kind: str, where: str) -> None:
    client = fresh_cluster(4)
    # A high bit: one so low that it stays inside of the envelope is followed up, but accuses nobody.
    bit = 62 if kind == "one_bit" else None
    with Auditor(client, audit_rate=1.0, seed=1) as auditor:
        inject(client, Fault(kind, where, domain="2", bit=bit))
        state = auditor.accumulate(Sums(), BLOCKS)

    assert state["n"] == 32 * 50
    np.testing.assert_array_equal(state["sum"], TOTAL)
    assert {r.suspected_domains for r in auditor.receipts} == {("2",)}
    assert {r.quarantine_status for r in auditor.receipts} == {"committed"}
    assert {r.persistence for r in auditor.receipts} == {"persistent"}
    assert set(auditor.quarantined) == {"2"}
    assert len(client.scheduler_info(n_workers=-1)["workers"]) == 3


def test_a_transient_fault_of_an_audited_shard_is_told_from_a_persistent_one(fresh_cluster: Make) -> None:
    client = fresh_cluster(4)
    with Auditor(client, audit_rate=1.0, seed=1) as auditor:
        inject(client, Fault("one_bit", "compute", domain="1", role="primary", times=1, bit=62))
        state = auditor.accumulate(Sums(), BLOCKS)

    np.testing.assert_array_equal(state["sum"], TOTAL)
    (receipt,) = auditor.receipts
    assert (receipt.suspected_domains, receipt.persistence) == (("1",), "transient")


def test_a_faulty_auditor_is_named_and_the_primary_is_not(fresh_cluster: Make) -> None:
    client = fresh_cluster(4)
    with Auditor(client, audit_rate=0.5, seed=1) as auditor:
        inject(client, Fault("one_bit", "compute", domain="3", role={"audit", "rerun"}, bit=62))
        state = auditor.accumulate(Sums(), BLOCKS)

    np.testing.assert_array_equal(state["sum"], TOTAL)
    assert {r.suspected_domains for r in auditor.receipts} == {("3",)}


def test_without_quarantine_the_answer_is_healed_and_the_worker_stays(fresh_cluster: Make) -> None:
    client = fresh_cluster(4)
    with Auditor(client, audit_rate=0.5, seed=1, quarantine=False) as auditor:
        inject(client, Fault("one_bit", "compute", domain="0", bit=62))
        state = auditor.accumulate(Sums(), BLOCKS)

    np.testing.assert_array_equal(state["sum"], TOTAL)
    assert {r.quarantine_status for r in auditor.receipts} == {"disabled"}
    assert len(client.scheduler_info(n_workers=-1)["workers"]) == 4


def test_two_domains_accuse_nobody(fresh_cluster: Make) -> None:
    client = fresh_cluster(2)
    with Auditor(client, audit_rate=0.5, seed=1) as auditor:
        inject(client, Fault("one_bit", "compute", domain="0", bit=62))
        auditor.accumulate(Sums(), BLOCKS)

    assert auditor.receipts
    assert {r.suspected_domains for r in auditor.receipts} == {()}
    assert {r.quarantine_status for r in auditor.receipts} == {"deferred:insufficient_witnesses"}
    assert not auditor.quarantined


def test_receipts_and_rounds_are_in_a_ledger_that_verifies(fresh_cluster: Make, tmp_path: object) -> None:
    client = fresh_cluster(4)
    path = f"{tmp_path}/ledger.jsonl"
    with Auditor(client, audit_rate=0.25, seed=1, ledger=path) as auditor:
        inject(client, Fault("one_bit", "compute", domain="2", bit=62))
        auditor.accumulate(Sums(), BLOCKS)

    assert verify(path).ok
    kinds = [entry.kind for entry in read(path)]
    assert kinds.count("receipt") == len(auditor.receipts) > 0
    assert kinds.count("round") == 1
