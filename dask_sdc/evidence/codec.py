"""Canonical bytes of a state, and a decoder that can be trusted with suspect bytes.

One value has one encoding and one encoding has one value, bit for bit: the sign of zero, the
payload of a NaN, 3 against 3.0 and f4 against f8 all show in the bytes, so that equal digests mean
equal values and nothing less. Every item is a tag byte followed by big-endian fields:

======  =============================================================================
tag     body
======  =============================================================================
``N``   None
``T F`` bool
``i``   length, two's complement of (bit_length + 8) // 8 bytes
``f``   IEEE binary64
``c``   two IEEE binary64, real part first
``s``   length, UTF-8 (lone surrogates allowed)
``b``   length, raw bytes
``l``   count, items of a list
``t``   count, items of a tuple
``d``   count, pairs of key (``i`` or ``s``) and value, ascending by the key's bytes
``a``   array: length of dtype (1 byte), dtype, ndim (1 byte), shape, elements in C order
``g``   NumPy scalar that has no exact Python counterpart, laid out as a 0-d array
======  =============================================================================

Lengths, counts and shape entries are unsigned 64 bit. Array elements are big-endian as well, whatever
the byte order or memory layout of the source. NumPy scalars of kind b, i, u, S and U, float64 and
complex128 are encoded as the Python value that they equal, because kernels of the same statistic
return now one and now the other; the rest (float16, float32, complex64, datetime64, timedelta64)
keep their dtype. Extended precision is refused: its bytes depend on the platform.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import xxhash

from dask_sdc.evidence.display import bounded_repr
from dask_sdc.exceptions import DecodeError, EncodeError, LimitExceeded

#: Nesting that the encoder accepts and the decoder allows by default.
MAX_DEPTH = 64

_NDIM_MAX = 32  # what every supported NumPy can hold
_U64 = struct.Struct(">Q")
_F64 = struct.Struct(">d")
_C128 = struct.Struct(">dd")
_DTYPE = re.compile(
    r"\|b1|\|[iu]1|>[iu][248]|>f[248]|>c(?:8|16)|\|S[1-9]\d{0,9}|>U[1-9]\d{0,9}"
    r"|>[Mm]8(?:\[\d{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
_Bytes = bytes | memoryview
_KEY_TAGS = b"is"
_SHORT_KEY = 64  # bytes; the same few field names come with every shard and are worth a cache
_BIG_ARRAY = 1 << 16  # bytes; from here on a second copy costs more than a view
_KEPT_SCALARS = (np.float16, np.float32, np.complex64, np.datetime64, np.timedelta64)


@dataclass(frozen=True)
class Limits:
    """What the decoder is willing to read.

    Parameters
    ----------
    max_bytes : int
        Size of the whole payload, in bytes.
    max_depth : int
        Nesting of lists, tuples and dicts.
    max_items : int
        Number of values, dict keys included.
    max_array_bytes : int
        Size of one array, in bytes.
    """

    max_bytes: int = 1 << 31
    max_depth: int = MAX_DEPTH
    max_items: int = 1_000_000
    max_array_bytes: int = 1 << 30


DEFAULT_LIMITS = Limits()


def digest(payload: bytes) -> bytes:
    """Return the xxh3_128 digest of canonical bytes: 16 bytes, for detection and not for proof."""
    return xxhash.xxh3_128_digest(payload)


# -- encoding ------------------------------------------------------------------------------------


class _Refused(Exception):
    """Carries the path of a value without an encoding outwards, innermost step first."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.steps: list[str] = []


def encode(value: Any) -> bytes:
    """Return the canonical encoding of a value.

    Parameters
    ----------
    value : State
        None, bool, int, float, complex, str, bytes, list, tuple, dict with str or int keys,
        NumPy arrays of kinds b, i, u, f, c, S, U, M, m, and NumPy scalars; of exactly these types:
        subclasses (a named tuple, a masked array) would not come back as what they were.

    Returns
    -------
    bytes
        Equal for two values if and only if they are equal bit for bit.

    Raises
    ------
    EncodeError
        If a part of the value has no encoding; the message names its path and type.
    """
    out: list[_Bytes] = []
    try:
        _put(value, out, 0)
    except _Refused as refused:
        path = "value" + "".join(reversed(refused.steps))
        raise EncodeError(f"{path}: {refused}") from None
    return b"".join(out)


