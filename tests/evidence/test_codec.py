"""The canonical encoding: one value, one encoding; and a decoder for suspect bytes."""

from __future__ import annotations

import collections
import enum
import hashlib
import random
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.evidence.codec import MAX_DEPTH, Limits, decode, digest, encode
from dask_sdc.exceptions import DecodeError, EncodeError, LimitExceeded
from tests.evidence.state_strategies import arrays, same_bits, states

SAMPLE = {
    "n": 3,
    "mean": np.array([1.0, -0.0]),
    "names": ["a", "ü", b"\0"],
    7: (None, True, False, -129, 2.5, 1 - 2j),
    "mask": np.array([[True], [False]]),
    "text": np.array(["ab", "c"]),
    "when": np.array(["2020-01-01"], "M8[D]"),
    "empty": np.empty((0, 3), "f4"),
}


def u64(number: int) -> bytes:
    return number.to_bytes(8, "big")


def reference(value: Any) -> bytes:
    """The table of the module's docstring, written once more and as plainly as possible."""
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"T", False: b"F"}[value]
    if isinstance(value, int):
        size = 1
        while not -(1 << (8 * size - 1)) <= value < 1 << (8 * size - 1):
            size += 1
        # (bit_length + 8) // 8 gives -128, -32768, ... one byte more than they need
        size += value < 0 and value == -(1 << (8 * size - 1))
        return b"i" + u64(size) + value.to_bytes(size, "big", signed=True)
    if isinstance(value, float):
        return b"f" + struct.pack(">d", value)
    if isinstance(value, complex):
        return b"c" + struct.pack(">d", value.real) + struct.pack(">d", value.imag)
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogatepass")
        return b"s" + u64(len(raw)) + raw
    if isinstance(value, bytes):
        return b"b" + u64(len(value)) + value
    if isinstance(value, (list, tuple)):
        tag = b"l" if isinstance(value, list) else b"t"
        return tag + u64(len(value)) + b"".join(reference(item) for item in value)
    if isinstance(value, dict):
        pairs = sorted((reference(key), reference(item)) for key, item in value.items())
        return b"d" + u64(len(pairs)) + b"".join(key + item for key, item in pairs)
    name = value.dtype.newbyteorder(">").str.encode()
    head = bytes([len(name)]) + name + bytes([value.ndim]) + b"".join(map(u64, value.shape))
    unit = value.dtype.itemsize // {"c": 2, "U": value.dtype.itemsize // 4}.get(value.dtype.kind, 1)
    raw = np.ascontiguousarray(value).tobytes()
    swaps = (
        value.dtype.kind in "iufcUMm" and value.dtype.newbyteorder("=").str[0] + value.dtype.str[0] != ">>"
    )
    if swaps and value.dtype.str[0] == "<":
        raw = b"".join(raw[i : i + unit][::-1] for i in range(0, len(raw), unit))
    return (b"a" if isinstance(value, np.ndarray) else b"g") + head + raw


@given(states)
def test_round_trip_keeps_every_bit(value: Any) -> None:
    assert same_bits(decode(encode(value)), value)


@given(states)
def test_bytes_are_those_of_the_table(value: Any) -> None:
    assert encode(value) == reference(value)


@given(states, states)
def test_equal_bytes_mean_equal_bits(a: Any, b: Any) -> None:
    assert (encode(a) == encode(b)) == same_bits(a, b)


@given(arrays())
def test_arrays_come_back_new_writable_and_native(array: np.ndarray[Any, Any]) -> None:
    back = decode(encode(array))
    assert back.flags.writeable and back.flags.c_contiguous and back.dtype.isnative
    assert back.flags.owndata or back.size == 0


def test_golden_bytes_do_not_change_between_releases() -> None:
    assert encode({"b": 1, "a": -0.0}).hex() == (
        "64" "0000000000000002"
        "73" "0000000000000001" "61" "66" "8000000000000000"
        "73" "0000000000000001" "62" "69" "0000000000000001" "01"
    )  # fmt: skip
    assert encode(np.array([1.0], "<f4")) == b"a\x03>f4\x01" + u64(1) + b"\x3f\x80\0\0"
    assert hashlib.sha256(encode(SAMPLE)).hexdigest() == GOLDEN_SHA256


