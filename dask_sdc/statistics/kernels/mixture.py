"""The expectation step of a Gaussian mixture, for NumPy and for any other array library.

NumPy blocks go to the Numba kernels of `mixture_cpu`; the same mathematics in array-API calls serves
the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from dask_sdc.statistics.kernels import is_numpy, namespace, to_host
from dask_sdc.statistics.kernels.cuda import cupy_device, is_cupy
from dask_sdc.statistics.kernels.cuda.mixture import cuda_density, cuda_expectation
from dask_sdc.statistics.kernels.mixture_cpu import DIAGONAL, FULL, TIED, add_density, add_expectation
from dask_sdc.statistics.kernels.rows import Array, padded, pieces

__all__ = [
    "DIAGONAL",
    "FULL",
    "TIED",
    "Components",
    "Density",
    "Expectation",
    "array_api_density",
    "array_api_expectation",
    "density",
    "expectation",
]

#: Rows that the array-API path takes at once.
_ROWS = 1 << 20


class Components(NamedTuple):
    """The components of a mixture as the kernels take them, float64 on the host.

    Parameters
    ----------
    kind : int
        `DIAGONAL`, `FULL` or `TIED`.
    means : numpy.ndarray
        Shape (k, d).
    factors : numpy.ndarray
        Factors L of the precision matrices L·Lᵀ: shape (1, k, d) for diagonal ones, upper triangles
        (k, d, d) for full ones and (1, d, d) for a tied one.
    constants : numpy.ndarray
        log weight + log det L − d/2·log 2π, shape (k,).
    shift : numpy.ndarray
        Where a tied scatter is centred, shape (d,).
    """

    kind: int
    means: Array
    factors: Array
    constants: Array
    shift: Array

    def whitened_means(self) -> Array:
        """Return (mean − shift)·L of a tied mixture, shape (k, d); the means of any other."""
        return (self.means - self.shift) @ self.factors[0] if self.kind == TIED else self.means


class Expectation(NamedTuple):
    """What one block adds to a round, float64 on the host.

    Parameters
    ----------
    responsibility : numpy.ndarray
        Σ w·r per component, shape (k,).
    condition : numpy.ndarray
        Σ w·r·|log p(x)| per component, shape (k,).
    first : numpy.ndarray
        Σ w·r·(x − mean), shape (k, d).
    second : numpy.ndarray
        Second moments about the means: Σ w·r·(x − mean)², shape (k, d), for diagonal components; the
        matrices (k, d, d) for full ones; Σ w·(x − shift)(x − shift)ᵀ, shape (d, d), for tied ones.
    log_density : float
        Σ w·log p(x).
    largest : float
        max |log p(x)|, 0 without rows.
    """

    responsibility: Array
    condition: Array
    first: Array
    second: Array
    log_density: float
    largest: float


class Density(NamedTuple):
    """Σ w·log p(x) and Σ w·|log p(x)| of one block, and max |log p(x)|."""

    log_density: float
    condition: float
    largest: float


def expectation(components: Components, x: Any, weights: Any) -> Expectation:
    """Run the expectation step over one block.

    Parameters
    ----------
    components : Components
        The mixture.
    x : array
        Shape (n, d), real; NumPy or any array-API block, host or device.
    weights : array or None
        Shape (n,), non-negative.

    Returns
    -------
    Expectation
    """
    if is_cupy(x):
        return Expectation(*cuda_expectation(cupy_device(), components, x, weights))
    if not is_numpy(x):
        return array_api_expectation(namespace(x), components, x, weights)
    arguments = _cpu_arguments(components)
    (k, d), width = components.means.shape, arguments[0].shape[1]
    counts, first, totals = np.zeros((2, k)), np.zeros((k, width)), np.zeros(3)
    second = np.zeros(arguments[2].shape)
    for rows, w in pieces(x, weights):
        add_expectation(components.kind, rows, w, *arguments, counts, first, second, totals)
    if components.kind == DIAGONAL:
        moments = np.ascontiguousarray(second[0, :, :d])
    else:
        lower = np.tril(second[:, :d, :d])
        moments = lower + np.tril(lower, -1).transpose(0, 2, 1)
    if components.kind == TIED:
        moments = moments[0]
    means = np.ascontiguousarray(first[:, :d])
    return Expectation(counts[0].copy(), counts[1].copy(), means, moments, float(totals[0]), float(totals[2]))


def density(components: Components, x: Any, weights: Any) -> Density:
    """Add up the log densities of one block; parameters as for `expectation`."""
    if is_cupy(x):
        return Density(*cuda_density(cupy_device(), components, x, weights))
    if not is_numpy(x):
        return array_api_density(namespace(x), components, x, weights)
    totals = np.zeros(3)
    for rows, w in pieces(x, weights):
        add_density(components.kind, rows, w, *_cpu_arguments(components), totals)
    return Density(*totals.tolist())


def _cpu_arguments(components: Components) -> tuple[Array, Array, Array, Array, Array]:
    """Return means, whitened means, factors, constants and shift, padded and read-only."""
    matrix_axes = (2,) if components.kind == DIAGONAL else (1, 2)
    return (
        padded(components.means, 1),
        padded(components.whitened_means(), 1),
        padded(components.factors, *matrix_axes),
        padded(components.constants),
        padded(components.shift, 0),
    )


# -- any array library ---------------------------------------------------------------------------


def array_api_expectation(xp: Any, components: Components, x: Any, weights: Any) -> Expectation:
    """`expectation` for any array library, by its array-API namespace ``xp``."""
    k = len(components.means)
    responsibility, condition = np.zeros(k), np.zeros(k)
    first = np.zeros_like(components.means)
    second = np.zeros(components.factors.shape[1 if components.kind != FULL else 0 :])
    log_density = largest = 0.0
    for rows, w in _array_api_pieces(xp, x, weights):
        relative, total, log_p = _array_api_joint(xp, components, rows)
        # Not exp(joint - log p): the rounding of a large log p would be an error of each of them.
        scale = w / total
        size = xp.abs(log_p)
        log_density += float(w @ log_p)
        largest = max(largest, float(xp.max(size)))
        if components.kind == TIED:
            centred = rows - xp.asarray(components.shift)
            second += _symmetric(to_host((w[:, None] * centred).T @ centred))
        for i, mean in enumerate(components.means):
            r = scale * relative[i]
            z = rows - xp.asarray(mean)
            weighted = r[:, None] * z
            responsibility[i] += float(xp.sum(r))
            condition[i] += float(r @ size)
            first[i] += to_host(xp.sum(weighted, axis=0))
            if components.kind == DIAGONAL:
                second[i] += to_host(xp.sum(weighted * z, axis=0))
            elif components.kind == FULL:
                second[i] += _symmetric(to_host(weighted.T @ z))
    return Expectation(responsibility, condition, first, second, log_density, largest)


def array_api_density(xp: Any, components: Components, x: Any, weights: Any) -> Density:
    """`density` for any array library, by its array-API namespace ``xp``."""
    log_density = condition = largest = 0.0
    for rows, w in _array_api_pieces(xp, x, weights):
        _, _, log_p = _array_api_joint(xp, components, rows)
        size = xp.abs(log_p)
        log_density += float(w @ log_p)
        condition += float(w @ size)
        largest = max(largest, float(xp.max(size)))
    return Density(log_density, condition, largest)


def _array_api_pieces(xp: Any, x: Any, weights: Any) -> Iterator[tuple[Any, Any]]:
    for start in range(0, x.shape[0], _ROWS):
        end = min(start + _ROWS, x.shape[0])
        rows = xp.astype(x[start:end, :], xp.float64)
        if weights is None:
            yield rows, xp.ones_like(rows[:, 0])
        else:
            yield rows, xp.asarray(weights[start:end], dtype=xp.float64)


def _array_api_joint(xp: Any, components: Components, x: Any) -> tuple[list[Any], Any, Any]:
    """Return weight·density per component over the largest, their sum, and log p, each of shape (n,)."""
    joint = []
    for k, mean in enumerate(components.means):
        if components.kind == DIAGONAL:
            y = (x - xp.asarray(mean)) * xp.asarray(components.factors[0, k])
        else:
            factor = components.factors[k if components.kind == FULL else 0]
            y = (x - xp.asarray(mean)) @ xp.asarray(factor)
        joint.append(float(components.constants[k]) - 0.5 * xp.sum(y * y, axis=1))
    largest = joint[0]
    for row in joint[1:]:
        largest = xp.where(row > largest, row, largest)
    relative = [xp.exp(row - largest) for row in joint]
    total = sum(relative[1:], relative[0])
    return relative, total, largest + xp.log(total)


def _symmetric(matrix: Array) -> Array:
    """Copy the lower triangle to the upper one, so that symmetry is exact."""
    lower = np.tril(matrix)
    return lower + np.tril(lower, -1).T
