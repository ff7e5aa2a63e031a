"""Journals against a plain list, with and without a spill, and what damage does to them."""

from __future__ import annotations

import itertools
import struct
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from zarr.storage import LocalStore, MemoryStore

from dask_sdc.exceptions import ClosedError, CorruptionError, InputError, InputTypeError, StageError
from dask_sdc.inference.journal import (
    SKETCH,
    ChunkRecord,
    DigestLog,
    FileSpill,
    Journal,
    boundary_digest,
    boundary_sketch,
    cut_records,
)
from dask_sdc.inference.proof import sketch_error, sketch_rows

ARRAYS = hnp.arrays(
    st.sampled_from(["<f4", ">f4", "<f8", "<f2", "<i8", ">u2", "|b1", "<c8"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


@given(ARRAYS)
def test_digest_is_that_of_dtype_shape_and_little_endian_elements(array: np.ndarray) -> None:
    little = array.astype(array.dtype.newbyteorder("<"))
    name = little.dtype.str.encode()
    head = struct.pack("<B", len(name)) + name + struct.pack(f"<B{array.ndim}Q", array.ndim, *array.shape)
    assert boundary_digest(array) == xxhash.xxh3_128_digest(head + little.tobytes())
    assert boundary_digest(np.asfortranarray(array) if array.ndim else array) == boundary_digest(array)


@given(ARRAYS, st.data())
def test_digest_sees_every_bit(array: np.ndarray, data: st.DataObject) -> None:
    if array.nbytes and array.dtype != bool:
        raw = bytearray(array.tobytes())
        bit = data.draw(st.integers(0, 8 * len(raw) - 1))
        raw[bit // 8] ^= 1 << bit % 8
        other = np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)
        assert boundary_digest(other) != boundary_digest(array)
    assert boundary_digest(array[np.newaxis]) != boundary_digest(array)


def test_digest_refuses_objects() -> None:
    with pytest.raises(InputTypeError, match=r"array of kind b, i, u, f or c.*got object"):
        boundary_digest(np.array([None]))


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_digest_refuses_what_is_padded(dtype: type) -> None:
    with pytest.raises(InputTypeError, match="64 bits per part at most"):
        boundary_digest(np.zeros((1, 2), dtype))


def chunk(index: int, width: int, features: int = 3) -> np.ndarray:
    rng = np.random.default_rng(index)
    return rng.normal(size=(1, width, features)).astype("f4")


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5), st.integers(1, 3)),
        st.tuples(st.just("truncate"), st.floats(0, 1), st.just(0)),
    ),
    max_size=30,
)


@pytest.mark.parametrize("spill", ["none", "file", "memory", "folder"])
@given(operations=OPERATIONS, limit=st.integers(0, 200))
def test_journal_is_a_list(tmp_path_factory: Any, spill: str, operations: list[Any], limit: int) -> None:
    folder = tmp_path_factory.mktemp("journal")
    target = {"none": None, "file": folder / "x", "memory": MemoryStore(), "folder": LocalStore(folder)}[
        spill
    ]
    limit = 1 << 20 if spill == "none" else limit
    known: list[tuple[ChunkRecord, np.ndarray]] = []
    index = 0
    with Journal(limit, target, name="stage 1") as journal:
        for name, amount, jump in operations:
            position = known[-1][0].end if known else 0
            if name == "append":
                index += jump
                array = chunk(index, amount)
                digest = journal.append(index, position, array, tokens=(index,))
                array_then = array.copy()
                array += 1  # the journal has its own copy
                assert digest == boundary_digest(array_then)
                record = ChunkRecord(index, position, amount, amount, digest, (index,))
                known.append((record, array_then))
            else:
                position = int(amount * position)
                journal.truncate(position)
                cut = [(record.cut(position), array) for record, array in known]
                known = [(record, array) for record, array in cut if record is not None]
            assert journal.position == (known[-1][0].end if known else 0)
            assert journal.nbytes <= limit
            assert journal.records == tuple(record for record, _ in known)
            kept = journal.nbytes + sum(array.nbytes for _, array in known[: journal.spilled])
            assert kept == sum(array.nbytes for _, array in known)
            for (record, array), (due, expected) in zip(journal, known, strict=True):
                assert record == due
                assert array.dtype == expected.dtype
                np.testing.assert_array_equal(array, expected)
                assert not array.flags.writeable
    if spill == "folder":
        assert [path for path in folder.rglob("*") if path.is_file()] == []


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=12), st.integers(1, 20))
def test_merged_joins_what_counts(widths: list[tuple[int, int]], most: int) -> None:
    journal = Journal(1 << 20)
    rows = []
    for index, (width, kept) in enumerate(widths):
        array = chunk(index, width)
        position = journal.position
        journal.append(index, position, array)
        journal.truncate(position + min(width, kept))
        rows.append(array[:, : min(width, kept)])
    merged = list(journal.merged(most))
    np.testing.assert_array_equal(
        np.concatenate([array for _, array in merged], axis=1), np.concatenate(rows, axis=1)
    )
    end = 0
    for record, array in merged:
        assert (record.position, record.width) == (end, array.shape[1])
        assert record.width <= max(most, 5)
        end = record.end
    assert end == journal.position
    for before, after in itertools.pairwise(merged):
        first = next(r for r in journal.records if r.position == after[0].position)
        assert before[0].width + first.kept > most


