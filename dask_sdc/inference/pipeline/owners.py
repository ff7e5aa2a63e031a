"""The scheduler's side of a pipeline: stages of a driver that is gone are let go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from distributed import Client, Scheduler, SchedulerPlugin

__all__ = ["OwnersPlugin", "disown", "own"]

#: Seconds in which a driver that has lost the scheduler may be back.
GRACE = 30.0

#: Seconds in which the scheduler hears that a pipeline was closed, unless it is lost.
_FAREWELL = 5.0

#: Seconds after which a worker that did not answer is told again.
_AGAIN = 1.0


class OwnersPlugin(SchedulerPlugin):
    """Knows whose pipelines there are; a driver that was killed cannot close its own."""

    name = "dask_sdc-owners"
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Add the RPC handlers."""
        self.scheduler = scheduler
        # What every worker is told when a client is gone, by client and pipeline.
        self._farewells: dict[str, dict[str, dict[str, Any]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        scheduler.handlers.update(sdc_own=self.own, sdc_disown=self.disown)

    async def close(self) -> None:
        """Stop waiting for drivers."""
        for task in self._tasks:
            task.cancel()

    async def own(self, client: str, pipeline: str, farewell: dict[str, Any]) -> None:
        """Note what workers are to be told when a client is gone (RPC handler)."""
        self._farewells.setdefault(client, {})[pipeline] = farewell

    async def disown(self, client: str, pipeline: str, silent: Iterable[str]) -> None:
        """Forget a pipeline that was closed, once workers that did not answer have heard (RPC handler)."""
        farewell = self._farewells.get(client, {}).pop(pipeline, None)
        if farewell is not None:
            self._tell(silent, farewell)

    def _tell(self, workers: Iterable[str], message: dict[str, Any]) -> None:
        for address in workers:
            self._watch(self._told(address, message))

    async def _told(self, address: str, message: dict[str, Any]) -> None:
        """Tell a worker something, and again until it has heard or left: it may be frozen for a while."""
        while address in self.scheduler.workers:
            answers = await self.scheduler.broadcast(msg=message, workers=[address], on_error="return")
            if not isinstance(answers[address], OSError):
                return
            await asyncio.sleep(_AGAIN)

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._tasks.discard)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Let go of what a client has, unless it is back soon."""
        if client in self._farewells:
            self._watch(self._let_go(client))

    async def _let_go(self, client: str) -> None:
        await asyncio.sleep(GRACE)
        if client in self.scheduler.clients:
            return
        for message in self._farewells.pop(client, {}).values():
            self._tell(list(self.scheduler.workers), message)


async def own(client: Client, pipeline: str, method: str, /, **arguments: Any) -> None:
    """Have a method of the plugins called on every worker once a client is gone."""
    scheduler: Any = client.scheduler
    await client.register_plugin(OwnersPlugin())
    farewell = {"op": f"sdc_stage_{method}", **arguments}
    await scheduler.sdc_own(client=client.id, pipeline=pipeline, farewell=farewell)


async def disown(client: Client, pipeline: str, silent: Sequence[str] = ()) -> None:
    """Forget a pipeline that was closed; the scheduler tells workers of it that could not be told."""
    scheduler: Any = client.scheduler
    with contextlib.suppress(OSError):  # it forgets by itself, if it is lost
        told = scheduler.sdc_disown(client=client.id, pipeline=pipeline, silent=list(silent))
        await asyncio.wait_for(told, _FAREWELL)
