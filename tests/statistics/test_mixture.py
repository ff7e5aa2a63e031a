"""Gaussian mixtures against long double, scikit-learn and the array-API path."""

from __future__ import annotations

import math
import warnings
from typing import Any

import array_api_compat.numpy as array_api
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture as Peer

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.statistics.base import ShardInfo, Statistic
from dask_sdc.statistics.gaussian import COVARIANCE_TYPES, components_of, mixture_model, sensitivity
from dask_sdc.statistics.kernels.mixture import (
    array_api_density,
    array_api_expectation,
    density,
    expectation,
)
from dask_sdc.statistics.kernels.mixture_cpu import _exp, _log
from dask_sdc.statistics.mixture import GaussianMixture, MixtureDensity, MixtureExpectation, MixtureStart

U = 2.0**-53


def random_model(rng: np.random.Generator, covariance_type: str, k: int, d: int) -> dict[str, np.ndarray]:
    """Return a mixture whose components overlap, with condition numbers of about ten."""
    root = rng.normal(size=(k, d, d)) * 0.3 + np.eye(d)
    full = root @ np.swapaxes(root, 1, 2) + 0.1 * np.eye(d)
    covariances = {
        "full": full,
        "tied": full[0],
        "diag": np.diagonal(full, axis1=1, axis2=2),
        "spherical": full[:, 0, 0],
    }[covariance_type]
    weights = rng.random(k) + 0.1
    means = rng.normal(size=(k, d)) * 2
    return mixture_model(
        weights / weights.sum(), means, covariances=covariances, covariance_type=covariance_type
    )


def run(statistic: Statistic, x: Any, weights: Any = None) -> Any:
    """Return the state of one block."""
    info = ShardInfo(tuple(x.shape[1:]), x.dtype)
    return statistic.update(statistic.init(info), x, **({} if weights is None else {"weights": weights}))


def long_double(covariance_type: str, model: Any, x: np.ndarray, w: np.ndarray) -> dict[str, Any]:
    """Return the expectation step in long double, straight from the definition."""
    c = components_of(model, covariance_type)
    x, w = x.astype(np.longdouble), w.astype(np.longdouble)
    k, d = c.means.shape
    z = [x - mean.astype(np.longdouble) for mean in c.means]
    precision = model["precisions_cholesky"].astype(np.longdouble)
    joint = np.empty((len(x), k), dtype=np.longdouble)
    for i in range(k):
        if covariance_type in ("diag", "spherical"):
            y = z[i] * precision[i]
            log_det = np.sum(np.log(np.broadcast_to(precision[i], (d,))))
        else:
            factor = precision[i] if covariance_type == "full" else precision
            y, log_det = z[i] @ factor, np.sum(np.log(np.diag(factor)))
        constant = np.log(model["weights"][i].astype(np.longdouble)) + log_det
        joint[:, i] = constant - np.longdouble(d) / 2 * np.log(2 * np.longdouble(np.pi)) - (y * y).sum(1) / 2
    top = joint.max(axis=1)
    log_p = top + np.log(np.exp(joint - top[:, None]).sum(axis=1))
    r = w[:, None] * np.exp(joint - log_p[:, None])
    if covariance_type == "tied":
        centred = x - c.shift.astype(np.longdouble)
        second = (w[:, None] * centred).T @ centred
    elif covariance_type == "full":
        second = np.stack([(r[:, i, None] * z[i]).T @ z[i] for i in range(k)])
    else:
        second = np.stack([r[:, i] @ (z[i] * z[i]) for i in range(k)])
    return {
        "responsibility": r.sum(axis=0),
        "first": np.stack([r[:, i] @ z[i] for i in range(k)]),
        "second": second,
        "log_density": w @ log_p,
        "condition": np.abs(log_p) @ r,
        "largest": np.abs(log_p).max(),
    }


# -- exp and log ---------------------------------------------------------------------------------


def test_exp_is_within_one_ulp() -> None:
    x = -np.random.default_rng(0).random(4000) * np.repeat([1e-8, 1.0, 30.0, 700.0], 1000)
    exact = np.exp(x.astype(np.longdouble))
    got = np.array([_exp(value) for value in x.tolist()])
    assert np.max(np.abs(got - exact) / np.spacing(np.exp(x))) < 1.0


@pytest.mark.parametrize(
    ("x", "expected"),
    [(0.0, 1.0), (-0.0, 1.0), (-708.5, 0.0), (-745.0, 0.0), (-1e308, 0.0), (-math.inf, 0.0)],
)
def test_exp_of_special_values(x: float, expected: float) -> None:
    assert _exp(x) == expected


