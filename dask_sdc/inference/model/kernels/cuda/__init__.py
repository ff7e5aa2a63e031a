"""Kernels of the forward pass for CuPy arrays: CUDA C++ beside the code that launches it."""

from __future__ import annotations

from dask_sdc.inference.model.kernels.cuda.graph import CapturedKernels
from dask_sdc.inference.model.kernels.cuda.stack import CudaKernels

__all__ = ["CapturedKernels", "CudaKernels"]
