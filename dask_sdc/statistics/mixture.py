"""Gaussian mixtures by expectation and maximisation, as rounds of an additive statistic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.statistics.base import Estimator, ShardInfo, State, Statistic
from dask_sdc.statistics.blocks import real_block, weight_of, weighted_rows
from dask_sdc.statistics.gaussian import (
    checked_type,
    components_of,
    grand_mean,
    kind_of,
    largest_constant,
    mixture_model,
    model_of,
    sensitivity,
)
from dask_sdc.statistics.kernels.kmeans import labels
from dask_sdc.statistics.kernels.mixture import DIAGONAL, FULL, TIED, Components, density, expectation
from dask_sdc.statistics.kmeans import centres_of_sample, start_size
from dask_sdc.statistics.sample import RowSample, check_count, check_features, check_seed

__all__ = [
    "ExpectationSums",
    "GaussianMixture",
    "GaussianMixtureResult",
    "LogDensity",
    "MixtureDensity",
    "MixtureExpectation",
    "MixtureStart",
]

Array = np.ndarray[Any, Any]

_EPS = float(np.finfo(np.float64).eps)
_TINY = float(np.finfo(np.float64).tiny)

#: Rounding that an inequality between sums of positive terms forgives, relative.
_SLACK = 1e-9


# -- statistics ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ExpectationSums:
    """What an expectation step has added up under one model.

    Parameters
    ----------
    count : int
        Number of rows.
    weight : float
        Σw of the rows.
    responsibility : numpy.ndarray
        Σ w·r per component, shape (k,).
    first : numpy.ndarray
        Σ w·r·(x − mean) about the means of the model, shape (k, d).
    second : numpy.ndarray
        Σ w·r·(x − mean)², shape (k, d), for "diag" and "spherical"; Σ w·r·(x − mean)(x − mean)ᵀ, shape
        (k, d, d), for "full"; for "tied" Σ w·(x − m)(x − m)ᵀ about the mean m of the mixture, (d, d).
    log_density : float
        Σ w·log p(x).
    """

    count: int
    weight: float
    responsibility: Array
    first: Array
    second: Array
    log_density: float

    @property
    def mean_log_density(self) -> float:
        """Σ w·log p(x) / Σ w, the ``lower_bound_`` of scikit-learn."""
        if not self.weight > 0:
            raise InputError(f"expected samples of positive weight, got {self.count} of weight {self.weight}")
        return self.log_density / self.weight


@dataclass(frozen=True)
class LogDensity:
    """Log density of samples under a model.

    Parameters
    ----------
    total : float
        Σ w·log p(x).
    count : int
        Number of rows.
    weight : float
        Σw; equals ``count`` without weights.
    """

    total: float
    count: int
    weight: float

    @property
    def mean(self) -> float:
        """Σ w·log p(x) / Σ w; NaN without samples."""
        return self.total / self.weight if self.weight > 0 else math.nan


@dataclass(frozen=True, eq=False)
class _MixtureStatistic(Statistic):
    hash_input = True

    covariance_type: str
    model: State

    def _read(self, x: Any, weights: Any) -> tuple[Any, Any, State]:
        """Return block and weights, checked, and the count and weight of the block."""
        x, w = weighted_rows(real_block(x, self.model["means"].shape[1:], "a Gaussian mixture"), weights)
        return x, w, {"count": int(x.shape[0]), "weight": weight_of(x, w)}

    def terms(self, state: State) -> float:
        """Return the number of features of all rows: each adds a term to a log density."""
        return float(state["count"] * self.model["means"].shape[1])

    def combine(self, a: State, b: State) -> State:
        """Add two states."""
        return {key: max(a[key], b[key]) if key == "largest" else a[key] + b[key] for key in a}

    def _density_magnitude(self, state: State, condition: float) -> float:
        """Return M of Σ w·log p: constants and distances that log p is the difference of."""
        components = components_of(self.model, self.covariance_type)
        return sensitivity(components) * (condition + largest_constant(components) * float(state["weight"]))


@dataclass(frozen=True, eq=False)
class MixtureExpectation(_MixtureStatistic):
    """Responsibilities and moments of an expectation step.

    Parameters
    ----------
    covariance_type : {"full", "tied", "diag", "spherical"}
        What the covariances of the model are.
    model : dict
        See `mixture_model`.

    Notes
    -----
    Moments are taken about the means of the model, so that they stay accurate for data far from zero.
    Besides them the state holds ``condition``, Σ w·r·|log p| per component, and ``largest``, max |log p|,
    from which the envelope learns how much rounding the responsibilities amplify.
    """

    def init(self, info: ShardInfo) -> State:
        """Return empty sums."""
        k, d = self.model["means"].shape
        check_features(info, d)
        shape = {FULL: (k, d, d), TIED: (d, d), DIAGONAL: (k, d)}[kind_of(self.covariance_type)]
        return {
            "count": 0,
            "weight": 0.0,
            "responsibility": np.zeros(k),
            "condition": np.zeros(k),
            "first": np.zeros((k, d)),
            "second": np.zeros(shape),
            "log_density": 0.0,
            "largest": 0.0,
        }

    def update(self, state: State, x: Any, weights: Any = None) -> State:
        """Add the rows of a block."""
        x, w, counted = self._read(x, weights)
        sums = expectation(components_of(self.model, self.covariance_type), x, w)
        return self.combine(state, {**counted, **sums._asdict()})

    def finalize(self, state: State) -> ExpectationSums:
        """Return the sums by name."""
        kept = {key: value for key, value in state.items() if key not in ("condition", "largest")}
        return ExpectationSums(**kept)

    def magnitudes(self, state: State) -> Mapping[str, Any]:
        """Return M of every field.

        The terms of a responsibility are positive, but each has the rounding of its log density as a
        relative error; moments are bounded by Cauchy and Schwarz.
        """
        components = components_of(self.model, self.covariance_type)
        growth, constant = sensitivity(components), largest_constant(components)
        amplified = 1 + 2 * growth * (state["largest"] + constant)
        responsibility, condition, second = state["responsibility"], state["condition"], state["second"]
        diagonal = self._diagonal(second)
        if components.kind == TIED:
            spread = self._scatter_about_means(state)
            moments = np.sqrt(diagonal[:, None] * diagonal[None, :])
        else:
            spread = diagonal
            moments = np.sqrt(diagonal[..., :, None] * diagonal[..., None, :]) * amplified
        return {
            "weight": state["weight"],
            "responsibility": responsibility + 2 * growth * (condition + constant * responsibility),
            "condition": (condition + constant * responsibility) * amplified,
            "first": np.sqrt(responsibility[:, None] * spread) * amplified,
            "second": moments if components.kind != DIAGONAL else diagonal * amplified,
            "log_density": self._density_magnitude(state, float(np.sum(condition))),
            "largest": growth * (state["largest"] + constant),
        }

    def _diagonal(self, second: Array) -> Array:
        """Return the diagonals of matrices of moments; moments (k, d) as they are."""
        if kind_of(self.covariance_type) == DIAGONAL:
            return second
        return np.diagonal(second, axis1=-2, axis2=-1)

    def _scatter_about_means(self, state: State) -> Array:
        """Bound Σ w·r·(x − mean)² of tied components by the scatter about the mixture's mean, (k, d)."""
        away = self.model["means"] - grand_mean(self.model)
        reach = np.sqrt(self._diagonal(state["second"])) + np.sqrt(state["responsibility"][:, None]) * np.abs(
            away
        )
        return np.asarray(reach * reach)

    def invariants(self, state: State) -> Iterable[str]:
        """Return what responsibilities and moments of the same rows cannot be."""
        with np.errstate(all="ignore"):  # a corrupt state may overflow
            return list(self._broken(state))

    def _broken(self, state: State) -> Iterator[str]:
        responsibility, first, diagonal = (
            state["responsibility"],
            state["first"],
            self._diagonal(state["second"]),
        )
        if state["count"] < 0 or np.any(responsibility < 0) or np.any(diagonal < 0):
            yield "a count, a responsibility or a second moment is negative"
            return
        excess = abs(np.sum(responsibility) - state["weight"])
        # Per row k roundings and a division, then sums over tiles of 128 rows and over tiles.
        roundings = 2 * len(responsibility) + 300 + state["count"] / 128
        if excess > roundings * _EPS * state["weight"]:
            yield f"responsibilities sum to {float(np.sum(responsibility))!r}, weights to {state['weight']!r}"
        if abs(state["log_density"]) > np.sum(state["condition"]) * (1 + _SLACK):
            yield "the log density is larger than the sum of its sizes"
        if np.sum(state["condition"]) > state["largest"] * state["weight"] * (1 + _SLACK):
            yield "the sizes of the log densities exceed the largest one"
        yield from self._energy_invariants(state)
        spread = self._scatter_about_means(state) if self.covariance_type == "tied" else diagonal
        tiny = _TINY * max(state["count"], 1)
        if np.any(np.abs(first) > np.sqrt(responsibility)[:, None] * np.sqrt(spread + tiny) * (1 + _SLACK)):
            yield "a first moment is larger than its responsibility and second moment allow"
        yield from self._matrix_invariants(state["second"], diagonal, tiny)

    def _energy_invariants(self, state: State) -> Iterator[str]:
        """Compare log densities with moments: their difference is the entropy of the responsibilities.

        log p(x) = Σ r·log(weight·density) + Σ r·log(1/r) (Neal and Hinton, A view of the EM algorithm,
        1998, eq. 7), whose last term lies between 0 and log k.
        """
        components = components_of(self.model, self.covariance_type)
        responsibility, weight = state["responsibility"], state["weight"]
        present = responsibility > 0
        constants = components.constants[present] * responsibility[present]
        distance = self._mahalanobis(components, state)
        entropy = state["log_density"] - (np.sum(constants) - 0.5 * distance)
        size = np.sum(np.abs(constants)) + distance + np.sum(state["condition"]) + weight
        slack = _SLACK * sensitivity(components) * size
        if not -slack <= entropy <= weight * math.log(len(responsibility)) + slack:
            yield f"log densities and second moments leave an entropy of {entropy!r}"

    def _mahalanobis(self, components: Components, state: State) -> float:
        """Return Σ w·r·‖Lᵀ(x − mean)‖² from the moments."""
        second, factors = state["second"], components.factors
        if components.kind == DIAGONAL:
            return float(np.sum(second * factors[0] ** 2))
        if components.kind == TIED:
            away = components.means - components.shift
            cross = state["first"].T @ away
            inner = (state["responsibility"][:, None] * away).T @ away
            second = (second - cross - cross.T - inner)[None]
        return float(np.sum((factors @ np.swapaxes(factors, 1, 2)) * second))

    def _matrix_invariants(self, second: Array, diagonal: Array, tiny: float) -> Iterator[str]:
        if kind_of(self.covariance_type) == DIAGONAL:
            return
        if not np.array_equal(second, np.swapaxes(second, -1, -2)):
            yield "a matrix of second moments is not symmetric"
        root = np.sqrt(diagonal + tiny)
        if np.any(np.abs(second) > root[..., :, None] * root[..., None, :] * (1 + _SLACK)):
            yield "a matrix of second moments has an entry that its diagonal does not allow"


