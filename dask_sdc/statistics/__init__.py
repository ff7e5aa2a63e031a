"""Statistics and models: pure numerics, no Dask."""

from __future__ import annotations

from dask_sdc.statistics.base import Estimator, ShardInfo, State, Statistic
from dask_sdc.statistics.covariance import Covariance, CovarianceResult
from dask_sdc.statistics.fold import TreeFold, tree_fold
from dask_sdc.statistics.gaussian import mixture_model
from dask_sdc.statistics.histogram import Histogram, HistogramResult
from dask_sdc.statistics.kmeans import KMeans
from dask_sdc.statistics.mixture import GaussianMixture
from dask_sdc.statistics.moments import Moments, MomentsResult
from dask_sdc.statistics.pca import PCA, PCAResult
from dask_sdc.statistics.regression import LinearRegression, LinearRegressionResult

__all__ = [
    "PCA",
    "Covariance",
    "CovarianceResult",
    "Estimator",
    "GaussianMixture",
    "Histogram",
    "HistogramResult",
    "KMeans",
    "LinearRegression",
    "LinearRegressionResult",
    "Moments",
    "MomentsResult",
    "PCAResult",
    "ShardInfo",
    "State",
    "Statistic",
    "TreeFold",
    "mixture_model",
    "tree_fold",
]
