"""Dot products whose order of summation is written down, and so the same in every kernel on every CPU.

A compiler that may reassociate picks an order per loop: the same row could get other bits in a chunk of one
and in a chunk of eight. Here lane ``l`` of 16 sums the products ``l, l + 16, l + 32, …`` by fused
multiply-adds, in runs of 128 products that are then added up, and the lanes are folded as a fixed tree.
Blocking over rows and outputs reuses loads and changes no bit.

Weights are float32, bfloat16 as uint16, or float16 as int16: widening is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic

from dask_sdc.inference.model.kernels.layout import LANES
from dask_sdc.inference.model.kernels.work import declared

__all__ = ["dots_1x1", "dots_1x3", "dots_1x4", "dots_2x1", "dots_2x3", "weighted_1", "weighted_4"]

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_I32 = ir.IntType(32)
_RUN = 128  # products after which a lane starts anew: many short sums round less than one long one
_CACHE_LEVEL = 3  # of llvm.prefetch: keep in all levels


def _data(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    return context.make_array(kind)(context, builder, array).data


def _load(builder: Any, pointer: Any, kind: Any) -> Any:
    """Load 16 elements as float32."""
    if kind == types.float32:
        return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)
    if kind == types.int16:  # float16
        halves = ir.VectorType(ir.HalfType(), LANES)
        return builder.fpext(builder.load(builder.bitcast(pointer, halves.as_pointer()), align=2), _VECTOR)
    words, wide = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(_I32, LANES)
    loaded = builder.zext(builder.load(builder.bitcast(pointer, words.as_pointer()), align=2), wide)
    return builder.bitcast(builder.shl(loaded, ir.Constant(wide, [16] * LANES)), _VECTOR)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR, _VECTOR])
    function = declared(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [a, b, c])


def _fold(builder: Any, vector: Any) -> Any:
    """Sum the lanes: upper half onto lower half until one is left."""
    width = LANES
    while width > 1:
        width //= 2
        halves = [
            builder.shuffle_vector(
                vector,
                ir.Constant(vector.type, ir.Undefined),
                ir.Constant(ir.VectorType(_I32, width), list(range(first, first + width))),
            )
            for first in (0, width)
        ]
        vector = builder.fadd(*halves)
    return builder.extract_element(vector, _I32(0))


def _prefetch(builder: Any, pointer: Any) -> None:
    i8p = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [i8p, _I32, _I32, _I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [i8p], kind)
    builder.call(function, [builder.bitcast(pointer, i8p), _I32(0), _I32(_CACHE_LEVEL), _I32(1)])


def _loop(
    builder: Any,
    first: Any,
    end: Any,
    step: int,
    start: list[Any],
    body: Callable[[Any, list[Any]], list[Any]],
) -> Any:
    """Run ``body(i, values)`` for i = first, first + step, … below ``end``; return the last values."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(end.type)
    index.add_incoming(first, before)
    values = [builder.phi(value.type) for value in start]
    for phi, value in zip(values, start, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", index, end), inside, after)
    builder.position_at_end(inside)
    changed = body(index, values)
    following = builder.add(index, end.type(step))
    end = builder.block
    builder.branch(head)
    index.add_incoming(following, end)
    for phi, value in zip(values, changed, strict=True):
        phi.add_incoming(value, end)
    builder.position_at_end(after)
    return values


def _dots(rows: int, outputs: int) -> Any:
    """Make ``dots(x, x_at, x_stride, w, w_at, w_stride, n, ahead, out, out_at, out_stride)``.

    ``out[out_at + r * out_stride + o] = Σ_i x[x_at + r * x_stride + i] * w[w_at + o * w_stride + i]`` for i
    < n, a multiple of 16. What lies ``ahead`` elements further in ``w`` is prefetched, unless that is 0. All
    arrays are flat, and ``x`` and ``out`` are float32.
    """

    def dots(
        typingctx: Any,
        x: Any,
        x_at: Any,
        x_stride: Any,
        w: Any,
        w_at: Any,
        w_stride: Any,
        n: Any,
        ahead: Any,
        out: Any,
        out_at: Any,
        out_stride: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            xs, ws, os = (_data(context, builder, kinds[k], args[k]) for k in (0, 3, 8))
            x_at, x_stride, w_at, w_stride, n, ahead, out_at, out_stride = (
                args[k] for k in (1, 2, 4, 5, 6, 7, 9, 10)
            )

            def address(base: Any, at: Any, stride: Any, count: int) -> list[Any]:
                return [
                    builder.gep(base, [builder.add(at, builder.mul(stride, stride.type(k)))])
                    for k in range(count)
                ]

            x_rows, w_rows = address(xs, x_at, x_stride, rows), address(ws, w_at, w_stride, outputs)

            def body(index: Any, sums: list[Any]) -> list[Any]:
                loaded = [_load(builder, builder.gep(row, [index]), types.float32) for row in x_rows]
                following = builder.add(index, ahead)
                result = list(sums)
                for o, row in enumerate(w_rows):
                    _prefetch(builder, builder.gep(row, [following]))
                    weights = _load(builder, builder.gep(row, [index]), kinds[3].dtype)
                    for r in range(rows):
                        k = r * outputs + o
                        result[k] = _fma(builder, loaded[r], weights, sums[k])
                return result

            zero = ir.Constant(_VECTOR, [0.0] * LANES)
            zeros = [zero] * (rows * outputs)

            def block(start: Any, totals: list[Any]) -> list[Any]:
                end = builder.add(start, n.type(_RUN))
                end = builder.select(builder.icmp_signed("<", end, n), end, n)
                runs = _loop(builder, start, end, LANES, zeros, body)
                return [builder.fadd(total, run) for total, run in zip(totals, runs, strict=True)]

            sums = _loop(builder, n.type(0), n, _RUN, zeros, block)
            for r, target in enumerate(address(os, out_at, out_stride, rows)):
                for o in range(outputs):
                    value = _fold(builder, sums[r * outputs + o])
                    builder.store(value, builder.gep(target, [out_at.type(o)]), align=4)
            return context.get_dummy_value()

        index = types.intp
        return types.void(x, index, index, w, index, index, index, index, out, index, index), codegen

    dots.__name__ = f"dots_{rows}x{outputs}"
    return intrinsic(dots)


def _weighted(vectors: int) -> Any:
    """Make ``weighted(p, count, v, v_at, v_stride, out, out_at)``.

    Adds ``Σ_t p[t] * v[v_at + t * v_stride + i]`` for t = 0..count-1, in this order, to ``out[out_at + i]``
    for i below 16 times ``vectors``. All arrays are flat float32.
    """

    def weighted(
        typingctx: Any, p: Any, p_at: Any, count: Any, v: Any, v_at: Any, v_stride: Any, out: Any, out_at: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            ps, vs, os = (_data(context, builder, signature.args[k], args[k]) for k in (0, 3, 6))
            p_at, count, v_at, v_stride, out_at = (args[k] for k in (1, 2, 4, 5, 7))
            targets = [builder.gep(os, [builder.add(out_at, out_at.type(LANES * k))]) for k in range(vectors)]

            def body(index: Any, sums: list[Any]) -> list[Any]:
                scalar = builder.load(builder.gep(ps, [builder.add(p_at, index)]), align=4)
                empty = ir.Constant(_VECTOR, ir.Undefined)
                first = builder.insert_element(empty, scalar, _I32(0))
                mask = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
                spread = builder.shuffle_vector(first, empty, mask)
                row = builder.gep(vs, [builder.add(v_at, builder.mul(index, v_stride))])
                return [
                    _fma(
                        builder,
                        spread,
                        _load(builder, builder.gep(row, [index.type(LANES * k)]), types.float32),
                        total,
                    )
                    for k, total in enumerate(sums)
                ]

            start = [_load(builder, target, types.float32) for target in targets]
            for target, total in zip(
                targets, _loop(builder, count.type(0), count, 1, start, body), strict=True
            ):
                builder.store(total, builder.bitcast(target, _VECTOR.as_pointer()), align=4)
            return context.get_dummy_value()

        index = types.intp
        return types.void(p, index, index, v, index, index, out, index), codegen

    weighted.__name__ = f"weighted_{vectors}"
    return intrinsic(weighted)


dots_1x1: Any = _dots(1, 1)
dots_1x3: Any = _dots(1, 3)
dots_1x4: Any = _dots(1, 4)
dots_2x1: Any = _dots(2, 1)
dots_2x3: Any = _dots(2, 3)
weighted_1: Any = _weighted(1)
weighted_4: Any = _weighted(4)
