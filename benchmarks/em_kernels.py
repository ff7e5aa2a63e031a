"""Rounds of the iterative models on one thread, against scikit-learn on all threads.

Both sides are given the same data and the same start, and run in turn. A fit of scikit-learn of m
iterations ends with one more expectation step, which is part of what its user waits for and is not
counted as an iteration.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from _bench import Bench, interleave, main
from sklearn.cluster import KMeans as PeerKMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture as PeerMixture

from dask_sdc.statistics.base import Estimator, ShardInfo
from dask_sdc.statistics.gaussian import mixture_model
from dask_sdc.statistics.kmeans import KMeans
from dask_sdc.statistics.mixture import GaussianMixture

COMPONENTS, FEATURES = 8, 16

#: Iterations per run.
ROUNDS = 3

#: Least speed-up of a mixture over scikit-learn on two threads. Two workers must reach 7 together while a
#: tenth of the work is audited: 7 * 1.1 / 2, rounded up.
REQUIRED = 4.0


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return clustered rows, float64, and the centres to start from."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(COMPONENTS, FEATURES)) * 2
    return centres[rng.integers(0, COMPONENTS, rows)] + rng.normal(size=(rows, FEATURES)), centres + 0.1


def start(covariance_type: str, means: np.ndarray) -> dict[str, np.ndarray]:
    """Return a model of unit covariances."""
    k, d = means.shape
    covariances = {
        "full": np.broadcast_to(np.eye(d), (k, d, d)),
        "tied": np.eye(d),
        "diag": np.ones((k, d)),
        "spherical": np.ones(k),
    }[covariance_type]
    return mixture_model(np.full(k, 1 / k), means, covariances=covariances, covariance_type=covariance_type)


def run(estimator: Estimator, x: np.ndarray) -> Any:
    """Run the rounds of an estimator on one block; return the last model."""
    info = ShardInfo(x.shape[1:], x.dtype)
    model = estimator.initialise(info)
    for _ in range(ROUNDS):
        statistic = estimator.statistic(model)
        state = statistic.update(statistic.init(info), x)
        model = estimator.maximise(model, statistic.finalize(state))
    return model


def mixtures(kind: str, x: np.ndarray, means: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Return our fit of one covariance type and scikit-learn's."""
    model = start(kind, means)
    invert = np.linalg.inv if kind in ("full", "tied") else np.reciprocal
    peer = PeerMixture(
        COMPONENTS,
        covariance_type=kind,
        tol=0.0,
        max_iter=ROUNDS,
        weights_init=model["weights"],
        means_init=means,
        precisions_init=invert(model["covariances"]),
    )
    return {
        "ours": partial(run, GaussianMixture(COMPONENTS, kind, init=model), x),
        "peer": partial(peer.fit, x),
    }


def clusters(x: np.ndarray, means: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Return our k-means and scikit-learn's."""
    peer = PeerKMeans(COMPONENTS, init=means, n_init=1, algorithm="lloyd", max_iter=ROUNDS, tol=0.0)
    return {"ours": partial(run, KMeans(COMPONENTS, init=means), x), "peer": partial(peer.fit, x)}


def measure(bench: Bench) -> None:
    """Compare every covariance type (in a quick run two of them), and k-means, which has no bound."""
    warnings.simplefilter("ignore", ConvergenceWarning)
    rows = 50_000 if bench.quick else 1_000_000
    x, means = data(rows)
    kinds = ("diag", "full") if bench.quick else ("diag", "spherical", "full", "tied")
    cases = {kind: mixtures(kind, x, means) for kind in kinds}
    for name, contestants in {**cases, "kmeans": clusters(x, means)}.items():
        times = interleave(contestants, rounds=3 if bench.quick else 5)
        bench.figure(f"{name}_mrows_s", rows * ROUNDS / times.best("ours") / 1e6)
        bench.figure(f"{name}_peer_mrows_s", rows * ROUNDS / times.best("peer") / 1e6)
        bound = None if name == "kmeans" else REQUIRED
        bench.figure(f"{name}_speedup", times.ratio("peer", "ours"), at_least=bound)


if __name__ == "__main__":
    main("em_kernels", measure, __doc__)
