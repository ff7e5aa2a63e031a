from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.statistics import Histogram, HistogramResult, ShardInfo
from dask_sdc.statistics.kernels.histogram import Axis, _array_api_count, count_block


def state_of(statistic: Histogram, x: np.ndarray, parts: int = 3, **columns: Any) -> dict[str, Any]:
    info = ShardInfo(x.shape[1:], x.dtype)
    state = statistic.init(info)
    for rows in np.array_split(np.arange(len(x)), parts):
        taken = {name: column[rows] for name, column in columns.items()}
        state = statistic.combine(state, statistic.update(statistic.init(info), x[rows], **taken))
    assert list(statistic.invariants(state)) == []
    return state


def count(statistic: Histogram, x: np.ndarray, **columns: Any) -> HistogramResult:
    return statistic.finalize(state_of(statistic, x, **columns))


EDGES = {
    "uniform": np.linspace(-2, 2, 41),
    "decimal": np.arange(0, 1.05, 0.1),
    "many": np.linspace(-1, 3, 5001),
    "far": np.linspace(1e9, 1e9 + 1, 31),
    "at rounding": 1e9 + np.arange(9) * 2.0**-23,
    "one bin": np.array([0.0, 1.0]),
    "uneven": np.sort(np.random.default_rng(0).normal(size=31)),
    "logarithmic": np.logspace(-12, 12, 97),
    "both signs": np.concatenate((-np.logspace(3, -3, 20), [0.0], np.logspace(-3, 3, 20))),
    "clustered": np.sort(np.append(0.1 + np.random.default_rng(1).normal(size=60) * 1e-12, [-3, 3])),
    "infinite": np.array([-np.inf, -1.0, 0.0, 2.0, np.inf]),
    "huge": np.array([-1.7e308, -1.0, 1.7e308]),
    "subnormal": np.arange(6) * 5e-324,
    "integers": np.arange(-5, 6),
}


def hard_values(edges: np.ndarray) -> np.ndarray:
    """Edges, their neighbours, what lies between and outside."""
    edges = np.asarray(edges, np.float64)
    finite = edges[np.isfinite(edges)]
    rng = np.random.default_rng(2)
    with np.errstate(over="ignore", invalid="ignore"):
        near = [np.nextafter(edges, np.inf), np.nextafter(edges, -np.inf), edges]
        middles = edges[:-1] / 2 + edges[1:] / 2
        low, high = finite[0], finite[-1]
        inside = low + (high / 2 - low / 2) * 2 * rng.uniform(-0.1, 1.1, 3000)
    special = [0.0, -0.0, np.inf, -np.inf, 1e308, -1e308, 5e-324]
    values = np.concatenate([*near, middles, inside, rng.normal(size=1500), special])
    return rng.permutation(values[~np.isnan(values)])


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i4", "?"])
def test_counts_equal_numpy(name: str, dtype: str) -> None:
    edges = EDGES[name]
    x = hard_values(edges)
    with np.errstate(over="ignore", invalid="ignore"):
        x = x.astype(dtype) if dtype[0] in "f" else np.clip(x, -9, 9).astype(dtype)
    result = count(Histogram(edges), x)
    with np.errstate(over="ignore"):
        expected = np.histogram(x.astype("f8"), edges)[0]
    assert np.array_equal(result.counts, expected)
    wide = x.astype("f8")
    assert result.below[0] == (wide < edges[0]).sum() and result.above[0] == (wide > edges[-1]).sum()
    assert result.counts.dtype == np.int64 and result.total == len(x)


@given(
    st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40, unique=True),
    st.lists(st.floats(-1.1e3, 1.1e3) | st.just(float("nan")), max_size=30),
)
def test_any_edges(edges: list[float], values: list[float]) -> None:
    rising = np.array(sorted(set(edges)))
    x = np.concatenate((np.array(values, float), rising, np.nextafter(rising, np.inf)))
    if not np.all(np.diff(rising) > 0):
        return
    result = count(Histogram(rising), x)
    assert np.array_equal(result.counts, np.histogram(x[~np.isnan(x)], rising)[0])
    assert result.nan[0] == np.isnan(x).sum()


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(1, 200))
def test_any_uniform_edges(low: float, width: float, bins: int) -> None:
    edges = np.linspace(low, low + width, bins + 1)
    if not np.all(np.diff(edges) > 0):
        return
    rng = np.random.default_rng(bins)
    plain = low + width * rng.uniform(-0.1, 1.1, 2000)
    x = np.concatenate((plain, hard_values(edges)))
    assert np.array_equal(count(Histogram(edges), x).counts, np.histogram(x, edges)[0])
    # Without any value on an edge: the way that compares nothing.
    assert np.array_equal(count(Histogram(edges), plain).counts, np.histogram(plain, edges)[0])


