"""Where a failure is looked for, and what a session is worth after it."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError, InputTypeError, StageError, StaleEpoch
from dask_sdc.inference.journal import ChunkRecord
from dask_sdc.inference.session import (
    EpochFence,
    LossKind,
    SessionState,
    StageReport,
    locate_failure,
    plan_replay,
)


@dataclass
class Node:
    """A stage with an inbox of bounded length, that computes one chunk at a time."""

    inbox: deque[int] = field(default_factory=deque)
    holds: int | None = None
    done: bool = False
    received: int = -1
    forwarded: int = -1
    dead: bool = False
    frozen: bool = False


class Line:
    """Chunks wander through stages in random order of events until nothing moves any more."""

    def __init__(self, stages: int, chunks: int, room: int, rng: random.Random) -> None:
        self.nodes = [Node() for _ in range(stages)]
        self.chunks, self.room, self.random = chunks, room, rng
        self.fed = self.returned = -1
        self.drops: set[int] = set()  # the next message to this stage is lost; `stages` is the coordinator

    def deliver(self, to: int, chunk: int) -> None:
        if to in self.drops:
            self.drops.remove(to)
        elif to == len(self.nodes):
            self.returned = chunk if chunk == self.returned + 1 else self.returned
        elif not self.nodes[to].dead and chunk == self.nodes[to].received + 1:
            # A chunk out of order waits for the one before it and counts as not received.
            self.nodes[to].received = chunk
            self.nodes[to].inbox.append(chunk)

    def full(self, to: int) -> bool:
        return to < len(self.nodes) and len(self.nodes[to].inbox) >= self.room

    def moves(self) -> list[tuple[str, int]]:
        found = [("feed", -1)] if self.fed < self.chunks - 1 and not self.full(0) else []
        for k, node in enumerate(self.nodes):
            if node.dead or node.frozen:
                continue
            if node.holds is None and node.inbox:
                found.append(("take", k))
            elif node.holds is not None and not node.done:
                found.append(("compute", k))
            elif node.holds is not None and not self.full(k + 1):
                found.append(("send", k))
        return found

    def move(self) -> bool:
        moves = self.moves()
        if not moves:
            return False
        kind, k = self.random.choice(moves)
        if kind == "feed":
            self.fed += 1
            self.deliver(0, self.fed)
            return True
        node = self.nodes[k]
        if kind == "take":
            node.holds, node.done = node.inbox.popleft(), False
        elif kind == "compute":
            node.done = True
        else:
            assert node.holds is not None
            node.forwarded = node.holds
            chunk, node.holds = node.holds, None
            self.deliver(k + 1, chunk)
        return True

    def reports(self) -> list[StageReport]:
        found = [
            StageReport(k, not node.dead, node.received, node.forwarded) for k, node in enumerate(self.nodes)
        ]
        self.random.shuffle(found)
        return found


FAULTS = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from(["kill", "freeze", "drop"]), st.integers(0, 6)),
    max_size=2,
)


@given(
    stages=st.integers(1, 6),
    chunks=st.integers(1, 8),
    room=st.integers(1, 3),
    faults=FAULTS,
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=250)
def test_failures_are_found_in_any_history(
    stages: int, chunks: int, room: int, faults: list[tuple[int, str, int]], seed: int
) -> None:
    line = Line(stages, chunks, room, random.Random(seed))
    pending, tick = sorted(faults), 0
    struck: dict[str, set[int]] = {"kill": set(), "freeze": set(), "drop": set()}
    while True:
        while pending and pending[0][0] <= tick:
            _, kind, target = pending.pop(0)
            if kind == "drop":
                line.drops.add(target % (stages + 1))
                struck["drop"].add(min(target % (stages + 1), stages - 1))
            else:
                node = line.nodes[target % stages]
                node.dead, node.frozen = node.dead or kind == "kill", node.frozen or kind == "freeze"
                struck[kind].add(target % stages)
        if not line.move():
            break
        tick += 1
    failure = locate_failure(line.reports(), fed=line.fed, returned=line.returned)
    if struck["kill"]:
        assert failure is not None
        assert set(failure.stages) == struck["kill"]
        assert {loss.kind for loss in failure.losses} == {LossKind.UNREACHABLE}
    elif line.returned == line.fed:
        assert failure is None
    else:
        assert failure is not None
        (loss,) = failure.losses
        assert loss == failure.first
        assert loss.chunk == line.returned + 1
        if loss.kind is LossKind.FROZEN:
            assert loss.stage in struck["freeze"]
        elif loss.kind is LossKind.UNRETURNED:
            assert loss.stage == stages - 1 in struck["drop"]
        else:
            assert loss.kind is LossKind.GAP
            assert loss.stage in struck["drop"]


def test_without_the_coordinators_numbers_the_ends_are_taken() -> None:
    def reports(*numbers: tuple[int, int]) -> list[StageReport]:
        return [StageReport(k, True, *pair) for k, pair in enumerate(numbers)]

    assert locate_failure(reports((4, 4), (4, 4))) is None
    gap = locate_failure(reports((4, 4), (3, 3)))
    assert gap is not None and str(gap) == "stage 1 gap at chunk 4"
    frozen = locate_failure(reports((4, 3), (3, 3)))
    assert frozen is not None and (frozen.first.stage, frozen.first.kind) == (0, LossKind.FROZEN)


def test_who_says_what_it_could_not_do_is_named_and_not_who_has_an_older_chunk() -> None:
    reports = [
        StageReport(0, True, 2, 1, detail="ValueError: no"),
        StageReport(1, True, 1, 0),  # still computes chunk 1
        StageReport(2, True, 0, 0),
    ]
    failure = locate_failure(reports, fed=2, returned=-1)  # the answer to chunk 0 is on its way
    assert failure is not None
    assert str(failure) == "stage 0 failed at chunk 2: ValueError: no"
    assert locate_failure(reports, fed=0, returned=0) == failure  # it rests, though nobody waits for a chunk


def test_several_silent_stages_are_all_named() -> None:
    reports = [
        StageReport(3, True, epoch=1),
        StageReport(0, True, epoch=2),
        StageReport(2, False, detail="w7"),
        StageReport(1, False),
    ]
    failure = locate_failure(reports)
    assert failure is not None and failure.stages == (1, 2, 3)
    assert str(failure) == (
        "stage 1 unreachable; stage 2 unreachable: w7; stage 3 stale: expected epoch 2, got 1"
    )
    wanted = locate_failure(reports[1:2], epoch=3)
    assert wanted is not None and wanted.first.kind is LossKind.STALE


@pytest.mark.parametrize("stages", [[], [1], [0, 0], [0, 2]])
def test_one_report_per_stage(stages: list[int]) -> None:
    with pytest.raises(InputError, match="expected one report per stage"):
        locate_failure([StageReport(stage, True) for stage in stages])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.lists(st.integers(0, 9), max_size=9))
def test_plan(prompt: list[int], committed: list[int]) -> None:
    plan = plan_replay(prompt, committed)
    assert plan.expected == tuple(committed)
    if committed:
        assert [*plan.prefix, plan.driver] == prompt + committed
        assert plan.token_after(len(plan.prefix) - 1) == plan.driver
    else:
        assert (list(plan.prefix), plan.driver) == (prompt, None)
    for position in range(-2, len(plan.prefix) + 3):
        k = position - len(prompt) + 1
        assert plan.token_after(position) == (committed[k] if 0 <= k < len(committed) else None)


def test_plan_refuses_an_empty_prompt() -> None:
    with pytest.raises(InputError, match="prompt: expected at least one token, got none"):
        plan_replay([], [1])
    with pytest.raises(InputTypeError):
        plan_replay("ab", [])


def test_fence() -> None:
    fence = EpochFence(2, "stage 1")
    fence.check(2)
    with pytest.raises(StaleEpoch, match="stage 1: expected a message of epoch 2, got 1"):
        fence.check(1)
    with pytest.raises(StageError, match="got the later 3") as info:
        fence.check(3)
    assert not isinstance(info.value, StaleEpoch)
    fence.rise(4)
    fence.rise(4)
    fence.check(4)
    with pytest.raises(StaleEpoch, match="stage 1: expected epoch 4 or later, got 3"):
        fence.rise(3)


def record(index: int, position: int, width: int, kept: int, **fields: object) -> ChunkRecord:
    return replace(ChunkRecord(index, position, width, kept, b"d"), **fields)


CHUNKS = (record(0, 0, 4, 4), record(1, 4, 1, 1), record(2, 5, 4, 2))
STATE = SessionState("a", (1, 2, 3, 4), (5, 6, 7, 8), CHUNKS, {1: CHUNKS}, {"seed": 1}, "m", "t", (9,))


def test_rolling_back_leaves_what_depends_on_earlier_positions_only() -> None:
    assert STATE.position == 7
    assert STATE.rolled_back(7) is STATE
    assert [STATE.rolled_back(p).committed for p in range(8)] == [
        (), (), (), (), (5,), (5, 6), (5, 6, 7), (5, 6, 7, 8)
    ]  # fmt: skip
    cut = STATE.rolled_back(6)
    assert cut.chunks == cut.boundaries[1] == (*CHUNKS[:2], record(2, 5, 4, 1))
    assert cut.checkpoint() == STATE.checkpoint(6)
    assert STATE.rolled_back(0).chunks == ()


def test_resumed_tokens_are_prompt_to_a_replay() -> None:
    state = replace(STATE, resumed=3)
    assert state.plan == plan_replay([1, 2, 3, 4, 5, 6, 7], [8])
    assert state.rolled_back(2).committed == (5, 6, 7)
    assert state.checkpoint(0).committed == (5, 6, 7)
    early = SessionState("a", (1, 2), (3, 4), (record(0, 0, 2, 2),), {0: (record(0, 0, 2, 2),)}, resumed=2)
    assert early.plan == plan_replay([1, 2, 3, 4], [])


def test_checkpoint_of_a_session() -> None:
    checkpoint = STATE.checkpoint()
    assert (checkpoint.prompt, checkpoint.committed) == (STATE.prompt, STATE.committed)
    assert checkpoint.boundaries == (9,)
    checkpoint.check([1, 2, 3, 4], "m", {"seed": 1}, "t")


def test_sessions_without_tokens() -> None:
    state = SessionState("rollout", chunks=CHUNKS, boundaries={2: CHUNKS})
    assert (state.plan, state.position, state.rolled_back(4).position) == (None, 7, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"committed": (5,)}, "expected 4 positions that count, of 4 tokens of the prompt and 1 committed"),
        ({"resumed": 5}, "expected 7 positions"),
        ({"prompt": (1, 2), "committed": ()}, "expected 1 positions"),
        ({"boundaries": {1: CHUNKS[:2]}}, "outputs of stage 1 to be recorded for the 3 chunks"),
        ({"boundaries": {1: (*CHUNKS[:2], record(3, 5, 4, 2))}}, "got 3 records of others"),
        ({"boundaries": {1: (*CHUNKS[:2], record(2, 5, 4, 2, digest=b""))}}, "a digest or a sketch"),
    ],
)
def test_what_does_not_fit_together_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(STATE, **fields)
