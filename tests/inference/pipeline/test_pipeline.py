"""A pipeline on a cluster in this process: the tokens are those of one process, whatever is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

from dask_sdc.exceptions import (
    CheckpointError,
    ClosedError,
    ContextOverflow,
    CorruptionError,
    InputError,
    InputTypeError,
    NoDomainError,
)
from dask_sdc.faults.stages import StageFault, arm_stage_fault
from dask_sdc.inference.checkpoint import Checkpoint
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.pipeline.worker import NAME, StageWorkerPlugin
from dask_sdc.inference.session import LossKind
from dask_sdc.inference.speculative import NGramDrafter
from dask_sdc.inference.weights.store import WeightStore
from tests.inference.pipeline.models import PROMPT, THREADS_OF_ZARR, generated, left_over

FOUR = [("127.0.0.1", 1)] * 4


@pytest.fixture(scope="module")
def plain(store: WeightStore) -> tuple[int, ...]:
    return generated(store, PROMPT, 32)


def in_cluster(body: Any) -> None:
    """Run a coroutine function with a client of four workers in this process."""

    @gen_cluster(client=True, nthreads=FOUR, timeout=250, clean_kwargs=THREADS_OF_ZARR)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        await body(c)

    run()


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_tokens_are_those_of_one_process(store: WeightStore, plain: tuple[int, ...], stages: int) -> None:
    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=stages, spares=0) as pipeline:
            assert len(pipeline.workers) == stages
            done = await pipeline.generate(PROMPT, 32)
            assert (done.ids, done.prompt, done.stopped) == (plain, PROMPT, False)
            for options in ({"temperature": 0.8, "seed": 7}, {"temperature": 1.5, "top_p": 0.7, "seed": 1}):
                sampled = await pipeline.generate(PROMPT, 16, **options)
                assert sampled.ids == generated(store, PROMPT, 16, **options)
            streamed = [token async for token in pipeline.stream(PROMPT, 8)]
            assert tuple(streamed) == plain[:8]

    in_cluster(body)


def test_a_stop_token_ends_the_text(store: WeightStore, plain: tuple[int, ...]) -> None:
    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=2, spares=0) as pipeline:
            end = plain[5]
            done = await pipeline.generate(PROMPT, 32, stop=[end])
            assert done.ids == plain[: plain.index(end) + 1]
            assert done.stopped

    in_cluster(body)


@pytest.mark.parametrize("depth", [1, 3])
def test_speculation_changes_no_token(store: WeightStore, depth: int) -> None:
    prompt = (5, 6, 7, 8) * 6
    drafter = NGramDrafter(n=3, width=4)

    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=3, spares=0, drafter=drafter, depth=depth) as pipeline:
            done = await pipeline.generate(prompt, 40)
            assert done.ids == generated(store, prompt, 40)
            assert done.statistics.traversals > 0
            assert done.statistics.committed >= 39
            sampled = await pipeline.generate(prompt, 24, temperature=0.7, seed=3)
            assert sampled.ids == generated(store, prompt, 24, temperature=0.7, seed=3)

    in_cluster(body)


class Nonsense:
    def __init__(self, drafts: Any) -> None:
        self.drafts = drafts

    def draft(self, ids: Sequence[int]) -> Any:
        return self.drafts


@pytest.mark.parametrize(
    ("drafts", "error", "match"),
    [
        ((5, 97), InputError, r"drafter: expected ids in 0\.\.96, got \(5, 97\)"),
        ((-1,), InputError, "drafter: expected token ids >= 0, got -1"),
        (None, InputTypeError, "drafter: expected a sequence of int, got None"),
    ],
)
def test_a_drafter_of_nonsense_is_named_and_no_stage(
    store: WeightStore, drafts: Any, error: type[Exception], match: str
) -> None:
    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=2, spares=0, drafter=Nonsense(drafts), depth=2) as pipeline:
            with pytest.raises(error, match=match):
                await pipeline.generate(PROMPT, 8)
            assert pipeline.recoveries == []

    in_cluster(body)


def test_several_sessions_at_once_and_prefill_in_chunks(store: WeightStore) -> None:
    prompts = [tuple((7 * i + k) % 97 for k in range(20 + 9 * i)) for i in range(4)]

    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=3, spares=0, prefill_chunk=7) as pipeline:
            done = await asyncio.gather(*(pipeline.generate(prompt, 12) for prompt in prompts))
            assert [one.ids for one in done] == [generated(store, prompt, 12) for prompt in prompts]

    in_cluster(body)


def test_sessions_wait_for_memory_and_too_long_ones_are_refused(
    store: WeightStore, plain: tuple[int, ...]
) -> None:
    async def body(c: Client) -> None:
        positions = 60
        part = Pipeline(c, store, boundaries=[2, 4], spares=0, kv_bytes=2 * positions * 2 * 2 * 16 * 4)
        async with part as pipeline:
            budget = pipeline._running.budget
            assert 40 <= budget < 256
            with pytest.raises(ContextOverflow, match=f"at most {budget} positions"):
                await pipeline.generate(PROMPT, budget)
            done = await asyncio.gather(*(pipeline.generate(PROMPT, 30) for _ in range(3)))
            assert [one.ids for one in done] == [plain[:30]] * 3
            assert pipeline._running._taken == 0
            with pytest.raises(ContextOverflow, match="at most 256 positions"):
                await pipeline.generate(PROMPT, 249)

    in_cluster(body)


def test_a_checkpoint_goes_on_and_refuses_others(store: WeightStore, plain: tuple[int, ...]) -> None:
    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=2, spares=0) as pipeline:
            first = await pipeline.generate(PROMPT, 20)
            assert Checkpoint.from_bytes(first.checkpoint.to_bytes()) == first.checkpoint
        async with Pipeline(c, store, stages=3, spares=0) as pipeline:
            rest = await pipeline.generate(PROMPT, 12, resume=first.checkpoint)
            assert rest.ids == plain[20:]
            for changed, message in (
                ({"temperature": 0.5}, "temperature"),
                ({"seed": 4}, "seed"),
                ({"stop": [1]}, "stop"),
            ):
                with pytest.raises(CheckpointError, match=message):
                    await pipeline.generate(PROMPT, 4, resume=first.checkpoint, **changed)
            with pytest.raises(CheckpointError, match="prompt"):
                await pipeline.generate(PROMPT[:-1], 4, resume=first.checkpoint)

    in_cluster(body)


def test_bad_input_is_refused_before_anything_is_sent(store: WeightStore) -> None:
    async def body(c: Client) -> None:
        for options, message in (
            ({"stages": 0}, "stages: expected an int of at least 1, got 0"),
            ({"spares": -1}, "spares"),
            ({"timeout": float("nan")}, "timeout"),
            ({"prefill_chunk": True}, "prefill_chunk"),
            ({"boundaries": [6]}, "boundaries"),
            ({"boundaries": [2], "stages": 3}, "expected 2 stages by boundaries"),
            ({"replay": np.array(["exact", "fast"])}, "replay: expected 'exact' or 'fast', got array"),
            ({"spare_weights": "ram"}, "spare_weights: expected 'memory' or 'disk', got 'ram'"),
            ({"name": "../x"}, "name: expected text that a folder can be called by, got '../x'"),
            ({"name": 5}, "name: expected text that a folder can be called by, got 5"),
            ({"boundaries": 3.5}, "boundaries: expected rising layers between 0 and 6, got 3.5"),
            ({"journal_bytes": 2**64}, "journal_bytes: expected an int below"),
        ):
            with pytest.raises(InputError, match=message):
                Pipeline(c, store, **options)
        for options, message in (
            ({"spill": 5}, "spill: expected a path, got int"),
            ({"ledger": True}, "ledger: expected a path, got bool"),
            ({"drafter": "ngram"}, "drafter: expected an object with draft, got 'ngram'"),
            ({"drafter": NGramDrafter}, "drafter: expected an object with draft, got <class"),
            ({"tokenizer": 1}, "tokenizer: expected an object with encode and decode, got 1"),
        ):
            with pytest.raises(InputTypeError, match=message):
                Pipeline(c, store, **options)
        with pytest.raises(NoDomainError, match="expected 5 workers"):
            await Pipeline(c, store, stages=5)
        async with Pipeline(c, store, stages=2, spares=0) as pipeline:
            for arguments, message in (
                (((), 4), "prompt: expected at least one token"),
                ((tuple(range(98)), 4), r"ids in 0\.\.96, got 97"),
                (("text", 4), "no tokenizer"),
                ((PROMPT, 0), "max_new_tokens"),
                ((PROMPT, 4.0), "max_new_tokens"),
            ):
                with pytest.raises(InputError, match=message):
                    await pipeline.generate(*arguments)
            for options, message in (
                ({"temperature": -1}, "temperature"),
                ({"top_p": 0}, "top_p"),
                ({"seed": -1}, "seed"),
            ):
                with pytest.raises(InputError, match=message):
                    await pipeline.generate(PROMPT, 4, **options)
            with pytest.raises(InputError, match="expected settings among"):
                pipeline.stream(PROMPT, 4, width=3)
        with pytest.raises(ClosedError):
            await pipeline.generate(PROMPT, 4)
        await pipeline.close()

    in_cluster(body)


def test_nothing_is_left_on_the_workers(store: WeightStore) -> None:
    @gen_cluster(client=True, nthreads=FOUR, timeout=250, clean_kwargs=THREADS_OF_ZARR)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        async with Pipeline(c, store, stages=3, spares=1) as pipeline:
            await pipeline.generate(PROMPT, 4)
            seats = [seat for w in workers for seat in w.plugins["dask_sdc-stages"].seats.values()]
            assert len(seats) == 3
            assert [seat.host.sessions for seat in seats] == [()] * 3
        assert [w.plugins["dask_sdc-stages"].seats for w in workers] == [{}] * 4
        assert [w.plugins["dask_sdc-stages"].spares for w in workers] == [{}] * 4

    run()


def test_a_generation_that_is_cancelled_disturbs_no_other(store: WeightStore, plain: tuple[int, ...]) -> None:
    @gen_cluster(client=True, nthreads=FOUR, timeout=250, clean_kwargs=THREADS_OF_ZARR)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        async with Pipeline(c, store, stages=2, spares=0) as pipeline:
            seats = [seat for w in workers for seat in w.plugins["dask_sdc-stages"].seats.values()]
            [head] = [seat for seat in seats if seat.host.number == 0]
            send, reached, go_on = head.send, asyncio.Event(), asyncio.Event()

            async def waiting(*arguments: Any) -> bool:
                reached.set()
                await go_on.wait()
                return await send(*arguments)

            head.send = waiting
            task = asyncio.ensure_future(pipeline.generate(PROMPT, 16))
            await reached.wait()
            task.cancel()
            other = asyncio.ensure_future(pipeline.generate(PROMPT, 16))
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await other).ids == plain[:16]
            running = pipeline._running
            assert (pipeline.recoveries, running._waiting, running._returned) == ([], {}, set())
            assert running._settled == running._fed
            assert [seat.host.sessions for seat in seats] == [()] * 2

    run()


@pytest.mark.parametrize("stage", [0, 1])
def test_what_comes_after_a_lost_message_and_does_not_fit_is_no_fault_of_who_hears_it(
    store: WeightStore, stage: int
) -> None:
    """Pieces of a prompt, several in flight: the next one begins where the stage has nothing yet."""

    async def body(c: Client) -> None:
        drafter = NGramDrafter(n=2, width=3)
        options: dict[str, Any] = {"prefill_chunk": 3, "drafter": drafter, "depth": 2, "timeout": 5}
        async with Pipeline(c, store, stages=3, spares=1, **options) as pipeline:
            before = pipeline.workers
            await arm_stage_fault(pipeline, StageFault("drop", stage, 1))
            assert (await pipeline.generate(PROMPT, 8)).ids == generated(store, PROMPT, 8)
            (report,) = pipeline.recoveries
            assert [(loss.stage, loss.kind) for loss in report.losses] == [(stage + 1, LossKind.GAP)]
            assert pipeline.workers == before

    in_cluster(body)


def test_a_lost_message_is_a_gap_though_others_came_after_it(
    store: WeightStore, plain: tuple[int, ...]
) -> None:
    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=3, spares=1, timeout=1.0) as pipeline:
            before = pipeline.workers
            await arm_stage_fault(pipeline, StageFault("drop", 0, 9))
            done = await asyncio.gather(*(pipeline.generate(PROMPT, 24) for _ in range(3)))
            assert [one.ids for one in done] == [plain[:24]] * 3
            [report] = pipeline.recoveries
            assert [(loss.stage, loss.kind) for loss in report.losses] == [(1, LossKind.GAP)]
            assert pipeline.workers == before

    in_cluster(body)


def test_damaged_weights_and_no_place_to_spill_are_refused_and_nothing_is_left(damaged: Path) -> None:
    async def body(c: Client) -> None:
        with pytest.raises(CorruptionError, match=r"layers\.1\.mlp\.up\.weight is damaged"):
            await Pipeline(c, damaged, stages=3, spares=1)
        assert not any((await c.run(left_over)).values())
        no_folder = next(path for path in damaged.iterdir() if path.is_file())
        expected = "spill: expected a folder that worker .* can write to, got FileExistsError"
        with pytest.raises(InputError, match=expected):
            await Pipeline(c, damaged, stages=1, spares=0, spill=no_folder)

    in_cluster(body)


def test_a_start_that_is_cancelled_leaves_nothing(store: WeightStore) -> None:
    @gen_cluster(client=True, nthreads=FOUR, timeout=250, clean_kwargs=THREADS_OF_ZARR)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        async def opened() -> Pipeline:
            return await Pipeline(c, store, stages=3, spares=1)

        plugins: list[StageWorkerPlugin] = []
        start = asyncio.ensure_future(opened())
        while not any(plugin._loading for plugin in plugins):
            await asyncio.sleep(0)
            plugins = [worker.plugins[NAME] for worker in workers if NAME in worker.plugins]
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        while any(plugin._loading for plugin in plugins):
            await asyncio.sleep(0)
        assert not any(map(left_over, workers))
        async with Pipeline(c, store, stages=3, spares=1) as pipeline:
            assert (await pipeline.generate(PROMPT, 4)).ids == generated(store, PROMPT, 4)

    run()
