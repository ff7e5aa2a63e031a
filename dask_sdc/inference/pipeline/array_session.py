"""Sessions of models that are no language models: arrays are fed, and arrays come back."""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dask_sdc.exceptions import (
    CheckpointError,
    ContextOverflow,
    GenerationInterrupted,
    InputError,
    InputTypeError,
    ReplayMismatch,
)
from dask_sdc.inference.checkpoint import Checkpoint
from dask_sdc.inference.host import Chunk, SessionSettings
from dask_sdc.inference.journal import ChunkRecord
from dask_sdc.inference.pipeline.fed import FedSession, Feed, Returned
from dask_sdc.inference.session import SessionState

__all__ = ["ArraySession", "RolloutSession", "StatesSession", "StreamSession", "checked_chunk"]

Array = np.ndarray[Any, Any]


def checked_chunk(name: str, chunk: Any, like: Array | None = None) -> Array:
    """Return a chunk as an array (B, T, ...).

    Raises
    ------
    InputTypeError
        If it is no array of bool, integer, real or complex numbers of 64 bits per part at most, or masked.
    InputError
        If it has no position, or another batch, shape or dtype than ``like``.
    """
    try:
        array = np.asarray(chunk)
    except ValueError as error:  # rows of different lengths
        raise InputTypeError(
            f"{name}: expected an array of numbers, got {type(chunk).__name__}: {error}"
        ) from error
    masked = isinstance(chunk, np.ma.MaskedArray)
    if masked or array.dtype.kind not in "biufc" or array.dtype.char in "gG":
        raise InputTypeError(
            f"{name}: expected an array of numbers, no extended precision and no mask, got "
            f"{type(chunk).__name__} of {array.dtype}"
        )
    if array.ndim < 2 or 0 in array.shape[:2]:
        raise InputError(f"{name}: expected shape (batch, positions, ...), none of them 0, got {array.shape}")
    if like is not None:
        got, expected = ((one.shape[0], *one.shape[2:], one.dtype.newbyteorder("=")) for one in (array, like))
        if got != expected:
            raise InputError(
                f"{name}: expected {like.dtype} of shape ({like.shape[0]}, positions, "
                f"{', '.join(map(str, like.shape[2:]))}), got {array.dtype} of shape {array.shape}"
            )
    # A copy: what was fed may be fed again, whatever the caller does with it.
    return np.array(array, array.dtype.newbyteorder("="), order="C", copy=True)


class ArraySession(FedSession):
    """A session that is fed arrays; every chunk but the first few gives one result.

    Parameters
    ----------
    name : str
        Name of the session.
    depth : int
        Chunks in flight at most.
    stages : int
        How many there are.
    model_digest : str
        For checkpoints.
    resume : Checkpoint or None
        What is fed first has to be, and to give, what is on record there.
    silent : int
        Chunks at the beginning that give no result beside those of ``resume``.
    reading : asyncio.Lock, optional
        See `FedSession`.
    """

    def __init__(
        self,
        name: str,
        depth: int,
        stages: int,
        model_digest: str,
        resume: Checkpoint | None,
        silent: int = 0,
        reading: asyncio.Lock | None = None,
    ) -> None:
        super().__init__(name, depth, reading)
        self._tail, self._model_digest = stages - 1, model_digest
        self._old = resume.chunks if resume is not None else ()
        self._silent = max(silent, len(self._old))
        self._inputs: list[Array] = []
        # Results that nobody took yet, by the number of their chunk, and digests of those that were taken.
        self._outputs: dict[int, Array] = {}
        self._taken: list[bytes] = []

    @property
    def count(self) -> int:
        """Results so far."""
        return max(0, len(self._records) - self._silent)

    def count_before(self, chunk: int) -> int:
        """Return how many results come from chunks before one."""
        return max(0, len(self._records_before(chunk)) - self._silent)

    def take(self, count: int) -> list[Array]:
        """Return the results up to a number that were not taken yet, and keep them no longer."""
        numbers = range(self._silent + len(self._taken), self._silent + count)
        self._taken += [self._answers[number].digest for number in numbers]
        return [self._outputs.pop(number) for number in numbers]

    def pending(self) -> tuple[Array, ...]:
        """Return the results that nobody took yet."""
        return tuple(self._outputs[number] for number in sorted(self._outputs))

    def state(self) -> SessionState:
        """Return what a recovery works from."""
        return SessionState(
            self.name,
            chunks=tuple(self._records),
            boundaries={self._tail: tuple(self._answers)},
            model_digest=self._model_digest,
            exact=self.exact,
        )

    def settings(self, capacity: int | None, sketched: bool = False) -> SessionSettings:
        """Return what the stages have to know."""
        return SessionSettings(self.batch, capacity, False, sketched=sketched)

    def next_feed(self) -> Feed | None:
        """Return the next chunk."""
        number = len(self._records) + len(self._flight)
        if self.room < 1 or self.done or not self._has(number):
            return None
        position = self._flight[-1][1].position + self._flight[-1][1].width if self._flight else self.position
        return Feed(position, self._inputs[number], self._rows(number))

    @abstractmethod
    def _has(self, number: int) -> bool:
        """Say whether a chunk is in ``_inputs``, perhaps after having fetched it."""

    def _rows(self, number: int) -> int | None:
        """Return how many last positions of a chunk's output are wanted."""
        return None

    def returned(self, answer: Returned) -> None:
        """Take the answer to the oldest chunk in flight."""
        index, feed = self._flight.popleft()
        chunk, number = self._fed[index], len(self._records)
        assert answer.array is not None
        self._compare(number, chunk, answer.record)
        self._settle(chunk, answer.record, feed.width)
        if number >= self._silent + len(self._taken):
            self._outputs[number] = answer.array

    def _compare(self, number: int, chunk: Chunk, record: ChunkRecord) -> None:
        """Compare with the checkpoint, and with what was handed out before something was computed again."""
        if number < len(self._old):
            width, fed, made = self._old[number]
            if (chunk.width, chunk.digest.hex()) != (width, fed):
                raise CheckpointError(
                    f"chunk {number}: expected {width} positions with digest {fed}, as the checkpoint has, "
                    f"got {chunk.width} with {chunk.digest.hex()}"
                )
            if record.digest.hex() != made:
                raise ReplayMismatch(
                    f"session {self.name}: expected output {made} of chunk {number}, as the checkpoint has, "
                    f"got {record.digest.hex()}",
                    stage=self._tail,
                    session=self.name,
                    position=chunk.position,
                    what="digest",
                )
        taken = number - self._silent
        if 0 <= taken < len(self._taken) and record.digest != self._taken[taken]:
            raise GenerationInterrupted(
                f"session {self.name}: result {taken} was found to be wrong after it was handed out",
                session=self.name,
                checkpoint=self.state().checkpoint(),
            )

    def _rolled_back(self, position: int) -> None:
        for number in [number for number in self._outputs if number >= len(self._records)]:
            del self._outputs[number]


