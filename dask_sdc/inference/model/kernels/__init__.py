"""Kernels of the forward pass.

`rows` (Numba, NumPy arrays) give a row the same bits whatever the chunk it comes in. `arrays` are plain code
over an array namespace: BLAS on the host. `cuda` has what a GPU runs: all but the products of long chunks.
"""

from __future__ import annotations

from dask_sdc.inference.model.kernels.arrays import ArrayKernels, widen
from dask_sdc.inference.model.kernels.choice import array_kernels
from dask_sdc.inference.model.kernels.crew import set_threads, threads
from dask_sdc.inference.model.kernels.layout import NO_TREE, Block, Geometry, Linear, Norm, branches
from dask_sdc.inference.model.kernels.stack import RowKernels

__all__ = [
    "NO_TREE",
    "ArrayKernels",
    "Block",
    "Geometry",
    "Linear",
    "Norm",
    "RowKernels",
    "array_kernels",
    "branches",
    "set_threads",
    "threads",
    "widen",
]