def test_exp_and_log_keep_nan() -> None:
    assert math.isnan(_exp(math.nan))
    assert math.isnan(_log(math.nan))


def test_log_is_within_one_ulp() -> None:
    rng = np.random.default_rng(1)
    x = np.concatenate([1 + rng.random(2000) * 1e-6, 1 + rng.random(2000) * 9, np.exp(rng.random(2000) * 30)])
    exact = np.log(x.astype(np.longdouble))
    got = np.array([_log(value) for value in x.tolist()])
    assert np.max(np.abs(got - exact) / np.spacing(np.log(x))) < 1.0
    assert _log(1.0) == 0.0


# -- the expectation step ------------------------------------------------------------------------


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
@pytest.mark.parametrize(("n", "k", "d"), [(1, 1, 1), (127, 2, 3), (1000, 5, 4), (513, 3, 17)])
def test_expectation_against_long_double(covariance_type: str, n: int, k: int, d: int) -> None:
    rng = np.random.default_rng([n, k, d])
    model = random_model(rng, covariance_type, k, d)
    x, w = rng.normal(size=(n, d)) * 2, rng.random(n) + 0.5
    statistic = MixtureExpectation(covariance_type, model)
    state = run(statistic, x, w)
    magnitudes, terms = statistic.magnitudes(state), statistic.terms(state)
    for name, exact in long_double(covariance_type, model, x, w).items():
        error = np.abs(np.asarray(state[name]) - exact)
        assert np.all(error <= 8 * math.sqrt(terms) * U * magnitudes[name]), name
        # And in absolute terms: magnitudes that are too large would make the line above idle.
        assert np.max(error) <= 1e-12 * np.max(np.abs(exact)) + 1e-13 * n, name


@given(
    covariance_type=st.sampled_from(COVARIANCE_TYPES),
    n=st.integers(0, 300),
    k=st.integers(1, 6),
    d=st.integers(1, 9),
    weighted=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    apart=st.sampled_from([1.0, 1e4]),
    seed=st.integers(0, 2**32),
)
def test_array_api_path_agrees_with_numba(
    covariance_type: str, n: int, k: int, d: int, weighted: bool, scale: float, apart: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    model = random_model(rng, covariance_type, k, d)
    model["means"] *= apart
    x = model["means"][rng.integers(0, k, n)] + rng.normal(size=(n, d)) * scale
    w = rng.random(n) + 0.01 if weighted else None
    statistic = MixtureExpectation(covariance_type, model)
    components = components_of(model, covariance_type)
    a, b = expectation(components, x, w), array_api_expectation(array_api, components, x, w)
    weight = float(n) if w is None else float(np.sum(w))
    magnitudes = statistic.magnitudes({"count": n, "weight": weight, **a._asdict()})
    root = math.sqrt(max(n * d, 1))
    for name, left, right in zip(a._fields, a, b, strict=True):
        bound = 16 * root * U * magnitudes[name] + 1e-300
        assert np.all(np.abs(np.asarray(left) - right) <= bound), name
    of_array_api = array_api_density(array_api, components, x, w)
    for name, left, right in zip(of_array_api._fields, density(components, x, w), of_array_api, strict=True):
        magnitude = np.sum(magnitudes["condition"]) if name == "condition" else magnitudes[name]
        assert abs(left - right) <= 16 * root * U * magnitude + 1e-300, name


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
def test_density_and_expectation_agree(covariance_type: str) -> None:
    rng = np.random.default_rng(7)
    model = random_model(rng, covariance_type, 3, 5)
    x, w = rng.normal(size=(700, 5)), rng.random(700)
    of_step = run(MixtureExpectation(covariance_type, model), x, w)
    of_density = run(MixtureDensity(covariance_type, model), x, w)
    assert of_step["log_density"] == of_density["log_density"]
    assert of_step["largest"] == of_density["largest"]


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "int64", "bool", ">f8"])
def test_dtypes_are_read_exactly(dtype: str) -> None:
    rng = np.random.default_rng(3)
    model = random_model(rng, "full", 3, 4)
    x = (rng.normal(size=(300, 4)) * 2).astype(dtype)
    got = run(MixtureExpectation("full", model), x)
    expected = run(MixtureExpectation("full", model), x.astype(np.float64))
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, 1e-13, 1e-13, err_msg=name)


def test_an_unaligned_block_gives_equal_bits() -> None:
    rng = np.random.default_rng(3)
    model = random_model(rng, "diag", 3, 4)
    x = rng.normal(size=(10000, 4))
    raw = np.empty(x.nbytes + 1, np.uint8)[1:].view(np.float64).reshape(x.shape)
    raw[...] = x
    assert not raw.flags.aligned
    a, b = (run(MixtureExpectation("diag", model), block) for block in (x, raw))
    assert all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
