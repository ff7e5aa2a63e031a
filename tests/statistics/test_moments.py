from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.statistics import Moments, MomentsResult, ShardInfo
from dask_sdc.statistics.kernels.moments import FIELDS, array_api_moments, block_moments


def state_of(
    x: np.ndarray, statistic: Moments | None = None, parts: int = 1, **columns: Any
) -> dict[str, Any]:
    statistic = statistic or Moments()
    info = ShardInfo(x.shape[1:], x.dtype)
    state = statistic.init(info)
    for rows in np.array_split(np.arange(len(x)), parts):
        block = statistic.init(info)
        block = statistic.update(block, x[rows], **{k: v[rows] for k, v in columns.items()})
        state = statistic.combine(state, block)
    return state


def result_of(
    x: np.ndarray, statistic: Moments | None = None, parts: int = 1, **columns: Any
) -> MomentsResult:
    return (statistic or Moments()).finalize(state_of(x, statistic, parts, **columns))


def exact(x: np.ndarray, weights: np.ndarray | None = None) -> tuple[list[Any], list[Any]]:
    """Sum and central moments 2-4 in long double, and the sums of their magnitudes."""
    w = np.ones(len(x)) if weights is None else weights
    w = w.astype(np.longdouble).reshape((-1,) + (1,) * (x.ndim - 1))
    x = x.astype(np.longdouble)
    total, weight = (w * x).sum(axis=0), w.sum()
    d = x - total / weight
    d -= (w * d).sum(axis=0) / weight
    powers = [(w * d**k).sum(axis=0) for k in (2, 3, 4)]
    return [total, *powers], [(w * abs(x)).sum(axis=0), *((w * abs(d) ** k).sum(axis=0) for k in (2, 3, 4))]


def assert_exact(state: dict[str, Any], x: np.ndarray, weights: np.ndarray | None, bound: float) -> None:
    values, sizes = exact(x, weights)
    got = [state["sum"].astype(np.longdouble) + state["low"], *(state[f"M{k}"] for k in (2, 3, 4))]
    for value, size, mine in zip(values, sizes, got, strict=True):
        assert np.all(abs(mine - value) <= bound * size)


shapes = st.sampled_from([(1,), (2, 3), (7, 1), (65, 16), (130, 5), (40, 64), (33, 70), (9, 2, 3, 5)])
dtypes = st.sampled_from(["f2", "f4", "f8", "i2", "u1", "i8", "?"])


