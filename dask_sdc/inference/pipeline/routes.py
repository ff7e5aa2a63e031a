"""How a worker is reached: dialled directly, or through a relay where that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any

import numpy as np
from distributed import Status
from distributed.comm.core import Comm
from distributed.core import ConnectionPool, send_recv
from distributed.protocol.serialize import to_serialize

__all__ = ["RELAYS", "Connection", "Routes", "packed", "piped", "written"]

#: Workers at most that are asked to pass messages on before another counts as not reachable.
RELAYS = 4

#: Seconds after which one worker that dials another gives up.
DIAL = 2.0


async def written(comm: Comm, message: Any, small: bool) -> None:
    """Send a message over a comm, which takes the size of all that may be large enough for a thread.

    That takes longer than to send a small one.
    """
    comm.allow_offload = not small
    await comm.write(message)


class Connection:
    """A connection to a worker that is not shared.

    Parameters
    ----------
    pool : ConnectionPool
        From which it was taken.
    dialled : str
        Address of the worker.
    comm : Comm
        The connection.
    """

    def __init__(self, pool: ConnectionPool, dialled: str, comm: Comm) -> None:
        self._pool, self._dialled, self._comm = pool, dialled, comm

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return bool(self._comm.closed())

    async def read(self) -> Any:
        """Return the next message."""
        return await self._comm.read()

    async def write(self, message: Any, small: bool = False) -> None:
        """Send a message; the size of one that is said to be small is not looked at."""
        await written(self._comm, message, small)

    def close(self) -> None:
        """Hang up at once."""
        self._comm.abort()
        self._pool.reuse(self._dialled, self._comm)  # which counts it no more


class Routes:
    """Calls methods of the plugin on workers, each over the way on which it was last found.

    A worker that nobody looked for is dialled directly.

    Parameters
    ----------
    rpc : ConnectionPool
        Connections to workers.
    patience : float, optional
        Seconds without an answer after which a worker is not there.
    """

    def __init__(self, rpc: ConnectionPool, patience: float = DIAL) -> None:
        self._rpc, self._patience = rpc, patience
        self._relays: dict[str, str] = {}
        self._sought: set[str] = set()

    async def find(self, address: str, relays: Iterable[str] = ()) -> bool:
        """Look for a way to a worker: the direct one, or else the first relay that can dial it.

        Parameters
        ----------
        address : str
            The worker.
        relays : iterable of str
            Workers that may pass messages on.

        Returns
        -------
        bool
            Whether there is one. If not, it is dialled directly from now on: perhaps it was only slow.
        """
        self._sought.add(address)
        if await self._true(self._rpc(address).sdc_stage_hello(), self._patience):
            self._relays.pop(address, None)
            return True
        relays = list(relays)
        dials = [self._true(self._rpc(relay).sdc_stage_dial(to=address), 2 * DIAL) for relay in relays]
        for relay, dialled in zip(relays, await asyncio.gather(*dials), strict=True):
            if dialled:
                self._relays[address] = relay
                return True
        self._relays.pop(address, None)
        return False

    async def find_once(self, address: str, relays: Iterable[str] = ()) -> None:
        """Look for a way to a worker that nobody looked for yet."""
        if address not in self._sought:
            await self.find(address, relays)

    async def alive(self, address: str, patience: float) -> bool:
        """Say whether a worker answers within some seconds, over the way on which it was last found."""
        return await self._true(self.call(address, "hello"), patience)

    async def _true(self, call: Awaitable[bool], patience: float) -> bool:
        try:
            return await asyncio.wait_for(call, patience)
        except OSError:  # a TimeoutError is one
            return False

    def call(self, address: str, method: str, **arguments: Any) -> Awaitable[Any]:
        """Call a method of the plugin on a worker."""
        relay, name = self._relays.get(address), f"sdc_stage_{method}"
        if relay is None:
            direct: Awaitable[Any] = getattr(self._rpc(address), name)(**arguments)
            return direct
        passed: Awaitable[Any] = self._rpc(relay).sdc_stage_relay(
            to=address, method=method, arguments=arguments
        )
        return passed

    async def connect(self, address: str, method: str, **arguments: Any) -> Connection:
        """Open a connection to a method of the plugin on a worker that takes one.

        Raises
        ------
        OSError
            If the worker cannot be reached.
        Exception
            What the method raises before it answers for the first time.
        """
        relay, name = self._relays.get(address), f"sdc_stage_{method}"
        dialled = relay or address
        connection = Connection(self._rpc, dialled, comm := await self._rpc.connect(dialled))
        try:
            if relay is None:
                await send_recv(comm, op=name, **arguments)
            else:
                await send_recv(comm, op="sdc_stage_pipe", to=address, method=method, arguments=arguments)
        except BaseException:
            connection.close()
            raise
        return connection


async def piped(comm: Comm, onward: Connection) -> Status:
    """Pass messages on between two connections, both ways, until one of them is closed."""
    ways = [
        asyncio.ensure_future(_pass_on(comm, onward)),
        asyncio.ensure_future(_pass_on(onward, comm)),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        onward.close()
        comm.abort()
        await asyncio.gather(*ways, return_exceptions=True)
    return Status.dont_reply


async def _pass_on(source: Comm | Connection, sink: Comm | Connection) -> None:
    while True:
        await sink.write(packed(await source.read()))


def packed(value: Any) -> Any:
    """Return what came in a message as it travels on: arrays out of band."""
    if isinstance(value, np.ndarray):
        return to_serialize(value)
    if isinstance(value, Mapping):
        return {name: packed(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [packed(one) for one in value]
    return value
