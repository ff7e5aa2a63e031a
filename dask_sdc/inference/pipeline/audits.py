"""Audits of a running pipeline: drawn chunks are computed once more elsewhere, and what shows is acted on.

An auditor follows a stage: it is fed from the journal of the stage before, from the first chunk on, as fast
as it is asked to. So an audit of one chunk covers all chunks before it, and shows a state that was bent in
memory as well as a wrong product.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from dask_sdc.exceptions import CorruptionError, GenerationInterrupted
from dask_sdc.inference.host import SessionSettings
from dask_sdc.inference.journal import ChunkRecord
from dask_sdc.inference.pipeline.fed import FedSession
from dask_sdc.inference.pipeline.lines import pack_chunk
from dask_sdc.inference.pipeline.ops import Ring, parts
from dask_sdc.inference.pipeline.worker import unpack_record
from dask_sdc.inference.proof import ENVELOPE
from dask_sdc.inference.shadow import (
    ShadowAction,
    ShadowAudit,
    ShadowFinding,
    first_divergence,
    judge_shadow,
    voice,
)
from dask_sdc.policy.verdict import RERUN_DIFFERS, Outcome, Voice

__all__ = ["Located", "Mismatch", "StageAudits", "Surroundings", "envelope_of"]

logger = logging.getLogger("dask_sdc.inference")

#: How often an audit is tried that fails for reasons of its own.
_TRIES = 3


class Located(NamedTuple):
    """Where a worker is: its failure domain, and the digest of its environment."""

    domain: str
    fingerprint: str


@dataclass(frozen=True)
class Mismatch:
    """A chunk that was computed to two results, with all that was heard of it.

    Parameters
    ----------
    finding : ShadowFinding
        What was concluded.
    position : int
        First position of the chunk.
    voices : mapping of str to Voice
        By role.
    workers : mapping of str to str
        Addresses, by role.
    """

    finding: ShadowFinding
    position: int
    voices: Mapping[str, Voice]
    workers: Mapping[str, str]


class Surroundings(Protocol):
    """What audits need of the pipeline that they watch."""

    ring: Ring
    timeout: float

    @property
    def positions(self) -> int:
        """Positions that a stage computes well within the timeout."""

    def session(self, name: str) -> FedSession | None:
        """Return a session, None if it is over."""

    def sessions(self) -> Collection[str]:
        """Return the names of all sessions."""

    def settings(self, name: str) -> SessionSettings:
        """Return the settings of a session."""

    def locate(self, address: str) -> Located:
        """Return where a worker is."""

    async def choose(self, stage: int, apart: Collection[str]) -> str | None:
        """Return a worker outside of some domains that can compute a stage."""

    async def answers(self, address: str) -> bool:
        """Say whether a worker answers; one that does not is not chosen until it does."""

    async def calm(self) -> None:
        """Wait while the pipeline is being healed."""

    async def repair(self, why: str) -> None:
        """Have the pipeline healed."""

    async def evict(self, stage: int, why: str, positions: Mapping[str, int]) -> None:
        """Replace a stage, with the sessions rolled back to positions that are believed."""


class StageAudits:
    """The audits of one pipeline.

    Parameters
    ----------
    audit : ShadowAudit
        Draws the chunks.
    around : Surroundings
        The pipeline.
    receive : callable
        Awaited with every `Mismatch`, once the session is healed.
    """

    def __init__(
        self, audit: ShadowAudit, around: Surroundings, receive: Callable[[Mismatch], Awaitable[None]]
    ) -> None:
        self._audit, self._around, self._receive = audit, around, receive
        #: Why a session cannot be trusted and cannot be healed.
        self.failed: dict[str, GenerationInterrupted] = {}
        #: By session and stage, the position up to which audits agreed.
        self.clean: dict[tuple[str, int], int] = {}
        self._due: dict[tuple[str, int], deque[int]] = {}
        self._tries: Counter[tuple[str, int]] = Counter()
        # Who follows a stage in a session, and the last chunk that it has computed.
        self._followers: dict[tuple[str, int], tuple[str, int]] = {}
        # Who has computed anything of a session, and is told when it is over.
        self._asked: dict[str, set[str]] = {}
        self._warned = False
        self._decided = asyncio.Condition()
        stages = range(len(around.ring))
        self._news = [asyncio.Event() for _ in stages]
        self._tasks = [asyncio.ensure_future(self._work(stage)) for stage in stages]

    # -- what is due -----------------------------------------------------------------------------

    def returned(self, name: str, chunk: int) -> None:
        """Draw from the stages that computed a chunk."""
        for stage, address in enumerate(self._around.ring.addresses):
            if self._audit.draw(self._around.locate(address).domain, chunk):
                self._due.setdefault((name, stage), deque()).append(chunk)
                self._news[stage].set()

    async def explain(self, stage: int) -> None:
        """Have a chunk at which a stage failed computed once more by all stages before it.

        What made it fail may have been fed to it: a value that is finite and far too large, say.
        """
        names = list(self._around.sessions())
        for name in names:
            session = self._around.session(name)
            if session is not None and session.in_flight:
                for before in range(stage):
                    self._due.setdefault((name, before), deque()).append(session.in_flight[0])
                    self._news[before].set()
        for name in names:
            await self.settled(name)

    def oldest(self, name: str) -> int | None:
        """Return the first chunk of a session that is to be audited yet, None if there is none."""
        waiting = [due[0] for (session, _), due in self._due.items() if session == name]
        return min(waiting, default=None)

    async def settled(self, name: str) -> None:
        """Wait until every audit of a session that was drawn is decided."""
        async with self._decided:
            await self._decided.wait_for(lambda: self.oldest(name) is None or name in self.failed)

    def rolled_back(self, name: str, position: int, last: int) -> None:
        """Note that a session is not believed from a position on; ``last`` is its last chunk before that."""
        for key in [key for key in self._due if key[0] == name]:
            kept = deque(chunk for chunk in self._due.pop(key) if chunk <= last)
            if kept:
                self._due[key] = kept
        for key in [key for key in self.clean if key[0] == name]:
            self.clean[key] = min(self.clean[key], position)
        for key in [key for key, (_, done) in self._followers.items() if key[0] == name and done > last]:
            del self._followers[key]

    async def forget(self, name: str) -> None:
        """Forget a session that is over."""
        for key in [key for key in self._due if key[0] == name]:
            del self._due[key]
            self._refund(key[1])
        for key in [key for key in self.clean if key[0] == name]:
            del self.clean[key]
        self.failed.pop(name, None)
        for key in [key for key in self._followers if key[0] == name]:
            del self._followers[key]
        ring, timeout, asked = self._around.ring, self._around.timeout, self._asked.pop(name, set())
        calls = [asyncio.wait_for(ring.call_at(a, "unshadow", session=name), timeout) for a in asked]
        await asyncio.gather(*calls, return_exceptions=True)

    def _refund(self, stage: int) -> None:
        self._audit.refund(self._around.locate(self._around.ring.addresses[stage]).domain)

    async def close(self) -> None:
        """Audit no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- one stage after the other ---------------------------------------------------------------

    async def _work(self, stage: int) -> None:
        while True:
            key = next((key for key in self._due if key[1] == stage), None)
            if key is None:
                await self._news[stage].wait()
                self._news[stage].clear()
                continue
            try:
                await self._take(key)
            except Exception as error:
                # Of a defect here nobody is to hear by waiting for ever.
                logger.exception("Audit of stage %d failed", stage)
                self._fail(key[0], f"audit of stage {stage}: {type(error).__name__}: {error}", error)
                self._due.pop(key, None)
            async with self._decided:
                self._decided.notify_all()

    async def _take(self, key: tuple[str, int]) -> None:
        """Audit a stage of a session up to the last chunk that is due."""
        name, stage = key
        await self._around.calm()
        session = self._around.session(name)
        if session is None or key not in self._due:
            self._due.pop(key, None)
            return
        last = self._due[key][-1]
        auditor = await self._auditor(key)
        if auditor is None:
            self._skip(key, "no worker on another failure domain")
            return
        try:
            tries = self._tries[key]
            await self._examine(session, stage, last, auditor)
        except CorruptionError as error:
            await self._corrupted(key, error)
        except Exception as error:  # whatever was raised where the auditor is
            await self._failed_to(key, auditor, error)
        else:
            if self._tries[key] == tries:
                del self._tries[key]

    async def _auditor(self, key: tuple[str, int]) -> str | None:
        """Return who audits a stage: whoever did so before, if that is possible."""
        around, stage = self._around, key[1]
        domain = around.locate(around.ring.addresses[stage]).domain
        address, _ = self._followers.get(key, ("", -1))
        if address and around.locate(address).domain not in ("", domain):
            return address
        self._followers.pop(key, None)
        return await around.choose(stage, {domain})

    async def _corrupted(self, key: tuple[str, int], error: CorruptionError) -> None:
        """A chunk for an auditor lost its digest: on its way, or, if that happens again, where it is kept."""
        name, stage = key
        self._followers.pop(key, None)
        self._tries[key] += 1
        if self._tries[key] == 1:
            return
        if stage == 0:
            self._fail(name, f"expected the ids that were fed, got {error}", error)
            self._due.pop(key, None)
        else:
            # It was right when it was fed: no token depends on it any more.
            await self._around.evict(stage - 1, f"journal: {error}", {})

    async def _failed_to(self, key: tuple[str, int], auditor: str, error: Exception) -> None:
        """Try again with another auditor; if this one answers, it is the pipeline that needs healing."""
        self._followers.pop(key, None)
        self._tries[key] += 1
        why = f"audit of stage {key[1]}: {type(error).__name__}: {error}"
        if self._tries[key] > _TRIES:
            self._skip(key, why)
        elif await self._around.answers(auditor):
            await self._around.repair(why)

    def _skip(self, key: tuple[str, int], why: str) -> None:
        self._due.pop(key, None)
        self._tries.pop(key, None)
        self._refund(key[1])
        if not self._warned:
            logger.warning("Pipeline %s: stage %d is not audited: %s", self._around.ring.name, key[1], why)
            self._warned = True

    def _fail(self, name: str, why: str, cause: BaseException | None = None) -> None:
        session = self._around.session(name)
        if session is None:
            return
        state = session.state()
        clean = min(self.clean.get((name, stage), 0) for stage in range(len(self._around.ring)))
        checkpoint = state.checkpoint(clean)
        error = GenerationInterrupted(
            f"session {name}: {why}", session=name, committed=checkpoint.committed, checkpoint=checkpoint
        )
        error.__cause__ = cause
        self.failed[name] = error

    # -- computing once more ---------------------------------------------------------------------

    async def _examine(self, session: FedSession, stage: int, last: int, auditor: str) -> None:
        key = (session.name, stage)
        _, done = self._followers.get(key, ("", -1))
        chunks = session.known(done, last)
        if not chunks:
            self._agreed(key, last, None)  # rolled back meanwhile, or covered by an audit of a later chunk
            return
        recorded, recomputed = await asyncio.gather(
            self._recorded(session, stage, chunks), self._replayed(session, stage, chunks, auditor)
        )
        if session.known(done, last) != chunks or len(recorded) != len(chunks):
            self._overtaken(key)
            return
        counts = chunks[-1].end <= session.position
        if counts:
            self._followers[key] = (auditor, chunks[-1].index)
        else:
            self._followers.pop(key, None)  # what is on its way may yet be taken back
        sides = [self._around.locate(a).fingerprint for a in (self._around.ring.addresses[stage], auditor)]
        first = first_divergence(recorded, recomputed, within=envelope_of(sides))
        if first is None:
            self._agreed(key, last, chunks[-1].end if counts else None)
        else:
            await self._differ(session, stage, first, recorded, recomputed, auditor)

    def _overtaken(self, key: tuple[str, int]) -> None:
        """A recovery came in between: what was heard does not belong together."""
        self._followers.pop(key, None)
        self._tries[key] += 1
        if self._tries[key] > _TRIES:
            self._skip(key, "its records do not fit together")

    def _agreed(self, key: tuple[str, int], last: int, position: int | None) -> None:
        due = self._due.get(key)
        while due and due[0] <= last:
            due.popleft()
        if not due:
            self._due.pop(key, None)
        if position is not None:
            self.clean[key] = max(position, self.clean.get(key, 0))

    async def _recorded(
        self, session: FedSession, stage: int, chunks: Sequence[ChunkRecord]
    ) -> tuple[ChunkRecord, ...]:
        """Return what went on from a stage, as whoever took it recorded it."""
        ring, after = self._around.ring, chunks[0].index - 1
        if stage == len(ring) - 1:
            return session.answers(after, chunks[-1].index)
        call = ring.call(stage + 1, "digests", session=session.name, after=after)
        packed = await asyncio.wait_for(call, self._around.timeout)
        wanted = {record.index for record in chunks}
        return tuple(record for record in map(unpack_record, packed) if record.index in wanted)

    async def _replayed(
        self, session: FedSession, stage: int, chunks: Sequence[ChunkRecord], address: str
    ) -> list[ChunkRecord]:
        """Have a worker compute chunks of a session that follow what it has computed of it."""
        ring, name = self._around.ring, session.name
        found: list[ChunkRecord] = []
        self._asked.setdefault(name, set()).add(address)
        ring.asked.add(address)
        for part in parts(chunks, self._around.positions):
            indices, kept = [record.index for record in part], [record.kept for record in part]
            shadow = {
                "number": stage,
                "stages": len(ring),
                "stage": ring.blobs[stage],
                "settings": asdict(self._around.settings(name)),
                "begin": part[0].position,
            }
            call: Awaitable[Any]
            if stage == 0:
                fed = [pack_chunk(chunk) for chunk in session.fed(indices)]
                call = ring.call_at(address, "shadow", session=name, chunks=fed, kept=kept, **shadow)
            else:
                call = ring.call(
                    stage - 1,
                    "refeed",
                    session=name,
                    indices=indices,
                    kept=kept,
                    to=address,
                    shadow=shadow,
                )
            found += map(unpack_record, await asyncio.wait_for(call, self._around.timeout))
        return found

    # -- two results -----------------------------------------------------------------------------

    async def _differ(
        self,
        session: FedSession,
        stage: int,
        first: ChunkRecord,
        recorded: Sequence[ChunkRecord],
        recomputed: Sequence[ChunkRecord],
        auditor: str,
    ) -> None:
        """Hear a witness and both sides again, and act on what they say."""
        around, key = self._around, (session.name, stage)
        # The auditor is asked to begin anew, so it follows no longer.
        self._followers.pop(key, None)
        workers = {"primary": around.ring.addresses[stage], "audit": auditor}
        heard = {
            "primary": [r for r in recorded if r.index <= first.index],
            "audit": [r for r in recomputed if r.index <= first.index],
        }
        voices = {role: self._voice(role, workers[role], heard[role]) for role in heard}
        finding = self._judged(session, stage, voices)
        if finding.action is ShadowAction.ASK:
            apart = {around.locate(address).domain for address in workers.values()}
            workers["rerun_primary"], workers["rerun_audit"] = workers["primary"], workers["audit"]
            workers["witness"] = await around.choose(stage, apart) or ""
            chunks = session.known(-1, first.index)
            roles = finding.decision.needs
            asked = [self._heard(role, workers[role], session, stage, chunks) for role in roles]
            voices |= dict(zip(roles, await asyncio.gather(*asked), strict=True))
            finding = self._judged(session, stage, voices)
        await self._act(session, Mismatch(finding, first.position, voices, workers))

    def _judged(self, session: FedSession, stage: int, voices: Mapping[str, Voice]) -> ShadowFinding:
        clean = self.clean.get((session.name, stage), 0)
        return judge_shadow(
            session.state(),
            stage,
            voices["primary"],
            voices["audit"],
            voices.get("witness"),
            voices.get("rerun_primary"),
            voices.get("rerun_audit"),
            clean=clean,
            envelope=envelope_of([said.fingerprint for said in voices.values() if said.ref]),
        )

    def _voice(self, role: str, address: str, records: Sequence[ChunkRecord] | None) -> Voice:
        domain, fingerprint = self._around.locate(address)
        return voice(role, domain, records, fingerprint=fingerprint)

    async def _heard(
        self,
        role: str,
        address: str,
        session: FedSession,
        stage: int,
        chunks: Sequence[ChunkRecord],
    ) -> Voice:
        """Return the voice of a worker that computes everything from the start; missing if it cannot."""
        records = None
        if address:
            try:
                records = await self._replayed(session, stage, chunks, address)
            except Exception as error:  # whatever was raised where it is
                logger.warning("Audit of stage %d: no %s from %s: %s", stage, role, address, error)
        return self._voice(role, address, records)

    async def _act(self, session: FedSession, mismatch: Mismatch) -> None:
        finding, key = mismatch.finding, (session.name, mismatch.finding.stage)
        decision, voices = finding.decision, mismatch.voices
        trusted = voices.get(decision.value or "")
        if decision.outcome is Outcome.AGREE:
            self._agreed(key, finding.chunk, mismatch.position)
            return
        if finding.action is ShadowAction.DROP:
            self._around.ring.condemn(mismatch.workers["audit"])
        elif finding.action is ShadowAction.EVICT or (
            trusted is not None and trusted.digest != voices["primary"].digest
        ):
            if self._around.ring.addresses[finding.stage] == mismatch.workers["primary"]:
                await self._roll_back(finding, mismatch.position)
            # Else the stage was lost meanwhile, and proved anew; what is due of it is looked at again.
        elif trusted is None:
            why = f"stage {finding.stage} at chunk {finding.chunk}: {decision.reason}"
            if decision.reason == RERUN_DIFFERS:
                why += " (does the stage give the same when it is fed the same?)"
            self._fail(session.name, f"an audit differs, and nobody can say who is right: {why}")
            self._due.pop(key, None)
        else:
            # The auditor began anew for this chunk, and goes on from there.
            self._followers[key] = (mismatch.workers["audit"], finding.chunk)
            self._agreed(key, finding.chunk, mismatch.position)
        await self._receive(mismatch)

    async def _roll_back(self, finding: ShadowFinding, position: int) -> None:
        """Replace a stage that computed wrongly, and believe nothing of it that no audit has confirmed."""
        believed = position if finding.position < 0 else finding.position
        positions = {name: self.clean.get((name, finding.stage), 0) for name in self._around.sessions()}
        positions[finding.session] = believed
        why = f"an audit of chunk {finding.chunk} of session {finding.session} found it wrong"
        await self._around.evict(finding.stage, why, positions)


def envelope_of(fingerprints: Sequence[str]) -> float | None:
    """Return by how much results may differ: not at all in equal environments."""
    return None if len(set(fingerprints)) == 1 else ENVELOPE
