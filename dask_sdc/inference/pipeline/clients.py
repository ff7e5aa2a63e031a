"""What a pipeline runs over a user's client, which may be closed in the middle of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from distributed import Client

from dask_sdc.cluster.session import expect_open
from dask_sdc.exceptions import ClosedError

__all__ = ["ended", "iterated", "synced", "while_open"]

T = TypeVar("T")


@contextlib.contextmanager
def while_open(client: Client) -> Iterator[None]:
    """Have whatever fails because the client was closed end in the one error that says so.

    Raises
    ------
    ClosedError
        If the client is closed, before or in the middle: it takes its connections and its loop along.
    """
    expect_open(client)
    try:
        yield
    except ClosedError:
        raise
    except (Exception, asyncio.CancelledError) as error:
        expect_open(client, error)
        raise


def synced(client: Client, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> Any:
    """Run a coroutine function in the client's loop and return the result; its awaitable if asynchronous.

    Raises
    ------
    ClosedError
        See `while_open`.
    """
    if client.asynchronous:
        return _guarded(client, work, *arguments)
    with while_open(client):
        return client.sync(work, *arguments)


async def _guarded(client: Client, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
    with while_open(client):
        return await work(*arguments)


def ended(client: Client, work: Callable[[], Coroutine[Any, Any, None]]) -> Any:
    """Have something of a pipeline ended, as `synced`; a client that is closed has nothing left to end."""
    if client.asynchronous:
        return _ended(client, work)
    with contextlib.suppress(ClosedError):
        synced(client, work)
    return None


async def _ended(client: Client, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with contextlib.suppress(ClosedError):
        await _guarded(client, work)


def iterated(client: Client, source: AsyncGenerator[T, None]) -> Any:
    """Return an iterator over what comes; an asynchronous one with an asynchronous client.

    Raises
    ------
    ClosedError
        See `while_open`.
    """
    return _one_by_one(client, source) if client.asynchronous else _synchronous(client, source)


async def _one_by_one(client: Client, source: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    try:
        with while_open(client):
            async for one in source:
                yield one
    finally:
        await source.aclose()


def _synchronous(client: Client, source: AsyncGenerator[T, None]) -> Iterator[T]:
    """Yield what an asynchronous generator yields, in this thread."""
    under_way: asyncio.Task[Any] | None = None

    async def following() -> T | None:
        nonlocal under_way
        under_way = asyncio.current_task()
        return await anext(source, None)

    async def finish() -> None:
        if under_way is not None and not under_way.done():
            await asyncio.wait([under_way])  # interrupted from the keyboard, it ends in order
        await source.aclose()

    try:
        while (one := synced(client, following)) is not None:
            yield one
    finally:
        ended(client, finish)
