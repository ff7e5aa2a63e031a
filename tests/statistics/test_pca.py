from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.decomposition import PCA as PeerPCA

from dask_sdc.exceptions import InputError
from dask_sdc.statistics import PCA, PCAResult, ShardInfo


def fit(statistic: PCA, x: np.ndarray, parts: int = 3, **columns: Any) -> PCAResult:
    info = ShardInfo(x.shape[1:], x.dtype)
    state = statistic.init(info)
    for rows in np.array_split(np.arange(len(x)), parts):
        taken = {name: column[rows] for name, column in columns.items()}
        state = statistic.combine(state, statistic.update(statistic.init(info), x[rows], **taken))
    assert list(statistic.invariants(state)) == []
    return statistic.finalize(state)


def data(n: int, d: int) -> np.ndarray:
    rng = np.random.default_rng(d)
    return rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + rng.normal(5, 9, size=d)


@pytest.mark.parametrize(("n", "d", "k"), [(200, 5, 5), (300, 8, 3), (40, 1, 1), (500, 130, 4)])
def test_agrees_with_scikit_learn(n: int, d: int, k: int) -> None:
    x = data(n, d)
    mine, peer = fit(PCA(k), x), PeerPCA(k, svd_solver="full").fit(x)
    np.testing.assert_allclose(mine.components, peer.components_, atol=1e-10)
    np.testing.assert_allclose(mine.explained_variance, peer.explained_variance_, rtol=1e-11)
    np.testing.assert_allclose(mine.explained_variance_ratio, peer.explained_variance_ratio_, rtol=1e-11)
    np.testing.assert_allclose(mine.singular_values, peer.singular_values_, rtol=1e-11)
    np.testing.assert_allclose(mine.mean, peer.mean_, rtol=1e-13)
    assert mine.noise_variance == pytest.approx(peer.noise_variance_, rel=1e-11)
    np.testing.assert_allclose(mine.transform(x), peer.transform(x), atol=1e-8)


def test_integer_weights_are_repeats() -> None:
    x, w = data(90, 4), np.random.default_rng(0).integers(0, 4, 90)
    once, repeated = fit(PCA(), x, weights=w), fit(PCA(), np.repeat(x, w, axis=0))
    np.testing.assert_allclose(once.components, repeated.components, atol=1e-11)
    np.testing.assert_allclose(once.explained_variance, repeated.explained_variance, rtol=1e-12)
    np.testing.assert_allclose(once.singular_values, repeated.singular_values, rtol=1e-12)
    assert once.count == (w > 0).sum()


def test_signs_do_not_depend_on_the_shards() -> None:
    x = data(400, 6)
    a, b = fit(PCA(), x, parts=1), fit(PCA(), x, parts=11)
    np.testing.assert_allclose(a.components, b.components, atol=1e-10)
    largest = np.take_along_axis(a.components, np.argmax(abs(a.components), axis=1)[:, None], axis=1)
    assert np.all(largest > 0)


def test_no_variance() -> None:
    result = fit(PCA(1), np.full((5, 2), 3.0))
    assert result.explained_variance == 0 and np.isnan(result.explained_variance_ratio).all()


def test_refuses() -> None:
    info = ShardInfo((2,), np.dtype("f8"))
    for k in (0, -1, True, 1.5):
        with pytest.raises(InputError, match="n_components"):
            PCA(k)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="n_components <= 2 features, got 3"):
        PCA(3).init(info)
    with pytest.raises(InputError, match="PCA needs samples"):
        PCA().init(ShardInfo((2, 2), np.dtype("f8")))
    with pytest.raises(InputError, match="weight above ddof"):
        PCA().finalize(PCA().init(info))
    with pytest.raises(InputError, match="ddof"):
        PCA(2, ddof=float("inf"))
