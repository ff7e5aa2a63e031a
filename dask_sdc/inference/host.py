"""One stage with its sessions: what a worker holds and does, without a network.

Not thread-safe: one thread at a time may call a host, since a session's state, its log of inputs and its
journal of outputs change together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dask_sdc.exceptions import CorruptionError, InputError, InputTypeError, StageError
from dask_sdc.inference.journal import ChunkRecord, DigestLog, Journal, boundary_digest, boundary_sketch
from dask_sdc.inference.model.sampling import sample
from dask_sdc.inference.speculative import DraftTree
from dask_sdc.inference.stage import Stage
from dask_sdc.statistics.kernels import place_of, to_host
from dask_sdc.statistics.kernels.cuda import named_failures

__all__ = ["Chunk", "Output", "SessionSettings", "StageHost", "joined_chunk"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SessionSettings:
    """What a stage has to know of a session.

    Parameters
    ----------
    batch : int
        Sequences that go together.
    capacity : int or None
        Most positions that will come; None is whatever the model can do.
    sampled : bool
        Whether the tail samples tokens from its outputs, which are logits (1, rows, V).
    temperature, top_p, seed
        See `sample`.
    sketched : bool
        Whether outputs are recorded with a sketch, which a fast replay is compared by.
    taps : tuple of int
        Layers whose outputs are kept; see `Stage.tap`.
    """

    batch: int = 1
    capacity: int | None = None
    sampled: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    sketched: bool = False
    taps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """Consecutive positions of a session on their way to a stage.

    Parameters
    ----------
    session : str
        Name of the session.
    index, position : int
        See `ChunkRecord`.
    array : ndarray
        Shape (B, T, ...).
    rows : int or None
        Last positions whose output is wanted of the tail; None is all.
    digest : bytes
        `boundary_digest` of the array as its sender computed it; empty if nobody did.
    drafts, parents : tuple of int
        Where the positions behind the first are a `DraftTree`: its tokens and their parents.
    settled : tuple of int
        Rows that count of the tree that came before this chunk; empty if none did.
    """

    session: str
    index: int
    position: int
    array: Array
    rows: int | None = None
    digest: bytes = b""
    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    settled: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("drafts", "parents", "settled"):  # lists, where they came over a network
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def width(self) -> int:
        """Positions."""
        return int(self.array.shape[1])


@dataclass(frozen=True)
class Output:
    """What a stage makes of a chunk: the record, and the array unless tokens say all."""

    session: str
    record: ChunkRecord
    array: Array | None
    rows: int | None
    #: As they came; see `Chunk`.
    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    settled: tuple[int, ...] = ()

    @property
    def chunk(self) -> Chunk:
        """What the next stage is sent."""
        assert self.array is not None
        record, tree = self.record, (self.drafts, self.parents, self.settled)
        return Chunk(self.session, record.index, record.position, self.array, self.rows, record.digest, *tree)


@dataclass
class _Held:
    """One session on one stage."""

    settings: SessionSettings
    state: Any
    log: DigestLog
    journal: Journal | None
    #: Rows that were wanted of each chunk, as a replay must compute the same.
    rows: dict[int, int | None] = field(default_factory=dict)
    #: A tree of drafts and what came of it, of which it is not known yet which branch counts.
    tree: tuple[Chunk, Array] | None = None


class StageHost:
    """A loaded stage and its sessions.

    Parameters
    ----------
    stage : Stage
        The stage, loaded.
    number : int
        Its number in the pipeline, 0 for the head.
    tail : bool
        Whether it is the last one; the tail keeps no journal, as nobody is fed from it.
    journal_bytes : int or None
        Memory of the journal of one session; None keeps no journal, as in a shadow, which feeds nobody.
    spill : str or None
        Folder for what does not fit; None refuses sessions that grow beyond.
    """

    def __init__(
        self,
        stage: Stage,
        number: int,
        tail: bool,
        *,
        journal_bytes: int | None = 2**28,
        spill: str | None = None,
    ) -> None:
        self.stage, self.number, self.tail = stage, number, tail
        self._journal_bytes, self._spill = journal_bytes, spill
        self._held: dict[str, _Held] = {}
        self._opened = 0

    # -- sessions --------------------------------------------------------------------------------

    @property
    def sessions(self) -> tuple[str, ...]:
        """Names of the open sessions."""
        return tuple(self._held)

    def open(self, session: str, settings: SessionSettings) -> None:
        """Give a session a new, empty state; whatever it had is forgotten."""
        self.close(session)
        name = f"stage {self.number}, session {session}"
        journal = None
        if not self.tail and self._journal_bytes is not None:
            self._opened += 1
            # A number of its own, as a session may be opened again while its old file is still there.
            spill = None if self._spill is None else f"{self._spill}/{self.number}-{self._opened}-{session}"
            journal = Journal(self._journal_bytes, spill, name=name)
        state = self.stage.init(batch=settings.batch, capacity=settings.capacity)
        if settings.taps:
            self.stage.tap(state, settings.taps)
        self._held[session] = _Held(settings, state, DigestLog(name), journal)

    def close(self, session: str) -> None:
        """Forget a session; one that is not there is forgotten already."""
        held = self._held.pop(session, None)
        if held is not None and held.journal is not None:
            held.journal.close()

    def close_all(self) -> None:
        """Forget every session."""
        for session in self.sessions:
            self.close(session)

    def position(self, session: str) -> int:
        """Return how many positions a session has here."""
        return self._find(session).log.position

    def tapped(self, session: str) -> dict[int, Array]:
        """Return what layers put out that are wanted; see `Stage.tapped`."""
        found = self.stage.tapped(self._find(session).state)
        return {layer: to_host(array) for layer, array in found.items()}

    def snapshot(self, session: str) -> Any:
        """Return what later outputs depend on; see `Stage.snapshot`."""
        return self.stage.snapshot(self._find(session).state)

    def _find(self, session: str) -> _Held:
        held = self._held.get(session)
        if held is None:
            message = f"stage {self.number}: expected an open session, got {session!r}"
            raise StageError(message, stage=self.number, session=session)
        return held

    # -- work ------------------------------------------------------------------------------------

    def step(self, chunk: Chunk) -> Output:
        """Take the next chunk of a session.

        A chunk that begins before the end of what the session has takes the place of it from there on:
        drafted positions were wrong.

        Raises
        ------
        CorruptionError
            If the chunk is not what its sender put a digest on.
        StageError
            If the chunk does not follow.
        """
        held = self._find(chunk.session)
        if held.tree is not None or chunk.position < held.log.position:
            self._cut(chunk.session, chunk.position, chunk.settled)
        self._log_input(held, chunk)
        if chunk.parents:
            return self._grown(held, chunk)
        output = self.compute(held, chunk.array, chunk.rows)
        return replace(self._recorded(held, chunk, output), settled=chunk.settled)

    def _grown(self, held: _Held, chunk: Chunk) -> Output:
        """Take a tree of drafts. It is not on record before one branch of it is, as if no other had been."""
        output = self.compute(held, chunk.array, None, parents=chunk.parents)
        held.log.truncate(chunk.position)
        held.tree = (chunk, output)
        if self.tail:
            return self._settle(held, self._walked(held, chunk, output[0]))
        record = ChunkRecord(chunk.index, chunk.position, chunk.width, chunk.width, boundary_digest(output))
        tree = (chunk.drafts, chunk.parents, chunk.settled)
        return Output(chunk.session, record, output, None, *tree)

    def _walked(self, held: _Held, chunk: Chunk, logits: Array) -> list[int]:
        """Return the rows that plain decoding would have fed: each is what was sampled before it."""
        tree, rows = DraftTree(chunk.drafts, chunk.parents), [0]
        while True:
            token = self._sample(held.settings, logits[rows[-1]], chunk.position + len(rows))
            node = tree.children.get((rows[-1] - 1, token), -1)
            if node < 0:
                return rows
            rows.append(node + 1)

    def _settle(self, held: _Held, rows: Sequence[int]) -> Output:
        """Keep one branch of the tree, and record it as a chunk that held nothing else."""
        assert held.tree is not None
        (tree, output), held.tree = held.tree, None
        self.stage.keep(held.state, tree.position, rows)
        array = np.ascontiguousarray(tree.array[:, list(rows)])
        branch = replace(tree, array=array, rows=len(rows), digest=b"", drafts=(), parents=(), settled=())
        self._log_input(held, branch)
        return self._recorded(held, branch, np.ascontiguousarray(output[:, list(rows)]))

    def _log_input(self, held: _Held, chunk: Chunk) -> None:
        width, digest = chunk.width, self._proved(chunk)
        # What the head is fed is nobody's output, so nobody is compared with it.
        sketch = boundary_sketch(chunk.array) if held.settings.sketched and self.number else b""
        record = ChunkRecord(chunk.index, chunk.position, width, width, digest, sketch=sketch)
        held.log.append(record)
        held.rows[chunk.index] = chunk.rows

    def compute(
        self,
        held: _Held,
        array: Array,
        rows: int | None,
        rounded: bool = False,
        parents: Sequence[int] = (),
    ) -> Array:
        """Run the stage over an array; the step that faults are injected into."""
        with named_failures():
            # In one memory layout, as bits may depend on it, and the stage's own, which it may write to.
            own = self.stage.xp.array(array, order="C")
            if parents:
                made = self.stage.forward_tree(own, held.state, parents)
            else:
                forward = self.stage.forward_rounded if rounded else self.stage.forward
                made = forward(own, held.state, rows=rows if self.tail else None)
            if place_of(own) == place_of(made) == "device":
                made = to_host(made)  # what a kernel did wrongly shows here
        self._check(made, array)
        if self.tail and held.settings.sampled:
            return made  # is sampled from at once
        return np.array(made, order="C")  # the stage may go on writing to what it returned

    def _check(self, made: Any, chunk: Array) -> None:
        """Refuse what is no chunk for the next stage; what the last one gives may have other positions."""
        if not isinstance(made, np.ndarray) or isinstance(made, np.ma.MaskedArray):
            got = "one on a device, unlike xp" if place_of(made) == "device" else type(made).__name__
            raise InputTypeError(f"stage {self.number}: expected an ndarray from forward, got {got}")
        axes = 1 if self.tail else 2
        if made.ndim < 2 or made.shape[:axes] != chunk.shape[:axes]:
            wanted = ", ".join(map(str, (*chunk.shape[:axes], *["positions"] * self.tail)))
            raise InputError(
                f"stage {self.number}: expected output of forward of shape ({wanted}, ...), got {made.shape}"
            )

    def replay(self, chunks: Sequence[Chunk], kept: Sequence[int]) -> list[ChunkRecord]:
        """Take chunks of one session again, each in its full width, and return the records of the outputs.

        Parameters
        ----------
        chunks : sequence of Chunk
            They follow each other. Several are computed at once where that gives the same bits.
        kept : sequence of int
            Positions of each that count.
        """
        records: list[ChunkRecord] = []
        for group in self._groups(chunks, kept):
            if len(group) == 1:
                chunk, count = group[0]
                records.append(self.step(chunk).record)
                if count < chunk.width:
                    self._cut(chunk.session, chunk.position + count)
                    records[-1] = records[-1].cut(chunk.position + count) or records[-1]
            else:
                records += self._together([chunk for chunk, _ in group])
        return records

    def _groups(self, chunks: Sequence[Chunk], kept: Sequence[int]) -> list[list[tuple[Chunk, int]]]:
        """Join whole neighbours up to the width in which a row's bits do not depend on its chunk."""
        most = self.stage.invariant_width
        groups: list[list[tuple[Chunk, int]]] = []
        room = 0
        for chunk, count in zip(chunks, kept, strict=True):
            whole = count == chunk.width and (not self.tail or chunk.rows in (None, chunk.width))
            if whole and groups and chunk.width <= room:
                groups[-1].append((chunk, count))
                room -= chunk.width
            else:
                groups.append([(chunk, count)])
                room = most - chunk.width if whole else 0
        return groups

    def _together(self, chunks: list[Chunk]) -> list[ChunkRecord]:
        held = self._find(chunks[0].session)
        for chunk in chunks:
            self._log_input(held, chunk)
        output = self.compute(held, np.concatenate([chunk.array for chunk in chunks], axis=1), None)
        records, begin = [], 0
        for chunk in chunks:
            part = np.ascontiguousarray(output[:, begin : begin + chunk.width])
            records.append(self._recorded(held, chunk, part).record)
            begin += chunk.width
        return records

    def replay_joined(self, chunk: Chunk) -> ChunkRecord:
        """Take a chunk that `joined` made and return the record of the output, whose bits are rounded."""
        held = self._find(chunk.session)
        self._log_input(held, chunk)
        output = self.compute(held, chunk.array, chunk.rows, rounded=True)
        return self._recorded(held, chunk, output).record

    def _proved(self, chunk: Chunk) -> bytes:
        digest = boundary_digest(chunk.array)
        if chunk.digest and digest != chunk.digest:
            raise CorruptionError(
                f"stage {self.number}, session {chunk.session}: expected chunk {chunk.index} with digest "
                f"{chunk.digest.hex()}, got {digest.hex()}"
            )
        return digest

    def _recorded(self, held: _Held, chunk: Chunk, output: Array) -> Output:
        settings = held.settings
        tokens = self._sampled(held, chunk, output) if self.tail and settings.sampled else ()
        sketch = boundary_sketch(output) if settings.sketched and output.size else b""
        width = chunk.width
        if held.journal is not None:
            digest = held.journal.append(chunk.index, chunk.position, output, width=width, sketch=sketch)
        else:
            digest = boundary_digest(output)
        record = ChunkRecord(chunk.index, chunk.position, width, width, digest, tokens, sketch)
        return Output(chunk.session, record, None if self.tail and settings.sampled else output, chunk.rows)

    def _sampled(self, held: _Held, chunk: Chunk, logits: Array) -> tuple[int, ...]:
        if logits.shape[0] != 1:
            raise InputError(f"expected one sequence to sample from, got {logits.shape[0]}")
        first = chunk.position + chunk.width - logits.shape[1] + 1
        return tuple(self._sample(held.settings, row, first + k) for k, row in enumerate(logits[0]))

    def _sample(self, settings: SessionSettings, row: Array, position: int) -> int:
        return sample(row, position, settings.seed, settings.temperature, settings.top_p)

    # -- what healing needs ----------------------------------------------------------------------

    def truncate(self, session: str, position: int, settled: Sequence[int] = ()) -> bool:
        """Forget everything of a session from a position on.

        Parameters
        ----------
        session : str
            Name of the session.
        position : int
            The first position that is forgotten.
        settled : sequence of int, optional
            If a tree of drafts ended there: its rows that count, for a stage that was not told yet.

        Returns
        -------
        bool
            False if the stage cannot take back positions: the session is empty now, and to be fed again.

        Raises
        ------
        StageError
            If the session does not reach so far.
        """
        held = self._held.get(session)
        if held is None and position == 0:
            return True
        self.settle(session, position, settled)
        held = self._find(session)
        held.tree = None
        for record in held.log.truncate(position):
            held.rows.pop(record.index, None)
        if held.journal is not None:
            held.journal.truncate(position)
        if self.stage.position(held.state) > position:
            try:
                self.stage.truncate(held.state, position)
            except InputError:
                self.open(session, held.settings)
                return False
        return True

    def _cut(self, session: str, position: int, settled: Sequence[int] = ()) -> None:
        """Forget positions that were speculated, of a stage that can take them back."""
        if not self.truncate(session, position, settled):
            message = (
                f"stage {self.number}: expected to take back positions from {position} on, but it cannot"
            )
            raise StageError(message, stage=self.number, session=session)

    def settle(self, session: str, position: int, rows: Sequence[int]) -> None:
        """Keep the rows that count of a tree of drafts that ended at a position, if that is not done yet."""
        held = self._find(session)
        if rows and held.tree is not None and held.tree[0].position == position - len(rows):
            self._settle(held, rows)

    def digests(self, session: str) -> tuple[ChunkRecord, ...]:
        """Return the records of the inputs of a session."""
        return self._find(session).log.records

    def recorded(self, session: str, indices: Sequence[int]) -> list[Chunk]:
        """Return recorded outputs as chunks for the next stage, proved by their digests.

        Raises
        ------
        CorruptionError
            If one is damaged.
        InputError
            If one is not there.
        """
        held, journal = self._journaled(session)
        found = {record.index: record for record in journal.records}
        return [
            Chunk(
                session,
                index,
                found[index].position,
                journal.read(index),
                held.rows[index],
                found[index].digest,
            )
            for index in indices
        ]

    def joined(self, session: str, position: int, width: int, sampled_from: int) -> Chunk:
        """Return recorded outputs that count as one long chunk for the next stage.

        Parameters
        ----------
        session : str
            Name of the session.
        position : int
            Where the chunk begins.
        width : int
            Its positions at most; a recorded chunk is never split.
        sampled_from : int
            Position after which the first token was sampled.

        Raises
        ------
        CorruptionError
            If a recorded chunk is damaged.
        InputError
            If none begins there.
        """
        _, journal = self._journaled(session)
        part = next(journal.merged(width, position), None)
        if part is None or part[0].position != position:
            got = "none" if part is None else f"one at {part[0].position}"
            raise InputError(f"{journal.name}: expected a recorded chunk at {position}, got {got}")
        return joined_chunk(session, *part, sampled_from)

    def _journaled(self, session: str) -> tuple[_Held, Journal]:
        held = self._find(session)
        if held.journal is None:
            raise InputError(f"stage {self.number}: expected a stage with a journal, this is the tail")
        return held, held.journal


def joined_chunk(session: str, record: ChunkRecord, array: Array, sampled_from: int) -> Chunk:
    """Return positions as a chunk of which every row is wanted whose token was once sampled."""
    rows = max(0, record.end - max(record.position, sampled_from))
    return Chunk(session, record.index, record.position, array, rows, boundary_digest(array))
