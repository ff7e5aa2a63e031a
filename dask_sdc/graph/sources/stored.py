"""Columns that are Zarr arrays, read by the workers without Dask."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn

import numpy as np
import zarr
from dask.typing import Key
from zarr.codecs import BytesCodec
from zarr.core.metadata import ArrayV2Metadata, ArrayV3Metadata
from zarr.storage import LocalStore, MemoryStore

from dask_sdc.exceptions import InputError, ShardError
from dask_sdc.graph.sources.column import Load, LoadableColumn, Part, native
from dask_sdc.graph.sources.memory import MemoryColumn
from dask_sdc.graph.sources.raw import RawPart


@dataclass(frozen=True, eq=False)
class ZarrPart(Part):
    """Shards of any Zarr array, read and decoded by Zarr.

    Parameters
    ----------
    name : str
        Column.
    array : zarr.Array
        As the client saw it.
    bounds : mapping of int to (int, int)
        First and last row (exclusive) of each shard.
    """

    name: str
    array: zarr.Array[Any]
    bounds: Mapping[int, tuple[int, int]]

    def open(self, deps: Mapping[Key, Any], stack: ExitStack) -> Load:
        """Return a loader that allocates each block."""
        checked: list[zarr.Array[Any]] = []

        def load(shard_id: int) -> dict[str, Any]:
            if not checked:
                checked.append(self._reopen(shard_id))
            start, stop = self.bounds[shard_id]
            return {self.name: checked[0][start:stop]}

        return load

    def _reopen(self, shard_id: int) -> zarr.Array[Any]:
        """Read the metadata again: where the store is not visible, all chunks would read as fill value."""
        here = zarr.open_array(self.array.store_path, mode="r")
        if _layout(here) != _layout(self.array):
            raise ShardError(
                f"{self.array.store_path} changed: expected {_layout(self.array)}, got {_layout(here)}",
                shard_id=shard_id,
            )
        return here


@dataclass(frozen=True, eq=False)
class ZarrColumn(LoadableColumn):
    """A Zarr array; one shard is one row of chunks (of Zarr shards, where it has them)."""

    array: zarr.Array[Any]

    @classmethod
    def from_array(cls, name: str, array: zarr.Array[Any]) -> LoadableColumn:
        """Cut an array along the first axis of its chunk grid; one in memory is read at once."""
        if not array.ndim:
            raise InputError(f"{name} has no sample axis: expected at least one dimension, got a scalar")
        if isinstance(array.store, MemoryStore):
            return MemoryColumn.split(name, np.asarray(array[:]))
        n, size = array.shape[0], (array.shards or array.chunks)[0]
        rows = tuple(min(size, n - start) for start in range(0, n, max(size, 1)))
        return cls(name, rows, array.shape[1:], native(np.dtype(array.dtype)), array)

    def identity(self) -> bytes:
        """Return where the array is, and its layout; contents are not read."""
        return f"zarr {self.array.store_path} {_layout(self.array)}".encode()

    def realign(self, rows: tuple[int, ...], notes: list[str]) -> ZarrColumn:
        """Read the same array by other rows; no remark, since nothing is copied."""
        return ZarrColumn(self.name, rows, self.shape, self.dtype, self.array)

    def part(self, shard_ids: Sequence[int]) -> Part:
        """Return a raw reader where the chunks are plain local files, else one that goes through Zarr."""
        bounds = self.bounds
        chosen = {k: bounds[k] for k in shard_ids}
        dtype = stored_dtype(self.array)
        if dtype is None or type(self.array.store) is not LocalStore:
            return ZarrPart(self.name, self.array, chosen)
        metadata = "zarr.json" if isinstance(self.array.metadata, ArrayV3Metadata) else ".zarray"
        return RawPart(
            self.name,
            os.path.join(os.path.abspath(self.array.store.root), self.array.path),
            metadata,
            self.array.shape,
            self.array.chunks,
            dtype,
            0 if self.array.fill_value is None else self.array.fill_value,
            self._files(chosen),
            chosen,
        )

    def _files(self, bounds: Mapping[int, tuple[int, int]]) -> dict[tuple[int, ...], str]:
        shape, chunks = self.array.shape, self.array.chunks
        grid = [range(-(-n // c)) for n, c in zip(shape[1:], chunks[1:], strict=True)]
        spans = [range(start // chunks[0], -(-stop // chunks[0])) for start, stop in bounds.values()]
        leading = sorted({i for span in spans for i in span})
        return {coords: self.array.metadata.encode_chunk_key(coords) for coords in product(leading, *grid)}


def open_path(name: str, path: str | os.PathLike[str]) -> zarr.Array[Any]:
    """Open the Zarr array at a path or URL.

    Raises
    ------
    InputError
        If there is none, or if it is a group: the message names the group's arrays.
    """
    location = os.fspath(path)
    try:
        node = zarr.open(location, mode="r")
    except (FileNotFoundError, ValueError) as error:
        raise InputError(f"{name}: expected a Zarr array at {location!r}: {error}") from error
    if isinstance(node, zarr.Group):
        refuse_group(name, node)
    return node


def refuse_group(name: str, group: zarr.Group) -> NoReturn:
    """Raise an `InputError` that names the arrays of a group."""
    arrays = ", ".join(sorted(path for path, _ in group.arrays())) or "none"
    raise InputError(f"{name}: expected a Zarr array, got the group {group.store_path}; its arrays: {arrays}")


def stored_dtype(array: zarr.Array[Any]) -> np.dtype[Any] | None:
    """Return the type of the bytes in a chunk file if these are the plain C-ordered items, else None."""
    metadata = array.metadata
    if isinstance(metadata, ArrayV2Metadata):
        plain = metadata.compressor is None and not metadata.filters and metadata.order == "C"
        return np.dtype(array.dtype) if plain else None
    if len(metadata.codecs) != 1 or metadata.storage_transformers:
        return None
    codec = metadata.codecs[0]
    if not isinstance(codec, BytesCodec):
        return None
    dtype = np.dtype(array.dtype)
    return dtype.newbyteorder(codec.endian.value) if codec.endian else dtype


def _layout(array: zarr.Array[Any]) -> str:
    """Describe a layout; without the byte order, which an array forgets when it is opened again."""
    return f"{native(np.dtype(array.dtype))} {array.shape} in chunks {array.chunks}, shards {array.shards}"
