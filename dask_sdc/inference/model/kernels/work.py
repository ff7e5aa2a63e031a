"""Work that threads share by claiming it, with a count that no thread has to reach for the others to go on.

A job is a row of phases, each of them a number of blocks. A thread claims blocks one by one; whoever
finishes the last block of a phase opens the next. Nobody waits for a thread that has not come: on a busy
machine a job runs on one thread as if it had been alone, where a barrier over all threads (OpenMP) would
make every phase wait for the slowest of them.

All functions are for compiled code without the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic

from dask_sdc.statistics.kernels import jit

__all__ = ["address", "await_phase", "claim", "declared", "finish", "new_job", "open_phase", "pointer"]

#: Counters of a phase: claimed blocks, finished blocks, whether it is over; a cache line of their own.
_CLAIMED, _FINISHED, _OVER, _LINE = 0, 1, 2, 8
_SPINS = 2000  # looks, about a microsecond, before the processor is offered to others


def new_job(phases: int) -> Any:
    """Return the counters of a job."""
    return np.zeros((phases, _LINE), np.int64)


def address(array: Any) -> int:
    """Return where an array's elements begin, 0 for an empty one."""
    return int(array.ctypes.data) if array.size else 0


def _place(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.gep(data, [args[1]])


#: Returns a function of a module under its name, declared once.
declared: Any = cgutils.get_or_insert_function


@intrinsic
def _add(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Add to ``array.flat[index]`` (int64), whole and after all that this thread did; return the old."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _place(context, builder, signature, args), args[2], "acq_rel")

    return types.int64(array, types.intp, types.int64), codegen


@intrinsic
def _read(typingctx: Any, array: Any, index: Any) -> Any:
    """Read ``array.flat[index]`` (int64) and all that was written before it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_place(context, builder, signature, args), "acquire", 8)

    return types.int64(array, types.intp), codegen


@intrinsic
def _yield_processor(typingctx: Any) -> Any:
    """Let other threads run (POSIX sched_yield)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(declared(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _pointer(typingctx: Any, at: Any) -> Any:
    """Turn an address into what `numba.carray` takes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


_add_: Any = _add
_read_: Any = _read
_yield_: Any = _yield_processor
pointer: Any = _pointer


@jit()
def claim(job: Any, phase: Any, blocks: Any) -> Any:
    """Return a block that nobody has, or -1."""
    block = _add_(job, phase * _LINE + _CLAIMED, 1)
    return block if block < blocks else -1


@jit()
def finish(job: Any, phase: Any, blocks: Any) -> Any:
    """Count a block as done; whether it was the last one, whose thread then calls `open_phase`."""
    return _add_(job, phase * _LINE + _FINISHED, 1) == blocks - 1


@jit()
def open_phase(job: Any, phase: Any) -> None:
    """Let all threads go on to the phase after this one."""
    _add_(job, phase * _LINE + _OVER, 1)


@jit()
def await_phase(job: Any, phase: Any) -> None:
    """Wait until a phase is over."""
    spins = 0
    while _read_(job, phase * _LINE + _OVER) == 0:
        spins += 1
        if spins > _SPINS:
            _yield_()
