"""What is known of a session and of a failure, and the plans that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from dask_sdc.exceptions import InputError, StageError, StaleEpoch
from dask_sdc.inference.checkpoint import Checkpoint, token_ids
from dask_sdc.inference.journal import ChunkRecord, cut_records


@dataclass(frozen=True, slots=True)
class StageReport:
    """What one stage says of itself.

    Parameters
    ----------
    stage : int
        The stage, from 0 for the head.
    reachable : bool
        Whether it answered.
    received : int
        Chunk up to which it received every one; -1 for none. Chunks are numbered over all sessions of a
        pipeline, in the order in which the head is fed.
    forwarded : int
        Chunk up to which it sent every one on, whether or not it arrived; -1 for none.
    epoch : int
        The epoch that it lives in.
    detail : str
        Why it cannot go on, or does not answer; empty if it can.
    """

    stage: int
    reachable: bool
    received: int = -1
    forwarded: int = -1
    epoch: int = 0
    detail: str = ""


class LossKind(StrEnum):
    """How a stage was lost."""

    UNREACHABLE = "unreachable"  # no answer: dead, stopped or cut off
    STALE = "stale"  # lives in an epoch that was given up
    GAP = "gap"  # the stage before it sent a chunk that it never received
    FROZEN = "frozen"  # received a chunk and never sent it on
    UNRETURNED = "unreturned"  # the tail sent an answer that never arrived
    EVICTED = "evicted"  # computed wrongly
    FAILED = "failed"  # raised, said that it cannot go on, or lost what it held


@dataclass(frozen=True, slots=True)
class Loss:
    """One stage that cannot go on as it is.

    Parameters
    ----------
    stage : int
        The stage.
    kind : LossKind
        How it was lost.
    chunk : int
        The chunk that got stuck; -1 where that is not known.
    detail : str
        Anything for people.
    """

    stage: int
    kind: LossKind
    chunk: int = -1
    detail: str = ""

    def __str__(self) -> str:
        chunk = f" at chunk {self.chunk}" if self.chunk >= 0 else ""
        return f"stage {self.stage} {self.kind}{chunk}{': ' if self.detail else ''}{self.detail}"


@dataclass(frozen=True, slots=True)
class Failure:
    """What `locate_failure` found; ``losses`` ascend by stage."""

    losses: tuple[Loss, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that are named."""
        return tuple(loss.stage for loss in self.losses)

    @property
    def first(self) -> Loss:
        """The loss nearest to the head."""
        return self.losses[0]

    def __str__(self) -> str:
        return "; ".join(map(str, self.losses))


def locate_failure(
    reports: Sequence[StageReport],
    *,
    fed: int | None = None,
    returned: int | None = None,
    epoch: int | None = None,
) -> Failure | None:
    """Say which stages are at fault, once it is known that something is wrong.

    Stages that do not answer, or live in an older epoch than others, are named, all of them. If there are
    none, those are that say what they could not do. If nobody says so and a chunk did not come back, the
    oldest chunk that did not come back is looked for: at the first stage that did not send it on.
    That stage is frozen if it received the chunk; else the chunk was lost before it, a gap. (Chunks of
    stages before and behind it say nothing: those wait for it. While a stage is silent nothing can be said
    of chunks either, for what stages on both sides hold may have been on its way.)

    Parameters
    ----------
    reports : sequence of StageReport
        One per stage, in any order.
    fed : int, optional
        Last chunk that the coordinator sent to the head; what the head received, if not given.
    returned : int, optional
        Chunk up to which every answer arrived; what the tail sent, if not given.
    epoch : int, optional
        The epoch that all have to live in; the latest that any stage reports, if not given.

    Returns
    -------
    Failure or None
        None if everybody answers and nothing is outstanding.

    Raises
    ------
    InputError
        If there is not one report per stage.
    """
    reports = sorted(reports, key=lambda report: report.stage)
    if [report.stage for report in reports] != list(range(len(reports))) or not reports:
        raise InputError(f"expected one report per stage, got stages {[r.stage for r in reports]}")
    losses = _silent(reports, epoch) or _stuck(reports, fed, returned)
    return Failure(tuple(losses)) if losses else None


