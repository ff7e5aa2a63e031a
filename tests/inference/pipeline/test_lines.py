"""Connections of their own: order, a sender that waits, and what happens when one end goes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from distributed import Client, Scheduler, Status, Worker
from distributed.comm.core import Comm
from distributed.utils_test import gen_cluster

from dask_sdc.exceptions import StageError
from dask_sdc.inference.host import Chunk
from dask_sdc.inference.pipeline.lines import Answers, Line, received
from dask_sdc.inference.pipeline.ops import _on_its_way
from dask_sdc.inference.pipeline.routes import Routes
from dask_sdc.inference.pipeline.worker import StageWorkerPlugin
from dask_sdc.inference.session import StageReport


def chunk(index: int) -> Chunk:
    return Chunk("session", index, index, np.full((1, 1, 3), index, np.float32), 1, bytes(16), settled=(0, 2))


class Receiver:
    """Stands in for the stages of a worker: takes one chunk for every permit."""

    def __init__(self, worker: Worker) -> None:
        self.permits, self.taken, self.comms = asyncio.Semaphore(0), list[tuple[int, Chunk]](), list[Comm]()
        worker.handlers["sdc_stage_take"] = self.take

    async def take(self, comm: Comm, pipeline: str) -> Status:
        assert pipeline == "p"
        self.comms.append(comm)
        await comm.write("OK")
        await received(comm, self.deliver)
        return Status.dont_reply

    async def deliver(self, epoch: int, one: Chunk) -> None:
        await self.permits.acquire()
        self.taken.append((epoch, one))


def test_a_sender_waits_for_who_takes_slowly_and_order_is_kept() -> None:
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
    async def run(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
        receiver, line = Receiver(b), Line(Routes(a.rpc), "p")
        sent = list[int]()

        async def send_all() -> None:
            for index in range(20):
                await line.send(b.address, 3, chunk(index))
                sent.append(index)

        sending = asyncio.ensure_future(send_all())
        while len(sent) < 8:
            await asyncio.sleep(0)
        for _ in range(100):  # and not one more, however long the loop goes on
            await asyncio.sleep(0)
        assert len(sent) == 8
        for _ in range(20):
            receiver.permits.release()
        await sending
        while len(receiver.taken) < 20:
            await asyncio.sleep(0.01)
        assert [(epoch, one.index) for epoch, one in receiver.taken] == [(3, k) for k in range(20)]
        assert all(np.array_equal(one.array, chunk(one.index).array) for _, one in receiver.taken)
        assert {one.settled for _, one in receiver.taken} == {(0, 2)}
        assert len(receiver.comms) == 1
        line.close()

    run()


def test_a_line_goes_on_to_another_worker_and_hangs_up_on_the_first() -> None:
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3)
    async def run(c: Client, s: Scheduler, a: Worker, *others: Worker) -> None:
        receivers, line = [Receiver(other) for other in others], Line(Routes(a.rpc), "p")
        open_before = a.rpc.active
        for receiver, other in zip(receivers, others, strict=True):
            receiver.permits.release()
            await line.send(other.address, 0, chunk(0))
            while not receiver.taken:
                await asyncio.sleep(0.01)
        assert a.rpc.active == open_before + 1
        while not receivers[0].comms[0].closed():
            await asyncio.sleep(0.01)  # the first hears of it
        line.close()
        assert a.rpc.active == open_before

    run()


def test_a_line_that_was_cut_is_opened_anew_and_a_waiting_sender_learns_of_it() -> None:
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
    async def run(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
        receiver, line = Receiver(b), Line(Routes(a.rpc), "p")
        for index in range(8):
            await line.send(b.address, 0, chunk(index))
        waiting = asyncio.ensure_future(line.send(b.address, 0, chunk(8)))
        for _ in range(10):
            await asyncio.sleep(0)
        receiver.comms[0].abort()
        with pytest.raises(OSError):
            await waiting
        for _ in range(9):
            receiver.permits.release()
        await line.send(b.address, 1, chunk(9))
        while not receiver.taken or receiver.taken[-1][0] != 1:
            await asyncio.sleep(0.01)
        assert len(receiver.comms) == 2
        line.close()

    run()


def test_who_holds_no_stage_refuses_and_the_relay_passes_that_on() -> None:
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
    async def run(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
        await c.register_plugin(StageWorkerPlugin())
        routes = Routes(c.rpc)
        before = c.rpc.active
        heard = Answers(routes, "p", lambda answer: None, lambda error: None)
        for _ in range(2):
            with pytest.raises(StageError, match="expected a stage of pipeline p, got none"):
                await heard.open(b.address)
            routes._relays[b.address] = a.address
        assert c.rpc.active == before

    run()


def reports(pairs: Sequence[tuple[int, int]], **last: Any) -> list[StageReport]:
    found = [StageReport(k, True, received, sent) for k, (received, sent) in enumerate(pairs)]
    return [*found, StageReport(len(found), **last)] if last else found


@pytest.mark.parametrize(
    ("given", "fed", "expected"),
    [
        (reports([(5, 5), (5, 5)]), 5, False),
        (reports([(5, 5), (4, 4)]), 5, True),  # between two stages
        (reports([(4, 4), (4, 4)]), 5, True),  # before the head
        (reports([(5, 3), (3, 3)]), 5, False),  # taken, but not yet computed
        (reports([(5, 5), (4, 4)], reachable=False), 5, False),  # nobody waits where one is silent
    ],
)
def test_what_is_on_its_way_is_what_was_sent_and_not_received(
    given: list[StageReport], fed: int, expected: bool
) -> None:
    assert _on_its_way(given, fed) is expected
