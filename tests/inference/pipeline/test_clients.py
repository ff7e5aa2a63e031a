"""A client that is closed in the middle of something ends it in one clear error."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

from dask_sdc.exceptions import ClosedError
from dask_sdc.inference.pipeline import Pipeline, RemotePipeline
from dask_sdc.inference.weights.store import WeightStore
from tests.inference.pipeline.models import PROMPT, THREADS_OF_ZARR

# Calls that a loop had taken in when it was stopped are never begun.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CLOSED = "expected a running client, got one that is (closing|closed)$"


class Closing:
    """A drafter that has a client closed while it is asked for the third time."""

    def __init__(self, close: Callable[[], Any]) -> None:
        self._close, self._calls = close, 0

    def draft(self, ids: Sequence[int]) -> tuple[int, ...]:
        self._calls += 1
        if self._calls == 3:
            self._close()
        return ()


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Have what is left of a stopped loop collected here, and not during the next test."""
    yield
    gc.collect()


def test_a_client_closed_in_another_thread(cluster4: Client, folder: Path, store: WeightStore) -> None:
    scheduler: Any = cluster4.scheduler
    with Client(scheduler.address, set_as_default=False) as client:
        closing = threading.Thread(target=client.close)
        pipeline = Pipeline(client, folder, stages=2, spares=0, drafter=Closing(closing.start))
        with pytest.raises(ClosedError, match=CLOSED):
            pipeline.generate(PROMPT, 200)
        closing.join()
        for late in (
            lambda: pipeline.generate(PROMPT, 2),
            lambda: next(pipeline.stream(PROMPT, 2)),
            lambda: Pipeline(client, folder),
        ):
            with pytest.raises(ClosedError, match=CLOSED):
                late()
        pipeline.close()


def test_a_client_closed_while_tokens_are_taken(cluster4: Client, folder: Path, store: WeightStore) -> None:
    scheduler: Any = cluster4.scheduler
    with Client(scheduler.address, set_as_default=False) as client:
        pipeline = RemotePipeline(client, folder, stages=2, spares=0)
        tokens = pipeline.stream(PROMPT, 200)
        next(tokens)
        client.close()
        with pytest.raises(ClosedError, match=CLOSED):
            list(tokens)
        with pytest.raises(ClosedError, match=CLOSED):
            pipeline.state()
        pipeline.close()


def test_an_asynchronous_client(store: WeightStore) -> None:
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, timeout=250, clean_kwargs=THREADS_OF_ZARR)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        for streamed in (False, True):
            client = await Client(s.address, asynchronous=True, set_as_default=False)
            ended: list[asyncio.Future[Any]] = []

            def close(client: Client = client, ended: list[asyncio.Future[Any]] = ended) -> None:
                ended.append(asyncio.ensure_future(client.close()))

            pipeline = await Pipeline(client, store, stages=2, spares=0, drafter=Closing(close))
            with pytest.raises(ClosedError, match=CLOSED):
                if streamed:
                    async for _ in pipeline.stream(PROMPT, 200):
                        pass
                else:
                    await pipeline.generate(PROMPT, 200)
            await ended[0]
            await pipeline.close()

    run()