def _silent(reports: Sequence[StageReport], epoch: int | None) -> list[Loss]:
    if epoch is None:
        epoch = max((report.epoch for report in reports if report.reachable), default=0)
    losses = []
    for report in reports:
        if not report.reachable:
            losses.append(Loss(report.stage, LossKind.UNREACHABLE, detail=report.detail))
        elif report.epoch != epoch:
            detail = f"expected epoch {epoch}, got {report.epoch}"
            losses.append(Loss(report.stage, LossKind.STALE, detail=detail))
    return losses


def _stuck(reports: Sequence[StageReport], fed: int | None, returned: int | None) -> list[Loss]:
    if told := [report for report in reports if report.detail]:
        # The chunks of others may just be on their way. Who says so rests, even if nobody waits for it.
        return [Loss(report.stage, LossKind.FAILED, report.forwarded + 1, report.detail) for report in told]
    sent = reports[0].received if fed is None else fed
    chunk = 1 + (reports[-1].forwarded if returned is None else returned)
    if chunk > sent:
        return []
    holder = next((report for report in reports if report.forwarded < chunk), None)
    if holder is None:
        return [Loss(reports[-1].stage, LossKind.UNRETURNED, chunk)]
    kind = LossKind.FROZEN if holder.received >= chunk else LossKind.GAP
    return [Loss(holder.stage, kind, chunk)]


class EpochFence:
    """Keeps messages of epochs that were given up out.

    Parameters
    ----------
    epoch : int, optional
        The epoch to begin with.
    name : str, optional
        Whose fence it is, for messages.
    """

    def __init__(self, epoch: int = 0, name: str = "stage") -> None:
        self.epoch = epoch
        self.name = name

    def rise(self, epoch: int) -> None:
        """Enter a later epoch; entering the same one again changes nothing.

        Raises
        ------
        StaleEpoch
            If the epoch is an earlier one.
        """
        if epoch < self.epoch:
            raise StaleEpoch(f"{self.name}: expected epoch {self.epoch} or later, got {epoch}")
        self.epoch = epoch

    def check(self, epoch: int) -> None:
        """Admit a message.

        Raises
        ------
        StaleEpoch
            If it belongs to an earlier epoch.
        StageError
            If it belongs to a later one: whoever holds the fence missed something.
        """
        if epoch < self.epoch:
            raise StaleEpoch(f"{self.name}: expected a message of epoch {self.epoch}, got {epoch}")
        if epoch > self.epoch:
            raise StageError(f"{self.name}: expected a message of epoch {self.epoch}, got the later {epoch}")


@dataclass(frozen=True)
class ReplayPlan:
    """What a replay is fed and what it has to give.

    Parameters
    ----------
    prefix : tuple of int
        Tokens that were fed: the prompt and all committed tokens but the last.
    driver : int or None
        The last committed token: not yet fed, and to be reproduced; None if nothing was committed.
    expected : tuple of int
        All committed tokens; token k is sampled after position ``first + k``.
    """

    prefix: tuple[int, ...]
    driver: int | None
    expected: tuple[int, ...]

    @property
    def first(self) -> int:
        """Position after which the first committed token is sampled: the last one of the prompt."""
        return len(self.prefix) - max(1, len(self.expected))

    def token_after(self, position: int) -> int | None:
        """Return the committed token that was sampled after a position, None if there is none."""
        k = position - self.first
        return self.expected[k] if 0 <= k < len(self.expected) else None


def plan_replay(prompt_ids: Sequence[int], committed: Sequence[int]) -> ReplayPlan:
    """Plan the replay of a session.

    Parameters
    ----------
    prompt_ids, committed : sequence of int
        The ids of the prompt and those that were generated so far.

    Returns
    -------
    ReplayPlan

    Raises
    ------
    InputError
        If the prompt is empty.
    """
    prompt, tokens = token_ids(prompt_ids, "prompt"), token_ids(committed, "committed")
    if not prompt:
        raise InputError("prompt: expected at least one token, got none")
    return ReplayPlan(prompt + tokens[:-1], tokens[-1] if tokens else None, tokens)


