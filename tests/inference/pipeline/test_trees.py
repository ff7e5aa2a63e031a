"""Trees of drafts on a cluster: the tokens are those of plain decoding, whatever is lost meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

from dask_sdc.faults.stages import StageFault, arm_stage_fault
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.speculative import DraftTree, NGramDrafter
from dask_sdc.inference.weights.store import WeightStore
from tests.inference.pipeline.models import PROMPT, generated

TOKENS = 24
SAMPLED = {"temperature": 0.8, "seed": 7}


@pytest.fixture(scope="module")
def plain(store: WeightStore) -> tuple[int, ...]:
    return generated(store, PROMPT, TOKENS)


class SecondBranch:
    """Drafts what comes, or some of it, and never as the first branch."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = tuple(text)

    def draft(self, ids: Sequence[int]) -> DraftTree:
        at = len(ids) - len(PROMPT)
        right = self.text[at : at + 3]
        wrong = tuple((token + 1) % 97 for token in right)
        return DraftTree.from_drafts([wrong, right[:1] + wrong[:2], right, right[:2] + wrong[:1]])


def in_cluster(workers: int, body: Any) -> None:
    """Run a coroutine function with a client of workers in this process."""

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * workers, timeout=100)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        await body(c)

    run()


def test_the_branch_that_is_right_is_kept(store: WeightStore, plain: tuple[int, ...]) -> None:
    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=3, spares=0, drafter=SecondBranch(plain)) as pipeline:
            done = await pipeline.generate(PROMPT, TOKENS)
            assert done.ids == plain
            # Three drafted tokens and one more per traversal, until there is no room for whole trees.
            assert done.statistics.traversals <= 9
            assert done.statistics.accepted >= TOKENS - 10

    in_cluster(3, body)


@pytest.mark.parametrize("depth", [1, 3])
def test_several_ngrams_change_no_token(store: WeightStore, depth: int) -> None:
    prompt = (5, 6, 7, 8, 5, 6, 9, 5, 6, 7) * 3
    expected, sampled = generated(store, prompt, TOKENS), generated(store, prompt, TOKENS, **SAMPLED)
    drafter = NGramDrafter(n=2, width=3, branches=3)

    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=2, spares=0, drafter=drafter, depth=depth) as pipeline:
            assert (await pipeline.generate(prompt, TOKENS)).ids == expected
            assert (await pipeline.generate(prompt, TOKENS, **SAMPLED)).ids == sampled

    in_cluster(2, body)


def test_audited_trees_are_fed_as_their_first_branch(store: WeightStore, plain: tuple[int, ...]) -> None:
    async def body(c: Client) -> None:
        drafter = SecondBranch(plain)
        async with Pipeline(c, store, stages=2, spares=1, drafter=drafter, audit_rate=1.0) as pipeline:
            done = await pipeline.generate(PROMPT, TOKENS)
            assert (done.ids, done.statistics.accepted) == (plain, 0)

    in_cluster(3, body)


@pytest.mark.parametrize("replay", ["exact", "fast"])
@pytest.mark.parametrize("stage", range(3))
def test_a_stage_is_lost_while_a_tree_is_under_way(
    store: WeightStore, plain: tuple[int, ...], stage: int, replay: str
) -> None:
    async def body(c: Client) -> None:
        drafter = SecondBranch(plain)
        async with Pipeline(c, store, stages=3, spares=2, drafter=drafter, replay=replay) as pipeline:
            for step in (1, 2):
                await arm_stage_fault(pipeline, StageFault("raise", stage, 1 + step))
                done = await pipeline.generate(PROMPT, TOKENS)
                assert done.ids == plain
                report = pipeline.recoveries[-1]
                [loss] = report.losses
                assert (loss.stage, report.attempts) == (stage, 1)
                assert [one.exact for one in report.replays] == [replay == "exact"]
                # One chunk is on record for each traversal, as long as what it committed.
                assert report.replays[0].positions == len(PROMPT) + 4 * step
            assert len(pipeline.recoveries) == 2

    in_cluster(5, body)
