"""The injector on workers: delivered to whom it says, counted once, and gone when told so."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil
import pytest
from distributed import Client, LocalCluster, Worker, WorkerPlugin

from dask_sdc.cluster.worker_plugin import NAME, WRAPPERS, run_batch
from dask_sdc.evidence.codec import decode, encode
from dask_sdc.evidence.seal import ROLES, SealedBatch, open_batch
from dask_sdc.exceptions import DecodeError, InputError, InputTypeError
from dask_sdc.faults import Delivery, Fault, FaultContext, FaultPlan, Tally, flip_bits, inject_bit_flip
from dask_sdc.faults.plan import KINDS
from dask_sdc.faults.plugin import (
    FaultInjector,
    FaultyExecutor,
    arm_corruption,
    clear_corruption,
    delivered,
)
from dask_sdc.graph.execute import Assignment, BatchContext, Blob, ShardExecutor
from dask_sdc.graph.sources import make_source
from dask_sdc.statistics.base import ShardInfo, Statistic

BLOCKS = [np.arange(12.0).reshape(4, 3) + i for i in range(4)]
SHARDS = tuple(range(4))


@dataclass(frozen=True)
class Total(Statistic):
    """Count and sum, the smallest statistic that has an integer and an array."""

    hash_input = True

    def init(self, info: ShardInfo) -> dict[str, Any]:
        return {"n": 0, "sum": np.zeros(info.shape)}

    def update(self, state: dict[str, Any], x: Any) -> dict[str, Any]:
        return {"n": state["n"] + len(x), "sum": state["sum"] + x.sum(axis=0)}

    def combine(self, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        return {"n": a["n"] + b["n"], "sum": a["sum"] + b["sum"]}

    def finalize(self, state: dict[str, Any]) -> dict[str, Any]:
        return state


class Stub(WorkerPlugin):
    """What the injector needs of dask_sdc's own worker plugin: an executor, wrapped if asked."""

    name = NAME

    def setup(self, worker: Worker) -> None:
        executor = ShardExecutor(f"domain-{worker.name}", worker.address, "same")
        for wrap in getattr(worker, WRAPPERS, ()):
            executor = wrap(executor)
        self.executor = executor


class LocalInjector(FaultInjector):
    """Counts on the spot, so that an executor can be tested without a cluster."""

    def __init__(self, *faults: Fault, hook: Any = None) -> None:
        super().__init__(FaultPlan(faults), hook)
        self.tally = Tally()

    def claim(self, index: int, kind: str, times: int | None, context: FaultContext) -> bool:
        return self.tally.claim(Delivery(index, kind, context), times)


def blobs(role: str = "primary", shards: tuple[int, ...] = SHARDS, number: int = 0) -> tuple[Blob, Blob]:
    """Statistic and batch as they travel."""
    info = ShardInfo((3,), np.dtype(float))
    loader = make_source(BLOCKS).batch(shards)
    context = BatchContext(number, role, 0, shards)
    return Blob.of(Total()), Blob.of(Assignment(context, None, (), loader, info))


def executor(*faults: Fault, hook: Any = None, domain: str = "d") -> FaultyExecutor:
    return FaultyExecutor.around(ShardExecutor(domain, "tcp://w:1", "f"), [LocalInjector(*faults, hook=hook)])


def run(faulty: ShardExecutor, role: str = "primary", **kwargs: Any) -> SealedBatch:
    """One batch through an executor, times apart from which it is always the same."""
    batch = open_batch(faulty.run(*blobs(role, **kwargs), ()))
    return replace(batch, records=tuple(replace(record, elapsed=0.0) for record in batch.records))


CLEAN = run(ShardExecutor("d", "tcp://w:1", "f"))


# -- the executor, without a cluster --------------------------------------------------------


def test_nothing_armed_for_this_batch_changes_nothing() -> None:
    assert run(executor()) == CLEAN
    assert run(executor(Fault("one_bit", role="audit"), Fault("nan", domain="e"))) == CLEAN


@pytest.mark.parametrize("kind", ["one_bit", "multi_bit", "value", "stuck_at"])
def test_a_fault_of_the_computation_leaves_a_seal_that_fits(kind: str) -> None:
    batch = run(executor(Fault(kind, "compute", shard=2)))
    assert batch.records[:2] + batch.records[3:] == CLEAN.records[:2] + CLEAN.records[3:]
    wrong = batch.records[2]
    assert wrong.intact
    assert wrong.payload != CLEAN.records[2].payload
    assert decode(wrong.payload).keys() == {"n", "sum"}
    assert wrong.input_digest == CLEAN.records[2].input_digest