def _put(value: Any, out: list[_Bytes], depth: int) -> None:
    writer = _WRITERS.get(type(value))
    if writer is None:
        writer = _numpy_scalar_writer(value)
    writer(value, out, depth)


def _numpy_scalar_writer(value: Any) -> Callable[[Any, list[_Bytes], int], None]:
    if isinstance(value, _KEPT_SCALARS):
        return _put_scalar
    if isinstance(value, np.generic) and value.dtype.kind in "biufcSU" and value.dtype.char not in "gG":
        return lambda value, out, depth: _put(value.item(), out, depth)
    raise _Refused(
        f"expected None, bool, int, float, complex, str, bytes, list, tuple, dict or numpy.ndarray, "
        f"got {type(value).__module__}.{type(value).__qualname__}"
    )


def _put_none(value: None, out: list[_Bytes], depth: int) -> None:
    out.append(b"N")


def _put_bool(value: bool, out: list[_Bytes], depth: int) -> None:
    out.append(b"T" if value else b"F")


def _put_int(value: int, out: list[_Bytes], depth: int) -> None:
    out.append(_encode_int(value))


def _put_float(value: float, out: list[_Bytes], depth: int) -> None:
    out.append(b"f" + _F64.pack(value))


def _put_complex(value: complex, out: list[_Bytes], depth: int) -> None:
    out.append(b"c" + _C128.pack(value.real, value.imag))


def _put_str(value: str, out: list[_Bytes], depth: int) -> None:
    out.append(_encode_str(value))


def _put_bytes(value: bytes, out: list[_Bytes], depth: int) -> None:
    out.append(b"b" + _U64.pack(len(value)))
    out.append(value)


def _put_items(tag: bytes, value: list[Any] | tuple[Any, ...], out: list[_Bytes], depth: int) -> None:
    _check_depth(depth)
    out.append(tag + _U64.pack(len(value)))
    index = 0
    try:
        for item in value:
            _put(item, out, depth + 1)
            index += 1
    except _Refused as refused:
        refused.steps.append(f"[{index}]")
        raise


def _put_list(value: list[Any], out: list[_Bytes], depth: int) -> None:
    _put_items(b"l", value, out, depth)


def _put_tuple(value: tuple[Any, ...], out: list[_Bytes], depth: int) -> None:
    _put_items(b"t", value, out, depth)


def _put_dict(value: dict[Any, Any], out: list[_Bytes], depth: int) -> None:
    _check_depth(depth)
    out.append(b"d" + _U64.pack(len(value)))
    pairs = sorted([(_encode_key(key), key) for key in value])
    try:
        for raw, key in pairs:
            out.append(raw)
            _put(value[key], out, depth + 1)
    except _Refused as refused:
        refused.steps.append(f"[{bounded_repr(key, 60)}]")
        raise


def _encode_key(key: Any) -> bytes:
    if type(key) is str:
        return _cached_str(key) if len(key) <= _SHORT_KEY else _encode_str(key)
    if type(key) is int:
        return _encode_int(key)
    raise _Refused(f"expected dict keys of type str or int, got {type(key).__qualname__}")


