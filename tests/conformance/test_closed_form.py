"""The public suite on every statistic that needs no iteration."""

from __future__ import annotations

import numpy as np

from dask_sdc.statistics.covariance import Covariance
from dask_sdc.statistics.histogram import Histogram
from dask_sdc.statistics.moments import Moments
from dask_sdc.statistics.pca import PCA
from dask_sdc.statistics.regression import LinearRegression
from dask_sdc.testing import StatisticTests


class TestMoments(StatisticTests):
    statistic = Moments()
    sample_shape = (3,)


class TestMomentsOfGrids(StatisticTests):
    statistic = Moments(order=2)
    sample_shape = (4, 30)
    dtype = "f4"


class TestMomentsSkippingNaN(StatisticTests):
    statistic = Moments(skipna=True)
    non_finite_shows = False
    sample_shape = (2,)

    def make_block(self, rng: np.random.Generator, n: int) -> np.ndarray:
        x = super().make_block(rng, n)
        x[rng.uniform(size=x.shape) < 0.2] = np.nan
        return x


class TestMomentsOfComplex(StatisticTests):
    statistic = Moments()
    sample_shape = (3,)
    dtype = "c16"

    def make_block(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return rng.normal(size=(n, 3)) + 1j * rng.normal(2.0, size=(n, 3))


class TestMomentsOfIntegers(StatisticTests):
    statistic = Moments()
    sample_shape = ()
    dtype = "i8"

    def make_block(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return (1 << 60) + rng.integers(-1000, 1000, size=n)


class TestCovariance(StatisticTests):
    statistic = Covariance()
    sample_shape = (5,)


class TestWideCovariance(StatisticTests):
    statistic = Covariance()
    sample_shape = (130,)
    dtype = "f4"


class TestHistogram(StatisticTests):
    statistic = Histogram(np.linspace(-1.0, 7.0, 12))
    non_finite_shows = False
    sample_shape = ()


class TestJointHistogram(StatisticTests):
    statistic = Histogram([[0.0, 1.0, 4.0, 9.0], np.linspace(0.0, 6.0, 7)])
    non_finite_shows = False
    sample_shape = (2,)


class TestLinearRegression(StatisticTests):
    statistic = LinearRegression()
    sample_shape = (4,)
    target_shape = (2,)
    empty_result = False


class TestRidgeWithoutIntercept(StatisticTests):
    statistic = LinearRegression(fit_intercept=False, l2=0.5)
    sample_shape = (3,)
    target_shape = ()
    empty_result = False


class TestPCA(StatisticTests):
    statistic = PCA(n_components=2)
    sample_shape = (4,)
    empty_result = False
