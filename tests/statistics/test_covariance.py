from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.statistics import Covariance, ShardInfo
from dask_sdc.statistics.kernels import covariance as kernel


def state_of(x: np.ndarray, parts: int = 1, **columns: Any) -> dict[str, Any]:
    statistic, info = Covariance(), ShardInfo(x.shape[1:], x.dtype)
    state = statistic.init(info)
    for rows in np.array_split(np.arange(len(x)), parts):
        taken = {name: column[rows] for name, column in columns.items()}
        state = statistic.combine(state, statistic.update(statistic.init(info), x[rows], **taken))
    return state


def exact(x: np.ndarray, w: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Scatter in long double and Σ|terms|."""
    weights = (np.ones(len(x)) if w is None else w).astype(np.longdouble)[:, None]
    d = x.astype(np.longdouble)
    d = d - (weights * d).sum(axis=0) / weights.sum()
    d = d - (weights * d).sum(axis=0) / weights.sum()
    return (weights * d).T @ d, (weights * abs(d)).T @ abs(d)


@given(
    st.sampled_from([(1, 1), (2, 3), (50, 4), (700, 17), (300, 129)]),
    st.sampled_from(["f2", "f4", "f8", "i4", "i8", "?"]),
    st.booleans(),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_agrees_with_long_double(
    shape: tuple[int, int], dtype: str, weighted: bool, parts: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(2, 5, size=shape).astype(dtype)
    columns = {"weights": rng.uniform(0.1, 3, shape[0])} if weighted else {}
    state = state_of(x, parts, **columns)
    value, size = exact(x, columns.get("weights"))
    # The error of a sum of n terms grows like the root of n (Higham and Mary 2019).
    rounding = (10 + 2 * np.sqrt(len(x))) * np.finfo(np.float64).eps
    assert np.all(abs(state["scatter"] - value) <= rounding * size + 1e-60)
    assert np.array_equal(state["scatter"], state["scatter"].T)
    assert list(Covariance().invariants(state)) == []


def test_agrees_with_numpy() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(400, 6)) @ rng.normal(size=(6, 6)) + 30, rng.integers(0, 4, 400)
    result = Covariance().finalize(state_of(x, 5, weights=w))
    np.testing.assert_allclose(result.covariance, np.cov(x, rowvar=False, fweights=w), rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(result.mean, np.average(x, axis=0, weights=w), rtol=1e-14)
    assert (result.count, result.weight) == ((w > 0).sum(), w.sum())
    plain = Covariance(ddof=0).finalize(state_of(x))
    np.testing.assert_allclose(plain.covariance, np.cov(x, rowvar=False, ddof=0), rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(plain.correlation, np.corrcoef(x, rowvar=False), rtol=1e-11, atol=1e-13)
    assert np.all(plain.correlation.diagonal() == 1)


def test_mean_1e9_variance_1() -> None:
    rng = np.random.default_rng(1)
    x = 1e9 + rng.normal(size=(50_000, 3)) @ rng.normal(size=(3, 3))
    for columns in ({}, {"weights": rng.uniform(0.5, 2, 50_000)}):
        value, size = exact(x - 1e9, columns.get("weights"))
        assert np.all(abs(state_of(x, 7, **columns)["scatter"] - value) <= 1e-11 * size)


def test_pilot_rows_may_mislead() -> None:
    x = np.random.default_rng(2).normal(size=(20_000, 3))
    x[np.linspace(0, len(x) - 1, 32).astype(int), 0] = 1e8
    value, size = exact(x)
    assert np.all(abs(state_of(x)["scatter"] - value) <= 1e-13 * size)


def test_integers_beyond_2_53_keep_their_spread() -> None:
    small = np.random.default_rng(3).integers(0, 1000, size=(3000, 2))
    value, size = exact(small)
    state = state_of(small + (1 << 61), 3)
    assert np.all(abs(state["scatter"] - value) <= 1e-14 * size)
    assert int(state["sum"][0]) + int(state["low"][0]) == sum(map(int, small[:, 0])) + 3000 * (1 << 61)


@pytest.mark.parametrize("shape", [(3000, 3), (700, 130)])
def test_memory_layout_does_not_change_a_bit(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(4)
    x, w = rng.normal(5, 1, size=shape).astype("f4"), rng.uniform(1, 2, shape[0])
    frozen = x.copy()
    frozen.flags.writeable = False
    others = (np.asfortranarray(x), np.repeat(x, 2, axis=0)[::2], x.astype(">f4"), x.astype("f8"), frozen)
    for columns in ({}, {"weights": w}):
        expected = state_of(x, **columns)
        for other in others:
            state = state_of(other, **columns)
            assert all(np.array_equal(state[f], expected[f]) for f in ("sum", "low", "scatter", "check"))


def test_result_does_not_depend_on_blas_threads() -> None:
    from threadpoolctl import threadpool_limits

    x = np.random.default_rng(5).normal(size=(5000, 96))
    states = []
    for threads in (1, 2):
        with threadpool_limits(threads, "blas"):
            states.append(state_of(x))
    assert Covariance().magnitudes(states[0]).keys() <= states[0].keys()
    size = Covariance().magnitudes(states[0])["scatter"]
    assert np.all(abs(states[0]["scatter"] - states[1]["scatter"]) <= 64 * 2.0**-53 * size)


@pytest.mark.parametrize("weighted", [False, True])
def test_array_api_path_agrees_with_numpy(weighted: bool) -> None:
    rng = np.random.default_rng(6)
    x = rng.normal(1e4, 1, size=(500, 140))
    w = rng.uniform(0.1, 1, 500) if weighted else None
    generic, numpy = kernel._array_api_scatter(x, w), kernel.block_scatter(x, w)
    assert generic["weight"] == pytest.approx(numpy["weight"], rel=1e-15)
    np.testing.assert_allclose(generic["sum"], numpy["sum"], rtol=1e-15)
    np.testing.assert_allclose(generic["scatter"], numpy["scatter"], rtol=0, atol=1e-11)
    np.testing.assert_allclose(generic["check"], numpy["check"], rtol=0, atol=1e-9)


@pytest.mark.parametrize("bit", [40, 45, 50, 52, 55, 62])
def test_the_check_sees_a_wrong_product(monkeypatch: pytest.MonkeyPatch, bit: int) -> None:
    """A bit that flips in the result of one matrix product, mirrored, keeps all other invariants."""
    x = np.random.default_rng(7).normal(size=(6000, 130)) + 3
    multiply = np.matmul
    calls = iter(range(100))

    def faulty(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
        multiply(a, b, out=out)
        if next(calls) == 1:
            bits = out.view(np.uint64)
            bits[5, 9] ^= np.uint64(1 << bit)
            bits[9, 5] = bits[5, 9]
        return out

    monkeypatch.setattr(kernel.np, "matmul", faulty)
    state = state_of(x)
    monkeypatch.undo()
    assert any("scatter @ v" in line or "sqrt" in line for line in Covariance().invariants(state))
    # The check is additive: it is still broken after a merge with a good state.
    merged = Covariance().combine(state_of(x), state)
    assert any("scatter @ v" in line or "sqrt" in line for line in Covariance().invariants(merged))


def test_the_check_never_alarms() -> None:
    rng = np.random.default_rng(8)
    for n, mean, spread in ((1, 0, 1), (40, 1e9, 1), (900, -5, 1e-9), (9000, 0, 1e80), (500, 3, 0)):
        x = mean + spread * rng.standard_t(3, size=(n, 150)) * rng.uniform(0, 1, 150)
        assert list(Covariance().invariants(state_of(x, 3))) == []


@pytest.mark.parametrize(
    ("damage", "claim"),
    [
        (lambda s: s["scatter"].__setitem__((0, 1), 99.0), "symmetric"),
        (lambda s: s["scatter"].__setitem__((2, 2), -1.0), "diagonal"),
        (lambda s: s["scatter"].__setitem__((slice(0, 2), slice(0, 2)), [[1, 9], [9, 1]]), "sqrt"),
        (lambda s: s.update(count=-3), "count"),
        (lambda s: s.update(weight=0.0), "weight"),
    ],
)
def test_invariants_see_damage(damage: Any, claim: str) -> None:
    state = state_of(np.random.default_rng(9).normal(size=(100, 3)))
    damage(state)
    assert any(claim in line for line in Covariance().invariants(state))


def test_combine_does_not_share_memory_with_its_second_argument() -> None:
    state = state_of(np.random.default_rng(10).normal(size=(20, 3)))
    before = state["scatter"].copy()
    first = Covariance().combine(Covariance().init(ShardInfo((3,), np.dtype("f8"))), state)
    Covariance().combine(first, state_of(np.ones((4, 3))))
    assert np.array_equal(state["scatter"], before)


def test_no_samples_and_one() -> None:
    info = ShardInfo((2,), np.dtype("f8"))
    empty = Covariance().finalize(Covariance().update(Covariance().init(info), np.zeros((0, 2))))
    assert empty.count == 0 and np.isnan(empty.mean).all() and np.isnan(empty.covariance).all()
    one = Covariance().finalize(state_of(np.array([[1.0, 2.0]])))
    assert np.array_equal(one.mean, [1, 2]) and np.isnan(one.covariance).all() and not one.scatter.any()
    assert np.isnan(one.correlation).all()


@pytest.mark.parametrize("shape", [(), (2, 2), (0,)])
def test_refuses_sample_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"Covariance needs samples of shape \(d,\)"):
        Covariance().init(ShardInfo(shape, np.dtype("f8")))


def test_refuses_input() -> None:
    state = Covariance().init(ShardInfo((2,), np.dtype("f8")))
    with pytest.raises(InputTypeError, match="real samples, got complex128"):
        Covariance().update(state, np.zeros((3, 2), complex))
    with pytest.raises(InputError, match=r"shape \(n, 2\), got \(3, 3\)"):
        Covariance().update(state, np.zeros((3, 3)))
    for ddof in (True, np.nan, "1", None):
        with pytest.raises(InputError, match="ddof"):
            Covariance(ddof=ddof)  # type: ignore[arg-type]
