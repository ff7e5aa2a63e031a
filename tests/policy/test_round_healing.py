"""Healing: staged, then committed in one step; or nothing has changed (P5)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_sdc.evidence.codec import digest
from dask_sdc.evidence.seal import SealedStatistic
from dask_sdc.policy.cases import Finding
from dask_sdc.policy.healing import Healing
from dask_sdc.policy.messages import (
    Case,
    Close,
    Dispatch,
    Event,
    Exposed,
    Heard,
    Instruction,
    Quarantine,
    Quarantined,
    RoundRecord,
    Settings,
)
from dask_sdc.policy.roster import Roster
from dask_sdc.policy.round import Round
from dask_sdc.policy.verdict import Closeness, Decision, Outcome
from tests.policy.simulated import Fault, Loss, Machine, Simulation, payload_of, place

HEAL = frozenset(["heal"])


class Watched(Simulation):
    """Keeps what was settled before and after every event."""

    def run(self) -> Simulation:
        self.replacements: list[dict[int, tuple[Heard, Heard]]] = []
        handle = self.round.handle

        def watch(event: Event) -> list[Instruction]:
            before = dict(self.round.settled)
            out = handle(event)
            after = self.round.settled
            changed = {k: (one, after[k]) for k, one in before.items() if after[k] is not one}
            if changed:
                self.replacements.append(changed)
            return out

        self.round.handle = watch  # type: ignore[method-assign]
        return super().run()


def wrong_at(fraction: float, shards: int) -> Fault:
    """Return a persistent fault that strikes late, after much has settled."""
    return Fault("persistent", frozenset(range(int(fraction * shards), shards)))


def cluster(n: int, faulty: dict[int, tuple[Fault, ...]]) -> list[Machine]:
    return [Machine(place(i), faults=faulty.get(i, ())) for i in range(n)]


def suspect_closes(simulation: Simulation) -> list[str]:
    return [close.status for close in simulation.closed if close.decision.outcome is Outcome.SUSPECT]


def test_a_commit_replaces_everything_in_one_step() -> None:
    simulation = Watched(cluster(4, {1: (wrong_at(0.6, 60),)}), 60, rate=0.3)
    simulation.run()
    assert set(suspect_closes(simulation)) == {"committed"}
    commits = [
        step for step in simulation.replacements if any(new.role == "heal" for _, new in step.values())
    ]
    assert len(commits) == 1 and len(commits[0]) > 5
    assert {(old.domain, new.role) for old, new in commits[0].values()} == {("d1", "heal")}
    assert "d1" not in simulation.round.owners().values()
    assert simulation.values == simulation.clean_values and simulation.round.replaced


def test_nothing_but_reruns_is_sent_to_a_suspect() -> None:
    # `Simulation` checks every order; here the sequence is looked at once more, by hand.
    simulation = Simulation(cluster(4, {1: (wrong_at(0.5, 60),)}), 60, rate=0.3).run()
    first_heal = next(i for i, (_, o) in enumerate(simulation.sent) if o.role == "heal")
    later = {o.role for _, o in simulation.sent[first_heal:] if o.domain == "d1"}
    assert later <= {"rerun"}


def assert_unchanged(simulation: Watched, suspect: str) -> None:
    """Check that nothing was replaced but what a case had adjudicated."""
    adjudicated = {close.case.shard_id for close in simulation.closed}
    for step in simulation.replacements:
        assert set(step) <= adjudicated
        assert all(new.role != "heal" for _, new in step.values())
    assert simulation.round.record.quarantined == []
    assert simulation.round._roster[suspect].suspect is False


def test_no_survivor_defers_and_the_suspect_serves_on() -> None:
    # Witness and audit agree against d1; both are gone before its shards are staged.
    machines = cluster(3, {1: (wrong_at(0.0, 40),)})
    for at in [0.3, 0.6, 0.9, 1.2]:
        losses = [Loss("d0", at), Loss("d2", at)]
        simulation = Watched(machines, 40, rate=1.0, losses=losses, preferred=dict.fromkeys(range(40), "d1"))
        simulation.run()
        assert simulation.error is None
        statuses = set(suspect_closes(simulation))
        assert statuses <= {"deferred:no_safe_survivor", "committed"}
        if statuses == {"deferred:no_safe_survivor"}:
            assert_unchanged(simulation, "d1")
            break
        for machine in machines:
            machine.alive, machine.life, machine.busy = True, machine.life + 1, 0
            machine.queue.clear()
            machine.seen.clear()
    else:
        pytest.fail("expected a schedule in which the survivors die while their work is wanted")


def test_shards_that_nobody_can_stage_defer() -> None:
    bad = Fault("failed", roles=HEAL)
    machines = cluster(4, {1: (wrong_at(0.5, 60),), 0: (bad,), 2: (bad,), 3: (bad,)})
    simulation = Watched(machines, 60, rate=0.5, settings=Settings(timeout=5.0, max_retries=2))
    simulation.run()
    assert simulation.error is None
    assert set(suspect_closes(simulation)) == {"deferred:staging_failed"}
    assert_unchanged(simulation, "d1")
    for shard_id in {close.case.shard_id for close in simulation.closed}:
        assert simulation.values[shard_id] == simulation.clean_values[shard_id]


@pytest.mark.parametrize("kind", ["failed", "damaged", "garbled", "dropped", "error", "violation"])
def test_a_survivor_that_fails_is_not_asked_again(kind: str) -> None:
    machines = cluster(4, {1: (wrong_at(0.5, 60),), 2: (Fault(kind, roles=HEAL),)})
    simulation = Simulation(machines, 60, rate=0.3).run()
    assert set(suspect_closes(simulation)) == {"committed"} and simulation.accused() == {"d1"}
    assert simulation.values == simulation.clean_values
    asked = [k for _, o in simulation.sent if o.role == "heal" and o.domain == "d2" for k in o.shard_ids]
    assert asked and len(asked) == len(set(asked))


def test_a_refused_quarantine_changes_nothing() -> None:
    simulation = Watched(
        cluster(4, {1: (wrong_at(0.5, 60),)}), 60, rate=0.5, refuse={"d1": "the scheduler is gone"}
    )
    simulation.run()
    assert set(suspect_closes(simulation)) == {"deferred:staging_failed"}
    assert simulation.quarantines == ["d1"]
    assert_unchanged(simulation, "d1")
    # It is in service again, and not accused anew.
    assert simulation.round._roster["d1"].usable


def test_a_quarantine_that_is_never_answered_counts_as_refused() -> None:
    class Mute(Watched):
        def _quarantine(self, domain: str) -> Quarantined:
            return Quarantined("nobody", "", self.now)

    simulation = Mute(cluster(4, {1: (wrong_at(0.5, 60),)}), 60, rate=0.5)
    simulation.run()
    assert set(suspect_closes(simulation)) == {"deferred:staging_failed"}
    assert 5.0 < simulation.now < 12.0
    assert_unchanged(simulation, "d1")


def test_without_quarantine_the_suspect_is_only_barred() -> None:
    simulation = Simulation(
        cluster(4, {1: (wrong_at(0.5, 60),)}), 60, rate=0.5, settings=Settings(quarantine=False)
    ).run()
    assert set(suspect_closes(simulation)) == {"disabled"} and not simulation.quarantines
    assert simulation.values == simulation.clean_values
    assert simulation.round.record.barred == ["d1"] and simulation.round.record.quarantined == []


def test_one_of_two_quarantines_refused_heals_the_other() -> None:
    fault = Fault("persistent", frozenset(range(60)), frozenset(["primary"]))
    for seed in range(20):
        simulation = Watched(
            cluster(6, {1: (fault,), 4: (fault,)}), 60, rate=1.0, seed=seed, refuse={"d4": "no"}
        )
        simulation.run()
        assert simulation.accused() == {"d1", "d4"}
        record = simulation.round.record
        assert record.quarantined == ["d1"]
        assert simulation.round._roster["d4"].usable
        by_domain = {
            (close.decision.suspects, close.status) for close in simulation.closed if close.decision.suspects
        }
        assert by_domain == {(("d1",), "committed"), (("d4",), "deferred:staging_failed")}
        assert "d1" not in simulation.round.owners().values()


def test_an_accusation_during_a_commit_has_its_turn_after_it() -> None:
    """d4 is found out while the cluster is still removing d1, and may have staged for it."""

    class Slow(Simulation):
        def _execute(self, instructions: list[Instruction]) -> None:
            quick = [i for i in instructions if not isinstance(i, Quarantine)]
            for one in set(instructions) - set(quick) if len(quick) < len(instructions) else ():
                assert isinstance(one, Quarantine)
                self.quarantines.append(one.domain)
                self._at(self.now + 1.0, self._quarantine, one.domain)
            super()._execute(quick)

    early = Fault("persistent", roles=frozenset(["primary"]))
    late = Fault("persistent", roles=frozenset(["primary", "heal"]), since=0.55)
    met = 0
    for seed in range(10):
        simulation = Slow(
            cluster(6, {1: (early,), 4: (late,)}),
            300,
            cost=0.02,
            rate=0.4,
            seed=seed,
            known_cost=0.02,
            settings=Settings(timeout=5.0, batch_max=0.06),
        )
        healing = simulation.round._healing
        pending: list[str] = []

        def accuse(
            name: str, finding: Finding, healing: Healing = healing, pending: list[str] = pending
        ) -> bool:
            if healing.committing:
                pending.append(name)
            return Healing.accuse(healing, name, finding)

        healing.accuse = accuse  # type: ignore[method-assign]
        simulation.run()
        met += "d4" in pending
        assert simulation.accused() == {"d1", "d4"}
        assert sorted(simulation.round.record.quarantined) == ["d1", "d4"]
        assert simulation.values == simulation.clean_values
    assert met, "expected a schedule in which d4 is accused while d1 is being removed"


@settings(max_examples=150)
@given(
    st.lists(
        st.builds(
            lambda i, at, back: Loss(f"d{i}", at, None if back is None else at + back),
            st.integers(0, 4),
            st.floats(0.1, 1.5),
            st.none() | st.floats(0.1, 1.0),
        ),
        max_size=3,
    ),
    st.integers(0, 100),
    st.sampled_from([0.3, 1.0]),
)
def test_losses_at_any_time_of_the_healing(losses: list[Loss], seed: int, rate: float) -> None:
    simulation = Watched(cluster(5, {1: (wrong_at(0.3, 40),)}), 40, rate=rate, losses=losses, seed=seed)
    simulation.run()
    assert simulation.error is None and simulation.accused() <= {"d1"}
    statuses = set(suspect_closes(simulation))
    assert all(s == "committed" or s.startswith("deferred:") for s in statuses)
    if statuses == {"committed"}:
        assert simulation.values == simulation.clean_values


def test_staged_results_of_a_survivor_that_died_since_still_count() -> None:
    # d2 is quick and dies at once after it staged its share; its sealed payloads are here already.
    machines = cluster(4, {1: (wrong_at(0.3, 60),)})
    clean = Simulation(machines, 60, rate=0.3).run()
    staged_at = max(
        event.now
        for event in clean.landed.values()
        if event.result.role == "heal" and event.result.domain == "d2"
    )
    simulation = Simulation(
        cluster(4, {1: (wrong_at(0.3, 60),)}), 60, rate=0.3, losses=[Loss("d2", staged_at + 1e-4)]
    ).run()
    assert set(suspect_closes(simulation)) == {"committed"}
    assert simulation.values == simulation.clean_values
    staged = [k for _, o in simulation.sent if o.role == "heal" for k in o.shard_ids]
    assert len(staged) == len(set(staged)), "expected no shard to be staged twice"


def test_the_log_has_what_was_healed() -> None:
    simulation = Simulation(cluster(4, {1: (wrong_at(0.5, 60),)}), 60, rate=0.3).run()
    machine: Round = simulation.round
    last = {step.shard_id: step.domain for step in machine.log if step.what == "computed"}
    assert last == machine.owners()
    assert isinstance(simulation.sent[0][1], Dispatch)


def roster_of(n: int) -> Roster:
    roster = Roster({})
    roster.record = RoundRecord(0, 1, n)
    for i in range(n):
        roster.join(place(i), 0.0)
    return roster


def finding_against(name: str) -> Finding:
    return Finding(Case(0), Decision(Outcome.SUSPECT, (name,), reason="witness_agrees_with_audit"))


def heard_from(name: str) -> Heard:
    sealed = SealedStatistic(0, "ok", 1, payload_of(0.0), digest(payload_of(0.0)))
    return Heard(sealed, name, "w", "F", "heal", 0)


def test_what_a_survivor_staged_is_void_once_it_is_suspected_too() -> None:
    roster = roster_of(3)
    healing = Healing(roster, Settings(), lambda names: {0: "d1"} if "d1" in names else {})
    healing.accuse("d1", finding_against("d1"))
    assert healing.step(busy=True, wanted=False, now=0.0) is None
    (first,) = roster.outstanding("heal")
    roster.take_back(first.order.batch_id)
    healing.hear(first, {0: heard_from(first.order.domain)})
    assert healing.step(busy=True, wanted=False, now=1.0) is None and not roster.outstanding("heal")
    healing.accuse(first.order.domain, finding_against(first.order.domain))
    assert healing.step(busy=False, wanted=False, now=2.0) is None
    (second,) = roster.outstanding("heal")
    assert {"d1", first.order.domain, second.order.domain} == {"d0", "d1", "d2"}
    roster.take_back(second.order.batch_id)
    healing.hear(second, {0: heard_from(second.order.domain)})
    healing.step(busy=False, wanted=False, now=3.0)
    assert healing.answered("d1", "") is None
    assert healing.answered(first.order.domain, "") == {0: heard_from(second.order.domain)}


@pytest.mark.parametrize("wanted", [True, False])
def test_the_last_domain_is_not_removed_while_there_is_work(wanted: bool) -> None:
    # Everything is staged, then the survivors die: the suspect goes only if nobody is needed.
    roster = roster_of(2)
    healing = Healing(roster, Settings(), lambda names: {})
    assert healing.accuse("d1", finding_against("d1"))
    roster.leave(roster["d0"])
    assert healing.step(busy=False, wanted=wanted, now=1.0) is None
    (answer,) = roster.out
    if wanted:
        assert isinstance(answer, Close) and answer.status == "deferred:no_safe_survivor"
        assert roster["d1"].usable and not healing.active
    else:
        assert isinstance(answer, Quarantine) and healing.committing


class Told(Simulation):
    """Tells the round, once ``d1`` has settled a few shards, that it read an input wrongly."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        handle, told = self.round.handle, []

        def tell(event: Event) -> list[Instruction]:
            out = handle(event)
            mine = [k for k, owner in self.round.owners().items() if owner == "d1"]
            others = [one for one in self.round.settled.values() if one.domain != "d1"]
            if len(mine) >= 3 and others and not told:
                told.append(True)
                for _ in range(2):  # the second time says nothing new
                    out += handle(Exposed("d1", mine[0], "read another input", others[0], event.now))
            return out

        self.round.handle = tell  # type: ignore[method-assign]


def test_a_domain_that_is_exposed_by_what_it_read_is_removed_and_all_of_its_results_replaced() -> None:
    simulation = Told(cluster(4, {1: (Fault("persistent"),)}), 60, rate=0.0)
    simulation.run()
    record = simulation.round.record
    assert record.suspects == record.quarantined == ["d1"] and record.mismatches == 1
    assert suspect_closes(simulation) == ["committed"]
    assert "d1" not in simulation.round.owners().values()
    assert simulation.values == simulation.clean_values and simulation.round.replaced


def test_who_is_exposed_after_it_left_is_named_and_nothing_else_happens() -> None:
    simulation = Simulation(cluster(3, {}), 10, rate=0.0).run()
    sampler = simulation.round.sampler
    rounds = Round(0, [0], [place(1), place(2)], sampler, lambda a, b: Closeness.OUTSIDE, Settings())
    rounds.start(0.0)
    (close,) = rounds.handle(Exposed("gone", 0, "read another input", simulation.round.settled[0], 1.0))
    assert isinstance(close, Close) and close.status == "not_needed"
    assert close.decision.suspects == ("gone",) and rounds.record.suspects == ["gone"]
