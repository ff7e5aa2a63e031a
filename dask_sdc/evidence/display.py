"""Short, safe text for values that may come from suspect bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

_ITEMS = 6
_DEPTH = 3


def bounded_repr(value: Any, limit: int = 400) -> str:
    """Return a representation of a state of at most ``limit`` characters.

    Containers and arrays show their first items, integers of more than 256 bits their size only
    (Python refuses to print those of more than 4,300 digits), and no method of a value outside the
    closed set of types is called.

    Parameters
    ----------
    value : State
        The value.
    limit : int, optional
        Number of characters, at least 4.
    """
    text = _show(value, limit, _DEPTH)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _show(value: Any, limit: int, depth: int) -> str:
    kind = type(value)
    if kind is int:
        return repr(value) if value.bit_length() <= 256 else f"<int of {value.bit_length()} bits>"
    if kind in (str, bytes):
        return repr(value[:limit])
    if kind in (type(None), bool, float, complex):
        return repr(value)
    if kind is np.ndarray or isinstance(value, np.generic):
        return _show_array(np.asarray(value))
    if kind in (list, tuple, dict):
        return _show_container(value, limit, depth)
    return f"<{kind.__module__}.{kind.__qualname__}>"


def _show_array(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.kind not in "biufc":
        return f"<array {array.dtype} {array.shape}>"
    first = ", ".join(repr(item) for item in array.reshape(-1)[:_ITEMS].tolist())
    return f"<array {array.dtype} {array.shape} [{first}{', ...' if array.size > _ITEMS else ''}]>"


def _show_container(value: Any, limit: int, depth: int) -> str:
    kind = type(value)
    left, right = (
        ("[", "]")
        if kind is list
        else ("(", ",)" if len(value) == 1 else ")")
        if kind is tuple
        else ("{", "}")
    )
    if not depth:
        return f"{left}...{right}"
    first = list(value)[:_ITEMS]
    if kind is dict:
        shown = [f"{_show(key, limit, 0)}: {_show(value[key], limit, depth - 1)}" for key in first]
    else:
        shown = [_show(item, limit, depth - 1) for item in first]
    return left + ", ".join(shown) + (", ..." if len(value) > _ITEMS else "") + right