def _encode_str(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"s" + _U64.pack(len(raw)) + raw


_cached_str = lru_cache(maxsize=4096)(_encode_str)


def _encode_int(value: int) -> bytes:
    size = (value.bit_length() + 8) // 8
    return b"i" + _U64.pack(size) + value.to_bytes(size, "big", signed=True)


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise _Refused(f"expected at most {MAX_DEPTH} levels of nesting, got more")


def _put_array(value: np.ndarray[Any, Any], out: list[_Bytes], depth: int) -> None:
    out.append(_array_head(b"a", value.dtype, value.shape))
    elements = _big_endian(value)
    # join() takes the buffer as it is, which saves big arrays a copy
    big = value.nbytes >= _BIG_ARRAY
    out.append(elements.reshape(-1).view(np.uint8).data if big else elements.tobytes())


def _put_scalar(value: np.generic, out: list[_Bytes], depth: int) -> None:
    array = np.asarray(value)
    out.append(_array_head(b"g", array.dtype, ()))
    out.append(_big_endian(array).tobytes())


def _big_endian(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.dtype.kind in "mM":
        array = array.view(_integer_of(array.dtype))
    return array.astype(array.dtype.newbyteorder(">"), order="C", copy=False)


def _integer_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the integers behind times; NumPy 2.4 does not swap bytes when it casts times without a unit."""
    return np.dtype(np.int64).newbyteorder(dtype.byteorder)


@lru_cache(maxsize=1024)
def _array_head(tag: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    if len(shape) > _NDIM_MAX:
        raise _Refused(f"expected an array of at most {_NDIM_MAX} dimensions, got {len(shape)}")
    name = _canonical_dtype(dtype).str.encode()
    return tag + struct.pack(f">B{len(name)}sB{len(shape)}Q", len(name), name, len(shape), *shape)


@lru_cache(maxsize=256)
def _canonical_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    canonical = dtype.newbyteorder(">")
    if not _DTYPE.fullmatch(canonical.str) or dtype.fields or dtype.subdtype:
        raise _Refused(
            "expected an array of kind b, i, u, f, c, S, U, M or m, at most float64 or complex128 and "
            f"of non-zero item size, got dtype {dtype}"
        )
    return canonical


_WRITERS: dict[type, Callable[[Any, list[_Bytes], int], None]] = {
    type(None): _put_none,
    bool: _put_bool,
    int: _put_int,
    float: _put_float,
    complex: _put_complex,
    str: _put_str,
    bytes: _put_bytes,
    list: _put_list,
    tuple: _put_tuple,
    dict: _put_dict,
    np.ndarray: _put_array,
}


# -- decoding ------------------------------------------------------------------------------------


class _Reader:
    """The bytes, how far they were read, and how many values are still allowed."""

    __slots__ = ("buffer", "items_left", "limits", "position")

    def __init__(self, buffer: bytes, limits: Limits) -> None:
        self.buffer = buffer
        self.position = 0
        self.items_left = limits.max_items
        self.limits = limits

    def size(self) -> int:
        """Read a length; it cannot exceed the bytes that are left, so nothing large is allocated."""
        (size,) = _U64.unpack_from(self.buffer, self.position)
        self.position += 8
        left = len(self.buffer) - self.position
        if size > left:
            raise DecodeError(f"expected at most {left} more bytes or items, got a length of {size}")
        return int(size)

    def take(self, size: int) -> bytes:
        start = self.position
        raw = self.buffer[start : start + size]
        if len(raw) != size:
            raise DecodeError(f"expected {size} more bytes, got {len(raw)}")
        self.position = start + size
        return raw

    def count(self, items: int) -> None:
        self.items_left -= items
        if self.items_left < 0:
            raise LimitExceeded(f"expected at most {self.limits.max_items} items, got more")


def decode(payload: bytes, limits: Limits = DEFAULT_LIMITS) -> Any:
    """Return the value of a canonical encoding; nothing is executed or imported.

    Parameters
    ----------
    payload : bytes
        What `encode` returned; anything else is refused, also another spelling of a legal value.
    limits : Limits, optional
        Bounds on size, depth, number of items and size of an array.

    Returns
    -------
    State
        Arrays are new, writable, C-ordered and of native byte order.

    Raises
    ------
    DecodeError
        If the bytes are not a canonical encoding.
    LimitExceeded
        If they exceed a limit or claim to.
    """
    if len(payload) > limits.max_bytes:
        raise LimitExceeded(f"expected a payload of at most {limits.max_bytes} bytes, got {len(payload)}")
    reader = _Reader(bytes(payload), limits)
    try:
        reader.count(1)
        value = _get(reader, 0)
    except (struct.error, IndexError):
        raise DecodeError(f"expected more bytes at {reader.position}, got the end of the payload") from None
    except UnicodeDecodeError as error:
        raise DecodeError(f"expected UTF-8 before byte {reader.position}, got {error.reason}") from None
    if reader.position != len(payload):
        raise DecodeError(f"expected the end at byte {reader.position}, got {len(payload)} bytes")
    return value


def _get(reader: _Reader, depth: int) -> Any:
    tag = reader.buffer[reader.position]
    read = _READERS.get(tag)
    if read is None:
        raise DecodeError(f"expected a known tag at byte {reader.position}, got {tag:#04x}")
    reader.position += 1
    return read(reader, depth)


def _get_none(reader: _Reader, depth: int) -> None:
    return None


def _get_true(reader: _Reader, depth: int) -> bool:
    return True


def _get_false(reader: _Reader, depth: int) -> bool:
    return False


def _get_int(reader: _Reader, depth: int) -> int:
    return _decode_int(reader.take(reader.size()))


def _decode_int(raw: bytes) -> int:
    value = int.from_bytes(raw, "big", signed=True)
    expected = (value.bit_length() + 8) // 8
    if len(raw) != expected:
        raise DecodeError(f"expected an integer of {expected} bytes, got one of {len(raw)}")
    return value


def _get_float(reader: _Reader, depth: int) -> float:
    (value,) = _F64.unpack_from(reader.buffer, reader.position)
    reader.position += 8
    return float(value)


def _get_complex(reader: _Reader, depth: int) -> complex:
    real, imag = _C128.unpack_from(reader.buffer, reader.position)
    reader.position += 16
    return complex(real, imag)


def _get_str(reader: _Reader, depth: int) -> str:
    return reader.take(reader.size()).decode("utf-8", "surrogatepass")


def _get_bytes(reader: _Reader, depth: int) -> bytes:
    return reader.take(reader.size())


def _open_container(reader: _Reader, depth: int, values_per_item: int) -> int:
    if depth >= reader.limits.max_depth:
        raise LimitExceeded(f"expected at most {reader.limits.max_depth} levels of nesting, got more")
    count = reader.size()
    reader.count(count * values_per_item)
    return count


def _get_list(reader: _Reader, depth: int) -> list[Any]:
    return [_get(reader, depth + 1) for _ in range(_open_container(reader, depth, 1))]


def _get_tuple(reader: _Reader, depth: int) -> tuple[Any, ...]:
    return tuple(_get_list(reader, depth))


def _get_dict(reader: _Reader, depth: int) -> dict[str | int, Any]:
    value: dict[str | int, Any] = {}
    buffer = reader.buffer
    previous = b""
    for _ in range(_open_container(reader, depth, 2)):
        start = reader.position
        if buffer[start] not in _KEY_TAGS:
            raise DecodeError(f"expected a str or int key at byte {start}, got {buffer[start]:#04x}")
        reader.position = start + 1
        size = reader.size()
        reader.position += size
        raw = buffer[start : reader.position]
        if raw <= previous:
            raise DecodeError(f"expected ascending dict keys, got one out of order at byte {start}")
        previous = raw
        key = _cached_key(raw) if size <= _SHORT_KEY else _decode_key(raw)
        value[key] = _get(reader, depth + 1)
    return value


def _decode_key(raw: bytes) -> str | int:
    body = raw[9:]
    return body.decode("utf-8", "surrogatepass") if raw[:1] == b"s" else _decode_int(body)


_cached_key = lru_cache(maxsize=4096)(_decode_key)


def _get_array(reader: _Reader, depth: int) -> np.ndarray[Any, Any]:
    buffer = reader.buffer
    dtype_end = reader.position + 1 + buffer[reader.position]
    start = dtype_end + 1 + 8 * buffer[dtype_end]
    shape, wire, native, nbytes = _parse_array_head(buffer[reader.position : start])
    if nbytes > reader.limits.max_array_bytes:
        raise LimitExceeded(f"expected arrays of at most {reader.limits.max_array_bytes} bytes, got {nbytes}")
    if start + nbytes > len(buffer):
        raise DecodeError(f"expected {nbytes} bytes of an array at {start}, got {len(buffer) - start}")
    reader.position = start + nbytes
    if nbytes == 0:
        return _empty_array(shape, native)
    if wire.kind in "bU":
        _check_elements(buffer[start : start + nbytes], wire)
    # Always a copy: the result must be writable and must not keep the payload alive.
    array = np.empty(shape, native)
    if wire.kind in "mM":
        array.view(np.int64)[...] = np.ndarray(shape, _integer_of(wire), buffer, start)
    else:
        array[...] = np.ndarray(shape, wire, buffer, start)
    return array


@lru_cache(maxsize=1024)
def _parse_array_head(head: bytes) -> tuple[tuple[int, ...], np.dtype[Any], np.dtype[Any], int]:
    wire = _wire_dtype(head[1 : 1 + head[0]].decode("latin-1"))
    ndim = head[1 + head[0]]
    if ndim > _NDIM_MAX:
        raise DecodeError(f"expected an array of at most {_NDIM_MAX} dimensions, got {ndim}")
    shape = struct.unpack_from(f">{ndim}Q", head, 2 + head[0])
    return shape, wire, wire.newbyteorder("="), prod(shape) * wire.itemsize


@lru_cache(maxsize=256)
def _wire_dtype(name: str) -> np.dtype[Any]:
    if not _DTYPE.fullmatch(name):
        raise DecodeError(f"expected a canonical dtype, got {name[:40]!r}")
    try:
        wire = np.dtype(name)
    except (TypeError, ValueError, OverflowError):
        raise DecodeError(f"expected a canonical dtype, got {name!r}") from None
    if wire.str != name:
        raise DecodeError(f"expected dtype {wire.str!r}, got its other spelling {name!r}")
    return wire


def _empty_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    try:
        # Not np.empty, which may set aside one element, and elements may claim to be large.
        return np.ndarray(shape, dtype, bytearray())
    except ValueError:  # NumPy bounds the product of the other dimensions
        raise DecodeError(f"expected a shape that NumPy can hold, got {shape}") from None


def _check_elements(raw: bytes, wire: np.dtype[Any]) -> None:
    """Refuse booleans other than 0 and 1, and code points outside Unicode: NumPy would not."""
    if wire.kind == "b":
        if raw.translate(None, b"\0\1"):
            raise DecodeError("expected booleans of 0 or 1 in an array, got another byte")
    elif np.frombuffer(raw, ">u4").max() > 0x10FFFF:
        raise DecodeError("expected Unicode code points in an array, got one above 0x10FFFF")


def _get_scalar(reader: _Reader, depth: int) -> np.generic:
    array = _get_array(reader, depth)
    scalar: Any = array[()]
    if array.ndim or not isinstance(scalar, _KEPT_SCALARS):
        raise DecodeError(f"expected a NumPy scalar, got {array.dtype} of shape {array.shape}")
    return scalar


_READERS: dict[int, Callable[[_Reader, int], Any]] = {
    ord("N"): _get_none,
    ord("T"): _get_true,
    ord("F"): _get_false,
    ord("i"): _get_int,
    ord("f"): _get_float,
    ord("c"): _get_complex,
    ord("s"): _get_str,
    ord("b"): _get_bytes,
    ord("l"): _get_list,
    ord("t"): _get_tuple,
    ord("d"): _get_dict,
    ord("a"): _get_array,
    ord("g"): _get_scalar,
}
