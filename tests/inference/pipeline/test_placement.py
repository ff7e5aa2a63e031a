"""Cuts and places of stages: exact against a search over all cuts, domains kept apart."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError, NoDomainError
from dask_sdc.inference.pipeline.placement import (
    Candidate,
    boundaries_of,
    choose_workers,
    expect_workers,
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