@given(shapes, dtypes, st.integers(1, 4), st.booleans(), st.integers(0, 9))
def test_agrees_with_long_double(
    shape: tuple[int, ...], dtype: str, parts: int, weighted: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(3, 5, size=shape).clip(0 if dtype in ("u1", "?") else -20, 20).astype(dtype)
    columns = {"weights": rng.uniform(0.1, 3, size=shape[0])} if weighted else {}
    state = state_of(x, parts=parts, **columns)
    assert_exact(state, x, columns.get("weights"), 4e-15)
    assert np.array_equal(state["min"], x.min(axis=0))
    assert np.array_equal(state["max"], x.max(axis=0))
    assert list(Moments().invariants(state)) == []


@pytest.mark.parametrize("parts", [1, 7])
def test_ordinary_data_to_1e13(parts: int) -> None:
    x = np.random.default_rng(0).normal(3, 2, size=(200_000, 3))
    result = result_of(x, parts=parts)
    (total, *powers), _ = exact(x)
    np.testing.assert_allclose(result.mean, (total / len(x)).astype(float), rtol=1e-15)
    np.testing.assert_allclose(result.M2, powers[0].astype(float), rtol=1e-13)
    np.testing.assert_allclose(result.M4, powers[2].astype(float), rtol=1e-13)
    np.testing.assert_allclose(result.skew, stats.skew(x), rtol=1e-9)
    np.testing.assert_allclose(result.kurtosis, stats.kurtosis(x), rtol=1e-9)
    np.testing.assert_allclose(result.variance(ddof=1), x.var(axis=0, ddof=1), rtol=1e-12)
    np.testing.assert_allclose(result.std(), x.std(axis=0), rtol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_mean_1e9_variance_1(weighted: bool) -> None:
    rng = np.random.default_rng(1)
    x = 1e9 + rng.normal(size=300_000)
    columns = {"weights": rng.uniform(0.5, 2, len(x))} if weighted else {}
    w = columns.get("weights", np.ones(len(x)))
    result = result_of(x, parts=9, **columns)
    d = (x - 1e9).astype(np.longdouble)
    mean = (w * d).sum() / w.sum()
    assert float(result.M2 / (w * (d - mean) ** 2).sum()) == pytest.approx(1, abs=1e-12)
    assert result.mean - 1e9 == pytest.approx(float(mean), abs=2e-7)


def test_a_million_terms_of_alternating_sign() -> None:
    rng = np.random.default_rng(2)
    x = np.tile([1e9, -1e9], 500_000) + rng.normal(size=1_000_000)
    assert result_of(x, parts=3).mean == pytest.approx(math.fsum(x) / len(x), rel=1e-14)
    harmonic = np.tile([1.0, -1.0], 500_000) / np.arange(1, 1_000_001)
    assert result_of(harmonic).mean == pytest.approx(math.fsum(harmonic) / 1e6, rel=1e-15)


def test_pilot_rows_may_mislead() -> None:
    """Rows that the pilot is taken from are at 1e8; the others are at 0 with variance 1."""
    x = np.random.default_rng(3).normal(size=(100_000, 2))
    x[np.linspace(0, len(x) - 1, 16).astype(int), 0] = 1e8
    assert_exact(state_of(x), x, None, 1e-14)
    wide = np.tile(x[:600], (1, 65))
    wide[np.linspace(0, 599, 16).astype(int), 100] = -1e8
    assert_exact(state_of(wide), wide, None, 1e-14)
    assert state_of(np.asfortranarray(wide))["M4"].tobytes() == state_of(wide)["M4"].tobytes()
    ramp = np.arange(100_000.0).reshape(-1, 1)
    assert_exact(state_of(ramp), ramp, None, 1e-14)


def test_constant_data_has_no_variance() -> None:
    for value in (0.1, 1e9 + 0.3, -7.0):
        result = result_of(np.full((1000, 2), value), parts=3)
        assert np.all(result.M2 == 0) and np.all(result.mean == value)
        assert np.all(np.isnan(result.skew)) and np.all(np.isnan(result.kurtosis))
        assert list(Moments().invariants(state_of(np.full((1000, 2), value)))) == []


@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_integers_beyond_2_53_keep_their_spread(dtype: str) -> None:
    small = np.random.default_rng(4).integers(0, 1000, size=(5000, 3))
    x = (small + (1 << 61)).astype(dtype)
    x[:, 2] -= 1 if dtype == "i8" else 0
    state = state_of(x, parts=4, weights=np.full(5000, 2.0))
    np.testing.assert_allclose(state["M2"], 2 * small.var(axis=0) * 5000, rtol=1e-13)
    assert int(state["sum"][0]) + int(state["low"][0]) == 2 * sum(int(v) for v in x[:, 0])
    assert np.array_equal(state["min"], x.min(axis=0).astype(float))
    assert list(Moments().invariants(state)) == []
    wide = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max], dtype)
    spread = float(result_of(wide).M2)
    assert spread == pytest.approx(2.0**127, rel=1e-14)


def layouts(x: np.ndarray) -> dict[str, np.ndarray]:
    spread = np.zeros((2 * len(x), *x.shape[1:]), x.dtype)
    spread[::2] = x
    shifted = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    shifted[...] = x
    frozen = x.copy()
    frozen.flags.writeable = False
    return {
        "fortran": np.asfortranarray(x),
        "strided": spread[::2],
        "reversed": x[::-1].copy()[::-1],
        "swapped": x.astype(x.dtype.newbyteorder()),
        "unaligned": shifted,
        "frozen": frozen,
        "wider": x.astype("f8"),
    }


@pytest.mark.parametrize("shape", [(3000,), (5001, 16), (700, 70), (300, 3, 5)])
@pytest.mark.parametrize("weighted", [False, True])
def test_memory_layout_does_not_change_a_bit(shape: tuple[int, ...], weighted: bool) -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(10, 1, size=shape).astype("f4")
    columns = {"weights": rng.uniform(1, 2, shape[0])} if weighted else {}
    expected = state_of(x, **columns)
    for name, other in layouts(x).items():
        state = state_of(other, **columns)
        for field in FIELDS:
            assert state[field].tobytes() == expected[field].tobytes(), (name, field)