def test_non_finite_and_overflowing_samples_show(covariance_type: str, bad: float) -> None:
    rng = np.random.default_rng(5)
    model = random_model(rng, covariance_type, 3, 4)
    for row in (0, 130, 299):
        x = rng.normal(size=(300, 4))
        x[row, row % 4] = bad
        state = run(MixtureExpectation(covariance_type, model), x)
        assert not math.isfinite(state["log_density"])
        assert not np.all(np.isfinite(state["second"]))
        assert not math.isfinite(run(MixtureDensity(covariance_type, model), x)["log_density"])


def test_far_away_samples_keep_their_responsibility() -> None:
    model = mixture_model([0.5, 0.5], [[0.0], [1.0]], covariances=[[1.0], [1.0]], covariance_type="diag")
    statistic = MixtureExpectation("diag", model)
    state = run(statistic, np.array([[1e6], [-1e6], [1e100]]))
    # 1e100 and 1e100 - 1 are one number: that sample is shared.
    np.testing.assert_allclose(state["responsibility"], [1.5, 1.5], rtol=1e-15)
    assert list(statistic.invariants(state)) == []


def test_a_component_of_weight_zero_takes_nothing() -> None:
    model = mixture_model([1.0, 0.0], [[0.0], [1.0]], covariances=[[1.0], [1.0]], covariance_type="diag")
    state = run(MixtureExpectation("diag", model), np.linspace(-3, 3, 50)[:, None])
    assert state["responsibility"].tolist() == [50.0, 0.0]


def test_moments_far_from_zero_stay_accurate() -> None:
    rng = np.random.default_rng(11)
    x = 1e9 + rng.normal(size=(20000, 2))
    start = {"weights": [1.0], "means": [[1e9, 1e9]], "covariances": [[1.0, 1.0]]}
    for covariance_type, covariances in (("diag", [[1.0, 1.0]]), ("full", [np.eye(2)]), ("tied", np.eye(2))):
        estimator = GaussianMixture(1, covariance_type, 0.0, {**start, "covariances": covariances})
        model = fit(estimator, [x], 2)
        exact = np.var(x.astype(np.longdouble), axis=0)
        got = model["covariances"]
        got = got[0] if covariance_type == "diag" else np.diag(np.reshape(got, (2, 2)))
        np.testing.assert_allclose(got, exact.astype(float), rtol=1e-9)


# -- invariants ----------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
def test_invariants_see_a_flipped_exponent(covariance_type: str) -> None:
    rng = np.random.default_rng(13)
    statistic = MixtureExpectation(covariance_type, random_model(rng, covariance_type, 3, 4))
    state = run(statistic, rng.normal(size=(500, 4)) * 2)
    assert list(statistic.invariants(state)) == []
    flagged = {}
    for name in ("responsibility", "first", "second"):
        hits = 0
        for i in range(state[name].size):
            broken = {key: np.copy(value) for key, value in state.items()}
            broken[name].reshape(-1).view(np.uint64)[i] ^= np.uint64(1 << 58)
            hits += bool(list(statistic.invariants(broken)))
        flagged[name] = hits / state[name].size
    assert flagged["responsibility"] == 1.0
    # A flip that makes a number small can look like a true one; one that makes it large cannot.
    assert flagged["first"] >= 0.5
    assert flagged["second"] >= 0.5