def test_a_nan_is_a_violation_that_the_free_checks_see() -> None:
    assert [record.status for record in run(executor(Fault("nan", shard={1, 3}))).records] == [
        "ok",
        "violation",
        "ok",
        "violation",
    ]


@pytest.mark.parametrize("kind", ["one_bit", "multi_bit", "value", "stuck_at", "nan"])
def test_a_fault_after_sealing_leaves_a_seal_that_does_not_fit(kind: str) -> None:
    batch = run(executor(Fault(kind, "sealed", shard=1)))
    assert [record.intact for record in batch.records] == [True, False, True, True]
    assert batch.records[1].digest == CLEAN.records[1].digest
    assert batch.records[1].status == "ok"


def test_a_fault_of_the_samples_shows_in_the_input_digest() -> None:
    batch = run(executor(Fault("value", "input", shard=0)))
    assert batch.records[1:] == CLEAN.records[1:]
    assert batch.records[0].intact
    assert batch.records[0].input_digest != CLEAN.records[0].input_digest
    assert batch.records[0].payload != CLEAN.records[0].payload
    assert BLOCKS[0][0, 0] == 0.0


@pytest.mark.parametrize("kind", ["one_bit", "multi_bit", "stuck_at"])
def test_a_fault_of_the_model_is_a_garbled_batch(kind: str) -> None:
    batch = run(executor(Fault(kind, "model")))
    assert (batch.status, batch.records) == ("garbled", ())
    assert batch.model_digest != CLEAN.model_digest


@pytest.mark.parametrize("kind", ["one_bit", "multi_bit", "stuck_at"])
def test_a_fault_of_the_frame_is_seen(kind: str) -> None:
    seen = 0
    for seed in range(40):
        try:
            batch = run(executor(Fault(kind, "frame", seed=seed)))
        except DecodeError:
            seen += 1
        else:
            seen += not all(record.intact for record in batch.records)
    assert seen == 40


def test_dropped_records_are_left_out() -> None:
    assert [r.shard_id for r in run(executor(Fault("dropped", "frame", shard=[0, 2]))).records] == [1, 3]
    assert run(executor(Fault("dropped", "frame"))).records == ()
    once = executor(Fault("dropped", "frame", times=1))
    assert [len(run(once).records) for _ in range(3)] == [3, 4, 4]


@pytest.mark.parametrize("where", ["model", "input", "compute", "sealed", "frame"])
def test_a_delay_holds_up_its_step_and_nothing_else(where: str) -> None:
    late = executor(Fault("delayed", where, shard=3, delay=0.05))
    start = time.perf_counter()
    assert run(late) == CLEAN
    assert time.perf_counter() - start >= 0.05
    (delivery,) = late.armed[0].tally.deliveries  # type: ignore[attr-defined]
    assert (delivery.kind, delivery.context.where) == ("delayed", where)