@dataclass(frozen=True, eq=False)
class MixtureDensity(_MixtureStatistic):
    """Σ w·log p(x) under a mixture.

    Parameters
    ----------
    covariance_type : {"full", "tied", "diag", "spherical"}
        What the covariances of the model are.
    model : dict
        See `mixture_model`.
    """

    def init(self, info: ShardInfo) -> State:
        """Return empty sums."""
        check_features(info, self.model["means"].shape[1])
        return {"count": 0, "weight": 0.0, "log_density": 0.0, "condition": 0.0, "largest": 0.0}

    def update(self, state: State, x: Any, weights: Any = None) -> State:
        """Add the rows of a block."""
        x, w, counted = self._read(x, weights)
        sums = density(components_of(self.model, self.covariance_type), x, w)
        return self.combine(state, {**counted, **sums._asdict()})

    def finalize(self, state: State) -> LogDensity:
        """Return total, count and weight."""
        return LogDensity(state["log_density"], state["count"], state["weight"])

    def magnitudes(self, state: State) -> Mapping[str, Any]:
        """Return M of every field."""
        magnitude = self._density_magnitude(state, state["condition"])
        components = components_of(self.model, self.covariance_type)
        largest = sensitivity(components) * (state["largest"] + largest_constant(components))
        return {
            "weight": state["weight"],
            "log_density": magnitude,
            "condition": magnitude,
            "largest": largest,
        }

    def invariants(self, state: State) -> Iterable[str]:
        """Yield what the sums of the same rows cannot be."""
        if abs(state["log_density"]) > state["condition"] * (1 + _SLACK):
            yield "the log density is larger than the sum of its sizes"
        if state["condition"] > state["largest"] * state["weight"] * (1 + _SLACK):
            yield "the sizes of the log densities exceed the largest one"


