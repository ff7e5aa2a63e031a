"""Central moments of the columns of a block: one pass over memory, compensated sums.

The Numba path reads a block once, in 64 lanes. Each lane keeps Σw·x as an unevaluated pair (Knuth's
TwoSum: Ogita, Rump and Oishi 2005, algorithm 3.1) and power sums about a pilot value near the mean;
power sums go to compensated totals every few rows. Power sums about the pilot become central moments
with the exact offset of the mean, and states are merged, by Pébay (2008, SAND2008-6212, eqs. 2.1, 2.2).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dask_sdc.statistics.kernels import inner, is_numpy, jit, namespace, to_host
from dask_sdc.statistics.kernels.cuda import Device, cupy_device, is_cupy
from dask_sdc.statistics.kernels.cuda.moments import cuda_moments
from dask_sdc.statistics.kernels.cuda.shapes import pieces
from dask_sdc.statistics.kernels.pairs import add_pair, divide_pair, exact_product, keep_mean, scaled
from dask_sdc.statistics.kernels.tiles import (
    as_float,
    exact_offset,
    frozen,
    is_flat,
    scratch_tiles,
)

Array = np.ndarray[Any, Any]

#: Lanes per strip: as many accumulators as stay in the first-level cache, each a whole cache line.
LANES = 64
#: Rows of lanes between two flushes of the power sums, a multiple of the 4 that are unrolled.
STEPS = 64
#: Stored lanes per accumulator; not a power of two, as such strides collide in the cache.
_STRIDE = LANES + 8
#: Elements that are prefetched ahead (4 KiB in float64). Without it memory and arithmetic do not
#: overlap: 0.4 instead of 0.8 of the read bandwidth.
_AHEAD = 8
#: Rows spread over a block that say where its mean is. In 64 columns of independent samples, one is
#: off by more than a standard deviation once in some hundred strips, which are then done again.
_PILOT_ROWS = 16
#: Rows of a strip that fit in the second-level cache together with the next strip.
_FEW = 256
#: Accumulators of a lane: sum and its error, count, weight, power sums 2-4, least, greatest, and
#: the compensated totals of weight and power sums.
_SUM, _LOW, _COUNT, _WEIGHT, _P2, _P3, _P4, _MIN, _MAX, _TOTAL = range(10)
_ACCUMULATORS = _TOTAL + 8
_HUGE = float(np.finfo(np.float64).max)


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Fetch the cache line of ``array[index]``; an address past the end does nothing."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        i32, i8p = ir.IntType(32), ir.IntType(8).as_pointer()
        address = builder.bitcast(builder.gep(data, [args[1]]), i8p)
        function_type = ir.FunctionType(ir.VoidType(), [i8p, i32, i32, i32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [i8p], function_type)
        builder.call(function, [address, i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


_prefetch: Any = prefetch


@jit(inline="always")
def _rows(
    flat: Any,
    at: Any,
    stride: Any,
    width: Any,
    rows: Any,
    weights: Any,
    spread: Any,
    skipna: Any,
    high: Any,
    pilot: Any,
    lanes: Any,
) -> Any:
    """Add ``rows`` (a constant) rows of ``width`` lanes from ``flat[at]`` on, with weights ``spread``."""
    for c in range(width):
        s = lanes[_SUM * _STRIDE + c]
        low = lanes[_LOW * _STRIDE + c]
        p2 = lanes[_P2 * _STRIDE + c]
        least = lanes[_MIN * _STRIDE + c]
        greatest = lanes[_MAX * _STRIDE + c]
        centre = pilot[c]
        if skipna is not None:
            count = lanes[_COUNT * _STRIDE + c]
        if weights is not None:
            mass = lanes[_WEIGHT * _STRIDE + c]
        if high is not None:
            p3 = lanes[_P3 * _STRIDE + c]
            p4 = lanes[_P4 * _STRIDE + c]
        for u in range(rows):
            v: Any = np.float64(flat[np.uint64(at + u * stride) + np.uint64(c)])
            least = v if v < least else least
            greatest = v if v > greatest else greatest
            d = v - centre
            term: Any = v
            if skipna is not None:
                here = 1.0 if v == v else 0.0
                d = d if v == v else 0.0
                term = v if v == v else 0.0
                count += here
            d2 = d * d
            w2 = d2
            if weights is not None:
                w = spread[u * LANES + c]
                term = w * d  # about the pilot, as rounding w * v would not be small against d
                w2 = w * d2
                if skipna is not None:
                    mass += w * here
                else:
                    mass += w
            total = s + term
            back = total - s
            low += (s - (total - back)) + (term - back)
            s = total
            p2 += w2
            if high is not None:
                p3 += w2 * d
                p4 += w2 * d2
        lanes[_SUM * _STRIDE + c] = s
        lanes[_LOW * _STRIDE + c] = low
        lanes[_P2 * _STRIDE + c] = p2
        lanes[_MIN * _STRIDE + c] = least
        lanes[_MAX * _STRIDE + c] = greatest
        if skipna is not None:
            lanes[_COUNT * _STRIDE + c] = count
        if weights is not None:
            lanes[_WEIGHT * _STRIDE + c] = mass
        if high is not None:
            lanes[_P3 * _STRIDE + c] = p3
            lanes[_P4 * _STRIDE + c] = p4


@jit(inline="always")
def _flush(lanes: Any, width: Any) -> Any:
    """Move weight and power sums of all lanes to their compensated totals."""
    for k in range(4):
        for c in range(width):
            v = lanes[(_WEIGHT + k) * _STRIDE + c]
            s = lanes[(_TOTAL + 2 * k) * _STRIDE + c]
            total = s + v
            back = total - s
            lanes[(_TOTAL + 2 * k + 1) * _STRIDE + c] += (s - (total - back)) + (v - back)
            lanes[(_TOTAL + 2 * k) * _STRIDE + c] = total
            lanes[(_WEIGHT + k) * _STRIDE + c] = 0.0


@jit(inline="always")
def _spread(weights: Any, first: Any, rows: Any, columns: Any, width: Any, out: Any) -> None:
    """Write the weight of each lane of ``rows`` rows, of which the first sample is ``first``."""
    per_step = width // columns
    for u in range(rows):
        for k in range(per_step):
            w = weights[first + u * per_step + k]
            for c in range(columns):
                out[u * LANES + k * columns + c] = w


def _strip(
    flat: Any,
    offset: Any,
    stride: Any,
    n: Any,
    columns: Any,
    per_step: Any,
    weights: Any,
    row: Any,
    skipna: Any,
    high: Any,
    pilot: Any,
    lanes: Any,
) -> Any:
    """Add ``n`` samples of ``columns`` <= LANES neighbouring columns, ``per_step`` samples to a row of lanes.

    Lane ``c`` of row ``g`` is ``flat[offset + g * stride + c]``; the first sample has ``weights[row]``.
    ``weights``, ``skipna`` and ``high`` are None or not: Numba compiles away what is None.
    """
    width, steps = per_step * columns, n // per_step
    spread = np.empty(4 * LANES)
    g = 0
    while g < steps:
        end = min(g + STEPS, steps)
        while g < end:
            at, rows = offset + g * stride, 4 if g + 4 <= end else 1
            if weights is not None:
                _spread(weights, row + g * per_step, rows, columns, width, spread)
            if rows == 4:
                # Few rows of a wide block: the strip to the right comes next.
                ahead = at + (_AHEAD * stride if steps > _FEW or stride == width else width)
                for u in range(4):  # row by row: rising addresses are worth half of the speed
                    for c in range(0, width, 8):
                        _prefetch(flat, ahead + u * stride + c)
                _rows(flat, at, stride, width, 4, weights, spread, skipna, high, pilot, lanes)
            else:
                _rows(flat, at, stride, width, 1, weights, spread, skipna, high, pilot, lanes)
            g += rows
        _flush(lanes, width)
    rest = n - steps * per_step
    if rest > 0:
        if weights is not None:
            _spread(weights, row + steps * per_step, 1, columns, rest * columns, spread)
        at = offset + steps * stride
        _rows(flat, at, stride, rest * columns, 1, weights, spread, skipna, high, pilot, lanes)
        _flush(lanes, rest * columns)


# Contraction to fused multiply-adds is safe where TwoSum sees no product, that is without weights.
# The two never share a signature (weights are None or not), so neither does their cache on disk.
_strip_fused = inner(fastmath={"contract"})(_strip)
_strip_exact = inner()(_strip)


@inner()
def _reset(lanes: Any) -> Any:
    lanes[:] = 0.0
    lanes[_MIN * _STRIDE : _MAX * _STRIDE] = _HUGE
    lanes[_MAX * _STRIDE : _TOTAL * _STRIDE] = -_HUGE


@inner()
def _add(
    flat: Any,
    offset: Any,
    stride: Any,
    n: Any,
    columns: Any,
    per_step: Any,
    weights: Any,
    row: Any,
    skipna: Any,
    high: Any,
    pilot: Any,
    lanes: Any,
) -> Any:
    """Do as `_strip`, with ``stride`` from sample to sample and one pilot per column."""
    centre = np.empty(LANES)
    for c in range(per_step * columns):
        centre[c] = pilot[c % columns]
    step = per_step * stride
    if weights is None:
        _strip_fused(flat, offset, step, n, columns, per_step, weights, row, skipna, high, centre, lanes)
    else:
        _strip_exact(flat, offset, step, n, columns, per_step, weights, row, skipna, high, centre, lanes)


@inner()
def _columns(
    lanes: Any,
    n: Any,
    per_step: Any,
    columns: Any,
    weighted: Any,
    skipna: Any,
    pilot: Any,
    out: Any,
    first: Any,
) -> Any:
    """Fold lanes to columns and power sums about the pilot to central moments.

    Writes to ``out`` from column ``first`` on; returns whether a pilot was so far from its mean that
    power sums have lost digits, and then puts the means in ``pilot``.
    """
    far = False
    for j in range(columns):
        s = low = count = 0.0
        least, greatest = _HUGE, -_HUGE
        weight = w_low = p2 = p2_low = p3 = p3_low = p4 = p4_low = 0.0
        for c in range(j, per_step * columns, columns):
            s, low = add_pair(s, low, lanes[_SUM * _STRIDE + c], lanes[_LOW * _STRIDE + c])
            count += lanes[_COUNT * _STRIDE + c]
            least = min(least, lanes[_MIN * _STRIDE + c])
            greatest = max(greatest, lanes[_MAX * _STRIDE + c])
            at = _TOTAL * _STRIDE + c
            weight, w_low = add_pair(weight, w_low, lanes[at], lanes[at + _STRIDE])
            p2, p2_low = add_pair(p2, p2_low, lanes[at + 2 * _STRIDE], lanes[at + 3 * _STRIDE])
            p3, p3_low = add_pair(p3, p3_low, lanes[at + 4 * _STRIDE], lanes[at + 5 * _STRIDE])
            p4, p4_low = add_pair(p4, p4_low, lanes[at + 6 * _STRIDE], lanes[at + 7 * _STRIDE])
        p2, p3, p4 = p2 + p2_low, p3 + p3_low, p4 + p4_low
        if not skipna:
            count = float(n)
        weight = weight + w_low if weighted else count
        if weighted:
            product, error = exact_product(weight, pilot[j])
            s, low = add_pair(product, error, s, low)
        total = s + low
        low = low - (total - s)
        mean, rest = divide_pair(total, low, weight) if weight > 0.0 else (0.0, 0.0)
        d = (mean - pilot[j]) + rest if weight > 0.0 else 0.0
        if d * d * weight > 0.5 * p2 and abs(mean) < np.inf:
            far = True
            pilot[j] = mean
        i = first + j
        out[0, i], out[1, i], out[2, i], out[3, i] = count, weight, total, low
        out[4, i] = max(p2 - d * d * weight, 0.0) if p2 == p2 else p2
        out[5, i] = p3 - 3.0 * d * p2 + 2.0 * d * d * d * weight
        out[6, i] = (
            max(p4 - 4.0 * d * p3 + 6.0 * d * d * p2 - 3.0 * d * d * d * d * weight, 0.0) if p4 == p4 else p4
        )
        out[7, i], out[8, i] = least, greatest
    return far


@inner()
def _pilot(flat: Any, offset: Any, stride: Any, rows: Any, columns: Any, pilot: Any) -> None:
    """Write the mean of the finite values of a few ``rows`` per column; exact for constant columns."""
    total, count = np.zeros(columns), np.zeros(columns)
    for c in range(columns):
        v = np.float64(flat[np.uint64(offset + rows[0] * stride) + np.uint64(c)])
        pilot[c] = v if abs(v) < np.inf else 0.0
    for i in rows:
        for c in range(columns):
            v = np.float64(flat[np.uint64(offset + i * stride) + np.uint64(c)])
            total[c] += v - pilot[c] if abs(v) < np.inf else 0.0
            count[c] += 1.0 if abs(v) < np.inf else 0.0
    for c in range(columns):
        value = pilot[c] + total[c] / max(count[c], 1.0)
        pilot[c] = value if abs(value) < np.inf else 0.0


# Entries for tiles that were converted first.


@jit()
def _pilot_of(flat: Any, rows: Any, columns: Any, pilot: Any) -> None:
    _pilot(flat, 0, LANES, rows, columns, pilot)


@jit()
def _reset_lanes(lanes: Any) -> None:
    _reset(lanes)


@jit()
def _add_tile(
    flat: Any,
    n: Any,
    columns: Any,
    per_step: Any,
    weights: Any,
    row: Any,
    skipna: Any,
    high: Any,
    pilot: Any,
    lanes: Any,
) -> None:
    _add(flat, 0, columns, n, columns, per_step, weights, row, skipna, high, pilot, lanes)


@jit()
def _columns_of(
    lanes: Any,
    n: Any,
    per_step: Any,
    columns: Any,
    weighted: Any,
    skipna: Any,
    pilot: Any,
    out: Any,
    first: Any,
) -> Any:
    return _columns(lanes, n, per_step, columns, weighted, skipna, pilot, out, first)


@jit()
def _whole(flat: Any, n: Any, p: Any, weights: Any, skipna: Any, high: Any, rows: Any, out: Any) -> None:
    """Central moments of a C-contiguous block; pilots come from ``rows``.

    Wide blocks are read a few rows at a time, strip by strip of columns: in the order of memory.
    """
    strips, chunk = (p + LANES - 1) // LANES, n if p <= LANES else min(n, _FEW)
    per_step = LANES // p if p <= LANES else 1
    kept = strips if n > chunk else 1
    lanes, pilot = np.empty((kept, _ACCUMULATORS * _STRIDE)), np.empty(p)
    for begin in range(0, n, chunk):
        size = min(chunk, n - begin)
        for strip in range(strips):
            first, mine = strip * LANES, lanes[strip % kept]
            columns = min(LANES, p - first)
            if begin == 0:
                _pilot(flat, first, p, rows, columns, pilot[first:])
                _reset(mine)
            at = begin * p + first
            _add(flat, at, p, size, columns, per_step, weights, begin, skipna, high, pilot[first:], mine)
            if begin + size < n:
                continue
            weighted, skips = weights is not None, skipna is not None
            if _columns(mine, n, per_step, columns, weighted, skips, pilot[first:], out, first):
                _reset(mine)
                _add(flat, first, p, n, columns, per_step, weights, 0, skipna, high, pilot[first:], mine)
                _columns(mine, n, per_step, columns, weighted, skips, pilot[first:], out, first)


@jit()
def _merge(a: Any, b: Any, high: Any) -> None:
    """Merge flat arrays ``b`` into ``a``, both in the order of `FIELDS`."""
    count, weight, s, low, m2, m3, m4, least, greatest = a
    b_count, b_weight, b_s, b_low, b_m2, b_m3, b_m4, b_least, b_greatest = b
    many = 1 if weight.size == s.size else 0
    for i in range(s.size):
        k = i * many
        wa, wb = weight[k], b_weight[k]
        if wb == 0.0:
            continue
        if wa == 0.0:
            s[i], low[i], m2[i] = b_s[i], b_low[i], b_m2[i]
            least[i], greatest[i] = b_least[i], b_greatest[i]
            if high is not None:
                m3[i], m4[i] = b_m3[i], b_m4[i]
            continue
        mean_a, rest_a = divide_pair(s[i], low[i], wa)
        mean_b, rest_b = divide_pair(b_s[i], b_low[i], wb)
        d = (mean_b - mean_a) + (rest_b - rest_a)
        w = wa + wb
        share, d2 = wa * wb / w, d * d
        if high is not None:
            m4[i] = (m4[i] + b_m4[i]) + (
                d2 * d2 * share * (wa * wa - wa * wb + wb * wb) / (w * w)
                + 6.0 * d2 * (wa * wa * b_m2[i] + wb * wb * m2[i]) / (w * w)
                + 4.0 * d * (wa * b_m3[i] - wb * m3[i]) / w
            )
            m3[i] = (m3[i] + b_m3[i]) + (
                d2 * d * share * (wa - wb) / w + 3.0 * d * (wa * b_m2[i] - wb * m2[i]) / w
            )
        m2[i] = (m2[i] + b_m2[i]) + d2 * share
        total, rest = add_pair(s[i], low[i], b_s[i], b_low[i])
        total, rest = keep_mean(total, rest, wa, wb)
        s[i] = total + rest
        low[i] = rest - (s[i] - total)
        least[i] = min(least[i], b_least[i])
        greatest[i] = max(greatest[i], b_greatest[i])
    count += b_count
    weight += b_weight


#: Fields of a state, in the order of the kernels.
FIELDS = ("count", "weight", "sum", "low", "M2", "M3", "M4", "min", "max")


def merge(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Merge the moments ``b`` into ``a``, whose memory is reused where it is writable.

    Both hold flat arrays or arrays of one shape under `FIELDS`; M3 and M4 may be missing.
    """
    a = {f: np.require(v, v.dtype.newbyteorder("="), ["C", "A", "W"]) for f, v in a.items()}
    left = [a.get(f, a["M2"]).reshape(-1) for f in FIELDS]
    right = [np.require(b.get(f, b["M2"]), v.dtype, ["C", "A"]) for f, v in zip(FIELDS, left, strict=True)]
    _merge(tuple(left), tuple(frozen(v) for v in right), True if "M4" in a else None)
    return a