@pytest.mark.parametrize("kind", ["killed", "frozen"])
def test_signals_go_to_the_own_process(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    updated: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(Total, "update", lambda self, state, x: updated.append(len(sent)) or state)
    run(executor(Fault(kind, shard=1)))
    assert sent == [(os.getpid(), {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}[kind])]
    # Started and not yet accumulated: the signal comes before the second shard's update.
    assert updated == [0, 1, 1, 1]


def test_transient_and_persistent() -> None:
    once, always = executor(Fault("one_bit", shard=1, times=1)), executor(Fault("one_bit", shard=1))
    assert [run(once, role) == replace(CLEAN, role=role) for role in ("primary", "rerun", "audit")] == [
        False,
        True,
        True,
    ]
    payloads = {run(always, role, number=n).records[1].payload for n, role in enumerate(sorted(ROLES))}
    assert len(payloads) == 1
    assert payloads != {CLEAN.records[1].payload}


def test_two_faulty_domains_do_not_agree_on_a_wrong_value() -> None:
    payloads = [run(executor(Fault("one_bit"), domain=d)).records[0].payload for d in "abcdefgh"]
    assert len({*payloads, CLEAN.records[0].payload}) == 9


def test_a_masked_fault_is_not_delivered() -> None:
    class Counts(Total):
        def update(self, state: Any, x: Any) -> Any:
            return {"n": 0}

    faulty = executor(Fault("stuck_at", level=0), Fault("nan"))
    info, source = ShardInfo((3,), np.dtype(float)), make_source(BLOCKS)
    batch = Blob.of(Assignment(BatchContext(0, "primary", 0, (0,)), None, (), source.batch((0,)), info))
    record = open_batch(faulty.run(Blob.of(Counts()), batch, ())).records[0]
    assert record.payload == encode({"n": 0})
    assert faulty.armed[0].tally.deliveries == []  # type: ignore[attr-defined]


def test_warming_up_is_left_alone() -> None:
    faulty = executor(Fault("delayed", delay=0.01), Fault("nan"))
    faulty.warm(blobs()[0], ShardInfo((3,), np.dtype(float)), frozenset())
    assert faulty.armed[0].tally.deliveries == []  # type: ignore[attr-defined]


def test_a_hook_replaces_payloads_under_a_new_seal() -> None:
    calls: list[tuple[str, int, str]] = []

    def hook(worker: str, shard_id: int, role: str, payload: bytes) -> bytes:
        calls.append((worker, shard_id, role))
        return encode({"n": 0}) if shard_id == 1 else payload

    faulty = executor(hook=hook)
    for role in sorted(ROLES):
        batch = run(faulty, role)
        assert all(record.intact for record in batch.records)
        assert batch.records[1].payload == encode({"n": 0})
        assert batch.records[2:] == CLEAN.records[2:]
    assert calls == [("tcp://w:1", shard, role) for role in sorted(ROLES) for shard in SHARDS]
    kinds = [d.kind for d in faulty.armed[0].tally.deliveries]  # type: ignore[attr-defined]
    assert kinds == ["hook"] * len(ROLES)


def test_a_hook_that_returns_no_bytes_is_named() -> None:
    record = run(executor(hook=lambda *_: None)).records[0]
    assert (record.status, record.notes[0]) == ("error", "InputTypeError")
    assert "corruption hook to return bytes, got NoneType" in record.notes[1]


def test_faults_that_cannot_be_applied_are_errors_and_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Total, "update", lambda self, state, x: {"s": {1, 2}})
    record = run(executor(Fault("one_bit", times=1))).records[0]
    assert (record.status, record.notes[0]) == ("error", "InputTypeError")


def test_an_executor_of_another_class_keeps_what_it_overrides() -> None:
    class Shouting(ShardExecutor):
        def finish(self, frame: bytes, context: BatchContext) -> bytes:
            return frame + b"!"

    plain = Shouting("d", "tcp://w:1", "f")
    faulty = FaultyExecutor.around(plain, [LocalInjector(Fault("one_bit", "frame", bit=0))])
    assert isinstance(faulty, Shouting)
    assert faulty.original is plain
    frame = faulty.run(*blobs(), ())
    assert frame.endswith(b"!")
    open_batch(inject_bit_flip(frame, 0)[:-1])


def test_arming_twice_is_arming_once() -> None:
    faulty = executor(Fault("dropped", "frame"))
    injector = faulty.armed[0]
    assert injector.wrap(faulty) is faulty
    assert faulty.armed == [injector]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InputTypeError, match="expected a FaultPlan, got a list"):
        FaultInjector([Fault("nan")])  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="callable hook"):
        FaultInjector(FaultPlan(), hook=b"")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="to be set up on a worker"):
        FaultInjector(FaultPlan()).claim(0, "nan", 1, FaultContext("frame", "", "", "", "audit", 0, 0, ()))


# -- on a cluster ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def threads() -> Iterator[Client]:
    """Four workers in this very process: quick, and enough for all that does not kill."""
    with (
        LocalCluster(n_workers=4, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def stubbed(threads: Client) -> Iterator[Client]:
    threads.register_plugin(Stub())
    yield threads
    for name in ("dask_sdc_faults", "dask_sdc_corruption", NAME):
        if name in threads.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.worker_plugins)):
            threads.unregister_worker_plugin(name)


def everywhere(client: Client, role: str = "primary", **kwargs: Any) -> dict[str, SealedBatch]:
    """The same batch once on every worker, by the worker's domain."""
    statistic, batch = blobs(role, **kwargs)
    arguments = (statistic.data, statistic.digest, batch.data, batch.digest, ())
    futures = [
        client.submit(run_batch, *arguments, workers=[worker], pure=False)
        for worker in client.scheduler_info(n_workers=-1)["workers"]
    ]
    opened = [open_batch(frame) for frame in client.gather(futures)]
    return {batch.domain: batch for batch in opened}


