"""CUDA kernels of the statistics, run on the host, against long double and against the CPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dask_sdc.statistics.kernels.cuda.moments as moments_launch
from dask_sdc.statistics import mixture_model
from dask_sdc.statistics.gaussian import components_of
from dask_sdc.statistics.kernels import covariance, histogram, kmeans, mixture, moments
from dask_sdc.statistics.kernels.cuda.histogram import Table, cuda_count
from dask_sdc.statistics.kernels.cuda.kmeans import assign, cuda_lloyd
from dask_sdc.statistics.kernels.cuda.mixture import cuda_density, cuda_expectation
from dask_sdc.statistics.kernels.cuda.moments import Plan
from dask_sdc.statistics.kernels.histogram import Axis
from tests.cuda.emulated import COMPILER, HostDevice

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")

Array = np.ndarray[Any, Any]

DTYPES = ["f4", "f8"]


def unaligned(x: Array) -> Array:
    """Return a copy whose first element is on no boundary of 16 bytes."""
    buffer = np.empty(x.nbytes + 32, np.uint8)
    begin = -buffer.ctypes.data % 16 + x.itemsize
    copy = buffer[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def of_all_schedules(run: Callable[[HostDevice], Any]) -> Any:
    """Return what a run gives, the same bits for every order of threads and blocks and every grid."""
    found = [run(HostDevice(schedule, most)) for schedule, most in ((0, None), (1, 1), (7, 3))]
    as_bytes = [_bytes(result) for result in found]
    assert as_bytes[0] == as_bytes[1] == as_bytes[2]
    return found[0]


def _bytes(result: Any) -> list[bytes]:
    values = result.values() if isinstance(result, dict) else result
    return [np.asarray(value).tobytes() for value in values if value is not None]


# -- moments -------------------------------------------------------------------------------------


def exact_moments(x: Array, weights: Array | None, skipna: bool) -> tuple[dict[str, Array], dict[str, Array]]:
    """Moments in long double, and the sums of the magnitudes of their terms."""
    here = ~np.isnan(x) if skipna else np.ones(x.shape, bool)
    w = here * (np.ones(len(x)) if weights is None else weights)[:, None].astype(np.longdouble)
    wide = np.where(here, x, 0).astype(np.longdouble)
    weight = w.sum(axis=0)
    total = (w * wide).sum(axis=0)
    d = (wide - total / np.where(weight > 0, weight, 1)) * here
    values = {"weight": weight, "sum": total, **{f"M{k}": (w * d**k).sum(axis=0) for k in (2, 3, 4)}}
    sizes = {"weight": weight, "sum": (w * abs(wide)).sum(axis=0)}
    sizes |= {f"M{k}": (w * abs(d) ** k).sum(axis=0) for k in (2, 3, 4)}
    return values, sizes


SHAPES = [
    (1, 1), (2, 1), (5000, 1), (4097, 3), (700, 7), (300, 16), (64, 129), (33, 257), (40, 1024), (35, 1027),
    (3, 2048),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("weighted", "skipna"), [(False, False), (True, False), (False, True), (True, True)])
def test_moments_are_those_of_long_double(
    shape: tuple[int, int], dtype: str, weighted: bool, skipna: bool
) -> None:
    rng = np.random.default_rng(sum(shape))
    x = rng.normal(3, 5, shape).astype(dtype)
    if skipna:
        x[rng.random(shape) < 0.2] = np.nan
    w = rng.uniform(0.1, 3, len(x)) if weighted else None
    got = moments.device_moments(HostDevice(7), x, w, True, skipna)
    values, sizes = exact_moments(x, w, skipna)
    there = ~np.isnan(x) if skipna else np.ones(shape, bool)
    assert np.array_equal(got["count"], there.sum(axis=0))
    for field, value in values.items():
        mine = got[field].astype(np.longdouble) + (got["low"] if field == "sum" else 0)
        assert np.all(abs(mine - value) <= 4e-15 * sizes[field] + 1e-35), field
    huge = np.finfo(np.float64).max
    assert np.array_equal(got["min"], np.where(there, x, huge).min(axis=0, initial=huge))
    assert np.array_equal(got["max"], np.where(there, x, -huge).max(axis=0, initial=-huge))


@pytest.mark.parametrize("skipna", [False, True])
@pytest.mark.parametrize("high", [False, True])
def test_moments_are_the_state_of_the_cpu(skipna: bool, high: bool) -> None:
    x = np.random.default_rng(1).normal(size=(600, 5)).astype("f4")
    x[::7, 2] = np.nan
    x[:, 4] = np.nan if skipna else 1.0
    numba = moments.block_moments(x, None, high, skipna)
    cuda = moments.device_moments(HostDevice(), x, None, high, skipna)
    assert list(cuda) == list(numba)
    for field, value in numba.items():
        assert (cuda[field].dtype, cuda[field].shape) == (value.dtype, value.shape)
        scale = {"M3": numba["M2"], "low": numba["M2"]}.get(field, 0 * numba["M2"])
        close = abs(cuda[field] - value) <= 1e-13 * (abs(value) + np.nan_to_num(scale))
        assert np.all(close | (np.isnan(value) & np.isnan(cuda[field]))), field


@pytest.mark.parametrize("dtype", DTYPES)
def test_moments_do_not_depend_on_schedule_or_grid(dtype: str) -> None:
    x = np.random.default_rng(2).normal(1e4, 1, (3000, 3)).astype(dtype)
    of_all_schedules(lambda device: moments.device_moments(device, x, None, True, False))
    w = np.random.default_rng(3).random(3000)
    of_all_schedules(lambda device: moments.device_moments(device, unaligned(x), w, True, True))


@pytest.mark.parametrize("dtype", ["f8", "i8"])
def test_mean_1e9_variance_1(dtype: str) -> None:
    x = np.random.default_rng(4).normal(size=(20_000, 2)) * (1 if dtype == "f8" else 1000)
    x = (x + 1e9).astype(dtype) if dtype == "f8" else (1 << 60) + np.round(x).astype(dtype)
    got = moments.device_moments(HostDevice(), x, None, True, False)
    shift = 10**9 if dtype == "f8" else 1 << 60
    d = (x - x.dtype.type(shift)).astype(np.longdouble)
    mean = d.mean(axis=0)
    np.testing.assert_allclose(got["M2"], ((d - mean) ** 2).sum(axis=0).astype(float), rtol=1e-12)
    total = (got["sum"].astype(np.longdouble) - np.longdouble(shift) * len(x)) + got["low"]
    assert np.all(abs(total / len(x) - mean) < 2e-7)


def test_a_pilot_that_misleads_is_found_out() -> None:
    x = np.random.default_rng(5).normal(size=(3001, 2))
    x[[i * 3000 // 15 for i in range(16)], 1] = 1e8
    device = HostDevice()
    got = moments.device_moments(device, x, None, True, False)
    assert sum(name.startswith("moments_lanes") for name in device.launched) == 2
    values, sizes = exact_moments(x, None, False)
    for field in ("M2", "M3", "M4"):
        assert np.all(abs(got[field] - values[field]) <= 1e-13 * sizes[field])


def test_infinite_and_missing_samples_are_not_hidden() -> None:
    x = np.ones((300, 4), "f4")
    x[10, 1], x[20, 2], x[30, 3] = np.nan, np.inf, -np.inf
    got = moments.device_moments(HostDevice(), x, None, True, False)
    numba = moments.block_moments(x, None, True, False)
    for field in ("sum", "M2", "M4"):
        assert np.array_equal(np.isfinite(got[field]), np.isfinite(numba[field])), field
    assert np.array_equal(got["min"], numba["min"]) and np.array_equal(got["max"], numba["max"])


@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "f2", "i4", "u4", "i8", "u8", ">f4", ">f8"])
def test_any_real_type_and_layout(dtype: str) -> None:
    x = np.random.default_rng(6).integers(0, 2, (400, 6)).astype(dtype)
    expected = moments.block_moments(x, None, True, False)
    for block in (x, np.asfortranarray(x), np.repeat(x, 2, axis=1)[:, ::2]):
        got = moments.device_moments(HostDevice(), block, None, True, False)
        for field in ("count", "sum", "min", "max"):
            assert np.array_equal(got[field], expected[field]), field
        np.testing.assert_allclose(got["M2"], expected["M2"], rtol=1e-13)


def test_converted_blocks_are_merged_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    import dask_sdc.statistics.kernels.cuda.shapes as shapes

    monkeypatch.setattr(shapes, "workspace", lambda: 2400)
    x = np.random.default_rng(7).integers(-1000, 1000, (333, 3)).astype("i2")
    got = moments.device_moments(HostDevice(), x, None, True, False)
    expected = moments.block_moments(x, None, True, False)
    assert np.array_equal(got["count"], expected["count"]) and np.array_equal(got["sum"], expected["sum"])
    np.testing.assert_allclose(got["M4"], expected["M4"], rtol=1e-13)


@given(
    n=st.integers(1, 10**9),
    p=st.integers(1, 5000),
    itemsize=st.sampled_from([4, 8]),
    aligned=st.booleans(),
)
def test_a_plan_covers_a_block(n: int, p: int, itemsize: int, aligned: bool) -> None:
    plan = Plan.of(n, p, itemsize, aligned)
    assert plan.width <= 256 * plan.vector and plan.rows % plan.per_step == 0
    assert plan.parts * plan.rows >= n > (plan.parts - 1) * plan.rows
    assert plan.strips * plan.width >= p and (plan.strips == 1 or plan.per_step == 1)
    # Loads of 16 bytes stay on their boundaries, from step to step, part to part and strip to strip.
    for distance in (plan.per_step * p, plan.rows * p, plan.width if plan.strips > 1 else 0):
        assert distance % plan.vector == 0
    assert plan.vector == 1 or aligned
    assert plan.parts * plan.strips <= 2 * 1024


# -- histogram -----------------------------------------------------------------------------------

EDGES = {
    "uniform": np.linspace(-2, 2, 101),
    "uneven": np.array([-3.0, -2.9, -1e-3, 0.0, 1e-30, 0.1, 0.1 + 1e-9, 2.5]),
    "logarithmic": np.geomspace(1e-6, 1e6, 61),
    "signs": np.array([-np.inf, -1.0, 0.0, 1.0, np.inf]),
    "two": np.array([-1.0, 1.0]),
    "many": np.linspace(-4, 4, 4001),
    "huge": np.array([-1e300, -1e38, 0.0, 1e39, 1e300]),
}


def samples(rng: np.random.Generator, edges: Array, n: int, dtype: str) -> Array:
    """Return values all over the bins, on their edges and beside them, beyond, infinite and NaN."""
    near = rng.choice(edges, n).astype(dtype)
    kinds = [
        rng.normal(size=n).astype(dtype),
        near,
        np.nextafter(near, np.dtype(dtype).type(np.inf)),
        np.nextafter(near, np.dtype(dtype).type(-np.inf)),
        np.exp(rng.normal(0, 8, n)).astype(dtype),
        np.full(n, np.nan, dtype),
        rng.choice([np.inf, -np.inf, 0.0, -0.0], n).astype(dtype),
    ]
    return np.array(kinds, dtype=dtype)[rng.integers(0, len(kinds), n), np.arange(n)]


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_counts_are_exact(name: str, dtype: str) -> None:
    edges, rng = EDGES[name], np.random.default_rng(len(name))
    axes = (Axis.of(edges),)
    for n in (1, 5, 3001):
        x = samples(rng, edges, n, dtype)[:, None]
        expected = histogram.count_block(x, axes, None, 1)[0]
        for block in (x, unaligned(x)):
            counts = of_all_schedules(lambda device, b=block: cuda_count(device, b, (edges,), None, 1))[0]
            assert counts.dtype == np.int64
            assert np.array_equal(counts, expected)
    finite = np.isfinite(x)
    assert expected[1:-2].sum() == np.histogram(x[finite], edges)[0].sum() or not np.isfinite(edges).all()


@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=20, unique=True),
    st.lists(st.floats(width=32), min_size=1, max_size=40),
    st.sampled_from(DTYPES),
)
@settings(max_examples=60)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_counts_of_any_edges(edges: list[float], values: list[float], dtype: str) -> None:
    rising = np.unique(np.array(edges) + 0.0)
    if len(rising) < 2:
        return
    x = np.array(values, dtype)[:, None]
    counts, _ = cuda_count(HostDevice(), x, (rising,), None, 1)
    slots = np.searchsorted(rising, x[:, 0].astype(np.float64), side="right") - (x[:, 0] == rising[-1])
    slots = np.where(np.isnan(x[:, 0]), len(rising) + 1, slots)
    assert np.array_equal(counts, np.bincount(slots, minlength=len(rising) + 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_joint_and_weighted_counts(dtype: str) -> None:
    rng = np.random.default_rng(8)
    edges = EDGES["uniform"], EDGES["uneven"]
    x = np.stack([samples(rng, e, 700, dtype) for e in edges], axis=1)
    axes = tuple(Axis.of(e) for e in edges)
    w = np.exp(rng.normal(0, 5, 700))
    for weights in (None, w):
        counts, sums = of_all_schedules(lambda device, w=weights: cuda_count(device, x, edges, w, 1))
        expected = histogram.count_block(x, axes, weights, 1)
        assert np.array_equal(counts, expected[0])
        if weights is not None:
            np.testing.assert_allclose(sums, expected[1], rtol=1e-13)
            assert np.array_equal(sums > 0, counts > 0)


def test_weights_that_several_samples_share() -> None:
    rng = np.random.default_rng(9)
    x, w = rng.normal(size=(60, 1)), rng.uniform(0.5, 2, 20)
    edges = EDGES["two"]
    got = cuda_count(HostDevice(), x, (edges,), w, 3)
    expected = histogram.count_block(x, (Axis.of(edges),), w, 3)
    assert np.array_equal(got[0], expected[0])
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-14)


def test_tables_of_logarithmic_edges_need_few_comparisons() -> None:
    for dtype in DTYPES:
        assert Table.of(np.geomspace(1e-6, 1e6, 1001), np.dtype(dtype)).steps <= 2
        assert Table.of(np.linspace(0, 1, 1001), np.dtype(dtype)).steps == 1


# -- scatter -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (300, 33), (150, 130)], ids=str)
@pytest.mark.parametrize("dtype", ["f4", "f8", "i8"])
@pytest.mark.parametrize("weighted", [False, True])
def test_scatter_is_that_of_long_double(shape: tuple[int, int], dtype: str, weighted: bool) -> None:
    rng = np.random.default_rng(shape[1])
    x = rng.normal(100, 3, shape)
    x = (1 << 60) + x.astype("i8") if dtype == "i8" else x.astype(dtype)
    w = rng.uniform(0.1, 2, len(x)) if weighted else None
    got = covariance.scatter_of(covariance.DeviceCentred(HostDevice(), x, w))
    wide = (x - (1 << 60) if dtype == "i8" else x).astype(np.longdouble)
    mass = (np.ones(len(x)) if w is None else w).astype(np.longdouble)
    mean = mass @ wide / mass.sum()
    z = (wide - mean) * np.sqrt(mass)[:, None]
    scatter = np.einsum("ri,rj->ij", z, z)
    spread = np.sqrt(np.outer(scatter.diagonal(), scatter.diagonal())) + 1e-20
    assert np.all(abs(got["scatter"] - scatter) <= 1e-13 * spread)
    assert np.array_equal(got["scatter"], got["scatter"].T)
    # Sums of integers near 2**60 need more digits than a long double has.
    offset = 1 << 60 if dtype == "i8" else 0
    for j, total in enumerate(mass @ wide):
        mine = (
            Fraction(float(got["sum"][j])) + Fraction(float(got["low"][j])) - Fraction(got["weight"]) * offset
        )
        assert abs(float(mine) - float(total)) <= 1e-13 * float(mass.sum()) * 300
    if shape[1] >= covariance.CHECKED_FROM:
        vector = covariance.check_vector(shape[1])
        np.testing.assert_allclose(got["check"], got["scatter"] @ vector, rtol=0, atol=1e-9)
    else:
        assert got["check"] is None


def test_scatter_does_not_depend_on_schedule_or_grid_and_pieces_are_compensated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import dask_sdc.statistics.kernels.cuda.scatter as scatter

    monkeypatch.setattr(scatter, "_PIECE", 64)
    x = np.random.default_rng(10).normal(1e6, 1, (400, 4))
    got = of_all_schedules(lambda device: covariance.scatter_of(covariance.DeviceCentred(device, x, None)))
    np.testing.assert_allclose(
        got["scatter"], covariance.block_scatter(x, None)["scatter"], rtol=0, atol=1e-10
    )


# -- k-means -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k", "d"), [(1, 1, 1), (129, 3, 2), (700, 9, 5), (300, 17, 70), (200, 40, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_round_of_kmeans_is_that_of_the_cpu(n: int, k: int, d: int, dtype: str, weighted: bool) -> None:
    rng = np.random.default_rng(n + k)
    x = np.round(rng.normal(size=(n, d)), 1).astype(dtype)  # many ties
    centres = np.round(rng.normal(size=(k, d)), 1)
    w = rng.random(n) + 0.1 if weighted else None
    label, distance = assign(HostDevice(7), x, centres)
    assert np.array_equal(label, kmeans.labels(x, centres))
    exact = ((x[:, None].astype(np.longdouble) - centres[label][:, None]) ** 2).sum(axis=(1, 2))
    np.testing.assert_allclose(distance, exact.astype(float), rtol=1e-14)
    got = of_all_schedules(lambda device: cuda_lloyd(device, x, w, centres))
    for name, mine, numba in zip(kmeans.LloydSums._fields, got, kmeans.lloyd(x, w, centres), strict=True):
        assert (mine.shape, mine.dtype) == (numba.shape, numba.dtype)
        np.testing.assert_allclose(mine, numba, rtol=1e-12, atol=1e-12, err_msg=name)
    if not weighted:
        assert np.array_equal(got[0], np.bincount(label, minlength=k))


def test_nan_goes_to_the_first_cluster_as_on_the_cpu() -> None:
    x = np.random.default_rng(11).normal(size=(200, 3))
    x[5, 1] = np.nan
    centres = x[[0, 50, 100]]
    label, distance = assign(HostDevice(), x, centres)
    assert np.array_equal(label, kmeans.labels(x, centres)) and np.isnan(distance[5])


def test_of_equally_far_rows_the_first_is_kept() -> None:
    x = np.array([[1.0], [-2.0], [2.0]] * 300)
    got = kmeans.LloydSums(*of_all_schedules(lambda device: cuda_lloyd(device, x, None, np.zeros((1, 1)))))
    assert got.far_rows.tolist() == [[-2.0]] and got.far_distance.tolist() == [4.0]


# -- mixture -------------------------------------------------------------------------------------


def components(kind: str, k: int, d: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    factor = rng.normal(size=(k, d, d)) / np.sqrt(d) + np.eye(d)
    covariances = factor @ np.swapaxes(factor, 1, 2) + 0.1 * np.eye(d)
    given = {
        "full": covariances,
        "tied": covariances[0],
        "diag": np.diagonal(covariances, axis1=1, axis2=2),
        "spherical": rng.uniform(0.5, 2, k),
    }[kind]
    model = mixture_model(
        rng.dirichlet(np.ones(k)), rng.normal(0, 2, (k, d)), covariances=given, covariance_type=kind
    )
    return components_of(model, kind)


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
@pytest.mark.parametrize(("n", "k", "d"), [(1, 1, 1), (300, 3, 4), (600, 11, 3), (150, 2, 40)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_an_expectation_is_that_of_the_cpu(
    kind: str, n: int, k: int, d: int, dtype: str, weighted: bool
) -> None:
    rng = np.random.default_rng(n)
    model, x = components(kind, k, d, n), rng.normal(0, 2, (n, d)).astype(dtype)
    w = rng.random(n) + 0.1 if weighted else None
    got = of_all_schedules(lambda device: cuda_expectation(device, model, x, w))
    numba = mixture.expectation(model, x, w)
    for name, mine, other in zip(numba._fields, got, numba, strict=True):
        size = np.max(np.abs(other))
        np.testing.assert_allclose(mine, other, rtol=1e-11, atol=1e-12 * size, err_msg=name)
        assert np.shape(mine) == np.shape(other)
    of_density = cuda_density(HostDevice(), model, x, w)
    for mine, other in zip(of_density, mixture.density(model, x, w), strict=True):
        assert mine == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize("kind", ["diag", "full"])
def test_responsibilities_are_those_of_long_double(kind: str) -> None:
    """Far from the means, where log p is large and its rounding must not be an error of responsibilities."""
    model, x = components(kind, 3, 2, 1), np.random.default_rng(12).normal(200, 20, (400, 2)).astype("f4")
    got = mixture.Expectation(*cuda_expectation(HostDevice(), model, x, None))
    wide, joint = x.astype(np.longdouble), []
    for c in range(3):
        z = wide - model.means[c]
        y = z * model.factors[0, c] if kind == "diag" else np.einsum("ri,ij->rj", z, model.factors[c])
        joint.append(model.constants[c] - 0.5 * (y * y).sum(axis=1))
    table = np.array(joint, np.longdouble)
    top = table.max(axis=0)
    relative = np.exp(table - top)
    r = relative / relative.sum(axis=0)
    log_p = top + np.log(relative.sum(axis=0))
    assert abs(got.log_density - log_p.sum()) <= 1e-13 * abs(log_p).sum()
    assert abs(got.largest - abs(log_p).max()) <= 1e-13 * abs(log_p).max()
    size = r @ abs(table).max(axis=0)
    assert np.all(abs(got.responsibility - r.sum(axis=1)) <= 1e-14 * (size + len(x)))
    assert np.sum(got.responsibility) == pytest.approx(len(x), rel=1e-14)


@pytest.mark.parametrize("kind", ["diag", "full", "tied"])
def test_pieces_of_a_block_add_up(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    import dask_sdc.statistics.kernels.cuda.mixture as launch

    model, x = components(kind, 4, 3, 2), np.random.default_rng(13).normal(size=(500, 3))
    whole = cuda_expectation(HostDevice(), model, x, None)
    monkeypatch.setattr(launch, "_PIECE", 400)
    for mine, other in zip(cuda_expectation(HostDevice(), model, x, None), whole, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-12, atol=1e-12)


def test_nan_ends_up_in_the_sums() -> None:
    model, x = components("diag", 3, 2, 3), np.random.default_rng(14).normal(size=(100, 2))
    x[7, 1] = np.nan
    got = mixture.Expectation(*cuda_expectation(HostDevice(), model, x, None))
    assert np.isnan(got.log_density) and np.isnan(got.responsibility).all()


def test_kernels_lie_beside_their_launches() -> None:
    folder = Path(moments_launch.__file__).parent
    assert all(path.with_suffix(".py").exists() for path in folder.glob("*.cu"))
