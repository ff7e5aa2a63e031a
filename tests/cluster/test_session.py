"""A session attaches to clusters whose workers come and go."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from distributed import Client, WorkerPlugin
from distributed.comm import CommClosedError

from dask_sdc.cluster import session
from dask_sdc.exceptions import ClosedError, ClusterError


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


def test_workers_that_stay_out_of_reach_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_SETTLE", 0.0)
    with pytest.raises(ClusterError, match=r"expected workers that can be reached, got .*Stream is closed"):
        register(Losing(10**9))


def test_a_client_that_is_closed_meanwhile() -> None:
    with pytest.raises(ClosedError, match="expected a running client, got one that is closed"):
        register(Losing(1, then="closed"))
