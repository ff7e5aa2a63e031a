"""Columns held in the client's memory: one NumPy array, or a list of NumPy blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import xxhash
from dask.typing import Key

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.graph.sources.column import Load, LoadableColumn, Part, check_dtype, even_rows, native


@dataclass(frozen=True, eq=False)
class MemoryPart(Part):
    """The blocks themselves, on their way to a worker."""

    name: str
    dtype: np.dtype[Any]
    blocks: Mapping[int, np.ndarray[Any, Any]]

    def open(self, deps: Mapping[Key, Any], stack: ExitStack) -> Load:
        """Return a loader that promotes a block to the column's type."""
        return lambda shard_id: {self.name: self.blocks[shard_id].astype(self.dtype, copy=False)}


@dataclass(frozen=True, eq=False)
class MemoryColumn(LoadableColumn):
    """NumPy blocks, one a shard; types of one kind are promoted to the widest."""

    blocks: tuple[np.ndarray[Any, Any], ...]

    @classmethod
    def split(cls, name: str, array: np.ndarray[Any, Any]) -> MemoryColumn:
        """Cut one array into shards of about 16 MiB, and into eight at least where it is long enough."""
        if not array.ndim:
            raise InputError(f"{name} has no sample axis: expected at least one dimension, got a scalar")
        check_dtype(name, array.dtype)
        array = np.asarray(array)
        rows = even_rows(len(array), array[:1].nbytes)
        stops = list(accumulate(rows))
        blocks = tuple(array[stop - size : stop] for size, stop in zip(rows, stops, strict=True))
        return cls(name, rows, array.shape[1:], native(array.dtype), blocks)

    @classmethod
    def from_blocks(cls, name: str, blocks: Sequence[Any]) -> MemoryColumn:
        """Take each block as one shard.

        Raises
        ------
        InputError
            If blocks differ in sample shape or in kind of type; names the block.
        InputTypeError
            If one of them is no NumPy array.
        """
        if not blocks:
            raise InputError(f"{name} is an empty list: expected at least one NumPy block")
        for index, block in enumerate(blocks):
            _check_block(name, index, block, blocks[0])
        dtype = np.result_type(*{block.dtype for block in blocks})
        rows = tuple(len(block) for block in blocks)
        return cls(name, rows, blocks[0].shape[1:], native(dtype), tuple(map(np.asarray, blocks)))

    def identity(self) -> bytes:
        """Return the xxh3_128 digest of types, shapes and contents."""
        state = xxhash.xxh3_128(f"memory {self.dtype.str} {self.shape} {self.rows}".encode())
        for block in self.blocks:
            if block.size:
                state.update(np.ascontiguousarray(block, self.dtype).data.cast("B"))
        return state.digest()

    def realign(self, rows: tuple[int, ...], notes: list[str]) -> MemoryColumn:
        """Cut the same rows at other places, by views where a shard lies inside one block."""
        if rows == self.rows:
            return self
        starts = np.array([0, *accumulate(self.rows)])
        stops = accumulate(rows)
        blocks = tuple(self._slice(starts, stop - size, stop) for size, stop in zip(rows, stops, strict=True))
        return MemoryColumn(self.name, rows, self.shape, self.dtype, blocks)

    def _slice(self, starts: np.ndarray[Any, Any], start: int, stop: int) -> np.ndarray[Any, Any]:
        first = int(np.searchsorted(starts, start, side="right")) - 1
        last = max(first + 1, int(np.searchsorted(starts, stop, side="left")))
        pieces = [
            self.blocks[i][max(0, start - int(starts[i])) : stop - int(starts[i])]
            for i in range(first, min(last, len(self.blocks)))
        ]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([np.empty((0, *self.shape), self.dtype), *pieces])

    def part(self, shard_ids: Sequence[int]) -> MemoryPart:
        """Return the blocks of these shards."""
        return MemoryPart(self.name, self.dtype, {k: self.blocks[k] for k in shard_ids})


def _check_block(name: str, index: int, block: Any, first: Any) -> None:
    where = f"block {index} of {name}"
    if not isinstance(block, np.ndarray) or isinstance(block, np.ma.MaskedArray):
        raise InputTypeError(f"{where}: expected a NumPy array, got {type(block).__qualname__}")
    if not block.ndim:
        raise InputError(f"{where}: expected at least one dimension (the samples), got a scalar")
    check_dtype(where, block.dtype)
    if block.shape[1:] != first.shape[1:]:
        raise InputError(f"{where}: expected sample shape {first.shape[1:]}, got {block.shape[1:]}")
    if block.dtype.kind != first.dtype.kind:
        raise InputError(
            f"{where}: expected a dtype of the same kind as {first.dtype} in block 0, got {block.dtype}"
        )
