"""Journals: what crossed a boundary between stages, so that a lost stage can be fed again.

A stage journals its own outputs, which are the inputs of the next stage, and logs the digests of its
inputs. So a lost stage is replayed from the journal of the stage before it and proved against the log
of the stage after it. Chunks are kept in the shapes in which they were computed, rejected speculations
included: the same shapes give the same bits whatever kernels the stage runs. `ChunkRecord.kept` says how
many positions of a chunk still count.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from dask_sdc.exceptions import ClosedError, CorruptionError, InputError, InputTypeError, StageError

Array = np.ndarray[Any, Any]

#: Random projections per position in a sketch, see `boundary_sketch`.
SKETCH = 8


def boundary_digest(array: Array) -> bytes:
    """Return the digest of a chunk: equal for two arrays if and only if dtype, shape and bits are.

    Parameters
    ----------
    array : ndarray
        Of a kind among b, i, u, f, c; any byte order and memory layout.

    Returns
    -------
    bytes
        xxh3_128 (16 bytes) of the little-endian dtype, the shape and the elements in C order and
        little-endian: what memory holds on nearly every machine, so that nothing is copied.
    """
    plain = array.astype(_little_endian(array.dtype), order="C", copy=False)
    state = xxhash.xxh3_128(_head(plain.dtype, plain.shape))
    if plain.size:
        state.update(plain.reshape(-1).view(np.uint8).data)
    return state.digest()


@lru_cache(maxsize=64)
def _little_endian(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind not in "biufc" or dtype.char in "gG":  # whose padding is whatever was in memory
        raise InputTypeError(
            f"boundary: expected an array of kind b, i, u, f or c, of 64 bits per part at most, got {dtype}"
        )
    return dtype.newbyteorder("<")


@lru_cache(maxsize=1024)
def _head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    name = dtype.str.encode()
    return struct.pack(f"<B{len(name)}sB{len(shape)}Q", len(name), name, len(shape), *shape)


def boundary_sketch(array: Array, axis: int = 1) -> bytes:
    """Return a few random projections of every position, to compare two computations by.

    Signs are ±1 (Achlioptas 2003), so the expected square of a projected difference is the squared norm of
    the difference; that all `SKETCH` projections miss nine tenths of it happens once in 10⁹.

    Parameters
    ----------
    array : ndarray
        A chunk of numbers.
    axis : int, optional
        The axis along which positions lie.

    Returns
    -------
    bytes
        float64, little-endian, of shape (positions, `SKETCH`).
    """
    if np.iscomplexobj(array):
        array = np.stack([array.real, array.imag], -1)
    rows = np.moveaxis(np.asarray(array, np.float64), axis, 0)  # (T, ...)
    rows = rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))  # (T, F)
    return np.asarray(rows @ _signs(rows.shape[1]), "<f8").tobytes()


def _signs(features: int) -> Array:
    signs = _SIGNS.get(features)
    if signs is None:
        bits = np.random.Generator(np.random.Philox(features)).integers(0, 2, (features, SKETCH))
        signs = _SIGNS[features] = 2.0 * bits - 1.0
    return signs


_SIGNS: dict[int, Array] = {}


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """What is known of one chunk at one boundary.

    Parameters
    ----------
    index : int
        Number of the chunk; rises along a session and is never used twice.
    position : int
        First position of the chunk in the sequence.
    width : int
        Positions that were computed.
    kept : int
        Positions that count; fewer than `width` after a speculation was rejected.
    digest : bytes
        `boundary_digest` of the whole chunk; empty for what is only planned.
    tokens : tuple of int
        At the tail: the ids sampled after the last ``len(tokens)`` of the `width` positions.
    sketch : bytes
        `boundary_sketch` of the whole chunk, if there is one.
    """

    index: int
    position: int
    width: int
    kept: int
    digest: bytes = b""
    tokens: tuple[int, ...] = ()
    sketch: bytes = b""

    def __post_init__(self) -> None:
        if self.index < 0 or self.position < 0 or not 0 < self.kept <= self.width:
            raise InputError(
                f"chunk {self.index}: expected index >= 0, position >= 0 and 0 < kept <= width, got "
                f"position {self.position}, kept {self.kept} and width {self.width}"
            )

    @property
    def end(self) -> int:
        """Position after the last one that counts."""
        return self.position + self.kept

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Index, position, width and kept: what is the same at every boundary."""
        return (self.index, self.position, self.width, self.kept)

    def cut(self, position: int) -> ChunkRecord | None:
        """Return the record as it is after a roll-back to a position, None if nothing is left."""
        kept = min(self.kept, position - self.position)
        return None if kept <= 0 else self if kept == self.kept else replace(self, kept=kept)


