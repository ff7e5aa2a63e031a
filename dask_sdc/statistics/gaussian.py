"""Parameters of Gaussian mixtures: checked at the door, in the form that rounds and kernels take.

A model is a dict of float64 arrays with scikit-learn's names and shapes: ``weights`` (k,), ``means``
(k, d), ``covariances`` and ``precisions_cholesky``, which are (k, d, d) for "full", (d, d) for "tied",
(k, d) for "diag" and (k,) for "spherical" components.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.statistics.base import State
from dask_sdc.statistics.kernels.mixture import DIAGONAL, FULL, TIED, Components

__all__ = [
    "COVARIANCE_TYPES",
    "checked_type",
    "components_of",
    "covariance_shape",
    "grand_mean",
    "kind_of",
    "largest_constant",
    "mixture_model",
    "model_of",
    "sensitivity",
]

Array = np.ndarray[Any, Any]

COVARIANCE_TYPES: Final = ("full", "tied", "diag", "spherical")

_KINDS = {"full": FULL, "tied": TIED, "diag": DIAGONAL, "spherical": DIAGONAL}

#: Log densities of two components that differ by more (−ln 2⁻⁵³) leave the lesser one no say.
_NEGLIGIBLE = 37.0


def mixture_model(
    weights: Any,
    means: Any,
    *,
    covariances: Any = None,
    precisions: Any = None,
    covariance_type: str = "full",
) -> State:
    """Return the model of given parameters, checked.

    Parameters
    ----------
    weights : array_like
        Shape (k,), non-negative, of sum 1 (to 1e-6).
    means : array_like
        Shape (k, d).
    covariances, precisions : array_like
        Covariances or their inverses, one of the two; shapes as in the module's docstring.
    covariance_type : {"full", "tied", "diag", "spherical"}
        What the covariances are.

    Returns
    -------
    dict
        ``weights``, ``means``, ``covariances`` and ``precisions_cholesky``.

    Raises
    ------
    InputError
        If shapes disagree, numbers are not finite, or a covariance is not positive definite.
    """
    checked_type(covariance_type)
    if (covariances is None) == (precisions is None):
        raise InputError("expected either covariances or precisions")
    means = _parameter("means", means, None)
    if means.ndim != 2 or 0 in means.shape:
        raise InputError(f"expected means of shape (k, d), got {means.shape}")
    weights = _parameter("weights", weights, means.shape[:1])
    if np.any(weights < 0) or abs(math.fsum(weights) - 1) > 1e-6:
        raise InputError(f"expected weights >= 0 of sum 1, got {weights.tolist()}")
    shape = covariance_shape(covariance_type, *means.shape)
    if covariances is None:
        covariances = _inverse(_parameter("precisions", precisions, shape), covariance_type)
    return model_of(weights, means, _parameter("covariances", covariances, shape), covariance_type)


def checked_type(covariance_type: str) -> None:
    """Refuse what is not one of `COVARIANCE_TYPES`."""
    if covariance_type not in COVARIANCE_TYPES:
        raise InputError(f"expected covariance_type to be one of {COVARIANCE_TYPES}, got {covariance_type!r}")


def _parameter(name: str, value: Any, shape: tuple[int, ...] | None) -> Array:
    try:
        array = np.array(value, dtype=np.float64, order="C")
    except (TypeError, ValueError) as error:
        raise InputTypeError(f"expected {name} to be an array of numbers, got {value!r}") from error
    if shape is not None and array.shape != shape:
        raise InputError(f"expected {name} of shape {shape}, got {array.shape}")
    if not np.all(np.isfinite(array)):
        raise InputError(f"expected finite {name}, got NaN or Inf")
    return array


def covariance_shape(covariance_type: str, k: int, d: int) -> tuple[int, ...]:
    """Return the shape of the covariances of k components in d dimensions."""
    return {"full": (k, d, d), "tied": (d, d), "diag": (k, d), "spherical": (k,)}[covariance_type]


def model_of(weights: Array, means: Array, covariances: Array, covariance_type: str) -> State:
    """Return the model of parameters that are known to be sound."""
    return {
        "weights": weights,
        "means": means,
        "covariances": covariances,
        "precisions_cholesky": _precisions_cholesky(covariances, covariance_type),
    }


def _precisions_cholesky(covariances: Array, covariance_type: str) -> Array:
    """Return the upper triangular L with L·Lᵀ = covariance⁻¹, or 1/σ for diagonal ones."""
    if covariance_type in ("diag", "spherical"):
        if not np.all(covariances > 0):
            raise InputError(f"expected variances > 0, got {np.min(covariances)}: raise reg_covar")
        return np.asarray(1.0 / np.sqrt(covariances))
    try:
        lower = np.linalg.cholesky(covariances)
        inverse = np.linalg.solve(lower, np.broadcast_to(np.eye(lower.shape[-1]), lower.shape))
    except np.linalg.LinAlgError as error:
        raise InputError(
            "expected positive definite covariances, got a singular one: raise reg_covar"
        ) from error
    return np.ascontiguousarray(np.triu(np.swapaxes(inverse, -1, -2)))


def _inverse(precisions: Array, covariance_type: str) -> Array:
    factor = _precisions_cholesky(precisions, covariance_type)
    if covariance_type in ("diag", "spherical"):
        return factor * factor
    return np.asarray(factor @ np.swapaxes(factor, -1, -2))


def kind_of(covariance_type: str) -> int:
    """Return the kernels' kind of a covariance type."""
    return _KINDS[covariance_type]