def test_uniform_edges_need_no_comparison() -> None:
    assert Axis.of(np.linspace(-4, 4, 51)).aligned < -4
    for name in ("uneven", "logarithmic", "far", "infinite"):
        assert np.isnan(Axis.of(np.asarray(EDGES[name], float)).aligned), name


@pytest.mark.parametrize("weighted", [False, True])
def test_joint_counts_equal_numpy(weighted: bool) -> None:
    rng = np.random.default_rng(3)
    edges = [EDGES["uniform"], EDGES["uneven"], EDGES["decimal"]]
    x = rng.normal(size=(4000, 3))
    x[::7] = np.stack([rng.choice(e, len(x[::7])) for e in edges], axis=1)
    w = rng.uniform(0.5, 2, 4000)
    result = count(Histogram(edges), x, **({"weights": w} if weighted else {}))
    assert np.array_equal(result.counts, np.histogramdd(x, edges)[0])
    if weighted:
        np.testing.assert_allclose(result.sums, np.histogramdd(x, edges, weights=w)[0], rtol=1e-12)
    else:
        assert result.sums is None
    for d, e in enumerate(edges):
        assert (result.below[d], result.above[d]) == ((x[:, d] < e[0]).sum(), (x[:, d] > e[-1]).sum())


def test_nan_in_any_coordinate() -> None:
    x = np.array([[0.5, 0.5], [np.nan, 0.5], [0.5, np.nan], [np.nan, np.nan], [2.0, np.nan]])
    result = count(Histogram([[0.0, 1.0], [0.0, 1.0]]), x)
    assert (
        result.counts.tolist() == [[1]] and result.nan.tolist() == [2, 3] and result.above.tolist() == [1, 0]
    )


def test_weights() -> None:
    rng = np.random.default_rng(4)
    x, w = rng.normal(size=(3000, 4)), rng.integers(0, 3, 3000)
    result = count(Histogram(EDGES["uniform"]), x, weights=w)
    each = np.repeat(w[:, None], 4, axis=1)
    assert np.array_equal(result.sums, np.histogram(x, EDGES["uniform"], weights=each)[0])
    assert np.array_equal(result.counts, np.histogram(x[w > 0], EDGES["uniform"])[0])
    expected = np.histogram(x, EDGES["uniform"], weights=each, density=True)[0]
    np.testing.assert_allclose(result.density(), expected, rtol=1e-12)
    plain = count(Histogram(EDGES["uniform"]), x).density()
    np.testing.assert_allclose(plain, np.histogram(x, EDGES["uniform"], density=True)[0], rtol=1e-12)


def test_density_of_joint_histogram() -> None:
    x = np.random.default_rng(5).normal(size=(500, 2))
    edges = [EDGES["uneven"], np.array([-1.0, 0.0, 3.0])]
    expected = np.histogramdd(x, edges, density=True)[0]
    np.testing.assert_allclose(count(Histogram(edges), x).density(), expected, rtol=1e-12)


def test_blocks_without_weights_weigh_one() -> None:
    statistic = Histogram([0.0, 1.0, 2.0])
    state = state_of(statistic, np.array([0.5, 1.5]), parts=1)
    merged = statistic.combine(state, state_of(statistic, np.array([0.5]), 1, weights=np.array([3.0])))
    assert statistic.finalize(merged).sums.tolist() == [4.0, 1.0]
    empty = statistic.update(state, np.zeros(0), weights=np.zeros(0))
    assert statistic.finalize(empty).sums.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["uniform", "uneven", "logarithmic"])
