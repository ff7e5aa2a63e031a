"""Receipts: all fields of a mismatch, from suspect bytes, through JSON and pickle."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.evidence.codec import encode
from dask_sdc.evidence.display import bounded_repr
from dask_sdc.evidence.envelope import compare_payloads
from dask_sdc.evidence.receipts import SDCAuditReceipt, first_diff_byte_offset, make_receipt
from dask_sdc.evidence.seal import SealedBatch, SealedStatistic, seal_statistic
from dask_sdc.exceptions import InputError
from tests.evidence.state_strategies import states

PROMISED = {
    "round",
    "shard_id",
    "primary_worker",
    "audit_worker",
    "primary_nbytes",
    "audit_nbytes",
    "first_diff_byte_offset",
    "primary_sha256",
    "audit_sha256",
    "comparison_mode",
    "audit_rtol",
    "audit_atol",
    "max_abs_error",
    "max_rel_error",
    "mismatch_reason",
    "primary_canonical_sha256",
    "audit_canonical_sha256",
    "witness_worker",
    "suspected_workers",
    "quarantine_status",
    "primary_value_repr",
    "audit_value_repr",
}


def batch(role: str, record: SealedStatistic) -> SealedBatch:
    name = {"primary": "a", "audit": "b"}[role]
    return SealedBatch(
        3, role, 0, f"host-{name}", f"tcp://{name}:1", f"env-{name}", bytes(16), "ok", (record,)
    )


def receipt(a: SealedStatistic, b: SealedStatistic, **decisions: Any) -> SDCAuditReceipt:
    comparison = compare_payloads(a.payload, b.payload, rtol=1e-12, atol=1e-12)
    return make_receipt(
        a, b, comparison, primary_batch=batch("primary", a), audit_batch=batch("audit", b), **decisions
    )


def sample(**decisions: Any) -> SDCAuditReceipt:
    a = seal_statistic(7, {"n": 2, "sum": np.array([1.0, 2.0])}, rows=2)
    b = seal_statistic(7, {"n": 2, "sum": np.array([1.0, 2.5])}, rows=2)
    return receipt(a, b, **decisions)


def test_fields_of_a_mismatch() -> None:
    got = sample()
    assert {field.name for field in dataclasses.fields(got)} >= PROMISED
    a, b = encode({"n": 2, "sum": np.array([1.0, 2.0])}), encode({"n": 2, "sum": np.array([1.0, 2.5])})
    assert (got.round, got.shard_id, got.primary_worker, got.audit_worker) == (3, 7, "tcp://a:1", "tcp://b:1")
    assert (got.primary_domain, got.audit_domain) == ("host-a", "host-b")
    assert (got.primary_fingerprint, got.audit_fingerprint) == ("env-a", "env-b")
    assert (got.primary_nbytes, got.audit_nbytes) == (len(a), len(b))
    assert got.first_diff_byte_offset == len(a) - 7
    assert got.primary_sha256 == got.primary_canonical_sha256 == hashlib.sha256(a).hexdigest()
    assert got.audit_sha256 == hashlib.sha256(b).hexdigest()
    assert (got.max_abs_error, got.max_rel_error, got.comparison_mode) == (0.5, 0.2, "envelope")
    assert (got.audit_rtol, got.audit_atol) == (1e-12, 1e-12)
    assert got.mismatch_reason.startswith("['sum']: outside of the envelope")
    assert got.envelope[0]["path"] == "['sum']" and got.envelope[0]["outside"] == 1
    assert "2.5" in got.audit_value_repr and "2.5" not in got.primary_value_repr
    assert (got.verdict, got.quarantine_status, got.persistence, got.witness_worker) == (
        "mismatch", "not_requested", None, None,
    )  # fmt: skip


def test_summary_is_one_line_that_names_the_parties() -> None:
    line = sample().summary()
    assert "\n" not in line
    assert "round 3 shard 7: mismatch of host-a and host-b;" in line
    assert "suspected nobody; quarantine not_requested" in line
    decided = sample(
        witness_worker="tcp://c:1",
        witness_domain="host-c",
        suspected_workers=("tcp://b:1",),
        suspected_domains=("host-b",),
        persistence="transient",
        quarantine_status="committed",
    ).summary()
    assert "witness host-c;" in decided
    assert "suspected host-b (transient); quarantine committed" in decided


def test_undecodable_payloads_are_described_and_not_executed() -> None:
    evil = b"cos\nsystem\n(S'exit 1'\ntR."  # a pickle
    bad = dataclasses.replace(seal_statistic(7, 1, rows=1), payload=evil)
    got = receipt(seal_statistic(7, 1, rows=1), bad)
    assert got.audit_canonical_sha256 is None
    assert got.audit_value_repr.startswith("<undecodable: expected")
    assert got.audit_sha256 == hashlib.sha256(evil).hexdigest()
    assert (got.comparison_mode, got.max_abs_error) == ("undecodable", math.inf)


@given(states, states)
def test_json_and_pickle_round_trip(a: Any, b: Any) -> None:
    got = receipt(
        seal_statistic(7, a, rows=1),
        seal_statistic(7, b, rows=1),
        suspected_workers=("tcp://a:1",),
        decided={"rerun": ["tcp://a:1"], "votes": 2},
        detected_at=12.5,
    )
    text = json.dumps(got.to_dict(), allow_nan=False)
    assert SDCAuditReceipt.from_dict(json.loads(text)) == got
    assert pickle.loads(pickle.dumps(got)) == got
    assert len(got.primary_value_repr) <= 400


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        ({"verdict": "guilty"}, "verdict among"),
        ({"persistence": "often"}, "persistence among"),
        ({"quarantine_status": "maybe"}, "quarantine_status among"),
        ({"quarantine_status": "deferred:"}, "quarantine_status among"),
    ],
)
def test_unknown_decisions_are_refused(decision: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sample(**decision)


@pytest.mark.parametrize("status", ["not_needed", "disabled", "committed", "deferred:no_safe_survivor"])
def test_known_quarantine_statuses_pass(status: str) -> None:
    assert sample(quarantine_status=status).quarantine_status == status


def test_records_with_other_fields_are_refused() -> None:
    fields = sample().to_dict()
    with pytest.raises(InputError, match="shoe_size"):
        SDCAuditReceipt.from_dict(fields | {"shoe_size": 42})
    del fields["round"]
    with pytest.raises(InputError, match="round"):
        SDCAuditReceipt.from_dict(fields)


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_first_difference_of_unrelated_bytes(a: bytes, b: bytes) -> None:
    shared = min(len(a), len(b))
    expected = None if a == b else next((k for k in range(shared) if a[k] != b[k]), shared)
    assert first_diff_byte_offset(a, b) == expected


@given(st.binary(min_size=1, max_size=300), st.data())
def test_first_difference_of_one_flipped_byte(a: bytes, data: st.DataObject) -> None:
    where = data.draw(st.integers(0, len(a) - 1))
    b = a[:where] + bytes([a[where] ^ 0x10]) + a[where + 1 :]
    assert first_diff_byte_offset(a, b) == where


@given(states, st.integers(4, 200))
def test_repr_is_bounded_for_every_state(state: Any, limit: int) -> None:
    assert len(bounded_repr(state, limit)) <= limit


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, (2.5,)]}, "{'a': [1, (2.5,)]}"),
        (list(range(9)), "[0, 1, 2, 3, 4, 5, ...]"),
        ([[[[1]]]], "[[[[...]]]]"),
        (np.arange(8.0), "<array float64 (8,) [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, ...]>"),
        (np.float32(2), "<array float32 () [2.0]>"),
        (np.array(["x"]), "<array <U1 (1,)>"),
        (object(), "<builtins.object>"),
        ("x" * 500, "'" + "x" * 396 + "..."),
    ],
)
def test_repr_of_known_values(value: Any, text: str) -> None:
    assert bounded_repr(value) == text


def test_repr_of_an_integer_that_python_refuses_to_print() -> None:
    assert bounded_repr(10**6000) == "<int of 19932 bits>"
