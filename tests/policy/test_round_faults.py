"""Who is named when domains compute, send or receive wrongly, and what the answer then is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_sdc.exceptions import InvariantError, ShardError
from dask_sdc.policy.messages import Settings
from dask_sdc.policy.verdict import Outcome, Persistence
from tests.policy.simulated import COMPUTE, GARBLING, LOSSES, MESS, Fault, Machine, Simulation, place

#: What is wrong in a way that an audit shows.
SHOWN = ("transient", "persistent", "shifting", "damaged", "garbled")


def cluster(n: int, faulty: dict[int, tuple[Fault, ...]], *, slots: int = 1) -> list[Machine]:
    """Return n domains in lanes of their own, some of them faulty."""
    return [Machine(place(i, slots), faults=faulty.get(i, ())) for i in range(n)]


def assert_clean(simulation: Simulation) -> None:
    """Check that the answer is what a clean cluster gives, to the bit."""
    assert simulation.error is None, simulation.error
    assert simulation.values == simulation.clean_values


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("n", [4, 6])
@pytest.mark.parametrize("kind", SHOWN)
def test_one_faulty_domain_is_named_and_healed(kind: str, n: int, slots: int) -> None:
    simulation = Simulation(cluster(n, {1: (Fault(kind),)}, slots=slots), 40, rate=1.0).run()
    record = simulation.round.record
    assert record.suspects == record.quarantined == ["d1"] and simulation.accused() == {"d1"}
    assert_clean(simulation)
    assert "d1" not in simulation.round.owners().values()
    named = [close for close in simulation.closed if close.decision.outcome is Outcome.SUSPECT]
    assert named and all(close.status == "committed" for close in named)
    wanted = {"transient": Persistence.TRANSIENT, "persistent": Persistence.PERSISTENT}
    if kind in wanted:
        assert {close.decision.persistence for close in named} == {wanted[kind]}


@st.composite
def one_faulty(draw: st.DrawFn, kinds: tuple[str, ...], rates: tuple[float, ...]) -> Simulation:
    """Draw a cluster of four to six domains, one of them faulty."""
    n, shards = draw(st.integers(4, 6)), draw(st.integers(1, 40))
    fault = Fault(
        draw(st.sampled_from(kinds)),
        draw(st.none() | st.frozensets(st.integers(0, shards - 1), min_size=1)),
        draw(st.none() | st.frozensets(st.sampled_from(["primary", "audit", "witness"]), min_size=1)),
        draw(st.none() | st.integers(1, 4)),
    )
    machines = cluster(n, {draw(st.integers(0, n - 1)): (fault,)}, slots=draw(st.sampled_from([1, 2])))
    for machine in machines:
        machine.speed = draw(st.sampled_from([1.0, 0.5, 2.0]))
    return Simulation(
        machines,
        shards,
        rate=draw(st.sampled_from(rates)),
        seed=draw(st.integers(0, 1000)),
        settings=Settings(timeout=5.0, quarantine=draw(st.booleans())),
        known_cost=draw(st.sampled_from([None, 0.05])),
    )


def faulty_of(simulation: Simulation) -> set[str]:
    """Return the domains that have a fault."""
    return {name for name, machine in simulation.domains.items() if machine.faults}


@settings(max_examples=200)
@given(one_faulty(COMPUTE + GARBLING + ("violation", "error") + LOSSES + MESS, (0.1, 0.3, 1.0)))
def test_a_healthy_domain_is_never_accused(simulation: Simulation) -> None:
    simulation.run()
    assert simulation.error is None
    assert simulation.accused() <= faulty_of(simulation)


@settings(max_examples=200)
@given(one_faulty((*SHOWN, "violation"), (1.0,)))
def test_what_is_all_audited_is_all_right(simulation: Simulation) -> None:
    simulation.run()
    assert_clean(simulation)
    struck = any(machine.used for machine in simulation.domains.values())
    if struck:
        assert simulation.round.record.mismatches > 0
        assert simulation.accused() == faulty_of(simulation)


@settings(max_examples=100)
@given(one_faulty((*LOSSES, *MESS, "error"), (0.1, 1.0)))
def test_lost_and_garbled_answers_leave_no_trace_in_the_result(simulation: Simulation) -> None:
    simulation.run()
    assert_clean(simulation)
    assert simulation.accused() == set()


@settings(max_examples=100)
@given(one_faulty(("persistent", "shifting"), (0.1, 0.3)))
def test_whoever_is_caught_once_is_healed_of_everything(simulation: Simulation) -> None:
    simulation.run()
    assert simulation.error is None
    # A wrong shard that met an audit names its domain; then nothing of that domain is left.
    if simulation.accused():
        assert_clean(simulation)
    audited = {k for _, order in simulation.sent if order.role == "audit" for k in order.shard_ids}
    for shard_id in audited:
        assert simulation.values[shard_id] == simulation.clean_values[shard_id]


@settings(max_examples=200)
@given(
    st.permutations(range(4)),
    st.tuples(*[st.sampled_from([k for k in SHOWN if k != "transient"] + ["violation"])] * 2),
    st.integers(1, 30),
    st.sampled_from([0.1, 0.3, 1.0]),
    st.integers(0, 100),
)
def test_two_faulty_of_four_never_blame_a_healthy_one(
    order: list[int], kinds: tuple[str, str], shards: int, rate: float, seed: int
) -> None:
    faulty = {i: (Fault(kind),) for i, kind in zip(order, kinds, strict=False)}
    simulation = Simulation(cluster(4, faulty), shards, rate=rate, seed=seed).run()
    assert simulation.accused() <= {f"d{i}" for i in faulty}


@settings(max_examples=50)
@given(st.integers(1, 30), st.sampled_from([0.3, 1.0]), st.integers(0, 100))
def test_bits_inside_the_envelope_bar_and_accuse_nobody(shards: int, rate: float, seed: int) -> None:
    simulation = Simulation(cluster(4, {2: (Fault("near"),)}), shards, rate=rate, seed=seed).run()
    assert simulation.accused() == set() and not simulation.round.record.quarantined
    if simulation.round.record.mismatches:
        assert simulation.round.record.barred == ["d2"]
        assert_clean(simulation)


@settings(max_examples=50)
@given(st.lists(st.sampled_from("FGH"), min_size=3, max_size=6), st.sampled_from([0.3, 1.0]))
def test_environments_that_differ_inside_the_envelope_agree(prints: list[str], rate: float) -> None:
    machines = [Machine(place(i, fingerprint=one)) for i, one in enumerate(prints)]
    simulation = Simulation(machines, 30, rate=rate).run()
    assert not simulation.closed and simulation.round.record.mismatches == 0
    assert_clean(simulation)


def test_an_audit_prefers_the_environment_of_its_primary() -> None:
    machines = [Machine(place(i, fingerprint="FG"[i % 2])) for i in range(6)]
    simulation = Simulation(machines, 60, rate=1.0).run()
    pairs = [
        (simulation.domains[order.domain].place, simulation.domains[order.apart_from[0]].place)
        for _, order in simulation.sent
        if order.role == "audit"
    ]
    assert pairs and all(a.fingerprint == b.fingerprint for a, b in pairs)


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_a_violation_that_two_domains_show_alike_is_the_datas(rate: float) -> None:
    simulation = Simulation(cluster(4, {}), 20, rate=rate, bad={11: "violation"}).run()
    assert isinstance(simulation.error, InvariantError)
    assert simulation.error.shard_id == 11 and "total: expected 3, got 4" in str(simulation.error)
    assert not simulation.accused()


def test_a_violation_of_one_domain_is_that_domains() -> None:
    # Free checks run on every shard: no audit was drawn.
    simulation = Simulation(cluster(4, {0: (Fault("violation"),)}), 20, rate=0.0).run()
    assert simulation.accused() == {"d0"}
    assert_clean(simulation)


def test_a_value_where_all_others_show_a_violation_is_refused_too() -> None:
    # The data break the invariant; one domain's wrong value hides it, and its audit shows it.
    class Hiding(Simulation):
        def _record(self, machine, order, shard_id):  # type: ignore[no-untyped-def]
            record = super()._record(machine, order, shard_id)
            return self._sealed(shard_id, 5.0) if machine.place.domain == "d0" else record

    simulation = Hiding(cluster(4, {}), 1, rate=1.0, bad={0: "violation"}, preferred={0: "d0"})
    assert isinstance(simulation.run().error, InvariantError)


def test_one_domain_alone_says_that_nobody_could_check() -> None:
    simulation = Simulation([Machine(place(0))], 5, bad={3: "violation"}).run()
    assert isinstance(simulation.error, InvariantError)
    assert "nobody could check it" in str(simulation.error)


def test_an_error_on_two_domains_is_raised_and_names_both() -> None:
    simulation = Simulation(cluster(3, {}), 10, rate=0.3, bad={4: "error"}).run()
    assert isinstance(simulation.error, ShardError)
    assert simulation.error.shard_id == 4 and "shard 4: it broke (ValueError on d" in str(simulation.error)
    assert " and d" in str(simulation.error)


def test_an_error_on_one_domain_costs_a_retry_and_counts_against_it() -> None:
    simulation = Simulation(cluster(3, {1: (Fault("error"),)}), 40, rate=0.3).run()
    assert_clean(simulation)
    assert simulation.round.record.failed == simulation.round.record.barred == ["d1"]
    assert simulation.accused() == set()


def test_of_two_records_of_a_shard_the_first_counts() -> None:
    simulation = Simulation(cluster(3, {1: (Fault("duplicate"), Fault("extra"))}), 30, rate=0.3).run()
    assert_clean(simulation)
    assert not simulation.closed