GOLDEN_SHA256 = "2a1fff4110fa0a273e9533344d2facc6d460a88aed17f7eb2b69d043416e836c"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (0.0, -0.0),
        (3, 3.0),
        (1, True),
        (0, False),
        ("a", b"a"),
        ([1], (1,)),
        (1.0, 1 + 0j),
        (np.float32(1), 1.0),
        (np.zeros(2, "f4"), np.zeros(2, "f8")),
        (np.zeros(2, "i8"), np.zeros(2, "u8")),
        (np.zeros((1, 2)), np.zeros((2, 1))),
        (np.zeros(()), 0.0),
        (np.array([0.0]), np.array([-0.0])),
        (np.array([np.nan]), -np.array([np.nan])),
        (np.array(["a"], "U1"), np.array(["a"], "U2")),
        (np.array([0], "M8[s]"), np.array([0], "M8[ms]")),
        (np.array([0], "M8[s]"), np.array([0], "m8[s]")),
        ({1: 0}, {"1": 0}),
        ({}, []),
    ],
)
def test_look_alikes_have_different_bytes(a: Any, b: Any) -> None:
    assert encode(a) != encode(b)


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        (np.float64(0.1), 0.1),
        (np.int16(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.complex128(1j), 1j),
        (np.str_("x"), "x"),
        (np.bytes_(b"x"), b"x"),
    ],
)
def test_numpy_scalars_are_the_python_value_that_they_equal(scalar: Any, value: Any) -> None:
    assert encode(scalar) == encode(value)
    assert type(decode(encode(scalar))) is type(value)


def test_layout_and_byte_order_do_not_show() -> None:
    array = np.arange(24.0).reshape(4, 6)
    variants = [np.asfortranarray(array), array.astype(">f8"), np.repeat(array, 2, axis=1)[:, ::2]]
    assert {encode(variant) for variant in variants} == {encode(array)}
    assert encode({"a": 1, "b": 2}) == encode({"b": 2, "a": 1})


