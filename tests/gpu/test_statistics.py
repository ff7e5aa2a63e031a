"""The same on a real device: statistics and models of CuPy arrays against those of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dask_sdc.inference.model import KVCache, Transformer
from dask_sdc.statistics import Covariance, Histogram, Moments, ShardInfo, Statistic
from dask_sdc.statistics.kmeans import KMeansStatistic
from dask_sdc.statistics.mixture import MixtureExpectation
from tests.inference.model.reference import MODELS, random_tensors
from tests.statistics.test_mixture import random_model

pytestmark = pytest.mark.gpu

Array = np.ndarray[Any, Any]

STATISTICS: dict[str, Statistic] = {
    "moments": Moments(),
    "moments that skip NaN": Moments(skipna=True),
    "covariance": Covariance(),
    "histogram": Histogram(np.linspace(-2, 2, 101)),
    "k-means": KMeansStatistic(np.random.default_rng(1).normal(size=(5, 130))),
    **{
        kind: MixtureExpectation(kind, random_model(np.random.default_rng(2), kind, 3, 130))
        for kind in ("full", "tied", "diag", "spherical")
    },
}


def state_of(statistic: Statistic, x: Any, weights: Array | None) -> Any:
    columns = {} if weights is None else {"weights": weights}
    return statistic.update(statistic.init(ShardInfo(x.shape[1:], x.dtype)), x, **columns)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_of_a_device_is_that_of_the_host(name: str, dtype: str, weighted: bool) -> None:
    import cupy

    rng, statistic = np.random.default_rng(0), STATISTICS[name]
    x = rng.normal(size=(20_001, 130)).astype(dtype)
    if "NaN" in name:
        x[::9, 1] = np.nan
    w = rng.random(len(x)) if weighted else None
    expected, device = state_of(statistic, x, w), cupy.asarray(x)
    got, again = state_of(statistic, device, w), state_of(statistic, device, w)
    for field, value in expected.items():
        if value is None or isinstance(value, tuple):
            continue
        assert np.asarray(got[field]).tobytes() == np.asarray(again[field]).tobytes(), field
        size = max(float(np.max(np.abs(value), initial=0.0)), 1.0)
        np.testing.assert_allclose(got[field], value, rtol=1e-10, atol=1e-11 * size, err_msg=field)
    assert list(statistic.invariants(got)) == []


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("invariant", [True, False])
def test_logits_of_a_device_are_those_of_the_host(name: str, invariant: bool) -> None:
    import cupy

    config, ids = MODELS[name], np.random.default_rng(1).integers(0, MODELS[name].vocab_size, (2, 40))
    logits = []
    for xp in (np, cupy):
        tensors = random_tensors(config)
        model = Transformer(config, range(config.n_layers), True, True, tensors, invariant=invariant, xp=xp)
        cache = KVCache(config, model.layers, batch=2, xp=xp)
        chunks = [model.forward(xp.asarray(ids[:, part]), cache) for part in (slice(0, 33), slice(33, 40))]
        logits.append(xp.concatenate(chunks, axis=1))
    np.testing.assert_allclose(logits[1].get(), logits[0], atol=2e-5, rtol=0)
