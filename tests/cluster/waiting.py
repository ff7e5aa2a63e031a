"""Waits for what a cluster does in its own time: polls with a deadline, never sleeps and hopes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

#: Seconds between two looks.
_PERIOD = 0.02


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Return once a condition holds; fail when it does not before the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"expected within {seconds} s: {condition!r}"
        time.sleep(_PERIOD)


async def until_async(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Do the same on an event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"expected within {seconds} s: {condition!r}"
        await asyncio.sleep(_PERIOD)
