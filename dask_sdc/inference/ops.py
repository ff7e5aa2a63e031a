"""What a recovery can have done to a pipeline, and the report of what it did."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from dask_sdc.exceptions import GenerationInterrupted
from dask_sdc.inference.journal import ChunkRecord
from dask_sdc.inference.session import Loss, SessionState, StageReport


class RecoveryOps(ABC):
    """What `run_recovery` can have done to a pipeline.

    Stages are named by number, sessions and spares by text. Every method may raise anything: that step then
    failed, and the recovery goes round again. A `StageError` with its ``stage`` set says whose fault it is.
    Every method may be called again with the same arguments and then does the same.
    """

    @abstractmethod
    async def stop(self, epoch: int) -> None:
        """Let every stage that can be reached enter an epoch and rest.

        It refuses messages of earlier epochs, drops what is queued and what it is computing, and does not
        send on. Returns when those that answer have done so; a stage that does not answer is no error.
        """

    @abstractmethod
    async def reports(self, epoch: int) -> Sequence[StageReport]:
        """Ask all stages and return one report each; who does not answer in time is not reachable."""

    @abstractmethod
    async def choose_spare(self, stage: int, refused: Collection[str]) -> str | None:
        """Return a worker that can take the place of a stage, None if there is none.

        Never one of ``refused``, nor one that holds a stage or was just chosen for one; best one in a
        failure domain that no other stage lives in.
        """

    @abstractmethod
    async def load(self, stage: int, spare: str) -> str:
        """Put a spare in the place of a stage and return the digest of the weights that it loaded.

        From here on the number of the stage means this worker, for its neighbours too; whoever had the
        place before is told to leave if it can be told. The spare enters the present epoch.
        """

    @abstractmethod
    async def open(self, stage: int, session: SessionState) -> None:
        """Give a session a new, empty state on a stage: no position, no journal, no log of inputs."""

    @abstractmethod
    async def truncate(self, stage: int, session: str, position: int) -> bool:
        """Let a survivor forget everything of a session from a position on.

        State, journal of outputs and log of inputs. Returns False if the stage cannot take back positions
        and has given the session an empty state instead, to be fed again. Raises if the stage does not
        reach so far: then it has lost something. Position 0 of a session that it does not know is as good
        as an empty one.
        """

    @abstractmethod
    async def digests(self, stage: int, session: str) -> Sequence[ChunkRecord]:
        """Return what a survivor logged of its inputs: a record for each chunk that counts."""

    @abstractmethod
    def replay(self, stage: int, session: SessionState, exact: bool) -> AsyncIterator[ChunkRecord]:
        """Feed a session to a stage and yield the record of each output; an async generator.

        Inputs come from the journal of the stage before it, for the head from the coordinator. The stage
        logs them and journals its outputs, as at the first time. Exact: the chunks of ``session.chunks``
        one by one in their full width; after a chunk with ``kept < width`` the stage truncates to
        `ChunkRecord.end`. Not exact: kept positions joined to wide chunks (`Journal.merged`), and outputs
        with a sketch. The tail samples after every row at which it did the first time. Raises
        `CorruptionError` if the journal that it is fed from is damaged.
        """

    @abstractmethod
    async def resume(self, epoch: int) -> None:
        """Let every stage work again; when this returns, the coordinator feeds what is next."""


@dataclass(frozen=True)
class Step:
    """One call of `RecoveryOps`: its name, for whom, how long it took in seconds, and how it failed."""

    name: str
    stage: int
    session: str
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Replay:
    """One stage that was replayed and proved for one session.

    Parameters
    ----------
    stage : int
        The stage.
    session : str
        The session.
    chunks, positions, tokens : int
        What was proved: outputs, positions, and at the tail committed tokens.
    exact : bool
        Whether outputs were compared bit by bit.
    error : float
        Largest relative difference of sketches; 0 in exact replays.
    witnesses : tuple of str
        Whose records the outputs were compared with.
    """

    stage: int
    session: str
    chunks: int
    positions: int
    tokens: int
    exact: bool
    error: float
    witnesses: tuple[str, ...]


@dataclass(frozen=True)
class Outvoted:
    """An output on record that two spares contradict alike: whoever held the stage had computed wrongly.

    Parameters
    ----------
    stage : int
        The stage.
    session : str
        The session, which was rolled back to the begin of this output.
    recorded, made : ChunkRecord
        The output as it is on record, and as the spares made it.
    holder, other : str
        The spares. The first one holds the stage now and has made it twice.
    """

    stage: int
    session: str
    recorded: ChunkRecord
    made: ChunkRecord
    holder: str
    other: str


@dataclass(frozen=True)
class RecoveryReport:
    """What a recovery did.

    Parameters
    ----------
    epoch : int
        The epoch that all stages are in now.
    attempts : int
        Times it went round.
    losses : tuple of Loss
        What was found, in order, second failures included.
    placed : dict of int to str
        Per stage that was replaced the spare that holds it.
    refused : dict of str to str
        Per worker that is not to be used why.
    resent : tuple of int
        Stages before (or, at the tail, behind) which a message was lost and nothing else; they were not
        replaced. Name them as ``distrusted`` if it happens again.
    replays : tuple of Replay
        What was replayed and proved.
    abandoned : dict of str to GenerationInterrupted
        Sessions that could not be healed; their state is to be closed and the error to be raised.
    outvoted : tuple of Outvoted
        Outputs on record that were wrong.
    rolled_back : dict of str to int
        Sessions that depended on them, and the position up to which they stand now.
    steps : tuple of Step
        Every call.
    """

    epoch: int
    attempts: int
    losses: tuple[Loss, ...] = ()
    placed: dict[int, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    resent: tuple[int, ...] = ()
    # Left out of the repr, which would be screens in a notebook.
    replays: tuple[Replay, ...] = field(default=(), repr=False)
    abandoned: dict[str, GenerationInterrupted] = field(default_factory=dict)
    outvoted: tuple[Outvoted, ...] = ()
    rolled_back: dict[str, int] = field(default_factory=dict)
    steps: tuple[Step, ...] = field(default=(), repr=False)

    @property
    def inexact(self) -> frozenset[str]:
        """Sessions that no longer hold the bits of the first computation."""
        return frozenset(replay.session for replay in self.replays if not replay.exact)

    @property
    def seconds(self) -> float:
        """Time that the steps took, those side by side counted singly."""
        return sum(step.seconds for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible fields."""
        return {
            "epoch": self.epoch,
            "attempts": self.attempts,
            "losses": [
                {"stage": loss.stage, "kind": str(loss.kind), "chunk": loss.chunk, "detail": loss.detail}
                for loss in self.losses
            ],
            "placed": {str(stage): spare for stage, spare in self.placed.items()},
            "refused": dict(self.refused),
            "resent": list(self.resent),
            "replays": [vars(replay) | {"witnesses": list(replay.witnesses)} for replay in self.replays],
            "abandoned": {session: str(error) for session, error in self.abandoned.items()},
            "outvoted": [
                {
                    "stage": one.stage,
                    "session": one.session,
                    "chunk": one.made.index,
                    "position": one.made.position,
                    "recorded": one.recorded.digest.hex(),
                    "made": one.made.digest.hex(),
                    "holder": one.holder,
                    "other": one.other,
                }
                for one in self.outvoted
            ],
            "rolled_back": dict(self.rolled_back),
            "steps": [vars(step) for step in self.steps],
        }
