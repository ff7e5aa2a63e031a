"""What the coordinator keeps of any session: what was fed, what is on its way, and what came back."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from dask_sdc.inference.host import Chunk, SessionSettings
from dask_sdc.inference.journal import ChunkRecord, boundary_digest, cut_records
from dask_sdc.inference.session import SessionState
from dask_sdc.inference.speculative import DraftTree

__all__ = ["FedSession", "Feed", "Returned"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Feed:
    """A chunk that is to be fed: what, where, and how many rows of the tail's output are wanted."""

    position: int
    array: Array
    rows: int | None
    draft: int = -1
    tree: DraftTree | None = None

    @property
    def width(self) -> int:
        """Positions."""
        return int(self.array.shape[1])


class Returned(NamedTuple):
    """What the tail made of a chunk.

    Attributes
    ----------
    record : ChunkRecord
        Its record.
    array : ndarray or None
        The output; None where tokens say all.
    """

    record: ChunkRecord
    array: Array | None


class FedSession(ABC):
    """A session on its way.

    Parameters
    ----------
    name : str
        Name of the session.
    depth : int
        Chunks in flight at most.
    reading : asyncio.Lock, optional
        Held while `next_feed` runs in a thread, where that may take long.
    """

    #: Sequences that go together.
    batch = 1

    def __init__(self, name: str, depth: int, reading: asyncio.Lock | None = None) -> None:
        self.name, self.reading = name, reading
        self.epoch = -1
        #: Per stage the position up to which audits agreed, and the hash chain over what it put out.
        self.audited: tuple[int, ...] = ()
        self.chains: tuple[str, ...] = ()
        #: See `SessionState`.
        self.exact = True
        #: Rows that count of the last chunk, if that was a tree of drafts.
        self.branch: tuple[int, ...] = ()
        #: Layers whose outputs are wanted, and these outputs (B, T, ...) once the session is done.
        self.taps: tuple[int, ...] = ()
        self.tapped: dict[int, Array] = {}
        self._depth = depth
        self._records: list[ChunkRecord] = []
        self._answers: list[ChunkRecord] = []
        self._fed: dict[int, Chunk] = {}
        self._flight: deque[tuple[int, Feed]] = deque()

    # -- what is known ---------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Positions that were fed, came back and count."""
        return self._records[-1].end if self._records else 0

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether there is nothing more to feed."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Results that this call has made so far."""

    @abstractmethod
    def count_before(self, chunk: int) -> int:
        """Return how many results come from chunks before one."""

    @property
    def room(self) -> int:
        """Chunks that may be fed now."""
        return self._depth - len(self._flight)

    @abstractmethod
    def state(self) -> SessionState:
        """Return what a recovery works from."""

    @abstractmethod
    def settings(self, capacity: int | None, sketched: bool = False) -> SessionSettings:
        """Return what the stages have to know."""

    def records(self, after: int, last: int) -> tuple[ChunkRecord, ...]:
        """Return what was fed and counts, behind one chunk up to another."""
        return _between(self._records, after, last)

    def known(self, after: int, last: int) -> tuple[ChunkRecord, ...]:
        """Return `records`, with those behind them that are on their way."""
        flying = [
            self._fed[index] for index, _ in self._flight if after < index <= last and index in self._fed
        ]
        ahead = [ChunkRecord(c.index, c.position, c.width, c.width, c.digest) for c in flying]
        return self.records(after, last) + tuple(ahead)

    def answers(self, after: int, last: int) -> tuple[ChunkRecord, ...]:
        """Return what the tail made of it."""
        return _between(self._answers, after, last)

    def fed(self, indices: Sequence[int]) -> list[Chunk]:
        """Return chunks that were fed."""
        return [self._fed[index] for index in indices]

    def _records_before(self, chunk: int) -> list[ChunkRecord]:
        return self._records[: bisect_left(self._records, chunk, key=_index)]

    # -- what is next ----------------------------------------------------------------------------

    @abstractmethod
    def next_feed(self) -> Feed | None:
        """Return what can be fed now, None if nothing."""

    def sent(self, index: int, feed: Feed) -> Chunk:
        """Note that a chunk is on its way under a number, and return it."""
        digest = boundary_digest(feed.array)
        tree = feed.tree or DraftTree((), ())
        chunk = Chunk(
            self.name,
            index,
            feed.position,
            feed.array,
            feed.rows,
            digest,
            tree.tokens,
            tree.parents,
            self.branch,
        )
        self._fed[index] = chunk
        self._flight.append((index, feed))
        return chunk

    @property
    def awaited(self) -> int | None:
        """Number of the chunk whose answer is next, None if none is in flight."""
        return self._flight[0][0] if self._flight else None

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Numbers of the chunks in flight, the oldest first."""
        return tuple(index for index, _ in self._flight)

    def begin_of(self, chunk: int) -> int:
        """Return the position at which a chunk in flight begins, or the oldest one if it is not in flight."""
        begins = {index: feed.position for index, feed in self._flight}
        return begins.get(chunk, next(iter(begins.values()), self.position))

    @abstractmethod
    def returned(self, answer: Returned) -> None:
        """Take the answer to the oldest chunk in flight."""

    def _settle(self, chunk: Chunk, answer: ChunkRecord, kept: int) -> None:
        fed = ChunkRecord(chunk.index, chunk.position, chunk.width, kept, chunk.digest)
        self._records.append(fed)
        self._answers.append(replace(answer, kept=kept))

    def roll_back(self, position: int) -> None:
        """Believe nothing any more that was computed from a position on; `restart` is to follow."""
        if position >= self.position:
            return
        self._records = list(cut_records(self._records, position))
        self._answers = list(cut_records(self._answers, position))
        counted = {record.index for record in self._records}
        self._fed = {index: chunk for index, chunk in self._fed.items() if index in counted}
        self.branch = ()
        self._rolled_back(position)

    @abstractmethod
    def _rolled_back(self, position: int) -> None:
        """Take back the results that depend on what is not believed any more."""

    def restart(self, epoch: int) -> None:
        """Enter an epoch: what is in flight never comes back."""
        self.epoch = epoch
        while self._flight:
            self._fed.pop(self._flight.popleft()[0], None)


def _index(record: ChunkRecord) -> int:
    return record.index


def _between(records: list[ChunkRecord], after: int, last: int) -> tuple[ChunkRecord, ...]:
    begin, end = (bisect_left(records, bound, key=_index) for bound in (after + 1, last + 1))
    return tuple(records[begin:end])
