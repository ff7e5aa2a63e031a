"""Where kernels run, and the one place of the statistics and the models that imports CuPy."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import array_api_compat
import numpy as np

from dask_sdc.exceptions import DeviceError

__all__ = [
    "FOLDER",
    "OPTIONS",
    "Device",
    "cupy_device",
    "cupy_version",
    "free_memory",
    "is_cupy",
    "pointer",
    "release_unused",
    "source",
]

#: Where the header that all kernels share lies.
FOLDER = Path(__file__).parent

#: Options of the compiler. It may fuse products into sums, but for those that the sources take by intrinsics.
OPTIONS = ("--std=c++17",)

#: Dynamic shared memory in bytes that a kernel gets without asking for more.
_SHARED = 48 << 10

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


class Device(Protocol):
    """What launching code needs of a device."""

    @property
    def xp(self) -> Any:
        """Namespace of its arrays, with NumPy's interface."""

    @property
    def shared_limit(self) -> int:
        """Most dynamic shared memory of a launch, bytes."""

    def launch(
        self,
        path: Path,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        shared: int = 0,
    ) -> None:
        """Run a kernel.

        Parameters
        ----------
        path : Path
            A ``.cu`` file of the package.
        kernel : str
            Name in it, with template arguments: ``moments_lanes<float, 4, false, true>``.
        grid, block : tuple of int
            Blocks and threads per block, at most three dimensions each.
        args : tuple
            C-contiguous arrays of the device, None for a null pointer, and NumPy scalars of the exact types
            of the kernel's parameters.
        shared : int
            Dynamic shared memory in bytes.
        """

    def capture(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Record what a function launches, and return what replays it.

        Parameters
        ----------
        work : callable
            Without arguments, returns an array of the device. It is called more than once, and may neither
            wait for the device nor copy anything to or from it.

        Returns
        -------
        callable
            Without arguments: launches on the current stream what was recorded, on the memory that it was
            recorded with, and returns the same array each time.

        Raises
        ------
        Exception
            Of any kind, where that is not possible.
        """


def source(path: Path) -> str:
    """Return the text of a kernel with the headers of the package in it.

    So the text is all that a compiler, and a cache of what it compiled, need to know. Messages keep the
    lines of the file.
    """

    def header(match: re.Match[str]) -> str:
        text = (FOLDER / match[1]).read_text("utf-8")
        line = before(match.start())
        return f'#line 1 "{match[1]}"\n{text}\n#line {line + 1} "{path.name}"'

    def before(position: int) -> int:
        return text.count("\n", 0, position) + 1

    text = path.read_text("utf-8")
    return f'#line 1 "{path.name}"\n{_INCLUDE.sub(header, text)}'


def is_cupy(x: Any) -> bool:
    """Whether a block is a CuPy array; imports nothing."""
    return bool(array_api_compat.is_cupy_array(x))


def cupy_version() -> str:
    """Return the version of CuPy with the name of its distribution, empty without one; imports nothing."""
    for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy"):
        with suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return ""


def pointer(x: Any) -> int:
    """Return the address of the first element of a NumPy or CuPy array."""
    return int(x.ctypes.data) if isinstance(x, np.ndarray) else int(x.data.ptr)


def release_unused() -> None:
    """Give back what the memory pools of CuPy hold and nobody uses; their limits stay as they are.

    Where another allocator was put in (RMM, for one), its pool is its own affair, but what only cycles of
    Python objects keep alive is given back to it.
    """
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()


def free_memory() -> int:
    """Return the bytes that this process can still have on its device, within the limit of CuPy's pool.

    What another allocator has taken in advance, as pools of RMM do, does not count as free.
    """
    xp = cupy_device().xp
    release_unused()
    free, _ = xp.cuda.runtime.memGetInfo()
    pool = xp.get_default_memory_pool()
    limit = pool.get_limit()
    return int(max(min(free, limit - pool.used_bytes()) if limit else free, 0))


class _Cupy:
    """The current CUDA device, by CuPy."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    @property
    def shared_limit(self) -> int:
        return int(self.xp.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"])

    def launch(
        self,
        path: Path,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        shared: int = 0,
    ) -> None:
        function = _module(path, kernel).get_function(kernel)
        if shared > _SHARED:
            function.max_dynamic_shared_size_bytes = shared
        given = tuple(np.uintp(0) if arg is None else arg for arg in args)
        function(grid, block, given, shared_mem=shared)

    def capture(self, work: Callable[[], Any]) -> Callable[[], Any]:
        cuda = self.xp.cuda
        # On top of the allocator that is in use, with its limits; nobody else gets what the graph writes to.
        pool = cuda.MemoryPool(cuda.get_allocator())
        cuda.get_current_stream().synchronize()
        with cuda.using_allocator(pool.malloc), cuda.Stream(non_blocking=True) as stream:
            work()  # compiles, loads and allocates what a capture must not
            stream.synchronize()
            stream.begin_capture()
            try:
                result = work()
            except BaseException:
                with suppress(Exception):  # it says of the same trouble that the capture is void
                    stream.end_capture()
                raise
            return _Replay(stream.end_capture(), result, pool)


class _Replay:
    """A CUDA graph of CuPy, with the memory that it works on."""

    def __init__(self, graph: Any, result: Any, pool: Any) -> None:
        self._graph, self._result, self._pool = graph, result, pool

    def __call__(self) -> Any:
        self._graph.launch()
        return self._result


@cache
def _module(path: Path, kernel: str) -> Any:
    """Compile one kernel; CuPy keeps it on disk, and loads it once per device."""
    return cupy_device().xp.RawModule(code=source(path), options=OPTIONS, name_expressions=(kernel,))


@cache
def cupy_device() -> Device:
    """Return the device of CuPy blocks.

    Raises
    ------
    DeviceError
        If CuPy cannot be imported, or finds no device; says what was found and what was expected.
    """
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            "expected CuPy for the CUDA of the driver (the extra cupy-cuda12x or cupy-cuda13x), "
            f"got {type(error).__name__}: {error}"
        ) from error
    _check_devices(cupy)
    return _Cupy(cupy)


def _check_devices(cupy: Any) -> None:
    """Refuse to go on without a device that this CuPy can use."""
    runtime, cause = cupy.cuda.runtime, None
    try:
        if runtime.getDeviceCount() > 0:
            return
        problem = "no device"
    except runtime.CUDARuntimeError as error:
        problem, cause = str(error), error
    built, driver = runtime.runtimeGetVersion(), runtime.driverGetVersion()
    raise DeviceError(
        f"expected a CUDA device, and a driver for CUDA {built // 1000} or later, of which this CuPy "
        f"{cupy.__version__} is, got {problem} with {_driver(driver)} and "
        f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}"
    ) from cause


def _driver(version: int) -> str:
    """Return a version of the driver as text: 12090 is CUDA 12.9, 0 none."""
    return f"a driver for CUDA {version // 1000}.{version % 1000 // 10}" if version else "no driver"
