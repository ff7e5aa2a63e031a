"""Audited accumulation as a lazy graph: where it may run, what it computes, and what it refuses."""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask.delayed import Delayed
from distributed import Client, Scheduler, SchedulerPlugin, Worker
from distributed.utils_test import gen_cluster

from dask_sdc.cluster.auditor import Auditor
from dask_sdc.cluster.scheduler_plugin import GRAPH_PREFIX
from dask_sdc.exceptions import CorruptionError, InputTypeError, ShardError
from dask_sdc.faults.plan import Fault, FaultPlan
from dask_sdc.faults.plugin import FaultInjector
from tests.cluster.sums import Sums, integer_blocks

FOUR = [("127.0.0.1", 1)] * 4
BLOCKS = integer_blocks(16)
TOTAL = np.concatenate(BLOCKS).sum(axis=0)


def resources(graph: Delayed, role: str) -> list[set[str]]:
    """The labels that the layers of a role ask for."""
    layers = graph.dask.layers
    return [set(layers[name].annotations["resources"]) for name in layers if f"-{role}-" in name]


@gen_cluster(client=True, nthreads=FOUR)
async def test_layers_carry_the_labels_of_their_roles(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with Auditor(c, audit_rate=0.5, seed=1, domain="worker") as auditor:
        graph = await auditor.graph(Sums(), BLOCKS)
        state = await c.scheduler.sdc_snapshot()

        lanes = {f"sdc-domain-{w['domain']}": f"sdc-apart-{w['lane']}" for w in state["workers"]}
        primaries, audits = resources(graph, "primary"), resources(graph, "audit")
        assert {label for labels in primaries for label in labels} == set(lanes)
        assert {label for labels in audits for label in labels} <= set(lanes.values())
        assert all(len(labels) == 1 for labels in [*primaries, *audits])
        assert all(str(key).startswith(GRAPH_PREFIX) for key in graph.dask)
        result = await c.compute(graph)

    np.testing.assert_array_equal(result["sum"], TOTAL)


class Where(SchedulerPlugin):
    """Notes the worker of every task of a graph."""

    name = "where"

    def __init__(self) -> None:
        self.workers: dict[str, str] = {}

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if (start, finish) == ("processing", "memory"):
            self.workers[str(key)] = kwargs["worker"]


@gen_cluster(client=True, nthreads=FOUR)
async def test_primaries_and_audits_run_where_they_are_meant_to(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    where = Where()
    s.add_plugin(where)
    async with Auditor(c, audit_rate=1.0, seed=1, domain="worker") as auditor:
        graph = await auditor.graph(Sums(), BLOCKS)
        await c.compute(graph)

    primaries = {key: worker for key, worker in where.workers.items() if "-primary-" in key}
    audits = {key: worker for key, worker in where.workers.items() if "-audit-" in key}
    assert len(primaries) == len(audits) == 8
    assert set(primaries.values()) == {w.address for w in workers}
    assert all(primaries[key.replace("-audit-", "-primary-")] != worker for key, worker in audits.items())


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_graph_is_a_value_among_others(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with Auditor(c, audit_rate=0.25, seed=1) as auditor:
        graph = await auditor.graph(Sums(), BLOCKS)
        assert isinstance(graph, Delayed)
        doubled = dask.delayed(lambda state: 2 * state["sum"])(graph)
        both = dask.delayed(list)([doubled, graph["n"] + 1])
        double, n = await c.compute(both)

    np.testing.assert_array_equal(double, 2 * TOTAL)
    assert n == 16 * 50 + 1


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_graph_over_persisted_blocks_reads_them(c: Client, s: Scheduler, *workers: Worker) -> None:
    x = c.persist(da.concatenate([da.from_array(b, chunks=b.shape) for b in BLOCKS]))
    async with Auditor(c, audit_rate=0.25, seed=1) as auditor:
        graph = await auditor.graph(Sums(), x)
        del x
        result = await c.compute(graph)

    np.testing.assert_array_equal(result["sum"], TOTAL)


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_mismatch_in_a_graph_is_an_error_that_names_both(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    async with Auditor(c, audit_rate=1.0, seed=1, domain="worker") as auditor:
        graph = await auditor.graph(Sums(), BLOCKS)
        await c.register_plugin(FaultInjector(FaultPlan([Fault("value", "compute", domain="2")])))
        with pytest.raises(CorruptionError, match=r"domains \w+ and \w+: expected equal results"):
            await c.compute(graph)


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_damaged_payload_in_a_graph_is_an_error(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with Auditor(c, audit_rate=0.0, seed=1, domain="worker") as auditor:
        graph = await auditor.graph(Sums(), BLOCKS)
        await c.register_plugin(FaultInjector(FaultPlan([Fault("one_bit", "sealed", shard=3)])))
        with pytest.raises(ShardError, match="shard 3"):
            await c.compute(graph)


class Raises(Sums):
    def update(self, state: dict[str, Any], x: Any) -> dict[str, Any]:
        raise ValueError("no such sum")


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_shard_that_cannot_be_computed_in_a_graph_is_named(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    async with Auditor(c, audit_rate=0.0, seed=1) as auditor:
        graph = await auditor.graph(Raises(), BLOCKS)
        with pytest.raises(ShardError, match=r"shard 0.*no such sum"):
            await c.compute(graph)


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_domain_that_leaves_before_the_graph_is_computed_is_not_missed(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    async with Auditor(c, audit_rate=0.5, seed=1, domain="worker") as auditor:
        graph = await auditor.graph(Sums(), BLOCKS)
        await s.remove_worker(workers[1].address, stimulus_id="test")
        result = await c.compute(graph)

    np.testing.assert_array_equal(result["sum"], TOTAL)


@gen_cluster(client=True, nthreads=FOUR)
async def test_audits_that_a_graph_asks_for_are_paid_for(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with Auditor(c, audit_rate=0.25, seed=1) as auditor:
        graph = await auditor.graph(Sums(), BLOCKS)
        with pytest.raises(InputTypeError, match="expected a Statistic, got int"):
            await auditor.graph(5, BLOCKS)
    assert any("-audit-" in str(key) for key in graph.dask)