def test_chunks_that_do_not_follow_are_refused() -> None:
    journal = Journal(1 << 10, name="stage 2, session a")
    journal.append(3, 0, chunk(3, 2))
    for index, position in ((4, 1), (4, 3), (3, 2), (2, 2)):
        with pytest.raises(StageError, match=r"stage 2, session a: expected a chunk after 3 at position 2"):
            journal.append(index, position, chunk(index, 1))
    for position in (-1, 3):
        with pytest.raises(StageError, match="expected a position from 0 to 2"):
            journal.truncate(position)
    assert len(journal) == 1


def test_without_a_spill_a_full_journal_refuses_and_stays_whole() -> None:
    journal = Journal(60)
    journal.append(0, 0, chunk(0, 3))
    for width in (3, 6):
        with pytest.raises(StageError, match=r"expected at most 60 bytes, got (72|72) and no place to spill"):
            journal.append(1, 3, chunk(1, width))
        assert (len(journal), journal.nbytes, journal.position) == (1, 36, 3)
    journal.append(1, 3, chunk(1, 2))


@pytest.mark.parametrize("where", ["memory", "spill"])
def test_a_flipped_bit_is_found_on_reading_back(where: str) -> None:
    store = MemoryStore()
    journal = Journal(1 << 10 if where == "memory" else 0, store)
    journal.append(0, 0, chunk(0, 2))
    journal.append(1, 2, chunk(1, 2))
    if where == "memory":
        journal._held[1].array.view(np.uint8)[0, 0, 0] ^= 1
    else:
        key = next(key for key in store._store_dict if key.endswith("/1"))
        raw = bytearray(store._store_dict[key].to_bytes())
        raw[5] ^= 1
        store._store_dict[key] = type(store._store_dict[key]).from_bytes(bytes(raw))
    np.testing.assert_array_equal(journal.read(0), chunk(0, 2))
    with pytest.raises(CorruptionError, match=r"expected chunk 1 with digest [0-9a-f]{32}, got other bytes"):
        journal.read(1)
    with pytest.raises(CorruptionError):
        list(journal)


def test_bytes_that_are_gone_are_damage() -> None:
    store = MemoryStore()
    journal = Journal(0, store)
    journal.append(0, 0, chunk(0, 2))
    store._store_dict.clear()
    with pytest.raises(CorruptionError, match="expected chunk 0"):
        journal.read(0)


