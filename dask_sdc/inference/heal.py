"""Healing: what is done, and in which order, when stages of a pipeline were lost.

`run_recovery` decides; whoever implements `RecoveryOps` acts. The protocol:

1. **stop**: the epoch rises by one. Whatever was on its way is refused from now on, so nothing that was
   fed and did not come back counts.
2. **locate**: every stage reports; see `locate_failure`.
3. **swap**: a spare takes the place of each lost stage and proves its weights by their digest.
4. **truncate**: survivors forget what does not count. They keep weights and the rest of their state.
5. **replay**: each lost stage is fed, from the journal of the stage before it (the head by the
   coordinator), the chunks of every session in the recorded shapes. Neighbours that were lost together
   go in order: the first one's outputs feed the next one. So the lost journal grows again too.
6. **verify**: every output is compared as it comes with what the next stage and the coordinator recorded,
   the tail's with all committed tokens, the driver token among them.
7. **resume**: all stages enter the new epoch together.

Until the resume everything may be done again, so a second failure at any step just goes round again, a
bounded number of times, without repeating what was proved. A spare that does not reproduce the record is
refused. If two spares agree with each other and not with the record, and the second one does so twice, it is
the record that is wrong: the lost stage had computed wrongly. The session is rolled back to where they part.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeVar

from dask_sdc.exceptions import (
    CorruptionError,
    GenerationInterrupted,
    InputError,
    NoSpareError,
    ReplayMismatch,
    StageError,
    StageTimeout,
)
from dask_sdc.inference.checkpoint import Checkpoint
from dask_sdc.inference.journal import ChunkRecord
from dask_sdc.inference.ops import Outvoted, RecoveryOps, RecoveryReport, Replay, Step
from dask_sdc.inference.proof import ENVELOPE, Proof
from dask_sdc.inference.session import (
    EpochFence,
    Failure,
    Loss,
    LossKind,
    ReplayPlan,
    SessionState,
    StageReport,
    locate_failure,
    plan_replay,
)

__all__ = [
    "EpochFence",
    "Failure",
    "Loss",
    "LossKind",
    "Outvoted",
    "RecoveryOps",
    "RecoveryReport",
    "Replay",
    "ReplayPlan",
    "SessionState",
    "StageReport",
    "Step",
    "for_session",
    "locate_failure",
    "plan_replay",
    "run_recovery",
]

T = TypeVar("T")
Evidence = Mapping[str, Sequence[ChunkRecord]]  # who recorded the outputs of a stage, and what
_SILENT = (LossKind.UNREACHABLE, LossKind.STALE)
_LOST_MESSAGE = (LossKind.GAP, LossKind.UNRETURNED)


def for_session(error: GenerationInterrupted, session: SessionState) -> GenerationInterrupted:
    """Return the error that ended a recovery as one session's caller should see it.

    Parameters
    ----------
    error : GenerationInterrupted
        What `run_recovery` raised for all sessions.
    session : SessionState
        One of them.

    Returns
    -------
    GenerationInterrupted
        Of the same class, with the session's committed tokens and checkpoint.
    """
    checkpoint = vars(error).get("checkpoints", {}).get(session.session) or session.checkpoint()
    fields = vars(error) | {"committed": session.committed, "checkpoint": checkpoint}
    copy = type(error)(*error.args)
    copy.__dict__.update(fields)
    copy.__cause__ = error
    return copy


async def run_recovery(
    ops: RecoveryOps,
    sessions: Sequence[SessionState],
    *,
    blocks: Sequence[str],
    epoch: int = 0,
    fed: int | None = None,
    returned: int | None = None,
    evict: Mapping[int, str] | None = None,
    distrusted: Collection[int] = (),
    exact: bool = True,
    envelope: float = ENVELOPE,
    attempts: int = 5,
    timeout_s: float = 30.0,
    load_timeout_s: float = 300.0,
) -> RecoveryReport:
    """Bring a pipeline back to the point at which every session stands; see the module's description.

    Parameters
    ----------
    ops : RecoveryOps
        Acts on the pipeline.
    sessions : sequence of SessionState
        All sessions that are to go on.
    blocks : sequence of str
        Per stage the digest of its weights.
    epoch : int, optional
        The epoch up to now.
    fed, returned : int, optional
        See `locate_failure`.
    evict : mapping of int to str, optional
        Stages that answer and are to be replaced all the same, and why: an audit found them to compute
        wrongly. Roll the sessions back to what is believed first (`SessionState.rolled_back`).
    distrusted : collection of int, optional
        Stages before which a message was lost already: now they are replaced.
    exact : bool, optional
        Whether replays run chunk by chunk and are compared bit by bit. Else they run in wide chunks and are
        compared by sketch, where there are sketches on record.
    envelope : float, optional
        Relative difference that sketches may show.
    attempts : int, optional
        Times to go round at most.
    timeout_s, load_timeout_s : float, optional
        Deadline of every call, and of loading weights, in seconds. A replay has one per chunk.

    Returns
    -------
    RecoveryReport
        The pipeline works again. Sessions in ``abandoned`` do not, and those in ``rolled_back`` go on from an
        earlier position.

    Raises
    ------
    NoSpareError
        If a lost stage cannot be replaced.
    ReplayMismatch
        If it cannot because the spares that were there do not reproduce the record. The checkpoint of the
        session then ends where the record and the replay part.
    StageTimeout
        If the last attempt ended at a deadline.
    GenerationInterrupted
        If the last attempt failed otherwise. All four carry ``committed`` and ``checkpoint`` of the first
        session, ``checkpoints`` of all (see `for_session`) and ``report``.
    """
    if attempts < 1 or not blocks:
        raise InputError(f"expected an attempt and a stage at least, got {attempts} and {len(blocks)}")
    for state in sessions:
        if state.chunks and len(blocks) - 1 not in state.boundaries:
            raise InputError(f"session {state.session}: expected records of the tail's outputs, got none")
    recovery = _Recovery(
        ops,
        {state.session: state for state in sessions},
        tuple(blocks),
        epoch,
        frozenset(distrusted),
        exact,
        envelope,
        timeout_s,
        load_timeout_s,
    )
    return await recovery.run(attempts, fed, returned, evict or {})


class _Again(Exception):
    """This attempt failed; what is known of it was noted."""


class _Tie(Exception):
    """A fast replay gave another token: one that was as likely, or a wrong one. An exact replay tells."""


class _Outvoted(Exception):
    """A session depends on an output on record that was wrong."""

    def __init__(self, wrong: ChunkRecord) -> None:
        super().__init__(str(wrong.place))
        self.position = wrong.position


class _Abandon(Exception):
    """One session cannot be healed."""

    def __init__(self, error: GenerationInterrupted) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class _Recovery:
    """One recovery; what it learns outlives its attempts."""

    ops: RecoveryOps
    sessions: dict[str, SessionState]
    blocks: tuple[str, ...]
    epoch: int
    distrusted: frozenset[int]
    exact: bool
    envelope: float
    timeout_s: float
    load_timeout_s: float
    attempt: int = 0
    vacant: set[int] = field(default_factory=set)
    unproved: dict[int, set[str]] = field(default_factory=dict)  # stage -> sessions to be replayed
    blamed: dict[int, str] = field(default_factory=dict)  # unless the next reports explain it otherwise
    losses: list[Loss] = field(default_factory=list)
    placed: dict[int, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    resent: list[int] = field(default_factory=list)
    replays: dict[tuple[int, str], Replay] = field(default_factory=dict)
    abandoned: dict[str, GenerationInterrupted] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    mismatches: dict[int, ReplayMismatch] = field(default_factory=dict)  # per stage, until it is proved
    # What a spare made that is not on record, by stage, session, chunk and digest.
    dissent: dict[tuple[int, str, int, bytes], str] = field(default_factory=dict)
    outvoted: list[Outvoted] = field(default_factory=list)
    rolled_back: dict[str, int] = field(default_factory=dict)
    cause: BaseException | None = None

    # -- the rounds -----------------------------------------------------------------------------

    async def run(
        self, attempts: int, fed: int | None, returned: int | None, evict: Mapping[int, str]
    ) -> RecoveryReport:
        for self.attempt in range(1, attempts + 1):
            try:
                await self.go_round(fed, returned, evict)
            except _Again:
                continue
            except GenerationInterrupted:
                raise
            except Exception as error:  # a defect of the ops; what was committed is handed over all the same
                self.cause = error
                break
            return self.report()
        if isinstance(self.cause, ReplayMismatch):
            self.give_up(self.cause)
        kind = StageTimeout if isinstance(self.cause, TimeoutError) else GenerationInterrupted
        got = _text(self.cause) if self.cause is not None else "nothing"
        message = f"expected to heal in {attempts} attempts, got {got} in the last one, {self.attempt}"
        self.give_up(kind(f"{message}; {self.history()}"))

    async def go_round(self, fed: int | None, returned: int | None, evict: Mapping[int, str]) -> None:
        self.epoch += 1
        await self.call("stop", self.ops.stop(self.epoch))
        self.locate(await self.call("reports", self.survey(fed, returned)), evict)
        for stage in sorted(self.vacant):
            await self.swap(stage)
        await self.truncate()
        for session in list(self.sessions):
            await self.settle(session)
        await self.call("resume", self.ops.resume(self.epoch))

    async def survey(self, fed: int | None, returned: int | None) -> Failure | None:
        reports = await self.ops.reports(self.epoch)
        if len(reports) != len(self.blocks):
            raise InputError(f"expected {len(self.blocks)} reports, got {len(reports)}")
        return locate_failure(reports, fed=fed, returned=returned, epoch=self.epoch)

    def locate(self, failure: Failure | None, evict: Mapping[int, str]) -> None:
        """Note who is lost; chunks say something in the first attempt only, then all has been cut."""
        found = failure.losses if failure is not None else ()
        silent = [loss for loss in found if loss.kind in _SILENT]
        if self.attempt == 1:
            silent += [Loss(stage, LossKind.EVICTED, detail=why) for stage, why in evict.items()]
            for loss in found:
                if loss.kind in _LOST_MESSAGE and loss.stage not in self.distrusted:
                    self.losses.append(loss)
                    self.resent.append(loss.stage)
                elif loss.kind not in _SILENT:
                    silent.append(loss)
        if not any(loss.stage not in self.vacant for loss in silent):
            silent += [Loss(stage, LossKind.FAILED, detail=why) for stage, why in self.blamed.items()]
        self.blamed.clear()
        for loss in silent:
            self.lose(loss)

    def lose(self, loss: Loss) -> None:
        """Empty the place of a stage, and do not use again whoever was in it."""
        if loss.stage in self.vacant:
            return
        self.losses.append(loss)
        self.vacant.add(loss.stage)
        self.unproved[loss.stage] = set(self.sessions)
        for key in [key for key in self.replays if key[0] == loss.stage]:
            del self.replays[key]
        if loss.stage in self.placed:
            self.refused[self.placed.pop(loss.stage)] = str(loss)

    # -- calls ----------------------------------------------------------------------------------

    async def call(
        self,
        name: str,
        call: Awaitable[T],
        stage: int = -1,
        session: str = "",
    ) -> T:
        """Wait for one call until its deadline; if it fails, note whose fault it may be."""
        try:
            return await self.timed(name, call, stage, session)
        except Exception as error:
            self.cause = error
            self.note_fault(stage, f"{name}: {_text(error)}", error)
            raise _Again from error

    async def timed(self, name: str, call: Awaitable[T], stage: int = -1, session: str = "") -> T:
        began, failed = time.monotonic(), ""
        try:
            async with asyncio.timeout(self.load_timeout_s if name == "load" else self.timeout_s):
                return await call
        except Exception as error:
            failed = _text(error)
            raise
        finally:
            self.steps.append(Step(name, stage, session, time.monotonic() - began, failed))

    def note_fault(self, stage: int, why: str, error: Exception) -> None:
        named = error.stage if isinstance(error, StageError) else -1
        if 0 <= named < len(self.blocks):
            self.lose(Loss(named, LossKind.FAILED, detail=why))
        elif stage >= 0:
            self.blamed[stage] = why

    # -- swap and truncate ----------------------------------------------------------------------

    async def swap(self, stage: int) -> None:
        """Find a spare that loads the right weights."""
        while stage in self.vacant:
            # Whoever chooses is to blame for a failure here, not the stage: it is empty.
            spare = await self.call("choose_spare", self.ops.choose_spare(stage, frozenset(self.refused)))
            if spare is None or spare in self.refused:
                self.no_spare(stage)
            try:
                digest = await self.timed("load", self.ops.load(stage, spare), stage)
            except Exception as error:
                self.cause = error
                self.refused[spare] = f"load of stage {stage}: {_text(error)}"
                continue
            if digest == self.blocks[stage]:
                self.placed[stage] = spare
                self.vacant.discard(stage)
            else:
                message = f"stage {stage}: expected weights {self.blocks[stage]}, got {digest} on {spare}"
                self.refused[spare] = message
                self.mismatches[stage] = ReplayMismatch(message, stage=stage, position=0, what="weights")

    async def truncate(self) -> None:
        """Cut every session on every stage that did not lose it, side by side."""
        cuts = [
            self.cut(stage, session)
            for session in self.sessions.values()
            for stage in range(len(self.blocks))
            if not self.has_lost(stage, session)
        ]
        for result in await asyncio.gather(*cuts, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def cut(self, stage: int, session: SessionState) -> None:
        name = session.session
        cut = await self.call("truncate", self.ops.truncate(stage, name, session.position), stage, name)
        if not cut:
            self.unproved.setdefault(stage, set()).add(name)

    def has_lost(self, stage: int, session: SessionState) -> bool:
        return session.session in self.unproved.get(stage, ())

    # -- replay ---------------------------------------------------------------------------------

    async def settle(self, name: str) -> None:
        """Bring a session to where it stands, or back to where what is on record of it is right."""
        while True:
            session = self.sessions[name]
            try:
                return await self.rebuild(session)
            except _Outvoted as outvoted:
                await self.roll_back(session, outvoted.position)
            except _Abandon as given_up:
                return self.abandon(session, given_up.error)

    async def roll_back(self, session: SessionState, position: int) -> None:
        """Believe nothing of a session any more from a position on."""
        name = session.session
        self.sessions[name] = self.sessions[name].rolled_back(position)
        self.rolled_back[name] = position
        for stage in range(len(self.blocks)):
            if not self.has_lost(stage, session):
                await self.cut(stage, self.sessions[name])

    async def rebuild(self, session: SessionState) -> None:
        """Replay a session on every stage that has lost it, head first."""
        lost = [stage for stage in range(len(self.blocks)) if self.has_lost(stage, session)]
        evidence = {stage: await self.evidence(stage, session) for stage in lost}
        exact = self.is_exact(session, evidence)
        try:
            await self.replay_all(session, lost, evidence, exact)
        except _Tie:
            self.sessions[session.session] = session
            for stage in lost:
                self.unproved[stage].add(session.session)
            await self.replay_all(session, lost, evidence, True)

    async def replay_all(
        self, session: SessionState, lost: Sequence[int], evidence: Mapping[int, Evidence], exact: bool
    ) -> None:
        for stage in lost:
            await self.call("open", self.ops.open(stage, session), stage, session.session)
        doubtful: list[int] = []  # stages that only the proof of a later one can prove
        for stage in lost:
            doubtful.append(stage)
            if session.chunks:
                await self.replay(session, evidence[stage], exact, doubtful)
            if evidence[stage] or not session.chunks:
                self.prove(session, doubtful)

    def prove(self, session: SessionState, doubtful: list[int]) -> None:
        for stage in doubtful:
            self.unproved[stage].discard(session.session)
            self.mismatches.pop(stage, None)
        doubtful.clear()

    async def replay(
        self, session: SessionState, evidence: Evidence, exact: bool, doubtful: Sequence[int]
    ) -> None:
        """Replay the last of the doubtful stages and compare what it gives with the evidence."""
        stage = doubtful[-1]
        proof = self.proof(stage, session, evidence, exact)
        try:
            await self.feed(proof, session, exact)
        except ReplayMismatch as mismatch:
            if mismatch.what == "token" and session.exact and not exact:
                raise _Tie from mismatch
            self.cause = mismatch
            self.check_follower(mismatch, session)
            if self.contradicts_record(mismatch, doubtful):
                await self.outvote(mismatch, session, evidence, exact)
            for lost in doubtful:
                self.mismatches[lost] = mismatch
                self.lose(Loss(lost, LossKind.FAILED, detail=str(mismatch)))
            raise _Again from mismatch
        self.replays[stage, session.session] = Replay(
            stage,
            session.session,
            proof.chunks,
            proof.positions,
            proof.tokens,
            exact,
            proof.error,
            tuple(evidence),
        )
        if not exact:
            self.sessions[session.session] = replace(session, exact=False)

    def proof(self, stage: int, session: SessionState, evidence: Evidence, exact: bool) -> Proof:
        tail = stage == len(self.blocks) - 1
        return Proof(stage, session, evidence, tail=tail, exact=exact, envelope=self.envelope)

    async def feed(self, proof: Proof, session: SessionState, exact: bool) -> None:
        began, stage, failed = time.monotonic(), proof.stage, ""
        async with AsyncExitStack() as stack:
            outputs = self.ops.replay(stage, session, exact)
            if hasattr(outputs, "aclose"):
                stack.push_async_callback(outputs.aclose)
            try:
                while (output := await self.next_output(outputs)) is not None:
                    proof.check(output)
                proof.finish()
            except Exception as error:
                failed = _text(error)
                if isinstance(error, ReplayMismatch) and vars(error).get("what"):
                    raise
                self.cause = error
                self.blame_feed(stage, session, failed, error)
                raise _Again from error
            finally:
                self.steps.append(Step("replay", stage, session.session, time.monotonic() - began, failed))

    async def next_output(self, outputs: AsyncIterator[ChunkRecord]) -> ChunkRecord | None:
        async with asyncio.timeout(self.timeout_s):
            return await anext(outputs, None)

    def blame_feed(self, stage: int, session: SessionState, why: str, error: Exception) -> None:
        if not isinstance(error, CorruptionError):
            self.note_fault(stage, f"replay: {why}", error)
        elif stage > 0:  # the journal that it was fed from: its owner's memory is not to be trusted
            self.lose(Loss(stage - 1, LossKind.FAILED, detail=f"journal: {why}"))
        else:
            message = f"session {session.session}: expected the ids that were fed, got {why}"
            raise _Abandon(GenerationInterrupted(message))

    async def evidence(self, stage: int, session: SessionState) -> Evidence:
        """Collect what is on record of a stage's outputs, the coordinator's first."""
        found: dict[str, Sequence[ChunkRecord]] = {}
        if stage in session.boundaries:
            found["the coordinator"] = session.boundaries[stage]
        follower = stage + 1
        if follower < len(self.blocks) and session.chunks and not self.has_lost(follower, session):
            name = session.session
            records = await self.call("digests", self.ops.digests(follower, name), follower, name)
            self.check_record(follower, session, records)
            found[f"stage {follower}"] = records
        return found

    def check_record(self, stage: int, session: SessionState, records: Sequence[ChunkRecord]) -> None:
        """A survivor whose log is not that of the session has lost something itself."""
        if session.exact:
            fits = [record.place for record in records] == [chunk.place for chunk in session.chunks]
        else:  # chunks may have been joined
            fits = bool(records) and records[-1].end == session.position
        if not fits:
            why = f"expected a log of {len(session.chunks)} chunks, got {len(records)} others"
            self.cause = StageError(f"stage {stage}: {why}", stage=stage, session=session.session)
            self.lose(Loss(stage, LossKind.FAILED, detail=f"session {session.session}: {why}"))
            raise _Again from self.cause

    def is_exact(self, session: SessionState, evidence: Mapping[int, Evidence]) -> bool:
        """Say how a session is replayed; it is the same for all of its stages."""
        if not evidence or (self.exact and session.exact):
            return True
        records = [records for found in evidence.values() for records in found.values()]
        if all(any(record.sketch for record in found) for found in records):
            return False
        if session.exact:
            return True
        name = session.session
        raise _Abandon(GenerationInterrupted(f"session {name}: expected sketches on record, got none"))

    # -- verdicts -------------------------------------------------------------------------------

    def check_follower(self, mismatch: ReplayMismatch, session: SessionState) -> None:
        """Replace the next stage if it took in something else than the coordinator was told."""
        stage, who = mismatch.stage, vars(mismatch).get("who", "")
        if who == f"stage {stage + 1}" and stage in session.boundaries and mismatch.what == "digest":
            self.lose(Loss(stage + 1, LossKind.FAILED, detail=f"was fed something else: {mismatch}"))
            raise _Again from mismatch

    def contradicts_record(self, mismatch: ReplayMismatch, doubtful: Sequence[int]) -> bool:
        """Say whether it is the record that is wrong: two spares made the same, and something else.

        A spare that was proved right against the record needs no other one for another session.
        """
        stage, made = mismatch.stage, vars(mismatch).get("made")
        if made is None or len(doubtful) > 1 or stage not in self.placed:
            return False
        spare = self.placed[stage]
        if any((one.stage, one.holder) == (stage, spare) for one in self.outvoted):
            return True
        return self.dissent.setdefault(_made(mismatch), spare) != spare

    async def outvote(
        self, mismatch: ReplayMismatch, session: SessionState, evidence: Evidence, exact: bool
    ) -> NoReturn:
        """Have a spare that contradicts the record say so again; then the record goes."""
        stage, fields = mismatch.stage, vars(mismatch)
        spare, other = self.placed[stage], self.dissent.get(_made(mismatch))
        await self.call("open", self.ops.open(stage, session), stage, session.session)
        again = await self.mismatch_again(stage, session, evidence, exact)
        if again is None or _made(again) != _made(mismatch):
            self.lose(Loss(stage, LossKind.FAILED, detail=f"not twice the same: {mismatch}"))
            raise _Again from mismatch
        if other not in (None, spare):
            self.outvoted.append(
                Outvoted(stage, session.session, fields["recorded"], fields["made"], spare, other)
            )
            self.refused.pop(other, None)  # it was right
        raise _Outvoted(fields["recorded"])

    async def mismatch_again(
        self, stage: int, session: SessionState, evidence: Evidence, exact: bool
    ) -> ReplayMismatch | None:
        proof = self.proof(stage, session, evidence, exact)
        try:
            await self.feed(proof, session, exact)
        except ReplayMismatch as mismatch:
            return mismatch if vars(mismatch).get("made") is not None else None
        return None

    def abandon(self, session: SessionState, error: GenerationInterrupted) -> None:
        del self.sessions[session.session]
        for waiting in self.unproved.values():
            waiting.discard(session.session)
        checkpoint = session.checkpoint()
        error.__dict__.update(committed=session.committed, checkpoint=checkpoint, session=session.session)
        self.abandoned[session.session] = error

    # -- ends -----------------------------------------------------------------------------------

    def report(self) -> RecoveryReport:
        return RecoveryReport(
            self.epoch,
            self.attempt,
            tuple(self.losses),
            dict(self.placed),
            dict(self.refused),
            tuple(self.resent),
            tuple(self.replays.values()),
            dict(self.abandoned),
            tuple(self.outvoted),
            dict(self.rolled_back),
            tuple(self.steps),
        )

    def history(self) -> str:
        refused = [f"{spare} refused ({why})" for spare, why in self.refused.items()]
        return "; ".join([*map(str, self.losses), *refused])

    def no_spare(self, stage: int) -> NoReturn:
        if stage in self.mismatches:
            self.give_up(self.mismatches[stage])
        message = f"stage {stage}: expected a spare, got none left; {self.history()}"
        self.give_up(NoSpareError(message, stage=stage))

    def give_up(self, error: GenerationInterrupted) -> NoReturn:
        """Raise the typed end of it all, with everything that is needed to go on later."""
        checkpoints: dict[str, Checkpoint] = {}
        for name, session in self.sessions.items():
            cut = isinstance(error, ReplayMismatch) and name == error.session
            checkpoints[name] = session.checkpoint(vars(error)["position"] if cut else None)
        first = next(iter(self.sessions.values()), None)
        error.__dict__.update(
            committed=first.committed if first is not None else (),
            checkpoint=checkpoints[first.session] if first is not None else None,
            checkpoints=checkpoints,
            report=self.report(),
        )
        raise error from (self.cause if self.cause is not error else None)


def _made(mismatch: ReplayMismatch) -> tuple[int, str, int, bytes]:
    """Return where a replay parts from the record, and with what."""
    made: ChunkRecord = vars(mismatch)["made"]
    return mismatch.stage, mismatch.session, made.index, made.digest


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
