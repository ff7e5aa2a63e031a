"""The public suite on every statistic that needs no iteration."""

from __future__ import annotations

import numpy as np
import pytest

from dask_sdc.statistics.covariance import Covariance
from dask_sdc.statistics.histogram import Histogram
from dask_sdc.statistics.moments import Moments
from dask_sdc.statistics.pca import PCA
from dask_sdc.statistics.regression import LinearRegression
from dask_sdc.testing import StatisticTests


class CompensatedTests(StatisticTests):
    """For states that hold the rounding errors of sums, which differ where sums agree."""

    def test_weights_of_one_are_no_weights(self, rng: np.random.Generator) -> None:
        x, columns = self.columns(rng, 200)
        self.agree(self.state(x, **columns), self.state(x, weights=np.ones(200), **columns))


class TestMoments(CompensatedTests):
    statistic = Moments()
    sample_shape = (3,)


class TestMomentsOfGrids(CompensatedTests):
    statistic = Moments(order=2)
    sample_shape = (4, 30)
    dtype = "f4"


class TestMomentsSkippingNaN(CompensatedTests):
    statistic = Moments(skipna=True)
    sample_shape = (2,)

    def make_block(self, rng: np.random.Generator, n: int) -> np.ndarray:
        x = super().make_block(rng, n)
        x[rng.uniform(size=x.shape) < 0.2] = np.nan
        return x

    @pytest.mark.skip(reason="NaN is legal here")
    def test_non_finite_samples_show(self) -> None: ...


class TestMomentsOfComplex(CompensatedTests):
    statistic = Moments()
    sample_shape = (3,)
    dtype = "c16"

    def make_block(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return rng.normal(size=(n, 3)) + 1j * rng.normal(2.0, size=(n, 3))


class TestMomentsOfIntegers(CompensatedTests):
    statistic = Moments()
    sample_shape = ()
    dtype = "i8"

    def make_block(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return (1 << 60) + rng.integers(-1000, 1000, size=n)


class TestCovariance(CompensatedTests):
    statistic = Covariance()
    sample_shape = (5,)


class TestWideCovariance(CompensatedTests):
    statistic = Covariance()
    sample_shape = (130,)
    dtype = "f4"


class TestHistogram(StatisticTests):
    statistic = Histogram(np.linspace(-1.0, 7.0, 12))
    non_finite_shows = False
    sample_shape = ()

    @pytest.mark.skip(reason="what is not finite has its slots")
    def test_non_finite_samples_show(self) -> None: ...


class TestJointHistogram(TestHistogram):
    statistic = Histogram([[0.0, 1.0, 4.0, 9.0], np.linspace(0.0, 6.0, 7)])
    non_finite_shows = False
    sample_shape = (2,)


class TestLinearRegression(CompensatedTests):
    statistic = LinearRegression()
    sample_shape = (4,)
    target_shape = (2,)
    empty_result = False
    empty_result = False


class TestRidgeWithoutIntercept(CompensatedTests):
    statistic = LinearRegression(fit_intercept=False, l2=0.5)
    sample_shape = (3,)
    target_shape = ()
    empty_result = False
    empty_result = False


class TestPCA(CompensatedTests):
    statistic = PCA(n_components=2)
    sample_shape = (4,)
    empty_result = False
