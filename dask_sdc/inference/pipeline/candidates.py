"""The workers of a cluster that may take a stage, and how fast they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from distributed.comm.addressing import get_address_host

from dask_sdc.cluster.session import Session
from dask_sdc.inference.pace import levelled
from dask_sdc.inference.pipeline.placement import Candidate, permitted
from dask_sdc.inference.pipeline.routes import RELAYS, Routes

__all__ = ["Candidates"]

#: Seconds for a measurement, which may have to wait for a compiler.
_MEASURE = 300.0

#: Measurements of each worker, with others in between: what slows one down may be over at the next.
_ROUNDS = 3


class Candidates:
    """Finds the workers that may take a stage.

    Parameters
    ----------
    session : Session
        Knows who is there, in which failure domain, and who is in quarantine.
    routes : Routes
        The ways to workers.
    """

    def __init__(self, session: Session, routes: Routes) -> None:
        self._session, self._routes = session, routes
        self._paces: dict[str, float] = {}

    async def found(self, shunned: Collection[str] = (), patience: float | None = None) -> list[Candidate]:
        """Return who may be used now, by the last measurement of each.

        Parameters
        ----------
        shunned : collection of str
            Addresses that are left out.
        patience : float, optional
            Seconds that workers are waited for which are still starting; half a minute by default.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._session.refresh_members(), patience)
        scheduler: Any = self._session.client.scheduler
        info = (await scheduler.identity())["workers"]
        allowed = permitted({address: worker.get("resources") or {} for address, worker in info.items()})
        domains = {address: self._session.locate(address) for address in self._session.addresses()}
        there = {
            address: domain
            for address, domain in domains.items()
            if domain is not None
            and domain not in self._session.quarantined
            and address in allowed
            and address not in shunned
        }
        slowest = min(self._paces.values(), default=1.0)  # for newcomers, until they are measured
        speeds = levelled([self._paces.get(address, slowest) for address in there])
        return [
            Candidate(address, domain, int(info[address]["memory_limit"] or 0), speed)
            for (address, domain), speed in zip(there.items(), speeds, strict=True)
        ]

    async def measured(self, shunned: Collection[str] = ()) -> list[Candidate]:
        """Return who may be used now and answers, after a measurement of those who were not measured yet."""
        new = [one.address for one in await self.found(shunned) if one.address not in self._paces]
        others = [address for address in self._session.addresses() if address not in shunned]
        # What is measured side by side does not count: it has everybody compile what the measurement needs.
        compiled = await asyncio.gather(*(self._pace(address, others) for address in new))
        hosts: dict[str, list[str]] = {}
        for address, pace in zip(new, compiled, strict=True):
            if pace is not None:
                hosts.setdefault(get_address_host(address), []).append(address)
        await asyncio.gather(*(self._measure(addresses) for addresses in hosts.values()))
        return [one for one in await self.found(shunned) if one.address in self._paces]

    async def _measure(self, addresses: Sequence[str]) -> None:
        """Measure workers of one host in turn, as each would slow the others down; the best counts."""
        for _ in range(_ROUNDS):
            for address in addresses:
                pace = await self._pace(address)
                if pace is not None:
                    self._paces[address] = max(pace, self._paces.get(address, 0.0))

    async def _pace(self, address: str, relays: Iterable[str] | None = None) -> float | None:
        """Return a worker's pace, None if it does not answer; with relays, after a look for a way to it."""
        try:
            if relays is not None and not await self._reached(address, relays):
                return None
            pace: float = await asyncio.wait_for(self._routes.call(address, "pace"), _MEASURE)
        except OSError:
            return None  # it left meanwhile
        return pace

    async def _reached(self, address: str, relays: Iterable[str]) -> bool:
        """Say whether a worker answers, directly or through one of the first relays."""
        others = [relay for relay in relays if relay != address]
        return await self._routes.find(address, others[:RELAYS])
