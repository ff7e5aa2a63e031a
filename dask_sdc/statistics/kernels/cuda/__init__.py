"""Kernels for CuPy blocks: CUDA C++ beside the code that launches it.

What a kernel needs of a device is a namespace of arrays and a launch, see `Device`. Tests bring one
that runs the same sources on the host. Nothing here imports CuPy before the first CuPy block comes.
"""

from __future__ import annotations

from dask_sdc.statistics.kernels.cuda.device import Device, cupy_device, is_cupy, source

__all__ = ["Device", "cupy_device", "is_cupy", "source"]
