"""How a worker is reached: dialled directly, or through a relay where that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import numpy as np
from distributed.protocol.serialize import to_serialize

__all__ = ["RELAYS", "Routes"]

#: Workers at most that are asked to pass messages on before another counts as not reachable.
RELAYS = 4

#: Seconds after which one worker that dials another gives up.
DIAL = 2.0


class Routes:
    """Calls methods of the plugin on workers, each over the way on which it was last found.

    A worker that nobody looked for is dialled directly.

    Parameters
    ----------
    rpc : callable
        Returns the RPC to a worker's address.
    patience : float, optional
        Seconds without an answer after which a worker is not there.
    """

    def __init__(self, rpc: Callable[[str], Any], patience: float = DIAL) -> None:
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


def packed(value: Any) -> Any:
    """Return what came in a message as it travels on: arrays out of band."""
    if isinstance(value, np.ndarray):
        return to_serialize(value)
    if isinstance(value, Mapping):
        return {name: packed(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [packed(one) for one in value]
    return value
