"""Columns that are Dask arrays: lazy, persisted, or lazy on top of persisted blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import dask
import numpy as np
from dask.utils import parse_bytes

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.graph.sources.column import Column, check_dtype, namespace, native


@dataclass(frozen=True, eq=False)
class DaskColumn(Column):
    """A Dask array with one block per shard."""

    array: Any  # dask.array.Array, whose methods are not typed

    @classmethod
    def from_array(cls, name: str, array: Any, notes: list[str]) -> DaskColumn:
        """Check an array and bring all axes but the first into one chunk.

        Raises
        ------
        InputError
            If chunk sizes are unknown or there is no sample axis.
        InputTypeError
            If blocks are neither NumPy nor CuPy arrays.
        """
        if not array.ndim:
            raise InputError(f"{name} has no sample axis: expected at least one dimension, got a scalar")
        if any(math.isnan(size) for axis in array.chunks for size in axis):
            raise InputError(
                f"{name} has unknown chunk sizes {array.chunks}: call {name}.compute_chunk_sizes() first"
            )
        check_dtype(name, array.dtype)
        _check_meta(name, array)
        array = rows_only(name, array, notes)
        return cls(name, array.chunks[0], array.shape[1:], native(array.dtype), array)

    def identity(self) -> bytes:
        """Return Dask's name of the array, which is a token of how it was made, with its chunks."""
        return f"dask {self.array.name} {self.array.chunks} {self.array.dtype.str}".encode()

    @property
    def place(self) -> str | None:
        """Return "device" for CuPy blocks; an array that says NumPy may still get others on workers."""
        return "device" if namespace(self.array._meta) == "cupy" else None

    def realign(self, rows: tuple[int, ...], notes: list[str]) -> DaskColumn:
        """Rechunk along the sample axis, with a remark."""
        if rows == self.rows:
            return self
        notes.append(f"{self.name} was rechunked from {len(self.rows)} to {len(rows)} chunks to match x")
        array = self.array.rechunk({0: rows})
        return DaskColumn(self.name, rows, self.shape, self.dtype, array)


def rows_only(name: str, array: Any, notes: list[str]) -> Any:
    """Bring all axes but the first into one chunk, cutting the first where blocks would get too big."""
    if all(len(axis) == 1 for axis in array.chunks[1:]):
        return array
    row = array.dtype.itemsize * math.prod(array.shape[1:])
    limit = parse_bytes(dask.config.get("array.chunk-size"))
    largest = max(max(array.chunks[0]) * row, 1)
    first: Any = array.chunks[0] if largest <= limit else max(1, limit // row)
    result = array.rechunk(dict.fromkeys(range(1, array.ndim), -1) | {0: first})
    notes.append(
        f"{name} is chunked along axes other than its sample axis: rechunked from {array.chunksize} "
        f"to {result.chunksize}; chunk it along the sample axis alone to avoid the copy"
    )
    return result


def _check_meta(name: str, array: Any) -> None:
    meta = array._meta
    if namespace(meta) not in ("numpy", "cupy") or isinstance(meta, np.ma.MaskedArray):
        raise InputTypeError(
            f"{name} has blocks of type {type(meta).__module__}.{type(meta).__qualname__}: "
            "expected NumPy or CuPy arrays"
        )
