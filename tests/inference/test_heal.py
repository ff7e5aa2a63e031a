"""Recovery of a simulated pipeline: the right tokens, or a typed error from which they can be had."""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_sdc.exceptions import (
    GenerationInterrupted,
    InputError,
    NoSpareError,
    ReplayMismatch,
    StageTimeout,
)
from dask_sdc.inference.heal import LossKind, for_session, run_recovery
from dask_sdc.inference.journal import ChunkRecord
from tests.inference.simulated import Coordinator, Fault, Ops, Simulation

PROMPTS = {"a": (3, 1, 4, 1, 5, 9, 2), "b": (2, 7)}
N = 12


def start(stages: int, spares: int, faults: list[Fault], seed: int = 0, **options: bool) -> Coordinator:
    coordinator = Coordinator(Simulation(stages, spares, faults, **options), seed)
    for session, prompt in PROMPTS.items():
        coordinator.admit(session, prompt)
    return coordinator


def generate(coordinator: Coordinator, n: int = N) -> dict[str, list[int]]:
    return asyncio.run(coordinator.generate(n))


CLEAN = {stages: generate(start(stages, 0, [])) for stages in range(1, 6)}
TICKS = {stages: (lambda c: (generate(c), c.s.tick)[1])(start(stages, 0, [])) for stages in range(1, 6)}


def resume(error: GenerationInterrupted, stages: int) -> dict[str, list[int]]:
    """Go on from the checkpoints of an error on a pipeline without faults."""
    coordinator = Coordinator(Simulation(stages, 0))
    for session, checkpoint in vars(error)["checkpoints"].items():
        checkpoint.check(PROMPTS[session], "model", {"seed": 3}, "tokenizer")
        coordinator.admit(session, checkpoint.prompt, checkpoint.committed)
    return generate(coordinator)


def test_clean_runs_differ_by_model_and_not_by_drafts() -> None:
    assert len({json.dumps(ids) for ids in CLEAN.values()}) == len(CLEAN)
    assert all(generate(start(3, 0, [], seed)) == CLEAN[3] for seed in range(5))