@given(st.integers(0, 30), st.booleans(), st.booleans())
def test_skipna_is_as_if_nan_were_not_there(seed: int, weighted: bool, empty: bool) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(5, 2, size=(150, 3))
    x[rng.uniform(size=x.shape) < 0.3] = np.nan
    if empty:
        x[:, 1] = np.nan
    w = rng.uniform(0.5, 2, 150) if weighted else np.ones(150)
    result = result_of(x, Moments(skipna=True), parts=4, **({"weights": w} if weighted else {}))
    for j in range(3):
        keep = ~np.isnan(x[:, j])
        assert result.count[j] == keep.sum()
        if not keep.any():
            assert np.isnan([result.mean[j], result.min[j], result.max[j], result.skew[j]]).all()
            continue
        (total, *powers), sizes = exact(x[keep, j], w[keep])
        assert result.mean[j] == pytest.approx(float(total / w[keep].sum()), rel=1e-14)
        assert result.M2[j] == pytest.approx(float(powers[0]), rel=1e-13)
        assert abs(result.M3[j] - powers[1]) <= 1e-13 * sizes[2]
        assert (result.min[j], result.max[j]) == (x[keep, j].min(), x[keep, j].max())


def test_nan_without_skipna_shows_in_the_state() -> None:
    x = np.ones((200, 2))
    x[77, 1] = np.nan
    state = state_of(x)
    assert np.isnan(state["sum"][1]) and np.isfinite(state["sum"][0])


@pytest.mark.parametrize("dtype", ["c8", "c16"])
def test_complex(dtype: str) -> None:
    rng = np.random.default_rng(6)
    x = (rng.normal(3, 1, (400, 2)) + 1j * rng.normal(-2, 4, (400, 2))).astype(dtype)
    w = rng.integers(0, 3, 400)
    result = result_of(x, parts=3, weights=w)
    wide = x.astype(np.clongdouble)
    mean = (w[:, None] * wide).sum(axis=0) / w.sum()
    np.testing.assert_allclose(result.mean, mean.astype(complex), rtol=1e-15)
    np.testing.assert_allclose(
        result.M2, (w[:, None] * abs(wide - mean) ** 2).sum(axis=0).astype(float), rtol=1e-14
    )
    assert result.min is None and result.max is None
    for name in ("skew", "kurtosis"):
        with pytest.raises(InputTypeError, match="real samples"):
            getattr(result, name)
    x[3, 0] = complex(np.nan, 1)
    skipped = result_of(x, Moments(skipna=True))
    assert list(skipped.count) == [399, 400]
    np.testing.assert_allclose(
        skipped.mean, np.nanmean(x.astype(complex), axis=0), rtol=1e-6 if dtype == "c8" else 1e-13
    )


def test_weights_of_zero_are_no_samples() -> None:
    x = np.random.default_rng(7).normal(size=(50, 2))
    w = np.tile([0.0, 2.0], 25)
    x[::2] = np.nan
    state = state_of(x, weights=w)
    assert state["count"] == 25 and state["weight"] == 50
    assert_exact(state, x[1::2], w[1::2], 1e-15)
    assert state_of(x, weights=np.zeros(50))["count"] == 0