def block_moments(x: Any, weights: Array | None, high: bool, skipna: bool) -> dict[str, Array]:
    """Moments of the columns of a real block.

    Parameters
    ----------
    x : array
        Shape (n, p), n >= 1 and p >= 1; NumPy or another array library's, bool, int or float.
    weights : numpy.ndarray or None
        Positive float64 weights of shape (n,).
    high : bool
        Whether to compute M3 and M4 too.
    skipna : bool
        Whether NaN counts as no sample.

    Returns
    -------
    dict
        `FIELDS`, each float64 of shape (p,), count int64. Σw·x is ``sum + low``.
    """
    if is_cupy(x):
        return device_moments(cupy_device(), x, weights, high, skipna)
    if not is_numpy(x):
        return array_api_moments(x, weights, high, skipna)
    offset = exact_offset(x)
    out = _numba_moments(x, weights, high, skipna, offset)
    fields = dict(zip(FIELDS, out, strict=False))
    fields["count"] = out[0].astype(np.int64)
    if offset:
        _shift(fields, offset, x)
    if not high:
        del fields["M3"], fields["M4"]
    return fields


def _numba_moments(x: Array, weights: Array | None, high: bool, skipna: bool, offset: int) -> Array:
    n, p = x.shape
    rows = np.unique(np.linspace(0, n - 1, min(n, _PILOT_ROWS)).astype(np.int64))
    out = np.empty((len(FIELDS), p))
    w, skips, highs = None if weights is None else frozen(weights), skipna or None, high or None
    if is_flat(x):
        _whole(frozen(x), n, p, w, skips, highs, rows, out)
    else:
        _through_scratch(x, (w, skips, highs), rows, out, offset)
    return out


