"""Verdicts against a ground truth: who is really faulty, and what every run really gave."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from dask_sdc.exceptions import InputError
from dask_sdc.policy.verdict import (
    ENVIRONMENT_DIFFERENCE,
    ERROR_DIFFERENCE,
    INSUFFICIENT_WITNESSES,
    INVARIANT_DISAGREEMENT,
    NONTRANSITIVE_ENVELOPE,
    RERUN_MISSING,
    THREE_WAY_DISAGREEMENT,
    Closeness,
    Decision,
    Outcome,
    Persistence,
    Voice,
    decide,
)

DOMAIN = {"primary": "P", "audit": "A", "witness": "W", "rerun_primary": "P", "rerun_audit": "A"}
ROLES = tuple(DOMAIN)
#: The clean value differs in its last bits between the environments F and G.
TRUTH = {"F": 0.0, "G": 0.25}
ENVELOPE = 1.0
#: Every domain's own wrong values, so that two faults never conspire.
OFFSET = {"P": 1.0, "A": 2.0, "W": 3.0}
#: far: outside of every envelope; shifting: the same, but different in every run.
WRONG = ("far", "shifting", "damaged", "garbled", "violation")
ABSENT = ("missing", "error")
RUNS = ("truth", *WRONG, "near", *ABSENT)


def payload(kind: str, role: str, fingerprint: str) -> float:
    """What a run of this kind gives, as a number."""
    own = OFFSET[DOMAIN[role]]
    again = 0.5 if role.startswith("rerun") else 0.0
    return {
        "truth": TRUTH[fingerprint],
        "far": 100.0 * own,
        "shifting": 1000.0 * own + 10 * again,
        "near": 0.01 * own,
        "violation": -100.0 * own,
    }[kind]


def compare(a: Voice, b: Voice) -> Closeness:
    assert a.digest != b.digest and a.status == b.status
    return Closeness.WITHIN if abs(a.ref - b.ref) <= ENVELOPE else Closeness.OUTSIDE


def voice(kind: str, role: str, fingerprint: str) -> Voice:
    domain = DOMAIN[role]
    if kind in ("damaged", "garbled", *ABSENT):
        return Voice(role, domain, None, fingerprint, kind)
    value = payload(kind, role, fingerprint)
    status = "violation" if kind == "violation" else "value"
    return Voice(role, domain, repr(value).encode(), fingerprint, status, value)


@dataclass(frozen=True)
class World:
    """The runs of one shard, and the environments of the three domains."""

    runs: dict[str, str]
    environment: dict[str, str]

    def voices(self) -> dict[str, Voice]:
        return {role: voice(kind, role, self.environment[DOMAIN[role]]) for role, kind in self.runs.items()}

    def decide(self) -> Decision:
        return decide(**self.voices(), compare=compare)

    def swapped(self) -> Decision:
        """The verdict with primary and audit in each other's place."""
        v = self.voices()
        return decide(
            v["audit"], v["primary"], v["witness"], v["rerun_audit"], v["rerun_primary"], compare=compare
        )

    def faulty(self) -> set[str]:
        return {DOMAIN[role] for role, kind in self.runs.items() if kind in (*WRONG, "near")}


def environments() -> Iterator[dict[str, str]]:
    for letters in itertools.product("FG", repeat=3):
        yield dict(zip("PAW", letters, strict=True))


def worlds(faulty: tuple[str, ...], healthy: tuple[str, ...] = ("truth",)) -> Iterator[World]:
    """All worlds in which only these domains may give anything but the truth."""
    alphabets = [RUNS if DOMAIN[role] in faulty else healthy for role in ROLES]
    for environment in environments():
        for kinds in itertools.product(*alphabets):
            yield World(dict(zip(ROLES, kinds, strict=True)), environment)


def test_clean_worlds_agree() -> None:
    for world in worlds(()):
        decision = world.decide()
        assert decision.outcome == Outcome.AGREE and decision.value == "primary", world


@pytest.mark.parametrize("faulty", ["P", "A"])
def test_one_faulty_domain_is_always_the_one_named(faulty: str) -> None:
    role = {"P": "primary", "A": "audit"}[faulty]
    sound = {"P": "audit", "A": "primary"}[faulty]
    checked = 0
    for world in worlds((faulty,)):
        first, again = world.runs[role], world.runs[f"rerun_{role}"]
        if first not in WRONG:
            continue
        decision = world.decide()
        assert decision.outcome == Outcome.SUSPECT, (world, decision)
        assert decision.suspects == (faulty,) and decision.barred == ()
        assert decision.value == sound
        assert decision.reason == f"witness_agrees_with_{sound}"
        if again == "truth":
            expected = Persistence.TRANSIENT
        elif again in ABSENT:
            expected = None
        elif again == "near":
            # Another environment cannot tell it from the truth, the same one can.
            others = {world.environment[d] for d in "PAW" if d != faulty}
            near_is_close = world.environment[faulty] in others
            expected = Persistence.PERSISTENT if near_is_close else Persistence.TRANSIENT
        else:
            expected = Persistence.PERSISTENT
        assert decision.persistence == expected, (world, decision)
        checked += 1
    assert checked == 8 * len(WRONG) * len(RUNS)


