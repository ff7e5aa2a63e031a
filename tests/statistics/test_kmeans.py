"""k-means against scikit-learn, brute force and the array-API path; the sample that starts it."""

from __future__ import annotations

import math
from typing import Any

import array_api_compat.numpy as array_api
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans as Peer

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.statistics.base import ShardInfo, Statistic
from dask_sdc.statistics.kernels.kmeans import array_api_lloyd, labels, lloyd
from dask_sdc.statistics.kmeans import KMeans, KMeansStart, KMeansStatistic, seed_centres
from dask_sdc.statistics.sample import RowSample


def clusters(seed: int, n: int, k: int = 4, d: int = 3) -> np.ndarray:
    """Return rows around k centres."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(k, d)) * 5)[rng.integers(0, k, n)] + rng.normal(size=(n, d))


def accumulate(statistic: Statistic, blocks: list[np.ndarray], weights: Any = None) -> Any:
    state = None
    for shard, x in enumerate(blocks):
        start = statistic.init(ShardInfo(x.shape[1:], x.dtype, shard))
        columns = {} if weights is None else {"weights": weights[shard]}
        part = statistic.update(start, x, **columns)
        state = part if state is None else statistic.combine(state, part)
    return statistic.finalize(state)


def fit(estimator: KMeans, blocks: list[np.ndarray], rounds: int, weights: Any = None) -> Any:
    model = estimator.initialise(ShardInfo(blocks[0].shape[1:], blocks[0].dtype))
    if isinstance(model, Statistic):
        model = accumulate(model, blocks, weights)
    for _ in range(rounds):
        model = estimator.maximise(model, accumulate(estimator.statistic(model), blocks, weights))
    return model


def brute_force(x: np.ndarray, w: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return labels, counts, sums and inertia in long double, straight from the definition."""
    x, centres = x.astype(np.longdouble), centres.astype(np.longdouble)
    distance = ((x[:, None, :] - centres) ** 2).sum(axis=2)
    label = np.argmin(distance, axis=1)
    one = np.eye(len(centres))[label] * w[:, None]
    sums = np.stack([one[:, k] @ (x - centre) for k, centre in enumerate(centres)])
    return label, one.sum(axis=0), sums, one.T @ distance[np.arange(len(x)), label] if len(x) else one.sum(0)