@pytest.mark.parametrize("all_boundaries", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_kill_at_any_time_changes_no_token_and_reloads_no_survivor(
    stages: int, all_boundaries: bool
) -> None:
    for tick in range(1, TICKS[stages] + 1, 5):
        for target in range(stages):
            c = start(stages, 1, [Fault(tick, "kill", target)], all_boundaries=all_boundaries)
            assert generate(c) == CLEAN[stages]
            assert [worker.loads for worker in c.s.workers[:stages]] == [0] * stages
            assert c.s.workers[stages].loads == len(c.reports) <= 1
            for report in c.reports:
                assert [loss.stage for loss in report.losses] == [target]
                assert {(replay.stage, replay.exact) for replay in report.replays} <= {(target, True)}


@given(
    stages=st.integers(1, 5),
    spares=st.integers(0, 4),
    faults=st.lists(
        st.builds(
            Fault,
            st.integers(1, 140),
            st.sampled_from(["kill", "kill", "freeze", "drop", "forget", "rot", "raise"]),
            st.integers(0, 8),
        ),
        max_size=5,
    ),
    all_boundaries=st.booleans(),
    seed=st.integers(0, 3),
)
@settings(max_examples=150)
def test_every_schedule_ends_with_the_right_ids_or_a_typed_error(
    stages: int, spares: int, faults: list[Fault], all_boundaries: bool, seed: int
) -> None:
    c = start(stages, spares, faults, seed, all_boundaries=all_boundaries)
    try:
        assert generate(c) == CLEAN[stages]
    except GenerationInterrupted as error:
        assert type(error) is not GenerationInterrupted, error
        assert error.committed == tuple(c.committed["a"])
        for session, checkpoint in vars(error)["checkpoints"].items():
            n = len(checkpoint.committed)
            assert list(checkpoint.committed)[:N] == (CLEAN[stages][session])[:n]
            mine = for_session(error, c.state(session))
            assert type(mine) is type(error)
            assert (mine.committed, mine.checkpoint) == (tuple(c.committed[session]), checkpoint)
        assert resume(error, stages) == CLEAN[stages]
        assert {name: tokens[:N] for name, tokens in c.committed.items()} == {
            name: CLEAN[stages][name][: len(tokens)] for name, tokens in c.committed.items()
        }
    losses = [loss for report in c.reports for loss in report.losses]
    assert all(loss.kind in tuple(LossKind) for loss in losses)


@given(
    stages=st.integers(2, 5),
    kills=st.lists(st.tuples(st.integers(1, 160), st.integers(0, 7)), min_size=1, max_size=3),
    seed=st.integers(0, 3),
    all_boundaries=st.booleans(),
)
@settings(max_examples=100)
def test_as_many_kills_as_spares_are_survived(
    stages: int, kills: list[tuple[int, int]], seed: int, all_boundaries: bool
) -> None:
    # Killed at any tick, thus in any step of the recovery from the kill before, spares among them.
    faults = [Fault(tick, "kill", target) for tick, target in kills]
    c = start(stages, len(kills), faults, seed, all_boundaries=all_boundaries)
    assert generate(c) == CLEAN[stages]


@pytest.mark.parametrize(
    ("kind", "loss"),
    [("freeze", LossKind.FROZEN), ("drop", LossKind.GAP), ("forget", LossKind.FROZEN)],
)
@pytest.mark.parametrize("target", [0, 1, 2])
def test_what_struck_is_named(kind: str, loss: LossKind, target: int) -> None:
    # At tick 1 + target the first chunk is about to reach stage `target`.
    tick = {"forget": 9}.get(kind, 1) + target
    c = start(3, 1, [Fault(tick, kind, target)])
    assert generate(c) == CLEAN[3]
    (report,) = c.reports
    assert [(found.stage, found.kind) for found in report.losses] == [(target, loss)]
    assert report.resent == ((target,) if kind == "drop" else ())
    assert report.placed == ({} if kind == "drop" else {target: "w3"})


def test_a_lost_answer_is_asked_for_again() -> None:
    c = start(3, 0, [Fault(4, "drop", 0)])
    assert generate(c) == CLEAN[3]
    (report,) = c.reports
    assert [(loss.stage, loss.kind) for loss in report.losses] == [(2, LossKind.UNRETURNED)]


def test_a_stage_that_loses_a_second_message_is_replaced() -> None:
    c = start(3, 1, [Fault(2, "drop", 0)])
    asyncio.run(c.generate(1))
    assert [report.placed for report in c.reports] == [{}]
    # The next message that is lost is one to the same stage.
    c.s.faults = [Fault(c.s.tick + 2, "drop", 0)]
    assert generate(c) == CLEAN[3]
    assert [report.placed for report in c.reports] == [{}, {1: "w3"}]


@pytest.mark.parametrize("target", [0, 1, 2])
def test_stages_that_take_nothing_back_are_fed_anew_where_they_are(target: int) -> None:
    c = start(3, 1, [Fault(30, "kill", target)])
    c.s.forgetful = True
    assert generate(c) == CLEAN[3]
    (report,) = c.reports
    assert report.placed == {target: "w3"} and [worker.loads for worker in c.s.workers] == [0, 0, 0, 1]
    fed_anew = {replay.stage for replay in report.replays} - {target}
    assert fed_anew and all(replay.exact for replay in report.replays)


def test_no_spare() -> None:
    c = start(3, 0, [Fault(30, "kill", 1)])
    with pytest.raises(
        NoSpareError, match=r"stage 1: expected a spare, got none left; stage 1 unreachable"
    ) as info:
        generate(c)
    assert info.value.stage == 1
    assert info.value.committed == tuple(c.committed["a"]) != ()
    assert info.value.checkpoint.committed == info.value.committed
    assert vars(info.value)["report"].losses[0].stage == 1
    assert resume(info.value, 3) == CLEAN[3]
    assert pickle.loads(pickle.dumps(info.value)).checkpoint == info.value.checkpoint


def healed(c: Coordinator, **options: object) -> object:
    return asyncio.run(c.heal(**options))


def settled(stages: int, spares: int, n: int = 6, **options: bool) -> Coordinator:
    c = start(stages, spares, [], **options)
    asyncio.run(c.generate(n))
    return c


def test_nothing_wrong_changes_nothing() -> None:
    c = settled(3, 1)
    report = healed(c)
    assert (report.losses, report.placed, report.replays, report.attempts) == ((), {}, (), 1)
    assert report.epoch == 1
    assert generate(c) == CLEAN[3]


def test_a_spare_with_other_weights_is_refused_by_its_replay() -> None:
    for all_boundaries in (False, True):
        for stage in range(3):
            c = settled(3, 2, all_boundaries=all_boundaries)
            c.s.weight_of_spare = {3: c.s.weights[stage] + 1}
            c.s.workers[stage].alive = False
            report = healed(c)
            assert report.placed == {stage: "w4"}
            assert "position 0" in report.refused["w3"]
            assert f"stage {stage}, session a" in report.refused["w3"]
            assert generate(c) == CLEAN[3]


def test_a_lone_bad_spare_ends_in_a_mismatch_that_names_stage_and_position() -> None:
    c = settled(3, 1)
    c.s.workers[1].alive = False
    c.s.workers[3].bent = 1
    with pytest.raises(ReplayMismatch, match="stage 1, session a, position 0: expected the digest") as info:
        healed(c)
    error = info.value
    assert (error.stage, error.position, error.what) == (1, 0, "digest")
    assert error.committed == tuple(c.committed["a"])
    assert error.checkpoint.committed == ()  # no token is proved
    assert vars(error)["checkpoints"]["b"].committed == tuple(c.committed["b"])
    assert resume(error, 3) == CLEAN[3]


def test_weights_are_refused_by_their_digest() -> None:
    c = settled(3, 1)
    c.s.workers[0].alive = False
    blocks = ["other", *c.s.blocks[1:]]
    with pytest.raises(ReplayMismatch, match="stage 0: expected weights other, got") as info:
        asyncio.run(
            run_recovery(Ops(c.s, c), [c.state("a")], blocks=blocks, epoch=0, fed=c.index, returned=c.index)
        )
    assert (info.value.what, info.value.stage) == ("weights", 0)


def corrupt_stage(c: Coordinator, stage: int, session: str) -> int:
    """Let a stage compute wrongly for one session from now on, and return the position."""
    c.s.worker(stage).bent = 5
    position = c.fed[session].position
    while len(c.committed[session]) < 9:
        c.step(session)
    c.s.worker(stage).bent = 0
    return position


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("all_boundaries", [False, True])
def test_a_record_that_two_spares_contradict_alike_is_taken_back(stage: int, all_boundaries: bool) -> None:
    c = settled(3, 3, all_boundaries=all_boundaries)
    position = corrupt_stage(c, stage, "a")
    wrong = c.committed["a"][:]
    assert wrong != CLEAN[3]["a"][:9]
    c.s.workers[stage].alive = False
    report = healed(c)
    assert report.rolled_back == {"a": position}
    (outvoted,) = report.outvoted
    assert (outvoted.stage, outvoted.session, outvoted.made.position) == (stage, "a", position)
    assert outvoted.recorded.place == outvoted.made.place
    assert outvoted.recorded.digest != outvoted.made.digest
    # Both spares were right; one holds the stage and the other may still be used.
    assert (outvoted.holder, outvoted.other) == ("w4", "w3")
    assert report.placed == {stage: "w4"}
    assert report.refused == report.abandoned == {}
    assert {(replay.session, replay.stage) for replay in report.replays} == {("a", stage), ("b", stage)}
    assert json.loads(json.dumps(report.to_dict()))["rolled_back"] == {"a": position}
    assert generate(c) == CLEAN[3]


def test_stages_that_cannot_take_back_positions_are_fed_again_after_a_wrong_record() -> None:
    c = settled(3, 3)
    c.width = 1  # no drafts: these stages could not take them back
    for session in PROMPTS:
        c.step(session)
    position = corrupt_stage(c, 1, "a")
    c.s.forgetful = True
    c.s.workers[1].alive = False
    report = healed(c)
    assert report.rolled_back == {"a": position}
    assert {replay.stage for replay in report.replays if replay.session == "a"} == {0, 1, 2}
    assert generate(c) == CLEAN[3]


def test_a_spare_that_was_right_against_the_record_is_believed_for_other_sessions_too() -> None:
    c = settled(3, 2)
    c.s.worker(1).bent = 5
    positions = {name: c.fed[name].position for name in PROMPTS}
    for name in PROMPTS:
        while len(c.committed[name]) < 9:
            c.step(name)
    c.s.workers[1].alive = False
    report = healed(c, attempts=2)
    assert report.rolled_back == positions
    assert [one.session for one in report.outvoted] == ["a"]
    assert generate(c) == CLEAN[3]


def test_a_spare_that_does_not_repeat_itself_outvotes_nobody() -> None:
    c = settled(3, 2)
    corrupt_stage(c, 1, "a")
    c.s.workers[1].alive = False
    fickle, compute = c.s.workers[4], c.s.workers[4].compute

    replays = itertools.count()

    def bent_the_second_time(
        session: str, record: ChunkRecord, x: np.ndarray
    ) -> tuple[ChunkRecord, np.ndarray]:
        if record.position == 0:
            fickle.bent = 7 if next(replays) == 1 else 0
        return compute(session, record, x)

    fickle.compute = bent_the_second_time  # type: ignore[method-assign]
    with pytest.raises(ReplayMismatch) as info:
        healed(c)
    assert vars(info.value)["report"].outvoted == ()
    assert "not twice the same" in vars(info.value)["report"].refused["w4"]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_that_computed_wrongly_is_evicted_and_the_session_rolled_back(stage: int) -> None:
    c = settled(3, 1)
    position = corrupt_stage(c, stage, "a")
    assert c.committed["a"] != CLEAN[3]["a"][:9]
    state = c.state("a").rolled_back(position)
    c.committed["a"] = list(state.committed)
    c.fed["a"].truncate(position)
    for log in c.boundaries["a"]:
        log.truncate(position)
    assert c.state("a") == state
    report = healed(c, evict={stage: "audit"})
    assert [(loss.stage, loss.kind) for loss in report.losses] == [(stage, LossKind.EVICTED)]
    assert generate(c) == CLEAN[3]


def test_a_survivor_that_was_fed_something_else_than_was_sent_is_found() -> None:
    c = settled(3, 2, all_boundaries=True)
    held = c.s.workers[2].sessions["a"].inputs
    held._records[1] = replace(held._records[1], digest=b"\1" * 16)
    c.s.workers[1].alive = False
    report = healed(c)
    assert [(loss.stage, loss.kind) for loss in report.losses] == [
        (1, LossKind.UNREACHABLE),
        (2, LossKind.FAILED),
    ]
    assert report.placed == {1: "w3", 2: "w4"}
    assert generate(c) == CLEAN[3]


def test_a_survivor_lost_during_the_replay_is_no_fault_of_the_spare_it_fed() -> None:
    c = settled(3, 2)
    c.s.workers[1].alive = False
    c.s.faults = [Fault(c.s.tick + 12, "kill", 0)]
    report = healed(c)
    assert next(step.error for step in report.steps if step.name == "replay") == "Unreachable: w0"
    assert (report.attempts, report.placed, report.refused) == (2, {1: "w3", 0: "w4"}, {})
    assert c.s.workers[3].loads == 1
    assert generate(c) == CLEAN[3]


def test_blame_that_was_explained_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    c = settled(3, 3)
    c.s.workers[1].alive = False
    c.s.faults = [Fault(c.s.tick + 12, "kill", 0)]
    resume, failures = Ops.resume, ["once"]

    async def failing(ops: Ops, epoch: int) -> None:
        if failures:
            failures.pop()
            raise OSError("expected an answer, got none")
        await resume(ops, epoch)

    monkeypatch.setattr(Ops, "resume", failing)
    report = healed(c)
    assert (report.attempts, report.placed, report.refused) == (3, {1: "w3", 0: "w4"}, {})
    # One that failed, then two stages for two sessions; the third time nothing is left to prove.
    assert [step.name for step in report.steps].count("replay") == 5


def test_a_spare_lost_during_its_replay_is_replaced() -> None:
    c = settled(3, 2)
    c.s.workers[1].alive = False
    c.s.faults = [Fault(c.s.tick + 12, "kill", 3)]
    report = healed(c)
    assert (report.attempts, report.placed, list(report.refused)) == (2, {1: "w4"}, ["w3"])
    assert generate(c) == CLEAN[3]


def test_a_damaged_journal_costs_its_stage_too() -> None:
    c = settled(3, 2)
    c.s.faults = [Fault(c.s.tick + 1, "rot", 0), Fault(c.s.tick + 1, "kill", 1)]
    report = healed(c)
    assert [(loss.stage, loss.kind) for loss in report.losses] == [
        (1, LossKind.UNREACHABLE),
        (0, LossKind.FAILED),
    ]
    assert (report.attempts, report.epoch) == (2, 2)
    assert generate(c) == CLEAN[3]


def test_neighbours_lost_together_prove_each_other() -> None:
    for all_boundaries in (False, True):
        c = settled(4, 2, all_boundaries=all_boundaries)
        c.s.workers[1].alive = c.s.workers[2].alive = False
        report = healed(c)
        assert (report.attempts, report.placed) == (1, {1: "w4", 2: "w5"})
        witnesses = {(replay.stage, replay.session): replay.witnesses for replay in report.replays}
        assert witnesses[1, "a"] == (("the coordinator",) if all_boundaries else ())
        assert witnesses[2, "a"] == (("the coordinator",) if all_boundaries else ()) + ("stage 3",)
        assert generate(c) == CLEAN[4]


def test_neighbours_of_which_one_is_wrong_are_both_refused_without_a_record_between() -> None:
    c = settled(4, 2)
    c.s.workers[1].alive = c.s.workers[2].alive = False
    c.s.workers[4].bent = 1
    with pytest.raises(ReplayMismatch) as info:
        healed(c)
    assert set(vars(info.value)["report"].refused) == {"w4", "w5"}


def test_with_a_record_between_only_the_wrong_one_is_refused() -> None:
    c = settled(4, 3, all_boundaries=True)
    c.s.workers[1].alive = c.s.workers[2].alive = False
    c.s.workers[4].bent = 1
    report = healed(c)
    assert set(report.refused) == {"w4"}
    assert report.placed == {1: "w6", 2: "w5"}
    assert generate(c) == CLEAN[4]


class Hanging(Ops):
    """One kind of call never returns."""

    def __init__(self, c: Coordinator, name: str) -> None:
        super().__init__(c.s, c)
        self.name = name
        self.ever = asyncio.Event()

    async def stop(self, epoch: int) -> None:
        if self.name == "stop":
            await self.ever.wait()
        await super().stop(epoch)

    async def load(self, stage: int, spare: str) -> str:
        if self.name == "load":
            await self.ever.wait()
        return await super().load(stage, spare)

    async def replay(self, stage, session, exact):  # type: ignore[no-untyped-def]
        async for output in super().replay(stage, session, exact):
            yield output
            if self.name == "replay" and output.index > 3:
                await self.ever.wait()


@pytest.mark.parametrize(
    ("name", "kind"), [("stop", StageTimeout), ("load", NoSpareError), ("replay", NoSpareError)]
)
def test_calls_that_never_return_end_at_the_deadline(name: str, kind: type[GenerationInterrupted]) -> None:
    c = settled(3, 1)
    c.s.workers[1].alive = False

    async def heal() -> None:
        await run_recovery(
            Hanging(c, name),
            [c.state("a"), c.state("b")],
            blocks=c.s.blocks,
            attempts=3,
            timeout_s=0.02,
            load_timeout_s=0.02,
        )

    with pytest.raises(kind) as info:
        asyncio.run(heal())
    assert type(info.value) is kind
    assert info.value.checkpoint.committed == tuple(c.committed["a"])


def test_a_defect_of_the_ops_keeps_the_tokens_too() -> None:
    c = settled(2, 1)
    c.s.workers[1].alive = False

    class Defective(Ops):
        async def digests(self, stage: int, session: str):  # type: ignore[no-untyped-def]
            return None

        async def replay(self, stage, session, exact):  # type: ignore[no-untyped-def]
            yield None

    c.s.workers[1].alive, c.s.workers[0].alive = True, False
    with pytest.raises(GenerationInterrupted, match="TypeError") as info:
        asyncio.run(run_recovery(Defective(c.s, c), [c.state("a")], blocks=c.s.blocks))
    assert info.value.checkpoint.committed == tuple(c.committed["a"])
    assert isinstance(info.value.__cause__, TypeError)


def test_cancelling_is_not_a_failure() -> None:
    c = settled(3, 1)
    c.s.workers[1].alive = False

    async def cancelled() -> None:
        task = asyncio.ensure_future(run_recovery(Hanging(c, "replay"), [c.state("a")], blocks=c.s.blocks))
        while not any(call == "replay" for call in c.s.workers[3].sessions):
            await asyncio.sleep(0)
            if c.s.workers[3].sessions:
                break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


def test_the_order_of_calls() -> None:
    c = settled(3, 1)
    c.s.workers[1].alive = False
    ops = Ops(c.s, c)
    asyncio.run(run_recovery(ops, [c.state("a")], blocks=c.s.blocks, fed=c.index, returned=c.index))
    seen = list(dict.fromkeys(ops.calls))
    assert seen == [
        "stop",
        "reports",
        "choose_spare",
        "load",
        "truncate",
        "digests",
        "open",
        "replay",
        "resume",
    ]
    assert ops.calls.count("truncate") == 2
    assert ops.calls.count("load") == 1


def test_report_is_json_compatible() -> None:
    c = start(3, 1, [Fault(30, "kill", 1)])
    generate(c)
    text = json.dumps(c.reports[0].to_dict())
    assert json.loads(text)["placed"] == {"1": "w3"}
    assert c.reports[0].seconds >= 0
    assert c.reports[0].inexact == frozenset()
    assert sum(replay.tokens for replay in c.reports[0].replays) == 0  # not the tail


def test_the_tail_reproduces_every_committed_token() -> None:
    c = settled(3, 1)
    c.s.workers[2].alive = False
    report = healed(c)
    tokens = {replay.session: replay.tokens for replay in report.replays}
    assert tokens == {name: len(found) for name, found in c.committed.items()}


def test_what_cannot_be_healed_is_refused_at_once() -> None:
    c = settled(3, 1)
    state = c.state("a")
    with pytest.raises(InputError, match="expected records of the tail's outputs"):
        asyncio.run(run_recovery(Ops(c.s, c), [replace(state, boundaries={})], blocks=c.s.blocks))
    with pytest.raises(InputError, match="expected an attempt and a stage"):
        asyncio.run(run_recovery(Ops(c.s, c), [state], blocks=[]))