# -- estimator -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GaussianMixtureResult:
    """A fitted Gaussian mixture, with scikit-learn's names and shapes.

    Parameters
    ----------
    covariance_type : {"full", "tied", "diag", "spherical"}
        What the covariances are.
    weights : numpy.ndarray
        Shape (k,), of sum 1.
    means : numpy.ndarray
        Shape (k, d).
    covariances, precisions_cholesky : numpy.ndarray
        Shapes as of `mixture_model`.
    """

    covariance_type: str
    weights: Array
    means: Array
    covariances: Array
    precisions_cholesky: Array

    def score_samples(self, x: Array) -> Array:
        """Return log p of each row of ``x`` (n, d), shape (n,)."""
        joint = self._log_joint(x)
        largest = np.max(joint, axis=1)
        return np.asarray(largest + np.log(np.sum(np.exp(joint - largest[:, None]), axis=1)))

    def predict_proba(self, x: Array) -> Array:
        """Return the responsibilities of each row of ``x`` (n, d), shape (n, k), rows of sum 1."""
        joint = self._log_joint(x)
        weights = np.exp(joint - np.max(joint, axis=1, keepdims=True))
        return np.asarray(weights / np.sum(weights, axis=1, keepdims=True))

    def predict(self, x: Array) -> Array:
        """Return the most probable component of each row of ``x`` (n, d), shape (n,), int64."""
        return np.asarray(np.argmax(self._log_joint(x), axis=1))

    def _log_joint(self, x: Array) -> Array:
        x = np.asarray(real_block(x, self.means.shape[1:], "a Gaussian mixture"), dtype=np.float64)
        model = {
            "weights": self.weights,
            "means": self.means,
            "precisions_cholesky": self.precisions_cholesky,
        }
        components = components_of(model, self.covariance_type)
        joint = np.empty((len(x), len(self.means)))
        for k, mean in enumerate(self.means):
            if components.kind == DIAGONAL:
                y = (x - mean) * components.factors[0, k]
            else:
                y = (x - mean) @ components.factors[k if components.kind == FULL else 0]
            joint[:, k] = components.constants[k] - 0.5 * np.einsum("ij,ij->i", y, y)
        return joint