def cut_records(records: Iterable[ChunkRecord], position: int) -> tuple[ChunkRecord, ...]:
    """Return the records that are left after a roll-back to a position."""
    return tuple(left for record in records if (left := record.cut(position)) is not None)


class DigestLog:
    """The records of one boundary without the arrays: what a stage keeps of its inputs.

    Parameters
    ----------
    name : str, optional
        Boundary and session, for messages.
    """

    def __init__(self, name: str = "boundary") -> None:
        self.name = name
        self._records: list[ChunkRecord] = []

    @property
    def records(self) -> tuple[ChunkRecord, ...]:
        """The records in order."""
        return tuple(self._records)

    @property
    def position(self) -> int:
        """Position of the next chunk."""
        return self._records[-1].end if self._records else 0

    def __len__(self) -> int:
        return len(self._records)

    def find(self, index: int) -> ChunkRecord | None:
        """Return the record of a chunk, None if there is none."""
        at = bisect_left(self._records, index, key=lambda record: record.index)
        found = self._records[at] if at < len(self._records) else None
        return found if found is not None and found.index == index else None

    def append(self, record: ChunkRecord) -> None:
        """Add the next chunk.

        Raises
        ------
        StageError
            If it does not follow: a message was lost, came twice or came late.
        """
        last = self._records[-1].index if self._records else -1
        if record.position != self.position or record.index <= last:
            raise StageError(
                f"{self.name}: expected a chunk after {last} at position {self.position}, got chunk "
                f"{record.index} at position {record.position}"
            )
        self._records.append(record)

    def truncate(self, position: int) -> list[ChunkRecord]:
        """Forget everything from a position on and return the records that went as a whole.

        Raises
        ------
        StageError
            If the log does not reach so far: then its stage has lost something.
        """
        if not 0 <= position <= self.position:
            raise StageError(f"{self.name}: expected a position from 0 to {self.position}, got {position}")
        gone: list[ChunkRecord] = []
        while self._records and self._records[-1].end > position:
            record = self._records.pop()
            left = record.cut(position)
            if left is not None:
                self._records.append(left)
                break
            gone.append(record)
        return gone[::-1]


class Spill(Protocol):
    """Where a journal puts what does not fit into its memory."""

    def write(self, index: int, raw: memoryview) -> None:
        """Keep the bytes of a chunk."""

    def read(self, index: int, nbytes: int) -> bytes:
        """Return them; fewer than ``nbytes`` if they are gone."""

    def drop(self, index: int) -> None:
        """Forget the chunk that was written last."""

    def close(self) -> None:
        """Give everything back; may be called again."""


class FileSpill:
    """One file that loses its name as soon as it is open: a killed worker leaves nothing behind.

    Parameters
    ----------
    path : str or os.PathLike
        A name that nobody else uses; its folder is created.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "x+b", buffering=0)  # noqa: SIM115 - closed by close()
        path.unlink()
        self._offsets: dict[int, int] = {}
        self._end = 0

    def write(self, index: int, raw: memoryview) -> None:
        """Keep the bytes of a chunk."""
        offset = self._end
        while offset - self._end < len(raw):
            offset += os.pwrite(self._file.fileno(), raw[offset - self._end :], offset)
        self._offsets[index] = self._end
        self._end = offset

    def read(self, index: int, nbytes: int) -> bytes:
        """Return the bytes of a chunk; fewer if the file lost some."""
        found = bytearray()
        while len(found) < nbytes:
            raw = os.pread(self._file.fileno(), nbytes - len(found), self._offsets[index] + len(found))
            if not raw:
                break
            found += raw
        return bytes(found)

    def drop(self, index: int) -> None:
        """Forget the chunk that was written last."""
        self._end = self._offsets.pop(index)
        os.ftruncate(self._file.fileno(), self._end)

    def close(self) -> None:
        """Give the disk space back."""
        self._file.close()


class ZarrSpill:
    """One key per chunk in a Zarr store, in memory, on disk or remote.

    Parameters
    ----------
    store : zarr.abc.store.Store
        The store.
    prefix : str
        A group of keys that nobody else uses.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        from zarr.abc.store import Store
        from zarr.core.buffer import default_buffer_prototype

        if not isinstance(store, Store):
            raise InputTypeError(f"spill: expected a path or a Zarr store, got {type(store).__name__}")
        self._store, self._prefix, self._prototype = store, prefix, default_buffer_prototype()
        self._written: list[int] = []

    def write(self, index: int, raw: memoryview) -> None:
        """Keep the bytes of a chunk."""
        from zarr.core.sync import sync

        sync(self._store.set(self._key(index), self._prototype.buffer.from_bytes(bytes(raw))))
        self._written.append(index)

    def read(self, index: int, nbytes: int) -> bytes:
        """Return the bytes of a chunk; none if its key is gone."""
        from zarr.core.sync import sync

        found = sync(self._store.get(self._key(index), self._prototype))
        return b"" if found is None else bytes(found.to_bytes())

    def drop(self, index: int) -> None:
        """Delete a chunk."""
        from zarr.core.sync import sync

        self._written.remove(index)
        sync(self._store.delete(self._key(index)))

    def close(self) -> None:
        """Delete every chunk."""
        while self._written:
            self.drop(self._written[-1])

    def _key(self, index: int) -> str:
        return f"{self._prefix}/{index}"


