"""Where tests run: on NumPy, on CuPy, and on an emulation of CuPy that runs the CUDA sources.

The emulation is NumPy by the name of CuPy. Its arrays refuse NumPy's as operands, as CuPy's do, and the
package's kernels run on the host by ``tests/cuda/host_cuda.h``. So a test goes the whole way from a
statistic or a model down to a kernel, as it does on a card.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dask_sdc.statistics.kernels import place_of
from tests.cuda.emulated import COMPILER, HostDevice
from tests.gpu.fakes import DeviceArray

Array = np.ndarray[Any, Any]

#: For ``parametrize``: each where it can run.
BACKENDS = (
    "numpy",
    pytest.param(
        "emulated", marks=pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
    ),
    pytest.param("cupy", marks=pytest.mark.gpu),
)

#: Modules that ask for the device, or whether a block is on one.
_USERS = (
    "dask_sdc.statistics.kernels.covariance",
    "dask_sdc.statistics.kernels.histogram",
    "dask_sdc.statistics.kernels.kmeans",
    "dask_sdc.statistics.kernels.mixture",
    "dask_sdc.statistics.kernels.moments",
    "dask_sdc.inference.model.kernels.choice",
    "dask_sdc.inference.pace",
    "dask_sdc.inference.stage",
)

#: Functions that take NumPy's arrays over to the device.
_CARRYING = {"array", "asarray"}


class EmulatedNamespace(ModuleType):
    """NumPy's functions by the name of CuPy; what they return is on the device."""

    def __init__(self) -> None:
        super().__init__("cupy")

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if isinstance(found, type) or not callable(found):
            return found
        return _carried(found, refuses=name not in _CARRYING)


def _carried(function: Callable[..., Any], refuses: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if refuses:
            _refuse_host((*args, *kwargs.values()))
        return over_there(function(*args, **kwargs))

    return call


def _refuse_host(values: Any) -> None:
    for value in values:
        if isinstance(value, list | tuple):
            _refuse_host(value)
        elif type(value) is np.ndarray:
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")  # the words of CuPy


def over_there(value: Any) -> Any:
    """Return arrays as arrays of the device, and anything else as it is."""
    if isinstance(value, tuple | list):
        return type(value)(map(over_there, value))
    return np.asarray(value).view(DeviceArray) if isinstance(value, np.ndarray | np.generic) else value


@dataclass(frozen=True)
class Backend:
    """A namespace of arrays, and the ways there and back."""

    name: str
    xp: Any

    def put(self, array: Any) -> Any:
        """Return an array of the namespace; None stays None."""
        return None if array is None else self.xp.asarray(array)

    def get(self, array: Any) -> Array:
        """Return an array of NumPy."""
        return np.asarray(array.get() if place_of(array) == "device" else array)


def backend_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Return a backend; the emulated one holds until the end of the test."""
    if name == "numpy":
        return Backend(name, np)
    if name == "cupy":
        import cupy

        return Backend(name, cupy)
    device = HostDevice()
    device.xp = EmulatedNamespace()  # type: ignore[assignment]
    for user in _USERS:
        module = import_module(user)
        monkeypatch.setattr(module, "cupy_device", lambda: device)
        if hasattr(module, "is_cupy"):
            monkeypatch.setattr(module, "is_cupy", lambda x: place_of(x) == "device")
        if hasattr(module, "is_numpy"):
            monkeypatch.setattr(module, "is_numpy", lambda x: place_of(x) == "host")
    return Backend(name, device.xp)
