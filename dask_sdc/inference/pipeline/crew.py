"""The workers of a pipeline: who may hold a stage, who is ready to, and where they are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

from distributed import Client

from dask_sdc.cluster.session import Session
from dask_sdc.inference.ops import RecoveryReport
from dask_sdc.inference.pipeline.audits import Located
from dask_sdc.inference.pipeline.ops import Ring
from dask_sdc.inference.pipeline.placement import Candidate, choose_workers

__all__ = ["Crew"]

logger = logging.getLogger("dask_sdc.inference")

#: Seconds after which a worker that does not answer is not taken as a spare.
_PING = 1.0

#: Seconds in which a spare has to load a stage.
_LOAD = 300.0


class Crew:
    """The workers of one pipeline.

    Parameters
    ----------
    client : Client
        The cluster.
    session : Session
        Knows its members.
    spares : int
        Workers to keep ready.
    watch : callable
        ``watch(coroutine)`` runs it in the background until the pipeline is closed.
    """

    def __init__(self, client: Client, session: Session, spares: int, watch: Callable[[Any], None]) -> None:
        self._client, self._session, self._wanted, self._watch = client, session, spares, watch
        self._prepared: dict[str, set[int]] = {}
        self.ring: Ring | None = None

    async def candidates(self) -> list[Candidate]:
        """Return the workers that may take a stage."""
        await self._session.refresh_members()
        scheduler: Any = self._client.scheduler
        info = (await scheduler.identity())["workers"]
        shunned = self.ring.shunned if self.ring is not None else set()
        found = []
        for address in self._session.addresses():
            domain = self._session.locate(address)
            if (
                domain is not None
                and domain not in self._session.quarantined
                and address in info
                and address not in shunned
            ):
                found.append(Candidate(address, domain, int(info[address]["memory_limit"] or 0)))
        return found

    # -- where -----------------------------------------------------------------------------------

    def gone(self, address: str) -> bool:
        """Say whether a worker has left."""
        return self._session.locate(address) is None

    def locate(self, address: str) -> Located:
        """Return domain and environment of a worker; empty texts for one that has left."""
        return Located(self._session.locate(address) or "", self._session.fingerprint(address) or "")

    def _taken(self) -> dict[str, str]:
        ring = self.ring
        assert ring is not None
        return {address: self._session.locate(address) or address for address in ring.addresses}

    # -- spares ----------------------------------------------------------------------------------

    @property
    def spares(self) -> tuple[str, ...]:
        """Addresses of the workers that are ready to take the place of a stage."""
        ready = [address for address, stages in self._prepared.items() if stages and not self.gone(address)]
        return tuple(address for address in ready if address not in self._taken())

    @property
    def prepared(self) -> Collection[str]:
        """Addresses of all workers that loaded stages to be ready."""
        return self._prepared.keys()

    async def spare(self, stage: int, refused: Collection[str]) -> str | None:
        """Return a worker that can take a stage."""
        candidates, taken = await self.candidates(), self._taken()
        free = [
            one
            for pool in (self._ready(stage, candidates), candidates)
            for one in choose_workers(pool, len(pool), taken, refused)
        ]
        return await self._first_to_answer(free)

    async def auditor(self, stage: int, apart: Collection[str]) -> str | None:
        """Return a worker outside of some domains that can compute a stage once more.

        Spares come first. Where there are none, or more voices are wanted, those that hold another stage do.
        """
        candidates = [one for one in await self.candidates() if one.domain not in apart]
        taken = self._taken()
        order = [
            *choose_workers(self._ready(stage, candidates), len(candidates), taken),
            *choose_workers(candidates, len(candidates), taken),
            *(one for one in candidates if one.address in taken),
        ]
        return await self._first_to_answer(order)

    def _ready(self, stage: int, candidates: Iterable[Candidate]) -> list[Candidate]:
        return [one for one in candidates if stage in self._prepared.get(one.address, ())]

    async def _first_to_answer(self, candidates: Iterable[Candidate]) -> str | None:
        for address in dict.fromkeys(one.address for one in candidates):
            if await self._answers(address):
                return address
        return None

    async def _answers(self, address: str) -> bool:
        """Say whether a worker is not frozen."""
        worker: Any = self._client.rpc(address)
        try:
            await asyncio.wait_for(worker.identity(), _PING)
        except OSError:  # a TimeoutError is one
            assert self.ring is not None
            self.ring.shunned.add(address)
            return False
        return True

    async def keep_spares(self) -> None:
        """Have as many workers as wanted ready with the weights of every stage."""
        ring = self.ring
        assert ring is not None
        for one in choose_workers(await self.candidates(), self._wanted, self._taken()):
            ready = self._prepared.setdefault(one.address, set())
            for stage, blob in enumerate(ring.blobs):
                if stage not in ready:
                    await asyncio.wait_for(
                        ring.call_at(one.address, "prepare", number=stage, stage=blob), _LOAD
                    )
                    ready.add(stage)

    async def healed(self, report: RecoveryReport) -> None:
        """Note who was placed and refused, and restore the number of spares in the background."""
        assert self.ring is not None
        self.ring.shunned.update(report.refused)
        for stage, address in report.placed.items():
            self._prepared.get(address, set()).discard(stage)
        logger.warning(
            "Pipeline %s healed: %s", self.ring.name, "; ".join(map(str, report.losses)) or "nothing lost"
        )
        self._watch(self._restore_spares())

    async def _restore_spares(self) -> None:
        try:
            await self.keep_spares()
        except OSError as error:
            assert self.ring is not None
            logger.warning("Pipeline %s has fewer spares than wanted: %s", self.ring.name, error)
