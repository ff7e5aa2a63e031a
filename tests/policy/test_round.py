"""Every schedule ends: drawn clusters, faults, losses and settings, played to the end."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from dask_sdc.exceptions import NoDomainError, ShardError
from dask_sdc.policy.cases import TOO_FEW
from dask_sdc.policy.messages import Dispatch, Settings, Tick
from dask_sdc.policy.round import Round
from dask_sdc.policy.sampling import CoverageSampler
from tests.policy.simulated import (
    COMPUTE,
    GARBLING,
    LOSSES,
    LOUD,
    MESS,
    Fault,
    Loss,
    Machine,
    Simulation,
    compare,
    place,
)

ROLES = ("primary", "audit", "witness", "rerun", "heal")


@st.composite
def faults(draw: st.DrawFn, shards: int, kinds: tuple[str, ...]) -> Fault:
    """Draw a fault of a domain."""
    return Fault(
        draw(st.sampled_from(kinds)),
        draw(st.none() | st.frozensets(st.integers(0, shards - 1), min_size=1)),
        draw(st.none() | st.frozensets(st.sampled_from(ROLES), min_size=1)),
        draw(st.none() | st.integers(1, 4)),
        draw(st.sampled_from([0.0, 0.0, 0.2, 0.5])),
    )


@st.composite
def simulations(
    draw: st.DrawFn,
    *,
    faulty: int = 6,
    losses: int = 4,
    kinds: tuple[str, ...] = COMPUTE + GARBLING + LOUD + LOSSES + MESS,
) -> Simulation:
    """Draw a round on a cluster where nearly everything may go wrong."""
    n = draw(st.integers(1, 6))
    lanes = draw(st.integers(1, n))
    shards = draw(st.integers(1, 30))
    broken = draw(st.sets(st.integers(0, n - 1), max_size=faulty))
    machines = [
        Machine(
            place(i, draw(st.sampled_from([1, 1, 2, 4])), draw(st.sampled_from("FFFG")), i % lanes),
            draw(st.sampled_from([1.0, 0.5, 3.0])),
            tuple(draw(st.lists(faults(shards, kinds), min_size=1, max_size=2))) if i in broken else (),
            draw(st.none() | st.floats(0.1, 3.0)),
        )
        for i in range(n)
    ]
    names = [m.place.domain for m in machines]
    left = st.builds(
        lambda domain, at, back: Loss(domain, at, None if back is None else at + back),
        st.sampled_from(names),
        st.floats(0.0, 2.0),
        st.none() | st.floats(0.0, 3.0),
    )
    return Simulation(
        machines,
        shards,
        cost=draw(st.sampled_from([0.05, 0.001, 0.3])),
        rate=draw(st.sampled_from([0.0, 0.1, 0.3, 1.0, 1.0])),
        settings=Settings(timeout=5.0, quarantine=draw(st.booleans())),
        losses=draw(st.lists(left, max_size=losses)),
        refuse=dict.fromkeys(draw(st.sets(st.sampled_from(names))), "refused"),
        bad=draw(st.dictionaries(st.integers(0, 29), st.sampled_from(["violation", "error"]), max_size=1)),
        seed=draw(st.integers(0, 1000)),
        known_cost=draw(st.sampled_from([None, 0.05])),
        preferred=draw(st.sampled_from([None, {k: names[k % n] for k in range(shards)}])),
    )


def check_counts(simulation: Simulation) -> None:
    """Check what the counters of a finished round add up to."""
    record = simulation.round.record
    sent = Counter[str]()
    for _, order in simulation.sent:
        sent[order.role] += len(order.shard_ids)
    assert record.evaluations == sum(sent.values())
    assert record.shards == simulation.shards
    assert set(record.quarantined) <= set(record.suspects)
    if simulation.error is not None:
        return
    # Every primary beyond the first of its shard, and all that was staged.
    assert record.recomputed == sent["primary"] - record.shards + sent["heal"]
    ended = record.agreed + record.mismatches
    assert ended <= record.audited <= ended + sum(record.skipped.values())
    if TOO_FEW not in record.skipped:
        assert record.audited == ended + sum(record.skipped.values())


@settings(max_examples=200)
@given(simulations())
def test_every_schedule_ends_with_an_answer_or_a_reason(simulation: Simulation) -> None:
    # `Simulation.run` itself checks placement, orders to suspects, and that it ends.
    simulation.run()
    assert simulation.now < 400.0
    if simulation.error is not None:
        assert isinstance(simulation.error, ShardError | NoDomainError)
    check_counts(simulation)


@settings(max_examples=80)
@given(simulations(faulty=0, losses=0))
def test_a_clean_cluster_never_sees_a_mismatch(simulation: Simulation) -> None:
    simulation.bad = {}
    simulation.run()
    assert simulation.error is None and not simulation.closed
    assert simulation.round.record.mismatches == 0 and not simulation.round.replaced
    assert simulation.values == simulation.clean_values
    check_counts(simulation)


def test_audits_cost_what_they_are_asked_for() -> None:
    for rate in (0.0, 0.1, 0.25, 1.0):
        simulation = Simulation([Machine(place(i)) for i in range(3)], 200, cost=0.001, rate=rate).run()
        record = simulation.round.record
        # The sampler is off by less than 2 audits for each domain.
        assert abs(record.audited - 200 * rate) < 6 or (rate == 1.0 and record.audited == 200)
        assert record.agreed == record.audited and not record.skipped
        assert record.evaluations == 200 + record.audited


def test_one_domain_is_not_audited_and_says_so() -> None:
    simulation = Simulation([Machine(place(0))], 40, rate=0.25).run()
    record = simulation.round.record
    assert record.audited == 0 and "at least two are needed" in record.note
    assert record.skipped == {TOO_FEW: sum(record.skipped.values())} and record.skipped[TOO_FEW] >= 9
    # What could not be done is owed, once.
    assert 1.0 <= simulation.sampler.debt("d0") < 2.0


def test_two_domains_of_one_lane_do_not_check_each_other() -> None:
    simulation = Simulation([Machine(place(i, lane=0)) for i in range(2)], 20, rate=1.0).run()
    assert simulation.round.record.audited == 0
    assert {order.role for _, order in simulation.sent} == {"primary"}


def test_no_shards_is_done_at_once() -> None:
    round_ = Round(0, [], [place(0)], CoverageSampler(0.1), compare, Settings())
    assert [type(i).__name__ for i in round_.start(0.0)] == ["Done"]
    assert round_.done and round_.handle(Tick(1.0)) == []


def test_nobody_there_is_an_error_that_names_the_barred() -> None:
    simulation = Simulation([Machine(place(0))], 3, barred={"d0": "quarantined"}).run()
    assert isinstance(simulation.error, NoDomainError) and "quarantined" in str(simulation.error)


def test_preferred_domains_compute_their_shards() -> None:
    preferred = {k: f"d{k % 4}" for k in range(40)}
    machines = [Machine(place(i)) for i in range(4)]
    simulation = Simulation(machines, 40, rate=0.0, known_cost=0.05, preferred=preferred).run()
    at_home = sum(simulation.round.owners()[k] == preferred[k] for k in preferred)
    assert at_home >= 36


def test_batches_stay_small_enough_for_a_frame() -> None:
    settings_ = Settings(batch_bytes=80, batch_shards=7)  # ten payloads of eight bytes
    machines = [Machine(place(i)) for i in range(2)]
    simulation = Simulation(machines, 200, cost=1e-5, rate=0.0, known_cost=1e-5, settings=settings_).run()
    assert max(len(order.shard_ids) for _, order in simulation.sent) == 7
    simulation = Simulation(
        machines, 200, cost=1e-5, rate=0.0, settings=Settings(batch_bytes=80, batch_shards=50)
    ).run()
    assert max(len(order.shard_ids) for _, order in simulation.sent) == 10


def test_a_domain_cannot_talk_the_clock_into_nonsense() -> None:
    liar = Machine(place(0), faults=(Fault("absurd_cost"),))
    simulation = Simulation([liar, Machine(place(1)), Machine(place(2))], 60, rate=0.2).run()
    assert simulation.error is None and not simulation.closed and simulation.round.cost is not None
    assert 0.0 < simulation.round.cost < 1.0
    assert all(order.expected < 60.0 for _, order in simulation.sent if isinstance(order, Dispatch))
