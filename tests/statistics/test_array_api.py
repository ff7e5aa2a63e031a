"""Code for any array library keeps to the array API standard, and gives what the CPU kernels do."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import array_api_strict as xp
import numpy as np
import pytest

from dask_sdc.exceptions import InputError
from dask_sdc.statistics import Covariance, GaussianMixture, Histogram, KMeans, Moments, ShardInfo, Statistic
from dask_sdc.statistics.blocks import weighted_rows
from dask_sdc.statistics.kernels import dtype_of
from dask_sdc.statistics.mixture import MixtureDensity, MixtureExpectation
from dask_sdc.statistics.sample import RowSample
from tests.statistics.test_mixture import random_model

Array = np.ndarray[Any, Any]

#: Mixtures of three components in four dimensions.
MODELS = {kind: random_model(np.random.default_rng(2), kind, 3, 4) for kind in ("full", "tied", "diag")}

KMEANS = KMeans(3, init=np.arange(12.0).reshape(3, 4))

STATISTICS: dict[str, Statistic] = {
    "moments": Moments(),
    "moments without high powers": Moments(order=2),
    "moments that skip NaN": Moments(skipna=True),
    "covariance": Covariance(),
    "histogram": Histogram(np.linspace(-2, 2, 21)),
    "joint histogram": Histogram([np.linspace(-1, 1, 4)] * 4),
    "k-means": KMEANS.statistic({"centres": KMEANS.init}),
    "sample": RowSample(20, 1),
    **{f"{kind} mixture": MixtureExpectation(kind, model) for kind, model in MODELS.items()},
    "density": MixtureDensity("full", MODELS["full"]),
}


def state_of(statistic: Statistic, x: Any, **columns: Any) -> Any:
    info = ShardInfo(tuple(x.shape[1:]), dtype_of(x))
    return statistic.update(statistic.init(info), x, **columns)


@pytest.mark.parametrize("weights", ["none", "numpy", "strict"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_of_a_strict_array_is_that_of_numpy(name: str, dtype: str, weights: str) -> None:
    weighted = weights != "none"
    if weighted and name == "sample":
        pytest.skip("a sample takes no weights")
    rng, statistic = np.random.default_rng(0), STATISTICS[name]
    x = rng.normal(size=(200, 4)).astype(dtype)
    if "NaN" in name:
        x[::9, 1] = np.nan
    columns = {"weights": np.where(rng.random(200) < 0.1, 0.0, rng.random(200))} if weighted else {}
    expected = state_of(statistic, x, **columns)
    if weights == "strict":
        columns = {"weights": xp.asarray(columns["weights"])}
    got = state_of(statistic, xp.asarray(x), **columns)
    assert list(got) == list(expected)
    for field, value in expected.items():
        if value is None or isinstance(value, tuple):
            assert got[field] == value
            continue
        size = max(float(np.max(np.abs(value), initial=0.0)), 1.0) if isinstance(value, np.ndarray) else 1.0
        scale = 1e-9 if field in ("low", "check") else 1e-12
        np.testing.assert_allclose(got[field], value, rtol=1e-11, atol=scale * size, err_msg=field)
    assert list(statistic.invariants(got)) == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([1.0, -2.0, 1.0], "expected finite weights >= 0, got -2.0 at sample 1"),
        ([1.0, 0.0, np.nan], "expected finite weights >= 0, got nan at sample 2"),
        ([np.inf, 0.0, 1.0], "expected finite weights >= 0, got inf at sample 0"),
        ([1.0, 2.0], r"expected real weights of shape \(3,\), got .*float64 of shape \(2,\)"),
        ([1j, 2.0, 3.0], r"expected real weights of shape \(3,\), got .*complex128 of shape \(3,\)"),
    ],
)
def test_errors_of_weights_are_those_of_numpy(bad: list[Any], message: str) -> None:
    for put in (np.asarray, xp.asarray):
        with pytest.raises(InputError, match=message):
            weighted_rows(put(np.ones((3, 2))), put(np.asarray(bad)))


def test_rows_are_picked_by_weights_in_their_own_library() -> None:
    x, w, y = np.arange(8.0).reshape(4, 2), np.array([1, 0, 2, 0], np.int32), np.arange(4.0)
    for put in (np.asarray, xp.asarray):
        rows, weights, target = weighted_rows(put(x), put(w), put(y))
        assert type(rows) is type(weights) is type(target) is type(put(x))
        assert np.asarray(rows).tolist() == [[0, 1], [4, 5]] and np.asarray(target).tolist() == [0, 2]
        assert weights.dtype == put(x).dtype and np.asarray(weights).tolist() == [1, 2]
    rows, weights = weighted_rows(xp.asarray(x), w)
    assert type(weights) is np.ndarray and np.asarray(rows).tolist() == [[0, 1], [4, 5]]


def test_complex_samples() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(50, 2)) + 1j * rng.normal(size=(50, 2))
    x[3, 1] = np.nan
    for statistic in (Moments(), Moments(skipna=True)):
        block = x if statistic.skipna else x[4:]
        expected, got = state_of(statistic, block), state_of(statistic, xp.asarray(block))
        for field in ("count", "sum", "M2", "min", "max"):
            np.testing.assert_allclose(got[field], expected[field], rtol=1e-12, err_msg=field)


def test_the_start_of_a_mixture_takes_strict_arrays() -> None:
    x = np.random.default_rng(1).normal(size=(300, 2))
    start = GaussianMixture(2, seed=0).initialise(ShardInfo((2,), x.dtype))
    assert isinstance(start, Statistic)
    got = state_of(start, xp.asarray(x))
    assert np.array_equal(got["rows"], state_of(start, x)["rows"])


IMPORTS = """
import sys

class NoCupy:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "cupy":
            frame = sys._getframe(1)
            while "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            print(frame.f_globals["__name__"])
            raise ModuleNotFoundError(name=name)

sys.meta_path.insert(0, NoCupy())
import numpy as np
import dask_sdc.inference.pipeline
import dask_sdc.statistics.kernels.cuda.mixture
import dask_sdc.inference.model.kernels.cuda
from dask_sdc import Covariance, ShardInfo
statistic = Covariance()
statistic.update(statistic.init(ShardInfo((1,), np.dtype("f8"))), np.ones((3, 1)))
"""


def test_importing_the_package_imports_no_cupy() -> None:
    """Dask and Zarr ask for it, and take it where it is installed; the package does not."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    asked = {name.partition(".")[0] for name in done.stdout.split()}
    assert "dask" in asked and "dask_sdc" not in asked
