"""Domains that die, freeze or come back in any role cost a retry or a skipped audit (P7, P3)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_sdc.evidence.seal import failed_statistic
from dask_sdc.exceptions import (
    DeviceError,
    DeviceMemoryError,
    InputTypeError,
    NoDomainError,
    SDCError,
    ShardError,
)
from dask_sdc.policy.cases import TOO_FEW
from dask_sdc.policy.messages import Settings
from tests.policy.simulated import FAR, Fault, Loss, Machine, Simulation, place, value_of


def cluster(n: int, faulty: dict[int, tuple[Fault, ...]] | None = None, slots: int = 1) -> list[Machine]:
    return [Machine(place(i, slots), faults=(faulty or {}).get(i, ())) for i in range(n)]


def assert_clean(simulation: Simulation) -> None:
    assert simulation.error is None, simulation.error
    assert simulation.values == simulation.clean_values and not simulation.accused()


@settings(max_examples=200)
@given(
    st.integers(2, 4),
    st.permutations(range(4)),
    st.lists(st.floats(0.0, 2.0), min_size=3, max_size=3),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.01, 0.05]),
    st.integers(0, 100),
)
def test_all_but_one_may_die(
    n: int, order: list[int], times: list[float], rate: float, cost: float, seed: int
) -> None:
    dying = [i for i in order if i < n][:-1]
    losses = [Loss(f"d{i}", at) for i, at in zip(dying, times, strict=False)]
    simulation = Simulation(cluster(n), 50, cost=cost, rate=rate, losses=losses, seed=seed).run()
    assert_clean(simulation)
    assert set(simulation.round.record.skipped) <= {TOO_FEW, "its worker left"}


@settings(max_examples=100)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 2.0), st.floats(0.01, 2.0)), max_size=3),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_domains_may_come_back(n: int, outages: list[tuple[int, float, float]], rate: float) -> None:
    losses = [Loss(f"d{i % n}", at, at + out) for i, at, out in outages]
    assert_clean(Simulation(cluster(n), 50, rate=rate, losses=losses).run())


@pytest.mark.parametrize("role", ["primary", "audit", "witness", "rerun", "heal"])
@pytest.mark.parametrize("back", [None, 0.5])
def test_a_domain_that_freezes_in_any_role_is_given_up(role: str, back: float | None) -> None:
    # Somebody else is wrong, so that witnesses, reruns and healing happen at all.
    machines = cluster(5, {0: (Fault("persistent", roles=frozenset(["primary"])),)})
    frozen = machines[0] if role == "rerun" else machines[3]
    frozen.faults += (Fault("silent", roles=frozenset([role])),)
    frozen.returns = back
    if role in ("primary", "audit", "heal"):
        assert frozen is machines[3]
    if role == "witness":
        for machine in machines[1:]:
            machine.faults = frozen.faults[-1:] if machine is frozen else ()
        machines = [machines[0], machines[1], machines[3]]
    simulation = Simulation(machines, 40, rate=1.0).run()
    assert simulation.error is None and simulation.evicted
    assert set(simulation.evicted) == {frozen.place.domain}
    assert simulation.accused() <= {"d0"} and simulation.now < 60.0


def test_a_frozen_domain_is_found_while_others_keep_the_round_busy() -> None:
    # No tick is ever told: replies of the others are the only clock.
    machines = cluster(3, {1: (Fault("silent"),)})
    simulation = Simulation(machines, 400, cost=0.1, rate=0.0, tick=1e6).run()
    assert_clean(simulation)
    assert simulation.evicted == ["d1"]
    evicted_at = next(t for t, o in simulation.sent if o.role == "primary" and o.attempt > 0)
    assert evicted_at < 7.5


def test_late_replies_of_a_domain_that_was_given_up_are_ignored() -> None:
    machines = cluster(3, {1: (Fault("late", times=3),)})
    machines[1].returns = 0.1
    simulation = Simulation(machines, 60, rate=0.5).run()
    assert_clean(simulation)
    assert simulation.evicted


def test_a_domain_that_fails_too_often_is_barred_and_says_why() -> None:
    simulation = Simulation(cluster(3, {1: (Fault("failed"),)}), 60, rate=0.3).run()
    assert_clean(simulation)
    assert simulation.round.record.barred == ["d1"]
    assert simulation.round._roster["d1"].barred == "failed 4 times, last: lost on its way"


def test_the_last_domain_is_not_barred() -> None:
    # Each of its first eight batches fails, more than a domain may; no shard fails more than twice.
    simulation = Simulation(cluster(1, {0: (Fault("failed", times=8),)}, slots=4), 60, rate=0.0).run()
    assert_clean(simulation)
    assert simulation.round.record.failed == ["d0"] and simulation.round.record.barred == []


def test_a_barred_domain_is_used_again_when_nobody_else_is_left() -> None:
    machines = cluster(2, {0: (Fault("failed", times=4),)})
    simulation = Simulation(machines, 200, rate=0.0, losses=[Loss("d1", 2.0)]).run()
    assert_clean(simulation)
    assert simulation.round._roster["d0"].usable and simulation.round.record.barred == []


def test_a_shard_that_kills_domains_is_named() -> None:
    """It takes its domain with it; those beside it are tried alone and come out well."""

    class Deadly(Simulation):
        def _seconds(self, shard_id: int) -> float:
            return super()._seconds(shard_id) + 1e6 * (shard_id == 333)

        def _work(self, machine: Machine) -> None:
            begun = {o.batch_id for o in machine.queue}
            super()._work(machine)
            begun -= {o.batch_id for o in machine.queue}
            deadly = [o for _, o in self.sent if o.batch_id in begun and 333 in o.shard_ids]
            if deadly:
                name = machine.place.domain
                self._at(self.now + 0.01, self._leave, name, self.now + 0.5)

    simulation = Deadly(cluster(6), 600, cost=0.005, rate=0.1, known_cost=0.005).run()
    assert isinstance(simulation.error, ShardError) and simulation.error.shard_id == 333
    assert "failed 4 times" in str(simulation.error)


def test_waiting_work_is_not_held_against_its_shards() -> None:
    # Every domain dies before it is done with its first batch; the second one only waited.
    losses = [Loss(f"d{i}", 1.0) for i in range(2)]
    simulation = Simulation(
        cluster(3), 60, cost=0.3, rate=0.0, losses=losses, known_cost=0.3, settings=Settings(batch_max=3.0)
    ).run()
    assert_clean(simulation)
    first = {name: [o for _, o in simulation.sent if o.domain == name][:2] for name in ("d0", "d1")}
    for running, waiting in first.values():
        assert {simulation.round._attempts[k] for k in running.shard_ids} == {1}
        assert {simulation.round._attempts[k] for k in waiting.shard_ids} == {0}


def test_nobody_left_is_an_error_after_the_timeout() -> None:
    simulation = Simulation(cluster(2), 60, losses=[Loss("d0", 0.2), Loss("d1", 0.3)]).run()
    assert isinstance(simulation.error, NoDomainError) and "'d0': 'gone'" in str(simulation.error)
    assert 5.3 < simulation.now < 6.5


def test_a_domain_that_comes_in_time_saves_the_round() -> None:
    losses = [Loss("d0", 0.2, 4.0), Loss("d1", 0.3)]
    assert_clean(Simulation(cluster(2), 30, rate=0.3, losses=losses).run())


# -- placement -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dropped", "error", "failed", "misplaced"])
def test_a_primary_that_moves_to_its_auditors_lane_is_audited_anew(kind: str) -> None:
    # With two domains the retry has nowhere else to go.
    machines = cluster(2, {0: (Fault(kind, roles=frozenset(["primary"]), times=2),)})
    simulation = Simulation(machines, 12, rate=1.0).run()
    assert_clean(simulation)
    record = simulation.round.record
    assert record.agreed == record.audited == 12 and not record.skipped
    # The audit that counts, the last one, ran on the domain that is not the primary's.
    audits = {k: o.domain for _, o in simulation.sent if o.role == "audit" for k in o.shard_ids}
    moved = [k for _, o in simulation.sent if o.attempt and o.role == "primary" for k in o.shard_ids]
    assert moved
    for shard_id, domain in simulation.round.owners().items():
        assert {audits[shard_id], domain} == {"d0", "d1"}


def test_a_retry_keeps_off_its_auditors_lane_if_it_can() -> None:
    machines = cluster(4, {0: (Fault("dropped", roles=frozenset(["primary"])),)})
    simulation = Simulation(machines, 40, rate=1.0).run()
    assert_clean(simulation)
    audits = [k for _, o in simulation.sent if o.role == "audit" for k in o.shard_ids]
    assert len(audits) == len(set(audits)), "expected no audit to be done twice"


def test_an_audit_that_is_still_out_on_the_new_primarys_domain_is_void() -> None:
    # d0 is quick and leaves one record out; d1 computes that shard on a free thread while the
    # audits of d0's batch, this shard's among them, still run on another.
    left_out = Fault("dropped", roles=frozenset(["primary"]), times=1)
    machines = [Machine(place(0), 5.0, (left_out,)), Machine(place(1, slots=4))]
    simulation = Simulation(
        machines,
        40,
        cost=lambda shard_id: 0.05 if shard_id < 8 else 0.001,
        rate=1.0,
        known_cost=0.05,
        preferred={k: "d0" if k < 8 else "d1" for k in range(40)},
    ).run()
    assert_clean(simulation)
    (moved,) = (k for _, o in simulation.sent if o.role == "primary" and o.attempt for k in o.shard_ids)
    assert simulation.round.settled[moved].domain == "d1"
    asked = [o for _, o in simulation.sent if o.role == "audit" and moved in o.shard_ids]
    assert [o.domain for o in asked] == ["d1", "d0"]
    # The void one comes back later than the one that counts.
    void, heard = (simulation.landed[o.batch_id] for o in asked)
    assert void.now > heard.now
    assert simulation.round.record.agreed == simulation.round.record.audited == 40


@pytest.mark.parametrize("kind", ["failed", "dropped", "misplaced", "error"])
def test_a_lost_audit_goes_to_somebody_else(kind: str) -> None:
    # d1 alone is of d0's environment, so it would be asked again and again.
    prints = ["F", "F", "G", "G"]
    machines = [Machine(place(i, fingerprint=one)) for i, one in enumerate(prints)]
    machines[1].faults = (Fault(kind, roles=frozenset(["audit"])),)
    simulation = Simulation(
        machines, 1, rate=1.0, preferred={0: "d0"}, settings=Settings(timeout=5.0, max_retries=1)
    ).run()
    assert_clean(simulation)
    assert [o.domain for _, o in simulation.sent if o.role == "audit"] == ["d1", "d2"]
    assert not simulation.round.record.skipped
    assert simulation.round.record.agreed == simulation.round.record.audited == 1


def test_a_witness_that_raises_is_replaced() -> None:
    faults = {i: (Fault("error", roles=frozenset(["witness"])),) for i in (2, 3)}
    machines = cluster(5, {0: (Fault("persistent"),), **faults})
    simulation = Simulation(machines, 1, rate=1.0, preferred={0: "d0"}).run()
    assert [o.domain for _, o in simulation.sent if o.role == "witness"] == ["d2", "d3", "d4"]
    assert simulation.accused() == {"d0"} and simulation.values == simulation.clean_values


@pytest.mark.parametrize("kind", ["error", "dropped", "garbled"])
def test_an_audit_that_nobody_can_do_is_skipped_and_owed(kind: str) -> None:
    machines = cluster(2, {1: (Fault(kind, roles=frozenset(["audit"])),)})
    simulation = Simulation(
        machines, 20, rate=1.0, preferred=dict.fromkeys(range(20), "d0"), settings=Settings(max_retries=2)
    ).run()
    record = simulation.round.record
    assert simulation.error is None and simulation.values == simulation.clean_values
    if kind == "garbled":
        # Two voices accuse nobody.
        assert {close.status for close in simulation.closed} == {"deferred:insufficient_witnesses"}
        return
    assert not simulation.closed and sum(record.skipped.values()) + record.agreed >= record.audited
    assert sum(record.skipped.values()) >= 1
    assert simulation.sampler.debt("d0") >= 1.0


def test_an_audit_that_moves_to_another_primary_is_owed_to_the_first() -> None:
    # d0 loses every shard that was drawn for it; its next shards are drawn at once.
    machines = cluster(3, {0: (Fault("dropped", roles=frozenset(["primary"]), times=1),)})
    simulation = Simulation(machines, 60, rate=1.0, known_cost=0.05).run()
    assert_clean(simulation)
    assert simulation.sampler.debt("d0") >= 1.0


def test_a_wrong_payload_never_settles_by_its_digest() -> None:
    machines = cluster(4, {1: (Fault("damaged"),)})
    simulation = Simulation(machines, 40, rate=0.0).run()
    assert simulation.error is None and simulation.values == simulation.clean_values
    assert all(value_of(one.record.payload) < FAR for one in simulation.round.settled.values())
    assert simulation.accused() == {"d1"}


@pytest.mark.parametrize("role", ["primary", "audit", "witness", "rerun", "heal"])
@pytest.mark.parametrize("back", [None, 0.5])
def test_a_domain_that_loses_its_device_in_any_role_is_given_up(role: str, back: float | None) -> None:
    machines = cluster(5, {0: (Fault("persistent", roles=frozenset(["primary"])),)})
    dying = machines[0] if role == "rerun" else machines[3]
    dying.faults += (Fault("device_lost", roles=frozenset([role]), times=1),)
    dying.returns = back
    simulation = Simulation(machines, 60, rate=0.5).run()
    assert simulation.error is None and simulation.values == simulation.clean_values
    assert simulation.accused() <= {"d0"}
    if dying.used:
        assert simulation.evicted == [dying.place.domain]
        assert dying.place.domain in simulation.round.record.failed


def test_nothing_is_sent_to_a_domain_that_lost_its_device_before_it_is_back() -> None:
    machines = cluster(3, {1: (Fault("device_lost", times=1),)})
    machines[1].returns = 1.0
    simulation = Simulation(machines, 60, rate=0.0).run()
    assert_clean(simulation)
    [first] = [when for when, order in simulation.sent if order.domain == "d1"][:1]
    assert simulation.evicted == ["d1"] and first < 0.1
    assert not [when for when, order in simulation.sent if order.domain == "d1" and 0.2 < when < 1.0]


def test_a_shard_that_costs_every_device_ends_the_call_and_not_the_cluster() -> None:
    fault = Fault("device_lost", shards=frozenset([7]))
    machines = [Machine(place(i), faults=(fault,), returns=0.1) for i in range(4)]
    simulation = Simulation(machines, 20, rate=0.0).run()
    assert isinstance(simulation.error, ShardError) and simulation.error.shard_id == 7
    assert "DeviceLost: uncorrectable ECC error" in str(simulation.error)


@pytest.mark.parametrize("error", [InputTypeError, DeviceError, DeviceMemoryError])
def test_what_is_wrong_with_data_or_devices_is_raised_by_its_name(error: type[SDCError]) -> None:
    class Refusing(Simulation):
        def _record(self, machine, order, shard_id):  # type: ignore[no-untyped-def]
            if shard_id != 4:
                return super()._record(machine, order, shard_id)
            return failed_statistic(shard_id, (error.__name__, f"{error.__name__}: expected a, got b"))

    simulation = Refusing(cluster(3), 10).run()
    assert type(simulation.error) is error and simulation.error.shard_id == 4  # type: ignore[attr-defined]
    assert "expected a, got b" in str(simulation.error) and " and d" in str(simulation.error)
