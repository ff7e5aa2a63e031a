"""Sums as unevaluated pairs (high, low) of float64, about 106 bits together."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_sdc.statistics.kernels import jit


@jit(inline="always")
def add_pair(high: Any, low: Any, value: Any, error: Any) -> Any:
    """Add the pair (value, error) to the pair (high, low)."""
    total = high + value
    back = total - high
    return total, low + ((high - (total - back)) + (value - back)) + error


@jit(inline="always")
def exact_product(a: Any, b: Any) -> Any:
    """Return a * b as an exact pair (Dekker 1971)."""
    t = 134217729.0 * a
    a1 = t - (t - a)
    a2 = a - a1
    t = 134217729.0 * b
    b1 = t - (t - b)
    b2 = b - b1
    product = a * b
    return product, ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


@jit(inline="always")
def divide_pair(high: Any, low: Any, weight: Any) -> Any:
    """Divide the pair (high, low) by ``weight``."""
    quotient = high / weight
    product, error = exact_product(quotient, weight)
    return quotient, (((high - product) - error) + low) / weight


@jit(inline="always")
def keep_mean(high: Any, low: Any, a: Any, b: Any) -> Any:
    """Take from the pair what the weights ``a + b`` lose in rounding, times the mean.

    Otherwise a mean far from zero would move by a rounding error of itself with every merge, which
    is not small against the spread.
    """
    weight = a + b
    back = weight - a
    lost = (a - (weight - back)) + (b - back)
    if lost != 0.0:
        product, error = exact_product(-lost, high / weight)
        high, low = add_pair(high, low, product, error)
    return high, low


@jit()
def scaled(mean: Any, weight: Any, rest: Any) -> Any:
    """Return mean * weight + rest as pairs."""
    high, low = np.empty_like(mean), np.empty_like(mean)
    for i in range(mean.size):
        product, error = exact_product(mean[i], weight[i])
        error += rest[i]
        high[i] = product + error
        low[i] = error - (high[i] - product)
    return high, low


@jit()
def merge_sums(s: Any, low: Any, weight: Any, b_s: Any, b_low: Any, b_weight: Any, offset: Any) -> Any:
    """Add the pairs (b_s, b_low) to (s, low) in place; write mean_b - mean_a to ``offset``."""
    for i in range(s.size):
        offset[i] = 0.0
        if weight > 0.0 and b_weight > 0.0:
            mean_a, rest_a = divide_pair(s[i], low[i], weight)
            mean_b, rest_b = divide_pair(b_s[i], b_low[i], b_weight)
            offset[i] = (mean_b - mean_a) + (rest_b - rest_a)
        total, rest = add_pair(s[i], low[i], b_s[i], b_low[i])
        total, rest = keep_mean(total, rest, weight, b_weight)
        s[i] = total + rest
        low[i] = rest - (s[i] - total)
