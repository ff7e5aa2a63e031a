"""Sources made of xarray objects: which axis holds the samples, and in which order features come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.array as da
import iris_sample_data
import numpy as np
import pytest
import xarray as xr
from distributed import Client

from dask_sdc.exceptions import InputError, InputTypeError, RechunkWarning
from dask_sdc.graph.sources import make_source
from tests.graph.source_blocks import column, loaded, random_array, run_loader

CLIMATE = Path(iris_sample_data.path) / "A1B_north_america.nc"


@pytest.fixture
def climate() -> Iterator[xr.Dataset]:
    """Real model output, not yet read from its file."""
    with xr.open_dataset(CLIMATE, engine="h5netcdf") as dataset:
        yield dataset


@pytest.fixture
def temperature() -> np.ndarray[Any, Any]:
    """The same, read by another library."""
    import h5py

    with h5py.File(CLIMATE) as file:
        return file["air_temperature"][:]


def cube(chunks: Any = None) -> xr.DataArray:
    array = xr.DataArray(
        random_array((6, 4, 5), "f8"), dims=("time", "lat", "lon"), coords={"lat": [10.0, 20.0, 30.0, 40.0]}
    )
    return array if chunks is None else array.chunk(chunks)


@pytest.mark.parametrize("chunks", [None, {"time": 2}, {"time": 1, "lat": 4}])
@pytest.mark.parametrize(
    ("dim", "order"),
    [
        ("time", (0, 1, 2)),
        ("lon", (2, 0, 1)),
        (("time",), (0, 1, 2)),
        (("time", "lat"), (0, 1, 2)),
        (["lat", "time"], (1, 0, 2)),
        (("lon", "time"), (2, 0, 1)),
        (("time", "lat", "lon"), (0, 1, 2)),
        (("lon", "lat", "time"), (2, 1, 0)),
    ],
)
@pytest.mark.filterwarnings("ignore::dask_sdc.exceptions.RechunkWarning")
def test_sample_dimensions_come_first_in_the_order_given(chunks: Any, dim: Any, order: Any) -> None:
    x = cube(chunks)
    many = 1 if isinstance(dim, str) else len(dim)
    moved = np.transpose(x.values, order)
    expected = moved.reshape((-1, *moved.shape[many:]))
    source = make_source(x, dim=dim)
    assert source.shape == expected.shape[1:]
    assert column(source).tobytes() == expected.tobytes()


def test_rechunking_warns_once() -> None:
    with pytest.warns(RechunkWarning) as record:
        source = make_source(cube({"time": 2, "lat": 2}), dim="time")
    assert len(record) == len(source.warnings) == 1
    assert record[0].filename == __file__


def test_one_dimension_needs_no_name() -> None:
    assert make_source(xr.DataArray(np.arange(9.0), dims="t")).shape == ()
    dataset = xr.Dataset({"a": ("t", np.arange(9.0)), "b": ("t", np.arange(9))})
    source = make_source(dataset)
    assert source.shape == (2,)
    np.testing.assert_array_equal(column(source), np.c_[np.arange(9), np.arange(9)])


@pytest.mark.parametrize("lazy", [False, True])
def test_features_of_a_dataset(lazy: bool) -> None:
    x = cube()
    dataset = xr.Dataset(
        {
            "count": (("lat", "time"), np.arange(24, dtype="i2").reshape(4, 6)),
            "field": x.astype("f4"),
            "series": ("time", np.arange(6.0, dtype="f4")),
        }
    )
    source = make_source(dataset.chunk({"time": 2}) if lazy else dataset, dim=("time", "lat"))
    expected = np.concatenate(
        [
            dataset["count"].values.T.reshape(24, 1).astype("f4"),
            dataset["field"].values.reshape(24, 5),
            np.repeat(np.arange(6.0, dtype="f4"), 4)[:, None],
        ],
        axis=1,
    )
    assert source.dtype == np.float32  # int16 and float32
    assert column(source).tobytes() == expected.tobytes()


def test_integers_and_single_precision_are_promoted() -> None:
    dataset = xr.Dataset({"a": ("t", np.arange(4, dtype="i4")), "b": ("t", np.ones(4, "f4"))})
    assert make_source(dataset).dtype == np.float64
    assert make_source(dataset[["b"]]).dtype == np.float32


@pytest.mark.parametrize("chunks", [None, {"time": 2}])
def test_weights_are_repeated_along_missing_dimensions(chunks: Any) -> None:
    x = cube(chunks)
    area = np.cos(np.deg2rad(x.lat))
    source = make_source(x, weights=area, target=x.isel(lon=0), dim=("time", "lat"))
    assert source.target_shape == ()
    blocks = loaded(source)
    expected = np.tile(np.cos(np.deg2rad([10.0, 20, 30, 40])), 6)
    np.testing.assert_array_equal(np.concatenate([b.weights for b in blocks]), expected)
    np.testing.assert_array_equal(np.concatenate([b.target for b in blocks]), x.values[:, :, 0].ravel())


def test_plain_weights_go_with_labelled_data() -> None:
    source = make_source(cube({"time": 2}), weights=np.arange(6.0), dim="time")
    assert column(source, "weights").tolist() == list(range(6))


@pytest.mark.parametrize(
    ("data", "dim", "columns", "words"),
    [
        (cube(), None, {}, ["dim is needed", "('time', 'lat', 'lon')"]),
        (cube(), "level", {}, ["level", "('time', 'lat', 'lon')"]),
        (cube(), ("time", "level"), {}, ["['level']"]),
        (cube(), 3, {}, ["no dimension [3]"]),
        (cube(), (), {}, ["distinct"]),
        (cube(), ("time", "time"), {}, ["distinct"]),
        (cube().to_dataset(name="a"), None, {}, ["dim is needed"]),
        (cube().to_dataset(name="a"), "level", {}, ["level", "'time'"]),
        (xr.Dataset({"a": cube(), "b": 1.0}), "time", {}, ["variable 'b' of x", "ds[[...]]"]),
        (cube(), "time", {"weights": cube().isel(time=0)}, ["weights", "none of the sample"]),
        (cube(), "lat", {"weights": cube().lat[::-1]}, ["weights", "line up", "lat"]),
        (cube(), "time", {"weights": cube()[:5, 0, 0]}, ["weights", "line up", "time"]),
        (cube(), "time", {"target": cube()}, ["target", "(4, 5)"]),
        (cube()[:0], "time", {}, ["no samples"]),
    ],
)
def test_bad_labels_are_refused(data: Any, dim: Any, columns: Any, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        make_source(data, dim=dim, **columns)
    assert all(word in str(caught.value) for word in words), caught.value


class Quantity:
    """What xarray takes for an array of another library."""

    shape, ndim, dtype = (3,), 1, np.dtype("f8")
    __array_function__ = __array_ufunc__ = None


def test_other_arrays_are_refused() -> None:
    with pytest.raises(InputError, match="without data variables"):
        make_source(xr.Dataset(coords={"t": [1.0, 2.0]}), dim="t")
    times = xr.DataArray(np.array(["2020", "2021"], "M8[ns]"), dims="t")
    with pytest.raises(InputTypeError, match="datetime64"):
        make_source(times)
    with pytest.raises(InputTypeError, match="x holds a Quantity: expected a NumPy or Dask array"):
        make_source(xr.DataArray(Quantity(), dims="t"))


def test_missing_values_are_left_as_they_are() -> None:
    """xarray itself turns masks into NaN."""
    masked = xr.DataArray(da.ma.masked_array(da.arange(3.0), da.arange(3) == 1), dims="t")
    np.testing.assert_array_equal(column(make_source(masked)), [0.0, np.nan, 2.0])
    x = cube().where(cube() > 0)
    assert np.isnan(x.values).any()
    assert column(make_source(x, dim="time")).tobytes() == x.values.tobytes()


def test_real_file_is_read_by_the_workers(climate: xr.Dataset, temperature: Any) -> None:
    air = climate["air_temperature"]
    source = make_source(air, dim="time")
    assert len(source.collections()) == 1 and not air.variable._in_memory
    assert source.n_shards >= 8 and source.shape == (37, 49) and not source.shared
    assert column(source).tobytes() == temperature.tobytes()
    assert not air.variable._in_memory


def test_real_file_stacked_and_weighted(climate: xr.Dataset, temperature: Any) -> None:
    air = climate["air_temperature"].chunk({"time": 24})
    source = make_source(air, weights=np.cos(np.deg2rad(air.latitude)), dim=("time", "latitude", "longitude"))
    assert source.rows == (24 * 37 * 49,) * 10
    assert column(source).tobytes() == temperature.tobytes()
    weights = column(source, "weights").reshape(temperature.shape)
    np.testing.assert_array_equal(weights, np.broadcast_to(weights[:1, :, :1], weights.shape))
    np.testing.assert_allclose(weights[0, :, 0], np.cos(np.deg2rad(np.arange(15, 60.1, 1.25))), rtol=1e-6)


def test_real_dataset_names_the_variable_that_does_not_fit(climate: xr.Dataset) -> None:
    with pytest.raises(InputTypeError, match="variable 'time_bnds' of x has dtype object"):
        make_source(climate.drop_vars("latitude_longitude"), dim="time")
    with pytest.raises(InputError, match="variable 'latitude_longitude' of x has none of"):
        make_source(climate, dim="time")


def test_real_file_on_a_cluster(cluster4: Client, climate: xr.Dataset, temperature: Any) -> None:
    loader = make_source(climate["air_temperature"], dim="time").batch([1, 3])
    blocks = dict(cluster4.submit(run_loader, loader, pure=False).result(timeout=250))
    np.testing.assert_array_equal(blocks[1].x, temperature[30:60])
    np.testing.assert_array_equal(blocks[3].x, temperature[90:120])
