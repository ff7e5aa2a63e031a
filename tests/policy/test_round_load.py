"""What a round costs: coverage of every domain, balance of their loads, time of the policy itself."""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_sdc.evidence.codec import digest
from dask_sdc.evidence.seal import SealedBatch, SealedStatistic
from dask_sdc.policy.messages import Dispatch, Landed, Place, RoundRecord, Settings, Tick
from dask_sdc.policy.pool import Pool
from dask_sdc.policy.roster import Roster
from dask_sdc.policy.round import Round
from dask_sdc.policy.sampling import CoverageSampler, longest_run
from tests.policy.simulated import Machine, Simulation, compare, payload_of, place

# -- coverage (P2) ---------------------------------------------------------------------


def longest_unaudited(rounds: list[Simulation]) -> int:
    """Return the most shards in a row that a domain was given without an audit of one of them."""
    run: dict[str, int] = {}
    worst = 0
    for simulation in rounds:
        audited = {
            (k, name)
            for _, o in simulation.sent
            if o.role == "audit"
            for name in o.apart_from
            for k in o.shard_ids
        }
        for _, order in simulation.sent:
            for shard_id in order.shard_ids if order.role == "primary" else ():
                drawn = (shard_id, order.domain) in audited
                run[order.domain] = 0 if drawn else run.get(order.domain, 0) + 1
                worst = max(worst, run[order.domain])
    return worst


@settings(max_examples=60)
@given(st.data())
def test_no_domain_goes_long_without_an_audit(data: st.DataObject) -> None:
    rate = data.draw(st.sampled_from([0.05, 0.1, 0.3, 1 / 3, 0.5]))
    n = data.draw(st.integers(2, 6))
    speeds = data.draw(st.lists(st.sampled_from([1.0, 0.5, 2.0]), min_size=n, max_size=n))
    sampler = CoverageSampler(rate, data.draw(st.integers(0, 100)))
    rounds: list[Simulation] = []
    preferred: Mapping[int, str] | None = None
    cost = None
    for number in range(data.draw(st.integers(2, 10))):
        simulation = Simulation(
            [Machine(place(i, 1 + i % 2), speed) for i, speed in enumerate(speeds)],
            data.draw(st.integers(1, 40)),
            cost=data.draw(st.sampled_from([0.05, 0.001])),
            sampler=sampler,
            number=number,
            known_cost=cost,
            preferred=preferred,
        ).run()
        assert simulation.error is None and not simulation.round.record.skipped
        preferred, cost = simulation.round.owners(), simulation.round.cost
        rounds.append(simulation)
    assert longest_unaudited(rounds) <= longest_run(rate)


# -- balance ---------------------------------------------------------------------------


def excess(
    shards: int,
    cost: float,
    rate: float,
    *,
    rounds: int = 10,
    domains: int = 2,
    speeds: tuple[float, ...] = (),
) -> float:
    """Return the mean of makespan / ideal - 1 - audits / shards, less what whole shards make unavoidable."""
    speeds = speeds or (1.0,) * domains
    ideal = shards * cost / sum(speeds)
    sampler = CoverageSampler(rate, 0)
    total = 0.0
    for number in range(rounds):
        # The cost is not known beforehand: every round begins with single shards.
        simulation = Simulation(
            [Machine(place(i), speed) for i, speed in enumerate(speeds)],
            shards,
            cost=cost,
            sampler=sampler,
            number=number,
            settings=Settings(),
        ).run()
        work = shards + simulation.round.record.audited
        uneven = (math.ceil(work / domains) - work / domains) * cost if len(set(speeds)) == 1 else 0.0
        total += (simulation.now - uneven) / ideal - work / shards
    return total / rounds


@pytest.mark.parametrize(("rate", "bound"), [(0.0, 0.02), (0.1, 0.025), (0.3, 0.04)])
def test_64_shards_of_50_ms_on_two_domains(rate: float, bound: float) -> None:
    # 3 ms for each batch and 5 ms each way.
    assert excess(64, 0.05, rate) <= bound


@pytest.mark.parametrize(("rate", "bound"), [(0.0, 0.04), (0.1, 0.04)])
def test_640_shards_of_5_ms_on_two_domains(rate: float, bound: float) -> None:
    assert excess(640, 0.005, rate) <= bound


def test_a_slow_domain_is_given_less() -> None:
    assert excess(640, 0.005, 0.1, speeds=(1.0, 0.5)) <= 0.07
    assert excess(64, 0.05, 0.0, speeds=(1.0, 0.8)) <= 0.05


