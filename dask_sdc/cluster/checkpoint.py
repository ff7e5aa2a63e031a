"""Checkpoints of a fit: canonical bytes in a folder, a mapping or a Zarr store.

Two slots are written in turn, so that a driver that dies while it writes leaves the other one.
Whichever holds the later iteration and has its digest is read back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from dask_sdc.evidence.codec import decode, digest, encode
from dask_sdc.exceptions import CheckpointError, DecodeError, InputTypeError

_SLOTS = ("sdc-fit-0", "sdc-fit-1")
_MAGIC = b"SDCF\x01"


class CheckpointStore:
    """Reads and writes the two slots.

    Parameters
    ----------
    target : str, path, MutableMapping of str to bytes, or zarr.abc.store.Store
        Where the slots live; a folder is created.

    Raises
    ------
    InputTypeError
        For anything else.
    """

    def __init__(self, target: Any) -> None:
        self._get, self._set = _accessors(target)

    def save(self, number: int, fields: Mapping[str, Any]) -> None:
        """Write one checkpoint; ``number`` grows from save to save and picks the slot."""
        payload = encode({"number": number, **fields})
        self._set(_SLOTS[number % 2], _MAGIC + digest(payload) + payload)

    def load(self) -> dict[str, Any] | None:
        """Return the latest checkpoint that is whole, or None if there is none at all.

        Raises
        ------
        CheckpointError
            If there are checkpoints but every one is damaged.
        """
        found = [raw for slot in _SLOTS if (raw := self._get(slot)) is not None]
        whole = [fields for fields in map(_open, found) if fields is not None]
        if found and not whole:
            raise CheckpointError(f"expected a checkpoint that has its digest, got {len(found)} damaged ones")
        return max(whole, key=lambda fields: fields["number"], default=None)


def _open(raw: bytes) -> dict[str, Any] | None:
    head = len(_MAGIC)
    payload = raw[head + 16 :]
    if raw[:head] != _MAGIC or digest(payload) != raw[head : head + 16]:
        return None
    try:
        fields = decode(payload)
    except DecodeError:
        return None
    return fields if isinstance(fields, dict) else None


_Get = Callable[[str], bytes | None]
_Set = Callable[[str, bytes], None]


def _accessors(target: Any) -> tuple[_Get, _Set]:
    if isinstance(target, str | os.PathLike):
        folder = Path(target)
        return (lambda slot: _read(folder / slot)), (lambda slot, raw: _write(folder / slot, raw))
    if isinstance(target, MutableMapping):
        return target.get, target.__setitem__
    return _zarr_accessors(target)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _write(path: Path, raw: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _zarr_accessors(target: Any) -> tuple[_Get, _Set]:
    from zarr.abc.store import Store
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync

    if not isinstance(target, Store):
        raise InputTypeError(
            f"checkpoint: expected a path, a mutable mapping or a Zarr store, got {type(target).__name__}"
        )
    prototype = default_buffer_prototype()

    def get(slot: str) -> bytes | None:
        found = sync(target.get(slot, prototype))
        return None if found is None else found.to_bytes()

    def put(slot: str, raw: bytes) -> None:
        sync(target.set(slot, prototype.buffer.from_bytes(raw)))

    return get, put