@pytest.mark.parametrize("faulty", ["P", "A"])
def test_difference_inside_the_envelope_accuses_only_what_is_transient(faulty: str) -> None:
    role = {"P": "primary", "A": "audit"}[faulty]
    seen = set()
    for world in worlds((faulty,)):
        if world.runs[role] != "near":
            continue
        decision = world.decide()
        again = world.runs[f"rerun_{role}"]
        alike = world.environment["P"] == world.environment["A"]
        if not alike:
            assert decision.outcome == Outcome.AGREE, world
        elif world.environment["W"] != world.environment["P"]:
            # The witness's environment cannot tell the two apart.
            assert decision.outcome == Outcome.DEFERRED, world
            assert decision.reason == NONTRANSITIVE_ENVELOPE
        elif again == "truth":
            assert decision.suspects == (faulty,) and decision.persistence == Persistence.TRANSIENT
        elif again in ("near", *ABSENT):
            assert decision.outcome == Outcome.ENVIRONMENT and decision.reason == ENVIRONMENT_DIFFERENCE
            assert decision.barred == (faulty,) and decision.suspects == ()
        else:
            assert decision.suspects == (faulty,) and decision.persistence == Persistence.PERSISTENT
        seen.add(decision.outcome)
    assert seen == {Outcome.AGREE, Outcome.DEFERRED, Outcome.SUSPECT, Outcome.ENVIRONMENT}


def test_faulty_witness_alone_changes_nothing() -> None:
    for world in worlds(("W",)):
        assert world.decide().outcome == Outcome.AGREE, world


@pytest.mark.parametrize("faulty", ["PA", "PW", "AW"])
def test_two_faulty_domains_never_incriminate_the_healthy_one(faulty: str) -> None:
    named = 0
    for world in worlds(tuple(faulty)):
        if world.environment["P"] == "G":
            continue  # F and G are alike
        decision = world.decide()
        assert set(decision.suspects) <= world.faulty(), (world, decision)
        errors = {DOMAIN[role] for role, kind in world.runs.items() if kind == "error"}
        assert set(decision.barred) <= world.faulty() | errors, (world, decision)
        if decision.value is not None:
            assert world.runs[decision.value] in ("truth", "near"), (world, decision)
        named += bool(decision.suspects)
    assert named > 0


def test_loud_failures_of_healthy_domains_accuse_nobody_healthy() -> None:
    for faulty in "PAW":
        for world in worlds((faulty,), healthy=("truth", *ABSENT)):
            if world.environment["P"] != world.environment["W"]:
                continue  # enough
            decision = world.decide()
            assert set(decision.suspects) <= world.faulty(), (world, decision)


def test_every_combination_has_a_lawful_verdict() -> None:
    environment = dict.fromkeys("PAW", "F")
    outcomes = set()
    # Garbled is left out: like damaged, it differs from everything.
    for kinds in itertools.product([kind for kind in RUNS if kind != "garbled"], repeat=5):
        world = World(dict(zip(ROLES, kinds, strict=True)), environment)
        decision = world.decide()
        outcomes.add(decision.outcome)
        assert bool(decision.suspects) == (decision.outcome == Outcome.SUSPECT)
        assert len(decision.suspects) <= 1 and "W" not in decision.suspects
        assert decision.needs == ()
        assert not decision.barred or decision.outcome == Outcome.ENVIRONMENT
        assert decision.persistence is None or decision.suspects
        if world.runs["witness"] in ABSENT:
            assert not decision.suspects, world
        if decision.outcome in (Outcome.SUSPECT, Outcome.AGREE):
            assert decision.value is not None
    assert outcomes == set(Outcome) - {Outcome.MISMATCH_PENDING}