@dataclass(frozen=True, eq=False)
class GaussianMixture(Estimator):
    """Gaussian mixture by expectation and maximisation.

    Parameters
    ----------
    n_components : int
        Number of components k.
    covariance_type : {"full", "tied", "diag", "spherical"}
        One matrix each, one for all, one diagonal each, or one variance each.
    reg_covar : float
        Added to the diagonal of every covariance, in squared units of the data.
    init : {"kmeans", "k-means++"} or mapping
        Where to start: from k-means on a random sample of rows; or from ``weights``, ``means`` and either
        ``covariances`` or ``precisions`` (shapes as of `mixture_model`). "k-means++" stops after seeding.
    seed : int
        Seed of the sample and of k-means++, mixed with the seed of the call.
    sample_size : int or None
        Rows of the sample; by default 32 per component and at least 256. Every shard sends that many.

    Notes
    -----
    The steps and the regularisation are scikit-learn's: from the same start the parameters agree. The
    objective is the mean log density of a row, so that a ``tol`` means the same as there.
    """

    n_components: int
    covariance_type: str = "full"
    reg_covar: float = 1e-6
    init: Any = "kmeans"
    seed: int = 0
    sample_size: int | None = None

    def __post_init__(self) -> None:
        check_count("n_components", self.n_components)
        checked_type(self.covariance_type)
        check_seed(self.seed)
        if isinstance(self.reg_covar, bool) or not isinstance(self.reg_covar, int | float | np.floating):
            raise InputTypeError(f"expected reg_covar to be a number, got {self.reg_covar!r}")
        if not (math.isfinite(self.reg_covar) and self.reg_covar >= 0):
            raise InputError(f"expected a finite reg_covar >= 0, got {self.reg_covar}")
        size = self.sample_size
        if size is not None and check_count("sample_size", size) < self.n_components:
            raise InputError(f"expected sample_size >= {self.n_components} components, got {size}")
        if isinstance(self.init, Mapping):
            object.__setattr__(self, "init", self._given(self.init))
        elif self.init not in ("kmeans", "k-means++"):
            raise InputError(f"expected init 'kmeans', 'k-means++' or a mapping, got {self.init!r}")

    def _given(self, start: Mapping[str, Any]) -> State:
        """Return the model of a given start; one that is a model already stays as it is."""
        keys = set(start) - {"precisions_cholesky"}
        if not {"weights", "means"} <= keys <= {"weights", "means", "covariances", "precisions"}:
            raise InputError(
                f"expected init with weights, means and covariances or precisions, got {sorted(start)}"
            )
        parameters = {key: start[key] for key in keys}
        model = mixture_model(**parameters, covariance_type=self.covariance_type)
        if len(model["weights"]) != self.n_components:
            raise InputError(f"expected init of {self.n_components} components, got {len(model['weights'])}")
        return model

    def initialise(self, info: ShardInfo) -> State | Statistic:
        """Return the model of a given start, or the sample that makes one."""
        features = check_features(info)
        if isinstance(self.init, str):
            return MixtureStart(start_size(self.n_components, self.sample_size), self.seed, self)
        if self.init["means"].shape[1] != features:
            raise InputError(f"expected init of {features} features, got {self.init['means'].shape[1]}")
        return self.init

    def statistic(self, model: State) -> Statistic:
        """Return the statistic of one expectation step."""
        return MixtureExpectation(self.covariance_type, model)

    def maximise(self, model: State, result: ExpectationSums) -> State:
        """Return the model of greatest expected log density.

        Raises
        ------
        InputError
            If there were no samples, or a covariance is singular in spite of ``reg_covar``.
        """
        if not result.weight > 0:
            raise InputError(f"expected samples of positive weight, got {result.count}")
        counts = result.responsibility + 10 * _EPS  # no division by zero, as in scikit-learn
        steps = result.first / counts[:, None]
        second = result.second
        if self.covariance_type == "tied":
            away = np.sqrt(counts)[:, None] * (model["means"] + steps - grand_mean(model))
            covariances = (second - away.T @ away) / np.sum(counts)
        elif self.covariance_type == "full":
            covariances = second / counts[:, None, None] - steps[:, :, None] * steps[:, None, :]
        else:
            covariances = np.maximum(second / counts[:, None] - steps * steps, 0.0)
        if self.covariance_type == "spherical":
            covariances = np.mean(covariances, axis=1)
        covariances = self._regularised(covariances)
        return model_of(counts / np.sum(counts), model["means"] + steps, covariances, self.covariance_type)

    def _regularised(self, covariances: Array) -> Array:
        if kind_of(self.covariance_type) == DIAGONAL:
            return np.asarray(covariances + self.reg_covar)
        return covariances + self.reg_covar * np.eye(covariances.shape[-1])

    def objective(self, model: State, result: ExpectationSums) -> float:
        """Return the mean log density of a row under ``model``."""
        return result.mean_log_density

    def result(self, model: State) -> GaussianMixtureResult:
        """Return the parameters by name."""
        return GaussianMixtureResult(self.covariance_type, **model)

    def log_density(self, model: State) -> Statistic:
        """Return the statistic of Σ w·log p(x)."""
        return MixtureDensity(self.covariance_type, model)


