"""Decisions on the sums of a group, without a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import ClosedError, InputError, RankLost, StaleRound
from dask_sdc.recovery.rounds import Answer, Holder, RankRounds


def holder(rank: int, token: str = "first") -> Holder:
    return Holder(f"tcp://w{rank}", f"task-{rank}", token)


def give(rounds: RankRounds, *ranks: int, number: int = 0, token: str = "first") -> None:
    for rank in ranks:
        assert rounds.contribute(rank, number, (rank, 1), holder(rank, token)) is None


rows = st.lists(st.integers(0, 2**40), min_size=5, max_size=5)


@given(st.permutations(range(5)), st.lists(rows, max_size=4))
def test_rounds_sum_whatever_the_order(order: list[int], table: list[list[int]]) -> None:
    rounds = RankRounds("g", 5)
    for number, row in enumerate(table):
        for rank in order[:-1]:
            assert rounds.contribute(rank, number, (row[rank], 1), holder(rank)) is None
            assert rounds.outcome() is None
        assert rounds.contribute(order[-1], number, (row[order[-1]], 1), holder(order[-1])) is None
        assert rounds.outcome() == Answer("sum", (sum(row), 5))
    assert rounds.number == len(table)


def test_a_resent_contribution_counts_once() -> None:
    rounds = RankRounds("g", 2)
    give(rounds, 0, 0)
    assert rounds.outcome() is None
    give(rounds, 1)
    assert rounds.outcome() == Answer("sum", (1, 2))


def test_a_second_one_of_a_rank_is_refused_and_disturbs_nobody() -> None:
    rounds = RankRounds("g", 2)
    give(rounds, 0)
    refusal = rounds.contribute(0, 0, (9, 9), holder(0, "second"))
    assert refusal is not None and refusal.status == "stale"
    assert "tcp://w0, task 'task-0' speaks for it already" in refusal.message
    give(rounds, 1)
    assert rounds.outcome() == Answer("sum", (1, 2))


def test_a_rank_that_is_tried_again_replaces_what_it_gave() -> None:
    rounds = RankRounds("g", 2)
    assert rounds.contribute(0, 0, (5, 5), holder(0)) is None
    rounds.step_back(0)
    give(rounds, 0, token="second")
    # And from then on it is the one that speaks.
    refusal = rounds.contribute(0, 0, (7, 7), holder(0, "third"))
    assert refusal is not None and refusal.status == "stale"
    give(rounds, 1)
    assert rounds.outcome() == Answer("sum", (1, 2))


def test_a_rank_cannot_begin_anew_in_the_middle() -> None:
    rounds = RankRounds("g", 2)
    give(rounds, 0, 1)
    rounds.outcome()
    rounds.step_back(0)
    give(rounds, 1, number=1)
    failure = rounds.outcome()
    assert failure is not None and failure.ranks == (0,)
    assert "begins anew" in failure.message


def test_an_announced_rank_can_be_lost_before_it_comes() -> None:
    rounds = RankRounds("g", 2)
    rounds.expect(0, "task-0")
    rounds.expect(1, "task-1")
    give(rounds, 1)
    assert rounds.outcome() is None
    rounds.leave(0, "has failed")
    failure = rounds.outcome()
    assert failure is not None and failure.ranks == (0,)
    assert failure.message == "g, round 0: rank 0 (not heard of yet, task 'task-0') has failed"


@pytest.mark.parametrize("number", [0, 2, -1])
def test_another_round_than_the_open_one_is_refused(number: int) -> None:
    rounds = RankRounds("g", 1)
    give(rounds, 0)
    rounds.outcome()
    refusal = rounds.contribute(0, number, (1, 1), holder(0))
    assert refusal is not None and refusal.status == "stale"
    assert f"expected round 1, got round {number}" in refusal.message


def test_another_number_of_values_is_refused_and_disturbs_nobody() -> None:
    rounds = RankRounds("g", 2)
    give(rounds, 0)
    refusal = rounds.contribute(1, 0, (1,), holder(1))
    assert refusal is not None and refusal.status == "refused"
    assert "expected 2 values as of rank 0, got 1" in refusal.message
    give(rounds, 1)
    assert rounds.outcome() == Answer("sum", (1, 2))


@pytest.mark.parametrize("before", [True, False])
def test_a_lost_rank_ends_the_group_with_its_name(before: bool) -> None:
    rounds = RankRounds("g", 3)
    give(rounds, 0, 1, 2)
    rounds.outcome()
    if before:
        rounds.leave(1, "died")
        assert rounds.outcome() is None  # nobody waits for it yet
    give(rounds, 0, number=1)
    if not before:
        assert rounds.outcome() is None
        rounds.leave(1, "died")
    failure = rounds.outcome()
    assert failure is not None and (failure.status, failure.ranks) == ("lost", (1,))
    assert failure.message == "g, round 1: rank 1 (tcp://w1, task 'task-1') died"
    late = rounds.contribute(2, 1, (1, 1), holder(2))
    assert late is not None and (late.status, late.ranks) == ("lost", (1,))
    assert "comes after that" in late.message
    assert rounds.outcome() is None


def test_a_rank_that_ended_after_its_last_sum_fails_nothing() -> None:
    rounds = RankRounds("g", 2)
    give(rounds, 0, 1)
    rounds.outcome()
    rounds.leave(0, "has ended")
    rounds.leave(1, "has ended")
    assert rounds.outcome() is None and rounds.failure is None


def test_the_first_reason_of_a_loss_stays() -> None:
    rounds = RankRounds("g", 2)
    give(rounds, 0)
    rounds.leave(0, "has failed")
    rounds.leave(0, "was cancelled")
    failure = rounds.outcome()
    assert failure is not None and failure.message.endswith("has failed")


def test_the_deadline_names_all_who_did_not_come() -> None:
    rounds = RankRounds("g", 3)
    give(rounds, 0, 1, 2)
    rounds.outcome()
    give(rounds, 2, number=1)
    answer = rounds.expire(2.5)
    assert answer.ranks == (0, 1)
    assert answer.message == (
        "g, round 1: rank 0 (tcp://w0, task 'task-0') did not come within 2.5 s; "
        "rank 1 (tcp://w1, task 'task-1') did not come within 2.5 s"
    )
    assert rounds.failure == answer


def test_a_rank_that_nobody_knows_is_named_as_such() -> None:
    rounds = RankRounds("g", 2)
    give(rounds, 1)
    assert rounds.expire(60).message == "g, round 0: rank 0 (not heard of yet) did not come within 60 s"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer("lost", ranks=(2,), message="m"), RankLost),
        (Answer("stale", message="m"), StaleRound),
        (Answer("refused", message="m"), InputError),
        (Answer("closed", message="m"), ClosedError),
    ],
)
def test_answers_become_errors(answer: Answer, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^m$") as caught:
        answer.unpack()
    assert getattr(caught.value, "ranks", answer.ranks) == answer.ranks


def test_a_sum_is_returned() -> None:
    assert Answer("sum", (1, 2)).unpack() == (1, 2)
