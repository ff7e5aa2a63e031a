"""Where kernels run, and the one place of the statistics and the models that imports CuPy."""

from __future__ import annotations

import re
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import array_api_compat
import numpy as np

__all__ = ["FOLDER", "OPTIONS", "Device", "cupy_device", "is_cupy", "pointer", "source"]

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


def pointer(x: Any) -> int:
    """Return the address of the first element of a NumPy or CuPy array."""
    return int(x.ctypes.data) if isinstance(x, np.ndarray) else int(x.data.ptr)


class _Cupy:
    """The current CUDA device, by CuPy."""

    @cached_property
    def xp(self) -> Any:
        import cupy

        return cupy

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


@cache
def _module(path: Path, kernel: str) -> Any:
    """Compile one kernel; CuPy keeps it on disk, and loads it once per device."""
    return cupy_device().xp.RawModule(code=source(path), options=OPTIONS, name_expressions=(kernel,))


@cache
def cupy_device() -> Device:
    """Return the device of CuPy blocks."""
    return _Cupy()