def test_primary_and_audit_are_treated_alike() -> None:
    mirror = {"primary": "audit", "audit": "primary", None: None, "witness": "witness"}
    mirror |= {"rerun_primary": "rerun_audit", "rerun_audit": "rerun_primary"}
    for world in worlds(("P", "A")):
        if world.environment != dict.fromkeys("PAW", "F"):
            continue
        decision, swapped = world.decide(), world.swapped()
        assert decision.outcome == swapped.outcome or Outcome.AGREE in (decision.outcome, swapped.outcome)
        assert decision.suspects == swapped.suspects and decision.barred == swapped.barred
        assert decision.persistence == swapped.persistence
        if decision.outcome == Outcome.SUSPECT:
            assert decision.value == mirror[swapped.value]


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=3)))
def test_mismatch_is_pending_until_all_three_are_heard(given: tuple[bool, ...]) -> None:
    world = World(dict(zip(ROLES, ["far", "truth", "truth", "far", "truth"], strict=True)), TRUTH_F)
    voices = world.voices()
    further = dict(zip(ROLES[2:], given, strict=True))
    heard = {role: v for role, v in voices.items() if further.get(role, True)}
    decision = decide(**heard, compare=compare)
    missing = tuple(role for role in ROLES[2:] if role not in heard)
    if missing:
        assert decision.outcome == Outcome.MISMATCH_PENDING
        assert decision.needs == missing and decision.suspects == ()
    else:
        assert decision.outcome == Outcome.SUSPECT


TRUTH_F = dict.fromkeys("PAW", "F")

#: primary, audit, witness, reruns; environments; outcome, reason, trusted value
TABLE = [
    # system A.5: the witness agrees with neither, with both, or is not there
    ("far truth violation far truth", "FFF", "deferred", THREE_WAY_DISAGREEMENT, None),
    ("near truth truth near truth", "FFG", "deferred", NONTRANSITIVE_ENVELOPE, "witness"),
    ("near truth truth truth truth", "FFG", "deferred", NONTRANSITIVE_ENVELOPE, "audit"),
    ("far truth missing far truth", "FFF", "deferred", INSUFFICIENT_WITNESSES, None),
    ("far truth error far truth", "FFF", "deferred", INSUFFICIENT_WITNESSES, None),
    # a transient fault among two domains is healed, though nobody is named
    ("far truth missing truth truth", "FFF", "deferred", INSUFFICIENT_WITNESSES, "audit"),
    ("truth damaged missing truth truth", "FFF", "deferred", INSUFFICIENT_WITNESSES, "primary"),
    # two faults, one of them gone: the value is known, the guilt is not
    ("far damaged truth far truth", "FFF", "deferred", THREE_WAY_DISAGREEMENT, "witness"),
    ("far damaged truth truth truth", "FFF", "deferred", THREE_WAY_DISAGREEMENT, "witness"),
    # the sound side must repeat itself
    ("far truth truth far shifting", "FFF", "not_reproducible", "rerun_differs", "audit"),
    ("far truth truth far missing", "FFF", "deferred", RERUN_MISSING, "audit"),
    # a task that is not reproducible at all, outside and inside of the envelope
    ("shifting shifting far shifting shifting", "FFF", "not_reproducible", "rerun_differs", None),
    # three environments that say they are one
    ("near near near near near", "FFF", "environment", ENVIRONMENT_DIFFERENCE, "primary"),
    # data and programs
    ("error error error missing missing", "FFF", "inconclusive", "error", None),
    ("error error missing error error", "FFF", "inconclusive", "error", None),
    ("error error truth error error", "FFF", "deferred", ERROR_DIFFERENCE, None),
    ("error truth truth error truth", "FFF", "environment", ERROR_DIFFERENCE, "audit"),
    ("error truth truth truth truth", "FFF", "environment", ERROR_DIFFERENCE, "audit"),
    # nothing was audited
    ("missing truth truth truth truth", "FFF", "skipped", "skipped:primary_missing", None),
    ("truth missing truth truth truth", "FFF", "skipped", "skipped:audit_missing", None),
]


@pytest.mark.parametrize(("kinds", "letters", "outcome", "reason", "value"), TABLE)
def test_reasons(kinds: str, letters: str, outcome: str, reason: str, value: str | None) -> None:
    world = World(dict(zip(ROLES, kinds.split(), strict=True)), dict(zip("PAW", letters, strict=True)))
    decision = world.decide()
    assert (decision.outcome, decision.reason, decision.value) == (outcome, reason, value)
    assert decision.suspects == ()


def test_noise_inside_the_envelope_is_not_reproducible_and_harmless() -> None:
    def noisy(role: str, number: int) -> Voice:
        return Voice(role, DOMAIN[role], bytes([number]), "F", "value", number / 100)

    decision = decide(**{role: noisy(role, i) for i, role in enumerate(ROLES)}, compare=compare)
    assert decision.outcome == Outcome.NOT_REPRODUCIBLE and decision.value == "primary"


def violations(digests: str) -> dict[str, Voice]:
    return {
        role: Voice(role, DOMAIN[role], d.encode(), "F", "value" if d == "." else "violation", ord(d) * 10.0)
        for role, d in zip(ROLES, digests, strict=True)
    }


