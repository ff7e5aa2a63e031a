from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.evidence.codec import decode, encode
from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.policy.quarantine import (
    CleanRecord,
    QuarantineList,
    QuarantineStatus,
    Staged,
    StagingPlan,
    TaintHistory,
    check_staging,
    plan,
)

LANES = {"a": 0, "b": 1, "c": 2, "d": 3}


def staging(*args: object, **kwargs: object) -> StagingPlan:
    result = plan(*args, **kwargs)  # type: ignore[arg-type]
    assert isinstance(result, StagingPlan), result
    return result


# -- statuses


def test_statuses_are_those_of_the_receipts() -> None:
    assert {str(status) for status in QuarantineStatus} == {
        "not_requested",
        "disabled",
        "not_needed",
        "committed",
        "deferred:no_safe_survivor",
        "deferred:ambiguous_shard_ownership",
        "deferred:duplicate_survivor_placement",
        "deferred:staging_failed",
    }


# -- taint


def test_taint_reaches_back_to_the_last_clean_audit() -> None:
    history = TaintHistory()
    history.computed("a", 0, [0, 1, 2])
    history.computed("b", 0, [3])
    assert history.last_clean("a") is None
    assert history.tainted(["a"]) == ((0, 0), (0, 1), (0, 2))
    assert history.clean("a", 0, 1) == CleanRecord(0, 1, 1)
    history.computed("a", 1, [0, 1, 2])
    assert history.tainted(["a"]) == ((0, 2), (1, 0), (1, 1), (1, 2))
    assert history.rollback_round(["a"]) == 0
    history.clean("a", 1, 0)
    assert history.tainted(["a"]) == ((1, 1), (1, 2)) and history.rollback_round(["a"]) == 1
    assert history.rollback_round(["a", "b"]) == 0 and history.rollback_round(["x"]) is None
    assert history.tainted(["b", "a"]) == ((0, 3), (1, 1), (1, 2))
    history.forget(["b"])
    assert history.tainted(["b"]) == ()


def test_late_and_foreign_clean_audits_change_nothing() -> None:
    history = TaintHistory()
    history.computed("a", 0, [0, 1, 2])
    history.clean("a", 0, 1)
    late = history.clean("a", 0, 0)
    assert late == CleanRecord(0, 1, 1) and history.tainted(["a"]) == ((0, 2),)
    assert history.clean("a", 0, 77) == late and history.clean("nobody", 0, 0) is None


def test_a_shard_computed_again_is_tainted_again() -> None:
    history = TaintHistory()
    history.computed("a", 0, [0, 1])
    history.computed("a", 0, [0])
    history.clean("a", 0, 1)
    assert history.tainted(["a"]) == ((0, 0),)


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.booleans(), st.integers(0, 3), st.integers(0, 5)), max_size=60
    )
)
def test_taint_against_a_plain_log(events: list[tuple[str, bool, int, int]]) -> None:
    history = TaintHistory()
    log: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
    cut = {"a": 0, "b": 0}
    for domain, clean, number, shard in events:
        if clean:
            history.clean(domain, number, shard)
            places = [i for i, key in enumerate(log[domain]) if key == (number, shard)]
            if places and places[-1] >= cut[domain]:
                cut[domain] = places[-1] + 1
        else:
            history.computed(domain, number, [shard])
            log[domain].append((number, shard))
        for name in "ab":
            tainted = set(log[name][cut[name] :])
            assert set(history.tainted(name)) == tainted
            assert history.rollback_round(name) == min((r for r, _ in tainted), default=None)
    saved = history.to_dict()
    assert decode(encode(saved)) == saved
    again = TaintHistory.from_dict(json.loads(json.dumps(saved)))
    assert again.to_dict() == saved and again.tainted("ab") == history.tainted("ab")


# -- staging


def test_plan_stages_every_shard_of_the_suspects_on_safe_survivors() -> None:
    owners = dict(enumerate("abcdabcda"))
    result = staging({"a": 0}, owners, LANES)
    assert result.suspects == ("a",) and result.shard_ids == (0, 4, 8)
    assert set(result.by_survivor()) == {"b", "c", "d"} == set(result.survivors)
    assert result.rollback_round is None
    both = staging({"a": 0, "c": 2}, owners, LANES)
    assert both.shard_ids == (0, 2, 4, 6, 8) and set(both.by_survivor()) == {"b", "d"}


def test_a_dead_suspect_still_leaves_its_shards() -> None:
    live = {"b": 1, "c": 2}
    assert staging({"a": 0}, {0: "a", 1: "b"}, live).shard_ids == (0,)
    assert staging({"a": 0}, {1: "b"}, live).placements == ()


def test_a_survivor_shares_no_lane_with_a_suspect() -> None:
    live = {"a": 0, "twin": 0, "b": 1}
    assert staging({"a": 0}, {0: "a"}, live).placements == ((0, "b"),)
    assert plan({"a": 0, "b": 1}, {0: "a"}, live) == QuarantineStatus.NO_SAFE_SURVIVOR