def _through_scratch(x: Array, options: tuple[Any, Any, Any], rows: Array, out: Array, offset: int) -> None:
    """Do as `_whole`, with the same bits, converting tiles that fit in the cache."""
    (n, p), (weights, skipna, high) = x.shape, options
    lanes, pilot = np.empty(_ACCUMULATORS * _STRIDE), np.empty(LANES)
    sample = np.empty((len(rows), LANES))
    for first in range(0, p, LANES):
        columns = min(LANES, p - first)
        per_step = LANES // columns if columns == p else 1
        strip = x[:, first : first + columns]
        as_float(strip[rows], offset, sample[:, :columns])
        _pilot_of(frozen(sample), np.arange(len(rows)), columns, pilot)
        for _ in range(2):
            _reset_lanes(lanes)
            for row, flat in scratch_tiles(strip, per_step * STEPS, offset):
                rest = len(flat) // columns
                _add_tile(flat, rest, columns, per_step, weights, row, skipna, high, pilot, lanes)
            weighted, skips = weights is not None, skipna is not None
            if not _columns_of(lanes, n, per_step, columns, weighted, skips, pilot, out, first):
                break


def _shift(fields: dict[str, Array], offset: int, x: Array) -> None:
    """Undo the integer offset; the sum of weights times an integer is exact as a pair."""
    for i, weight in enumerate(fields["weight"]):
        total = Fraction(float(fields["sum"][i])) + Fraction(float(fields["low"][i]))
        total += Fraction(float(weight)) * offset
        high = float(total)
        fields["sum"][i], fields["low"][i] = high, float(total - Fraction(high))
    fields["min"][:], fields["max"][:] = to_host(x.min(axis=0)), to_host(x.max(axis=0))