def test_memory_layout_does_not_change_counts(name: str) -> None:
    x = np.random.default_rng(6).normal(size=(5000, 2))
    edges = EDGES[name]
    expected = np.histogram(x, edges)[0]
    frozen = x.copy()
    frozen.flags.writeable = False
    for other in (np.asfortranarray(x), np.repeat(x, 2, axis=0)[::2], x.astype(">f8"), frozen):
        assert np.array_equal(count(Histogram(edges), other).counts, expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_array_api_path_agrees_with_numba(weighted: bool) -> None:
    rng = np.random.default_rng(7)
    axes = tuple(Axis.of(EDGES[name]) for name in ("uniform", "uneven"))
    x = rng.normal(size=(600, 2))
    x[:20, 0], x[10:40, 1] = rng.choice(EDGES["uniform"], 20), np.nan
    w = rng.uniform(0.5, 1, 600) if weighted else None
    numba = count_block(x, axes, w, 1)
    generic = _array_api_count(x, axes, w, 1, tuple(axis.slots for axis in axes))
    assert np.array_equal(numba[0], generic[0])
    if weighted:
        np.testing.assert_allclose(numba[1], generic[1], rtol=1e-13)
    else:
        assert numba[1] is generic[1] is None


def test_large_histograms() -> None:
    rng = np.random.default_rng(8)
    edges = [np.linspace(-1, 1, 301), np.linspace(-1, 1, 301)]
    x = rng.normal(size=(5000, 2))
    assert np.array_equal(count(Histogram(edges), x).counts, np.histogramdd(x, edges)[0])


def test_empty_blocks() -> None:
    for x in (np.zeros(0), np.zeros((0, 3)), np.zeros((4, 0))):
        result = count(Histogram([0.0, 1.0]), x)
        assert result.total == 0 and result.counts.tolist() == [0]


def test_declarations_compare_and_pickle() -> None:
    one = Histogram(np.linspace(0, 1, 5))
    assert one == pickle.loads(pickle.dumps(one)) and hash(one) == hash(Histogram([0, 0.25, 0.5, 0.75, 1]))
    assert one != Histogram([np.linspace(0, 1, 5)]) and one != Histogram(np.linspace(0, 2, 5)) and one != 3


@pytest.mark.parametrize(
    "edges", [[0.0], [], [1, 0], [0, 0, 1], [0, np.nan, 1], [[0, 1], [1]], np.zeros((2, 2)), [[0, 1], [2, 1]]]
)
def test_refuses_edges(edges: Any) -> None:
    with pytest.raises(InputError, match="rising edges"):
        Histogram(edges)


@pytest.mark.parametrize("edges", ["ab", [0, "b"], [[0, 1], [{}, 2]]])
def test_refuses_edges_that_are_no_numbers(edges: Any) -> None:
    with pytest.raises(InputTypeError, match="edges that are real numbers"):
        Histogram(edges)


@pytest.mark.parametrize("edges", [3, 3.5, None])
def test_refuses_a_number_of_bins(edges: Any) -> None:
    with pytest.raises(InputError, match=f"rising edges, got {edges}"):
        Histogram(edges)


def test_refuses_input() -> None:
    with pytest.raises(InputError, match="slots"):
        Histogram([np.arange(2000.0)] * 3)
    with pytest.raises(InputTypeError, match="real samples"):
        Histogram([0, 1]).init(ShardInfo((), np.dtype("c16")))
    with pytest.raises(InputError, match=r"samples of shape \(2,\), got \(3,\)"):
        Histogram([[0, 1], [0, 1]]).init(ShardInfo((3,), np.dtype("f8")))
    state = Histogram([0, 1]).init(ShardInfo((), np.dtype("f8")))
    with pytest.raises(InputError, match="shape"):
        Histogram([0, 1]).update(state, np.zeros((3, 1)))
    with pytest.raises(InputError, match="weights"):
        Histogram([0, 1]).update(state, np.zeros(3), weights=np.array([1.0, -1.0, 1.0]))


@pytest.mark.parametrize(
    ("damage", "claim"),
    [
        (lambda s: s["counts"].__setitem__(1, s["counts"][1] + 1), "add up"),
        (lambda s: s["counts"].__setitem__(1, -1), ">= 0"),
        (lambda s: s.update(total=7), "add up to 7"),
        (lambda s: s["sums"].__setitem__(1, 0.0), "weight in exactly"),
    ],
)
def test_invariants_see_damage(damage: Any, claim: str) -> None:
    statistic = Histogram([0.0, 1.0])
    state = state_of(statistic, np.full(5, 0.5), weights=np.full(5, 2.0))
    damage(state)
    assert any(claim in line for line in statistic.invariants(state))
