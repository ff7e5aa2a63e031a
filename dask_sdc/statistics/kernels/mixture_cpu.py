"""Numba kernels of the expectation step of a Gaussian mixture.

One pass over a block: log densities, responsibilities and weighted moments about the current means.
Rows are transposed tile by tile, so that they lie in SIMD lanes, and exponentials and logarithms are
branch-free polynomials that LLVM vectorises. Elementwise kernels may contract to fused multiply-adds;
only sums over the rows of a tile may be reassociated. Results depend on the CPU's vector width, never
on threads, alignment or the layout of a block.

Responsibilities below 2.2e-308 (the smallest normal number) count as zero. NaN, Inf and overflow end
up as NaN in the sums, never hidden by a comparison.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_sdc.statistics.kernels import inner, jit
from dask_sdc.statistics.kernels.rows import LANES

__all__ = ["DIAGONAL", "FULL", "TIED", "add_density", "add_expectation"]

DIAGONAL, FULL, TIED = 0, 1, 2

#: Elementwise kernels: the compiler may fuse a product into a sum, and nothing else.
_ELEMENTWISE = {"contract"}
#: Sums over the rows of a tile: the compiler may spread them over lanes as well.
_REDUCTION = {"contract", "reassoc"}

_LOG2_E = 1.4426950408889634
# ln 2 in two parts (fdlibm): the upper one has 33 bits, so that its product with an exponent is exact.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
# 1.5 * 2**52: adding it rounds to an integer that then stands in the low bits.
_ROUNDER = 6755399441055744.0
_MANTISSA = np.uint64(52)
_ONE = np.uint64(0x3FF0000000000000)
_ROOT_HALF = np.uint64(0x3FE6A09E667F3BCD)
_ROUNDER_BITS = np.uint64(0x4338000000000000)
#: exp of anything below is no normal number.
_UNDERFLOW = -708.0


# -- exp and log ---------------------------------------------------------------------------------


@jit(inline="always")
def _exp(x: Any) -> Any:
    """Return exp(x) for x <= 0 within 1 ulp; 0 below `_UNDERFLOW`.

    x = n·ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite's two-part reduction), then the Taylor
    polynomial of degree 15, whose remainder is below 1e-20 there.
    """
    shifted = x * _LOG2_E + _ROUNDER
    n = shifted - _ROUNDER
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = 1.0 / 1307674368000 * r + 1.0 / 87178291200
    p = p * r + 1.0 / 6227020800
    p = p * r + 1.0 / 479001600
    p = p * r + 1.0 / 39916800
    p = p * r + 1.0 / 3628800
    p = p * r + 1.0 / 362880
    p = p * r + 1.0 / 40320
    p = p * r + 1.0 / 5040
    p = p * r + 1.0 / 720
    p = p * r + 1.0 / 120
    p = p * r + 1.0 / 24
    p = p * r + 1.0 / 6
    p = p * r + 0.5
    p = p * (r * r) + r + 1.0
    scale = np.uint64((np.float64(shifted).view(np.uint64) << _MANTISSA) + _ONE).view(np.float64)
    # Written so that NaN fails the comparison and is kept.
    return 0.0 if x < _UNDERFLOW else p * scale


@jit(inline="always")
def _log(x: Any) -> Any:
    """Return log(x) for normal x >= 1 within 1 ulp, NaN for NaN: fdlibm's e_log.c without its branches."""
    bits = np.float64(x).view(np.uint64)
    exponent = (bits - _ROOT_HALF) >> _MANTISSA
    f = np.uint64(bits - (exponent << _MANTISSA)).view(np.float64) - 1.0
    n = np.uint64(exponent + _ROUNDER_BITS).view(np.float64) - _ROUNDER
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01))
    odd = 1.818357216161805012e-01 + w * 1.479819860511658591e-01
    odd = z * (6.666666666666735130e-01 + w * (2.857142874366239149e-01 + w * odd))
    half = 0.5 * f * f
    log = n * _LN2_HIGH - ((half - (s * (half + (odd + even)) + n * _LN2_LOW)) - f)
    return log + (x - x)


# -- one tile ------------------------------------------------------------------------------------


