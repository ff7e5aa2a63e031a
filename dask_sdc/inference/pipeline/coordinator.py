"""The coordinator: feeds the head, hears the tail, and has the pipeline healed when something is wrong.

It holds no layers. It runs on any event loop from which the workers can be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from dask_sdc.exceptions import ClosedError, ContextOverflow, GenerationInterrupted, StageError
from dask_sdc.inference.heal import RecoveryReport, for_session, run_recovery
from dask_sdc.inference.host import Chunk, SessionSettings
from dask_sdc.inference.pipeline.ops import ClusterOps, Ring
from dask_sdc.inference.pipeline.session import Feed, TokenSession
from dask_sdc.inference.pipeline.worker import pack_chunk, unpack_record

__all__ = ["Coordinator"]

T = TypeVar("T")

#: Deadlines are this many times what a traversal took so far, where that is longer than the timeout.
_SLACK = 20.0


class _Broken(Exception):
    """Something is wrong with the pipeline: it is to be healed, and what is in flight is lost."""


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
    spare, gone : callable
        See `ClusterOps`.
    healed : callable
        Awaited with the report of every recovery that succeeded.
    timeout : float
        Seconds without an answer after which a stage counts as frozen.
    budget : int
        Positions of all open sessions together that the stages have memory for.
    """

    def __init__(
        self,
        ring: Ring,
        blocks: Sequence[str],
        spare: Callable[[int, Collection[str]], Awaitable[str | None]],
        gone: Callable[[str], bool],
        healed: Callable[[RecoveryReport], Awaitable[None]],
        timeout: float,
        budget: int,
    ) -> None:
        self.ring, self.blocks, self.timeout, self.budget = ring, tuple(blocks), timeout, budget
        self.recoveries: list[RecoveryReport] = []
        self._spare, self._gone, self._healed = spare, gone, healed
        self._epoch = 0
        self._fed = self._settled = -1
        self._returned: set[int] = set()
        self._sessions: dict[str, TokenSession] = {}
        self._settings: dict[str, SessionSettings] = {}
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._order = asyncio.Lock()
        self._free = asyncio.Condition()
        self._taken = 0
        self._alarm: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._recovery: asyncio.Task[None] | None = None
        self._distrusted: set[int] = set()
        self._slowest = 0.0  # seconds per position of a traversal
        self._closed = False

    # -- generation ------------------------------------------------------------------------------

    async def run(self, session: TokenSession, capacity: int) -> AsyncGenerator[tuple[int, ...], None]:
        """Run a session to its end; yield the tokens that each traversal commits.

        Raises
        ------
        GenerationInterrupted
            If the pipeline cannot be healed; carries what was committed, and a checkpoint.
        """
        async with self._admitted(capacity):
            name = session.name
            self._settings[name] = session.settings(capacity)
            self._sessions[name] = session
            try:
                await self._until_healed(session, self._open(session))
                while not session.done:
                    tokens = await self._turn(session)
                    if tokens:
                        yield tokens
            finally:
                del self._sessions[name], self._settings[name]
                await self._close(name)

    @contextlib.asynccontextmanager
    async def _admitted(self, capacity: int) -> AsyncIterator[None]:
        """Wait for memory for this many positions."""
        if capacity > self.budget:
            raise ContextOverflow(
                f"expected at most {self.budget} positions, which the stages have memory for, got {capacity}"
            )
        async with self._free:
            await self._free.wait_for(lambda: self._taken + capacity <= self.budget)
            self._taken += capacity
        try:
            yield
        finally:
            async with self._free:
                self._taken -= capacity
                self._free.notify_all()

    async def _turn(self, session: TokenSession) -> tuple[int, ...]:
        """Feed what can be fed, and take the next answer."""
        if session.epoch != self._epoch:
            session.restart(self._epoch)
        try:
            while (feed := session.next_feed()) is not None:
                await self._feed(session, feed)
            awaited = session.awaited
            assert awaited is not None
            answer = await self._or_alarm(self._waiting[awaited])
        except _Overtaken:
            return ()
        except _Broken as trouble:
            await self._heal(session, str(trouble))
            return ()
        if session.epoch != self._epoch:
            return ()
        self._waiting.pop(awaited)
        self._returned.add(awaited)
        while self._settled + 1 in self._returned:
            self._settled += 1
            self._returned.remove(self._settled)
        return session.returned(unpack_record(answer["record"]))

    async def _feed(self, session: TokenSession, feed: Feed) -> None:
        async with self._order:
            self._check_alarm()
            if session.epoch != self._epoch:
                raise _Overtaken
            self._fed += 1
            index, chunk = self._fed, session.sent(self._fed, feed)
            deadline = self._deadline(chunk.width)
            self._waiting[index] = asyncio.ensure_future(self._answer(index, chunk, deadline))
            taken = self.ring.call(0, "chunk", epoch=self._epoch, chunk=pack_chunk(chunk))
            try:
                await self._or_alarm(asyncio.ensure_future(asyncio.wait_for(taken, deadline)))
            except (OSError, StageError) as error:  # a TimeoutError is an OSError
                raise _Broken(
                    f"the head did not take chunk {index}: {type(error).__name__}: {error}"
                ) from error

    def _deadline(self, width: int) -> float:
        """Return the seconds that a chunk may take, those before it included."""
        return max(self.timeout, _SLACK * self._slowest * width) * (1 + len(self._waiting) / 4)

    async def _answer(self, index: int, chunk: Chunk, deadline: float) -> dict[str, Any]:
        """Wait for what the tail makes of a chunk, by its number, until the deadline."""
        began, ahead, width = asyncio.get_running_loop().time(), len(self._waiting), chunk.width
        call = self.ring.call(len(self.ring) - 1, "answer", epoch=self._epoch, index=index)
        try:
            answer: dict[str, Any] | None = await asyncio.wait_for(call, deadline)
        except TimeoutError:
            raise _Broken(f"no answer to chunk {index} within {deadline:.1f} s") from None
        except (OSError, StageError) as error:
            raise _Broken(f"no answer to chunk {index}: {type(error).__name__}: {error}") from error
        if answer is None:
            raise _Broken(f"no answer to chunk {index}: its epoch ended")
        took = asyncio.get_running_loop().time() - began
        self._slowest = max(took / width / (1 + ahead), 0.95 * self._slowest)
        return answer

    async def _open(self, session: TokenSession) -> None:
        settings = asdict(self._settings[session.name])
        calls = [
            self.ring.call(stage, "open", session=session.name, settings=settings)
            for stage in range(len(self.ring))
        ]
        try:
            await self._or_alarm(asyncio.ensure_future(asyncio.wait_for(_all(calls), self.timeout)))
        except (OSError, StageError, TimeoutError) as error:
            raise _Broken(f"no session could be opened: {type(error).__name__}: {error}") from error

    async def _close(self, name: str) -> None:
        calls = [
            asyncio.wait_for(self.ring.call(stage, "close", session=name), self.timeout)
            for stage in range(len(self.ring))
        ]
        if not self._closed:
            # A stage that is lost has lost the session as well.
            await asyncio.gather(*calls, return_exceptions=True)
        else:
            for call in calls:
                call.close()

    # -- trouble ---------------------------------------------------------------------------------

    def alarm(self, why: str) -> None:
        """Note that something is wrong; whoever waits for an answer has the pipeline healed."""
        if not self._alarm.done():
            self._alarm.set_result(why)

    def _check_alarm(self) -> None:
        if self._closed:
            raise ClosedError("expected an open pipeline, it was closed")
        if self._alarm.done():
            raise _Broken(self._alarm.result())

    async def _or_alarm(self, work: asyncio.Future[T]) -> T:
        """Wait for something, but no longer than until an alarm."""
        either: list[asyncio.Future[Any]] = [work, self._alarm]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            self._check_alarm()
        return await work

    async def _until_healed(self, session: TokenSession, work: Awaitable[None]) -> None:
        try:
            await work
        except _Broken as trouble:
            await self._heal(session, str(trouble))

    async def _heal(self, session: TokenSession, why: str) -> None:
        """Wait for a recovery, the present one if there is one; the session then begins anew from there."""
        self.alarm(why)
        if self._recovery is None:
            self._recovery = asyncio.ensure_future(self._recover())
        try:
            await asyncio.shield(self._recovery)
        except GenerationInterrupted as error:
            raise for_session(error, session.state()) from error
        abandoned = self.recoveries[-1].abandoned.get(session.name)
        if abandoned is not None:
            raise abandoned

    async def _recover(self) -> None:
        async with self._order:
            for waiting in self._waiting.values():
                waiting.cancel()
            await asyncio.gather(*self._waiting.values(), return_exceptions=True)
            self._waiting.clear()
            ops = ClusterOps(
                self.ring,
                self._settings.__getitem__,
                lambda name, indices: self._sessions[name].fed(indices),
                self._spare,
                self._gone,
                lambda: self._fed,
                min(self.timeout, max(0.5, self.timeout / 10)),
            )
            states = [one.state() for one in self._sessions.values() if not one.done]
            try:
                report = await run_recovery(
                    ops,
                    states,
                    blocks=self.blocks,
                    epoch=self._epoch,
                    fed=self._fed,
                    returned=self._settled,
                    distrusted=self._distrusted,
                    timeout_s=self.timeout,
                )
            except GenerationInterrupted as error:
                self._epoch = max(self._epoch, vars(error)["report"].epoch)
                raise
            finally:
                self._recovery = None
            self._epoch, self._settled = report.epoch, self._fed
            self._returned.clear()
            self._distrusted = set(report.resent)
            self.recoveries.append(report)
            self._alarm = asyncio.get_running_loop().create_future()
        await self._healed(report)

    async def close(self) -> None:
        """End what is running; sessions that wait raise."""
        self._closed = True
        self.alarm("the pipeline was closed")
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
        for waiting in self._waiting.values():
            waiting.cancel()
        await asyncio.gather(*self._waiting.values(), return_exceptions=True)


async def _all(calls: Sequence[Awaitable[Any]]) -> None:
    await asyncio.gather(*calls)


def session_name() -> str:
    """Return a name that no other session has."""
    return uuid.uuid4().hex[:12]
