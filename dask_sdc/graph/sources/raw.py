"""Uncompressed Zarr chunks read straight from local files, without Zarr.

Fresh pages are what costs most when an uncompressed chunk is read: Zarr allocates each chunk anew.
Here a reader borrows one buffer and reads every shard of a batch into it.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from dask.typing import Key

from dask_sdc.exceptions import ShardError
from dask_sdc.graph.sources.column import Load, Part

Buffer = np.ndarray[Any, np.dtype[np.uint8]]

#: Buffers between two uses, a few per process; append and pop of a deque are atomic.
_IDLE: deque[Buffer] = deque(maxlen=4)


class _Piece(NamedTuple):
    """One chunk's share of a shard."""

    file: str
    lead: int  # rows of the chunk that come before
    place: tuple[slice, ...]  # where in the shard it goes
    shape: tuple[int, ...]  # of that place


@dataclass(frozen=True, eq=False)
class RawPart(Part):
    """Shards of a local, uncompressed, C-ordered Zarr array on a regular grid.

    Parameters
    ----------
    name : str
        Column.
    root : str
        Directory of the array.
    metadata : str
        Name of its metadata file, which must be there for a missing chunk to mean the fill value.
    shape, chunks : tuple of int
        Of the whole array.
    dtype : numpy.dtype
        As stored, byte order included.
    fill : scalar
        Value of chunks that were never written.
    files : mapping of tuple to str
        File name of each chunk that the shards touch, below ``root``.
    bounds : mapping of int to (int, int)
        First and last row (exclusive) of each shard.
    """

    name: str
    root: str
    metadata: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Any
    files: Mapping[tuple[int, ...], str]
    bounds: Mapping[int, tuple[int, int]]

    def open(self, deps: Mapping[Key, Any], stack: ExitStack) -> Load:
        """Return a loader into one borrowed buffer: a block is valid until the next one is loaded."""
        rows = max(stop - start for start, stop in self.bounds.values())
        buffer = _borrow(rows * math.prod(self.shape[1:]) * self.dtype.itemsize)
        stack.callback(_IDLE.append, buffer)
        # where a chunk's rows are not the shard's rows, they are read here and copied
        whole_rows = self.chunks[1:] == self.shape[1:]
        stage = None if whole_rows else np.empty(self.chunks, self.dtype)
        return lambda shard_id: {self.name: self._read(shard_id, buffer, stage)}

    def _read(
        self, shard_id: int, buffer: Buffer, stage: np.ndarray[Any, Any] | None
    ) -> np.ndarray[Any, Any]:
        start, stop = self.bounds[shard_id]
        out = _view(buffer, (stop - start, *self.shape[1:]), self.dtype)
        for piece in self._pieces(start, stop):
            place = out[piece.place]
            if stage is None:
                self._fetch(shard_id, piece, place)
            else:
                self._fetch(shard_id, piece, stage[: piece.shape[0]])
                place[...] = stage[tuple(slice(size) for size in piece.shape)]
        return out

    def _pieces(self, start: int, stop: int) -> Iterator[_Piece]:
        size = self.chunks[0]
        first, last = start // size, -(-stop // size)
        grid = [range(-(-n // c)) for n, c in zip(self.shape[1:], self.chunks[1:], strict=True)]
        for coords in product(range(first, last), *grid):
            low = max(start, coords[0] * size)
            place = [slice(low - start, min(stop, (coords[0] + 1) * size) - start)]
            for i, n, c in zip(coords[1:], self.shape[1:], self.chunks[1:], strict=True):
                place.append(slice(i * c, min(n, (i + 1) * c)))
            shape = tuple(s.stop - s.start for s in place)
            yield _Piece(self.files[coords], low - coords[0] * size, tuple(place), shape)

    def _fetch(self, shard_id: int, piece: _Piece, out: np.ndarray[Any, Any]) -> None:
        """Read rows of one chunk file into a contiguous array, or fill it if the chunk was never written."""
        row_nbytes = math.prod(self.chunks[1:]) * self.dtype.itemsize
        expected = self.chunks[0] * row_nbytes
        where = f"chunk {piece.file} of {self.root}"
        try:
            with open(Path(self.root, piece.file), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected:
                    raise ShardError(f"{where}: expected {expected} bytes, got {size}", shard_id=shard_id)
                file.seek(piece.lead * row_nbytes)
                _fill_from(file, out.reshape(-1).view(np.uint8).data, where, shard_id)
        except FileNotFoundError:
            self._require_array(shard_id)
            out[...] = self.fill

    def _require_array(self, shard_id: int) -> None:
        """On a worker that does not see the file system every chunk is missing: say so, do not fill."""
        if not Path(self.root, self.metadata).is_file():
            raise ShardError(
                f"no Zarr array at {self.root}: expected to find {self.metadata} there, as on the client; "
                "do all workers see this file system?",
                shard_id=shard_id,
            )


def _fill_from(file: FileIO, view: memoryview, where: str, shard_id: int) -> None:
    """Read until ``view`` is full: one call reads at most 2 GiB, and a file may shrink meanwhile."""
    while view:
        got = file.readinto(view)
        if not got:
            raise ShardError(f"{where}: ended {len(view)} bytes early", shard_id=shard_id)
        view = view[got:]


def _borrow(nbytes: int) -> Buffer:
    """Return a buffer of at least ``nbytes``; one that is too small is left to the garbage collector."""
    try:
        buffer = _IDLE.pop()
    except IndexError:
        return np.empty(nbytes, np.uint8)
    return buffer if buffer.nbytes >= nbytes else np.empty(nbytes, np.uint8)


def _view(buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return buffer[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
