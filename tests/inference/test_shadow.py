"""Shadow audits are drawn as promised, and nobody is accused on two voices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError
from dask_sdc.inference.journal import ChunkRecord, boundary_sketch
from dask_sdc.inference.session import SessionState
from dask_sdc.inference.shadow import (
    ShadowAction,
    ShadowAudit,
    compare_records,
    first_divergence,
    judge_shadow,
    voice,
)
from dask_sdc.policy.verdict import Closeness, Outcome, Persistence, Status


@given(
    st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, 1.0]),
    st.integers(0, 99),
    st.lists(st.sampled_from("xyz"), min_size=1, max_size=300),
)
def test_every_domain_has_its_share_and_no_long_gap(rate: float, seed: int, domains: list[str]) -> None:
    audit = ShadowAudit(rate, seed)
    drawn: dict[str, list[bool]] = {}
    for chunk, domain in enumerate(domains):
        drawn.setdefault(domain, []).append(audit.draw(domain, chunk))
    for domain, draws in drawn.items():
        assert abs(sum(draws) - rate * len(draws)) < 2
        if rate:
            gaps = "".join("x" if draw else "." for draw in draws).split("x")
            assert max(map(len, gaps)) <= np.ceil(1 / rate)
            assert audit.unaudited(domain) == len(gaps[-1])


def test_a_refunded_audit_falls_due_at_once() -> None:
    audit = ShadowAudit(0.1)
    chunk = 0
    while not audit.draw("x", chunk):
        chunk += 1
    audit.refund("x")
    assert audit.draw("x", chunk + 1)
    with pytest.raises(InputError):
        ShadowAudit(1.5)


def records(*digests: str, sketch: np.ndarray | None = None) -> list[ChunkRecord]:
    raw = b"" if sketch is None else boundary_sketch(sketch)
    return [
        ChunkRecord(10 + k, 2 * k, 2, 2, digest.encode().ljust(16), (), raw)
        for k, digest in enumerate(digests)
    ]


SESSION = SessionState("a", (1,), chunks=(), boundaries={})
RIGHT, WRONG = records("p", "q", "r", "s"), records("p", "x", "y", "z")


def judge(
    primary: list[ChunkRecord], audit: list[ChunkRecord], *further: list[ChunkRecord], **options: object
):
    names = ("witness", "rerun_primary", "rerun_audit")
    domains = ("three", "one", "two")
    others = {n: voice(n, d, f) for n, d, f in zip(names, domains, further, strict=False)}
    first = voice("primary", "one", primary), voice("audit", "two", audit)
    return judge_shadow(SESSION, 1, *first, **others, **options)  # type: ignore[arg-type]


def test_agreement() -> None:
    finding = judge(RIGHT, RIGHT)
    assert (finding.action, finding.decision.outcome) == (ShadowAction.NOTHING, Outcome.AGREE)
    assert (finding.session, finding.stage, finding.chunk, finding.position) == ("a", 1, 13, -1)


def test_a_mismatch_asks_for_three_more_voices() -> None:
    finding = judge(WRONG, RIGHT)
    assert finding.action is ShadowAction.ASK
    assert finding.decision.needs == ("witness", "rerun_primary", "rerun_audit")


@pytest.mark.parametrize(
    ("rerun", "persistence"), [(RIGHT, Persistence.TRANSIENT), (WRONG, Persistence.PERSISTENT)]
)
def test_a_wrong_stage_is_evicted_back_to_the_first_difference(
    rerun: list[ChunkRecord], persistence: Persistence
) -> None:
    finding = judge(WRONG, RIGHT, RIGHT, rerun, RIGHT)
    assert (finding.action, finding.position) == (ShadowAction.EVICT, 2)
    assert finding.decision.persistence is persistence
    # Only the last chunks were computed again: all since the last clean audit is in doubt.
    assert judge(WRONG, RIGHT[2:], RIGHT, rerun, RIGHT).position == 0
    assert judge(WRONG[2:], RIGHT[2:], RIGHT, rerun, RIGHT, clean=4).position == 4


def test_a_wrong_spare_is_dropped() -> None:
    finding = judge(RIGHT, WRONG, RIGHT, RIGHT, WRONG)
    assert finding.action is ShadowAction.DROP
    assert finding.decision.suspects == ("two",)


def test_nobody_is_named_without_a_witness_or_with_three_answers() -> None:
    for witness in ([], records("1", "2", "3", "4")):
        finding = judge(WRONG, RIGHT, witness, WRONG, RIGHT)
        assert (finding.action, finding.decision.outcome) == (ShadowAction.NOTHING, Outcome.DEFERRED)


def test_a_spare_that_was_lost_is_skipped() -> None:
    assert voice("audit", "two", None, status=Status.ERROR).status == Status.ERROR
    assert judge(RIGHT, []).decision.reason == "skipped:audit_missing"


def test_rounding_of_another_environment_is_no_mismatch() -> None:
    a = np.random.default_rng(0).normal(size=(1, 2, 50))
    ours, theirs = records("s", sketch=a)[0], records("t", sketch=a * (1 + 1e-6))[0]
    assert compare_records(ours, ours) is Closeness.IDENTICAL
    assert compare_records(ours, theirs) is Closeness.WITHIN
    assert compare_records(ours, records("t", sketch=a * 1.01)[0]) is Closeness.OUTSIDE
    assert compare_records(ours, replace(theirs, sketch=b"")) is Closeness.OUTSIDE
    first = voice("primary", "one", [ours], fingerprint="a")
    assert judge_shadow(SESSION, 0, first, voice("audit", "two", [theirs])).decision.outcome is Outcome.AGREE


def test_first_divergence() -> None:
    assert first_divergence(RIGHT, RIGHT) is None
    assert first_divergence(RIGHT, []) is None
    assert first_divergence(WRONG, RIGHT) == WRONG[1]
    assert first_divergence(WRONG, RIGHT[2:]) == WRONG[2]
