"""Faults of machines that stages live on: slow ones, and ones that others cannot dial.

Nothing here needs a pipeline, so that a fault is there before one starts.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from dask_sdc.exceptions import InputError
from dask_sdc.inference.model.transformer import Transformer

__all__ = ["arm_slowness", "arm_unreachable"]


def arm_slowness(client: Any, worker: str, seconds: float) -> Any:
    """Let every forward pass in a worker's process take longer, until the process ends.

    Parameters
    ----------
    client : Client
        Of the cluster.
    worker : str
        Address of the worker, which should be a process of its own.
    seconds : float
        By how much, > 0.

    Returns
    -------
    object
        What ``client.run`` returns; to be awaited if the client is asynchronous.
    """
    if not seconds > 0:
        raise InputError(f"seconds: expected a number > 0, got {seconds!r}")
    return client.run(_slow_down, seconds, workers=[worker])


def arm_unreachable(client: Any, worker: str, sender: str) -> Any:
    """Let nothing on one worker be able to dial another, as if a firewall stood between them.

    Parameters
    ----------
    client : Client
        Of the cluster.
    worker : str
        Address that cannot be dialled.
    sender : str
        Address of the worker that cannot dial it.

    Returns
    -------
    object
        What ``client.run`` returns; to be awaited if the client is asynchronous.
    """
    return client.run(_cut_off, worker, workers=[sender])


def _slow_down(seconds: float) -> None:
    forward = Transformer.forward

    def slow(self: Transformer, *arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return forward(self, *arguments, **options)

    Transformer.forward = slow  # type: ignore[method-assign]


def _cut_off(address: str, dask_worker: Any) -> None:
    cut_off(dask_worker.rpc, address)


def cut_off(pool: Any, address: str) -> None:
    """Let a `distributed.core.ConnectionPool`, such as ``client.rpc``, dial an address no more."""
    pool.connect = partial(_refusing, pool.connect, address)
    pool.remove(address)


async def _refusing(connect: Any, refused: str, address: str, timeout: float | None = None) -> Any:
    if address == refused:
        raise OSError(f"injected fault: no route to {address}")
    return await connect(address, timeout)
