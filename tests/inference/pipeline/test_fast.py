"""Fast replays on a cluster: long chunks through BLAS, proved by sketch, and the text goes on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

from dask_sdc.exceptions import InputError
from dask_sdc.faults.stages import StageFault, arm_spare_fault, arm_stage_fault
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.pipeline import ops as cluster_ops
from dask_sdc.inference.session import LossKind
from dask_sdc.inference.speculative import NGramDrafter
from dask_sdc.inference.weights.store import WeightStore
from tests.inference.pipeline.models import PROMPT, generated

TOKENS = 24


@pytest.fixture(scope="module")
def plain(store: WeightStore) -> tuple[int, ...]:
    return generated(store, PROMPT, TOKENS)


def in_cluster(workers: int, body: Any) -> None:
    """Run a coroutine function with a client of workers in this process."""

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * workers, timeout=100)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        await body(c)

    run()


@pytest.mark.parametrize("stage", range(3))
def test_a_replaced_stage_is_fed_in_long_chunks(
    store: WeightStore, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_ops, "_WIDE", 12)
    prompt = (5, 6, 7, 8) * 5
    expected = generated(store, prompt, TOKENS)

    async def body(c: Client) -> None:
        drafter = NGramDrafter(width=4)
        async with Pipeline(
            c, store, stages=3, spares=1, replay="fast", drafter=drafter, prefill_chunk=8
        ) as pipeline:
            await arm_stage_fault(pipeline, StageFault("raise", stage, 9))
            done = await pipeline.generate(prompt, TOKENS)
            assert done.ids == expected
            [report] = pipeline.recoveries
            [replay] = report.replays
            assert (replay.stage, replay.exact) == (stage, False)
            assert replay.chunks < 9
            assert 0 < replay.error < 1e-5
            assert replay.tokens > 0 or stage < 2
            assert report.inexact == {replay.session}

    in_cluster(4, body)


def test_a_spare_with_one_wrong_bit_is_refused_and_the_next_one_taken(
    store: WeightStore, plain: tuple[int, ...]
) -> None:
    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=3, spares=2, replay="fast") as pipeline:
            first, second = pipeline.spares
            await arm_spare_fault(pipeline, first, 1, bit=31)
            await arm_stage_fault(pipeline, StageFault("raise", 1, 12))
            done = await pipeline.generate(PROMPT, TOKENS)
            assert done.ids == plain
            [report] = pipeline.recoveries
            assert set(report.refused) == {first}
            assert "stage 1" in report.refused[first]
            assert "expected the sketch that stage 2 recorded within 0.0001" in report.refused[first]
            assert (report.placed, pipeline.workers[1]) == ({1: second}, second)

    in_cluster(5, body)


def test_what_cannot_be_armed_is_refused(store: WeightStore, plain: tuple[int, ...]) -> None:
    async def body(c: Client) -> None:
        with pytest.raises(InputError, match="replay: expected 'exact' or 'fast', got 'slow'"):
            Pipeline(c, store, replay="slow")
        with pytest.raises(InputError, match="expected replay='exact' with audits"):
            Pipeline(c, store, replay="fast", audit_rate=0.1)
        async with Pipeline(c, store, stages=2, spares=0) as pipeline:
            with pytest.raises(InputError, match="expected one of the spares"):
                arm_spare_fault(pipeline, pipeline.workers[0], 0)

    in_cluster(2, body)


@pytest.mark.slow
def test_killed_stages_one_after_the_other(
    fresh_cluster: Callable[[int], Client], store: WeightStore, plain: tuple[int, ...]
) -> None:
    """The second one is fed from what the first replay left, so nothing can be equal bit by bit any more."""
    client = fresh_cluster(5)
    with Pipeline(client, store, stages=3, spares=2, timeout=5.0, replay="fast") as pipeline:
        pids = client.run(os.getpid)
        tokens = []
        for token in pipeline.stream(PROMPT, TOKENS):
            tokens.append(token)
            if len(tokens) in (7, 15):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[pipeline.workers[1 if len(tokens) == 7 else 2]], signal.SIGKILL)
        assert tuple(tokens) == plain
        losses = [(loss.stage, loss.kind) for report in pipeline.recoveries for loss in report.losses]
        assert losses == [(1, LossKind.UNREACHABLE), (2, LossKind.UNREACHABLE)]
        assert all(0 < replay.error < 1e-5 for r in pipeline.recoveries for replay in r.replays)
