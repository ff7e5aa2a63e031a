"""A session attaches to clusters whose workers come and go."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from distributed import Client, WorkerPlugin
from distributed.comm import CommClosedError

from dask_sdc import Auditor, Moments
from dask_sdc.cluster import session
from dask_sdc.exceptions import ClosedError


class Losing:
    """Stands for a client some of whose first calls find workers that leave."""

    def __init__(self, losses: int, then: str = "running") -> None:
        self.losses, self.then, self.status = losses, then, "running"

    async def register_plugin(self, plugin: Any) -> None:
        self.losses -= 1
        if self.losses >= 0:
            self.status = self.then
            raise CommClosedError("in <TCP> Scheduler Broadcast: Stream is closed")


def register(client: Losing) -> None:
    asyncio.run(session.register(cast(Client, client), WorkerPlugin()))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_LOOK", 0.0)


def test_workers_that_leave_meanwhile_are_forgotten() -> None:
    client = Losing(3)
    register(client)
    assert client.losses == -1


def test_workers_that_stay_out_of_reach_are_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session, "_SETTLE", 0.05)
    client = Losing(10**9)
    register(client)
    assert client.losses < 10**9 - 1 and "Not every worker has taken WorkerPlugin" in caplog.text


@pytest.mark.slow
def test_a_worker_that_is_frozen_from_the_start_is_done_without(
    fresh_cluster: Callable[[int], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = fresh_cluster(4)
    monkeypatch.setattr(session, "_LOOK", 0.1)
    monkeypatch.setattr(session, "_SETTLE", 6.0)
    frozen = next(iter(client.run(os.getpid).values()))
    os.kill(frozen, signal.SIGSTOP)
    try:
        with Auditor(client, audit_rate=0.5) as auditor:
            found = auditor.accumulate(Moments(), [np.full((4, 2), float(k)) for k in range(20)])
            assert found.mean.tolist() == [9.5, 9.5]
            assert auditor.rounds[0].domains == 3
    finally:
        os.kill(frozen, signal.SIGCONT)


def test_a_client_that_is_closed_meanwhile() -> None:
    with pytest.raises(ClosedError, match="expected a running client, got one that is closed"):
        register(Losing(1, then="closed"))
