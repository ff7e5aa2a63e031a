"""A long link between stages: messages arrive later and in order, and no token changes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

from dask_sdc.exceptions import InputError
from dask_sdc.faults.stages import _LongLink, arm_link_delay
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.speculative import NGramDrafter
from dask_sdc.inference.weights.store import WeightStore
from tests.inference.pipeline.models import generated


def test_messages_are_under_way_side_by_side_and_arrive_in_order() -> None:
    seconds, arrived = 0.05, []

    async def send(*message: Any) -> None:
        arrived.append((message, asyncio.get_running_loop().time()))
        if message == ("b", 0, 1):
            raise OSError("the link broke")

    async def run() -> None:
        link = _LongLink(send, seconds)
        for _ in range(2):  # the second burst comes after the first was delivered
            arrived.clear()
            began = asyncio.get_running_loop().time()
            messages = [(name, 0, k) for k, name in enumerate("abc")]
            for message in messages:
                await link.send(*message)
            assert arrived == []  # the sender did not wait
            assert link._delivery is not None
            await link._delivery
            assert [message for message, _ in arrived] == messages
            assert all(at - began >= seconds for _, at in arrived)

    asyncio.run(run())


def test_a_long_ring_changes_no_token(store: WeightStore) -> None:
    prompt, count, seconds = (5, 6, 7, 8) * 6, 12, 0.03
    expected = generated(store, prompt, count)

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, timeout=100)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        async with Pipeline(c, store, stages=3, spares=0, drafter=NGramDrafter(width=3), depth=3) as pipeline:
            for stage in range(2):
                await arm_link_delay(pipeline, stage, seconds)
            began = time.monotonic()
            done = await pipeline.generate(prompt, count)
            assert done.ids == expected
            assert time.monotonic() - began >= 2 * 2 * seconds  # the prefill, and one traversal at least
            for bad, message in (((2, 1.0), "sends to a next one, got 2"), ((0, -1.0), "seconds: expected")):
                with pytest.raises(InputError, match=message):
                    arm_link_delay(pipeline, *bad)

    run()