@pytest.mark.parametrize(
    ("digests", "outcome", "reason"),
    [
        ("vvvvv", "inconclusive", "invariant"),  # the data
        ("vv.vv", "deferred", INVARIANT_DISAGREEMENT),
        ("vw.vw", "deferred", THREE_WAY_DISAGREEMENT),
        ("v..v.", "suspect", "witness_agrees_with_audit"),
        (".vv.v", "suspect", "witness_agrees_with_audit"),
    ],
)
def test_violations(digests: str, outcome: str, reason: str) -> None:
    decision = decide(**violations(digests), compare=compare)
    assert (decision.outcome, decision.reason) == (outcome, reason)


@pytest.mark.parametrize(
    "edge",
    [-0.9, 1.1],  # inside the envelope of one environment's truth, outside of the other's
)
@pytest.mark.parametrize("letters", ["".join(x) for x in itertools.product("FG", repeat=3)])
def test_value_at_the_edge_of_the_envelope_never_accuses_the_healthy(edge: float, letters: str) -> None:
    environment = dict(zip("PAW", letters, strict=True))
    voices = World(dict.fromkeys(ROLES, "truth"), environment).voices()
    for again in (edge, TRUTH[environment["P"]]):
        for role, value in (("primary", edge), ("rerun_primary", again)):
            voices[role] = Voice(role, "P", repr(value).encode(), environment["P"], "value", value)
        decision = decide(**voices, compare=compare)
        assert set(decision.suspects) <= {"P"} and set(decision.barred) <= {"P"}


@pytest.mark.parametrize(("edge", "letters"), [(-0.9, "FFG"), (-0.9, "GFG"), (1.1, "GGF")])
def test_inside_of_one_envelope_and_outside_of_the_other_is_deferred(edge: float, letters: str) -> None:
    environment = dict(zip("PAW", letters, strict=True))
    voices = World(dict.fromkeys(ROLES, "truth"), environment).voices()
    for role in ("primary", "rerun_primary"):
        voices[role] = Voice(role, "P", repr(edge).encode(), environment["P"], "value", edge)
    decision = decide(**voices, compare=compare)
    if letters == "GFG":  # outside of the witness's by bits and more, the audit cannot tell
        assert decision.outcome == Outcome.AGREE
    else:
        assert decision.outcome == Outcome.DEFERRED and decision.reason == NONTRANSITIVE_ENVELOPE


def test_an_error_that_repeats_bars_and_one_that_does_not_does_not() -> None:
    for again, barred in (("error", ("P",)), ("missing", ("P",)), ("truth", ())):
        kinds = ["error", "truth", "truth", again, "truth"]
        decision = World(dict(zip(ROLES, kinds, strict=True)), TRUTH_F).decide()
        assert decision.outcome == Outcome.ENVIRONMENT and decision.barred == barred


def test_two_values_of_equal_support_are_both_distrusted() -> None:
    sides = {"primary": "x", "audit": "y", "witness": "z", "rerun_primary": "y", "rerun_audit": "x"}
    voices = {
        role: Voice(role, DOMAIN[role], letter.encode(), "F", "value", 10.0 * ord(letter))
        for role, letter in sides.items()
    }
    decision = decide(**voices, compare=compare)
    assert decision.suspects == () and decision.value is None


def test_a_voice_from_the_wrong_domain_counts_as_missing() -> None:
    world = World(dict(zip(ROLES, ["far", "truth", "truth", "far", "truth"], strict=True)), TRUTH_F)
    voices = world.voices()
    assert decide(**voices, compare=compare).suspects == ("P",)
    witness = Voice("witness", "A", voices["audit"].digest, "F", "value", 0.0)
    decision = decide(**{**voices, "witness": witness}, compare=compare)
    assert decision.reason == INSUFFICIENT_WITNESSES
    rerun = Voice("rerun", "W", voices["audit"].digest, "F", "value", 0.0)
    decision = decide(**{**voices, "rerun_audit": rerun}, compare=compare)
    assert decision.reason == RERUN_MISSING


def test_an_audit_on_the_same_domain_is_skipped_never_agreement() -> None:
    voices = World(dict.fromkeys(ROLES, "truth"), TRUTH_F).voices()
    audit = Voice("audit", "P", voices["audit"].digest, "F")
    decision = decide(voices["primary"], audit, compare=compare)
    assert decision.outcome == Outcome.SKIPPED and decision.reason == "skipped:same_domain"


def test_voices_are_checked_and_records_survive_pickling() -> None:
    with pytest.raises(InputError, match=r"expected a status of .* got 'odd'"):
        Voice("primary", "P", b"", status="odd")
    with pytest.raises(InputError, match="expected a digest"):
        Voice("primary", "P", None)
    decision = World(dict.fromkeys(ROLES, "truth"), TRUTH_F).decide()
    assert pickle.loads(pickle.dumps(decision)) == decision
