"""Audits that fall due together share batches, and stay apart from every primary among them."""

from __future__ import annotations

import pytest

from dask_sdc.policy.messages import Dispatch, Settings, Tick
from dask_sdc.policy.round import Round
from dask_sdc.policy.sampling import CoverageSampler
from tests.policy.simulated import compare, place


def orders_of(lanes: list[int], cost: float, rate: float = 0.1, prints: str = "F" * 9) -> list[Dispatch]:
    """Return what a round orders first on domains of one thread in these lanes."""
    places = [place(i, 1, prints[i], lane) for i, lane in enumerate(lanes)]
    machine = Round(
        0, range(64), places, CoverageSampler(rate, 0), compare, Settings(batch_min=0.03), cost=cost
    )
    return [i for i in machine.handle(Tick(0.0)) if isinstance(i, Dispatch)]


def owners_of(orders: list[Dispatch]) -> dict[int, str]:
    return {shard: order.domain for order in orders if order.role == "primary" for shard in order.shard_ids}


def test_small_audits_of_one_moment_share_a_batch_per_domain() -> None:
    orders = orders_of([0, 1], cost=0.002)
    audits = [order for order in orders if order.role == "audit"]
    primaries = [order for order in orders if order.role == "primary"]
    assert len(primaries) > 2
    assert sorted(order.domain for order in audits) == sorted({order.domain for order in primaries})
    assert sum(len(order.shard_ids) for order in audits) >= 4


@pytest.mark.parametrize("lanes", [[0, 1], [0, 0, 1], [0, 1, 2], [0, 0, 1, 1], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("cost", [0.0001, 0.002, 0.5])
@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_nobody_audits_its_own_lane(lanes: list[int], cost: float, rate: float) -> None:
    orders = orders_of(lanes, cost, rate)
    owners, lane = owners_of(orders), {f"d{i}": number for i, number in enumerate(lanes)}
    audited = set()
    for order in orders:
        if order.role == "audit":
            primaries = {owners[shard] for shard in order.shard_ids}
            assert set(order.apart_from) == primaries
            assert lane[order.domain] not in {lane[name] for name in primaries}
            assert not audited & set(order.shard_ids)
            audited |= set(order.shard_ids)
    if rate == 1.0:
        assert audited == set(owners)


def test_only_the_audits_of_one_primary_may_exceed_the_least_size_of_a_batch() -> None:
    orders = orders_of([0, 1], cost=0.01, rate=0.3)
    batch_of = {shard: o.batch_id for o in orders if o.role == "primary" for shard in o.shard_ids}
    audits = [order for order in orders if order.role == "audit"]
    assert len(audits) > 1
    for order in audits:
        assert len(order.shard_ids) <= 3 or len({batch_of[shard] for shard in order.shard_ids}) == 1


def test_long_audits_are_spread_over_the_domains() -> None:
    audits = [
        order.domain for order in orders_of([0, 1, 2, 3, 4, 5], cost=0.5, rate=1.0) if order.role == "audit"
    ]
    assert len(set(audits)) == 6


def test_an_audit_goes_to_the_same_environment_though_a_batch_of_another_is_open() -> None:
    orders = orders_of([0, 1, 2, 3], cost=0.0001, rate=0.2, prints="FGFG")
    owners, prints = owners_of(orders), {f"d{i}": name for i, name in enumerate("FGFG")}
    audits = [order for order in orders if order.role == "audit"]
    assert audits
    for order in audits:
        assert {prints[owners[shard]] for shard in order.shard_ids} == {prints[order.domain]}