def wrong(batches: dict[str, SealedBatch]) -> set[tuple[str, int]]:
    """Domains and shards whose payload is not the clean one."""
    expected = {record.shard_id: record.payload for record in CLEAN.records}
    return {
        (domain, record.shard_id)
        for domain, batch in batches.items()
        for record in batch.records
        if record.payload != expected[record.shard_id]
    }


FAULT = Fault("one_bit", domain="domain-2", shard=1)


def kinds_of_executors(client: Client) -> set[str]:
    return set(client.run(lambda dask_worker: type(dask_worker.plugins[NAME].executor).__name__).values())


@pytest.mark.parametrize("first", ["stub", "injector"])
def test_whichever_plugin_comes_first(threads: Client, first: str) -> None:
    plugins: list[WorkerPlugin] = [Stub(), FaultInjector(FaultPlan([FAULT]))]
    for plugin in plugins if first == "stub" else reversed(plugins):
        threads.register_plugin(plugin)
    try:
        assert wrong(everywhere(threads)) == {("domain-2", 1)}
        assert kinds_of_executors(threads) == {"FaultyShardExecutor"}
        threads.unregister_worker_plugin("dask_sdc_faults")
        assert wrong(everywhere(threads)) == set()
        assert kinds_of_executors(threads) == {"ShardExecutor"}
        assert set(threads.run(lambda dask_worker: len(getattr(dask_worker, WRAPPERS))).values()) == {0}
    finally:
        threads.unregister_worker_plugin(NAME)


def test_a_second_injector_replaces_the_first(stubbed: Client) -> None:
    stubbed.register_plugin(FaultInjector(FaultPlan([FAULT])))
    stubbed.register_plugin(FaultInjector(FaultPlan([replace(FAULT, shard=frozenset({3}))])))
    assert wrong(everywhere(stubbed)) == {("domain-2", 3)}


def test_workers_are_chosen_by_name_and_by_address(stubbed: Client) -> None:
    workers = stubbed.scheduler_info(n_workers=-1)["workers"]
    address = next(a for a, w in workers.items() if str(w["name"]) == "3")
    chosen = [Fault("value", worker=address, shard=0), Fault("value", worker="1", shard=2)]
    stubbed.register_plugin(FaultInjector(FaultPlan(chosen)))
    assert wrong(everywhere(stubbed)) == {("domain-3", 0), ("domain-1", 2)}


def test_times_hold_for_the_whole_cluster(stubbed: Client) -> None:
    injector = FaultInjector(FaultPlan([Fault("one_bit", times=3), replace(FAULT, times=None)]))
    stubbed.register_plugin(injector)
    for _ in range(2):
        everywhere(stubbed)
    total = stubbed.run_on_scheduler(delivered, run=injector.run)
    assert [d.index for d in total].count(0) == 3
    assert [d.index for d in total].count(1) == 2
    by_worker = stubbed.run(delivered)
    assert sorted(d.context.worker for ds in by_worker.values() for d in ds) == sorted(
        d.context.worker for d in total
    )
    assert all(d.context.worker == worker for worker, ds in by_worker.items() for d in ds)
    assert stubbed.run_on_scheduler(delivered, run="another") == []
    assert set(total) <= set(stubbed.run_on_scheduler(delivered))


def test_a_hook_is_active_until_it_is_cleared(stubbed: Client) -> None:
    def hook(worker: str, shard_id: int, role: str, payload: bytes) -> bytes:
        return flip_bits(payload, 2, 0) if (shard_id, role) == (1, "audit") else payload

    arm_corruption(stubbed, hook)
    assert wrong(everywhere(stubbed)) == set()
    hit = everywhere(stubbed, "audit")
    assert wrong(hit) == {(f"domain-{i}", 1) for i in range(4)}
    assert all(record.intact for batch in hit.values() for record in batch.records)
    stubbed.register_plugin(FaultInjector(FaultPlan([FAULT])))
    assert wrong(everywhere(stubbed)) == {("domain-2", 1)}
    clear_corruption(stubbed)
    assert wrong(everywhere(stubbed, "audit")) == {("domain-2", 1)}