def test_rounds_of_an_iterative_fit() -> None:
    """64 shards of 1.4 ms: one batch and one batch of audits on each domain."""
    sampler = CoverageSampler(0.1, 0)
    preferred: Mapping[int, str] | None = None
    cost, times = None, []
    for number in range(20):
        simulation = Simulation(
            [Machine(place(i)) for i in range(2)],
            64,
            cost=0.0014,
            sampler=sampler,
            number=number,
            known_cost=cost,
            preferred=preferred,
            settings=Settings(),
        ).run()
        preferred, cost = simulation.round.owners(), simulation.round.cost
        times.append(simulation.now)
    unaudited = 0.005 + 0.003 + 32 * 0.0014 + 0.005
    assert sum(times[1:]) / len(times[1:]) <= 1.15 * unaudited


# -- time of the policy ----------------------------------------------------------------


def drive(domains: int, shards: int, rate: float, *, lanes: int = 16, cost: float = 0.005) -> Round:
    """Run a round whose batches come back in the order in which they were sent."""
    record = {
        k: SealedStatistic(k, "ok", 1, payload_of(float(k)), digest(payload_of(float(k))), b"", cost)
        for k in range(shards)
    }
    places = [place(i, lane=i % lanes) for i in range(domains)]
    round_ = Round(0, range(shards), places, CoverageSampler(rate, 1), compare, Settings(timeout=1e9))
    queue = deque(round_.start(0.0))
    now = 0.0
    while not round_.done:
        order = queue.popleft()
        assert isinstance(order, Dispatch)
        now += 0.001
        records = tuple(record[k] for k in order.shard_ids)
        result = SealedBatch(0, order.role, 0, order.domain, "w", "F", b"", records=records)
        queue += round_.handle(Landed(order.batch_id, result, now))
    return round_


def seconds(domains: int, shards: int, rate: float, *, lanes: int = 16, cost: float = 0.005) -> float:
    """Return the CPU time of the best of three runs, without the collector of cycles."""
    times = []
    for _ in range(3):
        gc.collect()
        gc.disable()
        try:
            began = time.process_time()
            round_ = drive(domains, shards, rate, lanes=lanes, cost=cost)
            times.append(time.process_time() - began)
        finally:
            gc.enable()
        assert len(round_.settled) == shards
    return min(times)


@pytest.mark.parametrize(
    ("few", "many"), [((500, 500), (4000, 4000)), ((4, 10_000), (4, 80_000)), ((200, 1000), (1600, 8000))]
)
def test_time_grows_with_the_work_and_not_with_its_square(
    few: tuple[int, int], many: tuple[int, int]
) -> None:
    # Eight times the work: 8 times the time if it is linear, 64 if it is quadratic. A cache that is shared
    # with strangers takes its part.
    assert seconds(*many, 0.1, cost=1e-5) < 24 * seconds(*few, 0.1, cost=1e-5)


def test_as_many_lanes_as_domains_are_no_slower() -> None:
    assert seconds(2000, 2000, 0.3, lanes=2000) < 3 * seconds(2000, 2000, 0.3, lanes=16)


@pytest.mark.slow
def test_ten_thousand_domains_and_a_hundred_thousand_shards() -> None:
    # Measured with ten other processes on two cores: 1.3 s and 1.9 s; the simulated workers come on top.
    assert seconds(10_000, 10_000, 0.1) < 4.0
    assert seconds(4, 100_000, 0.1, cost=1e-5) < 8.0


# -- the structures that make it so ----------------------------------------------------


def roster_of(places: list[Place]) -> Roster:
    roster = Roster({})
    roster.record = RoundRecord(0, 0, len(places))
    for one in places:
        roster.join(one, 0.0)
    return roster


@settings(max_examples=50)
@given(st.data())
def test_the_roster_keeps_its_counts_right(data: st.DataObject) -> None:
    """Against the same questions answered by a look at every domain."""
    n = data.draw(st.integers(1, 7))
    places = [
        place(i, data.draw(st.integers(1, 3)), data.draw(st.sampled_from("FG")), data.draw(st.integers(0, 3)))
        for i in range(n)
    ]
    roster = roster_of(places)
    out: list[int] = []
    for _ in range(data.draw(st.integers(1, 40))):
        roster.now += data.draw(st.sampled_from([0.0, 0.5]))
        domain = roster[f"d{data.draw(st.integers(0, n - 1))}"]
        action = data.draw(
            st.sampled_from(
                ["send", "send", "back", "leave", "join", "suspect", "bar", "learn", "fail", "pardon"]
            )
        )
        if action == "send":
            role = data.draw(st.sampled_from(["primary", "audit"]))
            out.append(roster.send(role, range(data.draw(st.integers(1, 5))), domain, roster.now))
        elif action == "back" and out:
            roster.take_back(out.pop(data.draw(st.integers(0, len(out) - 1))))
        elif action == "leave":
            roster.leave(domain)
        elif action == "join":
            roster.join(place(0, data.draw(st.integers(1, 3)), "F", domain.place.lane), roster.now) if (
                domain.name == "d0"
            ) else roster.join(domain.place, roster.now)
        elif action == "suspect":
            roster.suspect(domain, data.draw(st.booleans()))
        elif action == "bar":
            roster.bar(domain, "for a reason")
        elif action == "learn":
            roster.learn_cost(domain, [data.draw(st.sampled_from([0.1, 0.2, 1.0]))], [8], 10.0)
        elif action == "fail":
            roster.fail(domain, 2, "it failed")
        elif action == "pardon":
            roster.pardon()
        check_roster(roster)


