"""Stages that a worker computes once more, for audits: the worker's side of `dask_sdc.inference.shadow`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from dask_sdc.exceptions import StageError
from dask_sdc.graph.execute import contained
from dask_sdc.inference.host import Chunk, SessionSettings, StageHost
from dask_sdc.inference.journal import ChunkRecord
from dask_sdc.inference.stage import Stage

__all__ = ["Shadows"]

#: Runs a function with arguments in a thread of its own; awaitable.
Runner = Callable[..., Any]


class _Shadow(NamedTuple):
    host: StageHost
    run: Runner


class Shadows:
    """The shadows of one pipeline on one worker: stages with states of their own that feed nobody."""

    def __init__(self) -> None:
        self._shadows: dict[int, _Shadow] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sdc-shadow")

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run something of a shadow in the thread of all that have no seat here."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(contained, work, *args))

    async def replay(
        self,
        stage: Stage,
        number: int,
        tail: bool,
        run: Runner,
        session: str,
        settings: SessionSettings,
        begin: int,
        chunks: Sequence[Chunk],
        kept: Sequence[int],
    ) -> list[ChunkRecord]:
        """Compute chunks of a session.

        Parameters
        ----------
        stage, number, tail
            The stage, loaded; see `StageHost`.
        run : callable
            Runs its work: a stage that also has a seat here may compute in the thread of that only.
        session, settings
            The session.
        begin : int
            Position of the first chunk; 0 forgets what there is of the session.
        chunks, kept
            See `StageHost.replay`.

        Raises
        ------
        StageError
            If the shadow does not stand at ``begin``: whoever asks begins anew.
        """
        shadow = self._shadows.get(number)
        if shadow is None or shadow.host.stage is not stage:
            shadow = self._shadows[number] = _Shadow(StageHost(stage, number, tail, journal_bytes=None), run)
        if begin == 0:
            await shadow.run(shadow.host.open, session, settings)
        at = shadow.host.position(session)
        if at != begin:
            raise StageError(
                f"shadow of stage {number}: expected to be at position {begin}, got {at}", session=session
            )
        records: list[ChunkRecord] = await shadow.run(shadow.host.replay, chunks, kept)
        return records

    async def close(self, session: str) -> None:
        """Forget a session."""
        for shadow in list(self._shadows.values()):
            await shadow.run(shadow.host.close, session)

    async def drop(self, number: int) -> None:
        """Forget a stage, once nothing computes on it: it takes a seat, or leaves one."""
        shadow = self._shadows.pop(number, None)
        if shadow is not None:
            await shadow.run(shadow.host.close_all)

    def release(self, number: int) -> bool:
        """Forget a stage if it follows no session here; return whether it is not used any more."""
        shadow = self._shadows.get(number)
        if shadow is not None and shadow.host.sessions:
            return False
        self._shadows.pop(number, None)
        return True

    async def end(self) -> None:
        """Forget everything."""
        self._shadows.clear()
        await asyncio.get_running_loop().run_in_executor(None, self._pool.shutdown)
