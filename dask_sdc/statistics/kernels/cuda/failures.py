"""What CuPy raises of a device, told apart by name, and what it means; imports nothing of it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager

from dask_sdc.exceptions import DeviceError, DeviceLost, DeviceMemoryError

__all__ = ["device_failure", "named_failures", "out_of_memory"]

#: Codes of the CUDA runtime, which the driver shares, after which every call of the process fails.
_STICKY = frozenset(
    {
        *(214, 220, 226),  # ECC, NVLink, another contained error of hardware
        *(700, 702, 709, 710),  # illegal address, launch timeout, destroyed context, assertion
        *(714, 715, 716, 717, 718),  # stack, instruction, alignment, address space, program counter
        *(719, 721),  # launch failure, tensor memory
        *(810, 911, 999),  # ended by the MPS server, external device, what the driver has no name for
    }
)

#: Codes that say that CuPy, driver and device do not go together.
_UNUSABLE = frozenset(
    {
        *(34, 35, 803, 804),  # stub, old, mismatched driver, no forward compatibility
        *(98, 209, 222),  # no code for this device, PTX of a newer compiler
        *(100, 101),  # no device, no such device
    }
)

#: Out of memory, as the runtime says it, and as cuBLAS does.
_MEMORY, _CUBLAS_MEMORY = 2, 3

_LIBRARIES = ("cupy", "cupy_backends", "cupyx")
_ALLOCATION = re.compile(
    r"allocating (?P<asked>[\d,]+) bytes \(allocated so far: (?P<used>[\d,]+) bytes"
    r"(?:, limit set to: (?P<limit>[\d,]+) bytes)?"
)
#: What RMM raises is a plain MemoryError.
_RMM = re.compile(r"bad_alloc.*(?:CUDA|RMM)", re.IGNORECASE | re.DOTALL)
#: CuPy without one of the libraries of its CUDA, at its import or later.
_UNLOADED = re.compile(
    r"failed to (?:import cupy|load lib)|lib(?:cuda|cudart|nvrtc|cublas)\w*\.so", re.IGNORECASE
)


def out_of_memory(error: BaseException) -> bool:
    """Say whether an exception, or what caused it, is that a device has no memory left."""
    return isinstance(device_failure(error), DeviceMemoryError)


def device_failure(error: BaseException) -> DeviceError | None:
    """Return what an exception says of a device as an error of this package.

    Parameters
    ----------
    error : BaseException
        What was raised. Where its own class says nothing of a device, its causes are looked at.

    Returns
    -------
    DeviceError or None
        `DeviceLost`, `DeviceMemoryError`, a plain `DeviceError` where no device can be used, or None.
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if (found := _named(one)) is not None:
            return found
        one = one.__cause__
    return None


@contextmanager
def named_failures() -> Iterator[None]:
    """Raise what CuPy raises of a device as `DeviceError`, with the original as its cause."""
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:
        found = device_failure(error)
        if found is None:
            raise
        raise found from error


def _named(error: BaseException) -> DeviceError | None:
    if isinstance(error, DeviceError):
        return copy.copy(error)  # without its causes, of which it may be one
    if isinstance(error, ImportError) and _UNLOADED.search(str(error)):
        return _unusable(error)
    if not any(base.__module__.partition(".")[0] in _LIBRARIES for base in type(error).__mro__):
        ours = isinstance(error, MemoryError) and _RMM.search(str(error))
        # CuPy raises a plain RuntimeError where it loads a library late.
        late = type(error) is RuntimeError and "CuPy failed to load" in str(error)
        return _no_memory(error) if ours else _unusable(error) if late else None
    return _of_cupy(error)


def _of_cupy(error: BaseException) -> DeviceError | None:
    """Return the meaning of an exception whose class CuPy defines."""
    names = {base.__name__ for base in type(error).__mro__}
    status = getattr(error, "status", None)
    if "OutOfMemoryError" in names or ("CUBLASError" in names and status == _CUBLAS_MEMORY):
        return _no_memory(error)
    if not names & {"CUDARuntimeError", "CUDADriverError"}:
        return None
    if status == _MEMORY:
        return _no_memory(error)
    if status in _STICKY:
        return DeviceLost(
            f"device lost: {error} ({type(error).__name__} {status}); its context is dead, and with it "
            "all that this process had on the device"
        )
    return _unusable(error) if status in _UNUSABLE else None


def _no_memory(error: BaseException) -> DeviceMemoryError:
    match = _ALLOCATION.search(str(error))
    sizes = match.groupdict() if match else {}
    asked, used, limit = (
        int(sizes[name].replace(",", "")) if sizes.get(name) else None for name in ("asked", "used", "limit")
    )
    known = [
        f"{name} {size:,} bytes"
        for name, size in (("asked for", asked), ("in use", used), ("limit of the pool", limit))
        if size is not None
    ]
    text = f"out of device memory: {', '.join(known) or error}"
    return DeviceMemoryError(
        f"{text}; use smaller chunks, or free what else is on the device", asked=asked, used=used, limit=limit
    )


def _unusable(error: BaseException) -> DeviceError:
    return DeviceError(f"expected a CUDA device that CuPy can use, got {type(error).__name__}: {error}")
