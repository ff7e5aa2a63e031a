"""The proof of a replay: it gives, chunk by chunk, what is on record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dask_sdc.exceptions import ReplayMismatch
from dask_sdc.inference.journal import SKETCH, ChunkRecord
from dask_sdc.inference.session import SessionState

#: Difference of two sketches of a position, relative to either, that a fast replay may show.
ENVELOPE = 1e-4

Rows = dict[int, np.ndarray[Any, np.dtype[np.float64]]]


def sketch_rows(records: Sequence[ChunkRecord]) -> Rows:
    """Return the sketch of every position that counts; those of a chunk lie at its end.

    Parameters
    ----------
    records : sequence of ChunkRecord
        Records with a `ChunkRecord.sketch` of at most `ChunkRecord.width` positions.

    Returns
    -------
    dict of int to ndarray
        By position, (`SKETCH`,) float64.
    """
    rows: Rows = {}
    for record in records:
        found = np.frombuffer(record.sketch, "<f8").reshape(-1, SKETCH)
        first = record.position + record.width - len(found)
        rows |= {first + k: row for k, row in enumerate(found) if first + k < record.end}
    return rows


def sketch_error(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Return the difference of two sketches relative to the larger; inf if either is not finite."""
    with np.errstate(all="ignore"):
        size = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
        error = float(np.linalg.norm(a - b))
    if not np.isfinite(size) or not np.isfinite(error):
        return float("inf")
    return error / size if size else 0.0


class Proof:
    """Checks the outputs of one replayed stage against all records of them.

    Parameters
    ----------
    stage : int
        The stage.
    session : SessionState
        The session.
    evidence : mapping of str to sequence of ChunkRecord
        Who recorded the outputs, and what; may be empty for a stage that only the next one can prove.
    tail : bool
        Whether the stage is the tail, which has to reproduce the committed tokens too.
    exact : bool
        Whether chunks come as they were recorded and compare bit by bit; else they may be joined and
        compare by sketch.
    envelope : float, optional
        Relative difference that sketches may show.

    Attributes
    ----------
    error : float
        Largest relative difference of sketches.
    chunks, positions, tokens : int
        What was checked.
    """

    def __init__(
        self,
        stage: int,
        session: SessionState,
        evidence: Mapping[str, Sequence[ChunkRecord]],
        *,
        tail: bool,
        exact: bool,
        envelope: float = ENVELOPE,
    ) -> None:
        self.stage = stage
        self.session = session
        self.exact = exact
        self.envelope = envelope
        self.error = 0.0
        self.chunks = self.positions = self.tokens = 0
        self._plan = session.plan if tail else None
        self._evidence = evidence
        self._rows = {} if exact else {who: sketch_rows(records) for who, records in evidence.items()}

    def check(self, output: ChunkRecord) -> None:
        """Check the next output.

        Raises
        ------
        ReplayMismatch
            If it is not what is on record; ``what`` and ``position`` say where, ``who`` whose record it is,
            ``recorded`` and ``made`` what is on record and what was made, where it is an output that differs.
        """
        self._follows(output)
        for who, records in self._evidence.items():
            if self.exact:
                self._bits(output, records[self.chunks], who)
            else:
                self._sketch(output, who)
        self._tokens(output)
        self.chunks += 1
        self.positions = output.end

    def finish(self) -> None:
        """Check that nothing is missing.

        Raises
        ------
        ReplayMismatch
            If the replay ended early, or not every committed token was reproduced.
        """
        due = self.session.position
        if self.positions != due:
            raise self._mismatch("chunk", self.positions, f"expected {due} positions, got {self.positions}")
        if self._plan is not None and self.tokens != len(self._plan.expected):
            missing = self._plan.first + self.tokens
            message = f"expected {len(self._plan.expected)} committed tokens, got {self.tokens}"
            raise self._mismatch("token", missing, message)

    def _follows(self, output: ChunkRecord) -> None:
        if self.exact:
            chunks = self.session.chunks
            due = str(chunks[self.chunks].place) if self.chunks < len(chunks) else "no chunk"
            fits = str(output.place) == due
        else:
            due = f"a chunk at {self.positions}"
            fits = output.position == self.positions and output.end <= self.session.position
        if not fits:
            message = f"expected the output of {due}, got that of {output.place}"
            raise self._mismatch("chunk", self.positions, message)

    def _bits(self, output: ChunkRecord, record: ChunkRecord, who: str) -> None:
        if output.digest != record.digest:
            expected, got = record.digest.hex(), output.digest.hex()
            message = f"expected the digest {expected} that {who} recorded, got {got}"
            raise self._mismatch("digest", output.position, message, who, record, output)
        if record.tokens and output.tokens != record.tokens:
            message = f"expected the tokens {record.tokens} that {who} recorded, got {output.tokens}"
            raise self._mismatch("token", output.position, message, who, record, output)

    def _sketch(self, output: ChunkRecord, who: str) -> None:
        rows, recorded = sketch_rows([output]), self._rows[who]
        for position in range(output.position, output.end):
            if position not in recorded:
                continue
            error = sketch_error(rows[position], recorded[position]) if position in rows else float("inf")
            if error > self.envelope:
                message = f"expected the sketch that {who} recorded within {self.envelope:g}, got {error:.3g}"
                record = next(record for record in self._evidence[who] if position < record.end)
                raise self._mismatch("sketch", position, message, who, record, output)
            self.error = max(self.error, error)

    def _tokens(self, output: ChunkRecord) -> None:
        if self._plan is None:
            return
        first = output.position + output.width - len(output.tokens)
        for position, token in enumerate(output.tokens[: output.end - first], first):
            due = self._plan.token_after(position)
            if due is None:
                continue
            if token != due:
                last = self._plan.first + len(self._plan.expected) - 1
                name = "driver token" if position == last else "committed token"
                raise self._mismatch("token", position, f"expected the {name} {due}, got {token}")
            self.tokens += 1

    def _mismatch(
        self,
        what: str,
        position: int,
        message: str,
        who: str = "",
        recorded: ChunkRecord | None = None,
        made: ChunkRecord | None = None,
    ) -> ReplayMismatch:
        return ReplayMismatch(
            f"stage {self.stage}, session {self.session.session}, position {position}: {message}",
            stage=self.stage,
            session=self.session.session,
            position=position,
            what=what,
            who=who,
            recorded=recorded,
            made=made,
        )
