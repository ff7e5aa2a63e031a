"""The workers of a pipeline: who may hold a stage, who is ready to, and where they are."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from dask_sdc.cluster.session import Session
from dask_sdc.exceptions import SDCError, StageError, StageTimeout
from dask_sdc.inference.ops import RecoveryReport
from dask_sdc.inference.pipeline.audits import Located
from dask_sdc.inference.pipeline.candidates import Candidates
from dask_sdc.inference.pipeline.ops import Ring
from dask_sdc.inference.pipeline.placement import Candidate, choose_workers, next_hot
from dask_sdc.inference.pipeline.routes import Routes
from dask_sdc.inference.session import LossKind

__all__ = ["LOAD", "Crew", "loading"]

logger = logging.getLogger("dask_sdc.inference")

#: Seconds after which a worker that does not answer is not taken as a spare.
_PING = 1.0

#: Where a worker may have the weights of a stage, the quickest first.
_KINDS = ("memory", "disk")

#: Seconds in which a worker has to load a stage.
LOAD = 300.0

#: Seconds after which spares are looked for again where there were too few.
_REST = 3.0

#: Most seconds after which a worker that fell silent, or could not load a stage, is asked again.
_LONGEST_REST = 600.0

#: Workers that are tried beyond those that are wanted, where some cannot load a stage.
_MORE = 2

#: Ways to lose a stage of which its worker may be innocent: it stood still, or a message was lost.
_SILENT = (LossKind.UNREACHABLE, LossKind.STALE, LossKind.GAP, LossKind.UNRETURNED)

T = TypeVar("T")


async def loading(call: Awaitable[T], stage: int, address: str) -> T:
    """Wait until a worker has loaded a stage.

    Raises
    ------
    StageTimeout
        If that takes too long.
    StageError
        If it fails, for a reason that does not say so itself as an `SDCError` does.
    """
    expected = f"stage {stage}: expected worker {address} to load it"
    try:
        return await asyncio.wait_for(call, LOAD)
    except SDCError:
        raise
    except TimeoutError:
        raise StageTimeout(f"{expected} within {LOAD:g} s", stage=stage) from None
    except Exception as error:
        raise StageError(f"{expected}, got {type(error).__name__}: {error}", stage=stage) from error


class Rests:
    """Workers that are left alone for a while, and when each is asked again: later every time."""

    def __init__(self) -> None:
        self._rests: dict[str, float] = {}
        self._due: dict[str, float] = {}

    def note(self, address: str) -> None:
        """Have a worker rest."""
        self._rests[address] = min(2 * self._rests.get(address, _REST / 2), _LONGEST_REST)
        self._due[address] = time.monotonic() + self._rests[address]

    @property
    def due(self) -> list[str]:
        """Who has rested long enough."""
        return [address for address, due in self._due.items() if due < time.monotonic()]

    def resting(self, address: str) -> bool:
        """Say whether a worker is to be left alone."""
        return self._due.get(address, 0.0) >= time.monotonic()

    def over(self, address: str) -> None:
        """Note that a worker does what it was asked for."""
        self._due.pop(address, None)

    def forget(self, address: str) -> None:
        """Forget a worker that has left."""
        self._due.pop(address, None)
        self._rests.pop(address, None)


class Crew:
    """The workers of one pipeline.

    Parameters
    ----------
    session : Session
        Knows the members of the cluster.
    routes : Routes
        The ways to them.
    spares : int
        Workers to keep ready.
    keep : {"memory", "disk"}
        Where a spare has the weights: all in memory, or those of one stage and the others on its local disk.
    watch : callable
        ``watch(coroutine)`` runs it in the background until the pipeline is closed.
    patience : float
        Seconds that workers which are still starting are waited for where a stage is to be replaced.
    """

    def __init__(
        self,
        session: Session,
        routes: Routes,
        spares: int,
        keep: str,
        watch: Callable[[Any], None],
        patience: float,
    ) -> None:
        self._session, self._routes, self._wanted, self._watch = session, routes, spares, watch
        self._keep = keep
        self._there = Candidates(session, routes)
        self._patience = patience
        # Where each worker has the stages that it was asked to have ready.
        self._prepared: dict[str, dict[int, str]] = {}
        self._tending = False
        self._silent, self._failing = Rests(), Rests()
        # Where the workers were that were ever candidates.
        self._known: dict[str, Located] = {}
        self.ring: Ring | None = None

    async def candidates(self) -> list[Candidate]:
        """Return the workers that may take a stage; whoever waits for them has a deadline."""
        return self._noted(await self._there.found(self._shunned, self._patience))

    async def measured(self) -> list[Candidate]:
        """Return those that answer, after a measurement of newcomers."""
        return self._noted(await self._there.measured(self._shunned))

    def _noted(self, candidates: list[Candidate]) -> list[Candidate]:
        self._known |= {one.address: self.locate(one.address) for one in candidates}
        return candidates

    @property
    def _shunned(self) -> Collection[str]:
        return self.ring.shunned if self.ring is not None else ()

    # -- where -----------------------------------------------------------------------------------

    def gone(self, address: str) -> bool:
        """Say whether a worker has left."""
        return self._session.locate(address) is None

    def locate(self, address: str) -> Located:
        """Return domain and environment of a worker; empty texts for one that has left."""
        return Located(self._session.locate(address) or "", self._session.fingerprint(address) or "")

    def known(self, address: str) -> Located:
        """Return domain and environment of a worker that was a candidate, also if it has left since."""
        return self._known[address]

    def _taken(self) -> dict[str, str]:
        ring = self.ring
        assert ring is not None
        return {address: self._session.locate(address) or address for address in ring.addresses}

    def give_up(self, address: str, why: str) -> None:
        """Have a worker removed that has lost its device, and with it its stages; a nanny replaces it."""
        assert self.ring is not None
        self.ring.condemn(address)
        if (domain := self._session.locate(address)) is not None:
            self._watch(self._session.evict(domain, why, address))

    # -- spares ----------------------------------------------------------------------------------

    @property
    def spares(self) -> tuple[str, ...]:
        """Addresses of the workers that are ready to take the place of a stage."""
        ready = [address for address, stages in self._prepared.items() if stages and not self.gone(address)]
        return tuple(one for one in ready if one not in self._taken() and one not in self._shunned)

    async def spare(self, stage: int, refused: Collection[str]) -> str | None:
        """Return a worker that can take a stage."""
        candidates, taken = await self.candidates(), self._taken()
        free = [
            one
            for pool in (*self._ready(stage, candidates), candidates)
            for one in choose_workers(pool, len(pool), taken, refused)
        ]
        return await self._first_to_answer(free)

    async def auditor(self, stage: int, apart: Collection[str]) -> str | None:
        """Return a worker outside of some domains that can compute a stage once more.

        Spares come first. Where there are none, or more voices are wanted, those that hold another stage do.
        """
        candidates = [one for one in await self.candidates() if one.domain not in apart]
        taken = self._taken()
        pools = (*self._ready(stage, candidates), candidates)
        order = [one for pool in pools for one in choose_workers(pool, len(pool), taken)]
        order += [one for one in candidates if one.address in taken]
        return await self._first_to_answer(order)

    def _ready(self, stage: int, candidates: Sequence[Candidate]) -> list[list[Candidate]]:
        """Return who has a stage in memory, and who has it on the local disk."""
        where = [self._prepared.get(one.address, {}).get(stage) for one in candidates]
        return [[one for one, at in zip(candidates, where, strict=True) if at == kind] for kind in _KINDS]

    async def _first_to_answer(self, candidates: Iterable[Candidate]) -> str | None:
        for address in dict.fromkeys(one.address for one in candidates):
            if await self.answers(address):
                return address
        return None

    async def answers(self, address: str) -> bool:
        """Say whether a worker is not frozen; one that does not answer is shunned until it does.

        One that holds a stage is not: it is the deadline of its calls that tells whether it is lost.
        """
        answers = await self._routes.alive(address, _PING)
        assert self.ring is not None
        if not answers and address not in self.ring.addresses:
            self.ring.shunned.add(address)
            self._silent.note(address)
        return answers

    async def _ask_the_silent(self) -> None:
        """Take those back that answer again, without what they held of a stage."""
        await asyncio.gather(*(self._ask_again(address) for address in self._silent.due))

    async def _ask_again(self, address: str) -> None:
        ring = self.ring
        assert ring is not None
        if self.gone(address):
            self._silent.forget(address)
            ring.shunned -= {address} - ring.condemned
        elif address in ring.condemned or address not in ring.shunned or address in ring.addresses:
            self._silent.over(address)  # nothing is asked of it, or it is back
        else:
            try:
                await asyncio.wait_for(ring.call_at(address, "leave"), _PING)
            except Exception:  # whatever it says: it is not as it should be
                self._silent.note(address)
            else:
                self._silent.over(address)
                ring.shunned -= {address} - ring.condemned

    async def keep_spares(self) -> None:
        """Have as many workers as wanted ready with the weights of every stage.

        One that cannot load them is passed over, and left alone for a while.

        Raises
        ------
        SDCError
            What the first one said that could not, if there are too few for that.
        """
        ring = self.ring
        assert ring is not None
        await self._ask_the_silent()
        candidates, taken = await self.measured(), self._taken()
        ring.relays = tuple(self._session.addresses())
        ready = {one.address: one.domain for one in candidates if one.address in self._whole(taken)}
        missing, errors = self._wanted - len(ready), []
        free = [one for one in candidates if not self._failing.resting(one.address)]
        for one in choose_workers(free, missing + _MORE, taken | ready):
            if missing <= 0:
                break
            try:
                await self._prepare(one.address)
            except SDCError as error:
                self._failing.note(one.address)
                errors.append(error)
            else:
                self._failing.over(one.address)
                missing -= 1
        if missing > 0 and errors:
            raise errors[0]

    async def _prepare(self, address: str) -> None:
        ring = self.ring
        assert ring is not None
        ready = self._prepared.setdefault(address, {})
        for stage, keep in self._policy(address).items():
            if stage not in ready:
                loaded = ring.call_at(address, "prepare", number=stage, stage=ring.blobs[stage], keep=keep)
                await loading(loaded, stage, address)
                ready[stage] = keep

    def _policy(self, address: str) -> dict[int, str]:
        """Return where a spare is to have each stage."""
        assert self.ring is not None
        if self._keep == "memory":
            return dict.fromkeys(range(len(self.ring)), "memory")
        hot = self._hot(address)
        if hot is None:
            used = {address, *self._taken()}
            others = [one for one in self._prepared if one not in used and not self.gone(one)]
            hot = next_hot(self.ring.sizes, [self._hot(one) for one in others])
        return {stage: "memory" if stage == hot else "disk" for stage in range(len(self.ring))}

    def _hot(self, address: str) -> int | None:
        """Return the first stage that a worker has in memory to be ready."""
        ready = self._prepared.get(address, {})
        return next((stage for stage, at in ready.items() if at == "memory"), None)

    def _whole(self, taken: Collection[str]) -> list[str]:
        """Return the spares that hold every stage and may be used."""
        assert self.ring is not None
        return [
            address
            for address, stages in self._prepared.items()
            if len(stages) == len(self.ring)
            and address not in taken
            and address not in self.ring.shunned
            and not self.gone(address)
        ]

    def tend(self) -> None:
        """Restore the number of spares in the background, if it is too low and there are workers."""
        if not self._tending and self._short():
            self._tending = True
            self._watch(self._restore_spares())

    def _short(self) -> bool:
        assert self.ring is not None
        taken = self._taken()
        whole = self._whole(taken)
        used = {*taken, *whole, *self.ring.shunned}
        return len(whole) < self._wanted and (
            any(one not in used for one in self._session.addresses()) or bool(self._silent.due)
        )

    def note(self, report: RecoveryReport, holders: Sequence[str], evicted: Collection[int]) -> None:
        """Note who is not used any more after a recovery, and who of them is once it answers.

        Parameters
        ----------
        report : RecoveryReport
            What happened, also if it failed.
        holders : sequence of str
            Who held each stage before it.
        evicted : collection of int
            Stages that an audit found wrong.
        """
        ring = self.ring
        assert ring is not None
        ring.shunned.update(report.refused)
        silent = _silent(report, holders) - {*ring.addresses}
        lost = {*report.refused, *(holders[loss.stage] for loss in report.losses)}
        for address in lost - silent - {*ring.addresses} | {holders[stage] for stage in evicted}:
            ring.condemn(address)
        for address in silent - ring.condemned:
            self._silent.note(address)

    async def healed(self, report: RecoveryReport) -> None:
        """Note who was placed, and restore the number of spares in the background."""
        assert self.ring is not None
        right = {one.other: one.stage for one in report.outvoted}
        self.ring.pardon(right.keys())
        for address, stage in [*right.items(), *((address, k) for k, address in report.placed.items())]:
            self._prepared.get(address, {}).pop(stage, None)
        for address in [address for address in self._prepared if self.gone(address)]:
            del self._prepared[address]
            self._failing.forget(address)
        logger.warning(
            "Pipeline %s healed: %s", self.ring.name, "; ".join(map(str, report.losses)) or "nothing lost"
        )
        self.tend()

    async def _restore_spares(self) -> None:
        try:
            await self.keep_spares()
        except Exception as error:
            assert self.ring is not None
            logger.warning("Pipeline %s has fewer spares than wanted: %s", self.ring.name, error)
        try:
            if self._short():  # perhaps a worker that has only come is not ready yet
                await asyncio.sleep(_REST)
        finally:
            self._tending = False


def _silent(report: RecoveryReport, holders: Sequence[str]) -> set[str]:
    """Return the workers that lost a stage and may be innocent of it."""
    guilty = {loss.stage for loss in report.losses if loss.kind not in _SILENT}
    innocent = {str(loss) for loss in report.losses if loss.kind in _SILENT}
    return {holders[loss.stage] for loss in report.losses if loss.stage not in guilty} | {
        address for address, why in report.refused.items() if why in innocent
    }
