"""Coverage: share, gap, rounds to detection, positions; for any rate, shape and cut into calls."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dask_sdc.evidence.codec import decode, encode
from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.policy.sampling import SHARE_BOUND, CoverageSampler, check_rate, longest_run

rates = st.one_of(
    st.sampled_from([0.1, 0.3, 0.5, 1 / 3, 2 / 3, 0.9, 0.99, 1.0, 0.07]),
    st.floats(0.02, 1.0),
)
#: Shards of a domain, by round, and how each round is cut into calls.
shapes = st.lists(
    st.tuples(st.one_of(st.integers(1, 4), st.integers(1, 40)), st.integers(1, 40)),
    min_size=1,
    max_size=8,
)


def rounds_of(shape: list[tuple[int, int]], shards: int) -> list[list[list[int]]]:
    """Rounds of calls of shard ids: the shape over and over until there are enough shards."""
    out, total = [], 0
    for n, batch in itertools.cycle(shape):
        ids = list(range(n))
        out.append([ids[i : i + batch] for i in range(0, n, batch)])
        total += n
        if total >= shards:
            return out
    raise AssertionError


@given(rate=rates, shape=shapes, seed=st.integers(0, 2**40), numbered=st.booleans())
@example(rate=0.1, shape=[(1, 1)], seed=0, numbered=False)
@example(rate=0.1, shape=[(30, 30), (30, 30), *[(1, 1)] * 60], seed=0, numbered=True)
@example(rate=0.3, shape=[(9, 2), (9, 9), (7, 7), *[(1, 1)] * 20], seed=3, numbered=False)
@example(rate=0.1, shape=[(10, 10)] * 4 + [(1, 1)] * 11, seed=2, numbered=True)
@example(rate=0.5, shape=[(10, 1)], seed=0, numbered=True)
@example(rate=0.7, shape=[(10, 3), (1, 1)], seed=0, numbered=True)
def test_share_gap_and_detection(
    rate: float, shape: list[tuple[int, int]], seed: int, numbered: bool
) -> None:
    sampler, k = CoverageSampler(rate, seed), math.ceil(1 / rate)
    exact = Fraction(rate)
    computed = audits = run = idle = 0
    for number, calls in enumerate(rounds_of(shape, 600)):
        found = False
        for ids in calls:
            drawn = sampler.draw("d", ids, number if numbered else None)
            assert list(drawn) == [i for i in ids if i in drawn]  # in order, none invented
            found |= bool(drawn)
            for shard in ids:
                computed += 1
                audits += shard in drawn
                run = 0 if shard in drawn else run + 1
                assert run <= k, "a run of unaudited shards"
                assert abs(audits - exact * computed) < SHARE_BOUND, "the share"
        idle = 0 if found else idle + 1
        assert idle < k or k == 1, "a persistent fault would go unseen for k rounds"
    assert sampler.computed("d") == computed
    assert sampler.unaudited("d") == run


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 1 / 3, 0.05])
@pytest.mark.parametrize(("n", "batch"), [(2, 2), (5, 5), (10, 10), (10, 3), (10, 1), (20, 20), (30, 1)])
def test_every_position_has_its_turn(rate: float, n: int, batch: int) -> None:
    k = longest_run(rate)
    sampler = CoverageSampler(rate, seed=5)
    counts: Counter[int] = Counter()
    for number, calls in enumerate(rounds_of([(n, batch)], n * 30 * k)):
        for ids in calls:
            counts.update(sampler.draw("d", ids, number))
        if number == 3 * k:
            assert set(counts) == set(range(n)), "not all positions within 3 k rounds"
    assert min(counts.values()) >= 30 / 4  # nobody below a quarter of its share of 30


def test_one_shard_a_round_is_audited_every_kth_time_exactly() -> None:
    sampler = CoverageSampler(0.1, seed=3)
    hits = [t for t in range(1000) if sampler.draw("d", [t % 7])]
    assert len(hits) == 100 and set(np.diff(hits)) == {10} and hits[0] < 10


def test_long_run_share_is_exact() -> None:
    sampler = CoverageSampler(0.37, seed=11)
    audits = sum(len(sampler.draw("d", range(1000))) for _ in range(200))
    assert abs(audits - 74_000) < SHARE_BOUND


@given(rate=rates, seed=st.integers(0, 1000), cut=st.integers(1, 50))
def test_cut_into_calls_moves_no_audit_far(rate: float, seed: int, cut: int) -> None:
    """The number of audits at every place differs by less than the two bounds together."""
    whole, parts = CoverageSampler(rate, seed), CoverageSampler(rate, seed)
    one = set(whole.draw("d", range(300)))
    other = {k for i in range(0, 300, cut) for k in parts.draw("d", range(i, min(i + cut, 300)), 0)}
    ahead = np.cumsum([(k in one) - (k in other) for k in range(300)])
    assert np.abs(ahead).max() < 2 * SHARE_BOUND


# -- extremes


def test_rate_zero_never_audits_and_one_always_does() -> None:
    none, every = CoverageSampler(0.0), CoverageSampler(1.0)
    for n in (0, 1, 5, 100):
        assert none.draw("d", range(n)) == ()
        assert every.draw("d", range(n)) == tuple(range(n))


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_rate_that_rounds_to_zero_still_audits(n: int) -> None:
    sampler = CoverageSampler(0.1, seed=1)
    assert sum(len(sampler.draw("d", range(n))) for _ in range(100)) >= 10 * n - 1


@pytest.mark.parametrize("rate", [5e-324, 1e-300, 1e-18, 1e-9])
def test_tiny_rates_do_not_break(rate: float) -> None:
    sampler = CoverageSampler(rate, seed=1)
    assert all(len(sampler.draw("d", range(1000))) <= 1 for _ in range(3))


# -- the seed


def draws(sampler: CoverageSampler, domains: list[str], rounds: int = 30) -> dict[str, list[tuple[int, ...]]]:
    return {d: [sampler.draw(d, range(10), t) for t in range(rounds)] for d in domains}


def test_domains_do_not_disturb_each_other() -> None:
    names = [f"d{i}" for i in range(8)]
    together = CoverageSampler(0.1, 7)
    interleaved: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}
    for number in range(30):
        for name in reversed(names):
            interleaved[name].append(together.draw(name, range(10), number))
    assert interleaved == draws(CoverageSampler(0.1, 7), names)


def test_the_seed_decides_what_is_drawn() -> None:
    names = [f"d{i}" for i in range(50)]
    one, same, other = (draws(CoverageSampler(0.1, seed), names, 12) for seed in (1, 1, 2))
    assert one == same != other
    # inside of a call the seed draws among equals
    places = Counter(CoverageSampler(0.1, seed).draw("d", range(10))[0] for seed in range(2000))
    assert set(places) == set(range(10)) and min(places.values()) >= 20
    # the first audits of many domains are spread evenly over positions: chi-square, 9 degrees
    many = [f"d{i}" for i in range(2000)]
    sampler = CoverageSampler(0.1, 4)
    first = Counter(next(k for t in range(10) if (k := sampler.draw(d, [t]))) for d in many)
    counts = np.array(list(first.values()))
    assert len(counts) == 10 and ((counts - 200.0) ** 2 / 200.0).sum() < 33.7  # p = 1e-4


# -- debt


def test_a_refund_falls_due_at_once() -> None:
    sampler = CoverageSampler(0.1, seed=2)
    hit = next(t for t in range(20) if sampler.draw("d", [t]))
    assert sampler.last_audited("d") == (hit, hit)
    before = sampler.debt("d")
    sampler.refund("d")
    assert sampler.debt("d") == before + 1
    assert sampler.draw("d", [99]) == (99,)
    assert sampler.last_audited("d") == (hit + 1, 99)


@given(rate=rates, shape=shapes, seed=st.integers(0, 99))
def test_a_refund_falls_due_at_once_whatever_went_before(
    rate: float, shape: list[tuple[int, int]], seed: int
) -> None:
    sampler = CoverageSampler(rate, seed)
    for number, calls in enumerate(rounds_of(shape, 60)):
        for ids in calls:
            sampler.draw("d", ids, number)
    sampler.refund("d")
    assert sampler.draw("d", [999], 10**6) == (999,)


@given(rate=rates, n=st.integers(1, 12), lost=st.sets(st.integers(0, 99)))
def test_refunded_audits_are_made_up_for(rate: float, n: int, lost: set[int]) -> None:
    sampler = CoverageSampler(rate, 5)
    computed = done = 0
    for number in range(400):
        drawn = sampler.draw("d", range(n), number)
        computed += n
        if number in lost:
            sampler.refund("d", len(drawn))
        else:
            done += len(drawn)
    if rate < 0.7:  # with room to catch up
        assert abs(done - Fraction(rate) * computed) < SHARE_BOUND
    assert done <= computed


def test_a_domain_may_be_watched_more_closely() -> None:
    sampler = CoverageSampler(0.1, seed=2)
    sampler.draw("d", range(8))
    sampler.set_rate("d", 1.0)
    assert (sampler.rate("d"), sampler.rate("other"), sampler.base_rate) == (1.0, 0.1, 0.1)
    assert sampler.draw("d", range(6)) == tuple(range(6))
    sampler.set_rate("d", 0.1)
    assert sum(len(sampler.draw("d", range(10))) for _ in range(50)) in (49, 50, 51)
    sampler.set_rate("d", 0.0)
    assert sampler.draw("d", range(100)) == ()


# -- state


@given(rate=rates, shape=shapes, stop=st.integers(0, 20))
def test_a_checkpoint_goes_on_identically(rate: float, shape: list[tuple[int, int]], stop: int) -> None:
    sampler = CoverageSampler(rate, 9)
    rounds = rounds_of(shape, 200)
    for number, calls in enumerate(rounds[:stop]):
        for ids in calls:
            sampler.draw("d", ids, number)
    saved = sampler.to_dict()
    assert decode(encode(saved)) == saved  # closed types
    copies = [
        CoverageSampler.from_dict(saved),
        CoverageSampler.from_dict(json.loads(json.dumps(saved))),
    ]
    for number, calls in enumerate(rounds[stop:], stop):
        for ids in calls:
            expected = sampler.draw("d", ids, number)
            assert [copy.draw("d", ids, number) for copy in copies] == [expected] * 2
    assert copies[0].to_dict() == sampler.to_dict() == copies[1].to_dict()


# -- refusals


@pytest.mark.parametrize("rate", [True, False, "0.1", None, 1j, np.bool_(True)])
def test_rates_of_wrong_type_are_refused(rate: object) -> None:
    with pytest.raises(InputTypeError, match="audit_rate: expected a real number"):
        CoverageSampler(rate)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [-0.1, 1.0000001, math.nan, math.inf, -math.inf])
def test_rates_out_of_range_are_refused(rate: float) -> None:
    with pytest.raises(InputError, match=r"expected a finite number in \[0, 1\]"):
        CoverageSampler(rate)
    with pytest.raises(InputError, match="audit_rate"):
        CoverageSampler(0.1).set_rate("d", rate)


@pytest.mark.parametrize("rate", [0, 1, np.float32(0.5), np.int64(1), Fraction(1, 4)])
def test_real_numbers_of_other_types_are_taken(rate: float) -> None:
    assert check_rate(rate) == float(rate) and type(check_rate(rate)) is float


def test_other_bad_input_is_refused() -> None:
    sampler = CoverageSampler(0.1)
    with pytest.raises(InputError, match="domain d: expected distinct shards"):
        sampler.draw("d", [1, 2, 1])
    for n in (-1, 0.5, True):
        with pytest.raises(InputError, match="refund of domain d: expected an int"):
            sampler.refund("d", n)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="seed: expected an int"):
        CoverageSampler(0.1, seed=0.5)  # type: ignore[arg-type]
