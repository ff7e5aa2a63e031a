"""A stage that computed wrongly and is then lost: two spares contradict its record, which is taken back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

from dask_sdc.exceptions import GenerationInterrupted, ReplayMismatch
from dask_sdc.faults.stages import StageFault, arm_stage_fault
from dask_sdc.inference.journal import ChunkRecord, boundary_digest, boundary_sketch
from dask_sdc.inference.ops import Outvoted
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.pipeline.audits import Located
from dask_sdc.inference.pipeline.evidence import mismatch_of, receipt_of
from dask_sdc.inference.weights.store import WeightStore
from dask_sdc.policy.verdict import Outcome
from tests.inference.pipeline.models import PROMPT, generated

COUNT, WRONG, LOST = 20, 5, 14
#: A bit of a float32's exponent, which changes tokens here, and one of its fraction, which changes none.
BIT, SMALL = 27, 2


@pytest.fixture(scope="module")
def plain(store: WeightStore) -> tuple[int, ...]:
    return generated(store, PROMPT, COUNT)


def in_cluster(body: Any, workers: int = 5) -> None:
    """Run a coroutine function with a client of workers in this process."""

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * workers, timeout=250)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        await body(c)

    run()


async def arm(pipeline: Pipeline, kind: str, stage: int, bit: int = BIT) -> None:
    """Let a stage compute wrongly at one step, and fail at a later one."""
    await arm_stage_fault(pipeline, StageFault(kind, stage, WRONG, bit))
    await arm_stage_fault(pipeline, StageFault("raise", stage, LOST))


@pytest.mark.parametrize(("kind", "stage"), [("weights", 0), ("activation", 1), ("state", 2)])
def test_what_a_lost_stage_had_computed_wrongly_is_taken_back(
    store: WeightStore, plain: tuple[int, ...], tmp_path: Path, kind: str, stage: int
) -> None:
    path = tmp_path / "ledger.jsonl"

    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=3, spares=2, prefill_chunk=3, ledger=path) as pipeline:
            bad, spares = pipeline.workers[stage], pipeline.spares
            domain = pipeline._session.locate(bad)
            await arm(pipeline, kind, stage)
            done = await pipeline.generate(PROMPT, COUNT)
            assert done.ids == plain
            (report,) = pipeline.recoveries
            (outvoted,) = report.outvoted
            assert {outvoted.holder, outvoted.other} == set(spares)
            assert report.rolled_back == {outvoted.session: outvoted.recorded.position}
            (receipt,) = pipeline.receipts
            assert receipt.suspected_domains == (domain,) and receipt.suspected_workers == (bad,)
            assert (receipt.shard_id, receipt.quarantine_status) == (stage, "committed")
            assert receipt.persistence is None  # it could not be asked again
            assert list(pipeline.quarantined) == [domain]
            # The spare that was right and was taken out of its seat is good for another loss.
            await arm_stage_fault(pipeline, StageFault("raise", stage, LOST))
            assert (await pipeline.generate(PROMPT, COUNT)).ids == plain
            assert pipeline.workers[stage] == outvoted.other

    in_cluster(body)
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds.count("receipt") == 1


def test_all_sessions_of_the_stage_are_taken_back(store: WeightStore) -> None:
    prompts = [tuple((7 * i + k) % 97 for k in range(8 + i)) for i in range(3)]

    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=3, spares=2, prefill_chunk=4) as pipeline:
            await arm_stage_fault(pipeline, StageFault("weights", 1, 12, BIT))
            await arm_stage_fault(pipeline, StageFault("raise", 1, 40))
            done = await asyncio.gather(*(pipeline.generate(prompt, COUNT) for prompt in prompts))
            assert [one.ids for one in done] == [generated(store, prompt, COUNT) for prompt in prompts]
            assert len(pipeline.quarantined) == len(pipeline.receipts) == 1

    in_cluster(body)


def test_a_stream_goes_on_where_what_was_handed_out_was_right(
    store: WeightStore, plain: tuple[int, ...]
) -> None:
    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=3, spares=2, prefill_chunk=3) as pipeline:
            await arm(pipeline, "activation", 1, SMALL)
            assert tuple([token async for token in pipeline.stream(PROMPT, COUNT)]) == plain
            (report,) = pipeline.recoveries
            assert len(report.rolled_back) == 1

    in_cluster(body)


def test_a_stream_that_handed_out_wrong_tokens_says_so(store: WeightStore, plain: tuple[int, ...]) -> None:
    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=3, spares=2, prefill_chunk=3) as pipeline:
            await arm(pipeline, "weights", 1)
            given: list[int] = []
            with pytest.raises(GenerationInterrupted, match="wrong after it was handed out") as caught:
                async for token in pipeline.stream(PROMPT, COUNT):
                    given.append(token)
            right = next(k for k, token in enumerate(given) if token != plain[k])
            assert caught.value.committed == plain[: right + 1]
            checkpoint = caught.value.checkpoint
            rest = await pipeline.generate(PROMPT, COUNT - right - 1, resume=checkpoint)
            assert (*checkpoint.committed, *rest.ids) == plain

    in_cluster(body)


def test_one_spare_alone_outvotes_nobody(store: WeightStore) -> None:
    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=3, spares=1, prefill_chunk=3) as pipeline:
            await arm(pipeline, "activation", 1)
            with pytest.raises(ReplayMismatch, match="stage 1") as caught:
                await pipeline.generate(PROMPT, COUNT)
            proved = caught.value.checkpoint.committed
            assert proved == generated(store, PROMPT, COUNT)[: len(proved)]
            assert not pipeline.quarantined and not pipeline.receipts

    in_cluster(body, workers=4)


@pytest.mark.parametrize(
    ("fingerprints", "sketched", "outcome"),
    [
        ("aaa", False, Outcome.SUSPECT),
        ("abb", False, Outcome.ENVIRONMENT),
        ("abb", True, Outcome.SUSPECT),
    ],
)
def test_rounding_of_another_environment_accuses_nobody(
    fingerprints: str, sketched: bool, outcome: Outcome
) -> None:
    arrays = [np.ones((1, 2, 8), "f4"), np.full((1, 2, 8), 2, "f4")]
    recorded, made = (
        ChunkRecord(3, 4, 2, 2, boundary_digest(array), (), boundary_sketch(array) if sketched else b"")
        for array in arrays
    )
    where = {name: Located(name, fingerprint) for name, fingerprint in zip("xyz", fingerprints, strict=True)}
    mismatch = mismatch_of(Outvoted(1, "s", recorded, made, "y", "z"), "x", where.__getitem__)
    decision = mismatch.finding.decision
    assert decision.outcome is outcome
    assert decision.suspects == (("x",) if outcome is Outcome.SUSPECT else ())
    receipt = receipt_of(mismatch, "not_requested")
    assert (receipt.primary_worker, receipt.audit_worker, receipt.witness_worker) == ("x", "y", "z")


def test_equal_results_within_rounding_are_no_mismatch() -> None:
    array = np.random.default_rng(0).normal(size=(1, 2, 8)).astype("f4")
    recorded, made = (
        ChunkRecord(3, 4, 2, 2, boundary_digest(made), (), boundary_sketch(made))
        for made in (array, array * np.float32(1 + 1e-6))
    )
    assert recorded.digest != made.digest
    where = {"x": Located("x", "a"), "y": Located("y", "b"), "z": Located("z", "b")}
    mismatch = mismatch_of(Outvoted(1, "s", recorded, made, "y", "z"), "x", where.__getitem__)
    assert mismatch.finding.decision.outcome is Outcome.AGREE
