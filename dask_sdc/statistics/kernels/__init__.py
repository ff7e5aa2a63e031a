"""Kernels of the statistics, and the one place that decides which of them runs.

NumPy blocks go to Numba kernels, blocks of any other array library (CuPy) to code against the
array API standard. Nothing is compiled at import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import array_api_compat
import numba
import numpy as np

__all__ = ["dtype_of", "is_numpy", "jit", "namespace", "place_of", "reshaped", "to_host"]

F = TypeVar("F", bound=Callable[..., Any])


def inner(**options: Any) -> Callable[[F], F]:
    """Compile a function that kernels call, into each of them.

    It is never called from Python, and no machine code of it alone exists. Otherwise each kernel would bring
    its own copy, optimised in its own context with its own order of additions, and whichever a process met
    first would serve all of them: bits would depend on what was compiled here and what came from the disk.
    """
    return numba.njit(nogil=True, error_model="numpy", forceinline=True, **options)  # type: ignore[no-any-return]


def jit(**options: Any) -> Callable[[F], F]:
    """Compile lazily, without the GIL, one thread per call, cached on disk where that is possible.

    For functions that Python calls; they call those of `inner` only.

    Numba looks for a writable cache folder when a function is decorated and raises where there is
    none (read-only installs, containers without a home): such a process compiles for itself.
    """
    options = {"nogil": True, "error_model": "numpy", **options}

    def decorate(function: F) -> F:
        try:
            kernel: F = numba.njit(cache=True, **options)(function)
        except RuntimeError:
            kernel = numba.njit(**options)(function)
        return kernel

    return decorate


def is_numpy(x: Any) -> bool:
    """Whether a block is a NumPy array, so that the Numba kernels apply."""
    return isinstance(x, np.ndarray)


def place_of(x: Any) -> str:
    """Return "device" for a CuPy array, "host" for anything else; imports nothing."""
    return "device" if type(x).__module__.partition(".")[0] == "cupy" else "host"


def namespace(*arrays: Any) -> Any:
    """Return the array API namespace of blocks that are not NumPy's."""
    return array_api_compat.array_namespace(*arrays)


def dtype_of(x: Any) -> np.dtype[Any]:
    """Return NumPy's dtype of a block of any array library; others name theirs as ``library.float32``."""
    return x.dtype if isinstance(x.dtype, np.dtype) else np.dtype(str(x.dtype).rpartition(".")[2])


def reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    """Return a block of any array library in another shape."""
    return x.reshape(shape) if hasattr(x, "reshape") else namespace(x).reshape(x, shape)


def to_host(x: Any) -> np.ndarray[Any, Any]:
    """Copy a (small) device array to the host, as states hold NumPy arrays only."""
    return np.asarray(x.get() if place_of(x) == "device" else x)
