"""The worker's side: says what hardware it is, takes its labels, and runs batches."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import cloudpickle
import dask
from dask.utils import parse_timedelta
from distributed import Worker, WorkerPlugin, get_worker
from distributed.utils import offload

from dask_sdc.cluster.devices import DeviceWatch, device_model, visible_gpus
from dask_sdc.evidence.fingerprint import environment_fingerprint
from dask_sdc.graph.execute import Blob, ShardExecutor
from dask_sdc.policy.domains import Identity
from dask_sdc.policy.health import DeviceHealth
from dask_sdc.statistics.base import ShardInfo

#: Name of both plugins.
NAME = "dask_sdc"

#: Attribute of a Worker with the factories that wrap its executor (see `faults.plugin`).
WRAPPERS = "_sdc_executor_wrappers"


class SDCWorkerPlugin(WorkerPlugin):
    """Registers its worker's failure domain and owns its `ShardExecutor`.

    Parameters
    ----------
    custom : bytes or None
        Pickled callable ``f(worker) -> str`` that names the domain; user code, so it runs
        here and never on the scheduler.
    pin_cores : bool
        Pin workers of one host to disjoint cores, so that worker domains mean hardware.
    """

    name = NAME
    # A plugin that is registered twice keeps its executor and its labels.
    idempotent = True

    def __init__(self, custom: bytes | None = None, pin_cores: bool = False) -> None:
        self.custom = custom
        self.pin_cores = pin_cores
        self.executor: ShardExecutor
        self._watch: DeviceWatch | None = None
        self._looking: asyncio.Future[None] | None = None
        self._told: list[DeviceHealth] = []

    async def setup(self, worker: Worker) -> None:
        """Register with the scheduler plugin and advertise the labels it returns."""
        identity = identify(worker, self.custom)
        place = await worker.scheduler.sdc_register(identity=asdict(identity), worker=worker.address)
        if self.pin_cores:
            _pin(place["ordinal"], worker.state.nthreads)
        fingerprint = await offload(_settle_environment)
        executor = ShardExecutor(place["domain"], worker.address, fingerprint)
        for wrap in getattr(worker, WRAPPERS, ()):
            executor = wrap(executor)
        self.executor = executor
        worker.handlers.update(sdc_warm=self.warm, sdc_label=self.label, sdc_run=self.run)
        self.worker = worker
        await self.label(place["labels"])
        await worker.scheduler.sdc_ready(worker=worker.address, fingerprint=fingerprint)
        if identity.gpus:
            await self._watch_devices(DeviceWatch(identity.gpus))

    async def _watch_devices(self, watch: DeviceWatch) -> None:
        """Tell the scheduler how the GPUs are, now and whenever that has changed."""
        self._watch = watch
        await offload(watch.listen)
        await self.tell_health()
        seconds = parse_timedelta(dask.config.get("sdc.health.interval"))
        self._looking = asyncio.ensure_future(self._look_again(seconds))

    async def _look_again(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self.tell_health()

    async def tell_health(self) -> None:
        """Read the health of the GPUs, off the event loop; the scheduler hears what is new."""
        assert self._watch is not None
        devices, worse = await offload(self._watch.read)
        if devices == self._told and not worse:
            return
        with contextlib.suppress(OSError):  # the scheduler is not there, and is told the next time
            await self.worker.scheduler.sdc_health(
                worker=self.worker.address, devices=[one.to_dict() for one in devices], worse=worse
            )
            self._told = devices

    async def label(self, labels: Mapping[str, float]) -> None:
        """Advertise labels; a quarantined worker has none until it is released (RPC handler)."""
        if labels:
            await self.worker.set_resources(**labels)

    async def warm(self, blob: bytes, digest: bytes, info: bytes, columns: list[str]) -> float:
        """Compile what a statistic needs, off the event loop (RPC handler)."""
        shard_info: ShardInfo = cloudpickle.loads(info)
        return await offload(self.executor.warm, Blob(blob, digest), shard_info, frozenset(columns))

    async def run(
        self, statistic: bytes, statistic_digest: bytes, batch: bytes, batch_digest: bytes
    ) -> bytes:
        """Compute a batch past the scheduler: screening and probation (RPC handler)."""
        return await offload(
            self.executor.run, Blob(statistic, statistic_digest), Blob(batch, batch_digest), ()
        )

    async def teardown(self, worker: Worker) -> None:
        """Leave nothing behind."""
        if self._watch is not None:
            self._watch.close()
        if self._looking is not None:
            self._looking.cancel()
        for name in ("sdc_warm", "sdc_label", "sdc_run"):
            worker.handlers.pop(name, None)


def run_batch(
    statistic: bytes,
    statistic_digest: bytes,
    batch: bytes,
    batch_digest: bytes,
    dependencies: Sequence[Any],
) -> bytes:
    """Task function of every batch; returns the sealed frame."""
    plugin = cast(SDCWorkerPlugin, get_worker().plugins[NAME])
    return plugin.executor.run(Blob(statistic, statistic_digest), Blob(batch, batch_digest), dependencies)


def identify(worker: Worker, custom: bytes | None = None) -> Identity:
    """Return what is known of a worker's hardware."""
    named = None
    if custom is not None:
        function: Callable[[Worker], str] = cloudpickle.loads(custom)
        named = str(function(worker))
    return Identity(
        address=worker.address,
        name=str(worker.name),
        host=socket.gethostname(),
        pid=os.getpid(),
        nanny=None if worker.nanny is None else str(worker.nanny),
        nthreads=worker.state.nthreads,
        gpus=visible_gpus(),
        custom=named,
    )


def _pin(ordinal: int, nthreads: int) -> None:
    """Pin this process to ``nthreads`` cores of its own, by its position on the host."""
    cores = sorted(os.sched_getaffinity(0))
    first = (ordinal * nthreads) % len(cores)
    mine = {cores[(first + i) % len(cores)] for i in range(min(nthreads, len(cores)))}
    os.sched_setaffinity(0, mine)


def _settle_environment() -> str:
    """Fix one BLAS thread per task, then take the fingerprint.

    Results of a matrix product depend on its thread count; parallelism comes from the
    worker's own threads.
    """
    from threadpoolctl import threadpool_limits

    threadpool_limits(limits=1)
    return environment_fingerprint(device_model()).digest()
