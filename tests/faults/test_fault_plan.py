"""Plans match what they say and nothing else, and come back from their records."""

from __future__ import annotations

import itertools
import json
import pickle
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.evidence.codec import decode, encode
from dask_sdc.evidence.seal import ROLES
from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.faults import Delivery, Fault, FaultContext, FaultPlan, Tally, corrupt_bytes, corrupt_state
from dask_sdc.faults.plan import ACTION_KINDS, BIT_KINDS, KINDS, STEPS, VALUE_KINDS

CONTEXT = FaultContext("compute", "d0", "tcp://a:1", "zero", "primary", 2, 1, (7,))
FIELDS: dict[str, list[Any]] = {
    "domain": ["d0", "d1"],
    "worker": ["tcp://a:1", "tcp://b:1"],
    "role": ["primary", "audit"],
    "round": [2, 3],
    "attempt": [1, 0],
    "shard": [7, 8],
}


def legal(kind: str, where: str) -> bool:
    """The table of kinds and steps, as documented."""
    if kind in {"value", "nan"}:
        return where in {"input", "compute", "sealed"}
    return kind != "dropped" or where == "frame"


def selectors(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values | st.sets(values, min_size=1, max_size=3)


def faults() -> st.SearchStrategy[Fault]:
    pairs = [(k, w) for k in sorted(KINDS) for w in sorted(STEPS) if legal(k, w)]
    whole = st.integers(0, 5)
    return st.sampled_from(pairs).flatmap(
        lambda pair: st.builds(
            Fault,
            kind=st.just(pair[0]),
            where=st.just(pair[1]),
            domain=selectors(st.sampled_from(["d0", "d1", "d2"])),
            worker=selectors(st.sampled_from(["tcp://a:1", "zero"])),
            shard=selectors(whole),
            role=selectors(st.sampled_from(sorted(ROLES))),
            round=selectors(whole),
            attempt=selectors(whole),
            times=st.none() | st.integers(1, 9),
            probability=st.floats(0, 1, exclude_min=True),
            bit=st.none() | whole,
            level=st.sampled_from([0, 1]),
            factor=st.floats(-2, 0.5),
            delay=st.floats(0, 9, exclude_min=True),
            seed=whole,
        )
    )


@given(st.lists(faults(), max_size=4))
def test_records_come_back(plan: list[Fault]) -> None:
    whole = FaultPlan(plan)
    record = json.loads(json.dumps(whole.to_dict()))
    assert FaultPlan.from_dict(record) == whole
    assert pickle.loads(pickle.dumps(whole)) == whole
    assert hash(FaultPlan.from_dict(record)) == hash(whole)


def test_matching_is_the_conjunction_of_all_selectors() -> None:
    """Every combination of (any, the value, a set with it, another value) for all six selectors."""
    choices = [(None, mine, [mine, other], other) for mine, other in FIELDS.values()]
    counted = 0
    for picked in itertools.product(range(4), repeat=len(FIELDS)):
        selected = {name: choices[i][pick] for i, (name, pick) in enumerate(zip(FIELDS, picked, strict=True))}
        fault = Fault("one_bit", "compute", **selected)
        assert fault.matches(CONTEXT) == (3 not in picked)
        counted += fault.matches(CONTEXT)
    assert counted == 3 ** len(FIELDS)


@pytest.mark.parametrize(("kind", "where"), list(itertools.product(sorted(KINDS), sorted(STEPS))))
def test_kinds_and_steps(kind: str, where: str) -> None:
    if not legal(kind, where):
        with pytest.raises(InputError, match=f"'{kind}' at one of the steps"):
            Fault(kind, where)
        return
    fault = Fault(kind, where)
    assert [step for step in sorted(STEPS) if fault.matches(replace(CONTEXT, where=step))] == [where]


def test_a_worker_is_known_by_address_and_by_name() -> None:
    assert Fault("one_bit", worker="zero").matches(CONTEXT)
    assert Fault("one_bit", worker={"tcp://a:1", "x"}).matches(CONTEXT)
    assert not Fault("one_bit", worker="one").matches(CONTEXT)


def test_a_batch_matches_if_any_of_its_shards_does() -> None:
    batch = replace(CONTEXT, where="frame", shards=(3, 4))
    assert Fault("one_bit", "frame", shard=[4, 9]).matches(batch)
    assert not Fault("one_bit", "frame", shard=5).matches(batch)
    assert not Fault("one_bit", "frame", shard=5).matches(replace(batch, shards=()))
    assert Fault("one_bit", "frame").matches(replace(batch, shards=()))


def test_match_keeps_the_order_of_the_plan() -> None:
    a, b, c = Fault("nan"), Fault("nan", domain="d1"), Fault("one_bit", shard=7)
    plan = FaultPlan([c, b, a, c])
    assert plan.match(CONTEXT) == [c, a, c]
    assert plan.indices(CONTEXT) == [0, 2, 3]
    assert FaultPlan().match(CONTEXT) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "two_bits"}, "kind to be one of"),
        ({"kind": ["one_bit"]}, "kind to be one of"),
        ({"where": "wire"}, "where to be one of"),
        ({"role": "referee"}, "role to be one of"),
        ({"role": []}, "at least one role"),
        ({"shard": set()}, "at least one shard"),
        ({"shard": -1}, "'shard' to be at least 0, got -1"),
        ({"shard": True}, "integer for 'shard', got True"),
        ({"round": 1.0}, "integer for 'round', got 1.0"),
        ({"attempt": "1"}, "integer for 'attempt', got '1'"),
        ({"domain": 3}, "str for 'domain', got 3"),
        ({"worker": ["a", None]}, "str for 'worker', got None"),
        ({"times": 0}, "'times' to be at least 1, got 0"),
        ({"times": True}, "integer for 'times'"),
        ({"probability": 0}, r"probability in \(0, 1\], got 0"),
        ({"probability": 1.01}, r"probability in \(0, 1\]"),
        ({"probability": float("nan")}, "finite number for 'probability'"),
        ({"probability": True}, "number for 'probability'"),
        ({"bit": -1}, "'bit' to be at least 0"),
        ({"level": 2}, "level to be one of"),
        ({"factor": 1}, "factor other than 1"),
        ({"factor": float("inf")}, "finite number for 'factor'"),
        ({"delay": 0}, "more than 0 seconds, got 0"),
        ({"seed": -1}, "'seed' to be at least 0"),
        ({"seed": None}, "integer for 'seed', got None"),
    ],
)
def test_bad_fields_are_refused_at_once(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Fault(**{"kind": "one_bit", **fields})


@pytest.mark.parametrize(
    "record",
    [{"where": "compute"}, {"kind": "nan", "colour": 1}, [], None, {"kind": "nan", "where": "model"}],
)
def test_bad_records_are_refused(record: Any) -> None:
    with pytest.raises(InputError):
        Fault.from_dict(record)
    with pytest.raises(InputError):
        FaultPlan.from_dict({"faults": [record]})


@pytest.mark.parametrize("record", [None, {}, {"faults": {}}, {"faults": [], "more": 1}])
def test_bad_plans_are_refused(record: Any) -> None:
    with pytest.raises(InputError, match="expected a"):
        FaultPlan.from_dict(record)


@pytest.mark.parametrize("given_plan", [Fault("nan"), ["nan"], [None]])
def test_a_plan_holds_faults_only(given_plan: Any) -> None:
    with pytest.raises(InputTypeError, match="sequence of Fault"):
        FaultPlan(given_plan)


def test_numpy_integers_become_plain_ones() -> None:
    fault = Fault("one_bit", shard=np.arange(3), bit=np.int64(4), round=np.int32(1))
    assert json.loads(json.dumps(fault.to_dict()))["shard"] == [0, 1, 2]
    assert fault == Fault("one_bit", shard={0, 1, 2}, bit=4, round=1)


STATE = {"n": 40, "sum": np.linspace(1, 2, 30), "sq": np.linspace(3, 4, 30)}


@pytest.mark.parametrize("kind", sorted(BIT_KINDS | VALUE_KINDS))
def test_a_persistent_fault_repeats_itself_and_two_domains_do_not_agree(kind: str) -> None:
    fault = Fault(kind, level=0)
    contexts = [
        replace(CONTEXT, domain=domain, role=role, round=number, attempt=attempt)
        for domain in ("d0", "d1", "d2")
        for role, number, attempt in (("primary", 0, 0), ("rerun", 0, 0), ("primary", 3, 2))
    ]
    by_domain: dict[str, set[bytes]] = {}
    for context in contexts:
        by_domain.setdefault(context.domain, set()).add(encode(corrupt_state(fault, STATE, context)))
    assert [len(results) for results in by_domain.values()] == [1, 1, 1]
    assert len(set.union(*by_domain.values())) == 3
    assert encode(STATE) not in set.union(*by_domain.values())


@pytest.mark.parametrize("kind", sorted(BIT_KINDS | VALUE_KINDS))
def test_corrupt_bytes(kind: str) -> None:
    payload = encode(STATE)
    context = replace(CONTEXT, where="sealed")
    corrupted = corrupt_bytes(Fault(kind, "sealed"), payload, context)
    assert corrupted != payload
    assert len(corrupted) == len(payload)
    assert corrupted == corrupt_bytes(Fault(kind, "sealed"), payload, context)
    if kind in VALUE_KINDS:
        assert decode(corrupted).keys() == STATE.keys()


def test_a_given_bit_is_the_bit_that_flips() -> None:
    x = np.zeros(2)
    flipped = corrupt_state(Fault("one_bit", bit=64 + 62), x, CONTEXT)
    assert flipped.tolist() == [0.0, 2.0]
    assert corrupt_bytes(Fault("one_bit", "sealed", bit=9), b"\0\0", CONTEXT) == b"\0\2"
    assert corrupt_bytes(Fault("stuck_at", "sealed", bit=9, level=0), b"\3\2", CONTEXT) == b"\1\0"
    assert corrupt_bytes(Fault("multi_bit", "sealed", bit=0), b"\0", CONTEXT)[0] & 1


def test_an_intermittent_fault_strikes_as_often_as_it_says() -> None:
    fault = Fault("one_bit", probability=0.3, seed=5)
    occasions = [replace(CONTEXT, shards=(s,), attempt=a) for s in range(400) for a in range(5)]
    strikes = [fault.matches(context) for context in occasions]
    # Binomial: five standard deviations about the mean.
    assert abs(sum(strikes) - 600) < 5 * (2000 * 0.3 * 0.7) ** 0.5
    assert strikes == [fault.matches(context) for context in occasions]
    assert strikes != [replace(fault, seed=6).matches(context) for context in occasions]


def test_actions_change_no_value() -> None:
    assert not ACTION_KINDS & (BIT_KINDS | VALUE_KINDS)
    assert BIT_KINDS | VALUE_KINDS | ACTION_KINDS | {"dropped"} == KINDS


def test_a_tally_grants_as_often_as_asked_for_by_many_threads() -> None:
    tally = Tally()
    granted: list[bool] = []

    def claim() -> None:
        for _ in range(50):
            granted.append(tally.claim(Delivery(1, "nan", CONTEXT), 7))
            tally.claim(Delivery(2, "one_bit", CONTEXT), None)

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert granted.count(True) == 7
    assert sum(d.index == 1 for d in tally.deliveries) == 7
    assert sum(d.index == 2 for d in tally.deliveries) == 200
