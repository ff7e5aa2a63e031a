"""Corruption always changes something, exactly what it says, and never its argument."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dask_sdc.evidence.codec import decode, encode
from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.faults import (
    count_bits,
    flip_bits,
    flip_state_bit,
    flip_state_bits,
    inject_bit_flip,
    poison_state,
    scale_state_value,
    stick_bits,
    stick_state_bit,
)

DTYPES = ["?", "i1", "<i8", ">i4", "u2", "<f2", "<f4", ">f8", "<c8", ">c16"]
DTYPES += ["S3", "<U2", ">U3", "M8[ns]", "m8[s]"]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**200), max_value=2**200),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.floats(width=32).map(np.float32),
    st.floats().map(np.float64),
    st.integers(0, 255).map(np.uint8),
    st.booleans().map(np.bool_),
)
LEAVES = SCALARS | ARRAYS
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.integers(0, 2**64) | st.lists(st.integers(0, 2**32), min_size=1, max_size=3)


def differing_bits(a: bytes, b: bytes) -> list[int]:
    """Positions of the bits in which two byte strings of one length differ."""
    assert len(a) == len(b)
    pairs = enumerate(zip(a, b, strict=True))
    return [8 * i + j for i, (x, y) in pairs for j in range(8) if (x ^ y) >> j & 1]


def same_types(a: Any, b: Any) -> bool:
    """Whether two states have the same form and leaf types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_types(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_types, a, b))
    return not isinstance(a, np.ndarray) or (a.dtype, a.shape) == (b.dtype, b.shape)


def changed(state: Any, corrupted: Any, before: bytes) -> None:
    """Assert that only the copy is changed, and that it still is a state."""
    assert encode(state) == before
    assert encode(corrupted) != before
    assert encode(decode(encode(corrupted))) == encode(corrupted)
    assert same_types(state, corrupted)


@given(st.binary(min_size=1, max_size=64), st.integers(-1000, 1000))
def test_inject_bit_flip_flips_the_bit_that_it_says(payload: bytes, offset: int) -> None:
    flipped = inject_bit_flip(payload, offset)
    assert differing_bits(payload, flipped) == [offset % (8 * len(payload))]
    assert inject_bit_flip(flipped, bit_offset=offset) == payload


@given(st.binary(min_size=1, max_size=64))
def test_inject_bit_flip_takes_the_middle_bit(payload: bytes) -> None:
    assert differing_bits(payload, inject_bit_flip(payload)) == [4 * len(payload)]


@given(st.binary(min_size=1, max_size=16), st.integers(1, 200), KEYS, st.none() | st.integers(0, 999))
def test_flip_bits_flips_as_many_as_it_says(payload: bytes, count: int, key: Any, first: int | None) -> None:
    flipped = flip_bits(payload, count, key, first)
    positions = differing_bits(payload, flipped)
    assert len(positions) == min(count, 8 * len(payload))
    assert first is None or first % (8 * len(payload)) in positions
    assert flip_bits(payload, count, key, first) == flipped


@given(st.binary(min_size=1, max_size=16), st.integers(0, 99), st.sampled_from([0, 1]))
def test_stick_bits_forces_one_line(payload: bytes, bit: int, level: int) -> None:
    assume(payload != bytes([255 * level]) * len(payload))
    stuck = stick_bits(payload, bit, level)
    positions = differing_bits(payload, stuck)
    assert positions
    (line,) = {position % 8 for position in positions}
    assert {byte >> line & 1 for byte in stuck} == {level}


def test_an_empty_payload_is_refused() -> None:
    for call in (inject_bit_flip, lambda p: flip_bits(p, 1, 0), lambda p: stick_bits(p, 0, 1)):
        with pytest.raises(InputError, match="at least one byte"):
            call(b"")


def test_what_cannot_change_is_refused() -> None:
    with pytest.raises(InputError, match="bit that is not 1"):
        stick_bits(b"\xff\xff", 3, 1)
    with pytest.raises(InputError, match="level of 0 or 1, got 2"):
        stick_bits(b"\x01", 3, 2)
    with pytest.raises(InputError, match="at least 1 bit, got 0"):
        flip_bits(b"\x01", 0, 7)
    for factor in (1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="finite factor other than 1"):
            scale_state_value({"a": 2.0}, factor, 0)