@dataclass(frozen=True)
class SessionState:
    """All that the coordinator knows of a session when it is stopped.

    Only what came back from the tail counts: `chunks` are those, cut to what was accepted.

    Parameters
    ----------
    session : str
        Name of the session.
    prompt, committed : tuple of int
        Its ids; no prompt for a model that is not fed tokens.
    chunks : tuple of ChunkRecord
        What the head was fed, in order.
    boundaries : mapping of int to tuple of ChunkRecord
        Per stage what the coordinator knows of its outputs, chunk by chunk as `chunks`. That of the tail
        is needed: digests, and the sampled tokens for a model that gives tokens. The digests of the others
        may travel along with a chunk; then every boundary is proved on its own when neighbours are lost
        together.
    settings, model_digest, tokenizer_digest, stage_boundaries
        See `Checkpoint`.
    resumed : int
        How many of the committed tokens came from a checkpoint: they were fed behind the prompt and not
        sampled, so a replay does not sample them either.
    exact : bool
        Whether every stage holds the bits of the first computation. False after a fast replay, and from
        then on: later replays can be compared by sketch only.
    """

    session: str
    prompt: tuple[int, ...] = ()
    committed: tuple[int, ...] = ()
    chunks: tuple[ChunkRecord, ...] = ()
    boundaries: Mapping[int, tuple[ChunkRecord, ...]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    model_digest: str = ""
    tokenizer_digest: str = ""
    stage_boundaries: tuple[int, ...] = ()
    resumed: int = 0
    exact: bool = True

    def __post_init__(self) -> None:
        due = len(self.prompt) + len(self.committed) - 1
        sampled = len(self.committed) - self.resumed
        if sampled < 0 or (sampled and self.position != due) or (self.prompt and self.position > due + 1):
            raise InputError(
                f"session {self.session}: expected {due} positions that count, of {len(self.prompt)} tokens "
                f"of the prompt and {len(self.committed)} committed ones, got {self.position}"
            )
        places = [chunk.place for chunk in self.chunks]
        for stage, records in self.boundaries.items():
            if not all(record.digest or record.sketch for record in records):
                raise InputError(
                    f"session {self.session}: expected a digest or a sketch of every output of stage {stage}"
                )
            if [record.place for record in records] != places:
                raise InputError(
                    f"session {self.session}: expected the outputs of stage {stage} to be recorded for the "
                    f"{len(places)} chunks that were fed, got {len(records)} records of others"
                )

    @property
    def position(self) -> int:
        """Positions that count."""
        return self.chunks[-1].end if self.chunks else 0

    @property
    def sampled_from(self) -> int:
        """Position after which the first token is sampled: the last one of the prompt."""
        return max(0, len(self.prompt) - 1)

    @property
    def plan(self) -> ReplayPlan | None:
        """See `plan_replay`; tokens of a checkpoint count as prompt. None without a prompt."""
        if not self.prompt:
            return None
        return plan_replay(self.prompt + self.committed[: self.resumed], self.committed[self.resumed :])

    def rolled_back(self, position: int) -> SessionState:
        """Return the session as it was at an earlier position: nothing after it is believed any more."""
        if position >= self.position:
            return self
        return replace(
            self,
            committed=self.committed[: self.proved_tokens(position)],
            chunks=cut_records(self.chunks, position),
            boundaries={stage: cut_records(records, position) for stage, records in self.boundaries.items()},
        )

    def proved_tokens(self, position: int) -> int:
        """Return how many committed tokens depend on positions before this one only."""
        return max(self.resumed, min(len(self.committed), position - len(self.prompt) + 1))

    def checkpoint(self, position: int | None = None) -> Checkpoint:
        """Return what a later call resumes from, at the end or at an earlier position."""
        n = len(self.committed) if position is None else self.proved_tokens(position)
        chunks = () if self.prompt else self._digests(self.position if position is None else position)
        return Checkpoint(
            self.prompt,
            self.committed[:n],
            self.settings,
            self.model_digest,
            self.tokenizer_digest,
            self.stage_boundaries,
            chunks,
        )

    def _digests(self, position: int) -> tuple[tuple[int, str, str], ...]:
        """Return what a checkpoint says of whole chunks before a position: width, input and output."""
        outputs = self.boundaries[max(self.boundaries)] if self.chunks else ()
        return tuple(
            (fed.width, fed.digest.hex(), made.digest.hex())
            for fed, made in zip(self.chunks, outputs, strict=True)
            if fed.end <= position
        )