def test_reasons_not_to_plan() -> None:
    assert plan({}, {0: "a"}, LANES) == QuarantineStatus.NOT_NEEDED
    assert plan({"a": 0}, {0: "a"}, LANES, enabled=False) == QuarantineStatus.DISABLED
    assert plan({"a": 0}, {0: ("a", "b")}, LANES) == QuarantineStatus.AMBIGUOUS_SHARD_OWNERSHIP
    assert plan({"a": 0}, {0: ()}, LANES) == QuarantineStatus.AMBIGUOUS_SHARD_OWNERSHIP
    assert plan({"a": 0}, {0: "a"}, {"a": 0}) == QuarantineStatus.NO_SAFE_SURVIVOR
    # others may argue about a shard that is not the suspect's
    assert staging({"a": 0}, {0: ("a", "a"), 1: ("b", "c")}, LANES).shard_ids == (0,)


def test_rollback_goes_to_the_first_tainted_round() -> None:
    history = TaintHistory()
    history.computed("a", 4, [0])
    history.clean("a", 4, 0)
    history.computed("a", 5, [0])
    history.computed("a", 6, [0])
    assert staging({"a": 0}, {0: "a"}, LANES, history=history).rollback_round == 5


@given(
    shards=st.integers(0, 200),
    slots=st.lists(st.integers(1, 8), min_size=1, max_size=10),
)
def test_staging_is_balanced_by_threads(shards: int, slots: list[int]) -> None:
    live = {f"s{i}": i + 1 for i in range(len(slots))}
    threads = dict(zip(live, slots, strict=True))
    result = staging({"bad": 0}, dict.fromkeys(range(shards), "bad"), live, slots=threads)
    assert result.shard_ids == tuple(range(shards))
    counts = Counter(domain for _, domain in result.placements)
    makespan = max((counts[d] / threads[d] for d in live), default=0.0)
    # greedy on machines of differing speed: within one shard of the ideal on each
    assert makespan <= shards / sum(slots) + 1.0


@given(st.data())
def test_commit_needs_every_shard_once_sound_and_from_a_survivor(data: st.DataObject) -> None:
    result = staging({"a": 0}, dict(enumerate("aabaca")), LANES)
    staged = [Staged(shard, domain, True) for shard, domain in result.placements]
    staged = data.draw(st.permutations(staged))
    assert check_staging(result, staged) == QuarantineStatus.COMMITTED
    i = data.draw(st.integers(0, len(staged) - 1))
    others = staged[:i] + staged[i + 1 :]
    one = staged[i]
    failed = QuarantineStatus.STAGING_FAILED
    assert check_staging(result, others) == failed
    assert check_staging(result, [*others, Staged(one.shard_id, one.domain, False)]) == failed
    assert check_staging(result, [*others, Staged(one.shard_id, "a", True)]) == failed
    assert check_staging(result, [*staged, Staged(99, "b", True)]) == failed
    twice = [*staged, Staged(one.shard_id, "d", True)]
    assert check_staging(result, twice) == QuarantineStatus.DUPLICATE_SURVIVOR_PLACEMENT


def test_an_empty_plan_is_committed_by_nothing() -> None:
    assert check_staging(staging({"a": 0}, {}, LANES), []) == QuarantineStatus.COMMITTED


# -- quarantine list


def test_release_after_a_clean_probation() -> None:
    held = QuarantineList(probation=2)
    held.add("a", round_number=3, reason="shard 7")
    assert "a" in held and "b" not in held and len(held) == 1
    assert [one.domain for one in held] == ["a"]
    with pytest.raises(InputError, match="expected 2 clean checks in a row before its release, got 0"):
        held.release("a")
    assert held.checked("a", True) == 1
    assert held.checked("a", False) == 2  # in a row
    assert held.checked("a", True) == 1
    with pytest.raises(InputError, match=r"expected 2 clean checks .* got 1"):
        held.release("a")
    assert held.checked("a", True) == 0
    released = held.release("a")
    assert (released.round, released.reason, released.clean) == (3, "shard 7", 2)
    assert "a" not in held and len(held) == 0


def test_every_offence_doubles_the_probation() -> None:
    held = QuarantineList(probation=1)
    for wanted in (1, 2, 4):
        held.add("a", round_number=0, reason="")
        held.add("a", round_number=1, reason="again")  # still the same stay
        assert held.wanted("a") == wanted
        for _ in range(wanted):
            held.checked("a", True)
        held.release("a")


def test_quarantine_list_survives_a_checkpoint() -> None:
    held = QuarantineList(probation=2)
    held.add("a", round_number=3, reason="r")
    held.add("b", round_number=4, reason="s")
    held.checked("b", True)
    saved = held.to_dict()
    assert decode(encode(saved)) == saved
    again = QuarantineList.from_dict(json.loads(json.dumps(saved)))
    assert list(again) == list(held) and again.wanted("b") == 1
    again.checked("b", True)
    again.release("b")
    assert again.add("b", round_number=9, reason="t").offences == 2


def test_quarantine_list_refuses_what_makes_no_sense() -> None:
    held = QuarantineList()
    for act in (held.release, held.wanted, lambda d: held.checked(d, True)):
        with pytest.raises(InputError, match=r"domain x: expected one in quarantine \(none is\)"):
            act("x")
    with pytest.raises(InputError, match="probation: expected at least 1, got 0"):
        QuarantineList(0)
    for probation in (True, 1.5):
        with pytest.raises(InputTypeError, match="probation: expected an int"):
            QuarantineList(probation)  # type: ignore[arg-type]
