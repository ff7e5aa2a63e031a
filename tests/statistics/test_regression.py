from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import Ridge

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.statistics import LinearRegression, LinearRegressionResult, ShardInfo


def state_of(
    statistic: LinearRegression, x: np.ndarray, y: np.ndarray, parts: int = 3, **columns: Any
) -> dict[str, Any]:
    info = ShardInfo(x.shape[1:], x.dtype, target_shape=y.shape[1:])
    state = statistic.init(info)
    for rows in np.array_split(np.arange(len(x)), parts):
        taken = {name: column[rows] for name, column in columns.items()}
        block = statistic.update(statistic.init(info), x[rows], target=y[rows], **taken)
        state = statistic.combine(state, block)
    assert list(statistic.invariants(state)) == []
    return state


def fit(
    statistic: LinearRegression, x: np.ndarray, y: np.ndarray, parts: int = 3, **columns: Any
) -> LinearRegressionResult:
    return statistic.finalize(state_of(statistic, x, y, parts, **columns))


def data(n: int, d: int, t: int | None, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + rng.normal(3, 5, d)
    y = x @ rng.normal(size=(d, t or 1)) + rng.normal(size=(n, t or 1)) + 7
    return x, y if t else y[:, 0], rng.integers(0, 4, n).astype(float)


def design(x: np.ndarray, intercept: bool) -> np.ndarray:
    return np.column_stack((x, np.ones(len(x)))) if intercept else x


@given(
    st.sampled_from([(60, 3, None), (200, 5, 2), (9, 1, 1)]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 5),
    st.integers(0, 9),
)
def test_agrees_with_lstsq(
    size: tuple[int, int, int | None], intercept: bool, weighted: bool, parts: int, seed: int
) -> None:
    x, y, w = data(*size, seed)
    w = w if weighted else np.ones(len(x))
    result = fit(LinearRegression(intercept), x, y, parts, **({"weights": w} if weighted else {}))
    a, root = design(x, intercept), np.sqrt(w)[:, None]
    targets = y.reshape(len(x), -1)
    expected = np.linalg.lstsq(root * a, root * targets, rcond=None)[0]
    coef = np.atleast_2d(result.coef)
    np.testing.assert_allclose(coef, expected[: x.shape[1]].T, rtol=1e-8, atol=1e-10)
    if intercept:
        np.testing.assert_allclose(np.atleast_1d(result.intercept), expected[-1], rtol=1e-8, atol=1e-9)
    residual = targets - a @ expected
    rss = (w[:, None] * residual**2).sum(axis=0)
    np.testing.assert_allclose(np.atleast_1d(result.rss), rss, rtol=1e-8, atol=1e-18)
    centre = np.average(targets, axis=0, weights=w) if intercept else 0.0
    tss = (w[:, None] * (targets - centre) ** 2).sum(axis=0)
    np.testing.assert_allclose(np.atleast_1d(result.r2), 1 - rss / tss, rtol=1e-8, atol=1e-10)
    freedom = w.sum() - a.shape[1]
    if freedom > 1:
        inverse = np.linalg.inv((root * a).T @ (root * a)).diagonal()
        errors = np.sqrt(np.outer(rss / freedom, inverse))
        np.testing.assert_allclose(
            np.atleast_2d(result.coef_std), errors[:, : x.shape[1]], rtol=1e-6, atol=1e-9
        )
        if intercept:
            np.testing.assert_allclose(
                np.atleast_1d(result.intercept_std), errors[:, -1], rtol=1e-6, atol=1e-9
            )
    assert result.rank == x.shape[1] and result.warning == ""


@pytest.mark.parametrize("intercept", [True, False])
def test_ridge_agrees_with_scikit_learn(intercept: bool) -> None:
    x, y, w = data(150, 4, 2)
    result = fit(LinearRegression(intercept, l2=2.5), x, y, weights=w)
    peer = Ridge(2.5, fit_intercept=intercept, solver="svd").fit(x, y, w)
    np.testing.assert_allclose(result.coef, peer.coef_, rtol=1e-10)
    np.testing.assert_allclose(result.intercept, peer.intercept_, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(result.predict(x), peer.predict(x), rtol=1e-9)
    residual = y - peer.predict(x)
    np.testing.assert_allclose(result.rss, (w[:, None] * residual**2).sum(axis=0), rtol=1e-9)


def test_condition_enters_once() -> None:
    """With κ = 1e8, normal equations would lose all digits."""
    rng = np.random.default_rng(1)
    q, _ = np.linalg.qr(rng.normal(size=(500, 4)))
    x = q * np.array([1.0, 1e-3, 1e-6, 1e-8])
    truth = np.array([1.0, -2.0, 3.0, -4.0])
    result = fit(LinearRegression(fit_intercept=False), x, x @ truth, parts=5)
    np.testing.assert_allclose(result.coef, truth, rtol=1e-6)
    assert result.rank == 4


def test_offsets_do_not_hurt() -> None:
    x, y, _ = data(400, 3, None)
    plain, moved = fit(LinearRegression(), x, y), fit(LinearRegression(), x + 1e8, y + 1e8)
    np.testing.assert_allclose(moved.coef, plain.coef, rtol=1e-6)
    assert moved.rss == pytest.approx(plain.rss, rel=1e-6)


def test_pilot_rows_may_mislead() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(5000, 2))
    x[np.linspace(0, len(x) - 1, 32).astype(int), 0] = 1e7
    y = x @ [1.0, 2.0] + rng.normal(size=5000)
    expected = np.linalg.lstsq(design(x, True), y, rcond=None)[0]
    np.testing.assert_allclose(fit(LinearRegression(), x, y).coef, expected[:2], rtol=1e-9)


@pytest.mark.parametrize("intercept", [True, False])
def test_rank_deficiency_gives_the_shortest_solution(intercept: bool) -> None:
    x, y, _ = data(80, 3, None)
    x = np.column_stack((x, x[:, 0] - 2 * x[:, 1], np.full(80, 4.0)))
    result = fit(LinearRegression(intercept), x, y)
    a, b = (x - x.mean(axis=0), y - y.mean()) if intercept else (x, y)
    np.testing.assert_allclose(result.coef, np.linalg.lstsq(a, b, rcond=1e-12)[0], rtol=1e-9, atol=1e-11)
    rank = 3 if intercept else 4
    assert (
        result.rank == rank
        and result.warning == f"rank {rank} of 5 features: the shortest solution is returned"
    )


def test_fewer_samples_than_features() -> None:
    x, y, _ = data(6, 10, None)
    result = fit(LinearRegression(fit_intercept=False), x, y)
    assert result.rank == 6 and np.isnan(result.coef_std).all() and np.isnan(result.intercept_std)
    np.testing.assert_allclose(result.predict(x), y, rtol=1e-9)


def test_integer_weights_are_repeats() -> None:
    x, y, w = data(50, 3, 2)
    repeats = w.astype(int)
    once = fit(LinearRegression(), x, y, weights=w)
    repeated = fit(LinearRegression(), np.repeat(x, repeats, axis=0), np.repeat(y, repeats, axis=0))
    for field in ("coef", "intercept", "rss", "r2", "coef_std", "intercept_std", "singular_values"):
        np.testing.assert_allclose(getattr(once, field), getattr(repeated, field), rtol=1e-8)
    assert once.count == (w > 0).sum()


def test_memory_layout_does_not_change_a_bit() -> None:
    x, y, w = data(3000, 3, 2)
    x, y = x.astype("f4"), y.astype("f4")
    expected = state_of(LinearRegression(), x, y, weights=w)
    for view in (np.asfortranarray, lambda a: np.repeat(a, 2, axis=0)[::2], lambda a: a.astype(">f4")):
        state = state_of(LinearRegression(), view(x), view(y), weights=w)
        assert all(np.array_equal(state[f], expected[f]) for f in ("sum", "low", "squares", "factor"))


def test_integers_and_booleans() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.integers(-9, 9, size=(70, 2)), rng.uniform(size=70) < 0.5
    expected = np.linalg.lstsq(design(x.astype(float), True), y.astype(float), rcond=None)[0]
    np.testing.assert_allclose(fit(LinearRegression(), x, y).coef, expected[:2], rtol=1e-9, atol=1e-12)


def test_constant_target() -> None:
    x, _, _ = data(30, 2, None)
    result = fit(LinearRegression(), x, np.full(30, 3.0))
    assert result.intercept == pytest.approx(3) and result.rss == 0 and np.isnan(result.r2)


def test_non_finite_samples_show_in_the_state() -> None:
    x, y, _ = data(40, 2, None)
    x[7, 1] = np.inf
    with np.errstate(invalid="ignore"):
        statistic = LinearRegression()
        state = statistic.init(ShardInfo((2,), x.dtype, target_shape=()))
        state = statistic.update(state, x, target=y)
    assert not np.isfinite(state["factor"]).all()


def test_refuses() -> None:
    info = ShardInfo((2,), np.dtype("f8"), target_shape=())
    statistic = LinearRegression()
    with pytest.raises(InputError, match="needs a target"):
        statistic.update(statistic.init(info), np.zeros((3, 2)))
    with pytest.raises(InputError, match="expected 3 targets, one per sample, got 2"):
        statistic.update(statistic.init(info), np.zeros((3, 2)), target=np.zeros(2))
    with pytest.raises(InputTypeError, match="real samples"):
        statistic.init(ShardInfo((2,), np.dtype("c16"), target_shape=()))
    with pytest.raises(InputTypeError, match="real samples"):
        statistic.update(statistic.init(info), np.zeros((3, 2)), target=np.zeros(3, complex))
    with pytest.raises(InputError, match="at least one sample"):
        statistic.finalize(statistic.init(info))
    for shape in (None, (2, 2), (0,)):
        with pytest.raises(InputError, match="targets of shape"):
            statistic.init(ShardInfo((2,), np.dtype("f8"), target_shape=shape))
    for l2 in (-1.0, np.nan, np.inf, True, "1"):
        with pytest.raises(InputError, match="l2"):
            LinearRegression(l2=l2)
    with pytest.raises(InputError, match="fit_intercept"):
        LinearRegression(fit_intercept=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "claim"),
    [
        (lambda s: s["factor"].__setitem__((0, 1), s["factor"][0, 1] + 1e-6), "column 1"),
        (lambda s: s["factor"].__setitem__((1, 0), 1e-9), "triangular"),
        (lambda s: s["factor"].__setitem__((1, 1), -s["factor"][1, 1]), "diagonal"),
        (lambda s: s["squares"].__setitem__(0, s["squares"][0] * (1 + 1e-9)), "column 0"),
        (lambda s: s.update(weight=0.0), "weight"),
    ],
)
def test_invariants_see_damage(damage: Any, claim: str) -> None:
    x, y, _ = data(60, 2, None)
    state = state_of(LinearRegression(), x, y)
    damage(state)
    assert any(claim in line for line in LinearRegression().invariants(state))
