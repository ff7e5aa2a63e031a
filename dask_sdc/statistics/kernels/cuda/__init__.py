"""Kernels for CuPy blocks: CUDA C++ beside the code that launches it.

What a kernel needs of a device is a namespace of arrays and a launch, see `Device`. Tests bring one
that runs the same sources on the host. Nothing here imports CuPy before the first CuPy block comes.
"""

from __future__ import annotations

from dask_sdc.statistics.kernels.cuda.device import (
    Device,
    cupy_device,
    cupy_version,
    free_memory,
    is_cupy,
    release_unused,
    source,
)
from dask_sdc.statistics.kernels.cuda.failures import device_failure, named_failures, out_of_memory
from dask_sdc.statistics.kernels.cuda.shapes import workspace

__all__ = [
    "Device",
    "cupy_device",
    "cupy_version",
    "device_failure",
    "free_memory",
    "is_cupy",
    "named_failures",
    "out_of_memory",
    "release_unused",
    "source",
    "workspace",
]
