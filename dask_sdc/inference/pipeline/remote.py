"""A pipeline whose coordinator runs on a worker, near the stages, for a client that is far away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import cloudpickle
from distributed import Client

from dask_sdc.cluster.session import expect_open, register
from dask_sdc.exceptions import ClosedError, ClusterError, GenerationInterrupted, InputError, InputTypeError
from dask_sdc.inference.checkpoint import Checkpoint
from dask_sdc.inference.pipeline.base import pipeline_name
from dask_sdc.inference.pipeline.clients import ended, iterated, synced, while_open
from dask_sdc.inference.pipeline.crew import LOAD
from dask_sdc.inference.pipeline.hosting import CoordinatorPlugin, PipelineState
from dask_sdc.inference.pipeline.owners import disown, own
from dask_sdc.inference.pipeline.placement import LABEL
from dask_sdc.inference.pipeline.routes import Connection, Routes
from dask_sdc.inference.pipeline.streams import News, check_settings, last_of, tokens_of
from dask_sdc.inference.pipeline.worker import StageWorkerPlugin

__all__ = ["RemotePipeline"]

#: Signs of life that a coordinator gives within its deadline.
_SIGNS = 4

#: Seconds in which a coordinator has to start: it chooses workers, which load, and makes spares.
_START = 2 * LOAD

#: Seconds in which a worker is asked to let go of what a lost coordinator left there.
_FAREWELL = 2.0


class RemotePipeline:
    """A `Pipeline` whose coordinator is a worker.

    Between two tokens a coordinator waits for the tail and feeds the head; from far away each token would
    wait for a long link. Tokens come to the client as they are committed.

    Parameters
    ----------
    client : Client
        The cluster; with an asynchronous client every method is a coroutine, and the pipeline an
        asynchronous context manager.
    weights : WeightStore, path or URL
        The model, as of `Pipeline`; the worker must be able to read it too.
    stages : int or "auto"
        See `Pipeline`.
    worker : str, optional
        Address of the worker that coordinates; by default one that may hold no stage, if there is one.
    **settings
        Of `Pipeline`. A ledger is written on the worker.

    Raises
    ------
    InputError
        If there is no such worker, or a setting is wrong.
    NoDomainError, CorruptionError
        See `Pipeline`.
    """

    def __init__(
        self,
        client: Client,
        weights: Any,
        stages: int | str = "auto",
        *,
        worker: str | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(client, Client):
            raise InputTypeError(f"client: expected a distributed.Client, got {type(client).__name__}")
        if worker is not None and not isinstance(worker, str):
            raise InputTypeError(f"worker: expected an address, got {worker!r}")
        self.client, self.coordinator = client, worker or ""
        self.name = pipeline_name(settings.get("name"))
        self._started = False
        self._blobs = [
            _packed("weights", weights),
            _packed("settings", {**settings, "stages": stages, "name": self.name}),
        ]
        timeout = settings.get("timeout", 10.0)  # which the pipeline checks
        self._timeout = float(timeout) if isinstance(timeout, int | float) and timeout > 0 else 10.0
        self._routes = Routes(client.rpc, self._timeout)
        self._lost = ""
        self._closed = False
        if not client.asynchronous:
            synced(client, self._start)

    async def _start(self) -> None:
        await self._choose()
        for plugin in (StageWorkerPlugin(), CoordinatorPlugin()):
            await register(self.client, plugin)
        await own(self.client, self.name, "unhost", name=self.name)
        weights, settings = self._blobs
        started = self._routes.call(
            self.coordinator, "host", name=self.name, weights=weights, settings=settings
        )
        try:
            await asyncio.wait_for(started, _START)
        except OSError as error:  # a TimeoutError is one
            await self._lose(error, _START)
            await self._unhost()
            raise ClusterError(f"{self._lost}, before it could coordinate") from error
        except BaseException:
            await self._unhost()
            raise
        self._started = True

    async def _choose(self) -> None:
        scheduler: Any = self.client.scheduler
        workers = (await scheduler.identity())["workers"]
        if self.coordinator and self.coordinator not in workers:
            raise InputError(f"worker: expected one of {sorted(workers)}, got {self.coordinator!r}")
        if not workers:
            raise InputError("expected a cluster with workers, got one without any")
        free = [address for address, one in workers.items() if LABEL not in (one.get("resources") or {})]
        self.coordinator = self.coordinator or sorted(free or workers)[-1]

    # -- generation ------------------------------------------------------------------------------

    def generate(self, prompt: Any, max_new_tokens: int = 64, **settings: Any) -> Any:
        """Generate tokens; parameters, result and errors as of `Pipeline.generate`.

        Raises
        ------
        GenerationInterrupted
            Also if the coordinator is lost; carries the tokens that came, and a checkpoint from which any
            pipeline of the model goes on.
        """
        request = self._request(prompt, max_new_tokens, settings)
        return synced(self.client, last_of, self._follow(request, streamed=False))

    def stream(self, prompt: Any, max_new_tokens: int = 64, **settings: Any) -> Any:
        """Generate tokens and yield each as it comes; as `Pipeline.stream`."""
        request = self._request(prompt, max_new_tokens, settings)
        return iterated(self.client, tokens_of(self._follow(request, streamed=True)))

    def _request(self, prompt: Any, max_new_tokens: int, settings: dict[str, Any]) -> bytes:
        self._check_open()
        check_settings(settings)
        return _packed("request", {"prompt": prompt, "max_new_tokens": max_new_tokens, **settings})

    async def _follow(self, request: bytes, streamed: bool) -> AsyncGenerator[News, None]:
        came, checkpoint = tuple[int, ...](), None
        try:
            connection = await self._connected(request, streamed)
            try:
                async for news in self._news(connection):
                    checkpoint = checkpoint or news.checkpoint
                    came = came[: news.kept] + news.tokens
                    yield news
            finally:
                connection.close()
        except OSError as error:  # a TimeoutError is one
            raise await self._given_up(error, came, checkpoint) from error

    async def _connected(self, request: bytes, streamed: bool) -> Connection:
        sign = self._timeout / _SIGNS
        asked = self._routes.connect(
            self.coordinator, "generate", name=self.name, request=request, streamed=streamed, sign=sign
        )
        return await asyncio.wait_for(asked, self._timeout)

    async def _news(self, connection: Connection) -> AsyncGenerator[News, None]:
        while True:
            one = cloudpickle.loads(await asyncio.wait_for(connection.read(), self._timeout))
            if isinstance(one, Exception):
                raise one
            if one is None:
                continue  # a sign of life
            yield one
            if one.generation is not None:
                return

    async def _given_up(
        self, error: OSError, came: tuple[int, ...], checkpoint: Checkpoint | None
    ) -> GenerationInterrupted:
        """Return what a call ends with whose coordinator was lost."""
        await self._lose(error, self._timeout)
        if checkpoint is not None:
            checkpoint = replace(checkpoint, committed=checkpoint.committed + came)
        committed = came if checkpoint is None else checkpoint.committed
        return GenerationInterrupted(self._lost, committed=committed, checkpoint=checkpoint)

    async def _lose(self, error: OSError, patience: float) -> None:
        """Note that the coordinator is lost, and let the stages go that it left."""
        why = str(error) or f"no sign of life within {patience:g} s"
        self._lost = f"coordinator {self.coordinator} was lost: {type(error).__name__}: {why}"
        await self._dismiss()

    async def _dismiss(self) -> None:
        scheduler: Any = self.client.scheduler
        workers = (await scheduler.identity())["workers"]
        calls = [
            asyncio.wait_for(self._routes.call(address, "leave", pipeline=self.name, forget=True), _FAREWELL)
            for address in workers
            if address != self.coordinator
        ]
        await asyncio.gather(*calls, return_exceptions=True)

    # -- what happened ---------------------------------------------------------------------------

    def state(self) -> Any:
        """Ask the coordinator for the state of the pipeline.

        Returns
        -------
        PipelineState

        Raises
        ------
        ClusterError
            If it does not answer; it is lost then.
        """
        self._check_open()
        return synced(self.client, self._state)

    async def _state(self) -> PipelineState:
        asked = self._routes.call(self.coordinator, "state", name=self.name)
        try:
            state: PipelineState = cloudpickle.loads(await asyncio.wait_for(asked, self._timeout))
        except OSError as error:
            await self._lose(error, self._timeout)
            raise ClusterError(self._lost) from error
        return state

    def _check_open(self) -> None:
        expect_open(self.client)  # which would look as if its coordinator was lost
        if self._closed or self._lost:
            raise ClosedError(f"expected an open pipeline, got one whose {self._lost or 'end was asked for'}")

    # -- life ------------------------------------------------------------------------------------

    def close(self) -> Any:
        """Give up the stages; may be called again. The client stays open."""
        return ended(self.client, self._stop)

    async def _stop(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._started:
            await self._unhost()

    async def _unhost(self) -> None:
        # Also if it is lost: one that was frozen may be there again.
        ended = self._routes.call(self.coordinator, "unhost", name=self.name)
        try:
            await asyncio.wait_for(ended, _FAREWELL if self._lost else 2 * self._timeout)
        except OSError:
            await self._dismiss()
            await disown(self.client, self.name, [self.coordinator])
        else:
            await disown(self.client, self.name)

    def __enter__(self) -> RemotePipeline:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def _opened(self) -> RemotePipeline:
        if not self._started:
            with while_open(self.client):
                await self._start()
        return self

    def __await__(self) -> Any:
        return self._opened().__await__()

    async def __aenter__(self) -> RemotePipeline:
        return await self._opened()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


def _packed(name: str, value: Any) -> bytes:
    try:
        blob: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise InputTypeError(f"{name}: expected what can be pickled, got {error}") from error
    return blob