def check_roster(roster: Roster) -> None:
    usable = [d for d in roster.domains.values() if d.usable]
    assert roster.usable() == usable and len(roster) == len(usable)
    assert roster.lanes() == len({d.place.lane for d in usable})
    assert roster.power() == pytest.approx(sum(d.power for d in usable))
    work = sum(d.power * (d.until - roster.now) for d in usable if d.outstanding)
    assert roster.work() == pytest.approx(max(0.0, work), abs=1e-9)
    for domain in roster.domains.values():
        held = [o.order for o in domain.outstanding.values()]
        assert domain.primaries == sum(order.role == "primary" for order in held)
        assert domain.work == pytest.approx(sum(order.expected for order in held), abs=1e-4)
    by_time = sorted(usable, key=lambda d: (d.until, d.name))
    assert roster.find(lambda d: True) is (by_time[0] if by_time else None)
    hungry = [d for d in by_time if d.hungry]
    assert roster.hungry(lambda d: True) is (hungry[0] if hungry else None)
    for one in roster.domains.values():
        apart = [d for d in by_time if d.place.lane != one.place.lane]
        wanted = min(apart, key=lambda d: d.place.fingerprint != one.place.fingerprint, default=None)
        assert roster.partner([one.place]) is wanted


@settings(max_examples=50)
@given(st.data())
def test_the_pool_hands_out_every_shard_once(data: st.DataObject) -> None:
    n, shards = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 20))
    roster = roster_of([place(i, lane=data.draw(st.integers(0, 2))) for i in range(n)])
    names = [f"d{i}" for i in range(n)] + ["gone"]
    preferred = data.draw(st.dictionaries(st.integers(0, 19), st.sampled_from(names)))
    pool = Pool(range(shards), preferred, roster.find)
    waiting = set(range(shards))
    failed: dict[int, set[str]] = {}
    retried: set[int] = set()
    for _ in range(30):
        assert len(pool) == len(waiting)
        domain = roster[f"d{data.draw(st.integers(0, n - 1))}"]
        count = data.draw(st.integers(1, 5))
        if not pool.serves(domain):
            # Only what somebody else should rather do is left.
            assert waiting <= retried
            assert all(domain.name in failed[k] or n > 1 for k in waiting)
            continue
        taken = pool.take(domain, count)
        assert 1 <= len(taken) <= count and len(set(taken)) == len(taken) and set(taken) <= waiting
        waiting -= set(taken)
        for shard_id in taken:
            assert domain.name not in failed.get(shard_id, ()) or failed[shard_id] >= set(names[:-1])
            if data.draw(st.integers(0, 3)) == 0:
                failed.setdefault(shard_id, set()).add(domain.name)
                retried.add(shard_id)
                waiting.add(shard_id)
                lane = data.draw(st.none() | st.integers(0, 2))
                pool.put_back(shard_id, domain.name, lane, data.draw(st.booleans()))
    # Somebody may always take what is left.
    while len(pool):
        domain = next(d for d in roster.usable() if pool.serves(d))
        waiting -= set(pool.take(domain, 5))
    assert not waiting


def test_a_domain_takes_its_own_shards_first_and_then_helps_whoever_has_most() -> None:
    roster = roster_of([place(i) for i in range(3)])
    homes = {0: "d0", 1: "d0", 2: "d1", 3: "d1", 4: "d1", 5: "d2", 6: "d2"}
    pool = Pool(range(9), homes, roster.find)
    assert pool.take(roster["d0"], 5) == [0, 1]
    assert pool.take(roster["d0"], 5) == [7, 8]  # nobody's
    assert pool.take(roster["d1"], 2) == [2, 3]
    assert pool.take(roster["d0"], 5) == [5, 6]  # d2 has more left than d1
    assert pool.take(roster["d0"], 5) == [4]


def test_a_tick_costs_nothing_between_looks() -> None:
    round_ = Round(0, range(10), [place(0)], CoverageSampler(0.0), compare, Settings(timeout=100.0))
    round_.start(0.0)
    assert round_.handle(Tick(1.0)) == []
