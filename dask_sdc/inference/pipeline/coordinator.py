"""The coordinator: feeds the head, hears the tail, and has the pipeline healed when something is wrong.

It holds no layers. It runs on any event loop from which the workers can be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from dask_sdc.cluster.session import noticed
from dask_sdc.exceptions import (
    ClosedError,
    ContextOverflow,
    DeviceLost,
    GenerationInterrupted,
    NoSpareError,
    SDCError,
    StageError,
)
from dask_sdc.inference.heal import Loss, LossKind, RecoveryReport, for_session, run_recovery
from dask_sdc.inference.host import Chunk, SessionSettings
from dask_sdc.inference.journal import boundary_digest
from dask_sdc.inference.pipeline.audits import Located, Mismatch, StageAudits
from dask_sdc.inference.pipeline.blame import Blame
from dask_sdc.inference.pipeline.crew import Crew
from dask_sdc.inference.pipeline.evidence import mismatch_of
from dask_sdc.inference.pipeline.fed import FedSession, Feed, Returned
from dask_sdc.inference.pipeline.lines import Answers, Line
from dask_sdc.inference.pipeline.ops import POSITIONS, ClusterOps, Ring
from dask_sdc.inference.pipeline.worker import unpack_record
from dask_sdc.inference.receipts import boundary_chain
from dask_sdc.inference.shadow import ShadowAudit

__all__ = ["Coordinator"]

T = TypeVar("T")

#: Deadlines are this many times what a traversal took so far, where that is longer than the timeout.
_SLACK = 20.0

#: Bytes per second that a worker takes in at least, on a machine that it shares.
_INTAKE = 2**25


class _Broken(Exception):
    """Something is wrong with the pipeline: it is to be healed, and what is in flight is lost.

    ``late`` says whether what is in flight is overdue, and whoever has it to blame; else a connection broke.
    """

    def __init__(self, why: str, late: bool = True) -> None:
        super().__init__(why)
        self.late = late


class _Unopened(Exception):
    """A stage's own code raised when it was to open a session: nobody else would fare better."""

    def __init__(self, stage: int, error: Exception) -> None:
        super().__init__(f"stage {stage}: expected it to open a session, got {type(error).__name__}: {error}")
        self.stage = stage


class _Overtaken(Exception):
    """The pipeline was healed meanwhile: what the session had in flight is lost."""


