"""Sources made of Zarr arrays: through Zarr, and straight from local files."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec, TransposeCodec
from zarr.storage import LocalStore, MemoryStore

from dask_sdc.exceptions import InputError, InputTypeError, ShardError
from dask_sdc.graph.sources import make_source
from tests.graph.source_blocks import column, loaded, random_array
from tests.graph.source_strategies import cuts

COUNTER = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that hypothesis examples may share: each takes a new name in it."""
    return tmp_path_factory.mktemp("zarr")


def stored(path: Path, array: np.ndarray[Any, Any], chunks: tuple[int, ...], **how: Any) -> zarr.Array[Any]:
    result = zarr.create_array(
        path / str(next(COUNTER)), shape=array.shape, chunks=chunks, dtype=array.dtype, **how
    )
    result[:] = array
    return result


def is_raw(source: Any) -> bool:
    return type(source.batch([0]).parts[0]).__name__ == "RawPart"


LAYOUTS = {
    "v3": ({"compressors": None}, True),
    "v3 big": ({"compressors": None, "serializer": BytesCodec(endian="big")}, True),
    "v3 v2-keys": ({"compressors": None, "chunk_key_encoding": {"name": "v2", "separator": "."}}, True),
    "v2": ({"compressors": None, "zarr_format": 2}, True),
    "v2 slash": (
        {"compressors": None, "zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
        True,
    ),
    "v2 fortran": ({"compressors": None, "zarr_format": 2, "order": "F"}, False),
    "v2 compressed": ({"zarr_format": 2}, False),
    "v3 compressed": ({}, False),
    "v3 crc32c": ({"compressors": [Crc32cCodec()]}, False),
    "v3 transposed": ({"compressors": None, "filters": [TransposeCodec(order=(1, 0))]}, False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunks", [(7, 5), (7, 2), (40, 8), (3, 8)])
def test_every_layout_gives_the_same_bytes(tmp_path: Path, layout: str, chunks: tuple[int, int]) -> None:
    how, raw = LAYOUTS[layout]
    array = random_array((31, 5), "f8")
    z = stored(tmp_path, array, chunks, **how)
    source = make_source(z)
    assert is_raw(source) is raw
    assert source.rows == da.from_zarr(z).chunks[0]
    assert column(source).tobytes() == array.tobytes()


def test_zarr_shards_are_shards(tmp_path: Path) -> None:
    array = random_array((30, 4), "f4")
    z = stored(tmp_path, array, (2, 4), shards=(10, 4), compressors=None)
    source = make_source(z)
    assert source.rows == (10, 10, 10) and not is_raw(source)
    assert column(source).tobytes() == array.tobytes()


@given(data=st.data(), n=st.integers(1, 40), compressed=st.booleans())
def test_rows_that_cross_chunks(folder: Path, data: st.DataObject, n: int, compressed: bool) -> None:
    """Targets and weights follow x's shards, wherever their own chunks end."""
    shape = (n, *data.draw(st.lists(st.integers(1, 4), max_size=1)))
    chunks = tuple(data.draw(st.integers(1, size + 3)) for size in shape)
    dtype = data.draw(st.sampled_from(["?", "i1", "i4", "f2", "f8", ">f4"]))
    array = random_array(shape, dtype)
    z = stored(folder, array, chunks, **({} if compressed else {"compressors": None}))
    x = np.split(np.arange(float(n)), np.cumsum(data.draw(cuts(n)))[:-1])
    source = make_source(x, target=z)
    assert source.rows == tuple(len(block) for block in x)
    expected = array.astype(array.dtype.newbyteorder("="))
    for block, index in zip(loaded(source), x, strict=True):
        assert block.target.tobytes() == expected[index.astype(int)].tobytes()


@pytest.mark.parametrize("fill", [0.0, -7.5, np.nan])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_chunks_that_were_never_written_hold_the_fill_value(
    tmp_path: Path, fill: float, zarr_format: Any
) -> None:
    z = zarr.create_array(
        tmp_path,
        shape=(20, 3),
        chunks=(4, 2),
        dtype="f8",
        fill_value=fill,
        compressors=None,
        zarr_format=zarr_format,
    )
    z[4:9] = 1.0
    source = make_source(z)
    assert is_raw(source)
    assert column(source).tobytes() == z[:].tobytes()


@pytest.mark.parametrize("compressed", [False, True])
def test_missing_array_is_not_mistaken_for_fill_values(tmp_path: Path, compressed: bool) -> None:
    """A worker that does not see the file system must not compute on fill values."""
    z = stored(tmp_path, np.ones((8, 2)), (4, 2), **({} if compressed else {"compressors": None}))
    loader = make_source(z).batch([0, 1])
    shutil.rmtree(z.store.root)
    for shard_id in (0, 1):
        with pytest.raises(
            ShardError, match=f"shard {shard_id}.*(do all workers see|NotFoundError)"
        ) as caught:
            loader.load(shard_id)
        assert caught.value.shard_id == shard_id


@pytest.mark.parametrize("change", [-1, -64, 1])
def test_chunk_file_of_the_wrong_size_names_its_shard(tmp_path: Path, change: int) -> None:
    z = stored(tmp_path, np.ones((12, 2)), (4, 2), compressors=None)
    chunk = Path(z.store.root, z.metadata.encode_chunk_key((1, 0)))
    os.truncate(chunk, 64 + change)
    with make_source(z).batch(range(3)).reader() as reader:
        assert reader.load(0).x.sum() == 8
        with pytest.raises(ShardError, match=f"shard 1 .*expected 64 bytes, got {64 + change}") as caught:
            reader.load(1)
        assert caught.value.shard_id == 1
        assert reader.load(2).x.sum() == 8


def test_damaged_checksummed_chunk_names_its_shard(tmp_path: Path) -> None:
    z = stored(tmp_path, random_array((12, 2), "f8"), (4, 2), compressors=[Crc32cCodec()])
    chunk = Path(z.store.root, z.metadata.encode_chunk_key((2, 0)))
    content = bytearray(chunk.read_bytes())
    content[10] ^= 1
    chunk.write_bytes(content)
    with make_source(z).batch(range(3)).reader() as reader:
        reader.load(1)
        with pytest.raises(ShardError, match=r"shard 2 cannot be loaded.*(checksum|crc32c)") as caught:
            reader.load(2)
    assert caught.value.shard_id == 2


def test_array_that_was_replaced_is_refused(tmp_path: Path) -> None:
    z = stored(tmp_path, np.ones((8, 2)), (4, 2))
    loader = make_source(z).batch([0])
    zarr.create_array(z.store, shape=(8, 2), chunks=(4, 2), dtype="f4", overwrite=True)
    with pytest.raises(ShardError, match=r"changed: expected float64.*got float32"):
        loader.load(0)


def test_a_block_is_valid_until_the_next_one(tmp_path: Path) -> None:
    array = random_array((12, 2), "f8")
    loader = make_source(stored(tmp_path, array, (4, 2), compressors=None)).batch(range(3))
    with loader.reader() as reader:
        first = reader.load(0).x
        kept = first.copy()
        second = reader.load(1).x
        assert np.shares_memory(first, second)
    with loader.reader() as reader:
        assert np.shares_memory(reader.load(0).x, second)
    own = [loader.load(k).x for k in range(3)]
    assert np.concatenate(own).tobytes() == array.tobytes()
    assert kept.tobytes() == array[:4].tobytes()


def test_columns_and_readers_do_not_share_buffers(tmp_path: Path) -> None:
    x, t = random_array((12, 2), "f8"), random_array((12, 2), "f8")
    both = [stored(tmp_path, array, (4, 2), compressors=None) for array in (x, t)]
    loader = make_source(both[0], target=both[1], weights=both[1][:, 0] ** 2).batch(range(3))
    with loader.reader() as one, loader.reader() as two:
        a, b = one.load(0), two.load(2)
        assert (a.x == x[:4]).all() and (a.target == t[:4]).all()
        assert (b.x == x[8:]).all() and (b.target == t[8:]).all()
        assert (a.weights == t[:4, 0] ** 2).all()


def test_a_bigger_shard_than_the_idle_buffer_gets_its_own(tmp_path: Path) -> None:
    small = make_source(stored(tmp_path, np.ones((4, 2)), (4, 2), compressors=None))
    big = make_source(stored(tmp_path, np.full((400, 2), 3.0), (400, 2), compressors=None))
    for source, total in ((small, 8), (big, 2400), (small, 8)):
        for _, block in source.batch([0]).blocks():
            assert block.x.sum() == total


def test_paths_open_what_is_there(tmp_path: Path) -> None:
    array = random_array((8, 2), "f8")
    group = zarr.create_group(tmp_path / "root.zarr")
    for name in ("wind", "temperature"):
        group.create_array(name, shape=(8, 2), chunks=(4, 2), dtype="f8")[:] = array
    for path in (tmp_path / "root.zarr" / "wind", str(tmp_path / "root.zarr" / "wind"), group["wind"]):
        source = make_source(path)
        assert column(source).tobytes() == array.tobytes()
    for bad in (group, tmp_path / "root.zarr"):
        with pytest.raises(InputError, match=r"group .*root\.zarr; its arrays: temperature, wind"):
            make_source(bad)
    with pytest.raises(InputError, match="nowhere"):
        make_source(tmp_path / "nowhere")


def test_relative_store_paths_are_found_from_elsewhere(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    zarr.create_array("a.zarr", shape=(4, 2), chunks=(2, 2), dtype="f8", compressors=None)[:] = 5.0
    loader = make_source("a.zarr").batch([0, 1])
    monkeypatch.chdir("/")
    assert [block.x.sum() for _, block in loader.blocks()] == [20.0, 20.0]


def test_arrays_in_memory_are_read_at_once() -> None:
    z = zarr.create_array(MemoryStore(), shape=(20, 2), chunks=(4, 2), dtype="f8")
    z[:] = random_array((20, 2), "f8")
    assert column(make_source(z)).tobytes() == z[:].tobytes()


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ({"shape": (), "dtype": "f8"}, InputError, "scalar"),
        ({"shape": (0, 2), "dtype": "f8"}, InputError, "no samples"),
        ({"shape": (4,), "dtype": "M8[s]"}, InputTypeError, "datetime64"),
        ({"shape": (4,), "dtype": "S4"}, InputTypeError, "S4"),
    ],
)
@pytest.mark.filterwarnings("ignore:The data type:zarr.errors.UnstableSpecificationWarning")
def test_bad_arrays_are_refused(tmp_path: Path, how: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        make_source(zarr.create_array(tmp_path, **how))


def test_digest_is_of_place_and_layout(tmp_path: Path) -> None:
    arrays = [
        stored(tmp_path, np.ones((8, 2)), (4, 2)),
        stored(tmp_path, np.ones((8, 2)), (4, 2)),
        stored(tmp_path, np.ones((8, 2)), (2, 2)),
    ]
    digests = [make_source(z).digest() for z in arrays]
    assert len(set(digests)) == 3
    assert make_source(zarr.open_array(arrays[0].store_path, mode="r")).digest() == digests[0]


def test_stores_that_are_not_local_go_through_zarr(tmp_path: Path) -> None:
    class Elsewhere(LocalStore):
        """A local store whose files are not where its root says."""

    z = stored(tmp_path, np.ones((8, 2)), (4, 2), compressors=None)
    assert is_raw(make_source(z))
    other = zarr.open_array(Elsewhere(z.store.root), mode="r")
    assert not is_raw(make_source(other))