def test_big_arrays_take_the_same_bytes_as_small_ones() -> None:
    array = np.arange(20_000.0)
    small = b"".join(encode(part)[-8 * part.size :] for part in np.split(array, 10))
    for big in (array, np.asfortranarray(array.reshape(100, 200)), array[::-1][::-1]):
        assert encode(big)[-array.nbytes :] == small
    assert same_bits(decode(encode(array.astype("M8[s]"))), array.astype("M8[s]"))


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, object()]}, "value['a'][1]: expected .* got builtins.object"),
        ({"a": {1, 2}}, r"value\['a'\]"),
        ([Colour.RED], r"value\[0\]"),
        (collections.namedtuple("Point", "x y")(1, 2), "Point"),
        (collections.OrderedDict(a=1), "OrderedDict"),
        (np.ma.masked_array([1.0]), "MaskedArray"),
        (np.zeros(1, np.longdouble), "longdouble|float128"),
        (np.longdouble(1), "longdouble"),
        (np.zeros(1, np.clongdouble), "dtype"),
        (np.zeros(1, [("a", "i4")]), "dtype"),
        (np.array([None]), "dtype object"),
        (np.array([object()]), "dtype object"),
        (np.zeros(2, "V4"), "dtype"),
        ({True: 1}, "keys of type str or int, got bool"),
        ({"x": {1.5: 1}}, r"value\['x'\]: expected dict keys"),
        ({None: 1}, "NoneType"),
        (bytearray(b"x"), "bytearray"),
        (range(3), "range"),
        (len, "builtin_function"),
        (np.zeros((1,) * 33), "32 dimensions"),
    ],
)
def test_other_types_are_refused_with_their_path(value: Any, path: str) -> None:
    with pytest.raises(EncodeError, match=path.replace("value['a'][1]", r"value\['a'\]\[1\]")):
        encode(value)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_depth_is_bounded_on_both_sides() -> None:
    assert decode(encode(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    with pytest.raises(EncodeError, match="levels of nesting"):
        encode(nested(MAX_DEPTH + 1))
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(EncodeError, match="levels of nesting"):
        encode(cycle)
    with pytest.raises(LimitExceeded, match="levels of nesting"):
        decode((b"l" + u64(1)) * 5000 + b"N")


@pytest.mark.parametrize(
    ("limits", "within", "beyond"),
    [
        (Limits(max_bytes=12), b"abc", b"abcd"),
        (Limits(max_depth=2), [[1]], [[[1]]]),
        (Limits(max_items=4), [1, 2, 3], [1, 2, 3, 4]),
        (Limits(max_items=3), {"a": 1}, {"a": 1, "b": 2}),
        (Limits(max_array_bytes=16), np.zeros(2), np.zeros(3)),
    ],
)
def test_each_limit_holds_exactly(limits: Limits, within: Any, beyond: Any) -> None:
    assert same_bits(decode(encode(within), limits), within)
    with pytest.raises(LimitExceeded, match="expected"):
        decode(encode(beyond), limits)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "more bytes"),
        (b"N\0", "end at byte 1"),
        (b"x", "known tag"),
        (b"i" + u64(0), "integer of 1 bytes"),
        (b"i" + u64(2) + b"\0\1", "integer of 1 bytes"),
        (b"i" + u64(2) + b"\xff\xff", "integer of 1 bytes"),
        (b"f" + bytes(7), "more bytes"),
        (b"s" + u64(1) + b"\xff", "UTF-8"),
        (b"s" + u64(2) + b"\xc0\x80", "UTF-8"),
        (b"s" + u64(2**63), "at most"),
        (b"d" + u64(1) + b"Ni" + u64(1) + b"\1", "str or int key"),
        (b"d" + u64(2) + 2 * (b"i" + u64(1) + b"\1N"), "ascending"),
        (b"d" + u64(2) + b"i" + u64(1) + b"\2N" + b"i" + u64(1) + b"\1N", "ascending"),
        (b"a\x03<f8\0" + bytes(8), "canonical dtype"),
        (b"a\x02|O\0" + bytes(8), "canonical dtype"),
        (b"a\x04>f16\0" + bytes(16), "canonical dtype"),
        (b"a\x03|S0\0", "canonical dtype"),
        (b"a\x07>M8[1D]\0" + bytes(8), "other spelling"),
        (b"a\x10>M8[999999999Y]\0" + bytes(8), "canonical dtype|known tag|bytes"),
        (b"a\x03|b1\0\2", "booleans"),
        (b"a\x03>U1\0\0\x11\0\0", "code points"),
        (b"a\x03>f8\x21" + 33 * u64(1) + bytes(8), "at most 32 dimensions"),
        (b"a\x03>f8\2" + u64(0) + u64(2**62), "shape that NumPy can hold"),
        (b"a\x03>f8\1" + u64(3) + bytes(16), "24 bytes of an array"),
        (b"g\x03>f8\0" + bytes(8), "scalar"),
        (b"g\x03>f4\1" + u64(1) + bytes(4), "scalar"),
    ],
)
def test_other_bytes_are_refused(payload: bytes, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        decode(payload)


def decodes_to_another_value_or_not_at_all(payload: bytes, original: bytes) -> bool:
    """The whole promise of the decoder for a damaged payload."""
    try:
        value = decode(payload)
    except DecodeError:
        return True
    return encode(value) == payload != original


def test_every_flipped_bit_shows() -> None:
    payload = encode(SAMPLE)
    for bit in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        assert decodes_to_another_value_or_not_at_all(bytes(damaged), payload), bit


def test_truncated_and_extended_payloads_are_refused() -> None:
    payload = encode(SAMPLE)
    for size in range(len(payload)):
        with pytest.raises(DecodeError):
            decode(payload[:size])
    with pytest.raises(DecodeError):
        decode(payload + b"\0")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_an_encoding_or_a_decode_error(payload: bytes) -> None:
    assert decodes_to_another_value_or_not_at_all(payload, b"")


@given(states, st.randoms(use_true_random=False))
def test_spliced_payloads_are_another_value_or_a_decode_error(value: Any, rng: random.Random) -> None:
    payload = encode(value)
    cut, end = sorted(rng.randrange(len(payload) + 1) for _ in range(2))
    into = rng.randrange(len(payload) + 1)
    damaged = payload[:into] + payload[cut:end] + payload[into:]
    assert damaged == payload or decodes_to_another_value_or_not_at_all(damaged, payload)


@pytest.mark.parametrize(
    "payload",
    [
        b"l" + u64(2**40),
        b"d" + u64(2**60),
        b"b" + u64(2**63),
        b"i" + u64(2**50),
        b"a\x03>f8\1" + u64(2**26),
        b"a\x03>f8\3" + 3 * u64(2**60),
        b"a\x0b|S999999999\1" + u64(1),
        b"l" + u64(900_000) + 900_000 * b"\xff",
    ],
)
def test_a_claimed_size_allocates_nothing(payload: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            decode(payload)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000


def test_an_empty_array_of_large_elements_allocates_nothing() -> None:
    payload = b"a\x0b|S999999999\1" + u64(0)
    tracemalloc.start()
    try:
        array = decode(payload)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert array.shape == (0,) and peak < 200_000


def test_long_keys_are_not_kept_in_memory() -> None:
    value = {"k" * 100_000 + str(number): number for number in range(20)}
    decode(encode(value))
    tracemalloc.start()
    try:
        for number in range(20):
            decode(encode({f"{number}" * 100_000: 1}))
        left = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert left < 100_000


def test_huge_integers_pass() -> None:
    value = {10**6000: -(10**5000)}
    assert decode(encode(value)) == value
    with pytest.raises(EncodeError, match="<int of 19932 bits>"):
        encode({10**6000: object()})


def test_digest_has_16_bytes_and_follows_the_payload() -> None:
    assert len(digest(b"")) == 16
    assert digest(b"a").hex() == "a96faf705af16834e6c632b61e964e1f"  # published xxh3_128 of "a"