def test_a_spill_file_has_no_name(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "spill"
    journal = Journal(10, path)
    for index in range(20):
        journal.append(index, index, chunk(index, 1))
    assert journal.spilled == 20
    assert list(path.parent.iterdir()) == []
    journal.close()
    journal.close()
    with pytest.raises(ClosedError, match="expected an open journal"):
        journal.read(0)
    with pytest.raises(ClosedError):
        journal.append(20, 20, chunk(20, 1))


class Full:
    """A disk on which only one chunk has room."""

    def __init__(self) -> None:
        self.kept: dict[int, bytes] = {}

    def write(self, index: int, raw: memoryview) -> None:
        if self.kept:
            raise OSError("expected room, got none")
        self.kept[index] = bytes(raw)

    def read(self, index: int, nbytes: int) -> bytes:
        return self.kept[index]

    def drop(self, index: int) -> None:
        del self.kept[index]

    def close(self) -> None:
        self.kept.clear()


def test_a_full_disk_refuses_the_chunk_and_leaves_the_journal_whole() -> None:
    journal = Journal(0, Full())
    journal.append(0, 0, chunk(0, 2))
    with pytest.raises(StageError, match="expected room to spill 24 bytes, got expected room"):
        journal.append(1, 2, chunk(1, 2))
    assert (journal.position, journal.nbytes, journal.spilled) == (2, 0, 1)
    np.testing.assert_array_equal(journal.read(0), chunk(0, 2))


def test_file_spill_overwrites_what_was_dropped(tmp_path: Path) -> None:
    spill = FileSpill(tmp_path / "x")
    spill.write(0, memoryview(b"abc"))
    spill.write(1, memoryview(b"defg"))
    spill.drop(1)
    spill.write(2, memoryview(b"hi"))
    assert (spill.read(0, 3), spill.read(2, 2), spill.read(2, 5)) == (b"abc", b"hi", b"hi")
    spill.close()


def test_bad_arguments() -> None:
    for limit in (-1, True, 1.5, None):
        with pytest.raises(InputError, match="limit_bytes: expected an int >= 0"):
            Journal(limit)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="spill: expected a path or a Zarr store, got int"):
        Journal(1, 3)
    with pytest.raises(InputError, match="expected a chunk that is recorded, got 7"):
        Journal(1).read(7)
    for fields in ((-1, 0, 1, 1), (0, -1, 1, 1), (0, 0, 1, 0), (0, 0, 1, 2)):
        with pytest.raises(InputError, match="expected index >= 0"):
            ChunkRecord(*fields)


def test_readers_and_a_writer_at_once(tmp_path: Path) -> None:
    with Journal(200, tmp_path / "x") as journal:
        assert read_and_write(journal) == []


def read_and_write(journal: Journal) -> list[BaseException]:
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while len(journal) < 200:
                for record, array in journal:
                    np.testing.assert_array_equal(array, chunk(record.index, 1))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for index in range(200):
        journal.append(index, index, chunk(index, 1))
    for thread in threads:
        thread.join(30)
    return failures


@given(st.lists(st.integers(1, 6), max_size=10), st.integers(0, 40))
def test_log_and_records_are_cut_alike(widths: list[int], position: int) -> None:
    log, end = DigestLog(), 0
    for index, width in enumerate(widths):
        log.append(ChunkRecord(2 * index, end, width, width, b"d"))
        end += width
    records = log.records
    position = min(position, end)
    gone = log.truncate(position)
    assert log.records == cut_records(records, position)
    assert [record.index for record in (*log.records, *gone)] == [record.index for record in records]
    assert log.position == position
    for record in log.records:
        assert log.find(record.index) == record
        assert log.find(record.index + 1) is None


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 1 << 30))
def test_sketches_measure_differences(rows: int, features: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(2, rows, features))
    b = a + 1e-3 * rng.normal(size=a.shape)
    record = ChunkRecord(0, 5, rows, rows, b"", (), boundary_sketch(a))
    assert len(record.sketch) == rows * SKETCH * 8
    ours, theirs = sketch_rows([record]), sketch_rows([replace(record, sketch=boundary_sketch(b))])
    assert sorted(ours) == list(range(5, 5 + rows))
    for position, row in ours.items():
        error = np.linalg.norm(row - theirs[position]) / np.sqrt(SKETCH)
        true = np.linalg.norm(a[:, position - 5] - b[:, position - 5])
        assert true / 20 < error < 4 * true
        assert sketch_error(row, row) == 0.0
    assert sketch_error(np.full(SKETCH, np.nan), np.zeros(SKETCH)) == np.inf


def test_sketches_see_imaginary_parts_and_take_chunks_without_elements() -> None:
    array = np.random.default_rng(3).normal(size=(2, 4, 5)) + 0j
    parts = np.stack([array.real, array.imag], -1)
    assert boundary_sketch(array) == boundary_sketch(parts)
    assert boundary_sketch(array + 1j) != boundary_sketch(array)
    assert boundary_sketch(array[:, :, :0]) == np.zeros((4, SKETCH)).tobytes()