@dataclass(slots=True)
class _Held:
    """The elements of one chunk: in memory, or in the spill if ``array`` is None."""

    array: Array | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int


class Journal:
    """The chunks that one stage put out in one session.

    Memory is bounded: past the limit the oldest chunks go to the spill. Everything is copied on the way in
    and proved by its digest on the way out. May be used from several threads.

    Parameters
    ----------
    limit_bytes : int
        Bytes of elements that are kept in memory.
    spill : path, zarr.abc.store.Store, Spill or None
        Where the oldest chunks go past the limit: a new file, or keys below ``name`` in the store. Without
        one the journal refuses to grow.
    name : str, optional
        Boundary and session, for messages and as the group of keys in a store.
    """

    def __init__(self, limit_bytes: int, spill: Any = None, *, name: str = "journal") -> None:
        if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int) or limit_bytes < 0:
            raise InputError(f"limit_bytes: expected an int >= 0, got {limit_bytes!r}")
        self.name = name
        self.limit_bytes = limit_bytes
        self._log = DigestLog(name)
        self._held: dict[int, _Held] = {}
        self._spilled = 0  # the first chunks are in the spill
        self._nbytes = 0
        self._guard = threading.RLock()
        self._closed = False
        self._spill = _open_spill(spill, name)

    @property
    def records(self) -> tuple[ChunkRecord, ...]:
        """The records in order."""
        with self._guard:
            return self._log.records

    @property
    def position(self) -> int:
        """Position of the next chunk."""
        return self._log.position

    @property
    def nbytes(self) -> int:
        """Bytes of elements in memory."""
        return self._nbytes

    @property
    def spilled(self) -> int:
        """Number of chunks in the spill."""
        return self._spilled

    def __len__(self) -> int:
        return len(self._log)

    def append(
        self,
        index: int,
        position: int,
        array: Array,
        *,
        width: int | None = None,
        tokens: Iterable[int] = (),
        sketch: bytes = b"",
    ) -> bytes:
        """Record the next chunk.

        Parameters
        ----------
        index, position : int
            See `ChunkRecord`.
        array : ndarray
            The chunk; copied.
        width : int, optional
            Positions that it covers; the length of its axis 1 if not given.
        tokens, sketch : optional
            See `ChunkRecord`.

        Returns
        -------
        bytes
            Its `boundary_digest`.

        Raises
        ------
        StageError
            If the chunk does not follow the last one, or does not fit and cannot be spilled.
        """
        digest = boundary_digest(array)
        if width is None:
            width = array.shape[1] if array.ndim > 1 else 1
        with self._guard:
            self._check_open()
            if array.nbytes > self.limit_bytes and self._spill is None:
                self._refuse(array.nbytes)
            record = ChunkRecord(index, position, width, width, digest, tuple(tokens), sketch)
            self._log.append(record)
            own = np.array(array, order="C", copy=True)
            self._held[index] = _Held(own, own.dtype, own.shape, own.nbytes)
            self._nbytes += own.nbytes
            try:
                self._make_room()
            except StageError:
                self.truncate(position)
                raise
        return digest

    def truncate(self, position: int) -> None:
        """Forget everything from a position on; a chunk that is cut stays whole, with fewer kept.

        Raises
        ------
        StageError
            If the journal does not reach so far.
        """
        with self._guard:
            self._check_open()
            for record in reversed(self._log.truncate(position)):
                held = self._held.pop(record.index)
                if held.array is not None:
                    self._nbytes -= held.nbytes
                else:
                    self._spilled -= 1
                    self._store().drop(record.index)

    def read(self, index: int) -> Array:
        """Return one chunk, read-only, with all of its positions.

        Raises
        ------
        InputError
            If there is no such chunk.
        CorruptionError
            If it does not have the digest that it was recorded with.
        """
        with self._guard:
            self._check_open()
            record = self._find(index)
            array = self._elements(index)
        if array is None or boundary_digest(array) != record.digest:
            raise CorruptionError(
                f"{self.name}: expected chunk {index} with digest {record.digest.hex()}, got other bytes"
            )
        array.flags.writeable = False
        return array

    def __iter__(self) -> Iterator[tuple[ChunkRecord, Array]]:
        """Yield the chunks that are there now, in order; see `read`."""
        for record in self.records:
            yield record, self.read(record.index)

    def merged(self, width: int, begin: int = 0) -> Iterator[tuple[ChunkRecord, Array]]:
        """Yield the kept positions in few wide chunks, for a fast replay.

        Parameters
        ----------
        width : int
            Positions per chunk at most; a recorded chunk is never split.
        begin : int, optional
            Position to begin at, where a recorded chunk begins.

        Yields
        ------
        tuple of (ChunkRecord, ndarray)
            Index of the last chunk that went in, and the chunks joined along axis 1, the axis of positions.
        """
        waiting: list[tuple[ChunkRecord, Array]] = []
        records = self.records
        for record in records[bisect_left(records, begin, key=lambda record: record.position) :]:
            if waiting and record.end - waiting[0][0].position > width:
                yield join_chunks(waiting)
                waiting = []
            waiting.append((record, self.read(record.index)))
        if waiting:
            yield join_chunks(waiting)

    def close(self) -> None:
        """Give memory and spill back; may be called again."""
        with self._guard:
            self._closed = True
            self._held.clear()
            self._nbytes = 0
            if self._spill is not None:
                self._spill.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.name}: expected an open journal, got a closed one")

    def _refuse(self, nbytes: int) -> None:
        raise StageError(
            f"{self.name}: expected at most {self.limit_bytes} bytes, got {nbytes} and no place to spill"
        )

    def _store(self) -> Spill:
        assert self._spill is not None
        return self._spill

    def _make_room(self) -> None:
        """Move the oldest chunks out, with one look at each."""
        while self._nbytes > self.limit_bytes:
            if self._spill is None:
                self._refuse(self._nbytes)
            index = self._log._records[self._spilled].index
            held = self._held[index]
            assert held.array is not None
            try:
                self._store().write(index, held.array.reshape(-1).view(np.uint8).data)
            except OSError as error:
                raise StageError(
                    f"{self.name}: expected room to spill {held.nbytes} bytes, got {error}"
                ) from error
            held.array = None
            self._nbytes -= held.nbytes
            self._spilled += 1

    def _find(self, index: int) -> ChunkRecord:
        record = self._log.find(index)
        if record is None:
            raise InputError(f"{self.name}: expected a chunk that is recorded, got {index}")
        return record

    def _elements(self, index: int) -> Array | None:
        held = self._held[index]
        if held.array is not None:
            return held.array.view()
        raw = self._store().read(index, held.nbytes)
        if len(raw) != held.nbytes:
            return None
        return np.ndarray(held.shape, held.dtype, buffer=bytearray(raw))


def join_chunks(parts: Sequence[tuple[ChunkRecord, Array]]) -> tuple[ChunkRecord, Array]:
    """Return the kept positions of chunks that follow each other as one, under the last one's number."""
    first, last = parts[0][0], parts[-1][0]
    width = last.end - first.position
    record = ChunkRecord(last.index, first.position, width, width)
    return record, np.concatenate([array[:, : record.kept] for record, array in parts], axis=1)


def _open_spill(spill: Any, name: str) -> Spill | None:
    if spill is None:
        return None
    if isinstance(spill, str | os.PathLike):
        return FileSpill(spill)
    if all(hasattr(spill, method) for method in ("write", "read", "drop", "close")):
        return spill  # type: ignore[no-any-return]
    return ZarrSpill(spill, hashlib.sha256(name.encode()).hexdigest()[:32])