def test_invariants_see_an_asymmetric_matrix_and_a_lost_sample() -> None:
    rng = np.random.default_rng(17)
    statistic = MixtureExpectation("full", random_model(rng, "full", 3, 4))
    state = run(statistic, rng.normal(size=(500, 4)))
    skew = {**state, "second": state["second"].copy()}
    skew["second"][1, 0, 2] *= 1 + 1e-15
    assert any("symmetric" in line for line in statistic.invariants(skew))
    assert any("sum to" in line for line in statistic.invariants({**state, "weight": 499.0}))


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
@given(
    seed=st.integers(0, 2**32), n=st.integers(0, 400), scale=st.sampled_from([0.0, 1e-160, 1e-8, 1.0, 1e8])
)
def test_invariants_raise_no_false_alarm(covariance_type: str, seed: int, n: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    model = random_model(rng, covariance_type, int(rng.integers(1, 6)), int(rng.integers(1, 6)))
    d = model["means"].shape[1]
    x = model["means"][0] + rng.normal(size=(n, d)) * scale
    w = rng.random(n) * 10.0 ** rng.integers(-12, 12, n)
    statistic = MixtureExpectation(covariance_type, model)
    for weights in (None, w):
        assert list(statistic.invariants(run(statistic, x, weights))) == []
        of_density = MixtureDensity(covariance_type, model)
        assert list(of_density.invariants(run(of_density, x, weights))) == []


# -- fits ----------------------------------------------------------------------------------------


def fit(estimator: GaussianMixture, blocks: list[np.ndarray], rounds: int, weights: Any = None) -> Any:
    """Run some rounds over blocks from the estimator's own start."""
    model = estimator.initialise(ShardInfo(blocks[0].shape[1:], blocks[0].dtype))
    if isinstance(model, Statistic):
        model = accumulate(model, blocks, weights)
    for _ in range(rounds):
        model = estimator.maximise(model, accumulate(estimator.statistic(model), blocks, weights))
    return model


def accumulate(statistic: Statistic, blocks: list[np.ndarray], weights: Any = None) -> Any:
    state = None
    for shard, x in enumerate(blocks):
        start = statistic.init(ShardInfo(x.shape[1:], x.dtype, shard))
        columns = {} if weights is None else {"weights": weights[shard]}
        part = statistic.update(start, x, **columns)
        state = part if state is None else statistic.combine(state, part)
    return statistic.finalize(state)


def clusters(seed: int, n: int, d: int = 4) -> np.ndarray:
    """Return rows around three centres."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(3, d)) * 3
    return centres[rng.integers(0, 3, n)] + rng.normal(size=(n, d)) @ (
        rng.normal(size=(d, d)) * 0.4 + np.eye(d)
    )


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
@pytest.mark.parametrize("rounds", [1, 3, 20])
def test_same_start_gives_the_parameters_of_scikit_learn(covariance_type: str, rounds: int) -> None:
    x = clusters(2, 2000)
    start = random_model(np.random.default_rng(4), covariance_type, 3, 4)
    start["means"] = x[[10, 200, 1500]]
    precisions = {
        "full": np.linalg.inv,
        "tied": np.linalg.inv,
        "diag": np.reciprocal,
        "spherical": np.reciprocal,
    }[covariance_type](start["covariances"])
    peer = Peer(
        3,
        covariance_type=covariance_type,
        tol=0.0,
        max_iter=rounds,
        weights_init=start["weights"],
        means_init=start["means"],
        precisions_init=precisions,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        peer.fit(x)
    given_start = {"weights": start["weights"], "means": start["means"], "precisions": precisions}
    estimator = GaussianMixture(3, covariance_type, init=given_start)
    model = fit(estimator, [x[:700], x[700:700], x[700:]], rounds)
    for name in ("weights", "means", "covariances", "precisions_cholesky"):
        theirs = getattr(peer, f"{name}_")
        np.testing.assert_allclose(model[name], theirs, rtol=1e-8, atol=1e-9, err_msg=name)
    ours = accumulate(estimator.log_density(model), [x])
    np.testing.assert_allclose(ours.mean, peer.score(x), rtol=1e-10)
    result = estimator.result(model)
    np.testing.assert_allclose(result.predict_proba(x), peer.predict_proba(x), atol=1e-8)
    np.testing.assert_allclose(result.score_samples(x), peer.score_samples(x), rtol=1e-8)
    assert np.array_equal(result.predict(x), peer.predict(x))


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
def test_integer_weights_are_repeated_rows(covariance_type: str) -> None:
    x = clusters(6, 300)
    w = np.random.default_rng(8).integers(0, 4, 300)
    start = random_model(np.random.default_rng(4), covariance_type, 3, 4)
    estimator = GaussianMixture(3, covariance_type, init=start)
    weighted = fit(estimator, [x], 4, [w])
    repeated = fit(estimator, [np.repeat(x, w, axis=0)], 4)
    for name, value in repeated.items():
        np.testing.assert_allclose(weighted[name], value, rtol=1e-9, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
@pytest.mark.parametrize("init", ["kmeans", "k-means++"])
def test_own_start_finds_the_clusters(covariance_type: str, init: str) -> None:
    rng = np.random.default_rng(19)
    centres = np.array([[0.0, 0.0], [20.0, 0.0], [0.0, 20.0]])
    blocks = [centres[rng.integers(0, 3, n)] + rng.normal(size=(n, 2)) for n in (400, 1, 300)]
    model = fit(GaussianMixture(3, covariance_type, init=init), blocks, 10)
    found = model["means"][np.lexsort(model["means"].T[::-1].round())]
    np.testing.assert_allclose(found, [[0, 0], [0, 20], [20, 0]], atol=0.4)


def test_start_depends_on_the_seed() -> None:
    x = clusters(6, 3000)
    models = [fit(GaussianMixture(3, seed=seed), [x], 0)["means"] for seed in (0, 0, 1)]
    assert np.array_equal(models[0], models[1])
    assert not np.array_equal(models[0], models[2])


def test_identical_rows_are_a_mixture_of_points() -> None:
    model = fit(GaussianMixture(3, "full"), [np.ones((40, 2))], 3)
    assert all(np.all(np.isfinite(value)) for value in model.values())
    np.testing.assert_allclose(model["means"], 1.0)


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"n_components": 0},
        {"n_components": True},
        {"n_components": 2.0},
        {"n_components": 2, "covariance_type": "round"},
        {"n_components": 2, "reg_covar": -1.0},
        {"n_components": 2, "reg_covar": math.nan},
        {"n_components": 2, "reg_covar": "small"},
        {"n_components": 2, "seed": -1},
        {"n_components": 2, "seed": 1.5},
        {"n_components": 4, "sample_size": 3},
        {"n_components": 2, "init": "random"},
        {"n_components": 2, "init": {"means": [[0.0]]}},
        {"n_components": 2, "init": {"weights": [1.0], "means": [[0.0]], "covariances": [[[1.0]]]}},
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        GaussianMixture(**arguments)


@pytest.mark.parametrize(
    ("weights", "means", "covariances", "message"),
    [
        ([0.5, 0.6], [[0.0], [1.0]], [1.0, 1.0], "sum 1"),
        ([1.5, -0.5], [[0.0], [1.0]], [1.0, 1.0], ">= 0"),
        ([1.0], [[0.0], [1.0]], [1.0, 1.0], "shape"),
        ([0.5, 0.5], [0.0, 1.0], [1.0, 1.0], "means"),
        ([0.5, 0.5], [[0.0], [math.nan]], [1.0, 1.0], "finite means"),
        ([0.5, 0.5], [[0.0], [1.0]], [1.0, 0.0], "variances > 0"),
        ([0.5, 0.5], [[0.0], [1.0]], [1.0], "covariances of shape"),
        ([0.5, 0.5], [[0.0], ["x"]], [1.0, 1.0], "numbers"),
    ],
)
def test_bad_models_are_refused(weights: Any, means: Any, covariances: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        mixture_model(weights, means, covariances=covariances, covariance_type="spherical")


def test_a_singular_matrix_is_refused() -> None:
    with pytest.raises(InputError, match="positive definite"):
        mixture_model([1.0], [[0.0, 0.0]], covariances=[np.ones((2, 2))])


def test_bad_samples_are_refused() -> None:
    statistic = MixtureExpectation("full", random_model(np.random.default_rng(0), "full", 2, 3))
    with pytest.raises(InputError, match="3 features"):
        statistic.init(ShardInfo((4,), np.dtype("f8")))
    with pytest.raises(InputError, match=r"\(d,\)"):
        statistic.init(ShardInfo((3, 3), np.dtype("f8")))
    with pytest.raises(InputTypeError, match="real"):
        statistic.init(ShardInfo((3,), np.dtype("c16")))
    state = statistic.init(ShardInfo((3,), np.dtype("f8")))
    with pytest.raises(InputError, match="shape"):
        statistic.update(state, np.zeros((5, 4)))


def test_no_samples_have_no_model() -> None:
    estimator = GaussianMixture(2)
    start = estimator.initialise(ShardInfo((3,), np.dtype("f8")))
    assert isinstance(start, MixtureStart)
    with pytest.raises(InputError, match="at least 2 rows"):
        start.finalize(start.init(ShardInfo((3,), np.dtype("f8"))))
    model = random_model(np.random.default_rng(0), "full", 2, 3)
    with pytest.raises(InputError, match="positive weight"):
        estimator.maximise(model, accumulate(estimator.statistic(model), [np.empty((0, 3))]))
    assert math.isnan(accumulate(estimator.log_density(model), [np.empty((0, 3))]).mean)


def test_sensitivity_is_the_condition_of_the_factor() -> None:
    model = random_model(np.random.default_rng(0), "diag", 2, 3)
    assert sensitivity(components_of(model, "diag")) == 1.0
    near = mixture_model([1.0], [[0.0, 0.0]], covariances=[[[1.0, 1 - 1e-8], [1 - 1e-8, 1.0]]])
    assert 1e4 < sensitivity(components_of(near, "full")) < 2e4
    tied = mixture_model([0.5, 0.5], [[0.0], [2e6]], covariances=[[1.0]], covariance_type="tied")
    assert sensitivity(components_of(tied, "tied")) == pytest.approx(1e6, rel=1e-5)
