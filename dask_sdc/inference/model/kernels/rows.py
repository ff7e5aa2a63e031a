"""Row kernels in Numba: the same row gives the same bits whatever the other rows, the threads or the machine.

All sums have a fixed order (`dask_sdc.inference.model.kernels.vector`, or plain loops without fast-math), so
that blocking, threads and batches are free to vary. A decode step reads every weight once and is bound by
memory; threads claim blocks of outputs (`dask_sdc.inference.model.kernels.work`). One call runs all layers
of a stage.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from dask_sdc.inference.model.kernels.layout import GELU, LANES, LINEAR, SWIGLU
from dask_sdc.inference.model.kernels.vector import (
    dots_1x1,
    dots_1x3,
    dots_1x4,
    dots_2x1,
    dots_2x3,
    weighted_1,
    weighted_4,
)
from dask_sdc.inference.model.kernels.work import await_phase, claim, finish, open_phase, pointer
from dask_sdc.statistics.kernels import jit

carray: Any = numba.carray  # type: ignore[attr-defined]

__all__ = ["CACHE_FIELDS", "COMPILED_IN", "PHASES", "WEIGHT_FIELDS", "head", "layers", "normed"]

#: Addresses of a layer's arrays, 0 for what is absent: gain and shift of both norms, then weight and bias of
#: the four projections.
WEIGHT_FIELDS = 12
_NORM1, _NORM2, _PROJECTION = 0, 2, 4
#: Addresses of its keys and values, then what says which of them are seen.
CACHE_FIELDS = 5
_K, _V, _SLOTS, _BASE, _WINDOW = range(CACHE_FIELDS)
#: Phases of a layer: queries, keys and values; their mix; the way out, into and back from the inner layer.
PHASES = 5
_MIX, _OUT, _IN, _BACK = range(1, PHASES)

#: CRC of vector.py and work.py, which are compiled into these kernels: Numba's cache on disk looks for
#: changes in this file alone. A test compares.
COMPILED_IN = "dcfee3d5"

_BLOCK_BYTES = 1 << 16  # weights of a block: they stay in the second-level cache while rows pass
_BLOCK_KEYS = 1 << 14  # keys and values of a block of attention, in elements
_ROWS = 16  # rows of a block: these stay in the first-level cache

_F = np.float32
_ONE, _HALF = _F(1.0), _F(0.5)
_LOWEST, _HIGHEST = _F(-87.0), _F(88.0)  # where exp is a normal float32
_LOG2_E = _F(1.44269504088896341)
# ln 2 in two parts (Cephes, expf.c): the upper one has few bits, so that its product with an exponent is
# exact.
_LN2_HIGH, _LN2_LOW = _F(0.693359375), _F(-2.12194440e-4)
_ROUNDER = _F(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
_P0, _P1, _P2 = _F(1.9875691500e-4), _F(1.3981999507e-3), _F(8.3334519073e-3)
_P3, _P4, _P5 = _F(4.1665795894e-2), _F(1.6666665459e-1), _F(5.0000001201e-1)
_BIAS, _MANTISSA = np.int32(127), np.int32(23)
_GELU_IN, _GELU_CUBE = _F(1.5957691216057308), _F(0.044715)  # 2·√(2/π)


@jit(inline="always")
def _exp(x: Any) -> Any:
    """Return exp(x) of a float32 within 2 ulp, x clipped to -87..88 (Cephes' expf); NaN stays NaN."""
    x = _LOWEST if x < _LOWEST else x
    x = _HIGHEST if x > _HIGHEST else x
    n = (x * _LOG2_E + _ROUNDER) - _ROUNDER
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    p = p * (r * r) + r + _ONE
    bits = np.int32(np.int32(np.int32(n) + _BIAS) << _MANTISSA)
    return p * bits.view(np.float32)


@jit(inline="always")
def _sigmoid(x: Any) -> Any:
    return _ONE / (_ONE + _exp(-x))


# -- projections ---------------------------------------------------------------------------------


@jit()
def normed(x: Any, gain: Any, shift: Any, eps: Any, out: Any) -> None:
    """RMSNorm, or LayerNorm where there is a shift, of rows (R, D), padded with zeros; sums in float64."""
    rows, size = x.shape
    for r in range(rows):
        mean = 0.0
        if shift.size:
            for i in range(size):
                mean += np.float64(x[r, i])
            mean /= size
        square = 0.0
        for i in range(size):
            d = np.float64(x[r, i]) - mean
            square += d * d
        scale, centre = _F(1.0 / math.sqrt(square / size + eps)), _F(mean)
        for i in range(size):
            out[r, i] = (x[r, i] - centre) * scale * gain[i]
        for i in range(shift.size):
            out[r, i] += shift[i]
        for i in range(size, out.shape[1]):
            out[r, i] = _F(0.0)


@jit()
def _products(x: Any, w: Any, first: Any, count: Any, out: Any, out_at: Any) -> None:
    """out[r, out_at + o] = x[r] · w[first + o] for o < count."""
    rows, n = x.shape
    stride = out.shape[1]
    for top in range(0, rows, _ROWS):
        end = min(rows, top + _ROWS)
        if end - top == 1:
            whole = count - count % 4
            for o in range(0, whole, 4):
                dots_1x4(
                    x, top * n, n, w, (first + o) * n, n, n, 4 * n, out, top * stride + out_at + o, stride
                )
            for o in range(whole, count):
                dots_1x1(x, top * n, n, w, (first + o) * n, n, n, n, out, top * stride + out_at + o, stride)
            continue
        even, whole = end - (end - top) % 2, count - count % 3
        for o in range(0, whole, 3):
            for r in range(top, even, 2):
                dots_2x3(x, r * n, n, w, (first + o) * n, n, n, 3 * n, out, r * stride + out_at + o, stride)
            for r in range(even, end):
                dots_1x3(x, r * n, n, w, (first + o) * n, n, n, 3 * n, out, r * stride + out_at + o, stride)
        for o in range(whole, count):
            for r in range(top, even, 2):
                dots_2x1(x, r * n, n, w, (first + o) * n, n, n, n, out, r * stride + out_at + o, stride)
            for r in range(even, end):
                dots_1x1(x, r * n, n, w, (first + o) * n, n, n, n, out, r * stride + out_at + o, stride)


@jit()
def _block(
    x: Any, w: Any, bias: Any, residual: Any, activation: Any, out: Any, first: Any, count: Any
) -> None:
    """out = activation(x · wᵀ + bias) + residual for ``count`` outputs; empty stands for absent.

    For SWIGLU the gate's weights and biases stand before those of the way up.
    """
    rows, outputs = out.shape
    up = np.empty((rows, count if activation == SWIGLU else 0), np.float32)
    # One call in a loop: each call is compiled in place, and takes seconds.
    for way in range(2 if activation == SWIGLU else 1):
        target, at = (up, 0) if way else (out, first)
        _products(x, w, way * outputs + first, count, target, at)
        if bias.size:
            for r in range(rows):
                for o in range(count):
                    target[r, at + o] += bias[way * outputs + first + o]
    for r in range(rows):
        if activation == SWIGLU:
            for o in range(count):
                y = out[r, first + o]
                out[r, first + o] = y * _sigmoid(y) * up[r, o]
        elif activation == GELU:
            for o in range(first, first + count):
                y = out[r, o]
                out[r, o] = y * _sigmoid(_GELU_IN * (y + _GELU_CUBE * (y * y * y)))
        if residual.size:
            for o in range(first, first + count):
                out[r, o] += residual[r, o]


@jit()
def _shared(job: Any, phase: Any, x: Any, w: Any, bias: Any, residual: Any, activation: Any, out: Any) -> Any:
    """Claim blocks of a projection (see `_block`); whether the last one was finished here."""
    outputs = out.shape[1]
    # A multiple of what `_products` takes at a time.
    step = 12 * max(1, _BLOCK_BYTES // (12 * w.shape[1] * w.itemsize))
    blocks = -(-outputs // step)
    last = False
    block = claim(job, phase, blocks)
    while block >= 0:
        first = block * step
        _block(x, w, bias, residual, activation, out, first, min(step, outputs - first))
        last = finish(job, phase, blocks)
        block = claim(job, phase, blocks)
    return last


# -- attention -----------------------------------------------------------------------------------


@jit()
def _append(qkv: Any, steps: Any, cos: Any, sin: Any, k: Any, v: Any, slot: Any, heads: Any) -> None:
    """Turn queries and keys by their positions, in place, and put keys and values into the cache."""
    kv_heads, width, half = k.shape[1], k.shape[3], cos.shape[1]
    for r in range(qkv.shape[0]):
        b, t = r // steps, r % steps
        for h in range(heads + kv_heads):
            at = h * width
            for i in range(half):
                low, high = qkv[r, at + i], qkv[r, at + half + i]
                qkv[r, at + i] = low * cos[t, i] - high * sin[t, i]
                qkv[r, at + half + i] = high * cos[t, i] + low * sin[t, i]
        for h in range(kv_heads):
            at = (heads + h) * width
            for i in range(width):
                k[b, h, slot + t, i] = qkv[r, at + i]
                v[b, h, slot + t, i] = qkv[r, at + kv_heads * width + i]


@jit()
def _scores(q: Any, q_at: Any, k: Any, k_at: Any, count: Any, out: Any, out_at: Any) -> None:
    width = k.shape[3]
    whole = count - count % 4
    for t in range(0, whole, 4):
        dots_1x4(q, q_at, width, k, k_at + t * width, width, width, 4 * width, out, out_at + t, 0)
    for t in range(whole, count):
        dots_1x1(q, q_at, width, k, k_at + t * width, width, width, 0, out, out_at + t, 0)


@jit()
def _softmax(scores: Any, scale: Any) -> None:
    highest = _F(-np.inf)
    for t in range(scores.size):
        scores[t] = scores[t] * scale
        highest = scores[t] if scores[t] > highest else highest
    for t in range(scores.size):
        scores[t] = _exp(scores[t] - highest)
    total = 0.0
    for t in range(scores.size):
        total += np.float64(scores[t])
    inverse = _F(1.0 / total)
    for t in range(scores.size):
        scores[t] *= inverse


@jit()
def _mix(p: Any, p_at: Any, count: Any, v: Any, v_at: Any, out: Any, out_at: Any) -> None:
    """Add the values, weighted, in the order of their positions."""
    width = v.shape[3]
    i = 0
    while i + 4 * LANES <= width:
        weighted_4(p, p_at, count, v, v_at + i, width, out, out_at + i)
        i += 4 * LANES
    while i < width:
        weighted_1(p, p_at, count, v, v_at + i, width, out, out_at + i)
        i += LANES


@jit()
def _attend(
    qkv: Any,
    task: Any,
    heads: Any,
    steps: Any,
    length: Any,
    k: Any,
    v: Any,
    base: Any,
    window: Any,
    sinks: Any,
    scale: Any,
    tree: Any,
    out: Any,
) -> None:
    """One head of one row: sinks, then the window, then its branch, each in the order of their positions."""
    r, h = task // heads, task % heads
    b, kv, t = r // steps, h // (heads // k.shape[1]), r % steps
    own = tree[t, 0] if tree.size else 0  # rows of its branch; without a tree all rows before it are
    position = length + (own - 1 if own else t)
    width = k.shape[3]
    low = max(0, position - window + 1)
    kept = min(min(sinks, low), length if own else low)
    recent = max(0, (length if own else position + 1) - low)
    scores = np.empty(kept + recent + own, np.float32)
    start = (b * k.shape[1] + kv) * k.shape[2] * width
    total = 0
    # One call in a loop: each call is compiled in place.
    for part in range(2 + own):
        at, count = _part(part, kept, low, recent, length, base, sinks, tree, t)
        _scores(qkv, r * qkv.shape[1] + h * width, k, start + at * width, count, scores, total)
        total += count
    _softmax(scores[:total], scale)
    for i in range(width):
        out[r, h * width + i] = _F(0.0)
    total = 0
    for part in range(2 + own):
        at, count = _part(part, kept, low, recent, length, base, sinks, tree, t)
        _mix(scores, total, count, v, start + at * width, out, r * out.shape[1] + h * width)
        total += count


@jit(inline="always")
def _part(
    part: Any, kept: Any, low: Any, recent: Any, length: Any, base: Any, sinks: Any, tree: Any, t: Any
) -> Any:
    """Return the first slot and the number of keys of sinks, window, or one row of a branch."""
    if part == 0:
        return 0, kept
    if part == 1:
        return low - base, recent
    there = length + part - 2
    return length - base + tree[t, part - 1], 1 if there >= low or there < sinks else 0


@jit()
def _attention(
    job: Any,
    phase: Any,
    qkv: Any,
    steps: Any,
    length: Any,
    k: Any,
    v: Any,
    base: Any,
    window: Any,
    sinks: Any,
    heads: Any,
    scale: Any,
    tree: Any,
    out: Any,
) -> Any:
    """Claim heads of rows; whether the last of them was finished here."""
    tasks = qkv.shape[0] * heads
    keys = min(length + steps, window + sinks)
    step = max(1, _BLOCK_KEYS // (keys * k.shape[3]))
    blocks = -(-tasks // step)
    last = False
    block = claim(job, phase, blocks)
    while block >= 0:
        for task in range(block * step, min(tasks, block * step + step)):
            _attend(qkv, task, heads, steps, length, k, v, base, window, sinks, scale, tree, out)
        last = finish(job, phase, blocks)
        block = claim(job, phase, blocks)
    return last


# -- a stage -------------------------------------------------------------------------------------


@jit(inline="always")
def _vector(at: Any, size: Any) -> Any:
    return carray(pointer(at), size if at else 0, np.float32)


@jit()
def layers(
    job: Any,
    weights: Any,
    kv: Any,
    kind: Any,
    x: Any,
    y: Any,
    h: Any,
    qkv: Any,
    mixed: Any,
    inner: Any,
    steps: Any,
    length: Any,
    cos: Any,
    sin: Any,
    kv_heads: Any,
    width: Any,
    sinks: Any,
    scale: Any,
    eps: Any,
    gated: Any,
    tree: Any,
) -> None:
    """Run rows x (R, D) through layers, in place; any number of threads may make the same call.

    The caller has put the first norm of x into h.

    Parameters
    ----------
    job : ndarray of int64
        `new_job` of `PHASES` phases per layer.
    weights, kv : ndarray of int64, shape (layers, WEIGHT_FIELDS) and (layers, CACHE_FIELDS)
        Where the arrays are. Those of the first must all have the type of the empty array ``kind`` if they
        are weights of projections, float32 otherwise.
    y, h, qkv, mixed, inner : ndarray of float32
        Room for (R, D), (R, D padded), (R, (H + 2·KV)·W), (R, H·W) and (R, I padded).
    steps, length : int
        Positions of the chunk, and before it.
    cos, sin : ndarray of float32, shape (steps, head_dim / 2)
        Of the positions' angles; empty without rotary positions.
    kv_heads, width, sinks : int
        KV, W and the positions that windows keep.
    scale, eps : float
        Of attention scores, and of norms.
    gated : bool
        Whether the inner layer is SwiGLU; otherwise it is GELU.
    tree : ndarray of int64, shape (steps, 1 + depth) or (0, 0)
        See `branches`; empty where every row follows the one before it.
    """
    rows, size = x.shape
    heads = mixed.shape[1] // width
    none = np.empty((0, 0), np.float32)
    activation = SWIGLU if gated else GELU
    # One loop over all phases: whatever it calls is compiled in place once.
    for phase in range(PHASES * len(weights)):
        layer, part = phase // PHASES, phase % PHASES
        slots, base, window = kv[layer, _SLOTS], kv[layer, _BASE], kv[layer, _WINDOW]
        k = carray(pointer(kv[layer, _K]), (rows // steps, kv_heads, slots, width), np.float32)
        v = carray(pointer(kv[layer, _V]), (rows // steps, kv_heads, slots, width), np.float32)
        if part == _MIX:
            last = _attention(
                job, phase, qkv, steps, length, k, v, base, window, sinks, heads, scale, tree, mixed
            )
        else:
            given, rest, out, follows = h, none, qkv, LINEAR
            if part == _OUT:
                given, rest, out = mixed, x, y
            elif part == _IN:
                out, follows = inner, activation
            elif part == _BACK:
                given, rest, out = inner, y, x
            field = _PROJECTION + 2 * (part - (part > _MIX))
            outputs = out.shape[1] * (2 if follows == SWIGLU else 1)
            w = carray(pointer(weights[layer, field]), (outputs, given.shape[1]), kind.dtype)
            bias = _vector(weights[layer, field + 1], outputs)
            last = _shared(job, phase, given, w, bias, rest, follows, out)
        if last:
            # Whoever finishes a phase does what is too little to be shared.
            if part == 0:
                _append(qkv, steps, cos, sin, k, v, length - base, heads)
            elif part == _OUT or (part == _BACK and layer + 1 < len(weights)):
                field = _NORM2 if part == _OUT else _NORM1
                at = weights[layer + (part == _BACK)]
                normed(out, _vector(at[field], size), _vector(at[field + 1], size), eps, h)
            open_phase(job, phase)
        await_phase(job, phase)


@jit()
def head(job: Any, h: Any, w: Any, out: Any) -> None:
    """Compute logits out (R, V) of normed rows h; any number of threads may make the same call."""
    none1, none2 = np.empty(0, np.float32), np.empty((0, 0), np.float32)
    if _shared(job, 0, h, w, none1, none2, LINEAR, out):
        open_phase(job, 0)
    await_phase(job, 0)
