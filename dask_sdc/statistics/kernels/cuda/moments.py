"""Launches of ``moments.cu``."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dask_sdc.statistics.kernels import to_host
from dask_sdc.statistics.kernels.cuda.device import FOLDER, Device, pointer
from dask_sdc.statistics.kernels.cuda.shapes import THREADS, Array, element, fold_block, rows_of_parts

__all__ = ["VARIANTS", "Plan", "cuda_moments"]

SOURCE = FOLDER / "moments.cu"

#: Fields of the result, one row each: those of a state, and whether the pilot was too far from the mean.
_RESULT = ("count", "weight", "sum", "low", "M2", "M3", "M4", "min", "max", "far")
#: float64 that a thread of the fold has in shared memory.
_COLUMN = 13
#: Rows that say where the mean of a column is.
_PILOT_ROWS = 16
#: Fields of the partial result of a part.
_PARTIAL = 9
#: Parts of a block: enough for every multiprocessor to have several, few enough to fold in no time.
_PARTS = 1024
#: Least samples of a lane in a part, or its partial result would weigh more than its samples.
_STEPS = 32

VARIANTS = (
    *(f"moments_pilot<{t}>" for t in ("float", "double")),
    *(
        f"moments_lanes<{t}, {v}, {general}, {high}>"
        for t, wide in (("float", 4), ("double", 2))
        for v in (1, wide)
        for general in ("false", "true")
        for high in ("false", "true")
    ),
    *(f"moments_fold<{general}, {high}>" for general in ("false", "true") for high in ("false", "true")),
)


class Plan(NamedTuple):
    """How a block (n, p) is read.

    Parameters
    ----------
    vector : int
        Elements of a load.
    width : int
        Lanes of a row of threads.
    per_step : int
        Samples that lie side by side in it.
    rows, parts : int
        Samples of a part, and parts.
    strips : int
        Strips of columns.
    """

    vector: int
    width: int
    per_step: int
    rows: int
    parts: int
    strips: int

    @classmethod
    def of(cls, n: int, p: int, itemsize: int, aligned: bool) -> Plan:
        """Plan for a block whose first element is on a boundary of 16 bytes, or is not."""
        for vector in (16 // itemsize, 1) if aligned else (1,):
            lanes = THREADS * vector
            # Whole samples in whole loads: then a thread meets the same columns in every step.
            multiple = vector // math.gcd(p, vector)
            per_step = lanes // p // multiple * multiple
            if per_step:
                return cls(vector, per_step * p, per_step, *_parts(n, per_step, 1), 1)
            if p % vector == 0:
                break
        strips = -(-p // lanes)
        return cls(vector, lanes if strips > 1 else p, 1, *_parts(n, 1, strips), strips)


def _parts(n: int, per_step: int, strips: int) -> tuple[int, int]:
    parts = min(-(-_PARTS // strips), max(n // (per_step * _STEPS), 1))
    return rows_of_parts(n, parts, per_step)


def cuda_moments(
    device: Device, x: Array, weights: Array | None, high: bool, skipna: bool
) -> dict[str, np.ndarray]:
    """Moments of the columns of a native block; see `dask_sdc.statistics.kernels.moments.block_moments`.

    Parameters
    ----------
    device : Device
        Where the block lies.
    x : array
        Shape (n, p), n >= 1 and p >= 1, float32 or float64, C-contiguous.
    weights : array or None
        Float64 weights of shape (n,) on the device.
    high : bool
        Whether to compute M3 and M4 too.
    skipna : bool
        Whether NaN counts as no sample.
    """
    xp, (n, p) = device.xp, x.shape
    plan = Plan.of(n, p, x.dtype.itemsize, pointer(x) % 16 == 0)
    kind, general = element(x), "true" if weights is not None or skipna else "false"
    flags = f"{general}, {'true' if high else 'false'}"
    pilot, partial = xp.empty(p), xp.empty((plan.parts, _PARTIAL, p))
    out = xp.empty((len(_RESULT), p))
    size = np.int64(n), np.int64(p)
    rows = np.int32(min(n, _PILOT_ROWS))
    device.launch(SOURCE, f"moments_pilot<{kind}>", (-(-p // 128),), (128,), (x, *size, rows, pilot))
    across, down = fold_block(p)
    for _ in range(2):
        device.launch(
            SOURCE,
            f"moments_lanes<{kind}, {plan.vector}, {flags}>",
            (plan.parts, plan.strips),
            (THREADS,),
            (
                *(x, weights, pilot, *size, np.int32(plan.width), np.int32(plan.per_step)),
                *(np.int64(plan.rows), np.int64(plan.parts), np.int32(skipna), partial),
            ),
            2 * plan.width * 8,
        )
        device.launch(
            SOURCE,
            f"moments_fold<{flags}>",
            (-(-p // across),),
            (across, down),
            (partial, np.int64(plan.parts), size[1], size[0], pilot, out),
            across * down * _COLUMN * 8,
        )
        fields = dict(zip(_RESULT, to_host(out), strict=True))
        if not fields.pop("far").any():
            break
        # The sampled rows did not tell where a mean is, and digits were lost: now it is known.
    fields["count"] = fields["count"].astype(np.int64)
    if not high:
        del fields["M3"], fields["M4"]
    return fields