@inner()
def _load(x: Any, weights: Any, start: int, rows: int, tile: Any, w: Any) -> None:
    """Transpose rows into the tile; lanes past the end repeat the last row with weight zero."""
    for j in range(x.shape[1]):
        for t in range(rows):
            tile[j, t] = x[start + t, j]
        for t in range(rows, LANES):
            tile[j, t] = x[start + rows - 1, j]
    for t in range(LANES):
        w[t] = 1.0 if t < rows else 0.0
    if weights.shape[0]:
        for t in range(rows):
            w[t] = weights[start + t]


@inner(fastmath=_ELEMENTWISE)
def _centre(tile: Any, mean: Any, out: Any) -> None:
    for j in range(tile.shape[0]):
        m, x, z = mean[j], tile[j], out[j]
        for t in range(LANES):
            z[t] = x[t] - m


@inner(fastmath=_ELEMENTWISE)
def _diagonal_form(tile: Any, mean: Any, scale: Any, out: Any) -> None:
    """out = Σ_j ((x_j − mean_j)·scale_j)²."""
    for t in range(LANES):
        out[t] = 0.0
    for j in range(0, tile.shape[0], 4):
        m0, m1, m2, m3 = mean[j], mean[j + 1], mean[j + 2], mean[j + 3]
        s0, s1, s2, s3 = scale[j], scale[j + 1], scale[j + 2], scale[j + 3]
        x0, x1, x2, x3 = tile[j], tile[j + 1], tile[j + 2], tile[j + 3]
        for t in range(LANES):
            y0, y1 = (x0[t] - m0) * s0, (x1[t] - m1) * s1
            y2, y3 = (x2[t] - m2) * s2, (x3[t] - m3) * s3
            out[t] = out[t] + (y0 * y0 + y1 * y1) + (y2 * y2 + y3 * y3)


@inner(fastmath=_ELEMENTWISE)
def _distance(tile: Any, mean: Any, out: Any) -> None:
    """out = Σ_j (x_j − mean_j)²."""
    for t in range(LANES):
        out[t] = 0.0
    for j in range(0, tile.shape[0], 4):
        m0, m1, m2, m3 = mean[j], mean[j + 1], mean[j + 2], mean[j + 3]
        x0, x1, x2, x3 = tile[j], tile[j + 1], tile[j + 2], tile[j + 3]
        for t in range(LANES):
            y0, y1, y2, y3 = x0[t] - m0, x1[t] - m1, x2[t] - m2, x3[t] - m3
            out[t] = out[t] + (y0 * y0 + y1 * y1) + (y2 * y2 + y3 * y3)


@inner(fastmath=_ELEMENTWISE)
def _whiten(tile: Any, factor: Any, out: Any) -> None:
    """out_i = Σ_{j<=i} factor_ji·x_j, four by four features at a time."""
    for i in range(0, tile.shape[0], 4):
        y0, y1, y2, y3 = out[i], out[i + 1], out[i + 2], out[i + 3]
        for t in range(LANES):
            y0[t] = y1[t] = y2[t] = y3[t] = 0.0
        for j in range(0, i + 4, 4):
            x0, x1, x2, x3 = tile[j], tile[j + 1], tile[j + 2], tile[j + 3]
            a0, a1, a2, a3 = factor[j, i], factor[j, i + 1], factor[j, i + 2], factor[j, i + 3]
            b0, b1, b2, b3 = (
                factor[j + 1, i],
                factor[j + 1, i + 1],
                factor[j + 1, i + 2],
                factor[j + 1, i + 3],
            )
            c0, c1, c2, c3 = (
                factor[j + 2, i],
                factor[j + 2, i + 1],
                factor[j + 2, i + 2],
                factor[j + 2, i + 3],
            )
            d0, d1, d2, d3 = (
                factor[j + 3, i],
                factor[j + 3, i + 1],
                factor[j + 3, i + 2],
                factor[j + 3, i + 3],
            )
            for t in range(LANES):
                u0, u1, u2, u3 = x0[t], x1[t], x2[t], x3[t]
                y0[t] = y0[t] + (a0 * u0 + b0 * u1) + (c0 * u2 + d0 * u3)
                y1[t] = y1[t] + (a1 * u0 + b1 * u1) + (c1 * u2 + d1 * u3)
                y2[t] = y2[t] + (a2 * u0 + b2 * u1) + (c2 * u2 + d2 * u3)
                y3[t] = y3[t] + (a3 * u0 + b3 * u1) + (c3 * u2 + d3 * u3)


