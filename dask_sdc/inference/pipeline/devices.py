"""Candidates as stages on a device see them: how fast it is, and how much of its memory is free."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dask_sdc.inference.pace import levelled
from dask_sdc.inference.pipeline.placement import Candidate
from dask_sdc.inference.pipeline.routes import Routes

__all__ = ["with_memories", "with_paces"]

#: Seconds for a measurement, which may have to wait for a compiler.
_MEASURE = 300.0

#: Measurements of each device, with others in between.
_ROUNDS = 2


async def with_memories(routes: Routes, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates with the free memory of their devices instead of that of the host.

    Parameters
    ----------
    routes : Routes
        The ways to them.
    candidates : sequence of Candidate
        Who answers; each has a device of its own.

    Returns
    -------
    list of Candidate
        In the same order. Whoever has left meanwhile is not among them.

    Raises
    ------
    DeviceError
        If a worker has no device that CuPy can use.
    """
    rooms = await asyncio.gather(*(_asked(routes, one, "room") for one in candidates))
    # Zero would say that the memory is not limited.
    return [
        replace(one, memory=max(int(room), 1))
        for one, room in zip(candidates, rooms, strict=True)
        if room is not None
    ]


async def with_paces(routes: Routes, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates with the speed of their devices; all else as of `with_memories`."""
    # Side by side they compile, which does not count; then in turn, as each would slow the others down.
    compiled = await asyncio.gather(*(_asked(routes, one, "pace", device="cuda") for one in candidates))
    there = [one for one, pace in zip(candidates, compiled, strict=True) if pace is not None]
    paces = dict.fromkeys(there, 0.0)
    for one in there * _ROUNDS:
        paces[one] = max(paces[one], await _asked(routes, one, "pace", device="cuda") or 0.0)
    there = [one for one in there if paces[one] > 0]
    speeds = levelled([paces[one] for one in there])
    return [replace(one, speed=speed) for one, speed in zip(there, speeds, strict=True)]


async def _asked(routes: Routes, one: Candidate, what: str, **arguments: Any) -> Any:
    """Return what a worker answers, None if it has left."""
    try:
        return await asyncio.wait_for(routes.call(one.address, what, **arguments), _MEASURE)
    except OSError:
        return None
