"""Connections and workers that go in the middle of something: nobody innocent is named, and nothing hangs."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Client, Scheduler, Status, Worker
from distributed.comm.core import Comm
from distributed.core import ConnectionPool, Server
from distributed.utils_test import gen_cluster

from dask_sdc.cluster import session as sessions
from dask_sdc.inference.host import Chunk
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.pipeline.audits import Mismatch, StageAudits
from dask_sdc.inference.pipeline.lines import Line, received
from dask_sdc.inference.pipeline.ops import Ring
from dask_sdc.inference.pipeline.routes import Connection, Routes
from dask_sdc.inference.pipeline.worker import NAME, Seat
from dask_sdc.inference.session import LossKind
from dask_sdc.inference.shadow import ShadowAction, ShadowAudit, ShadowFinding
from dask_sdc.inference.weights.store import WeightStore
from dask_sdc.policy.verdict import Decision, Outcome, Voice
from tests.inference.pipeline.models import PROMPT, generated

COUNT, STEP = 12, 6


@pytest.fixture(scope="module")
def plain(store: WeightStore) -> tuple[int, ...]:
    return generated(store, PROMPT, COUNT)


def in_cluster(body: Any, workers: int = 4) -> None:
    """Run a coroutine function with a client and the workers of a cluster in this process."""

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * workers, timeout=250)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        await body(c, s, {worker.address: worker for worker in workers})

    run()


def seat_of(pipeline: Pipeline, workers: dict[str, Worker], stage: int) -> Seat:
    seat: Seat = workers[pipeline.workers[stage]].plugins[NAME].seats[pipeline.name]
    return seat


def held_up(seat: Seat) -> tuple[asyncio.Event, threading.Event]:
    """Have a stage wait at one step; return what says that it does, and what lets it go on."""
    loop, step, steps = asyncio.get_running_loop(), seat.host.step, iter(range(1000))
    waits, go = asyncio.Event(), threading.Event()

    def late(chunk: Chunk) -> Any:
        if next(steps) == STEP:
            loop.call_soon_threadsafe(waits.set)
            go.wait(60)
        return step(chunk)

    seat.host.step = late  # type: ignore[method-assign]
    return waits, go


def test_a_connection_that_breaks_is_nobodys_fault(store: WeightStore, plain: tuple[int, ...]) -> None:
    async def body(c: Client, s: Scheduler, workers: dict[str, Worker]) -> None:
        async with Pipeline(c, store, stages=3, spares=1, prefill_chunk=3) as pipeline:
            before, tail = pipeline.workers, seat_of(pipeline, workers, 2)
            waits, go = held_up(seat_of(pipeline, workers, 1))
            running = asyncio.ensure_future(pipeline.generate(PROMPT, COUNT))
            await waits.wait()
            assert tail._hearer is not None
            tail._hearer.abort()
            while pipeline._running._recovery is None:
                await asyncio.sleep(0.001)
            go.set()
            assert (await running).ids == plain
            (report,) = pipeline.recoveries
            assert report.losses == () and pipeline.workers == before

    in_cluster(body)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_worker_that_closes_while_it_computes_is_replaced(
    store: WeightStore, plain: tuple[int, ...], stage: int
) -> None:
    async def body(c: Client, s: Scheduler, workers: dict[str, Worker]) -> None:
        async with Pipeline(c, store, stages=3, spares=1, prefill_chunk=3) as pipeline:
            closed = workers[pipeline.workers[stage]]
            waits, go = held_up(seat_of(pipeline, workers, stage))
            running = asyncio.ensure_future(pipeline.generate(PROMPT, COUNT))
            await waits.wait()
            closing = asyncio.ensure_future(closed.close())
            while NAME in closed.plugins:
                await asyncio.sleep(0.001)
            threading.Timer(1.0, go.set).start()  # a stage that computes holds up the end of its worker
            assert (await running).ids == plain
            await closing
            losses = [loss for report in pipeline.recoveries for loss in report.losses]
            assert [(loss.stage, loss.kind) for loss in losses] == [(stage, LossKind.UNREACHABLE)]

    in_cluster(body)


def test_a_line_works_after_sends_that_were_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def take(comm: Comm, pipeline: str) -> Status:
        await comm.write("OK")

        async def deliver(epoch: int, chunk: Chunk) -> None:
            came.append(chunk.index)

        await received(comm, deliver)
        return Status.dont_reply

    write, stuck = Connection.write, 1  # messages of this epoch are never written

    async def written(self: Connection, message: Any, small: bool = False) -> None:
        await (write(self, message, small) if message["epoch"] != stuck else asyncio.Event().wait())

    async def body() -> None:
        server, pool = Server({"sdc_stage_take": take}), ConnectionPool()
        await server.listen("tcp://127.0.0.1:0")
        await pool.start()
        line, array = Line(Routes(pool), "p"), np.ones((1, 1, 8), "f4")
        for index in range(20):
            with pytest.raises(TimeoutError):
                sending = line.send(server.address, stuck, Chunk("s", index, 0, array))
                await asyncio.wait_for(sending, 0.02)
        for index in range(100, 120):
            await asyncio.wait_for(line.send(server.address, 0, Chunk("s", index, 0, array)), 20)
        while not came or came[-1] < 119:
            await asyncio.sleep(0.001)
        assert came == list(range(100, 120))
        line.close()
        await pool.close()
        await server.close()

    came: list[int] = []
    monkeypatch.setattr(Connection, "write", written)
    asyncio.run(body())


def test_a_start_that_is_cancelled_while_it_attaches_is_forgotten(
    store: WeightStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(c: Client, s: Scheduler, workers: dict[str, Worker]) -> None:
        register, registered = sessions.register, asyncio.Event()

        async def for_ever(*arguments: Any) -> None:
            await register(*arguments)
            registered.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(sessions, "register", for_ever)
        starting = asyncio.ensure_future(Pipeline(c, store, stages=2, spares=0)._opened())
        await registered.wait()
        assert s.plugins["dask_sdc"].topics
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not s.plugins["dask_sdc"].topics

    in_cluster(body, 2)


@pytest.mark.parametrize("now", ["bad", "new"])
def test_an_audit_that_concludes_after_a_recovery_evicts_nobody_who_came_since(now: str) -> None:
    async def check() -> None:
        evicted, received = [], []

        async def evict(stage: int, why: str, positions: dict[str, int]) -> None:
            evicted.append((stage, positions))

        async def receive(mismatch: Mismatch) -> None:
            received.append(mismatch)

        ring = Ring("p", Routes(None), [b""], [None], "topic")  # type: ignore[arg-type, list-item]
        ring.addresses = [now]
        around: Any = SimpleNamespace(ring=ring, evict=evict, sessions=lambda: ("s", "t"))
        audits = StageAudits(ShadowAudit(0.0, 0), around, receive)
        audits.clean = {("s", 0): 3, ("t", 0): 5}
        voices = {
            "primary": Voice("primary", "d0", b"1"),
            "audit": Voice("audit", "d1", b"2"),
        }
        decision = Decision(Outcome.SUSPECT, ("d0",), value="audit")
        finding = ShadowFinding("s", 0, 9, ShadowAction.EVICT, decision, 7)
        workers = {"primary": "bad", "audit": "a"}
        session: Any = SimpleNamespace(name="s")
        await audits._act(session, Mismatch(finding, 7, voices, workers))
        assert evicted == ([(0, {"s": 7, "t": 5})] if now == "bad" else [])
        assert len(received) == 1  # whoever computed wrongly is named either way
        await audits.close()

    asyncio.run(check())
