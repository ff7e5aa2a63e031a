"""Cuts and places of stages: exact against a search over all cuts, domains kept apart."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError, NoDomainError
from dask_sdc.inference.pace import decoding_pace, levelled
from dask_sdc.inference.pipeline.placement import (
    LABEL,
    Candidate,
    boundaries_of,
    choose_workers,
    expect_workers,
    permitted,
    place,
    split_evenly,
)


def slowest(costs: list[float], speeds: list[float], cuts: tuple[int, ...]) -> float:
    ends = (0, *cuts, len(costs))
    return max(sum(costs[a:b]) / speed for (a, b), speed in zip(pairwise(ends), speeds, strict=True))


@given(st.data())
def test_the_slowest_stage_is_as_fast_as_can_be(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    stages = data.draw(st.integers(1, n))
    costs = data.draw(st.lists(st.integers(1, 9).map(float), min_size=n, max_size=n))
    speeds = data.draw(st.lists(st.integers(1, 4).map(float), min_size=stages, max_size=stages))
    cuts = split_evenly(costs, speeds, [1] * n, [0] * stages)
    best = min(slowest(costs, speeds, every) for every in combinations(range(1, n), stages - 1))
    assert slowest(costs, speeds, cuts) == best


def test_memory_bounds_a_stage() -> None:
    assert split_evenly([1.0] * 6, [1.0, 1.0], [10] * 6, [20, 100]) == (2,)
    with pytest.raises(InputError, match="memory for 60 bytes"):
        split_evenly([1.0] * 6, [1.0, 1.0], [10] * 6, [20, 30])
    with pytest.raises(InputError, match="at most 2"):
        split_evenly([1.0] * 2, [1.0] * 3, [1] * 2, [0] * 3)


@pytest.mark.parametrize("cuts", [[0], [6], [2, 2], [3, 1], [True], [1.5], [7]])
def test_bad_boundaries_are_refused(cuts: list[int]) -> None:
    with pytest.raises(InputError, match="rising layers between 0 and 6"):
        boundaries_of(cuts, 6)
    assert boundaries_of([2, 5], 6) == (2, 5)


def test_stages_live_in_domains_of_their_own_as_far_as_there_are_enough() -> None:
    hosts = [Candidate(f"w{i}", f"host{i // 2}") for i in range(6)]
    assert [one.address for one in choose_workers(hosts, 3)] == ["w0", "w2", "w4"]
    assert [one.address for one in choose_workers(hosts, 4)] == ["w0", "w2", "w4", "w1"]
    assert [one.address for one in choose_workers(hosts, 1, {"w0": "host0"}, {"w2"})] == ["w3"]
    assert [one.address for one in choose_workers(hosts, 9, {"w0": "host0"})] == [
        "w2",
        "w4",
        "w1",
        "w3",
        "w5",
    ]


def test_the_fastest_are_taken_first_and_too_few_are_refused() -> None:
    found = choose_workers([Candidate("a", "A"), Candidate("b", "B", speed=2.0)], 5)
    assert [one.address for one in found] == ["b", "a"]
    with pytest.raises(NoDomainError, match="expected 3 workers"):
        expect_workers(found, 3)


def test_a_label_that_anybody_declares_decides() -> None:
    assert permitted({"a": {}, "b": {"GPU": 1}}) == {"a", "b"}
    assert permitted({"a": {LABEL: 1}, "b": {"GPU": 1}, "c": {LABEL: 0}}) == {"a"}
    assert permitted({"a": {LABEL: 0}, "b": {}}) == set()


def test_as_few_stages_as_there_is_memory_for_but_two() -> None:
    def stages(memory: int, workers: int = 5, stages: int | None = None, spares: int = 1) -> int:
        candidates = [Candidate(f"w{k}", f"host{k}", memory) for k in range(workers)]
        chosen, cuts = place(candidates, stages, spares, [1.0] * 6, [10] * 6)
        assert len(chosen) == len(cuts) + 1
        return len(chosen)

    # Half of a worker's memory is for weights.
    assert [stages(memory) for memory in (0, 1000, 60, 59, 40)] == [2, 2, 2, 3, 3]
    assert (stages(0, workers=1), stages(0, workers=2), stages(0, stages=5)) == (1, 2, 5)
    for most, workers in ((4, 5), (2, 2)):
        with pytest.raises(InputError, match=f"memory for 60 bytes of weights in {most} stages"):
            stages(20, workers=workers)
    with pytest.raises(NoDomainError, match="expected 6 workers"):
        stages(0, stages=6)
    with pytest.raises(InputError, match="at most 6"):
        stages(0, workers=7, stages=7)


def test_the_slow_worker_of_three_gets_the_fewest_layers() -> None:
    candidates = [Candidate("slow", "A", speed=0.25), Candidate("x", "B"), Candidate("y", "C")]
    chosen, cuts = place(candidates, 3, 0, [1.0] * 9, [1] * 9)
    assert ([one.address for one in chosen], cuts) == (["x", "y", "slow"], (4, 8))


@given(st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=9))
def test_paces_are_told_apart_only_where_they_differ_much(paces: list[float]) -> None:
    found = levelled(paces)
    fastest = max(paces)
    for pace, speed in zip(paces, found, strict=True):
        assert pace <= speed * fastest * (1 + 1e-12)
        assert pace >= 0.75 * speed * fastest * (1 - 1e-12)
    groups = sorted(set(found), reverse=True)
    assert groups[0] == 1.0
    assert all(slower < 0.75 * faster * (1 + 1e-12) for faster, slower in pairwise(groups))


def test_levels_of_known_paces() -> None:
    assert levelled([]) == []
    assert levelled([10.0, 9.0, 4.0, 8.0, 3.5]) == [1.0, 1.0, 0.4, 1.0, 0.4]


def test_a_pace_is_that_of_memory() -> None:
    assert 1e7 < decoding_pace() < 1e13