@pytest.mark.parametrize(("n", "k", "d"), [(1, 1, 1), (128, 3, 4), (1000, 7, 5), (9000, 3, 17)])
def test_round_against_long_double(n: int, k: int, d: int) -> None:
    rng = np.random.default_rng([n, k])
    x, w, centres = rng.normal(size=(n, d)), rng.random(n) + 0.1, rng.normal(size=(k, d))
    got = lloyd(x, w, centres)
    label, counts, sums, inertia = brute_force(x, w, centres)
    assert np.array_equal(labels(x, centres), label)
    np.testing.assert_allclose(got.counts, counts, rtol=1e-13)
    np.testing.assert_allclose(got.sums, sums.astype(float), rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(got.inertia, inertia.astype(float), rtol=1e-13)
    distance = ((x - centres[label]) ** 2).sum(axis=1)
    for j in range(k):
        inside = np.flatnonzero(label == j)
        if len(inside):
            farthest = inside[np.argmax(distance[inside])]
            assert np.array_equal(got.far_rows[j], x[farthest])
            assert got.far_weight[j] == w[farthest]
        else:
            assert got.far_distance[j] == -1.0


@given(
    n=st.integers(0, 300),
    k=st.integers(1, 6),
    d=st.integers(1, 9),
    weighted=st.booleans(),
    lattice=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_array_api_path_agrees_with_numba(
    n: int, k: int, d: int, weighted: bool, lattice: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, centres = rng.normal(size=(n, d)), rng.normal(size=(k, d))
    if lattice:  # many exact ties
        x, centres = np.round(x), np.round(centres)
    w = rng.random(n) if weighted else None
    a, b = lloyd(x, w, centres), array_api_lloyd(array_api, x, w, centres)
    for name, left, right in zip(a._fields, a, b, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-11, atol=1e-11, err_msg=name)


def test_ties_go_to_the_lower_index() -> None:
    centres = np.array([[1.0], [-1.0], [1.0]])
    assert labels(np.array([[0.0], [1.0], [-3.0]]), centres).tolist() == [0, 0, 1]


def test_labels_do_not_depend_on_contraction() -> None:
    """Each distance is the plain left-to-right sum of rounded squares, on whatever CPU."""
    rng = np.random.default_rng(0)
    x, centre = rng.normal(size=(500, 7)), rng.normal(size=(1, 7))
    expected = []
    for row in x.tolist():
        total = 0.0
        for value, c in zip(row, centre[0].tolist(), strict=True):
            z = value - c
            total = total + z * z
        expected.append(total)
    got = [lloyd(x[i : i + 1], None, centre).inertia[0] for i in range(len(x))]
    assert got == expected


@pytest.mark.parametrize("rounds", [1, 2, 8])
def test_same_start_gives_the_centres_of_scikit_learn(rounds: int) -> None:
    x = clusters(3, 3000, k=5)
    start = x[[1, 50, 900, 1500, 2900]]
    peer = Peer(5, init=start, n_init=1, algorithm="lloyd", max_iter=rounds, tol=0.0).fit(x)
    model = fit(KMeans(5, init=start), [x[:1000], x[1000:1000], x[1000:]], rounds)
    np.testing.assert_allclose(model["centres"], peer.cluster_centers_, rtol=1e-9, atol=1e-12)
    result = KMeans(5, init=start).result(model)
    assert np.array_equal(result.predict(x), peer.predict(x))
    last = accumulate(KMeansStatistic(model["centres"]), [x])
    np.testing.assert_allclose(last.inertia, -peer.score(x), rtol=1e-12)


def test_weighted_fit_of_scikit_learn() -> None:
    x, w = clusters(4, 1000), np.random.default_rng(5).random(1000)
    start = x[:4]
    peer = Peer(4, init=start, n_init=1, algorithm="lloyd", max_iter=6, tol=0.0).fit(x, sample_weight=w)
    model = fit(KMeans(4, init=start), [x], 6, [w])
    np.testing.assert_allclose(model["centres"], peer.cluster_centers_, rtol=1e-9)


def test_an_empty_cluster_takes_the_farthest_row_as_in_scikit_learn() -> None:
    x = clusters(6, 500)
    start = np.concatenate([x[:3], [[1e3, 1e3, 1e3]]])
    peer = Peer(4, init=start, n_init=1, algorithm="lloyd", max_iter=1, tol=0.0).fit(x)
    model = fit(KMeans(4, init=start), [x[:100], x[100:]], 1)
    np.testing.assert_allclose(model["centres"], peer.cluster_centers_, rtol=1e-9)
    assert model["counts"][3] == 1.0
    assert model["counts"].sum() == 500.0


def test_clusters_stay_empty_where_there_is_nothing_to_give() -> None:
    start = np.array([[1.0], [5.0], [7.0]])
    model = fit(KMeans(3, init=start), [np.ones((10, 1))], 3)
    assert model["centres"].tolist() == start.tolist()
    assert model["counts"].tolist() == [10.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_non_finite_and_overflowing_samples_show(bad: float) -> None:
    x = clusters(1, 300)
    x[131, 1] = bad
    sums = lloyd(x, None, x[:4])
    assert not np.all(np.isfinite(sums.inertia))


def test_invariants_see_flips() -> None:
    x = clusters(1, 400)
    statistic = KMeansStatistic(x[:4].copy())
    state = statistic.update(statistic.init(ShardInfo((3,), x.dtype)), x)
    assert list(statistic.invariants(state)) == []
    for name in ("counts", "inertia", "far_distance", "far_rows"):
        broken = {key: np.copy(value) for key, value in state.items()}
        broken[name].reshape(-1).view(np.uint64)[1] ^= np.uint64(1 << 60)
        assert list(statistic.invariants(broken)), name


@given(seed=st.integers(0, 2**32), n=st.integers(0, 300), scale=st.sampled_from([0.0, 1e-160, 1.0, 1e150]))
def test_invariants_raise_no_false_alarm(seed: int, n: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    x, centres = rng.normal(size=(n, 3)) * scale, rng.normal(size=(4, 3)) * scale
    statistic = KMeansStatistic(centres)
    for columns in ({}, {"weights": rng.random(n) * 10.0 ** rng.integers(-9, 9, n)}):
        state = statistic.update(statistic.init(ShardInfo((3,), x.dtype)), x, **columns)
        assert list(statistic.invariants(state)) == []


# -- the start -----------------------------------------------------------------------------------


def sample(statistic: RowSample, x: np.ndarray, shard: int = 0, seed: int = 0, **columns: Any) -> Any:
    return statistic.update(statistic.init(ShardInfo(x.shape[1:], x.dtype, shard, seed)), x, **columns)


def test_sample_does_not_depend_on_how_a_shard_is_split() -> None:
    x, statistic = np.arange(1000.0)[:, None], RowSample(30)
    whole = sample(statistic, x)
    parts = statistic.init(ShardInfo((1,), x.dtype))
    for start, stop in ((0, 1), (1, 400), (400, 400), (400, 1000)):
        parts = statistic.update(parts, x[start:stop])
    assert np.array_equal(whole["rows"], parts["rows"])
    assert np.array_equal(whole["keys"], parts["keys"])
    assert whole["stream"] == parts["stream"]


def test_sample_depends_on_seeds_and_shard_alone() -> None:
    x = np.arange(500.0)[:, None]
    first = sample(RowSample(20), x)["rows"]
    assert np.array_equal(first, sample(RowSample(20), x)["rows"])
    others = [
        sample(RowSample(20, 1), x),
        sample(RowSample(20), x, shard=1),
        sample(RowSample(20), x, seed=1),
    ]
    assert all(not np.array_equal(first, other["rows"]) for other in others)


def test_sample_is_drawn_in_proportion_to_weights() -> None:
    x = np.arange(2000.0)[:, None]
    w = np.where(x[:, 0] < 1000, 1.0, 9.0)
    heavy = [np.mean(sample(RowSample(20), x, shard, weights=w)["rows"] >= 1000) for shard in range(400)]
    # 8,000 draws at 0.9 (a little less without replacement): four standard deviations are 0.0134.
    assert abs(np.mean(heavy) - 0.9) < 0.0145


def test_sample_never_draws_a_row_of_weight_zero() -> None:
    x = np.arange(10.0)[:, None]
    state = sample(RowSample(20), x, weights=np.where(x[:, 0] == 4, 1.0, 0.0))
    assert state["rows"].tolist() == [[4.0]]


@pytest.mark.parametrize("field", ["keys", "rows"])
def test_sample_invariants_see_a_lost_row(field: str) -> None:
    statistic = RowSample(20)
    state = sample(statistic, np.arange(50.0)[:, None])
    assert list(statistic.invariants({**state, field: state[field][1:]}))
    assert list(statistic.invariants({**state, "keys": state["keys"][::-1]}))
    assert list(statistic.invariants({**state, "count": 3}))


def test_seeding_takes_distinct_rows() -> None:
    rows = np.array([[0.0], [0.0], [0.0], [9.0], [20.0]])
    centres = seed_centres(rows, 3, np.random.default_rng(0))
    assert sorted(centres[:, 0].tolist()) == [0.0, 9.0, 20.0]
    assert len(seed_centres(rows, 5, np.random.default_rng(0))) == 5


def test_own_start_finds_the_clusters() -> None:
    rng = np.random.default_rng(2)
    centres = np.array([[0.0, 0.0], [30.0, 0.0], [0.0, 30.0]])
    blocks = [centres[rng.integers(0, 3, n)] + rng.normal(size=(n, 2)) for n in (400, 0, 2, 300)]
    model = fit(KMeans(3), blocks, 5)
    found = model["centres"][np.lexsort(model["centres"].T[::-1].round())]
    np.testing.assert_allclose(found, [[0, 0], [0, 30], [30, 0]], atol=0.4)


# -- refusals and results ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"n_clusters": 0},
        {"n_clusters": True},
        {"n_clusters": "3"},
        {"n_clusters": 2, "seed": -1},
        {"n_clusters": 3, "sample_size": 2},
        {"n_clusters": 2, "init": "random"},
        {"n_clusters": 2, "init": [[0.0]]},
        {"n_clusters": 2, "init": [[0.0], [math.nan]]},
        {"n_clusters": 2, "init": object()},
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        KMeans(**arguments)


def test_bad_samples_are_refused() -> None:
    estimator = KMeans(2, init=[[0.0], [1.0]])
    with pytest.raises(InputError, match="shape"):
        estimator.initialise(ShardInfo((2,), np.dtype("f8")))
    with pytest.raises(InputTypeError, match="real"):
        estimator.initialise(ShardInfo((1,), np.dtype("M8[s]")))
    with pytest.raises(InputError, match="at least 2 rows"):
        fit(KMeans(2), [np.zeros((1, 3))], 0)
    with pytest.raises(InputError, match="shape"):
        estimator.result(estimator.initialise(ShardInfo((1,), np.dtype("f8")))).predict(np.zeros((3, 2)))


def test_given_centres_are_copied() -> None:
    start = np.array([[0.0], [1.0]])
    estimator = KMeans(2, init=start)
    start[0] = 7.0
    assert estimator.init[0, 0] == 0.0


def test_convergence_is_relative() -> None:
    estimator = KMeans(2)
    assert estimator.converged(1e9, 1e9 - 1, 1e-6)
    assert not estimator.converged(1e-9, 0.5e-9, 1e-6)


def test_start_needs_as_many_rows_as_clusters_over_all_shards() -> None:
    model = accumulate(KMeansStart(256, 0, 3), [np.full((1, 2), float(i)) for i in range(3)])
    assert sorted(model["centres"][:, 0].tolist()) == [0.0, 1.0, 2.0]
