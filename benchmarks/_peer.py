"""One EM iteration of another package, again and again, in a process of its own: what `peers.py` starts.

Called with the name of a peer, a covariance type and a folder that holds ``rows.npy`` and ``start.npz``.
Writes a line when it is ready; then reads lines with the audit rate, runs one iteration from the start for
each, and answers with the means that it arrived at. Workers that a peer spawns import this module, so it
imports no more than they need.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

#: Runs one iteration at an audit rate (which only some heed) and returns the means, shape (k, d).
Step = Callable[[float], np.ndarray]

#: Seconds after which mixle gives a worker up; an audited round of a million rows takes a while.
PATIENCE = 3600.0


def mixle_model(kind: str, start: Any) -> tuple[Any, Any]:
    """Return model and estimator of mixle's mixture."""
    from mixle.stats.latent.mixture import MixtureDistribution, MixtureEstimator
    from mixle.stats.multivariate import diagonal_gaussian, multivariate_gaussian

    if kind == "diag":
        component = diagonal_gaussian.DiagonalGaussianDistribution
        estimator = diagonal_gaussian.DiagonalGaussianEstimator
    else:
        component = multivariate_gaussian.MultivariateGaussianDistribution
        estimator = multivariate_gaussian.MultivariateGaussianEstimator
    k, d = start["means"].shape
    parts = [component(*pair) for pair in zip(start["means"], start["covariances"], strict=True)]
    return MixtureDistribution(parts, start["weights"]), MixtureEstimator([estimator(dim=d)] * k)


def mixle(kind: str, x: np.ndarray, start: Any) -> Step:
    """Return an iteration of mixle on two workers, which audits nothing."""
    from mixle.utils.parallel.resilient_em import ResilientMPEncodedData

    model, estimator = mixle_model(kind, start)
    handle = ResilientMPEncodedData(list(x), estimator, num_workers=2, worker_timeout_s=PATIENCE)
    return lambda rate: _means(handle.pysp_seq_estimate(estimator, model))


def mixle_audited(kind: str, x: np.ndarray, start: Any) -> Step:
    """Return an audited iteration of mixle on ten workers, the fewest of which rate 0.1 audits one."""
    from mixle.utils.parallel.sdc_audit import AuditedMPEncodedData

    model, estimator = mixle_model(kind, start)
    handle = AuditedMPEncodedData(
        list(x), estimator, num_workers=10, rng=np.random.RandomState(0), worker_timeout_s=PATIENCE
    )

    def step(rate: float) -> np.ndarray:
        handle.audit_rate = rate
        means = _means(handle.pysp_seq_estimate(estimator, model))
        if len(handle.last_round_audited_shards) != round(10 * rate):
            raise RuntimeError(f"expected {round(10 * rate)} audits, got {handle.last_round_audited_shards}")
        return means

    return step


def _means(model: Any) -> np.ndarray:
    return np.array([np.ravel(component.mu) for component in model.components])


def sklearn(kind: str, x: np.ndarray, start: Any) -> Step:
    """Return a fit of scikit-learn of one iteration; it ends with one more expectation step."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    warnings.simplefilter("ignore", ConvergenceWarning)
    peer = GaussianMixture(
        len(start["means"]),
        covariance_type=kind,
        tol=0.0,
        max_iter=1,
        weights_init=start["weights"],
        means_init=start["means"],
        precisions_init=start["precisions"],
    )
    return lambda rate: np.asarray(peer.fit(x).means_)


def serve(name: str, kind: str, folder: str) -> None:
    """Answer every line."""
    peers = {"mixle": mixle, "mixle_audited": mixle_audited, "sklearn": sklearn}
    step = peers[name](kind, np.load(f"{folder}/rows.npy"), np.load(f"{folder}/start.npz"))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(step(float(line)).tolist()), flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
