"""Rows per second of one round of the iterative models on one thread, against scikit-learn on all.

The peers are given the same data and the same start; runs are interleaved, so that a noisy machine slows
both, and the ratio is the median over the repeats. A fit of scikit-learn of m iterations also ends with
one more expectation step, which is counted against it as what it is: a part of what its user waits for.

Usage: python benchmarks/em_kernels.py [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.cluster import KMeans as PeerKMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture as PeerMixture
from threadpoolctl import threadpool_limits

from dask_sdc.statistics.base import Estimator, ShardInfo
from dask_sdc.statistics.gaussian import mixture_model
from dask_sdc.statistics.kmeans import KMeans
from dask_sdc.statistics.mixture import GaussianMixture

COMPONENTS, FEATURES = 8, 16

#: Least ratio to scikit-learn: half of the 7x that two audited workers must reach together, and room
#: for auditing a tenth of the work.
REQUIRED = {"diag": 4.0, "spherical": 4.0, "full": 4.0, "tied": 4.0, "kmeans": 0.0}


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


def rounds(estimator: Estimator, x: np.ndarray, count: int) -> Callable[[], Any]:
    """Return a function that runs ``count`` rounds of an estimator on one block, on one thread."""
    info = ShardInfo(x.shape[1:], x.dtype)

    def run() -> Any:
        model = estimator.initialise(info)
        for _ in range(count):
            statistic = estimator.statistic(model)
            state = statistic.update(statistic.init(info), x)
            model = estimator.maximise(model, statistic.finalize(state))
        return model

    return run


def cases(x: np.ndarray, means: np.ndarray, count: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return per case our run and the peer's."""
    found = {}
    for kind in ("diag", "spherical", "full", "tied"):
        model = start(kind, means)
        invert = np.linalg.inv if kind in ("full", "tied") else np.reciprocal
        peer = PeerMixture(
            COMPONENTS,
            covariance_type=kind,
            tol=0.0,
            max_iter=count,
            weights_init=model["weights"],
            means_init=means,
            precisions_init=invert(model["covariances"]),
        )
        ours = rounds(GaussianMixture(COMPONENTS, kind, init=model), x, count)
        found[kind] = (ours, lambda peer=peer: peer.fit(x))
    lloyd = PeerKMeans(COMPONENTS, init=means, n_init=1, algorithm="lloyd", max_iter=count, tol=0.0)
    found["kmeans"] = (rounds(KMeans(COMPONENTS, init=means), x, count), lambda: lloyd.fit(x))
    return found


def seconds(run: Callable[[], Any]) -> float:
    """Return the wall time of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int) -> tuple[float, float, float]:
    """Return the best time of each side and the median ratio of interleaved pairs."""
    ours()
    theirs()
    pairs = []
    for _ in range(repeats):
        with threadpool_limits(1):
            mine = seconds(ours)
        pairs.append((mine, seconds(theirs)))
    best = [min(side) for side in zip(*pairs, strict=True)]
    return best[0], best[1], statistics.median(theirs / mine for mine, theirs in pairs)


def main() -> int:
    """Run the benchmark; the exit code says whether every ratio is reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, fewer repeats")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore", ConvergenceWarning)
    rows, count, repeats = (100_000, 3, 3) if quick else (1_000_000, 3, 5)
    x, means = data(rows)
    figures, passed = [], True
    for name, (ours, theirs) in cases(x, means, count).items():
        mine, peer, ratio = measure(ours, theirs, repeats)
        passed &= ratio >= REQUIRED[name]
        rates = rows * count / mine / 1e6, rows * count / peer / 1e6
        print(f"{name}: {rates[0]:.2f} Mrows/s, scikit-learn {rates[1]:.2f}, ratio {ratio:.1f}", flush=True)
        figures.append(f"{name} {rates[0]:.1f} Mrows/s {ratio:.1f}x")
    print(f"{'PASS' if passed else 'FAIL'} em_kernels: {', '.join(figures)}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