@inner(fastmath=_ELEMENTWISE)
def _log_joint(
    kind: int, tile: Any, means: Any, white_means: Any, factors: Any, shift: Any, z: Any, y: Any, out: Any
) -> None:
    """Fill ``out`` (k, LANES) with the squared Mahalanobis distances."""
    zero = np.zeros(tile.shape[0])
    if kind == TIED:
        _centre(tile, shift, z)
        _whiten(z, factors[0], y)
    for k in range(means.shape[0]):
        if kind == DIAGONAL:
            _diagonal_form(tile, means[k], factors[0, k], out[k])
        elif kind == TIED:
            _distance(y, white_means[k], out[k])
        else:
            _centre(tile, means[k], z)
            _whiten(z, factors[k], y)
            _distance(y, zero, out[k])


@inner(fastmath=_ELEMENTWISE)
def _normalise(joint: Any, constants: Any, w: Any, log_p: Any, scale: Any) -> None:
    """Turn squared distances into exp(log joint − max); ``scale`` makes w·r of them, ``log_p`` is log p.

    Comparisons are written so that NaN in the first component stays; a row with NaN or Inf has NaN
    distances in all of them or an infinite maximum, and both end as NaN.
    """
    for k in range(joint.shape[0]):
        row, c = joint[k], constants[k]
        if k == 0:
            for t in range(LANES):
                row[t] = c - 0.5 * row[t]
                log_p[t] = row[t]
        else:
            for t in range(LANES):
                value = c - 0.5 * row[t]
                row[t] = value
                log_p[t] = value if value > log_p[t] else log_p[t]
    for t in range(LANES):
        scale[t] = 0.0
    for k in range(joint.shape[0]):
        row = joint[k]
        for t in range(LANES):
            e = _exp(row[t] - log_p[t])
            row[t] = e
            scale[t] = scale[t] + e
    for t in range(LANES):
        log_p[t] = log_p[t] + _log(scale[t])
        scale[t] = w[t] / scale[t]


@inner(fastmath=_REDUCTION)
def _add_log_density(log_p: Any, w: Any, totals: Any) -> None:
    """Add Σ w·log p and Σ w·|log p| to ``totals``, keep max |log p|; leave |log p| in ``log_p``."""
    total, size = 0.0, 0.0
    for t in range(LANES):
        total += w[t] * log_p[t]
        log_p[t] = abs(log_p[t])
        size += w[t] * log_p[t]
    totals[0] += total
    totals[1] += size
    largest = totals[2]
    for t in range(LANES):
        largest = log_p[t] if log_p[t] > largest else largest
    totals[2] = largest


@inner(fastmath=_REDUCTION)
def _add_responsibility(r: Any, scale: Any, size: Any) -> tuple[float, float]:
    """Scale a component's lanes to w·r; return Σ w·r and Σ w·r·|log p|."""
    total, condition = 0.0, 0.0
    for t in range(LANES):
        value = r[t] * scale[t]
        r[t] = value
        total += value
        condition += value * size[t]
    return total, condition


@inner(fastmath=_REDUCTION)
def _add_diagonal(tile: Any, r: Any, mean: Any, first: Any, second: Any) -> None:
    """Add Σ r·(x − mean) and Σ r·(x − mean)²."""
    for j in range(0, tile.shape[0], 4):
        m0, m1, m2, m3 = mean[j], mean[j + 1], mean[j + 2], mean[j + 3]
        x0, x1, x2, x3 = tile[j], tile[j + 1], tile[j + 2], tile[j + 3]
        a0, a1, a2, a3 = 0.0, 0.0, 0.0, 0.0
        b0, b1, b2, b3 = 0.0, 0.0, 0.0, 0.0
        for t in range(LANES):
            z0, z1, z2, z3 = x0[t] - m0, x1[t] - m1, x2[t] - m2, x3[t] - m3
            y0, y1, y2, y3 = r[t] * z0, r[t] * z1, r[t] * z2, r[t] * z3
            a0 += y0
            a1 += y1
            a2 += y2
            a3 += y3
            b0 += y0 * z0
            b1 += y1 * z1
            b2 += y2 * z2
            b3 += y3 * z3
        first[j] += a0
        first[j + 1] += a1
        first[j + 2] += a2
        first[j + 3] += a3
        second[j] += b0
        second[j + 1] += b1
        second[j + 2] += b2
        second[j + 3] += b3


@inner(fastmath=_ELEMENTWISE)
def _weigh(z: Any, w: Any, out: Any) -> None:
    for j in range(z.shape[0]):
        zj, yj = z[j], out[j]
        for t in range(LANES):
            yj[t] = w[t] * zj[t]