def components_of(model: State, covariance_type: str) -> Components:
    """Return a model as the kernels take it."""
    means, factor = model["means"], model["precisions_cholesky"]
    if covariance_type == "spherical":
        factor = np.repeat(factor[:, None], means.shape[1], axis=1)
    factors = factor if covariance_type == "full" else factor[None]
    diagonal = factors[0] if _KINDS[covariance_type] == DIAGONAL else np.diagonal(factors, axis1=1, axis2=2)
    with np.errstate(divide="ignore"):  # a component of weight zero has log weight -inf
        log_weights = np.log(model["weights"])
    constants = log_weights + np.sum(np.log(diagonal), axis=1) - 0.5 * means.shape[1] * math.log(2 * math.pi)
    return Components(_KINDS[covariance_type], means, factors, constants, grand_mean(model))


def grand_mean(model: State) -> Array:
    """Return the mean of the mixture: where a tied scatter is centred.

    One component after the other and without BLAS, whose order and fused products depend on the processor:
    scatters about centres that are a rounding apart differ by far more than their own rounding.
    """
    weights, means = np.asarray(model["weights"]), np.asarray(model["means"])
    mean = np.zeros(means.shape[1], means.dtype)
    for weight, component in zip(weights, means, strict=True):
        mean = mean + weight * component
    return mean


def sensitivity(components: Components) -> float:
    """Return how much the rounding of y = Lᵀz grows in |y|², relative to |y|².

    That is the norm of |Lᵀ|·|L⁻ᵀ| (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
    section 7.2), bounded by the root of its largest sums of a row and of a column; 1 for diagonal factors.
    Tied rows are whitened once, about the mean of the mixture, so that their distances to the means are
    differences of as much as the means are apart.
    """
    if components.kind == DIAGONAL:
        return 1.0
    growth = np.abs(np.linalg.inv(components.factors)) @ np.abs(components.factors)
    reach = components.whitened_means() if components.kind == TIED else np.zeros((1, 1))
    apart = 1 + np.max(np.linalg.norm(reach, axis=1))
    sums = np.max(np.sum(growth, axis=1), axis=1) * np.max(np.sum(growth, axis=2), axis=1)
    return float(apart * math.sqrt(np.max(sums)))


def largest_constant(components: Components) -> float:
    """Return the largest part of a log density that does not depend on x."""
    finite = components.constants[np.isfinite(components.constants)]
    return float(np.max(np.abs(finite), initial=0.0)) + _NEGLIGIBLE