class StreamSession(ArraySession):
    """A session that is fed what an iterator gives.

    Parameters
    ----------
    source : iterator of array_like
        Chunks (B, T, ...), read as they are needed, in a thread.
    capacity : int or None
        Positions that may come at most.
    **session
        See `ArraySession`.
    """

    def __init__(self, source: Iterator[Any], capacity: int | None, **session: Any) -> None:
        super().__init__(reading=asyncio.Lock(), **session)
        self._source: Iterator[Any] | None = source
        self._room = math.inf if capacity is None else capacity

    def begin(self) -> None:
        """Read the first chunk, which says how many sequences go together."""
        if self._has(0):
            self.batch = self._inputs[0].shape[0]

    @property
    def done(self) -> bool:
        """Whether the source has ended and all of it came back."""
        return self._source is None and len(self._records) == len(self._inputs)

    def _has(self, number: int) -> bool:
        if number == len(self._inputs) and self._source is not None:
            try:
                chunk = next(self._source)
            except StopIteration:
                self._source = None
                self._check_whole()
                return False
            self._take_in(checked_chunk(f"chunk {number}", chunk, self._inputs[0] if self._inputs else None))
        return number < len(self._inputs)

    def _take_in(self, chunk: Array) -> None:
        if chunk.shape[1] > self._room:
            raise ContextOverflow(
                f"chunk {len(self._inputs)}: expected {self._room} positions at most that are left of "
                f"capacity, got {chunk.shape[1]}"
            )
        self._room -= chunk.shape[1]
        self._inputs.append(chunk)

    def _check_whole(self) -> None:
        """Refuse a source that ends before what the checkpoint has of it."""
        if len(self._inputs) < len(self._old):
            raise CheckpointError(
                f"chunks: expected {len(self._old)} at least, as the checkpoint has, got {len(self._inputs)}"
            )


class StatesSession(StreamSession):
    """A session that is fed a text, whose tail gives logits, and whose layers are tapped.

    Parameters
    ----------
    ids : tuple of int
        The text.
    chunk : int
        Positions that are fed at once.
    layers : tuple of int
        Layers whose outputs are wanted.
    logits : bool
        Whether the logits of all positions are wanted, or none.
    **session
        See `ArraySession`.
    """

    def __init__(
        self, ids: Sequence[int], chunk: int, layers: Sequence[int], logits: bool, **session: Any
    ) -> None:
        text = np.asarray([ids], np.int64)
        pieces = [text[:, begin : begin + chunk] for begin in range(0, len(ids), chunk)]
        super().__init__(iter(pieces), len(ids), **session)
        self.taps, self._logits = tuple(layers), logits

    def _rows(self, number: int) -> int | None:
        return None if self._logits else 0

    def settings(self, capacity: int | None, sketched: bool = False) -> SessionSettings:
        """Return what the stages have to know."""
        return SessionSettings(1, capacity, False, sketched=sketched, taps=self.taps)


class RolloutSession(ArraySession):
    """A session whose last output is its next input.

    Parameters
    ----------
    history : sequence of ndarray
        Chunks (B, T, ...) that are known.
    steps : int
        Results that are wanted, those of ``resume`` not counted.
    **session
        See `ArraySession`.
    """

    def __init__(self, history: Sequence[Array], steps: int, **session: Any) -> None:
        super().__init__(depth=1, silent=len(history) - 1, **session)
        self._inputs = list(history)
        self._known, self._steps = len(history), steps

    @property
    def done(self) -> bool:
        """Whether all results are here."""
        return self.count >= self._steps

    def _has(self, number: int) -> bool:
        return number < len(self._inputs)

    def _rows(self, number: int) -> int:
        return int(number >= self._known - 1)

    def returned(self, answer: Returned) -> None:
        """Take the answer to the oldest chunk in flight; its last position is fed next."""
        assert answer.array is not None
        last = np.ascontiguousarray(answer.array[:, -1:])
        super().returned(Returned(answer.record, last))
        if len(self._records) == len(self._inputs):
            like = self._inputs[0]
            if (last.shape[0], last.shape[2:]) != (like.shape[0], like.shape[2:]):
                raise InputError(
                    f"expected outputs (batch, positions, ...) that can be fed again, as {like.shape}, "
                    f"got {last.shape}"
                )
            self._inputs.append(last)

    def _rolled_back(self, position: int) -> None:
        super()._rolled_back(position)
        del self._inputs[max(self._known, len(self._records) + 1) :]