@pytest.mark.parametrize(
    ("state", "bits"),
    [
        (None, 0),
        (True, 1),
        (5, 64),
        (-(2**63), 64),
        (2**63, 72),
        (1.5, 64),
        (1j, 128),
        ("né", 14),
        (b"abc", 24),
        ([(1.0, {}), "", b""], 64),
        ({"long key": np.zeros((2, 3), "?"), 7: np.zeros(3, "<f4")}, 102),
        (np.array(["ab", "c"]), 28),
        (np.float32(1), 32),
        (np.empty((0, 4)), 0),
    ],
)
def test_bits_are_counted_without_keys(state: Any, bits: int) -> None:
    assert count_bits(state) == bits


@given(STATES, st.integers(0, 2**40))
def test_one_flipped_bit_changes_any_state_that_has_bits(state: Any, offset: int) -> None:
    before = encode(state)
    if not count_bits(state):
        with pytest.raises(InputError, match="at least one bit"):
            flip_state_bit(state, offset)
        return
    flipped = flip_state_bit(state, offset)
    changed(state, flipped, before)
    assert encode(flip_state_bit(flipped, offset % count_bits(state))) == before or count_bits(
        flipped
    ) != count_bits(state)


@given(STATES)
def test_every_bit_of_a_state_gives_another_state(state: Any) -> None:
    bits = count_bits(state)
    assume(0 < bits <= 256)
    results = {encode(flip_state_bit(state, offset)) for offset in range(bits)}
    assert len(results) == bits
    assert encode(flip_state_bit(state)) == encode(flip_state_bit(state, bits // 2))


@given(hnp.arrays("<f8", st.integers(1, 8)), st.integers(0, 999))
def test_a_flipped_bit_of_an_array_is_one_bit_of_its_memory(x: Any, offset: int) -> None:
    flipped = flip_state_bit({"x": x}, offset)["x"]
    assert differing_bits(x.tobytes(), flipped.tobytes()) == [offset % (64 * x.size)]


@given(STATES, st.integers(1, 5), KEYS)
def test_several_flipped_bits(state: Any, count: int, key: Any) -> None:
    assume(count_bits(state) > 0)
    before = encode(state)
    flipped = flip_state_bits(state, count, key)
    changed(state, flipped, before)
    assert encode(flip_state_bits(copy.deepcopy(state), count, key)) == encode(flipped)


@given(hnp.arrays("<u8", st.integers(1, 6)), st.integers(1, 9), KEYS, st.integers(0, 999))
def test_several_flipped_bits_are_distinct(x: Any, count: int, key: Any, first: int) -> None:
    flipped = flip_state_bits([x], count, key, first)[0]
    positions = differing_bits(x.tobytes(), flipped.tobytes())
    assert len(positions) == count
    assert first % (64 * x.size) in positions


@given(STATES, st.integers(0, 99), st.sampled_from([0, 1]), KEYS)
def test_a_stuck_bit_changes_a_state_or_is_refused(state: Any, bit: int, level: int, key: Any) -> None:
    before = encode(state)
    try:
        stuck = stick_state_bit(state, bit, level, key)
    except InputError:
        every = [encode(flip_state_bit(state, offset)) for offset in range(count_bits(state))]
        # Refused is right only if no bit could have changed: all of them are at the level.
        assert not every or set(levels(state)) == {level}
    else:
        changed(state, stuck, before)
        assert encode(stick_state_bit(copy.deepcopy(state), bit, level, key)) == encode(stuck)


def levels(state: Any) -> list[int]:
    """Levels of all bits of a state, by asking which of the two a flip can be undone to."""
    if isinstance(state, dict):
        return [level for item in state.values() for level in levels(item)]
    if isinstance(state, list | tuple):
        return [level for item in state for level in levels(item)]
    if isinstance(state, str):
        return [ord(c) >> i & 1 for c in state for i in range(7)]
    if isinstance(state, bool | np.bool_):
        return [int(state)]
    if type(state) is int:
        width = max(64, 8 * (max(state, ~state).bit_length() // 8 + 1))
        return [state >> i & 1 for i in range(width)]
    if isinstance(state, bytes):
        return [byte >> i & 1 for byte in state for i in range(8)]
    x = np.array([] if state is None else state)
    if x.dtype.kind == "b":
        return [int(item) for item in x.ravel()]
    if x.dtype.kind == "U":
        return [level for item in x.ravel() for level in levels(str(item).ljust(x.dtype.itemsize // 4, "\0"))]
    return [byte >> i & 1 for byte in x.tobytes() for i in range(8)]


@given(hnp.arrays(st.sampled_from(["<i4", "<f8", "<u1"]), st.integers(1, 6)), st.integers(0, 63), KEYS)
def test_a_stuck_bit_sticks_in_every_item(x: Any, bit: int, key: Any) -> None:
    width = 8 * x.dtype.itemsize
    words = x.view(f"<u{x.dtype.itemsize}")
    assume(any(not int(word) >> bit % width & 1 for word in words))
    stuck = stick_state_bit(x, bit, 1, key).view(words.dtype)
    assert (stuck == words | words.dtype.type(1 << bit % width)).all()


@given(STATES, st.sampled_from([-1.0, 0.0, 1.5, 1 + 2**-40, 1e300]), KEYS)
def test_a_scaled_value_changes_a_state_or_is_refused(state: Any, factor: float, key: Any) -> None:
    before = encode(state)
    if not numbers(state):
        with pytest.raises(InputError, match="a state with a number"):
            scale_state_value(state, factor, key)
        return
    scaled = scale_state_value(state, factor, key)
    changed(state, scaled, before)
    assert sum(map(differs, numbers(state), numbers(scaled))) == 1
    assert encode(scale_state_value(copy.deepcopy(state), factor, key)) == encode(scaled)


def numbers(state: Any) -> list[Any]:
    """All integers, floats and complex numbers of a state."""
    if isinstance(state, dict):
        return [number for item in state.values() for number in numbers(item)]
    if isinstance(state, list | tuple):
        return [number for item in state for number in numbers(item)]
    if isinstance(state, bool) or state is None or isinstance(state, str | bytes):
        return []
    if type(state) in (int, float, complex):
        return [state]
    return list(state.ravel()) if state.dtype.kind in "iufc" else []


def differs(a: Any, b: Any) -> bool:
    """Whether two numbers differ in a bit."""
    return encode(a) != encode(b)


@pytest.mark.parametrize(
    ("value", "factor", "expected"),
    [
        (3.0, 1.5, 4.5),
        (3.0, -1.0, -3.0),
        (0.0, 1.5, 1.0),
        (math.inf, 2.0, 1.0),
        (1.0, 1 + 2**-60 + 2**-50, 1 + 2**-50),
        (4, -1.0, -4),
        (1, 1 + 2**-40, 0),
        (10**400, 2.0, 2 * 10**400),
        (np.uint8(200), 1.5, np.uint8(44)),
        (np.float32(1), 1 + 2**-40, np.float32(0)),
        (2 + 1j, -1.0, -2 - 1j),
    ],
)
def test_scaled_values(value: Any, factor: float, expected: Any) -> None:
    scaled = scale_state_value([value], factor, 0)[0]
    assert type(scaled) is type(value)
    assert encode(scaled) == encode(expected)


@given(STATES, KEYS)
def test_a_poisoned_state_has_one_more_nan(state: Any, key: Any) -> None:
    before = encode(state)
    floats = [x for x in numbers(state) if isinstance(x, float | complex | np.inexact)]
    if all(np.isnan(x) for x in floats):
        with pytest.raises(InputError, match="a float that is not NaN"):
            poison_state(state, key)
        return
    poisoned = poison_state(state, key)
    changed(state, poisoned, before)
    new = [x for x in numbers(poisoned) if isinstance(x, float | complex | np.inexact)]
    assert sum(np.isnan(new)) == sum(np.isnan(floats)) + 1


def test_no_key_hits_the_same_place_always() -> None:
    x = np.ones(64)
    for corrupt in (lambda key: poison_state(x, key), lambda key: scale_state_value(x, 2.0, key)):
        places = {int(np.flatnonzero(corrupt(key) != 1)[0]) for key in range(40)}
        assert len(places) > 20


def test_arrays_of_any_layout() -> None:
    for x in (np.ones((4, 6))[::2, ::3], np.asfortranarray(np.ones((3, 2))), np.broadcast_to(1.0, (2, 2))):
        flipped = flip_state_bit(x, 52)
        assert (flipped.shape, (flipped != x).sum()) == (x.shape, 1)
        assert flipped[(0,) * x.ndim] != 1


def test_untouched_leaves_are_copies() -> None:
    state = {"a": np.ones(3), "b": np.ones(3)}
    for corrupted in (flip_state_bit(state, 0), scale_state_value(state, 2.0, 0), poison_state(state, 0)):
        assert not any(np.shares_memory(corrupted[k], state[k]) for k in state)


@pytest.mark.parametrize(
    ("leaf", "named"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (np.array([None]), "object"),
        (np.ones(2, np.longdouble), "longdouble|float128"),
        (np.zeros(2, "i4,f4"), "f4"),
    ],
)
def test_other_types_are_refused_by_name(leaf: Any, named: str) -> None:
    for corrupt in (flip_state_bit, lambda s: stick_state_bit(s, 0, 1, 0), lambda s: poison_state(s, 0)):
        with pytest.raises(InputTypeError, match=named):
            corrupt({"a": leaf})
