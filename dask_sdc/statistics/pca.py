"""Principal components, from the covariance matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_sdc.exceptions import InputError
from dask_sdc.statistics.base import ShardInfo, State
from dask_sdc.statistics.covariance import ScatterStatistic

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PCAResult:
    """Principal components, by falling variance.

    Attributes
    ----------
    components : ndarray of float64, shape (k, d)
        Unit vectors; the entry of largest magnitude (the first of several) of each is positive.
    explained_variance : ndarray of float64, shape (k,)
        Variance along each component.
    explained_variance_ratio : ndarray of float64, shape (k,)
        Share of the total variance; NaN where that is zero.
    singular_values : ndarray of float64, shape (k,)
        Singular values of the centred (and √w-weighted) samples.
    mean : ndarray of float64, shape (d,)
        Mean of the samples.
    noise_variance : float
        Mean variance of the components that were left out; 0 where none was.
    count : int
        Samples of positive weight.
    """

    components: Array
    explained_variance: Array
    explained_variance_ratio: Array
    singular_values: Array
    mean: Array
    noise_variance: float
    count: int

    def transform(self, x: Array) -> Array:
        """Project samples (n, d) on the components: (n, k)."""
        projected: Array = (np.asarray(x, np.float64) - self.mean) @ self.components.T
        return projected


@dataclass(frozen=True)
class PCA(ScatterStatistic):
    """Principal component analysis of samples of shape (d,); its state is that of `Covariance`.

    Parameters
    ----------
    n_components : int or None
        Components to keep, at most d; None keeps all.
    ddof : float
        As in `Covariance`; 1 as in scikit-learn.

    Raises
    ------
    InputError
        If ``n_components`` is not None or an int of at least 1, or above d when a shard is seen.
    """

    n_components: int | None = None
    ddof: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        k = self.n_components
        if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
            raise InputError(f"expected n_components None or an int >= 1, got {k!r}")

    def init(self, info: ShardInfo) -> State:
        """Return the state of no samples of shape (d,), d at least ``n_components``."""
        state = super().init(info)
        if self.n_components is not None and self.n_components > info.shape[0]:
            raise InputError(f"expected n_components <= {info.shape[0]} features, got {self.n_components}")
        return state

    def finalize(self, state: State) -> PCAResult:
        """Return the components of the covariance matrix.

        Raises
        ------
        InputError
            If there are too few samples for a covariance.
        """
        cov = self.covariance(state)
        if not cov.weight > self.ddof:
            raise InputError(f"expected a weight above ddof = {self.ddof}, got {cov.weight}")
        values, vectors = np.linalg.eigh(cov.covariance)
        values, components = np.maximum(values[::-1], 0.0), vectors.T[::-1]
        largest = components[np.arange(len(values)), np.argmax(np.abs(components), axis=1)]
        components = components * np.where(largest < 0, -1.0, 1.0)[:, None]
        k = len(values) if self.n_components is None else self.n_components
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = values / values.sum()
        return PCAResult(
            components[:k],
            values[:k],
            ratio[:k],
            np.sqrt(values[:k] * (cov.weight - self.ddof)),
            cov.mean,
            float(values[k:].mean()) if k < len(values) else 0.0,
            cov.count,
        )
