"""Pipelines of a user's own stages: arrays in, arrays out."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import numpy as np
from distributed import Client

from dask_sdc.exceptions import CheckpointError, GenerationInterrupted, InputError, InputTypeError
from dask_sdc.inference.checkpoint import Checkpoint
from dask_sdc.inference.pipeline.array_session import (
    ArraySession,
    RolloutSession,
    StreamSession,
    checked_chunk,
)
from dask_sdc.inference.pipeline.base import StagedPipeline, check_int
from dask_sdc.inference.pipeline.clients import iterated, synced
from dask_sdc.inference.pipeline.coordinator import session_name
from dask_sdc.inference.pipeline.placement import Candidate, choose_workers, expect_workers
from dask_sdc.inference.pipeline.worker import describe
from dask_sdc.inference.stage import Stage

__all__ = ["ArrayPipeline"]

Array = np.ndarray[Any, Any]


class ArrayPipeline(StagedPipeline):
    """A user's own stages on the workers of a cluster, which survive the loss of a stage.

    For any autoregressive or streaming model: see `Stage`, and `LinearEmulator` for an example. A lost stage
    is fed again from the journal of the stage before it, and has to reproduce every recorded bit.

    Parameters
    ----------
    client : Client
        The cluster; an asynchronous client makes every method a coroutine, or an asynchronous iterator, and
        the pipeline an asynchronous context manager.
    stages : Stage or sequence of Stage
        From the head to the tail, not loaded; they are pickled to the workers.
    depth : int, optional
        Chunks of a stream in flight at most; one per stage by default.
    state_bytes : int, optional
        Bytes for the states of all sessions per stage, for stages whose state grows with every position; a
        quarter of the worker's memory by default.
    spares, spare_weights, timeout, journal_bytes, spill, audit_rate, ledger, name
        See `Pipeline`.

    Attributes
    ----------
    receipts, quarantined
        See `Pipeline`.

    Raises
    ------
    InputError, InputTypeError
        For bad arguments, before anything is sent to the cluster.
    NoDomainError
        If there are fewer workers than stages.

    Examples
    --------
    >>> with ArrayPipeline(client, emulator.stages()) as pipeline:  # doctest: +SKIP
    ...     fields = pipeline.rollout(history, steps=24)
    """

    def __init__(
        self,
        client: Client,
        stages: Sequence[Stage],
        *,
        depth: int | None = None,
        state_bytes: int | None = None,
        spares: int = 1,
        spare_weights: str = "memory",
        timeout: float = 10.0,
        journal_bytes: int = 2**28,
        spill: str | os.PathLike[str] | None = None,
        audit_rate: float = 0.0,
        ledger: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> None:
        if state_bytes is not None:
            state_bytes = check_int("state_bytes", state_bytes, 1)
        super().__init__(
            client,
            name=name,
            spares=spares,
            spare_weights=spare_weights,
            timeout=timeout,
            replay="exact",
            kv_bytes=state_bytes,
            journal_bytes=journal_bytes,
            spill=spill,
            audit_rate=audit_rate,
            ledger=ledger,
        )
        self._parts = _checked(stages)
        self._depth = len(self._parts) if depth is None else check_int("depth", depth, 1)
        text = "\n".join(part.digest for part in self._parts)
        #: sha256 over the digests of the stages, in hexadecimal.
        self.digest = hashlib.sha256(f"stages\n{text}".encode()).hexdigest()
        if not client.asynchronous:
            synced(client, self._start)

    async def _placed(self, candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Stage]]:
        chosen = choose_workers(candidates, len(self._parts))
        expect_workers(chosen, len(self._parts))
        return chosen, self._parts

    # -- sessions --------------------------------------------------------------------------------

    def run(
        self, chunks: Iterable[Any], *, capacity: int | None = None, resume: Checkpoint | None = None
    ) -> Any:
        """Send chunks through the stages and yield what comes out, chunk by chunk, in order.

        Parameters
        ----------
        chunks : iterable of array_like
            Of shape (batch, positions, ...), alike but for the positions; read as they are needed.
        capacity : int, optional
            Positions that will come at most; needed where the state of a stage grows with every position.
        resume : Checkpoint, optional
            Of a run that was interrupted, over the same chunks from the start: they are fed again, have to
            give what they gave, and what comes after them is yielded.

        Returns
        -------
        iterator of ndarray
            An asynchronous one with an asynchronous client.

        Raises
        ------
        GenerationInterrupted
            If a loss cannot be healed. ``committed`` has the outputs that were not yielded yet, and
            ``checkpoint`` what ``resume`` takes.
        CheckpointError
            If the checkpoint belongs to other stages or chunks.
        ContextOverflow
            If the stages have not the memory for ``capacity`` positions, or more come.
        """
        self._running  # noqa: B018  # raises if it is closed
        if isinstance(chunks, np.ndarray) or not isinstance(chunks, Iterable):
            raise InputTypeError(f"chunks: expected an iterable of arrays, got {type(chunks).__name__}")
        if capacity is not None:
            capacity = check_int("capacity", capacity, 1)
        elif any(part.bytes_per_position for part in self._parts):
            raise InputError("capacity: expected positions, as a stage's state grows with each, got None")
        session = StreamSession(iter(chunks), capacity, depth=self._depth, **self._common(resume))
        return iterated(self.client, self._followed(session, capacity))

    def rollout(
        self, history: Any, steps: int, *, prefill_chunk: int = 256, resume: Checkpoint | None = None
    ) -> Any:
        """Let a model go on from what is known, every output being the next input.

        Parameters
        ----------
        history : array_like, shape (batch, positions, ...)
            What is known, one position at least.
        steps : int
            Positions to make, those of ``resume`` not counted.
        prefill_chunk : int
            Positions of the history that are fed at once.
        resume : Checkpoint, optional
            Of a rollout that was interrupted, from the same history: what it made is computed again, has to
            be the same, and what comes after it is returned.

        Returns
        -------
        ndarray, shape (batch, steps, ...)

        Raises
        ------
        GenerationInterrupted, CheckpointError, ContextOverflow
            As `run`.
        """
        session, capacity = self._rolling(history, steps, prefill_chunk, resume)
        return synced(self.client, _joined, self._followed(session, capacity))

    def stream_rollout(
        self, history: Any, steps: int, *, prefill_chunk: int = 256, resume: Checkpoint | None = None
    ) -> Any:
        """Yield every position of a `rollout` as it is made, each of shape (batch, 1, ...).

        Returns
        -------
        iterator of ndarray
            An asynchronous one with an asynchronous client.
        """
        session, capacity = self._rolling(history, steps, prefill_chunk, resume)
        return iterated(self.client, self._followed(session, capacity))

    def _rolling(
        self, history: Any, steps: int, prefill_chunk: int, resume: Checkpoint | None
    ) -> tuple[RolloutSession, int]:
        self._running  # noqa: B018  # raises if it is closed
        steps = check_int("steps", steps, 1)
        prefill_chunk = check_int("prefill_chunk", prefill_chunk, 1)
        known = checked_chunk("history", history)
        length = known.shape[1]
        pieces = [
            np.ascontiguousarray(known[:, begin : begin + prefill_chunk])
            for begin in range(0, length, prefill_chunk)
        ]
        session = RolloutSession(pieces, steps, **self._common(resume))
        session.batch = known.shape[0]
        made = max(0, len(resume.chunks) - len(pieces) + 1) if resume is not None else 0
        return session, length + made + steps - 1

    def _common(self, resume: Checkpoint | None) -> dict[str, Any]:
        if resume is not None:
            if not isinstance(resume, Checkpoint):
                raise InputTypeError(f"resume: expected a Checkpoint, got {type(resume).__name__}")
            if resume.model_digest != self.digest or resume.prompt:
                raise CheckpointError(
                    f"model digest: expected {self.digest}, got {resume.model_digest or 'one of tokens'}"
                )
        return {
            "name": session_name(),
            "stages": len(self._parts),
            "model_digest": self.digest,
            "resume": resume,
        }

    async def _followed(self, session: ArraySession, capacity: int | None) -> AsyncGenerator[Array, None]:
        if isinstance(session, StreamSession):
            await asyncio.to_thread(session.begin)
        run = self._running.run(session, capacity)
        try:
            async for count in run:
                for array in session.take(count):
                    yield array
        except GenerationInterrupted as error:
            error.committed = session.pending()
            if error.checkpoint is None:
                error.checkpoint = session.state().checkpoint()
            raise
        finally:
            await run.aclose()


def _checked(stages: Any) -> list[Stage]:
    """Return the stages as a list.

    Raises
    ------
    InputTypeError
        If one is no stage, has no digest or cannot be pickled, naming it.
    InputError
        If there is none.
    """
    parts = list(stages) if isinstance(stages, Iterable) else [stages]
    if not parts:
        raise InputError("stages: expected one at least, got none")
    for number, part in enumerate(parts):
        if not isinstance(part, Stage):
            raise InputTypeError(f"stage {number}: expected a Stage, got {type(part).__name__}")
        if not isinstance(part.digest, str):
            raise InputTypeError(f"stage {number}: expected a digest that is text, got {part.digest!r}")
        try:
            describe(part)
        except Exception as error:
            raise InputTypeError(f"stage {number}: expected what can be pickled, got {error}") from error
    return parts


async def _joined(results: AsyncGenerator[Array, None]) -> Array:
    made: list[Array] = []
    try:
        async for array in results:
            made.append(array)
    except GenerationInterrupted as error:
        error.committed = (*made, *error.committed)
        raise
    return np.concatenate(made, axis=1)
