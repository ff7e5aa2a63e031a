"""Hypothesis strategies for states, and what it means that two of them are the same bit for bit."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

DTYPES = [
    np.dtype(code)
    for code in (
        "?", "i1", "<i2", ">i4", "i8", "u1", ">u2", "<u4", "u8", "f2", "<f4", ">f4", "<f8", ">f8",
        "c8", ">c16", "S1", "S7", "<U1", ">U5", "M8[ns]", ">M8[7D]", "M8", "m8[s]", "<m8[25us]",
    )
]  # fmt: skip

# Any bit pattern, NaN payloads and signed zeros included.
floats = st.binary(min_size=8, max_size=8).map(lambda raw: struct.unpack(">d", raw)[0])
texts = st.text(st.characters(), max_size=8)  # lone surrogates too
integers = st.one_of(st.integers(-300, 300), st.integers(), st.integers(-(2**200), 2**200))
keys = st.one_of(texts, integers)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Arrays of every kind, byte order and layout, 0-d and empty ones too, of any bits."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype.kind == "b":
        raw = bytearray(byte & 1 for byte in raw)
    if dtype.kind == "U":
        codes = (np.frombuffer(raw, "u4") % 0x110000).astype("u4")
        raw = bytearray(codes.astype(dtype.byteorder + "u4").tobytes())
    if dtype == np.dtype("M8"):
        raw = bytearray(np.full(shape, "NaT", dtype).tobytes())  # NumPy cannot print others without a unit
    array = np.frombuffer(raw, dtype).reshape(shape)
    return np.asfortranarray(array) if draw(st.booleans()) and array.ndim else array


kept_scalars = st.sampled_from(
    [
        np.float32(1.5),
        np.float16(-0.0),
        np.complex64(1 + 2j),
        np.datetime64("2020-02-29", "D"),
        np.datetime64("NaT", "ns"),
        np.timedelta64(3, "7h"),
    ]
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    integers,
    floats,
    st.builds(complex, floats, floats),
    texts,
    st.binary(max_size=12),
    arrays(),
    kept_scalars,
)
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two states are the same, types and bits included; byte order and layout do not count."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return {(type(key), key) for key in a} == {(type(key), key) for key in b} and all(
            same_bits(a[key], b[key]) for key in a
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_bits, a, b))
    if isinstance(a, (np.ndarray, np.generic)):
        little = a.dtype.newbyteorder("<"), b.dtype.newbyteorder("<")
        return (
            little[0].str == little[1].str
            and a.shape == b.shape
            and a.astype(little[0]).tobytes() == b.astype(little[1]).tobytes()
        )
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return struct.pack("<dd", a.real, a.imag) == struct.pack("<dd", b.real, b.imag)
    return bool(a == b)
