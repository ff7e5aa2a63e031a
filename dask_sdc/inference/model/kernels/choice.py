"""Which kernels a namespace of arrays gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dask_sdc.inference.model.kernels.arrays import ArrayKernels
from dask_sdc.inference.model.kernels.cuda import CapturedKernels, CudaKernels
from dask_sdc.inference.model.kernels.layout import Block, Geometry
from dask_sdc.statistics.kernels.cuda import cupy_device

__all__ = ["array_kernels"]


def array_kernels(
    blocks: Sequence[Block], geometry: Geometry, xp: Any, *, by_row: bool = False
) -> ArrayKernels:
    """Return the CUDA kernels for CuPy, and plain code for any other namespace.

    Parameters
    ----------
    blocks : sequence of Block
        The layers.
    geometry : Geometry
        What they share.
    xp : module
        Array namespace, with NumPy's interface.
    by_row : bool
        Whether a row has the same bits whatever chunk it comes in.
    """
    if xp.__name__ == "cupy":
        device = cupy_device()
        return CapturedKernels(blocks, geometry, device) if by_row else CudaKernels(blocks, geometry, device)
    return ArrayKernels(blocks, geometry, xp, by_row=by_row)
