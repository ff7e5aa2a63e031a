"""Statistics of blocks on a device: against the kernels of the CPU, long double, and themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dask_sdc.evidence.seal import seal_statistic
from dask_sdc.statistics import Covariance, Histogram, LinearRegression, Moments, ShardInfo, Statistic
from dask_sdc.statistics.kmeans import KMeansStatistic
from dask_sdc.statistics.mixture import MixtureExpectation
from tests.cuda.emulated import COMPILER
from tests.gpu.backends import BACKENDS, Array, Backend, backend_of
from tests.gpu.fakes import DeviceArray
from tests.statistics.test_mixture import random_model

FEATURES = 7
EDGES = np.linspace(-2, 2, 101)

STATISTICS: dict[str, Statistic] = {
    "moments": Moments(),
    "moments to the second": Moments(order=2),
    "moments that skip NaN": Moments(skipna=True),
    "covariance": Covariance(),
    "regression": LinearRegression(),
    "histogram": Histogram(EDGES),
    "uneven histogram": Histogram(np.array([-3.0, -0.5, -0.25, 0.0, 0.01, 4.0])),
    "k-means": KMeansStatistic(np.random.default_rng(1).normal(size=(5, FEATURES))),
    **{
        f"mixture, {kind}": MixtureExpectation(
            kind, random_model(np.random.default_rng(2), kind, 3, FEATURES)
        )
        for kind in ("full", "tied", "diag", "spherical")
    },
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    return backend_of(request.param, monkeypatch)


def block(rows: int, dtype: str, offset: float = 0.0) -> Array:
    return (offset + np.random.default_rng(rows).normal(size=(rows, FEATURES))).astype(dtype)


def columns_of(name: str, rows: int, weighted: bool) -> dict[str, Array]:
    rng = np.random.default_rng(3)
    columns = {"weights": np.round(rng.random(rows), 2)} if weighted else {}
    return columns | ({"target": rng.normal(size=rows)} if name == "regression" else {})


def state_of(
    statistic: Statistic, x: Any, backend: Backend | None = None, **columns: Array
) -> dict[str, Any]:
    """Return the state of one block: of NumPy's, or of one that is put on a backend first."""
    target = columns["target"].shape[1:] if "target" in columns else None
    info = ShardInfo(x.shape[1:], x.dtype, target_shape=target)
    if backend is not None:
        x, columns = backend.put(x), {name: backend.put(column) for name, column in columns.items()}
    found: dict[str, Any] = statistic.update(statistic.init(info), x, **columns)
    return found


def bits(state: dict[str, Any]) -> bytes:
    """Return what would be sealed; arrays that are not NumPy's have no encoding."""
    return seal_statistic(0, state, rows=1).payload


def assert_close(got: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-10) -> None:
    assert got.keys() == expected.keys()
    for field, value in expected.items():
        if value is None or isinstance(value, tuple | str):
            assert (got[field] is None) == (value is None)
            continue
        exact = np.asarray(value).dtype.kind in "iu"
        size = max(float(np.max(np.abs(value), initial=0.0)), 1.0)
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": rtol, "atol": rtol / 10 * size}
        np.testing.assert_allclose(got[field], value, err_msg=field, **tolerance)