def device_moments(
    device: Device, x: Any, weights: Array | None, high: bool, skipna: bool
) -> dict[str, Array]:
    """Do as `block_moments` for a block of a CUDA device; one that is converted is merged of pieces."""
    offset = exact_offset(x)
    merged: dict[str, Array] = {}
    for piece, w in pieces(device, x, weights, offset=offset):
        fields = cuda_moments(device, piece, w, high, skipna)
        merged = merge(merged, fields) if merged else fields
    if offset:
        _shift(merged, offset, x)
    return merged


def array_api_moments(x: Any, weights: Array | None, high: bool, skipna: bool) -> dict[str, Array]:
    """Do as `block_moments` by the array API standard, in two passes on the device of ``x``."""
    xp = namespace(x)
    x = xp.astype(x, xp.float64)
    here = xp.astype(~xp.isnan(x), xp.float64) if skipna else xp.ones_like(x)
    x = xp.where(here > 0, x, 0.0) if skipna else x
    w = here if weights is None else here * xp.asarray(weights)[:, None]
    weight = xp.sum(w, axis=0)
    mean = xp.sum(w * x, axis=0) / xp.where(weight > 0, weight, 1.0)
    d = (x - mean) * here
    # What rounding the mean has left over (Chan, Golub and LeVeque 1983, the corrected two-pass algorithm).
    rest = xp.sum(w * d, axis=0)
    d = (d - rest / xp.where(weight > 0, weight, 1.0)) * here
    power = [xp.sum(w * d**k, axis=0) for k in (2, 3, 4)]
    least = xp.min(xp.where(here > 0, x, _HUGE), axis=0)
    greatest = xp.max(xp.where(here > 0, x, -_HUGE), axis=0)
    columns = [to_host(c) for c in (xp.sum(here, axis=0), weight, mean, rest, *power, least, greatest)]
    fields = dict(zip(FIELDS, columns, strict=True))
    fields["count"] = fields["count"].astype(np.int64)
    fields["sum"], fields["low"] = scaled(fields["sum"], fields["weight"], fields["low"])
    if not high:
        del fields["M3"], fields["M4"]
    return fields