@dataclass(frozen=True, eq=False)
class MixtureStart(RowSample):
    """The sample of rows whose result is the first model of a `GaussianMixture`.

    Parameters
    ----------
    size, seed : int
        As of `RowSample`.
    estimator : GaussianMixture
        Whose model to make.
    """

    estimator: GaussianMixture = GaussianMixture(1)

    def finalize(self, state: State) -> State:
        """Return the mixture of the clusters that k-means finds in the sample."""
        estimator, rows = self.estimator, state["rows"]
        rounds = {} if estimator.init == "kmeans" else {"rounds": 0}
        centres = centres_of_sample(state, estimator.n_components, self.seed, **rounds)
        nearest = labels(rows, centres)
        return estimator.maximise(_unit_model(centres), _hard_sums(rows, centres, nearest, estimator))


def _unit_model(centres: Array) -> State:
    """Return what `GaussianMixture.maximise` reads of a model, for equal weights."""
    return {"weights": np.full(len(centres), 1 / len(centres)), "means": centres}


def _hard_sums(rows: Array, centres: Array, nearest: Array, estimator: GaussianMixture) -> ExpectationSums:
    """Return the sums of an expectation step in which every row belongs to its nearest centre."""
    k, d = centres.shape
    counts, first, full = np.zeros(k), np.zeros((k, d)), np.zeros((k, d, d))
    for i, centre in enumerate(centres):
        z = rows[nearest == i] - centre
        counts[i], first[i], full[i] = len(z), np.sum(z, axis=0), z.T @ z
    second = full
    if estimator.covariance_type == "tied":
        z = rows - grand_mean(_unit_model(centres))
        second = z.T @ z
    elif kind_of(estimator.covariance_type) == DIAGONAL:
        second = np.diagonal(full, axis1=1, axis2=2)
    return ExpectationSums(len(rows), float(len(rows)), counts, first, second, 0.0)
