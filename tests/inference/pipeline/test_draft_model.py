"""A small model that drafts: what it guesses, what it remembers, and that it works beside the event loop."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

from dask_sdc.exceptions import InputError
from dask_sdc.inference.draft_model import GreedyGuess
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.speculative import ModelDrafter
from dask_sdc.inference.weights.store import WeightStore, convert
from tests.inference.pipeline.models import CONFIG, PROMPT, generated
from tests.inference.weights.tiny import MemorySource


@pytest.fixture(scope="module")
def plain(store: WeightStore) -> tuple[int, ...]:
    return generated(store, PROMPT, 24)


def test_guesses_are_greedy_whatever_was_seen_before(store: WeightStore, plain: tuple[int, ...]) -> None:
    guess, text = GreedyGuess(store), (*PROMPT, *plain)
    for end, width in ((8, 3), (8, 3), (12, 5), (10, 2), (31, 1)):
        assert guess(text[:end], width) == text[end : end + width]
    assert guess((9, 9, 9, 1), 4) == generated(store, (9, 9, 9, 1), 4)
    with pytest.raises(InputError, match=r"ids in 0\.\.96 and a width in 1\.\.255, got 1 up to 97"):
        guess((97,), 3)


def test_a_window_that_was_left_behind_is_read_again(tmp_path: Path) -> None:
    config = replace(CONFIG, sliding_window=(5,) * 6)
    convert(MemorySource(config, text=None), tmp_path / "window.zarr")
    store = WeightStore.open(tmp_path / "window.zarr")
    guess, long = GreedyGuess(store), tuple((7 * k) % 97 for k in range(250))
    assert len(guess(long, 3)) == 3
    # More than the context holds beside the draft: the first ids are left out.
    assert guess((1, 2, *long), 100) == GreedyGuess(store)(long[252 - 254 + 100 - 2 :], 100)
    assert guess(long[:20], 3) == generated(store, long[:20], 3)


@pytest.mark.parametrize("context", [None, 6])
def test_a_model_drafts_beside_the_event_loop(
    store: WeightStore, plain: tuple[int, ...], context: int | None
) -> None:
    model, threads = GreedyGuess(store), set()

    def guess(ids: tuple[int, ...], width: int) -> tuple[int, ...]:
        threads.add(threading.current_thread())
        return model(ids, width)

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, timeout=100)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        drafter: Any = ModelDrafter(guess, width=3, draft_ctx=context)
        async with Pipeline(c, store, stages=2, spares=0, drafter=drafter) as pipeline:
            done = await pipeline.generate(PROMPT, 24)
            assert done.ids == plain
            assert threading.current_thread() not in threads and threads
            if context is None:  # the same model, seeing all: every draft is right
                assert done.statistics.acceptance == 1.0
                assert done.statistics.tokens_per_traversal > 3

    run()
