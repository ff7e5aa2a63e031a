"""The scheduler's side of a pipeline: stages of a driver that is gone are let go."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from distributed import Client, Scheduler, SchedulerPlugin

__all__ = ["OwnersPlugin", "disown", "own"]

#: Seconds in which a driver that has lost the scheduler may be back.
GRACE = 30.0


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

    async def disown(self, client: str, pipeline: str) -> None:
        """Forget a pipeline that was closed (RPC handler)."""
        self._farewells.get(client, {}).pop(pipeline, None)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Let go of what a client has, unless it is back soon."""
        if client in self._farewells:
            self._tasks.add(task := asyncio.ensure_future(self._let_go(client)))
            task.add_done_callback(self._tasks.discard)

    async def _let_go(self, client: str) -> None:
        await asyncio.sleep(GRACE)
        if client in self.scheduler.clients:
            return
        for message in self._farewells.pop(client, {}).values():
            await self.scheduler.broadcast(msg=message, on_error="ignore")


async def own(client: Client, pipeline: str, method: str, /, **arguments: Any) -> None:
    """Have a method of the plugins called on every worker once a client is gone."""
    scheduler: Any = client.scheduler
    await client.register_plugin(OwnersPlugin())
    farewell = {"op": f"sdc_stage_{method}", **arguments}
    await scheduler.sdc_own(client=client.id, pipeline=pipeline, farewell=farewell)


async def disown(client: Client, pipeline: str) -> None:
    """Forget a pipeline that was closed."""
    scheduler: Any = client.scheduler
    with contextlib.suppress(OSError):  # it forgets by itself, if it is lost
        await scheduler.sdc_disown(client=client.id, pipeline=pipeline)
