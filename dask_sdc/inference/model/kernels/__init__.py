"""Kernels of the forward pass.

`rows` (Numba, NumPy arrays) give a row the same bits whatever the chunk it comes in. `arrays` are plain code
over an array namespace: BLAS on the host, CuPy on a GPU.
"""

from __future__ import annotations

from dask_sdc.inference.model.kernels.arrays import ArrayKernels, widen
from dask_sdc.inference.model.kernels.crew import set_threads, threads
from dask_sdc.inference.model.kernels.layout import Block, Geometry, Linear, Norm
from dask_sdc.inference.model.kernels.stack import RowKernels

__all__ = [
    "ArrayKernels",
    "Block",
    "Geometry",
    "Linear",
    "Norm",
    "RowKernels",
    "set_threads",
    "threads",
    "widen",
]
