"""A group of ranks on a Dask cluster, and the handle that each of them holds."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

from dask.utils import parse_timedelta
from distributed import Client, Future, Worker, get_worker, secede
from distributed.core import Status
from distributed.utils import in_async_call, sync

from dask_sdc.exceptions import ClosedError, InputError, InputTypeError, RankLost
from dask_sdc.recovery.all_reduce import counts
from dask_sdc.recovery.cluster.scheduler_plugin import RecoverySchedulerPlugin
from dask_sdc.recovery.rounds import Answer

#: Seconds beyond a group's timeout after which a rank gives up a scheduler that says nothing.
_GRACE = 10.0

#: Ranks at most, so that sums of counts fit into 64 bits.
_MAX_SIZE = 2**16


class RankGroup:
    """Ranks that add up their counts through the scheduler.

    The group ends when it is closed, when its client closes and when the cluster is restarted; a rank that
    waits then raises `ClosedError`. Groups of one name have nothing to do with each other.

    Parameters
    ----------
    client : Client
        The cluster. With an asynchronous client use ``async with`` or ``await``.
    size : int
        How many ranks there are. All of them have to come to a sum before any goes on, so they have to run at
        once. A worker gives a task that waits a thread of its own, and so can have more ranks than threads,
        but not for coroutines. One process can have 500 ranks, since each that waits keeps a connection.
    name : str
        Names the group in messages.
    timeout : float or str
        Seconds, or a text such as "5 minutes", that a sum waits from the first contribution on.

    Attributes
    ----------
    ranks : tuple of DaskAllReduce
        One for each rank; `map` sends them, or you do.

    Raises
    ------
    InputError
        For bad arguments.
    ClosedError
        If the client is closed.

    Examples
    --------
    >>> with RankGroup(client, 4) as group:  # doctest: +SKIP
    ...     client.gather(group.map(lambda rank: rank.sum([1])[0]))
    [4, 4, 4, 4]
    """

    def __init__(
        self, client: Client, size: int, *, name: str = "ranks", timeout: float | str = "60s"
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int):
            raise InputTypeError(f"expected an integer for size, got {size!r}")
        if not 1 <= size <= _MAX_SIZE:
            raise InputError(f"expected 1 to {_MAX_SIZE} ranks, got {size}")
        self.client = client
        self.name = name
        self._id = f"{name}-{uuid.uuid4().hex}"
        self._seconds = _seconds(timeout)
        self._opened = False
        self.ranks = tuple(
            DaskAllReduce(self._id, name, rank, size, self._seconds, client) for rank in range(size)
        )
        if not client.asynchronous:
            client.sync(self._open)

    async def _open(self) -> Self:
        if self._opened:
            return self
        if self.client.status != "running":
            raise ClosedError(f"expected a running client, got one that is {self.client.status}")
        await self.client.register_plugin(RecoverySchedulerPlugin())
        scheduler: Any = self.client.scheduler
        opened = await scheduler.sdc_ranks_open(
            group=self._id, name=self.name, size=len(self.ranks), timeout=self._seconds, client=self.client.id
        )
        if not opened:
            raise ClosedError(f"expected client {self.client.id} to be known to the scheduler, it is not")
        self._opened = True
        return self

    def map(self, function: Callable[..., Any], *iterables: Iterable[Any], **kwargs: Any) -> Any:
        """Start one task for each rank, and tell the others at once if one of them fails.

        Parameters
        ----------
        function : callable
            ``f(rank, ...)``, whose first argument is a `DaskAllReduce`; may be a coroutine function.
        *iterables
            Further arguments, as many of each as there are ranks.
        **kwargs
            For ``client.map``, such as ``workers`` or ``retries``.

        Returns
        -------
        list of Future or awaitable
            To be awaited if the client is asynchronous.

        Raises
        ------
        InputError
            If there are more or fewer arguments than ranks.
        """
        arguments = [list(values) for values in iterables]
        for values in arguments:
            if len(values) != len(self.ranks):
                raise InputError(
                    f"expected {len(self.ranks)} arguments, one for each rank, got {len(values)}"
                )
        return self.client.sync(self._map, function, arguments, kwargs)

    async def _map(
        self, function: Callable[..., Any], arguments: list[list[Any]], kwargs: dict[str, Any]
    ) -> list[Future[Any]]:
        # Before there are tasks, so that no end of one is missed.
        keys = [f"{self._id}-{rank.rank}" for rank in self.ranks]
        scheduler: Any = self.client.scheduler
        await scheduler.sdc_ranks_expect(group=self._id, keys=keys)
        futures: list[Future[Any]] = self.client.map(function, self.ranks, *arguments, key=keys, **kwargs)
        return futures

    def close(self) -> Any:
        """End the group; to be awaited if the client is asynchronous."""
        return self.client.sync(self._close)

    async def _close(self) -> None:
        scheduler: Any = self.client.scheduler
        if self.client.status == "running" and scheduler is not None:
            with suppress(OSError):  # with the scheduler the group has ended too
                await scheduler.sdc_ranks_close(group=self._id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __await__(self) -> Any:
        return self._open().__await__()

    async def __aenter__(self) -> Self:
        return await self._open()

    async def __aexit__(self, *exc_info: object) -> None:
        await self._close()


class DaskAllReduce:
    """One rank of a `RankGroup`, to be sent to where the rank is; an `AllReduce`.

    A rank is a task, or a thread, on any worker or where there is a client. It is one at a time: whoever
    unpickles a handle begins the rank anew, and is taken for it only if nobody was before, or if that one's
    task is tried again by Dask and the round is still open.

    Parameters
    ----------
    group : str
        Id of the group.
    name : str
        Name of the group.
    rank, size : int
        Which one of how many.
    timeout : float
        Seconds that a sum waits.
    client : Client, optional
        For ranks outside of workers; the current client by default. It is not pickled.
    """

    def __init__(
        self, group: str, name: str, rank: int, size: int, timeout: float, client: Client | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self._group = group
        self._name = name
        self._timeout = timeout
        self._client = client
        self._token = uuid.uuid4().hex
        self._number = 0
        self._busy = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._group, self._name, self.rank, self.size, self._timeout)

    def __repr__(self) -> str:
        return f"<DaskAllReduce {self._name!r}: rank {self.rank} of {self.size}>"

    def sum(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return the sums over all ranks, when every rank has called it.

        From its first sum on a task has a thread outside of its worker's pool, as after
        ``distributed.secede()``, so that other ranks can begin there.

        Parameters
        ----------
        values : sequence of int
            Equally many on every rank.

        Returns
        -------
        tuple of int
            The same on every rank.

        Raises
        ------
        RankLost
            If a rank has died, has ended, or does not come in time; names it. Also if the scheduler does not
            answer.
        StaleRound
            If this rank begins anew in the middle, or somebody else speaks for it.
        ClosedError
            If the group has ended.
        InputError
            If the values do not fit those of other ranks, or if this would block an event loop.
        """
        mine = counts(values)
        place = _Place.here(self._client)
        if in_async_call(place.loop):
            raise InputError(f"{self!r}: expected sum_async() on an event loop, which sum() would block")
        with self._alone():
            place.leave_pool()
            return self._unpack(sync(place.loop, self._ask, place, mine))

    async def sum_async(self, values: Sequence[int]) -> tuple[int, ...]:
        """Do the same without blocking the event loop.

        Parameters
        ----------
        values : sequence of int
            Equally many on every rank.

        Returns
        -------
        tuple of int
            The same on every rank.
        """
        mine = counts(values)
        place = _Place.here(self._client)
        with self._alone():
            if in_async_call(place.loop):
                return self._unpack(await self._ask(place, mine))
            # The loop of a synchronous client runs in another thread.
            asked = asyncio.run_coroutine_threadsafe(self._ask(place, mine), place.loop.asyncio_loop)
            return self._unpack(await asyncio.wrap_future(asked))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise InputError(f"{self!r}: expected one sum at a time, another is under way")
        try:
            yield
        finally:
            self._busy.release()

    async def _ask(self, place: _Place, values: tuple[int, ...]) -> Answer:
        question = place.scheduler.sdc_ranks_sum(
            group=self._group,
            rank=self.rank,
            number=self._number,
            values=values,
            place=place.name,
            key=place.key,
            token=self._token,
        )
        try:
            reply = await asyncio.wait_for(question, self._timeout + _GRACE)
        except OSError as error:  # a timeout too
            raise RankLost(
                f"{self._name}, round {self._number}: rank {self.rank} ({place.name}) does not reach the "
                f"scheduler any more: {error or type(error).__name__}",
                ranks=(self.rank,),
            ) from error
        if reply is None:  # no such handler
            return Answer("closed", message=f"{self._name}: expected an open group, the scheduler has none")
        return Answer(**reply)

    def _unpack(self, answer: Answer) -> tuple[int, ...]:
        sums = answer.unpack()
        self._number += 1
        return sums


