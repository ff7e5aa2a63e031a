"""Deterministic corruption of payloads and states, for tests of what should catch it.

Every function returns a changed copy, never the value that it was given: where no change is
possible (no bits, no floats, nothing that is not already stuck) it raises `InputError`. Bits
are numbered from the least significant bit of the first byte; choices that are left open are
drawn from a ``key`` of integers, so that the same key always gives the same corruption.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.statistics.base import State

#: Integers that seed the choices which the caller left open.
RngKey: TypeAlias = int | Sequence[int]

#: Bits of a code point that may flip without ever leaving Unicode or reaching a surrogate.
_TEXT_BITS = 7


def inject_bit_flip(payload: bytes, bit_offset: int | None = None) -> bytes:
    """Return the payload with one bit flipped.

    Parameters
    ----------
    payload : bytes
        Must not be empty.
    bit_offset : int, optional
        Which bit, modulo the length in bits; the middle one by default.

    Returns
    -------
    bytes
        A copy of the same length that differs in one bit.

    Raises
    ------
    InputError
        If the payload is empty.
    """
    image = _image(payload)
    offset = image.size * 4 if bit_offset is None else bit_offset
    _flip(_Words(image[:, None], 8), offset)
    return image.tobytes()


def flip_bits(payload: bytes, count: int, key: RngKey, bit_offset: int | None = None) -> bytes:
    """Return the payload with ``count`` distinct bits flipped.

    Parameters
    ----------
    payload : bytes
        Must not be empty.
    count : int
        How many bits, at least 1; all of them where the payload has fewer.
    key : int or sequence of int
        Draws the positions.
    bit_offset : int, optional
        Position of the first flipped bit, modulo the length in bits.

    Raises
    ------
    InputError
        If the payload is empty or ``count`` is below 1.
    """
    image = _image(payload)
    for offset in _draw_offsets(image.size * 8, count, key, bit_offset):
        _flip(_Words(image[:, None], 8), offset)
    return image.tobytes()


def stick_bits(payload: bytes, bit: int, level: int) -> bytes:
    """Return the payload as read over a byte-wide bus with one line stuck.

    Parameters
    ----------
    payload : bytes
        Must not be empty.
    bit : int
        The line, modulo 8. Where every byte already has it at ``level``, the next line sticks.
    level : int
        0 or 1.

    Raises
    ------
    InputError
        If the payload is empty or has every bit at ``level`` already.
    """
    image = _image(payload)
    if not _stick(_Words(image[:, None], 8), bit, level):
        raise InputError(f"expected a payload with a bit that is not {level}, got none")
    return image.tobytes()


def count_bits(state: State) -> int:
    """Return how many bits of a state may flip: those of all its leaves, keys excluded.

    A bool counts 1 bit, a float 64, an int 64 (or its own length where that is more), a
    character 7, arrays as many as their items.

    Raises
    ------
    InputTypeError
        If a leaf is not of the closed set of types (see `dask_sdc.statistics.base.State`).
    """
    return sum(_open(leaf).bits for leaf in _leaves(state))


def flip_state_bit(state: State, bit_offset: int | None = None) -> State:
    """Return a copy of a state in which one bit of one leaf is flipped.

    Parameters
    ----------
    state : State
        Nested lists, tuples and dicts of the closed set of types.
    bit_offset : int, optional
        Position among the `count_bits` bits (leaves in order, dicts by sorted key), modulo
        their number; the middle one by default.

    Raises
    ------
    InputError
        If the state has no bits.
    """
    total = _state_bits(state)
    return _flip_state(state, [total // 2 if bit_offset is None else bit_offset % total])


def flip_state_bits(state: State, count: int, key: RngKey, bit_offset: int | None = None) -> State:
    """Return a copy of a state with ``count`` distinct bits flipped, anywhere in it.

    Parameters
    ----------
    state : State
        Nested lists, tuples and dicts of the closed set of types.
    count : int
        How many bits, at least 1; all of them where the state has fewer.
    key : int or sequence of int
        Draws the positions.
    bit_offset : int, optional
        Position of the first flipped bit, modulo `count_bits`.

    Raises
    ------
    InputError
        If the state has no bits or ``count`` is below 1.
    """
    return _flip_state(state, _draw_offsets(_state_bits(state), count, key, bit_offset))


def stick_state_bit(state: State, bit: int, level: int, key: RngKey) -> State:
    """Return a copy of a state with one bit stuck in every item of one leaf.

    Parameters
    ----------
    state : State
        Nested lists, tuples and dicts of the closed set of types.
    bit : int
        Bit of the item, modulo its width. Where every item already has it at ``level``, the
        next bit sticks, and then that of the next leaf.
    level : int
        0 or 1.
    key : int or sequence of int
        Draws the leaf.

    Raises
    ------
    InputError
        If no bit of the state would change.
    """

    def stick(leaf: Any) -> Any:
        """Return the leaf with the bit stuck, None if it is so already."""
        opened = _open(leaf)
        return opened.close() if _stick(opened.words, bit, level) else None

    return _change_one(state, stick, key, f"a state with a bit that is not {level}")


def scale_state_value(state: State, factor: float, key: RngKey) -> State:
    """Return a copy of a state in which one number is multiplied by ``factor``.

    Integers wrap as their type does. A number that the product leaves as it was (zero, an
    infinity, one that rounds back) becomes 1, or 0 where it is 1.

    Parameters
    ----------
    state : State
        Nested lists, tuples and dicts of the closed set of types.
    factor : float
        Finite and not 1; -1 turns the sign.
    key : int or sequence of int
        Draws the leaf and the item.

    Raises
    ------
    InputError
        If ``factor`` is 1 or not finite, or if the state holds no number.
    """
    if not np.isfinite(factor) or factor == 1:
        raise InputError(f"expected a finite factor other than 1, got {factor!r}")

    def scale(leaf: Any) -> Any:
        """Return the leaf with one number scaled, None if it has none."""
        if type(leaf) is int:
            return _scaled_int(leaf, factor)
        if not isinstance(leaf, float | complex | np.ndarray | np.generic):
            return None
        opened = _open(leaf)
        if opened.items.dtype.kind not in "iufc" or not opened.items.size:
            return None
        index = int(np.random.default_rng(key).integers(opened.items.size))
        opened.items[index] = _scaled(opened.items[index], factor)
        return opened.close()

    return _change_one(state, scale, key, "a state with a number")


def poison_state(state: State, key: RngKey) -> State:
    """Return a copy of a state in which one float or complex number has become NaN.

    Parameters
    ----------
    state : State
        Nested lists, tuples and dicts of the closed set of types.
    key : int or sequence of int
        Draws the leaf and the item.

    Raises
    ------
    InputError
        If the state has no float or complex number other than NaN.
    """

    def poison(leaf: Any) -> Any:
        """Return the leaf with one NaN more, None if there is no room."""
        opened = _open(leaf)
        if opened.items.dtype.kind not in "fc":
            return None
        sound = np.flatnonzero(~np.isnan(opened.items))
        if not sound.size:
            return None
        opened.items[np.random.default_rng(key).choice(sound)] = np.nan
        return opened.close()

    return _change_one(state, poison, key, "a state with a float that is not NaN")


# -- leaves: their bits, and the way back ------------------------------------------------


class _Words(NamedTuple):
    """A writable view of (items, words per item); the low ``live`` bits of a word may flip."""

    view: NDArray[Any]
    live: int

    @property
    def bits(self) -> int:
        return self.view.size * self.live


class _Opened(NamedTuple):
    """A leaf copied into a 1-d array, its bits, and what makes a leaf of the array again."""

    items: NDArray[Any]
    words: _Words
    close: Callable[[], Any]

    @property
    def bits(self) -> int:
        return self.words.bits


def _open(leaf: Any) -> _Opened:
    if isinstance(leaf, np.ndarray | np.generic):
        return _open_array(leaf)
    if isinstance(leaf, bool | float | complex):
        items: NDArray[Any] = np.array([leaf])
        return _Opened(items, _words_of(items), lambda: items[0].item())
    if isinstance(leaf, int):
        items = np.frombuffer(_octets(leaf), np.uint8).copy()
        return _Opened(
            items,
            _Words(items[None, :], 8),
            lambda: int.from_bytes(items.tobytes(), "little", signed=True),
        )
    if isinstance(leaf, str):
        items = np.array([ord(c) for c in leaf], np.uint32)
        return _Opened(items, _Words(items[:, None], _TEXT_BITS), lambda: "".join(map(chr, items.tolist())))
    if isinstance(leaf, bytes):
        items = np.frombuffer(leaf, np.uint8).copy()
        return _Opened(items, _Words(items[:, None], 8), items.tobytes)
    if leaf is None:
        items = np.empty(0, np.uint8)
        return _Opened(items, _Words(items[:, None], 8), lambda: None)
    raise InputTypeError(
        "expected a state of None, bool, int, float, complex, str, bytes, list, tuple, dict and "
        f"NumPy arrays, got a {type(leaf).__name__}"
    )


def _open_array(leaf: NDArray[Any] | np.generic) -> _Opened:
    # Extended precision has no canonical encoding either, and bits that mean nothing.
    extended = leaf.dtype.type in (np.longdouble, np.clongdouble) and leaf.dtype.itemsize > 8
    if leaf.dtype.kind not in "biufcSUMm" or extended:
        raise InputTypeError(
            f"expected an array of kind b, i, u, f, c, S, U, M or m, of at most 64 bits per "
            f"float, got dtype {leaf.dtype}"
        )
    items = np.array(leaf, copy=True, order="C").reshape(-1)
    if isinstance(leaf, np.ndarray):
        shape = leaf.shape
        return _Opened(items, _words_of(items), lambda: items.reshape(shape))
    return _Opened(items, _words_of(items), lambda: items[0])


def _words_of(items: NDArray[Any]) -> _Words:
    """Return the bits of an array that may flip and still leave a legal item."""
    dtype = items.dtype
    if dtype.kind == "U":
        point = np.dtype(np.uint32).newbyteorder(dtype.byteorder)
        return _Words(_as_words(items, point), _TEXT_BITS)
    return _Words(_as_words(items, np.dtype(np.uint8)), 1 if dtype.kind == "b" else 8)


def _as_words(items: NDArray[Any], word: np.dtype[Any]) -> NDArray[Any]:
    per_item = items.dtype.itemsize // word.itemsize
    if items.size * per_item == 0:
        return np.empty((items.size, per_item), word)
    return items.view(word).reshape(items.size, per_item)


def _octets(value: int) -> bytes:
    """Return the two's complement of an integer, 64 bits or as many as it needs."""
    magnitude = value if value >= 0 else ~value
    return value.to_bytes(max(8, magnitude.bit_length() // 8 + 1), "little", signed=True)


def _image(payload: bytes) -> NDArray[np.uint8]:
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise InputTypeError(f"expected a payload of bytes, got a {type(payload).__name__}")
    if not payload:
        raise InputError("expected a payload of at least one byte to corrupt, got an empty one")
    return np.frombuffer(payload, np.uint8).copy()


# -- changes -------------------------------------------------------------------------------


def _flip(words: _Words, offset: int) -> None:
    index, bit = divmod(offset % words.bits, words.live)
    words.view.flat[index] ^= words.view.dtype.type(1 << bit)


def _stick(words: _Words, bit: int, level: int) -> bool:
    """Force one bit line of all items to ``level``; say whether there was one to force."""
    if level not in (0, 1):
        raise InputError(f"expected a level of 0 or 1, got {level!r}")
    lines = words.view.shape[1] * words.live
    for line in range(bit, bit + lines):
        column, position = divmod(line % lines, words.live)
        mask = words.view.dtype.type(1 << position)
        differ = (words.view[:, column] & mask) != mask * level
        if differ.any():
            words.view[differ, column] ^= mask
            return True
    return False


def _scaled(value: Any, factor: float) -> Any:
    """Return value x factor, or 1, or 0: the first that differs in type-given bits."""
    kind = value.dtype.kind
    if kind in "iu":
        product = _wrapped(round(Fraction(factor) * int(value)), value.dtype)
    else:
        with np.errstate(all="ignore"):
            product = (value * factor).astype(value.dtype)
    candidates = [product, value.dtype.type(1), value.dtype.type(0)]
    return next(c for c in candidates if c.tobytes() != value.tobytes())


def _scaled_int(value: int, factor: float) -> int:
    product = round(Fraction(factor) * value)
    return next(c for c in (product, 1, 0) if c != value)


def _wrapped(value: int, dtype: np.dtype[Any]) -> Any:
    raw = (value % (1 << 8 * dtype.itemsize)).to_bytes(dtype.itemsize, "little")
    return np.frombuffer(raw, dtype.newbyteorder("<"))[0].astype(dtype)


def _draw_offsets(bits: int, count: int, key: RngKey, first: int | None) -> list[int]:
    if count < 1:
        raise InputError(f"expected to flip at least 1 bit, got {count}")
    rng = np.random.default_rng(key)
    start = int(rng.integers(bits)) if first is None else first % bits
    others = rng.choice(bits - 1, min(count, bits) - 1, replace=False)
    return [start, *(int((start + 1 + other) % bits) for other in others)]


# -- nested states -------------------------------------------------------------------------


def _children(state: State) -> list[Any] | None:
    """Return the keys of a container in the order in which leaves are numbered."""
    if isinstance(state, dict):
        return sorted(state, key=lambda k: (isinstance(k, str), k))
    if isinstance(state, list | tuple):
        return list(range(len(state)))
    return None


def _leaves(state: State) -> Iterator[Any]:
    keys = _children(state)
    if keys is None:
        yield state
    else:
        for key in keys:
            yield from _leaves(state[key])


def _rebuilt(state: State, leaves: Iterator[Any]) -> State:
    """Return a state of the same form with its leaves replaced, in order."""
    keys = _children(state)
    if keys is None:
        return next(leaves)
    parts = {key: _rebuilt(state[key], leaves) for key in keys}
    if isinstance(state, dict):
        return {key: parts[key] for key in state}
    return type(state)(parts.values())


def _state_bits(state: State) -> int:
    total = count_bits(state)
    if not total:
        raise InputError("expected a state with at least one bit to corrupt, got one without any")
    return total


def _flip_state(state: State, offsets: Sequence[int]) -> State:
    opened = [_open(leaf) for leaf in _leaves(state)]
    for offset in offsets:
        for leaf in opened:
            if offset < leaf.bits:
                _flip(leaf.words, offset)
                break
            offset -= leaf.bits
    return _rebuilt(state, (leaf.close() for leaf in opened))


def _change_one(state: State, change: Callable[[Any], Any | None], key: RngKey, expected: str) -> State:
    """Return a copy of a state with one leaf changed, the first that can be in drawn order.

    ``change`` returns None for a leaf that it cannot change.
    """
    leaves = list(_leaves(state))
    order = np.random.default_rng(key).permutation(len(leaves))
    for index in order:
        changed = change(leaves[index])
        if changed is not None:
            rest = [copy.deepcopy(leaf) for leaf in leaves]
            rest[index] = changed
            return _rebuilt(state, iter(rest))
    raise InputError(f"expected {expected}, got none")
