"""The conformance suites on k-means, Gaussian mixtures and the sample that they start from."""

from __future__ import annotations

import numpy as np
import pytest

from dask_sdc.statistics.gaussian import COVARIANCE_TYPES, mixture_model
from dask_sdc.statistics.kmeans import KMeans, KMeansStart, KMeansStatistic
from dask_sdc.statistics.mixture import (
    GaussianMixture,
    MixtureDensity,
    MixtureExpectation,
    MixtureStart,
)
from dask_sdc.statistics.sample import RowSample
from dask_sdc.testing import EstimatorTests, StatisticTests

CENTRES = np.array([[0.0, 0.0, 0.0], [4.0, 4.0, 1.0], [6.0, -1.0, 3.0]])


def model(covariance_type: str) -> dict[str, np.ndarray]:
    """Return a mixture of three components that overlap."""
    full = np.array([[4.0, 1.0, 0.5], [1.0, 3.0, -0.5], [0.5, -0.5, 2.0]])
    scales = np.array([1.0, 0.5, 2.0])
    covariances = {
        "full": scales[:, None, None] * full,
        "tied": full,
        "diag": scales[:, None] * np.array([1.0, 2.0, 3.0]),
        "spherical": scales,
    }[covariance_type]
    return mixture_model([0.2, 0.5, 0.3], CENTRES, covariances=covariances, covariance_type=covariance_type)


class Clusters:
    """Blocks of three clusters, so that starts and fits are well posed."""

    def make_block(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """Return rows around three centres."""
        return (CENTRES[rng.integers(0, 3, n)] + rng.normal(size=(n, 3))).astype(self.dtype)


class TestRowSample(StatisticTests):
    statistic = RowSample(20, seed=3)
    order_matters = True


class TestKMeansStart(Clusters, StatisticTests):
    statistic = KMeansStart(64, 0, 3)
    order_matters = True
    empty_result = False


class TestMixtureStart(Clusters, StatisticTests):
    statistic = MixtureStart(64, 0, GaussianMixture(3))
    order_matters = True
    empty_result = False


class TestKMeansStatistic(StatisticTests):
    statistic = KMeansStatistic(CENTRES)


class TestKMeansStatisticFloat32(StatisticTests):
    statistic = KMeansStatistic(CENTRES)
    dtype = "float32"


class TestKMeansStatisticInteger(StatisticTests):
    statistic = KMeansStatistic(CENTRES)
    dtype = "int16"


class MixtureTests(StatisticTests):
    """The expectation step of one covariance type."""

    @property
    def statistic(self) -> MixtureExpectation:
        """Return the statistic of the subclass's covariance type."""
        return MixtureExpectation(self.covariance_type, model(self.covariance_type))


class TestExpectationFull(MixtureTests):
    covariance_type = "full"


class TestExpectationTied(MixtureTests):
    covariance_type = "tied"


class TestExpectationDiagonal(MixtureTests):
    covariance_type = "diag"


class TestExpectationSpherical(MixtureTests):
    covariance_type = "spherical"


class TestExpectationFloat32(MixtureTests):
    covariance_type = "full"
    dtype = "float32"


class TestExpectationBool(MixtureTests):
    covariance_type = "diag"
    dtype = "bool"

    def make_block(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return rng.random((n, 3)) < 0.5


class TestMixtureDensity(StatisticTests):
    statistic = MixtureDensity("full", model("full"))


class TestMixtureDensityTied(StatisticTests):
    statistic = MixtureDensity("tied", model("tied"))


class TestKMeans(Clusters, EstimatorTests):
    estimator = KMeans(3)
    direction = -1


class TestKMeansGivenCentres(Clusters, EstimatorTests):
    estimator = KMeans(3, init=CENTRES + 1.0)
    direction = -1


class GaussianMixtureTests(Clusters, EstimatorTests):
    """A fit of one covariance type."""

    direction = 1
    # Small steps of the objective are rounding once the fit has settled.
    rtol = 1e-8

    @property
    def estimator(self) -> GaussianMixture:
        """Return the estimator of the subclass's covariance type."""
        return GaussianMixture(3, self.covariance_type)


class TestGaussianMixtureFull(GaussianMixtureTests):
    covariance_type = "full"


class TestGaussianMixtureTied(GaussianMixtureTests):
    covariance_type = "tied"


class TestGaussianMixtureDiagonal(GaussianMixtureTests):
    covariance_type = "diag"


class TestGaussianMixtureSpherical(GaussianMixtureTests):
    covariance_type = "spherical"


class TestGaussianMixtureGivenStart(Clusters, EstimatorTests):
    estimator = GaussianMixture(3, "full", init=model("full"))
    direction = 1


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
def test_every_covariance_type_has_a_suite(covariance_type: str) -> None:
    suites = [MixtureTests.__subclasses__(), GaussianMixtureTests.__subclasses__()]
    assert all(covariance_type in {suite.covariance_type for suite in found} for found in suites)