def test_integer_weights_are_repeats() -> None:
    rng = np.random.default_rng(8)
    x, w = rng.normal(size=(60, 2)), rng.integers(1, 5, 60)
    once, repeated = result_of(x, weights=w), result_of(np.repeat(x, w, axis=0))
    for field in ("weight", "mean", "M2", "M3", "M4", "min", "max"):
        np.testing.assert_allclose(getattr(once, field), getattr(repeated, field), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(once.variance(1), repeated.variance(1), rtol=1e-13)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("skipna", [False, True])
def test_array_api_path_agrees_with_numba(weighted: bool, skipna: bool) -> None:
    rng = np.random.default_rng(9)
    x = rng.normal(1e4, 1, size=(500, 4))
    if skipna:
        x[rng.uniform(size=x.shape) < 0.2] = np.nan
    w = rng.uniform(0.1, 1, 500) if weighted else None
    generic, numba = (f(x, w, True, skipna) for f in (array_api_moments, block_moments))
    assert np.array_equal(generic["count"], numba["count"])
    for field in FIELDS[1:]:
        scale = 1e-9 * abs(numba["sum"]) if field == "low" else 0.0
        if field == "M3":
            scale = 1e-12 * np.sqrt(numba["M2"] * numba["M4"])
        assert np.all(abs(generic[field] - numba[field]) <= scale + 1e-13 * abs(numba[field])), field


def test_order_2_is_order_4_without_the_high_moments() -> None:
    x = np.random.default_rng(10).normal(2, 1, size=(3000, 3))
    low, high = state_of(x, Moments(order=2), parts=3), state_of(x, parts=3)
    assert high.keys() - low.keys() == {"M3", "M4"}
    for field in low:
        np.testing.assert_allclose(low[field], high[field], rtol=1e-14, atol=1e-14)
    with pytest.raises(InputTypeError, match="order 4"):
        _ = Moments(order=2).finalize(low).kurtosis


def test_no_samples() -> None:
    for shape in ((), (3,), (2, 0)):
        result = Moments().finalize(Moments().init(ShardInfo(shape, np.dtype("f8"))))
        assert result.count == 0 and np.isnan(result.mean).all() and np.isnan(result.min).all()
        assert np.shape(result.mean) == shape and np.isnan(result.variance()).all()


def test_scalar_samples_give_scalars() -> None:
    result = result_of(np.arange(5.0))
    assert isinstance(result.mean, float) and (result.mean, result.min, result.max) == (2, 0, 4)


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (np.zeros((3, 2, 1)), r"shape \(n, 2\)"),
        (np.zeros(()), "shape"),
        (np.zeros((3, 2), "g"), "longdouble|float128"),
        (np.zeros((3, 2), "M8[s]"), "datetime64"),
        (np.array([["a", "b"]]), "<U1"),
        (np.zeros((3, 2), complex), "real samples"),
        (np.ma.masked_array(np.zeros((3, 2))), "masked"),
    ],
)
def test_refuses_blocks(block: np.ndarray, why: str) -> None:
    statistic = Moments()
    with pytest.raises(InputError, match=why):
        statistic.update(statistic.init(ShardInfo((2,), np.dtype("f8"))), block)


@pytest.mark.parametrize(
    "weights",
    [[1, 1, -1], [1, np.nan, 1], [1, np.inf, 1], [1, 1], [[1], [1], [1]], ["a", "b", "c"], [1j, 1, 1]],
)
def test_refuses_weights(weights: Any) -> None:
    statistic = Moments()
    with pytest.raises(InputError, match=r"expected .*weights"):
        statistic.update(statistic.init(ShardInfo((), np.dtype("f8"))), np.zeros(3), np.array(weights))


@pytest.mark.parametrize(
    "options", [{"order": 3}, {"order": True}, {"order": 4.5}, {"skipna": 1}, {"skipna": None}]
)
def test_refuses_options(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected"):
        Moments(**options)


@pytest.mark.parametrize(
    ("field", "value", "claim"),
    [
        ("count", -1, "count"),
        ("weight", 0.0, "weight"),
        ("sum", 1e6, "mean <= max"),
        ("sum", -1e6, "min <= mean"),
        ("M2", -1.0, "M2 >= 0"),
        ("M2", 1e9, "max - min"),
        ("M4", 1e-3, r"M2\*\*2"),
        ("M3", 1e12, r"M3\*\*2"),
        ("min", 5.0, "min <= mean"),
    ],
)
def test_invariants_see_damage(field: str, value: float, claim: str) -> None:
    state = state_of(np.random.default_rng(11).normal(size=(100, 2)))
    state[field][(1,) if state[field].ndim else ()] = value
    assert any(claim.replace("\\", "") in line for line in Moments().invariants(state))


@given(st.integers(0, 200), st.floats(-1e12, 1e12), st.floats(0, 1e6), st.sampled_from([1, 2, 3, 50]))
def test_invariants_never_alarm(seed: int, mean: float, spread: float, n: int) -> None:
    rng = np.random.default_rng(seed)
    x = mean + spread * rng.standard_t(2, size=(n, 2))
    assert list(Moments().invariants(state_of(x, parts=2))) == []