def test_an_asynchronous_client_awaits_the_same_calls() -> None:
    async def scenario() -> list[set[tuple[str, int]]]:
        seen = []
        async with (
            LocalCluster(
                n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0", asynchronous=True
            ) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            await client.register_plugin(Stub())
            statistic, batch = blobs()
            arguments = (statistic.data, statistic.digest, batch.data, batch.digest, ())
            await arm_corruption(client, lambda w, s, r, p: inject_bit_flip(p) if s == 0 else p)
            seen.append(wrong({"d": open_batch(await client.submit(run_batch, *arguments, pure=False))}))
            await clear_corruption(client)
            seen.append(wrong({"d": open_batch(await client.submit(run_batch, *arguments, pure=False))}))
        return seen

    assert asyncio.run(scenario()) == [{("d", 0)}, set()]


@pytest.mark.parametrize("kind", ["killed", "frozen"])
def test_suicide_is_refused_where_the_client_would_go_down_with_it(stubbed: Client, kind: str) -> None:
    with pytest.raises(InputError, match=rf"processes of their own for faults of kind \['{kind}'\]"):
        stubbed.register_plugin(FaultInjector(FaultPlan([Fault(kind), Fault("nan")])))
    assert kinds_of_executors(stubbed) == {"ShardExecutor"}


@pytest.mark.parametrize("kind", sorted(KINDS - {"killed", "frozen"}))
def test_every_other_kind_is_delivered_to_processes(cluster4: Client, kind: str) -> None:
    where = "frame" if kind == "dropped" else "compute"
    fault = Fault(kind, where, domain="domain-1", role="witness", shard=2, delay=0.01)
    injector = FaultInjector(FaultPlan([fault]))
    cluster4.register_plugin(Stub())
    cluster4.register_plugin(injector)
    try:
        assert wrong(everywhere(cluster4, "audit")) == set()
        hit = everywhere(cluster4, "witness")
        total = cluster4.run_on_scheduler(delivered, run=injector.run)
    finally:
        cluster4.unregister_worker_plugin(injector.name)
        cluster4.unregister_worker_plugin(NAME)
    assert [(d.kind, d.context.domain, d.context.role) for d in total] == [(kind, "domain-1", "witness")]
    assert wrong(hit) == (set() if kind in {"dropped", "delayed"} else {("domain-1", 2)})
    shards = {domain: [record.shard_id for record in batch.records] for domain, batch in hit.items()}
    assert shards.pop("domain-1") == ([0, 1, 3] if kind == "dropped" else [0, 1, 2, 3])
    assert all(ids == [0, 1, 2, 3] for ids in shards.values())


def submit(client: Client) -> Any:
    statistic, batch = blobs()
    return client.submit(
        run_batch, statistic.data, statistic.digest, batch.data, batch.digest, (), pure=False
    )


def test_a_killed_worker_is_killed_once(fresh_cluster: Callable[[int], Client]) -> None:
    """The count outlives the process, so that the retry on a restarted worker gets through."""
    client = fresh_cluster(1)
    client.register_plugin(Stub())
    injector = FaultInjector(FaultPlan([Fault("killed", shard=2, times=1)]))
    client.register_plugin(injector)
    (before,) = client.run(os.getpid).values()
    assert wrong({"d": open_batch(submit(client).result(timeout=250))}) == set()
    assert not psutil.pid_exists(before)
    assert set(client.run(os.getpid).values()) != {before}
    (delivery,) = client.run_on_scheduler(delivered, run=injector.run)
    assert (delivery.kind, delivery.context.shards) == ("killed", (2,))
    assert list(client.run(delivered).values()) == [[]]


def test_a_frozen_worker_stops_and_goes_on_when_continued(fresh_cluster: Callable[[int], Client]) -> None:
    client = fresh_cluster(1)
    client.register_plugin(Stub())
    injector = FaultInjector(FaultPlan([Fault("frozen", shard=1, times=1)]))
    client.register_plugin(injector)
    (pid,) = client.run(os.getpid).values()
    future = submit(client)
    deadline = time.monotonic() + 30
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        client.run_on_scheduler(lambda: None)
    try:
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
        assert not future.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert wrong({"d": open_batch(future.result(timeout=250))}) == set()
    assert [d.kind for d in client.run_on_scheduler(delivered, run=injector.run)] == ["frozen"]


def test_a_scheduler_that_refuses_is_reported(stubbed: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the count is an error of the shard, never a fault that silently did not happen."""
    monkeypatch.setattr(Tally, "claim", lambda *_: 1 / 0)
    stubbed.register_plugin(FaultInjector(FaultPlan([FAULT])))
    record = everywhere(stubbed)["domain-2"].records[1]
    assert (record.status, record.notes[0]) == ("error", "ZeroDivisionError")