class Coordinator:
    """Runs the sessions of one pipeline.

    Parameters
    ----------
    ring : Ring
        The pipeline, all of its stages seated and wired.
    blocks : sequence of str
        Per stage the digest of its weights.
    crew : Crew
        The workers.
    timeout : float
        Seconds without an answer after which a stage counts as frozen.
    budget : int
        Positions of all open sessions together that the stages have memory for.
    exact : bool
        Whether replays are exact; see `run_recovery`.
    differs : callable
        Awaited with every `Mismatch` that an audit or a recovery finds, after the sessions were healed.
    audit : ShadowAudit, optional
        Draws the chunks that are audited.
    """

    def __init__(
        self,
        ring: Ring,
        blocks: Sequence[str],
        crew: Crew,
        timeout: float,
        budget: int,
        exact: bool,
        differs: Callable[[Mismatch], Awaitable[None]],
        audit: ShadowAudit | None = None,
    ) -> None:
        self.ring, self.blocks, self.timeout, self.budget = ring, tuple(blocks), timeout, budget
        self.recoveries: list[RecoveryReport] = []
        self._crew = crew
        self._epoch = 0
        self._fed = self._settled = -1
        self._returned: set[int] = set()
        # Answers so far, and as many as there were when a connection broke.
        self._heard, self._broke_at = 0, -1
        self._sessions: dict[str, FedSession] = {}
        self._settings: dict[str, SessionSettings] = {}
        # What waits for the answer to a chunk, and where that arrives.
        self._waiting: dict[int, asyncio.Future[Returned]] = {}
        self._arrivals: dict[int, asyncio.Future[Returned]] = {}
        self._head = Line(ring.routes, ring.name)
        self._tail = Answers(ring.routes, ring.name, self._arrived, self._deaf)
        self._order = asyncio.Lock()
        self._free = asyncio.Condition()
        self._taken = 0
        self._alarm: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._recovery: asyncio.Task[None] | None = None
        self._distrusted: set[int] = set()
        self._slowest = 0.0  # seconds per position of a traversal
        self._largest = 0  # bytes of a chunk
        self._closed = False
        # What the next recovery begins with: stages to replace, and what is not believed any more.
        self._evicted: dict[int, str] = {}
        self._blame = Blame(timeout)
        self._rollbacks: dict[str, int] = {}
        self._inquiries: set[asyncio.Future[None]] = set()
        self._openings: dict[str, asyncio.Future[None]] = {}
        self._differs = differs
        self._audits = StageAudits(audit, self, differs) if audit is not None else None
        self._exact = exact

    # -- generation ------------------------------------------------------------------------------

    async def run(self, session: FedSession, capacity: int | None) -> AsyncGenerator[int, None]:
        """Run a session to its end; yield after each traversal how many fresh tokens may be handed out.

        Those of a chunk that is to be audited, and of all after it, wait for the audit.

        Raises
        ------
        GenerationInterrupted
            If the pipeline cannot be healed; carries what was committed, and a checkpoint.
        """
        async with self._admitted((capacity or 0) * session.batch):
            name = session.name
            sketched = self._audits is not None or not self._exact
            self._settings[name] = session.settings(capacity, sketched=sketched)
            self._sessions[name] = session
            try:
                await self._until_healed(session, self._open(session))
                over = False
                while not over:
                    while not session.done:
                        await self._turn(session)
                        yield self._handed_out(session)
                    await self._until_healed(session, self._finished(session))
                    # An audit may have taken some of it back, or a stage was lost meanwhile.
                    over = session.done and len(session.tapped) == len(session.taps)
                yield self._handed_out(session)
            finally:
                try:
                    await self._drained(session)
                finally:
                    del self._sessions[name], self._settings[name]
                    self._blame.forget(name)
                    await self._close(name)

    def _handed_out(self, session: FedSession) -> int:
        """Return how many fresh tokens no audit can take back that was drawn."""
        if self._audits is None:
            return session.count
        if session.name in self._audits.failed:
            raise self._audits.failed[session.name]
        oldest = self._audits.oldest(session.name)
        return session.count if oldest is None else session.count_before(oldest)

    async def _finished(self, session: FedSession) -> None:
        """Wait for the audits of a session, and learn what went from stage to stage."""
        if self._audits is not None:
            decided = asyncio.ensure_future(self._audits.settled(session.name))
            try:
                await self._or_alarm(decided)
            finally:
                decided.cancel()
            self._handed_out(session)
            stages = range(len(self.ring))
            session.audited = tuple(self._audits.clean.get((session.name, stage), 0) for stage in stages)
        if session.done and session.taps:
            session.tapped = await self._tapped(session)
        if session.done and session.exact:
            session.chains = await self._chains(session)

    async def _tapped(self, session: FedSession) -> dict[int, Any]:
        """Return what the layers put out that are wanted."""
        calls = [self.ring.call(stage, "tapped", session=session.name) for stage in range(len(self.ring))]
        try:
            answers = await self._or_alarm(
                asyncio.ensure_future(asyncio.wait_for(asyncio.gather(*calls), self.timeout))
            )
        except (OSError, StageError) as error:
            raise _Broken(f"hidden states were not to be had: {type(error).__name__}: {error}") from error
        found = {}
        for layer, array, digest in (one for answer in answers for one in answer):
            if boundary_digest(array) != digest or array.shape[1] != session.position:
                raise _Broken(f"hidden states of layer {layer} were damaged on their way")
            found[layer] = array
        return found

    async def _chains(self, session: FedSession) -> tuple[str, ...]:
        """Return the hash chain over the outputs of each stage, as whoever took them recorded them.

        Empty if a stage is lost just now: nothing but a receipt would come of healing it.
        """
        calls = [
            asyncio.wait_for(
                self.ring.call(
                    stage,
                    "chain",
                    session=session.name,
                    position=session.position,
                    settled=session.branch,
                ),
                self.timeout,
            )
            for stage in range(1, len(self.ring))
        ]
        chains = await asyncio.gather(*calls, return_exceptions=True)
        if not all(isinstance(chain, str) for chain in chains):
            return ()
        return (*map(str, chains), boundary_chain(session.answers(-1, self._fed)))

    @contextlib.asynccontextmanager
    async def _admitted(self, capacity: int) -> AsyncIterator[None]:
        """Wait for memory for this many positions."""
        if capacity > self.budget:
            raise ContextOverflow(
                f"expected at most {self.budget} positions, which the stages have memory for, got {capacity}"
            )
        async with self._free:
            await self._free.wait_for(lambda: self._closed or self._taken + capacity <= self.budget)
            self._check_open()
            self._taken += capacity
        try:
            yield
        finally:
            async with self._free:
                self._taken -= capacity
                self._free.notify_all()

    async def _turn(self, session: FedSession) -> None:
        """Feed what can be fed, and take the next answer."""
        if self._recovery is not None:
            await self._heal(session, "")
            return
        if session.epoch != self._epoch:
            session.restart(self._epoch)
        try:
            while (feed := await self._next_feed(session)) is not None:
                await self._feed(session, feed)
            awaited = session.awaited
            if awaited is None:
                return  # nothing is left to be fed
            if session.epoch != self._epoch or self._recovery is not None:
                return  # healed, or about to be, while the session was asked what to feed
            if awaited not in self._waiting:
                raise _Broken(f"chunk {awaited} is not on its way any more")
            answer = await self._or_alarm(self._waiting[awaited])
        except _Overtaken:
            return
        except _Broken as trouble:
            await self._heal(session, str(trouble), trouble.late)
            return
        if session.epoch != self._epoch or self._recovery is not None:
            return
        self._settle(awaited)
        session.returned(answer)
        if self._audits is not None and session.records(awaited - 1, awaited):
            self._audits.returned(session.name, awaited)

    async def _next_feed(self, session: FedSession) -> Feed | None:
        if session.reading is None:
            return session.next_feed()
        async with session.reading:
            return await asyncio.to_thread(session.next_feed)

    def _settle(self, index: int) -> None:
        """Note that the answer to a chunk is here."""
        self._waiting.pop(index)
        self._heard += 1
        self._returned.add(index)
        while self._settled + 1 in self._returned:
            self._settled += 1
            self._returned.remove(self._settled)

    async def _drained(self, session: FedSession) -> None:
        """Let what a session has in flight come back, so that no chunk of it arrives after its end."""
        if self._closed or session.epoch != self._epoch:
            return
        waiting = {index: self._waiting[index] for index in session.in_flight if index in self._waiting}
        back: asyncio.Future[Any] = asyncio.gather(*waiting.values(), return_exceptions=True)
        either: list[asyncio.Future[Any]] = [back, self._alarm]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        for index, answer in waiting.items():
            if not answer.done() or answer.cancelled() or self._waiting.get(index) is not answer:
                continue  # a recovery has seen to it, or will
            if (trouble := answer.exception()) is None:
                self._settle(index)
            else:
                self.alarm(str(trouble))

    async def _feed(self, session: FedSession, feed: Feed) -> None:
        async with self._order:
            self._check_alarm()
            if session.epoch != self._epoch:
                raise _Overtaken
            self._fed += 1
            index, chunk = self._fed, session.sent(self._fed, feed)
            deadline = self._deadline(chunk.width)
            self._largest = max(self._largest, chunk.array.nbytes)
            self._waiting[index] = asyncio.ensure_future(self._answer(index, chunk, deadline))
            sending = asyncio.ensure_future(self._sent(self._epoch, chunk, deadline))
            try:
                await self._or_alarm(sending)
            except asyncio.CancelledError:
                # The next chunk must not overtake it.
                either: list[asyncio.Future[Any]] = [sending, self._alarm]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                raise
            except (OSError, StageError) as error:  # a TimeoutError is an OSError
                raise _Broken(
                    f"the head did not take chunk {index}: {type(error).__name__}: {error}",
                    isinstance(error, TimeoutError),
                ) from error
            finally:
                sending.cancel()  # where an alarm was quicker, it is not to be sent any more

    def _deadline(self, width: int) -> float:
        """Return the seconds that a chunk may take, those before it included."""
        return max(self.timeout, _SLACK * self._slowest * width) * (1 + len(self._waiting) / 4)

    @property
    def positions(self) -> int:
        """Positions that a stage computes in a quarter of the timeout, by what traversals took so far."""
        return min(POSITIONS, max(1, int(self.timeout / 4 / self._slowest))) if self._slowest else POSITIONS

    def _patience(self) -> float:
        """Return the seconds that a stage has to say that it is there, which it may do behind a chunk.

        A recovery asks several times within the timeout.
        """
        return min(self.timeout / 3, max(0.5, self.timeout / 10) + self._largest / _INTAKE)

    async def _sent(self, epoch: int, chunk: Chunk, deadline: float) -> None:
        """Send a chunk to the head, after the tail knows where to send what comes of it."""
        async with asyncio.timeout(deadline):
            await self._tail.open(self.ring.addresses[-1])
            await self._head.send(self.ring.addresses[0], epoch, chunk)

    async def _answer(self, index: int, chunk: Chunk, deadline: float) -> Returned:
        """Wait for what the tail makes of a chunk, by its number, until the deadline."""
        loop = asyncio.get_running_loop()
        began, ahead, width = loop.time(), len(self._waiting), chunk.width
        self._arrivals[index] = arrival = loop.create_future()
        try:
            async with asyncio.timeout(deadline):
                answer: Returned = await arrival
        except TimeoutError:
            raise _Broken(f"no answer to chunk {index} within {deadline:.1f} s") from None
        except OSError as error:
            raise _Broken(f"no answer to chunk {index}: {type(error).__name__}: {error}", False) from error
        finally:
            del self._arrivals[index]
        if answer.array is not None and boundary_digest(answer.array) != answer.record.digest:
            raise _Broken(f"the answer to chunk {index} was damaged on its way")
        if answer.array is not None:
            self._largest = max(self._largest, answer.array.nbytes)
        self._slowest = max((loop.time() - began) / width / (1 + ahead), 0.95 * self._slowest)
        return answer

    def _arrived(self, answer: Mapping[str, Any]) -> None:
        """Take an answer of the tail; late ones of an epoch that is over are nobody's."""
        record = unpack_record(answer["record"])
        arrival = self._arrivals.get(record.index)
        if answer["epoch"] == self._epoch and arrival is not None and not arrival.done():
            arrival.set_result(Returned(record, answer["array"]))

    def _deaf(self, error: OSError) -> None:
        """Note that the tail cannot be heard any more."""
        for arrival in self._arrivals.values():
            if not arrival.done():
                arrival.set_exception(error)

    async def _open(self, session: FedSession) -> None:
        settings = asdict(self._settings[session.name])
        calls = [
            _opened(stage, self.ring.call(stage, "open", session=session.name, settings=settings))
            for stage in range(len(self.ring))
        ]
        self._openings[session.name] = opening = asyncio.ensure_future(
            asyncio.wait_for(_all(calls), self.timeout)
        )
        try:
            await self._or_alarm(opening)
        except (OSError, StageError, TimeoutError) as error:
            raise _Broken(f"no session could be opened: {type(error).__name__}: {error}") from error
        except _Unopened as error:
            raise StageError(str(error), stage=error.stage) from error.__cause__

    async def _close(self, name: str) -> None:
        opening = self._openings.pop(name)
        if self._closed:
            return
        await asyncio.wait([opening])  # a stage that is asked to open it still must not do so afterwards
        if self._audits is not None:
            await self._audits.forget(name)
        async with self._order:  # not in the middle of a recovery, which would miss it
            calls = [
                asyncio.wait_for(self.ring.call(stage, "close", session=name), self.timeout)
                for stage in range(len(self.ring))
            ]
            # A stage that is lost has lost the session as well.
            await asyncio.gather(*calls, return_exceptions=True)

    # -- trouble ---------------------------------------------------------------------------------

    def alarm(self, why: str) -> None:
        """Note that something is wrong; whoever waits for an answer has the pipeline healed."""
        if not self._alarm.done():
            self._alarm.set_result(why)

    def stage_failed(self, stage: int, why: str) -> None:
        """Note that a stage cannot go on; with audits, ask first whether it was fed something wrong."""
        self._inquiries.add(inquiry := asyncio.ensure_future(self._inquire(stage, why)))
        inquiry.add_done_callback(self._inquiries.discard)

    async def _inquire(self, stage: int, why: str) -> None:
        epoch = self._epoch
        if self._audits is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._audits.explain(stage), self.timeout)
        if epoch == self._epoch and self._recovery is None:
            self.alarm(f"stage {stage}: {why}")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("expected an open pipeline, it was closed")

    def _check_alarm(self) -> None:
        self._check_open()
        if self._alarm.done():
            raise _Broken(self._alarm.result())

    async def _or_alarm(self, work: asyncio.Future[T]) -> T:
        """Wait for something, but no longer than until an alarm."""
        work.add_done_callback(noticed)
        either: list[asyncio.Future[Any]] = [work, self._alarm]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        self._check_open()
        if not work.done():
            self._check_alarm()
        if work.cancelled():
            raise _Overtaken  # by a recovery that began before anybody looked
        return await work

    async def _until_healed(self, session: FedSession, work: Awaitable[None]) -> None:
        try:
            await work
        except _Broken as trouble:
            await self._heal(session, str(trouble), trouble.late)

    async def _heal(self, session: FedSession, why: str, late: bool = True) -> None:
        """Wait for a recovery, the present one if there is one; the session then begins anew from there.

        Where a connection broke and nothing is late, nobody is to blame, unless nothing has come since that
        happened before.
        """
        again, self._broke_at = self._broke_at == self._heard, self._heard
        try:
            await self._repaired(why, stuck=late or again)
        except GenerationInterrupted as error:
            raise for_session(error, session.state()) from error
        abandoned = self.recoveries[-1].abandoned.get(session.name)
        if abandoned is not None:
            raise abandoned

    async def repair(self, why: str) -> None:
        """Have lost stages replaced, those that an audit did not reach or convicted.

        Raises
        ------
        GenerationInterrupted
            If it cannot be healed.
        """
        await self._repaired(why, stuck=False)

    async def _repaired(self, why: str, stuck: bool) -> None:
        """Have the pipeline healed; if that happens already, wait for it.

        ``stuck`` says whether a chunk that did not come back is a sign of anything, and not just on its way.
        """
        self._check_open()
        if self._recovery is None:
            self.alarm(why)
            self._recovery = asyncio.ensure_future(self._recover(stuck))
        await asyncio.shield(self._recovery)

    async def calm(self) -> None:
        """Wait while the pipeline is being healed, if it is, whether that succeeds or not."""
        while self._recovery is not None:
            await asyncio.wait([self._recovery])

    async def evict(self, stage: int, why: str, positions: Mapping[str, int]) -> None:
        """Replace a stage that answers, with sessions rolled back to positions that are believed."""
        self._evicted[stage] = why
        for name, position in positions.items():
            self._rollbacks[name] = min(position, self._rollbacks.get(name, position))
        while stage in self._evicted and not self._closed:
            await self.calm()
            if stage in self._evicted:
                await self.repair(f"stage {stage}: {why}")

    def _take_back(self, positions: Mapping[str, int]) -> None:
        """Believe nothing of sessions any more from a position on."""
        for name, position in positions.items():
            session = self._sessions.get(name)
            if session is None:
                continue
            session.roll_back(position)
            if self._audits is not None:
                counted = session.records(-1, self._fed)
                self._audits.rolled_back(name, session.position, counted[-1].index if counted else -1)

    async def _recover(self, stuck: bool) -> None:
        holders = list(self.ring.addresses)
        try:
            report = await self._recovered(stuck)
        finally:
            self._recovery = None
        await self._crew.healed(report)
        for one in report.outvoted:
            await self._differs(mismatch_of(one, holders[one.stage], self._crew.known))

    async def _recovered(self, stuck: bool) -> RecoveryReport:
        async with self._order:
            for waiting in self._waiting.values():
                waiting.cancel()
            await asyncio.gather(*self._waiting.values(), return_exceptions=True)
            self._waiting.clear()
            self._take_back(self._rollbacks)
            self._rollbacks = {}
            evicted, holders = dict(self._evicted), list(self.ring.addresses)
            flying = {index: s for s in self._sessions.values() for index in s.in_flight}
            # Sessions may be given up meanwhile.
            sessions, settings = dict(self._sessions), dict(self._settings)
            ops = ClusterOps(
                self.ring,
                settings.__getitem__,
                lambda name, indices: sessions[name].fed(indices),
                lambda name: sessions[name].branch,
                self._crew.spare,
                self._crew.gone,
                lambda: self._fed,
                self._patience(),
                self.positions,
            )
            try:
                report = await run_recovery(
                    ops,
                    [one.state() for one in sessions.values()],
                    blocks=self.blocks,
                    epoch=self._epoch,
                    fed=self._fed if stuck else self._settled,
                    returned=self._settled,
                    evict=evicted,
                    distrusted=self._distrusted,
                    exact=self._exact,
                    timeout_s=self.timeout,
                )
            except GenerationInterrupted as error:
                report = vars(error)["report"]
                self._epoch = max(self._epoch, report.epoch)
                self._dismiss(report.losses, holders)
                self._crew.note(report, holders, evicted)
                self._take_back(report.rolled_back)
                if isinstance(error, NoSpareError):
                    self._blame.explain(error, flying)
                raise
            for stage in evicted:
                self._evicted.pop(stage, None)
            self._epoch, self._settled = report.epoch, self._fed
            self._returned.clear()
            self._distrusted = set(report.resent)
            self._dismiss(report.losses, holders)
            self._crew.note(report, holders, evicted)
            self.ring.pardon(self._blame.spread(report, holders, flying))
            self._take_back(report.rolled_back)
            for name in report.inexact & self._sessions.keys():
                self._sessions[name].exact = False
            self.recoveries.append(report)
            self._alarm = asyncio.get_running_loop().create_future()
        return report

    def _dismiss(self, losses: Sequence[Loss], holders: Sequence[str]) -> None:
        """Have those workers removed that said that they lost their device."""
        for loss in losses:
            if loss.kind is LossKind.FAILED and DeviceLost.__name__ in loss.detail:
                self._crew.give_up(holders[loss.stage], loss.detail)

    # -- what audits ask -------------------------------------------------------------------------

    def session(self, name: str) -> FedSession | None:
        """Return a session, None if it is over."""
        return self._sessions.get(name)

    def sessions(self) -> Collection[str]:
        """Return the names of all sessions."""
        return tuple(self._sessions)

    def settings(self, name: str) -> SessionSettings:
        """Return the settings of a session."""
        return self._settings[name]

    def locate(self, address: str) -> Located:
        """Return where a worker is."""
        return self._crew.locate(address)

    async def answers(self, address: str) -> bool:
        """Say whether a worker answers; one that does not is not chosen until it does."""
        return await self._crew.answers(address)

    async def choose(self, stage: int, apart: Collection[str]) -> str | None:
        """Return a worker outside of some domains that can compute a stage."""
        return await self._crew.auditor(stage, apart)

    async def close(self) -> None:
        """End what is running; sessions that wait raise."""
        self._closed = True
        for inquiry in self._inquiries:
            inquiry.cancel()
        if self._audits is not None:
            await self._audits.close()
        self.alarm("the pipeline was closed")
        async with self._free:
            self._free.notify_all()
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
        for waiting in self._waiting.values():
            waiting.cancel()
        await asyncio.gather(*self._waiting.values(), return_exceptions=True)
        self._head.close()
        self._tail.close()


async def _opened(stage: int, call: Awaitable[Any]) -> None:
    try:
        await call
    except (OSError, SDCError):
        raise
    except Exception as error:
        raise _Unopened(stage, error) from error


async def _all(calls: Sequence[Awaitable[Any]]) -> None:
    """Wait until all calls have ended, and raise what the first one raised that failed."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def session_name() -> str:
    """Return a name that no other session has."""
    return uuid.uuid4().hex[:12]
