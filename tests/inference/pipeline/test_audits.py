"""Stages that compute wrongly without a sign: an audit finds them, names them, and the tokens are right."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

from dask_sdc.exceptions import GenerationInterrupted, InputError
from dask_sdc.faults.stages import StageFault, arm_shadow_fault, arm_stage_fault
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.receipts import verify
from dask_sdc.inference.session import LossKind
from dask_sdc.inference.speculative import NGramDrafter
from dask_sdc.inference.weights.store import WeightStore
from tests.inference.pipeline.models import PROMPT, generated

COUNT = 20
#: The highest bit of a float32's fraction: half of the number or less, and never anything that is not finite.
BIT = 22


@pytest.fixture(scope="module")
def plain(store: WeightStore) -> tuple[int, ...]:
    return generated(store, PROMPT, COUNT)


def in_cluster(body: Any, workers: int = 5) -> None:
    """Run a coroutine function with a client of workers in this process."""

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * workers, timeout=250)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        await body(c)

    run()


def test_clean_stages_agree_and_every_position_is_covered(store: WeightStore, plain: tuple[int, ...]) -> None:
    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=3, audit_rate=1.0, prefill_chunk=3) as pipeline:
            done = await pipeline.generate(PROMPT, COUNT)
            assert done.ids == plain
            assert done.audited == (len(PROMPT) + COUNT - 1,) * 3
            assert not pipeline.receipts and not pipeline.recoveries and not pipeline.quarantined
            streamed = [token async for token in pipeline.stream(PROMPT, COUNT)]
            assert tuple(streamed) == plain

    in_cluster(body)


def test_speculation_is_audited_too(store: WeightStore) -> None:
    prompt = (5, 6, 7, 8) * 6

    async def body(c: Client) -> None:
        drafter = NGramDrafter(n=3, width=4)
        async with Pipeline(c, store, stages=3, audit_rate=1.0, drafter=drafter, depth=3) as pipeline:
            done = await pipeline.generate(prompt, 40)
            assert done.ids == generated(store, prompt, 40)
            assert min(done.audited) >= len(prompt) + 39
            assert not pipeline.receipts and not pipeline.recoveries

    in_cluster(body)


#: Kind, stage and step. What an old position holds need not matter to the very last one.
SOME = [
    ("activation", 0, 2),
    ("activation", 2, COUNT + 1),
    ("state", 1, 8),
    ("weights", 0, 8),
    ("weights", 2, 2),
]
STEPS = [("activation", 2), ("activation", COUNT + 1), ("state", 8), ("weights", 2), ("weights", COUNT + 1)]
MORE = [(kind, stage, step) for stage in range(3) for kind, step in STEPS if (kind, stage, step) not in SOME]


@pytest.mark.parametrize(
    ("kind", "stage", "step"), [*SOME, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_silent_corruption_is_found_named_and_healed(
    store: WeightStore, plain: tuple[int, ...], kind: str, stage: int, step: int
) -> None:
    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=3, audit_rate=1.0, prefill_chunk=3) as pipeline:
            bad = pipeline.workers[stage]
            domain = pipeline._session.locate(bad)
            await arm_stage_fault(pipeline, StageFault(kind, stage, step, BIT))
            done = await pipeline.generate(PROMPT, COUNT)
            assert done.ids == plain
            assert done.audited == (len(PROMPT) + COUNT - 1,) * 3
            (receipt,) = pipeline.receipts
            assert receipt.suspected_domains == (domain,) and receipt.suspected_workers == (bad,)
            assert (receipt.shard_id, receipt.quarantine_status) == (stage, "committed")
            assert receipt.persistence == ("persistent" if kind == "weights" else "transient")
            assert list(pipeline.quarantined) == [domain] and bad not in pipeline.workers
            (report, *_) = pipeline.recoveries
            assert [(loss.stage, loss.kind) for loss in report.losses] == [(stage, LossKind.EVICTED)]

    in_cluster(body)


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("activation", 1),
        ("weights", 0),
        pytest.param("activation", 0, marks=pytest.mark.slow),
        pytest.param("weights", 1, marks=pytest.mark.slow),
    ],
)
def test_a_stage_that_fails_for_what_it_was_fed_is_not_to_blame(
    store: WeightStore, plain: tuple[int, ...], kind: str, stage: int
) -> None:
    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=3, audit_rate=1.0, prefill_chunk=3) as pipeline:
            domain = pipeline._session.locate(pipeline.workers[stage])
            # The highest bit of the exponent: what comes of it is not finite, perhaps only stages later.
            await arm_stage_fault(pipeline, StageFault(kind, stage, 8, 30))
            done = await pipeline.generate(PROMPT, COUNT)
            assert done.ids == plain
            assert list(pipeline.quarantined) == [domain]
            losses = {loss.stage for report in pipeline.recoveries for loss in report.losses}
            assert losses == {stage}

    in_cluster(body)


@pytest.mark.parametrize("rate", [0.25, pytest.param(0.5, marks=pytest.mark.slow)])
def test_persistent_corruption_is_found_at_lower_rates(
    store: WeightStore, plain: tuple[int, ...], rate: float
) -> None:
    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=3, audit_rate=rate, prefill_chunk=3) as pipeline:
            domain = pipeline._session.locate(pipeline.workers[1])
            await arm_stage_fault(pipeline, StageFault("weights", 1, 5, BIT))
            done = await pipeline.generate(PROMPT, COUNT)
            assert done.ids == plain
            assert list(pipeline.quarantined) == [domain]

    in_cluster(body)


def test_a_spare_that_computes_wrongly_is_named_and_the_stage_stays(
    store: WeightStore, plain: tuple[int, ...]
) -> None:
    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=3, audit_rate=1.0) as pipeline:
            before, (spare,) = pipeline.workers, pipeline.spares
            domain = pipeline._session.locate(spare)
            await arm_shadow_fault(pipeline, spare)
            done = await pipeline.generate(PROMPT, COUNT)
            assert done.ids == plain and pipeline.workers == before
            assert {d for r in pipeline.receipts for d in r.suspected_domains} == {domain}
            assert list(pipeline.quarantined) == [domain] and not pipeline.recoveries
            assert done.audited == (len(PROMPT) + COUNT - 1,) * 3

    in_cluster(body)


def test_other_sessions_of_a_wrong_stage_are_healed_too(store: WeightStore) -> None:
    prompts = [tuple((7 * i + k) % 97 for k in range(8 + i)) for i in range(3)]

    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=3, audit_rate=0.2, prefill_chunk=4) as pipeline:
            await arm_stage_fault(pipeline, StageFault("weights", 1, 12, BIT))
            done = await asyncio.gather(*(pipeline.generate(prompt, COUNT) for prompt in prompts))
            assert [one.ids for one in done] == [generated(store, prompt, COUNT) for prompt in prompts]
            assert len(pipeline.quarantined) == 1

    in_cluster(body)


def test_nobody_is_named_on_two_voices_and_no_token_is_handed_out(store: WeightStore) -> None:
    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=2, spares=0, audit_rate=1.0) as pipeline:
            await arm_stage_fault(pipeline, StageFault("weights", 1, 5, BIT))
            with pytest.raises(GenerationInterrupted, match="nobody can say who is right") as caught:
                await pipeline.generate(PROMPT, COUNT)
            committed = caught.value.committed
            assert len(committed) <= 5 and committed == generated(store, PROMPT, 5)[: len(committed)]
            assert not pipeline.quarantined
            (receipt,) = pipeline.receipts
            assert receipt.verdict == "inconclusive" and receipt.suspected_domains == ()

    in_cluster(body, workers=2)


def test_without_another_domain_there_is_no_audit_and_that_is_said(
    store: WeightStore, plain: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        "dask_sdc.inference.pipeline.audits.logger.warning", lambda text, *given: said.append(text % given)
    )

    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=1, spares=0, audit_rate=1.0) as pipeline:
            done = await pipeline.generate(PROMPT, COUNT)
            assert done.ids == plain and done.audited == (0,)

    in_cluster(body, workers=1)
    assert any("stage 0 is not audited: no worker on another failure domain" in text for text in said)


def test_a_stream_waits_for_its_audits_and_the_ledger_tells_the_story(
    store: WeightStore, plain: tuple[int, ...], tmp_path: Path
) -> None:
    path = tmp_path / "ledger.jsonl"

    async def body(c: Client) -> None:
        async with Pipeline(c, store, stages=3, audit_rate=1.0, ledger=path) as pipeline:
            await arm_stage_fault(pipeline, StageFault("activation", 1, 6, BIT))
            streamed = [token async for token in pipeline.stream(PROMPT, COUNT)]
            assert tuple(streamed) == plain
            done = await pipeline.generate(PROMPT, COUNT)
            assert not verify(done.receipt, PROMPT, plain, model_digest=store.digest)
            assert len(done.receipt.chains) == 3 and len(done.receipt.blocks) == 3
            again = await pipeline.generate(PROMPT, COUNT)
            assert again.receipt.chains == done.receipt.chains

    in_cluster(body)
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds.count("receipt") == 1 and kinds.count("run") == 3


@pytest.mark.parametrize("rate", [-0.1, 1.5, "1", True, float("nan")])
def test_a_bad_rate_is_refused(store: WeightStore, rate: Any) -> None:
    async def body(c: Client) -> None:
        with pytest.raises(InputError, match="rate"):
            Pipeline(c, store, audit_rate=rate)

    in_cluster(body, workers=1)