@inner(fastmath=_REDUCTION)
def _add_first(z: Any, r: Any, y: Any, first: Any) -> None:
    """y = r·z per feature; add its sums."""
    for j in range(z.shape[0]):
        zj, yj = z[j], y[j]
        total = 0.0
        for t in range(LANES):
            value = r[t] * zj[t]
            yj[t] = value
            total += value
        first[j] += total


@inner(fastmath=_REDUCTION)
def _add_outer(y: Any, z: Any, second: Any) -> None:
    """Add Σ y·zᵀ, lower triangle, two by four features at a time."""
    for i in range(0, z.shape[0], 2):
        y0, y1 = y[i], y[i + 1]
        for j in range(0, i + 2, 4):
            z0, z1, z2, z3 = z[j], z[j + 1], z[j + 2], z[j + 3]
            a0, a1, a2, a3 = 0.0, 0.0, 0.0, 0.0
            b0, b1, b2, b3 = 0.0, 0.0, 0.0, 0.0
            for t in range(LANES):
                u, v = y0[t], y1[t]
                a0 += u * z0[t]
                a1 += u * z1[t]
                a2 += u * z2[t]
                a3 += u * z3[t]
                b0 += v * z0[t]
                b1 += v * z1[t]
                b2 += v * z2[t]
                b3 += v * z3[t]
            second[i, j] += a0
            second[i, j + 1] += a1
            second[i, j + 2] += a2
            second[i, j + 3] += a3
            second[i + 1, j] += b0
            second[i + 1, j + 1] += b1
            second[i + 1, j + 2] += b2
            second[i + 1, j + 3] += b3


# -- one piece of a block ------------------------------------------------------------------------


@jit()
def add_expectation(
    kind: int,
    x: Any,
    weights: Any,
    means: Any,
    white_means: Any,
    factors: Any,
    constants: Any,
    shift: Any,
    counts: Any,
    first: Any,
    second: Any,
    totals: Any,
) -> None:
    """Add the rows of a piece to the sums, in place.

    Features are padded to a multiple of four. ``counts`` is Σ w·r and Σ w·r·|log p|, shape (2, k);
    ``first`` is (k, d); of the matrices of ``second``, (1, k, d) or (k or 1, d, d), the lower triangles
    are filled; ``totals`` is Σ w·log p, Σ w·|log p| and max |log p|.
    """
    n, (components, d) = x.shape[0], means.shape
    tile, z, y = np.zeros((d, LANES)), np.empty((d, LANES)), np.empty((d, LANES))
    r, w, log_p, scale = np.empty((components, LANES)), np.empty(LANES), np.empty(LANES), np.empty(LANES)
    for start in range(0, n, LANES):
        _load(x, weights, start, min(LANES, n - start), tile, w)
        _log_joint(kind, tile, means, white_means, factors, shift, z, y, r)
        _normalise(r, constants, w, log_p, scale)
        _add_log_density(log_p, w, totals)
        if kind == TIED:
            _weigh(z, w, y)
            _add_outer(y, z, second[0])
        for k in range(components):
            total, condition = _add_responsibility(r[k], scale, log_p)
            counts[0, k] += total
            counts[1, k] += condition
            if kind == DIAGONAL:
                _add_diagonal(tile, r[k], means[k], first[k], second[0, k])
                continue
            _centre(tile, means[k], z)
            _add_first(z, r[k], y, first[k])
            if kind == FULL:
                _add_outer(y, z, second[k])


@jit()
def add_density(
    kind: int,
    x: Any,
    weights: Any,
    means: Any,
    white_means: Any,
    factors: Any,
    constants: Any,
    shift: Any,
    totals: Any,
) -> None:
    """Add the log densities of a piece to ``totals``, as `add_expectation` does."""
    n, (components, d) = x.shape[0], means.shape
    tile, z, y = np.zeros((d, LANES)), np.empty((d, LANES)), np.empty((d, LANES))
    joint, w, log_p, scale = np.empty((components, LANES)), np.empty(LANES), np.empty(LANES), np.empty(LANES)
    for start in range(0, n, LANES):
        _load(x, weights, start, min(LANES, n - start), tile, w)
        _log_joint(kind, tile, means, white_means, factors, shift, z, y, joint)
        _normalise(joint, constants, w, log_p, scale)
        _add_log_density(log_p, w, totals)
