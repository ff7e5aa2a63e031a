"""Comparison: bit for bit, inside of the envelope, or a mismatch with errors of all leaves."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dask_sdc.evidence.codec import encode
from dask_sdc.evidence.envelope import LAMBDA, Comparison, compare, compare_payloads
from dask_sdc.exceptions import EncodeError, InputError
from dask_sdc.statistics.base import Statistic
from tests.evidence.state_strategies import same_bits, states

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
EXACT = {"rtol": 0.0, "atol": 0.0}


@given(states, states)
def test_equal_is_exactly_what_the_canonical_bytes_say(a: Any, b: Any) -> None:
    comparison = compare(a, b, **TIGHT)
    assert comparison.equal == (encode(a) == encode(b)) == (comparison.a_digest == comparison.b_digest)
    assert comparison.equal == same_bits(a, b)
    assert comparison.within == (not comparison.reason) == all(not leaf.reason for leaf in comparison.leaves)


@given(states)
def test_a_state_agrees_with_itself_where_non_finite_is_legal(state: Any) -> None:
    comparison = compare(state, state, finite=False, **EXACT)
    assert (comparison.equal, comparison.within, comparison.mode) == (True, True, "bitwise")
    assert (comparison.max_abs_error, comparison.max_rel_error, comparison.leaves) == (0.0, 0.0, ())


@given(states, states)
def test_sides_can_be_swapped(a: Any, b: Any) -> None:
    one, other = compare(a, b, **TIGHT), compare(b, a, **TIGHT)
    assert (one.within, one.equal, one.max_abs_error, one.max_rel_error) == (
        other.within, other.equal, other.max_abs_error, other.max_rel_error,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (3, 3.0, "same type, got int and float"),
        (True, 1, "same type, got bool and int"),
        (None, 0, "same type"),
        ("a", "b", "equal str"),
        (b"a", b"b", "equal bytes"),
        (1, 2, "equal int"),
        ([1.0], (1.0,), "same type, got list and tuple"),
        ([1.0], [1.0, 2.0], "same length, got 1 and 2"),
        ({"a": 1}, {"a": 1, "b": 2}, r"same keys.*\['b'\]"),
        ({1: 0}, {"1": 0}, "same keys"),
        (np.zeros(2, "f4"), np.zeros(2, "f8"), "same dtype, got float32 and float64"),
        (np.zeros(2, "i8"), np.zeros(2, "f8"), "same dtype"),
        (np.zeros((1, 2)), np.zeros((2, 1)), "same shape"),
        (np.zeros(()), 0.0, "same type"),
        (np.arange(3), np.array([0, 1, 3]), "1 of 3 that differ"),
        (np.array([True]), np.array([False]), "1 of 1"),
        (np.array(["a", "b"]), np.array(["a", "c"]), "1 of 2"),
        (np.array([b"a\0b"]), np.array([b"a\0c"]), "1 of 1"),
        (np.array(["NaT"], "M8[s]"), np.array([0], "M8[s]"), "1 of 1"),
        (np.datetime64(1, "s"), np.datetime64(1, "ms"), "same dtype"),
        (np.float32(1), 1.0, "same type"),
        (10**400, 1e308, "same type"),
        (10**400, 10**400 + 1, "equal int"),
        (1.0, 1.0 + 1e-11, "outside of the envelope"),
        (1j, 1j + 1e-11, "outside of the envelope"),
        (1.7e308, -1.7e308, "outside of the envelope"),
        (np.array([1.7e308 * (1 + 1j)]), np.array([1.7e308 + 1.6e308j]), "outside of the envelope"),
        (1.0, math.nan, "non-finite"),
        (math.inf, -math.inf, "non-finite"),
    ],
)
def test_mismatches(a: Any, b: Any, reason: str) -> None:
    for finite in (True, False):
        comparison = compare({"x": [a]}, {"x": [b]}, finite=finite, **TIGHT)
        assert not comparison.equal and not comparison.within and comparison.mode == "envelope"
        assert re.match(r"\['x'\]\[0\]: .*" + reason, comparison.reason)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (0.0, -0.0),
        (np.array([0.0]), np.array([-0.0])),
        (1.0, 1.0 + 1e-13),
        (1e300, 1e300 * (1 + 1e-13)),
        (1 + 1j, 1 + (1 + 1e-13) * 1j),
        (np.float32(1), np.nextafter(np.float32(1), np.float32(2))),
        (np.array([1], "f2"), np.nextafter(np.array([1], "f2"), np.float16(2))),
        (5e-324, 0.0),
    ],
)
def test_other_bits_inside_of_the_envelope(a: Any, b: Any) -> None:
    comparison = compare(a, b, **TIGHT)
    assert not comparison.equal and comparison.within and comparison.reason == ""
    assert len(comparison.leaves) == 1 and comparison.leaves[0].outside == 0
    assert comparison.leaves[0].abs_error <= comparison.leaves[0].allowed


NAN = math.nan
OTHER_NAN = float(np.array([0x7FF8000000000001]).view("f8")[0])


@pytest.mark.parametrize(
    ("a", "b", "legal"),
    [
        (math.inf, math.inf, True),
        (NAN, NAN, True),
        (NAN, OTHER_NAN, True),
        (complex(1, NAN), complex(1, NAN), True),
        (complex(1, NAN), complex(2, NAN), False),
        (complex(NAN, 1), complex(1, NAN), False),
        (np.array([NAN, 1.0]), np.array([NAN, 1.0]), True),
        (np.array([NAN, 1.0]), np.array([1.0, NAN]), False),
        (np.array([math.inf, 1.0]), np.array([math.inf, 2.0]), False),
        (NAN, math.inf, False),
    ],
)
def test_non_finite_needs_the_same_value_and_the_statistics_leave(a: Any, b: Any, legal: bool) -> None:
    assert not compare(a, b, finite=True, **TIGHT).within
    assert compare(a, b, finite=False, **TIGHT).within is legal
    assert compare(a, b, finite=True, **TIGHT).max_abs_error == math.inf


def test_errors_of_all_leaves_are_reported() -> None:
    a = {"a": 1.0, "b": np.array([1.0, 2.0, 4.0]), "c": [7, "x"], "d": np.ones(2)}
    b = {"d": np.ones(2), "c": [9, "y"], "b": np.array([1.0, 2.5, 3.0]), "a": 1.0 + 1e-3}
    comparison = compare(a, b, **TIGHT)
    assert [leaf.path for leaf in comparison.leaves] == ["['a']", "['b']", "['c'][0]", "['c'][1]"]
    assert comparison.reason.startswith("['a']: ")
    first, second, third, fourth = comparison.leaves
    assert first.abs_error == pytest.approx(1e-3, rel=1e-9) and first.rel_error == pytest.approx(
        1e-3, rel=1e-2
    )
    assert (second.abs_error, second.rel_error, second.outside, second.elements) == (1.0, 0.25, 2, 3)
    assert (third.abs_error, third.rel_error) == (2.0, 2 / 9)
    assert comparison.max_abs_error == fourth.abs_error == math.inf
    assert compare(a | {"c": [7, "x"]}, b | {"c": [7, "x"]}, **TIGHT).max_abs_error == 1.0


@given(
    st.floats(-1e6, 1e6),
    st.floats(-1e6, 1e6),
    st.floats(0, 1e-3),
    st.floats(0, 1e-3),
    st.floats(0, 1e12),
    st.floats(1, 1e12),
)
def test_envelope_is_the_formula_of_the_module(
    a: float, b: float, rtol: float, atol: float, magnitude: float, terms: float
) -> None:
    scale = max(abs(a), abs(b))
    rounding = LAMBDA * math.sqrt(terms) * 2.0**-53 * max(magnitude, scale)
    allowed = atol + max(rtol * scale, rounding)
    assume(abs(abs(a - b) - allowed) > 1e-12 * allowed)  # not on the edge itself
    comparison = compare({"x": a}, {"x": b}, rtol=rtol, atol=atol, magnitudes={"x": magnitude}, terms=terms)
    assert comparison.within == (abs(a - b) <= allowed)
    if not comparison.equal and a != b:
        assert comparison.leaves[0].allowed == pytest.approx(allowed, rel=1e-12)


@pytest.mark.parametrize(
    ("code", "roundoff"), [("f2", 2.0**-11), ("f4", 2.0**-24), ("c8", 2.0**-24), ("c16", 2.0**-53)]
)
def test_unit_roundoff_follows_the_leaf(code: str, roundoff: float) -> None:
    a, b = np.zeros(1, code), np.ones(1, code)
    comparison = compare({"x": a}, {"x": b}, magnitudes={"x": 64.0}, terms=4.0, **EXACT)
    assert comparison.leaves[0].allowed == LAMBDA * 2.0 * roundoff * 64.0


def test_magnitudes_broadcast_and_nest() -> None:
    a = {"s": np.zeros((2, 3)), "deep": {"t": np.zeros(2)}}
    b = {"s": np.full((2, 3), 1e-13), "deep": {"t": np.array([0.0, 1e-13])}}
    assert not compare(a, b, **EXACT).within
    enough = {"s": np.full(3, 1e3), "deep": {"t": [0.0, 1e3]}}
    assert compare(a, b, magnitudes=enough, **EXACT).within
    assert not compare(a, b, magnitudes={"s": np.full(3, 1e3)}, **EXACT).within


@pytest.mark.parametrize("magnitude", [math.nan, math.inf, np.ones(7), "much", [object()]])
def test_corrupt_magnitudes_do_not_widen_the_envelope(magnitude: Any) -> None:
    comparison = compare({"s": np.zeros(3)}, {"s": np.ones(3)}, magnitudes={"s": magnitude}, **TIGHT)
    assert not comparison.within
    assert compare({"s": np.zeros(3)}, {"s": np.zeros(3)}, magnitudes={"s": magnitude}, **TIGHT).within


@pytest.mark.parametrize("terms", [math.nan, math.inf, -5.0, 0.0])
def test_corrupt_numbers_of_terms_count_as_one(terms: float) -> None:
    comparison = compare(1.0, 2.0, terms=terms, **EXACT)
    assert comparison.leaves[0].allowed == LAMBDA * 2.0**-53 * 2.0


@pytest.mark.parametrize("tolerance", [math.nan, math.inf, -1e-9])
def test_bad_tolerances_are_refused(tolerance: float) -> None:
    with pytest.raises(InputError, match="finite rtol >= 0"):
        compare(1.0, 1.0, rtol=tolerance, atol=0.0)
    with pytest.raises(InputError, match="finite atol >= 0"):
        compare(1.0, 1.0, rtol=0.0, atol=tolerance)


def test_types_outside_of_the_closed_set_are_refused() -> None:
    with pytest.raises(EncodeError, match=r"builtins\.set"):
        compare({"x": {1}}, {"x": {1}}, **TIGHT)


def test_numpy_scalars_compare_as_they_are_encoded() -> None:
    assert compare(np.float64(3.0), 3.0, **EXACT).equal
    assert compare({"n": np.int32(3)}, {"n": 3}, **EXACT).within


class Sum(Statistic):
    """Sum and sum of magnitudes of samples; may be told to fail on a corrupt state."""

    def init(self, info: Any) -> Any:
        return {"n": 0, "sum": 0.0, "size": 0.0}

    def update(self, state: Any, x: Any) -> Any:
        return {"n": len(x), "sum": float(np.sum(x)), "size": float(np.sum(np.abs(x)))}

    def combine(self, a: Any, b: Any) -> Any:
        return {key: a[key] + b[key] for key in a}

    def finalize(self, state: Any) -> Any:
        return state["sum"]

    def magnitudes(self, state: Any) -> Mapping[str, Any]:
        return {"sum": state["size"]}

    def terms(self, state: Any) -> float:
        return float(state["n"])


def payload(**fields: Any) -> bytes:
    return encode({"n": 10**6, "sum": 1.0, "size": 1e6, **fields})


def test_a_statistic_widens_the_envelope_where_terms_cancel() -> None:
    a, b = payload(), payload(sum=1.0 + 1e-10)
    assert compare_payloads(a, b, statistic=Sum(), **TIGHT).within
    assert not compare_payloads(a, b, **TIGHT).within
    assert not compare_payloads(a, payload(sum=1.0 + 1e-5), statistic=Sum(), **TIGHT).within


@pytest.mark.parametrize(
    "fields", [{"size": 1e300}, {"n": 10**300}, {"size": math.inf}, {"size": "x"}, {"n": -1}, {"n": 10**400}]
)
def test_one_sides_corrupt_scale_does_not_hide_its_error(fields: dict[str, Any]) -> None:
    comparison = compare_payloads(payload(), payload(sum=2.0, **fields), statistic=Sum(), **TIGHT)
    assert not comparison.within
    assert "['sum']" in [leaf.path for leaf in comparison.leaves if leaf.reason]


def test_a_state_that_the_statistic_does_not_understand_is_a_mismatch() -> None:
    assert not compare_payloads(payload(), encode({"m": 1}), statistic=Sum(), **TIGHT).within
    assert not compare_payloads(payload(), encode(None), statistic=Sum(), **TIGHT).within


@pytest.mark.parametrize("sides", [(b"junk", encode(1)), (encode(1), b"junk"), (b"", b"junk")])
def test_undecodable_bytes_are_a_mismatch_with_raw_digests(sides: tuple[bytes, bytes]) -> None:
    comparison = compare_payloads(*sides, **TIGHT)
    assert (comparison.mode, comparison.equal, comparison.within) == ("undecodable", False, False)
    assert "cannot be decoded" in comparison.reason
    assert comparison.a_digest != comparison.b_digest and comparison.max_abs_error == math.inf


def test_the_same_undecodable_bytes_are_equal_and_not_within() -> None:
    comparison = compare_payloads(b"junk", b"junk", **TIGHT)
    assert (comparison.equal, comparison.within) == (True, False)


def test_finite_is_the_statistics_to_say() -> None:
    class Loose(Sum):
        finite = False

    nan = payload(sum=math.nan)
    assert not compare_payloads(nan, nan, statistic=Sum(), **TIGHT).within
    assert compare_payloads(nan, nan, statistic=Loose(), **TIGHT).within


@pytest.mark.parametrize("code", ["f4", "f8"])
def test_honest_sums_in_another_order_are_inside_and_flipped_bits_are_not(code: str) -> None:
    rng = np.random.default_rng(7)
    x = rng.normal(size=4096).astype(code)
    orders = [x, x[::-1], rng.permutation(x), np.sort(x)]
    sums = [np.add.accumulate(order)[-1:] for order in orders]
    scale = {"magnitudes": {"s": float(np.abs(x).sum(dtype="f8"))}, "terms": 4096.0}
    for total in sums:
        assert compare({"s": sums[0]}, {"s": total}, **scale, **TIGHT).within
    high = 18 if code == "f4" else 42  # leading bits of the significand and the whole exponent
    for bit in range(high, 8 * x.itemsize):
        flipped = sums[0].copy()
        flipped.view(f"u{x.itemsize}")[0] ^= np.array(1 << bit, f"u{x.itemsize}")
        assert not compare({"s": sums[0]}, {"s": flipped}, **scale, **TIGHT).within, bit


@given(states, states)
def test_json_and_pickle_round_trip(a: Any, b: Any) -> None:
    comparison = compare(a, b, **TIGHT)
    assert Comparison.from_dict(json.loads(json.dumps(comparison.to_dict()))) == comparison
    assert pickle.loads(pickle.dumps(comparison)) == comparison