@pytest.mark.parametrize("rows", [301, *(pytest.param(n, marks=pytest.mark.gpu) for n in (1, 2, 1000))])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", STATISTICS)
def test_a_state_is_that_of_the_cpu(
    backend: Backend, name: str, dtype: str, weighted: bool, rows: int
) -> None:
    statistic, x, columns = STATISTICS[name], block(rows, dtype), columns_of(name, rows, weighted)
    if "NaN" in name:
        x[::3, 1] = np.nan
    got = state_of(statistic, x, backend, **columns)
    assert_close(got, state_of(statistic, x, **columns))
    assert list(statistic.invariants(got)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", STATISTICS)
def test_large_blocks_too(name: str, dtype: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, rows = backend_of("cupy", monkeypatch), 1_000_003
    statistic, x, columns = STATISTICS[name], block(rows, dtype), columns_of(name, rows, weighted)
    if "NaN" in name:
        x[::9, 1] = np.nan
    first, again = (state_of(statistic, x, backend, **columns) for _ in range(2))
    assert bits(first) == bits(again)
    assert_close(first, state_of(statistic, x, **columns), rtol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [130, 257, 1027])
def test_wide_blocks_too(features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of("cupy", monkeypatch)
    x = np.random.default_rng(4).normal(3, 1, (20_001, features)).astype("f4")
    for statistic in (Moments(), Covariance(), Histogram(EDGES)):
        first, again = (state_of(statistic, x, backend) for _ in range(2))
        assert bits(first) == bits(again)
        assert_close(first, state_of(statistic, x), rtol=1e-9)


@pytest.mark.parametrize("name", STATISTICS)
def test_the_same_block_gives_the_same_bits(backend: Backend, name: str) -> None:
    x, columns = block(777, "f4"), columns_of(name, 777, True)
    states = [state_of(STATISTICS[name], x, backend, **columns) for _ in range(3)]
    assert len({bits(state) for state in states}) == 1


@pytest.mark.parametrize("name", STATISTICS)
def test_an_empty_block_is_none_at_all(backend: Backend, name: str) -> None:
    statistic, columns = STATISTICS[name], columns_of(name, 0, False)
    target = () if name == "regression" else None
    nothing = statistic.init(ShardInfo((FEATURES,), np.dtype("f4"), target_shape=target))
    assert bits(state_of(statistic, block(0, "f4"), backend, **columns)) == bits(nothing)


@pytest.mark.parametrize("name", ["moments", "covariance", "regression", "k-means", "mixture, full"])
def test_weights_of_zero_are_no_samples(backend: Backend, name: str) -> None:
    x, columns = block(400, "f8"), columns_of(name, 400, True)
    columns["weights"][::3] = 0.0
    kept = columns["weights"] > 0
    x[~kept] = np.nan
    some = {column: values[kept] for column, values in columns.items()}
    got = state_of(STATISTICS[name], x, backend, **columns)
    assert_close(got, state_of(STATISTICS[name], x[kept], **some), rtol=1e-12)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    "name", ["moments", "covariance", "histogram", "uneven histogram", "k-means", "mixture, full"]
)
def test_columns_stay_on_the_device(name: str, zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither weights nor the rows that they pick come to the host or go back."""
    backend, rows, travelled = backend_of("emulated", monkeypatch), 3001, []
    x, columns = block(rows, "f4"), columns_of(name, rows, True)
    columns["weights"] = np.where(np.arange(rows) % 3, columns["weights"] + 0.5, 0.0 if zeros else 1.0)
    x_there, w_there = backend.put(x), backend.put(columns["weights"])
    get, asarray = DeviceArray.get, backend.xp.asarray
    monkeypatch.setattr(DeviceArray, "get", lambda a: travelled.append(a.size) or get(a))
    monkeypatch.setattr(
        backend.xp,
        "asarray",
        lambda a, **k: travelled.append(np.size(a) * (type(a) is not DeviceArray)) or asarray(a, **k),
        raising=False,
    )
    got = state_of(STATISTICS[name], x_there, weights=w_there)
    assert travelled and max(travelled) < rows // 3
    assert_close(got, state_of(STATISTICS[name], x, **columns))


@pytest.mark.parametrize("dtype", ["int8", "int64", "float16", "bool", ">f4"])
def test_other_types_and_layouts_are_converted(backend: Backend, dtype: str) -> None:
    if backend.name == "cupy" and dtype.startswith(">"):
        pytest.skip("CuPy has no arrays of foreign byte order")
    x = np.random.default_rng(5).integers(0, 2, (300, FEATURES)).astype(dtype)
    expected = state_of(Moments(), x)
    for layout in (x, np.asfortranarray(x)):
        assert_close(state_of(Moments(), layout, backend), expected, rtol=1e-13)


# -- against long double -------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "offset"), [("float32", 10.0), ("float64", 0.0), ("float64", 1e9)])
@pytest.mark.parametrize("weighted", [False, True])
def test_moments_are_those_of_long_double(
    backend: Backend, dtype: str, offset: float, weighted: bool
) -> None:
    x = block(1501, dtype, offset)
    w = columns_of("", len(x), True)["weights"] + 0.5 if weighted else np.ones(len(x))
    got = state_of(Moments(), x, backend, **({"weights": w} if weighted else {}))
    # About the offset: long double has no digits to spare for the mean of what is so far from zero.
    mass, near = w.astype(np.longdouble)[:, None], x.astype(np.longdouble) - offset
    d = near - (mass * near).sum(axis=0) / mass.sum()
    for order in (2, 3, 4):
        size = (mass * abs(d) ** order).sum(axis=0)
        error = abs(got[f"M{order}"] - (mass * d**order).sum(axis=0)) / size
        assert float(error.max()) < 1e-13, order
    assert np.array_equal(got["min"], x.min(axis=0)) and np.array_equal(got["max"], x.max(axis=0))
    terms = mass * x.astype(np.longdouble)
    total = got["sum"].astype(np.longdouble) + got["low"]
    assert float((abs(total - terms.sum(axis=0)) / abs(terms).sum(axis=0)).max()) < 1e-15


def test_scatter_is_that_of_long_double(backend: Backend) -> None:
    x = block(2003, "f8", 1e6)
    got = state_of(Covariance(), x, backend)
    d = x.astype(np.longdouble)
    d -= d.mean(axis=0)
    exact = np.einsum("ri,rj->ij", d, d)
    size = np.sqrt(np.outer(exact.diagonal(), exact.diagonal()))
    assert float(np.max(abs(got["scatter"] - exact) / size)) < 1e-13
    assert np.array_equal(got["scatter"], got["scatter"].T)


def test_counts_are_exact_on_the_edges_too(backend: Backend) -> None:
    rng = np.random.default_rng(6)
    x = np.concatenate([rng.normal(size=2000), rng.choice(EDGES, 500), [np.nan, np.inf, -np.inf]])
    statistic = Histogram(EDGES)
    info = ShardInfo((), x.dtype)
    got = statistic.update(statistic.init(info), backend.put(x))
    expected = statistic.update(statistic.init(info), x)
    assert bits(got) == bits(expected)
    inside, _ = np.histogram(x[np.isfinite(x)], EDGES)
    assert int(statistic.finalize(got).counts.sum()) == int(inside.sum())


# -- from a source to what is sealed -------------------------------------------------------------


@pytest.mark.parametrize("name", STATISTICS)
def test_what_is_sealed_is_on_the_host(backend: Backend, name: str) -> None:
    """A state that holds an array of the device could not be encoded."""
    statistic, x, columns = STATISTICS[name], block(50, "f4"), columns_of(name, 50, False)
    state = state_of(statistic, x, backend, **columns)
    assert all(type(v) is np.ndarray for v in state.values() if hasattr(v, "dtype") and np.ndim(v))
    merged = statistic.combine(state, state_of(statistic, x, backend, **columns))
    assert list(statistic.invariants(merged)) == []
    statistic.finalize(merged)
