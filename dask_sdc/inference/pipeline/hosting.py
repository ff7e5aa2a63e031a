"""The worker's side of a coordinator that runs on a worker: a whole pipeline, over a client of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import cloudpickle
from distributed import Client, Security, Status, Worker, WorkerPlugin
from distributed.comm.core import Comm

from dask_sdc.evidence.receipts import SDCAuditReceipt
from dask_sdc.exceptions import ClosedError
from dask_sdc.inference.heal import RecoveryReport
from dask_sdc.inference.pipeline.pipeline import Pipeline
from dask_sdc.inference.pipeline.streams import News

__all__ = ["CoordinatorPlugin", "PipelineState"]

T = TypeVar("T")


@dataclass(frozen=True)
class PipelineState:
    """What there is to know of a pipeline that runs elsewhere; see `Pipeline`.

    Attributes
    ----------
    workers, spares : tuple of str
        Addresses of the stages, from the head to the tail, and of the spares.
    recoveries : list of RecoveryReport
    receipts : list of SDCAuditReceipt
    quarantined : dict of str to str
    """

    workers: tuple[str, ...]
    spares: tuple[str, ...]
    recoveries: list[RecoveryReport]
    receipts: list[SDCAuditReceipt]
    quarantined: dict[str, str]


class CoordinatorPlugin(WorkerPlugin):
    """Runs pipelines for clients that are far away, and answers their RPC.

    Each has an event loop of its own, so that none keeps the worker from its work.
    """

    name = "dask_sdc-coordinators"
    idempotent = True

    async def setup(self, worker: Worker) -> None:
        """Add the RPC handlers."""
        self.worker = worker
        self.pipelines: dict[str, Pipeline] = {}
        self._starting: set[str] = set()
        worker.handlers.update(self._handlers())

    async def teardown(self, worker: Worker) -> None:
        """Leave nothing behind."""
        for name in self._handlers():
            worker.handlers.pop(name, None)
        for name in list(self.pipelines):
            await self.unhost(name)

    def _handlers(self) -> dict[str, Callable[..., Any]]:
        methods = (self.host, self.generate, self.state, self.unhost)
        return {f"sdc_stage_{method.__name__}": method for method in methods}

    async def host(self, name: str, weights: bytes, settings: bytes) -> None:
        """Start a pipeline (RPC handler)."""
        address, security = self.worker.scheduler.address, self.worker.security
        self._starting.add(name)
        try:
            pipeline = await asyncio.to_thread(_started, address, security, weights, settings)
        finally:
            wanted = name in self._starting
            self._starting.discard(name)
        if not wanted:
            await asyncio.to_thread(_ended, pipeline)
            raise ClosedError(f"pipeline {name} was closed before it had started")
        self.pipelines[name] = pipeline

    def _find(self, name: str) -> Pipeline:
        pipeline = self.pipelines.get(name)
        if pipeline is None:
            raise ClosedError(f"worker {self.worker.address}: expected an open pipeline, got {name!r}")
        return pipeline

    async def generate(self, comm: Comm, name: str, request: bytes, streamed: bool, sign: float) -> Status:
        """Run a request and send what is new, and a sign of life every some seconds (RPC handler)."""
        pipeline = self._find(name)
        made = pipeline.request(**cloudpickle.loads(request))
        await comm.write("OK")
        news: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def say(one: Any) -> None:
            loop.call_soon_threadsafe(news.put_nowait, one)

        running = _over_there(pipeline, _followed(pipeline, made, streamed, say))
        gone = asyncio.ensure_future(_hung_up(comm))
        try:
            while not gone.done():
                one = await _within(news.get(), sign)
                await comm.write(cloudpickle.dumps(one))
                if _is_last(one):
                    break
            # Whoever asked hangs up after the last message; nobody else may read from here afterwards.
            await asyncio.wait([gone], timeout=sign)
        except OSError:
            pass  # whoever asked is gone
        finally:
            running.cancel()
            gone.cancel()
            await asyncio.gather(running, gone, return_exceptions=True)
            comm.abort()
        return Status.dont_reply

    async def state(self, name: str) -> bytes:
        """Return the state of a pipeline (RPC handler)."""
        return await _over_there(pipeline := self._find(name), _state(pipeline))

    async def unhost(self, name: str) -> None:
        """Close a pipeline, if it is there or comes yet (RPC handler)."""
        self._starting.discard(name)
        pipeline = self.pipelines.pop(name, None)
        if pipeline is not None:
            await asyncio.to_thread(_ended, pipeline)


class _Hosted(Pipeline):
    """A pipeline under the name by which its client knows it."""

    def _named(self, name: str | None) -> str:
        return str(name)


def _started(address: str, security: Security, weights: bytes, settings: bytes) -> Pipeline:
    client = Client(address, security=security, set_as_default=False)
    try:
        return _Hosted(client, cloudpickle.loads(weights), **cloudpickle.loads(settings))
    except BaseException:
        client.close()
        raise


def _ended(pipeline: Pipeline) -> None:
    try:
        pipeline.close()
    finally:
        pipeline.client.close()


def _over_there(pipeline: Pipeline, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Run something in the event loop of a pipeline."""
    loop: Any = pipeline.client.loop
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop.asyncio_loop))


async def _followed(pipeline: Pipeline, request: Any, streamed: bool, say: Callable[[Any], None]) -> None:
    """Say what is new in a request, and at the end how it ended."""
    run = pipeline.follow(request, streamed)
    try:
        async for one in run:
            say(one)
    except Exception as error:
        say(error)
    finally:
        await run.aclose()


def _is_last(one: News | Exception | None) -> bool:
    return isinstance(one, Exception) or (one is not None and one.generation is not None)


async def _within(waiting: Coroutine[Any, Any, T], seconds: float) -> T | None:
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(waiting, seconds)
    return None


async def _hung_up(comm: Comm) -> None:
    with contextlib.suppress(OSError):
        await comm.read()  # where nothing comes


async def _state(pipeline: Pipeline) -> bytes:
    blob: bytes = cloudpickle.dumps(
        PipelineState(
            pipeline.workers, pipeline.spares, pipeline.recoveries, pipeline.receipts, pipeline.quarantined
        )
    )
    return blob
