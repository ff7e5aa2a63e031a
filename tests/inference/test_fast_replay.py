"""Fast replays: wide chunks that round otherwise, compared by sketch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace

import numpy as np
import pytest

from dask_sdc.exceptions import GenerationInterrupted, ReplayMismatch
from dask_sdc.inference.heal import RecoveryOps, RecoveryReport, SessionState, StageReport, run_recovery
from dask_sdc.inference.journal import ChunkRecord, DigestLog, Journal, boundary_digest, boundary_sketch

D, STAGES, WIDE = 64, 3, 16


class Stage:
    """A recurrent layer in float32 whose products go through BLAS."""

    def __init__(self, weights: np.ndarray) -> None:
        self.weights = weights
        self.state: list[np.ndarray] = []
        self.journal, self.inputs = Journal(1 << 24), DigestLog()

    def forward(self, record: ChunkRecord, x: np.ndarray) -> tuple[ChunkRecord, np.ndarray]:
        sketch = boundary_sketch(x)
        self.inputs.append(replace(record, digest=boundary_digest(x), sketch=sketch, tokens=()))
        mixed = x @ self.weights.T  # (1, T, D)
        y = np.empty_like(x)
        for t in range(x.shape[1]):
            before = self.state[-1] if self.state else np.zeros(D, "f4")
            self.state.append(np.tanh(mixed[0, t] + np.float32(0.5) * before))
            y[0, t] = self.state[-1]
        sketch = boundary_sketch(y)
        digest = self.journal.append(record.index, record.position, y, sketch=sketch)
        return replace(record, digest=digest, sketch=sketch), y

    def truncate(self, position: int) -> None:
        del self.state[position:]
        self.journal.truncate(position)
        self.inputs.truncate(position)


class Fast(RecoveryOps):
    def __init__(self, spares: Sequence[np.ndarray] = (), sketches: bool = True) -> None:
        rng = np.random.default_rng(0)
        self.weights = [(rng.normal(size=(D, D)) / np.sqrt(D)).astype("f4") for _ in range(STAGES)]
        self.stages = [Stage(weights) for weights in self.weights]
        self.spares = list(spares)
        self.lost: set[int] = set()
        self.fed = Journal(1 << 24)
        self.outputs: list[DigestLog] = [DigestLog() for _ in range(STAGES)]
        self.exactness: list[bool] = []
        for index, width in enumerate([20, 20, *[1] * 20, 4, 4]):
            self.feed(index, width, kept=2 if width == 4 else width)
        if not sketches:
            for log in [self.outputs[-1], *(stage.inputs for stage in self.stages)]:
                log._records = [replace(record, sketch=b"") for record in log.records]

    def feed(self, index: int, width: int, kept: int) -> None:
        position = self.fed.position
        x = np.random.default_rng(index).normal(size=(1, width, D)).astype("f4")
        self.fed.append(index, position, x)
        record = ChunkRecord(index, position, width, width)
        for stage, log in zip(self.stages, self.outputs, strict=True):
            output, x = stage.forward(record, x)
            log.append(output)
        for part in (self.fed, *self.stages, *self.outputs):
            part.truncate(position + kept)

    def session(self, exact: bool = True) -> SessionState:
        outputs = {STAGES - 1: self.outputs[-1].records}
        return SessionState("s", chunks=self.fed.records, boundaries=outputs, exact=exact)

    def heal(self, *, exact: bool, session: SessionState | None = None) -> RecoveryReport:
        session = session or self.session()
        return asyncio.run(run_recovery(self, [session], blocks=["w"] * STAGES, exact=exact))

    def lose(self, stage: int, spare: np.ndarray | None = None) -> list[np.ndarray]:
        self.lost.add(stage)
        self.spares.append(self.weights[stage] if spare is None else spare)
        return self.stages[stage].state

    async def stop(self, epoch: int) -> None:
        self.epoch = epoch

    async def reports(self, epoch: int) -> list[StageReport]:
        return [StageReport(stage, stage not in self.lost, epoch=epoch) for stage in range(STAGES)]

    async def choose_spare(self, stage: int, refused: Collection[str]) -> str | None:
        left = [f"{k}" for k in range(len(self.spares)) if f"{k}" not in refused]
        return left[0] if left else None

    async def load(self, stage: int, spare: str) -> str:
        self.stages[stage] = Stage(self.spares[int(spare)])
        self.lost.discard(stage)
        return "w"

    async def open(self, stage: int, session: SessionState) -> None:
        self.stages[stage] = Stage(self.stages[stage].weights)

    async def truncate(self, stage: int, session: str, position: int) -> bool:
        self.stages[stage].truncate(position)
        return True

    async def digests(self, stage: int, session: str) -> Sequence[ChunkRecord]:
        return self.stages[stage].inputs.records

    async def replay(self, stage: int, session: SessionState, exact: bool) -> AsyncIterator[ChunkRecord]:
        self.exactness.append(exact)
        source = self.stages[stage - 1].journal if stage else self.fed
        for record, x in source if exact else source.merged(WIDE):
            output, _ = self.stages[stage].forward(replace(record, kept=record.width, digest=b""), x)
            self.stages[stage].truncate(record.end)
            yield replace(output, kept=record.kept)

    async def resume(self, epoch: int) -> None:
        return None


@pytest.mark.parametrize("stage", range(STAGES))
def test_fast_replay_is_close_and_exact_replay_is_equal(stage: int) -> None:
    ops = Fast()
    before = ops.lose(stage)
    report = ops.heal(exact=True)
    np.testing.assert_array_equal(ops.stages[stage].state, before)
    assert (report.inexact, ops.exactness) == (frozenset(), [True])

    ops = Fast()
    before = ops.lose(stage)
    report = ops.heal(exact=False)
    after = ops.stages[stage].state
    assert len(after) == len(before) == 64
    np.testing.assert_allclose(after, before, atol=1e-5)
    (replay,) = report.replays
    assert 0 < replay.error < 1e-5
    assert (replay.chunks, replay.positions, replay.exact) == (4, 64, False)
    assert report.inexact == {"s"}


def bf16(weights: np.ndarray) -> np.ndarray:
    return (weights.view(np.uint32) & 0xFFFF0000).view("f4")


def int8(weights: np.ndarray) -> np.ndarray:
    scale = np.abs(weights).max() / 127
    return (np.round(weights / scale) * scale).astype("f4")


def one_sign(weights: np.ndarray) -> np.ndarray:
    other = weights.copy()
    other[3, 5] = -other[3, 5]
    return other


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("change", [bf16, int8, one_sign])
@pytest.mark.parametrize("stage", range(STAGES))
def test_other_weights_are_refused(exact: bool, change: object, stage: int) -> None:
    ops = Fast()
    ops.lose(stage, change(ops.weights[stage]))  # type: ignore[operator]
    with pytest.raises(ReplayMismatch, match=f"stage {stage}, session s, position 0") as info:
        ops.heal(exact=exact)
    assert (info.value.stage, info.value.what) == (stage, "digest" if exact else "sketch")


def test_after_a_fast_replay_everything_is_compared_by_sketch() -> None:
    ops = Fast()
    ops.lose(1)
    assert ops.heal(exact=False).inexact == {"s"}
    ops.spares.clear()
    before = ops.lose(2)
    # Its inputs are no longer those of the first time, so its outputs cannot be either.
    with pytest.raises(GenerationInterrupted):
        ops.heal(exact=True)
    ops.lost.add(2)
    report = ops.heal(exact=True, session=ops.session(exact=False))
    assert report.inexact == {"s"}
    np.testing.assert_allclose(ops.stages[2].state, before, atol=1e-5)


def test_two_neighbours_fast() -> None:
    ops = Fast()
    ops.lost |= {0, 1}
    ops.spares = [ops.weights[0], ops.weights[1]]

    async def load(stage: int, spare: str) -> str:
        ops.stages[stage] = Stage(ops.weights[stage])
        ops.lost.discard(stage)
        return "w"

    ops.load = load  # type: ignore[method-assign]
    report = ops.heal(exact=False)
    assert [(r.stage, r.exact, r.witnesses) for r in report.replays] == [
        (0, False, ()),
        (1, False, ("stage 2",)),
    ]


TOKENS = tuple(p % 7 for p in range(39, 64))  # after the last position of a prompt of 40 and all that follow


class Tied(Fast):
    """A tail that samples another token in a fast replay; a wrong spare does so in an exact one too."""

    wrong = False

    def session(self, exact: bool = True) -> SessionState:
        plain = super().session(exact)
        tail = tuple(self._sampled(record) for record in plain.boundaries[STAGES - 1])
        return replace(plain, prompt=(1,) * 40, committed=TOKENS, boundaries={STAGES - 1: tail})

    def _sampled(self, record: ChunkRecord) -> ChunkRecord:
        positions = range(max(39, record.position), record.position + record.width)
        return replace(record, tokens=tuple(p % 7 for p in positions))

    async def replay(self, stage: int, session: SessionState, exact: bool) -> AsyncIterator[ChunkRecord]:
        async for record in super().replay(stage, session, exact):
            if stage < STAGES - 1:
                yield record
                continue
            record = self._sampled(record)
            if (self.wrong or not exact) and record.end == 64:
                record = replace(record, tokens=(9, *record.tokens[1:]))
            yield record


def test_a_token_that_a_fast_replay_samples_otherwise_is_judged_by_an_exact_one() -> None:
    ops = Tied()
    ops.lost |= {1, 2}
    ops.spares = [ops.weights[1], ops.weights[2]]
    places = {1: ops.weights[1], 2: ops.weights[2]}

    async def load(stage: int, spare: str) -> str:
        ops.stages[stage] = Stage(places[stage])
        ops.lost.discard(stage)
        return "w"

    ops.load = load  # type: ignore[method-assign]
    before = [ops.stages[stage].state for stage in range(STAGES)]
    report = ops.heal(exact=False)
    assert ops.exactness == [False, False, True, True]
    assert [(r.stage, r.exact, r.tokens) for r in report.replays] == [(1, True, 0), (2, True, 25)]
    assert (report.inexact, report.refused, report.attempts) == (frozenset(), {}, 1)
    for stage in range(STAGES):
        np.testing.assert_array_equal(ops.stages[stage].state, before[stage])


def test_a_wrong_token_is_refused_when_the_exact_replay_gives_it_too() -> None:
    ops = Tied()
    ops.wrong = True
    ops.lose(2)
    with pytest.raises(ReplayMismatch, match="stage 2, session s, position 62: expected the tokens") as info:
        ops.heal(exact=False)
    assert (info.value.stage, info.value.what) == (2, "token")
    assert ops.exactness == [False, True]


def test_without_sketches_a_replay_is_exact_or_none() -> None:
    ops = Fast(sketches=False)
    ops.lose(1)
    assert ops.heal(exact=False).inexact == frozenset()
    assert ops.exactness == [True]
    ops.lose(1)
    report = ops.heal(exact=False, session=ops.session(exact=False))
    assert "expected sketches on record, got none" in str(report.abandoned["s"])
