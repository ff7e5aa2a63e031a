"""k-means by Lloyd's algorithm, as rounds of an additive statistic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.statistics.base import Estimator, ShardInfo, State, Statistic
from dask_sdc.statistics.blocks import real_block, weight_of, weighted_rows
from dask_sdc.statistics.kernels.kmeans import LloydSums, labels, lloyd
from dask_sdc.statistics.sample import RowSample, check_count, check_features, check_seed

__all__ = [
    "KMeans",
    "KMeansResult",
    "KMeansStart",
    "KMeansStatistic",
    "KMeansSums",
    "centres_of_sample",
    "seed_centres",
]

Array = np.ndarray[Any, Any]

#: Rounding of a sum of positive terms that an invariant forgives, relative.
_SLACK = 1e-9

#: Lloyd rounds on the sample that a start is made of.
_SAMPLE_ROUNDS = 25


@dataclass(frozen=True, eq=False)
class KMeansSums:
    """What a round of k-means has added up.

    Parameters
    ----------
    count : int
        Number of rows.
    weight : float
        Σw of the rows.
    counts : numpy.ndarray
        Σw per cluster, shape (k,).
    sums : numpy.ndarray
        Σw·(x − centre) per cluster, shape (k, d).
    cluster_inertia : numpy.ndarray
        Σw·‖x − centre‖² per cluster, shape (k,).
    far_distance, far_weight, far_rows : numpy.ndarray
        The row farthest from the centre of each cluster: its squared distance (−1 where there is none),
        weight and values, shapes (k,), (k,) and (k, d).
    """

    count: int
    weight: float
    counts: Array
    sums: Array
    cluster_inertia: Array
    far_distance: Array
    far_weight: Array
    far_rows: Array

    @property
    def inertia(self) -> float:
        """Σw·‖x − nearest centre‖² over all rows."""
        return float(np.sum(self.cluster_inertia))


@dataclass(frozen=True, eq=False)
class KMeansStatistic(Statistic):
    """Counts, sums and inertia of rows by nearest centre.

    A tie goes to the centre of lower index. On CPUs the labels are the same bits everywhere.

    Parameters
    ----------
    centres : numpy.ndarray
        Shape (k, d), float64.
    """

    hash_input = True

    centres: Array

    def init(self, info: ShardInfo) -> State:
        """Return empty sums."""
        k, d = self.centres.shape
        check_features(info, d)
        return {
            "count": 0,
            "weight": 0.0,
            "counts": np.zeros(k),
            "sums": np.zeros((k, d)),
            "inertia": np.zeros(k),
            "far_distance": np.full(k, -1.0),
            "far_weight": np.zeros(k),
            "far_rows": np.zeros((k, d)),
        }

    def update(self, state: State, x: Any, weights: Any = None) -> State:
        """Add the rows of a block."""
        x, w = weighted_rows(real_block(x, self.centres.shape[1:], "k-means"), weights)
        sums: LloydSums = lloyd(x, w, self.centres)
        count = int(x.shape[0])
        return self.combine(state, {"count": count, "weight": weight_of(x, w), **sums._asdict()})

    def combine(self, a: State, b: State) -> State:
        """Add two states; of equally far rows the left one is kept."""
        farther = b["far_distance"] > a["far_distance"]
        return {
            **{name: a[name] + b[name] for name in ("count", "weight", "counts", "sums", "inertia")},
            **{name: np.where(farther, b[name], a[name]) for name in ("far_distance", "far_weight")},
            "far_rows": np.where(farther[:, None], b["far_rows"], a["far_rows"]),
        }

    def finalize(self, state: State) -> KMeansSums:
        """Return the sums by name."""
        renamed = {"cluster_inertia" if key == "inertia" else key: value for key, value in state.items()}
        return KMeansSums(**renamed)

    def magnitudes(self, state: State) -> Mapping[str, Any]:
        """Return Σ|terms|; for the sums its bound √(Σw·Σw‖x − c‖²) by Cauchy and Schwarz."""
        return {
            "weight": state["weight"],
            "counts": state["counts"],
            "inertia": state["inertia"],
            "sums": np.sqrt(state["counts"] * state["inertia"])[:, None],
        }

    def terms(self, state: State) -> float:
        """Return the number of squared differences that were added up."""
        return float(state["count"] * self.centres.shape[1])

    def invariants(self, state: State) -> Iterable[str]:
        """Return what counts, sums and inertias of the same rows cannot be."""
        with np.errstate(all="ignore"):  # a corrupt state may overflow
            return list(self._broken(state))

    def _broken(self, state: State) -> Iterator[str]:
        counts, inertia = state["counts"], state["inertia"]
        if state["count"] < 0 or np.any(counts < 0) or np.any(inertia < 0):
            yield "a count or an inertia is negative"
            return
        if abs(np.sum(counts) - state["weight"]) > _SLACK * state["weight"]:
            yield f"counts sum to {float(np.sum(counts))!r}, weights to {state['weight']!r}"
        tiny = np.finfo(np.float64).tiny * max(state["count"], 1)
        bound = np.sqrt(counts) * np.sqrt(inertia + tiny) * (1 + _SLACK)
        if np.any(np.abs(state["sums"]) > bound[:, None]):
            yield "the sum of a cluster is longer than its count and inertia allow"
        some = state["far_distance"] >= 0
        if np.any(some != (counts > 0)):
            yield "a cluster with rows has no farthest row, or an empty one has"
        z = (state["far_rows"] - self.centres)[some]
        distance, claimed = np.sum(z * z, axis=1), state["far_distance"][some]
        if np.any(np.abs(distance - claimed) > _SLACK * claimed + tiny):
            yield "a farthest row is not as far from its centre as it says"
        if np.any(inertia > counts * np.maximum(state["far_distance"], 0) * (1 + _SLACK) + tiny):
            yield "an inertia is larger than its count and the farthest row allow"


@dataclass(frozen=True, eq=False)
class KMeansResult:
    """A fitted k-means.

    Parameters
    ----------
    centres : numpy.ndarray
        Shape (k, d), float64.
    counts : numpy.ndarray
        Σw of the rows that made each centre, shape (k,).
    inertia : float or None
        Σw·‖x − nearest centre‖² in the last round, that is about the centres before these; None before
        the first round.
    """

    centres: Array
    counts: Array
    inertia: float | None

    def predict(self, x: Array) -> Array:
        """Return the index of the nearest centre of each row.

        Parameters
        ----------
        x : numpy.ndarray
            Shape (n, d), real.

        Returns
        -------
        numpy.ndarray
            Shape (n,), int64; ties go to the lower index.

        Raises
        ------
        InputError
            If the rows do not have d features.
        """
        return labels(real_block(np.asarray(x), self.centres.shape[1:], "k-means"), self.centres)


@dataclass(frozen=True, eq=False)
class KMeans(Estimator):
    """k-means by Lloyd's algorithm.

    Parameters
    ----------
    n_clusters : int
        Number of clusters k.
    init : {"k-means++"} or array-like
        Where to start: by k-means++ and a few Lloyd rounds on a random sample of rows, or from given
        centres of shape (k, d).
    seed : int
        Seed of the sample and of k-means++, mixed with the seed of the call.
    sample_size : int or None
        Rows of the sample; by default 32 per cluster and at least 256. Every shard sends that many.

    Notes
    -----
    An empty cluster takes the row that is farthest from its own centre, one row per cluster at most, as
    scikit-learn does for a single empty cluster; if there is none to give, it keeps its centre.
    """

    n_clusters: int
    init: Any = "k-means++"
    seed: int = 0
    sample_size: int | None = None

    def __post_init__(self) -> None:
        check_count("n_clusters", self.n_clusters)
        check_seed(self.seed)
        if self.sample_size is not None and check_count("sample_size", self.sample_size) < self.n_clusters:
            raise InputError(f"expected sample_size >= {self.n_clusters} clusters, got {self.sample_size}")
        if isinstance(self.init, str):
            if self.init != "k-means++":
                raise InputError(f"expected init 'k-means++' or an array of centres, got {self.init!r}")
        else:
            object.__setattr__(self, "init", _check_centres(self.init, self.n_clusters))

    def initialise(self, info: ShardInfo) -> State | Statistic:
        """Return the model of given centres, or the sample that makes them."""
        features = check_features(info)
        if isinstance(self.init, str):
            return KMeansStart(start_size(self.n_clusters, self.sample_size), self.seed, self.n_clusters)
        if self.init.shape[1] != features:
            raise InputError(f"expected init of shape ({self.n_clusters}, {features}), got {self.init.shape}")
        return _start_model(self.init)

    def statistic(self, model: State) -> Statistic:
        """Return the statistic of one Lloyd round."""
        return KMeansStatistic(model["centres"])

    def maximise(self, model: State, result: KMeansSums) -> State:
        """Return the model whose centres are the means of their rows."""
        counts, sums = result.counts.copy(), result.sums.copy()
        centres = model["centres"].copy()
        taken = _relocate(centres, counts, sums, result)
        kept = counts > 0
        kept[taken] = False
        centres[kept] += sums[kept] / counts[kept, None]
        return {"centres": centres, "counts": counts, "inertia": result.inertia}

    def objective(self, model: State, result: KMeansSums) -> float:
        """Return the inertia about the centres of ``model``."""
        return result.inertia

    def converged(self, previous: float, current: float, tol: float) -> bool:
        """Say whether the inertia, which has the squared unit of the data, moved by ``tol`` relatively."""
        return abs(current - previous) <= tol * abs(previous)

    def result(self, model: State) -> KMeansResult:
        """Return the centres with a ``predict``."""
        return KMeansResult(model["centres"], model["counts"], model["inertia"])


@dataclass(frozen=True)
class KMeansStart(RowSample):
    """The sample of rows whose result is the first model of `KMeans`.

    Parameters
    ----------
    size, seed : int
        As of `RowSample`.
    n_clusters : int
        Number of centres to make.
    """

    n_clusters: int = 1

    def finalize(self, state: State) -> State:
        """Return the model that k-means++ and a few Lloyd rounds find in the sample."""
        return _start_model(centres_of_sample(state, self.n_clusters, self.seed))


def start_size(components: int, sample_size: int | None) -> int:
    """Return how many rows a start samples: enough to see every cluster, few enough to send."""
    return max(256, 32 * components) if sample_size is None else sample_size


def centres_of_sample(state: State, n_clusters: int, seed: int, rounds: int = _SAMPLE_ROUNDS) -> Array:
    """Return the centres, shape (k, d), of a sampled state of `RowSample`.

    Raises
    ------
    InputError
        If the sample has fewer rows than there are clusters.
    """
    rows = state["rows"]
    if len(rows) < n_clusters:
        raise InputError(f"expected at least {n_clusters} rows for {n_clusters} clusters, got {len(rows)}")
    centres = seed_centres(rows, n_clusters, np.random.default_rng([seed, n_clusters]))
    estimator = KMeans(n_clusters, init=centres)
    model, inertia, info = _start_model(centres), math.inf, ShardInfo(rows.shape[1:], rows.dtype)
    for _ in range(rounds):
        statistic = KMeansStatistic(model["centres"])
        result = statistic.finalize(statistic.update(statistic.init(info), rows))
        model = estimator.maximise(model, result)
        if estimator.converged(inertia, result.inertia, 1e-4):
            break
        inertia = result.inertia
    return np.asarray(model["centres"])


def seed_centres(rows: Array, n_clusters: int, rng: np.random.Generator) -> Array:
    """Choose centres among rows by greedy k-means++.

    Parameters
    ----------
    rows : numpy.ndarray
        Shape (n, d) with n >= ``n_clusters``, float64.
    n_clusters : int
        Number of centres k.
    rng : numpy.random.Generator
        Source of the draws.

    Returns
    -------
    numpy.ndarray
        Shape (k, d).

    Notes
    -----
    Arthur and Vassilvitskii, k-means++: the advantages of careful seeding (SODA 2007), with the best of
    2 + ln k candidates per centre.
    """
    trials = 2 + int(math.log(n_clusters))
    chosen = [int(rng.integers(len(rows)))]
    nearest = _squared_distance(rows, rows[chosen[0]])
    while len(chosen) < n_clusters:
        candidates = _draw(nearest, rng.random(trials), chosen)
        distances = [np.minimum(nearest, _squared_distance(rows, rows[i])) for i in candidates]
        best = int(np.argmin([np.sum(distance) for distance in distances]))
        chosen.append(candidates[best])
        nearest = distances[best]
    return rows[chosen].copy()


def _draw(nearest: Array, uniform: Array, chosen: list[int]) -> list[int]:
    """Draw rows in proportion to their squared distance; the first one left where all are zero."""
    cumulative = np.cumsum(nearest)
    if cumulative[-1] > 0:
        drawn = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
        return [int(i) for i in np.minimum(drawn, len(nearest) - 1)]
    return [next(i for i in range(len(nearest)) if i not in chosen)]


def _squared_distance(rows: Array, centre: Array) -> Array:
    z = rows - centre
    return np.asarray(np.einsum("ij,ij->i", z, z))


def _start_model(centres: Array) -> State:
    return {"centres": centres, "counts": np.zeros(len(centres)), "inertia": None}


def _check_centres(value: Any, n_clusters: int) -> Array:
    try:
        centres = np.array(value, dtype=np.float64, order="C")
    except (TypeError, ValueError) as error:
        raise InputTypeError(f"expected init to be an array of numbers, got {value!r}") from error
    if centres.ndim != 2 or centres.shape[0] != n_clusters:
        raise InputError(f"expected init of shape ({n_clusters}, d), got {centres.shape}")
    if not np.all(np.isfinite(centres)):
        raise InputError("expected finite init, got NaN or Inf")
    return centres


def _relocate(centres: Array, counts: Array, sums: Array, result: KMeansSums) -> list[int]:
    """Give each empty cluster the farthest row left, in place; return the clusters that took one."""
    donors = np.argsort(-result.far_distance, kind="stable")
    able = [k for k in donors if result.far_distance[k] > 0 and counts[k] > result.far_weight[k]]
    taken = []
    for empty, donor in zip(np.flatnonzero(counts == 0), able, strict=False):
        row, weight = result.far_rows[donor], result.far_weight[donor]
        counts[donor] -= weight
        sums[donor] -= weight * (row - centres[donor])
        centres[empty] = row
        counts[empty] = weight
        taken.append(int(empty))
    return taken