def _seconds(timeout: float | str) -> float:
    try:
        seconds = float(parse_timedelta(timeout))
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"expected a timeout such as 60 or '60s', got {timeout!r}") from error
    if not seconds > 0:
        raise InputError(f"expected a timeout of more than 0 seconds, got {timeout!r}")
    return seconds


@dataclass(frozen=True)
class _Place:
    """Where a rank is."""

    name: str
    loop: Any
    scheduler: Any
    key: Any = None

    @classmethod
    def here(cls, client: Client | None) -> _Place:
        with suppress(ValueError):
            return cls.on(get_worker())
        with suppress(ValueError):
            client = client or Client.current()
        if client is None:
            # A thread that a task has started, say: it does not inherit the task's context.
            workers = [worker for worker in Worker._instances if worker.status == Status.running]
            if len(workers) != 1:
                raise InputError("expected to be on a worker or to have a client, got neither")
            return cls.on(workers[0])
        if client.status != "running":
            raise ClosedError(f"expected a running client, got one that is {client.status}")
        return cls(client.id, client.loop, client.scheduler)

    @classmethod
    def on(cls, worker: Worker) -> _Place:
        key = worker.active_threads.get(threading.get_ident())
        return cls(worker.address, worker.loop, worker.scheduler, key)

    def leave_pool(self) -> None:
        """Take a task's thread out of its worker's pool, so that whoever is waited for can begin there.

        It does not come back: while it waited for a place, all other ranks would wait for it.
        """
        if self.key is not None:
            with suppress(KeyError):  # it has left already
                secede()
