"""Folds of sealed statistics: canonical order, every step looked at, damage named."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.evidence.codec import digest, encode
from dask_sdc.evidence.fold import (
    SealedFold,
    checkpointed_fold,
    finite_guarded_fold,
    first_nonfinite,
    fold_sealed,
)
from dask_sdc.evidence.seal import SealedStatistic, failed_statistic, seal_statistic
from dask_sdc.exceptions import (
    CheckpointError,
    CorruptionError,
    InputError,
    InvariantError,
    NonFiniteError,
    ShardError,
)
from dask_sdc.statistics.base import Statistic
from dask_sdc.statistics.fold import tree_fold


class Sums(Statistic):
    """Float sums, whose bits tell in which order they were added up."""

    def init(self, info: Any) -> Any:
        raise NotImplementedError

    def update(self, state: Any, x: Any) -> Any:
        raise NotImplementedError

    def combine(self, a: Any, b: Any) -> Any:
        a["sum"] += b["sum"]  # in place, as statistics may
        return {"count": a["count"] + b["count"], "sum": a["sum"]}

    def finalize(self, state: Any) -> Any:
        return state["sum"]


class Loose(Sums):
    finite = False


def state(k: int, count: float = 1.0) -> dict[str, Any]:
    return {"count": count, "sum": np.random.default_rng(k).normal(size=3) * 10.0 ** (k % 7)}


def payloads(n: int) -> list[bytes]:
    return [encode(state(k)) for k in range(n)]


def records(n: int) -> list[SealedStatistic]:
    return [seal_statistic(k, state(k), rows=1) for k in range(n)]


@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_all_folds_give_the_bits_of_the_canonical_tree(n: int, rng: random.Random) -> None:
    expected = encode(tree_fold([state(k) for k in range(n)], Sums().combine))
    shuffled = records(n)
    rng.shuffle(shuffled)
    by_shard = {record.shard_id: record.payload for record in shuffled}
    fold = SealedFold(Sums(), n)
    for record in shuffled:
        fold.add_record(record)
    assert encode(fold.result()) == expected
    assert fold.steps == n - 1
    assert encode(fold_sealed(Sums(), shuffled, shards=n)) == expected
    assert encode(finite_guarded_fold(Sums(), by_shard)) == expected
    assert encode(finite_guarded_fold(Sums(), payloads(n))) == expected
    assert encode(checkpointed_fold(Sums(), by_shard, checkpoint_after=rng.randint(0, n))) == expected


def test_another_order_would_have_other_bits() -> None:
    """Otherwise the test above could not fail."""
    straight = state(0)
    for k in range(1, 40):
        straight = Sums().combine(straight, state(k))
    assert encode(straight) != encode(finite_guarded_fold(Sums(), payloads(40)))


def test_a_checkpoint_is_taken_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = SealedFold.checkpoint

    def spy(fold: SealedFold) -> bytes:
        seen.append(fold.n - len(fold.missing()))
        return original(fold)

    monkeypatch.setattr(SealedFold, "checkpoint", spy)
    for after in (0, 3, 7):
        checkpointed_fold(Sums(), payloads(7), checkpoint_after=after)
    assert seen == [0, 3, 7]


@pytest.mark.parametrize("after", [-1, 8, True])
def test_a_checkpoint_outside_of_the_fold_is_refused(after: int) -> None:
    with pytest.raises(InputError, match=r"checkpoint_after in 0\.\.7"):
        checkpointed_fold(Sums(), payloads(7), checkpoint_after=after)


def test_a_restored_fold_goes_on_in_any_order() -> None:
    fold = SealedFold(Sums(), 9)
    for k in (8, 2, 5):
        fold.add_payload(k, payloads(9)[k])
    restored = SealedFold.restore(Sums(), fold.checkpoint())
    assert restored.missing() == [0, 1, 3, 4, 6, 7]
    with pytest.raises(InputError, match="already"):
        restored.add_payload(2, payloads(9)[2])
    for k in (7, 0, 1, 3, 6, 4):
        restored.add_payload(k, payloads(9)[k])
    assert encode(restored.result()) == encode(finite_guarded_fold(Sums(), payloads(9)))
    assert restored.steps == 8


@pytest.mark.parametrize(
    "fields",
    [
        None,
        (3,),
        (0, 0, b"", []),
        (3, 0, b"\0", []),
        (3, 0, bytes(3), [1]),
        (3, "x", bytes(3), []),
        (3, 0, [0, 0, 0], []),
    ],
)
def test_other_values_are_no_checkpoint(fields: Any) -> None:
    body = encode(fields)
    with pytest.raises(CheckpointError, match="expected a checkpoint of a fold"):
        SealedFold.restore(Sums(), digest(body) + body)


def test_every_flipped_bit_of_a_checkpoint_is_caught() -> None:
    fold = SealedFold(Sums(), 3)
    fold.add_payload(0, payloads(3)[0])
    checkpoint = fold.checkpoint()
    for bit in range(8 * len(checkpoint)):
        damaged = bytearray(checkpoint)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError, match="expected a fold of digest"):
            SealedFold.restore(Sums(), bytes(damaged))
    with pytest.raises(CheckpointError, match="expected a fold of digest"):
        SealedFold.restore(Sums(), b"")


@pytest.mark.parametrize(
    ("bad", "path"),
    [
        ({"count": 1.0, "sum": np.array([0.0, np.nan, 0.0])}, r"\['sum'\]"),
        ({"count": np.inf, "sum": np.zeros(3)}, r"\['count'\]"),
    ],
)
def test_a_non_finite_payload_is_named(bad: Any, path: str) -> None:
    sealed = [*payloads(5), encode(bad), b"never looked at"]
    with pytest.raises(NonFiniteError, match=rf"shard 5: .* in its payload at {path}") as caught:
        finite_guarded_fold(Sums(), sealed)
    assert caught.value.shard_id == 5


@pytest.mark.parametrize("field", ["count", "sum"])
def test_the_step_that_overflows_is_named_and_the_last(field: str) -> None:
    sealed = payloads(6)
    for k in (2, 3):
        sealed[k] = encode(state(k) | {field: 1e308 if field == "count" else np.full(3, 1e308)})
    # steps: (0, 1), (2, 3): the second overflows, when shard 3 comes
    with pytest.raises(NonFiniteError, match=rf"shard 3: .* after step 2 at \['{field}'\]"):
        finite_guarded_fold(Sums(), [*sealed[:4], b"never", b"looked at"])


def test_the_result_is_checked_once_more() -> None:
    class Late(Sums):
        """Spoils the state after the guard looked at it, as a memory fault would."""

        held: Any = None

        def combine(self, a: Any, b: Any) -> Any:
            self.held = super().combine(a, b)
            return self.held

    statistic = Late()
    fold = SealedFold(statistic, 2)
    fold.add_payload(0, payloads(2)[0])
    fold.add_payload(1, payloads(2)[1])
    statistic.held["sum"][1] = np.inf
    with pytest.raises(NonFiniteError, match="in the result after step 1"):
        fold.result()


def test_non_finite_passes_where_the_statistic_allows_it() -> None:
    sealed = [encode(state(0)), encode({"count": 1.0, "sum": np.array([np.nan, np.inf, 0.0])})]
    assert np.isnan(finite_guarded_fold(Loose(), sealed)["sum"][0])
    with pytest.raises(NonFiniteError):
        finite_guarded_fold(Sums(), sealed)


def test_a_payload_changed_after_sealing_is_caught() -> None:
    sealed = records(4)
    payload = bytearray(sealed[2].payload)
    payload[-1] ^= 1  # still a canonical encoding, of another value
    sealed[2] = dataclasses.replace(sealed[2], payload=bytes(payload))
    with pytest.raises(CorruptionError, match="shard 2: expected a payload of digest") as caught:
        fold_sealed(Sums(), sealed)
    assert caught.value.shard_id == 2


def test_a_sealed_payload_that_cannot_be_decoded_is_named() -> None:
    with pytest.raises(CorruptionError, match="shard 1: expected a canonical encoding"):
        finite_guarded_fold(Sums(), [payloads(1)[0], b"junk"])


@pytest.mark.parametrize(
    ("record", "error", "message"),
    [
        (
            seal_statistic(1, state(1), rows=1, status="violation", notes=["n < 0"]),
            InvariantError,
            "violation: n < 0",
        ),
        (failed_statistic(1, ["OSError", "gone"]), ShardError, "error: OSError; gone"),
    ],
)
def test_records_that_are_not_ok_are_refused(
    record: SealedStatistic, error: type[ShardError], message: str
) -> None:
    with pytest.raises(error, match=f"shard 1: expected status ok, got {message}"):
        fold_sealed(Sums(), [records(1)[0], record])


@pytest.mark.parametrize(
    ("ids", "shards", "message"),
    [
        ([], None, "n >= 1"),
        ([0, 0], 2, "already"),
        ([0, 2], 3, "missing"),
        ([0, 2], None, "outside"),
        ([0, 1], 3, "missing"),
        ([-1, 0], 2, "outside"),
    ],
)
def test_coverage_is_checked(ids: list[int], shards: int | None, message: str) -> None:
    sealed = [seal_statistic(k, state(abs(k)), rows=1) for k in ids]
    with pytest.raises(InputError, match=message):
        fold_sealed(Sums(), sealed, shards=shards)


def test_no_payload_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="n >= 1"):
        finite_guarded_fold(Sums(), [])


def test_states_that_do_not_combine_name_shard_and_step() -> None:
    sealed = [*payloads(2), encode({"count": 1.0, "sum": np.zeros(4)}), encode(state(3))]
    with pytest.raises(ShardError, match="shard 3, step 2: expected states that combine, got ValueError"):
        finite_guarded_fold(Sums(), sealed)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (1.0, None),
        (float("nan"), ""),
        (np.float32("inf"), ""),
        (np.float32(1), None),
        (complex(0, float("inf")), ""),
        (np.complex64(complex(float("nan"), 0)), ""),
        (np.array(np.nan), ""),
        (np.array([1, np.nan * 1j]), ""),
        (np.array([np.inf], "f2"), ""),
        (np.empty((0, 2)), None),
        (np.array(["NaT"], "M8[s]"), None),
        (["nan", b"inf", None, 10**400, True], None),
        ({"a": [1, (2.0, {3: np.array([[0.0], [-np.inf]])})]}, "['a'][1][1][3]"),
    ],
)
def test_first_nonfinite_finds_the_leaf(value: Any, path: str | None) -> None:
    assert first_nonfinite(value) == path
