"""A worker for stages that a supervisor starts: checked first, with a line for what came of it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distributed import Worker
from distributed.system import MEMORY_LIMIT

from dask_sdc.exceptions import ClusterError, CorruptionError
from dask_sdc.inference.pace import decoding_pace
from dask_sdc.inference.pipeline.placement import LABEL
from dask_sdc.inference.stage import TransformerStage
from dask_sdc.inference.weights.store import WeightStore

__all__ = ["Preflight", "preflight", "serve"]

#: Why a worker closes that has lost its scheduler.
_LOST = ("worker-heartbeat", "worker-handle-scheduler-connection-broken")


@dataclass(frozen=True)
class Preflight:
    """What a machine was found to be fit for.

    Attributes
    ----------
    digest : str
        sha256 of the weights, every tensor of which was proved.
    layers : int
        Layers of the model that the memory has room for, caches left out.
    bytes_per_second : float
        See `decoding_pace`.
    """

    digest: str
    layers: int
    bytes_per_second: float


def preflight(location: Any, memory: int | None = None) -> Preflight:
    """Check, without a cluster, that this machine can hold a stage of a model.

    Parameters
    ----------
    location
        See `WeightStore.open`.
    memory : int, optional
        Bytes that there are for weights; half of the machine's by default.

    Returns
    -------
    Preflight

    Raises
    ------
    InputError
        If there is no weight store.
    ClusterError
        If there is no memory for its largest layer.
    CorruptionError
        If a tensor is damaged, naming it.
    OSError
        If the storage cannot be reached.
    """
    store = WeightStore.open(location)
    if damaged := store.check():
        raise CorruptionError("; ".join(damaged.values()))
    room = MEMORY_LIMIT // 2 if memory is None else memory
    layers = range(store.config.n_layers)
    # Ends of the model have tensors of their own, which one of the stages has to hold as well.
    sizes = [TransformerStage(store, range(k, k + 1)).nbytes for k in layers]
    if max(sizes) > room:
        raise ClusterError(f"expected {max(sizes)} bytes of memory for a stage of one layer, got {room}")
    fitting, left = 0, room
    while fitting < len(sizes) and sizes[fitting] <= left:
        left -= sizes[fitting]
        fitting += 1
    return Preflight(store.digest, fitting, decoding_pace())


class _StageWorker(Worker):
    """A worker that remembers why it closed."""

    why = ""

    async def close(self, *arguments: Any, **options: Any) -> Any:
        """Close, and note what is said to be the reason."""
        self.why = self.why or options.get("reason", "")
        return await super().close(*arguments, **options)


async def serve(
    scheduler: str, say: Callable[[str], None], *, nthreads: int | None = None, timeout: float = 30.0
) -> None:
    """Run a worker for stages until it is told to stop, by SIGTERM, SIGINT or its scheduler.

    Parameters
    ----------
    scheduler : str
        Address of the scheduler. Certificates come from Dask's configuration, so from the environment.
    say : callable
        Called with the worker's address once it is registered.
    nthreads : int, optional
        Threads of the worker; as many as there are processors by default.
    timeout : float
        Seconds in which the scheduler has to answer.

    Raises
    ------
    ClusterError
        If the scheduler cannot be reached, or is lost.
    """
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    worker = _StageWorker(scheduler, nthreads=nthreads, resources={LABEL: 1}, death_timeout=timeout)
    try:
        await worker
    except Exception as error:
        raise ClusterError(f"no scheduler at {scheduler} within {timeout:g} s: {error}") from error
    say(str(worker.address))
    told, closed = asyncio.ensure_future(stopped.wait()), asyncio.ensure_future(_finished(worker))
    await asyncio.wait([told, closed], return_when=asyncio.FIRST_COMPLETED)
    if not stopped.is_set() and worker.why.startswith(_LOST):
        raise ClusterError(f"worker {worker.address} lost its scheduler {scheduler}: {worker.why}")
    told.cancel()
    await worker.close(reason="stopped")
    await closed


async def _finished(worker: Worker) -> None:
    await worker.finished()
