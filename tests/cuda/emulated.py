"""A device that runs the CUDA sources of the package on the host, for code that launches kernels.

The sources are compiled as C++ with ``host_cuda.h``, warnings as errors. Arrays are NumPy's. Every
launch checks the number and types of its arguments against the kernel's parameters, and that arrays are
contiguous: a wrong one would be silent damage on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dask_sdc.statistics.kernels.cuda import source

HEADER = Path(__file__).parent / "host_cuda.h"

#: The compiler of the host, or None.
COMPILER = shutil.which(os.environ.get("CXX", "g++"))

# Contraction off: what the sources fuse they say, and sums of pairs bear none.
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")

#: What was compiled is kept between runs.
_BUILT = HEADER.parent.parent.parent / ".pytest_cache" / "host_cuda"

LAUNCHER = """
extern "C" const char* launch_NUMBER(
    const unsigned* shape, std::size_t shared, unsigned schedule, void** args) {
    return host_cuda::launch(KERNEL, shape, shared, schedule, args);
}
extern "C" const char* signature_NUMBER() {
    static const std::string text = host_cuda::signature(KERNEL);
    return text.c_str();
}
"""

_lock = threading.Lock()


class LaunchError(AssertionError):
    """A launch that a GPU would not survive, or would answer wrongly."""


class HostDevice:
    """The device of NumPy arrays.

    Parameters
    ----------
    schedule : int
        Order in which threads and blocks run: 0 rising, 1 falling, others seed a random one.
    most_blocks : int or None
        Launches of more blocks along x are cut to this many where a kernel goes on in strides of the grid.
    """

    xp = np
    shared_limit = 227 << 10

    def __init__(self, schedule: int = 0, most_blocks: int | None = None) -> None:
        self.schedule, self.most_blocks = schedule, most_blocks
        self.launched: list[str] = []
        self._recording = threading.local()

    def launch(
        self,
        path: Path,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        shared: int = 0,
    ) -> None:
        """Run a kernel on the host, see `dask_sdc.statistics.kernels.cuda.Device`."""
        if self.most_blocks is not None and _strides(path, kernel):
            grid = (min(grid[0], self.most_blocks), *grid[1:])
        if shared > self.shared_limit:
            raise LaunchError(f"{kernel}: {shared} bytes of shared memory, at most {self.shared_limit}")
        program(path).launch(kernel, grid, block, args, shared, self.schedule)
        self.launched.append(kernel)
        recorded = getattr(self._recording, "launches", None)
        if recorded is not None:
            recorded.append((path, kernel, grid, block, args, shared))

    def capture(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Record launches with their arguments: whatever else the function does, no replay does again."""
        recorded: list[tuple[Any, ...]] = []
        self._recording.launches = recorded
        try:
            result = work()
        finally:
            self._recording.launches = None

        def replay() -> Any:
            for launch in recorded:
                self.launch(*launch)
            return result

        return replay


@functools.cache
def _strides(path: Path, kernel: str) -> bool:
    """Whether a kernel goes through its work in strides of the grid, along x."""
    name = kernel.partition("<")[0]
    body = path.read_text("utf-8").partition(f"{name}(")[2].partition("__global__")[0]
    return "+= gridDim.x" in body or "gridDim.x) * blockDim.x" in body


class Program:
    """A source that is compiled for the host.

    Parameters
    ----------
    name : str
        Of the file.
    text : str
        Its text, without includes.
    kernels : tuple of str
        Its kernels, with template arguments.
    """

    def __init__(self, name: str, text: str, kernels: tuple[str, ...]) -> None:
        library = ctypes.CDLL(str(_built(name, _host_text(text, kernels))))
        self._entries = {kernel: _Entry(library, number) for number, kernel in enumerate(kernels)}

    def launch(
        self,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        shared: int = 0,
        schedule: int = 0,
    ) -> None:
        """Check the arguments of a launch, and run it."""
        if kernel not in self._entries:
            raise LaunchError(f"{kernel} is not among {sorted(self._entries)}")
        entry = self._entries[kernel]
        shape = (ctypes.c_uint * 6)(*_three(grid), *_three(block))
        kept = [_argument(kernel, i, code, arg) for i, (code, arg) in enumerate(_paired(kernel, entry, args))]
        pointers = (ctypes.c_void_p * len(kept))(*(value.ctypes.data for value in kept))
        with _lock:
            problem = entry.launch(shape, shared, schedule, pointers)
        if problem is not None:
            raise LaunchError(f"{kernel}: {problem.decode()}")


class _Entry:
    """A compiled kernel: its launcher, and the codes of its parameters."""

    def __init__(self, library: ctypes.CDLL, number: int) -> None:
        self.launch = getattr(library, f"launch_{number}")
        self.launch.restype = ctypes.c_char_p
        self.launch.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_void_p]
        signature = getattr(library, f"signature_{number}")
        signature.restype = ctypes.c_char_p
        text = signature().decode()
        self.codes = [f"*{part[0]}" if star else part[0] for star, part in _parts(text)]


def _parts(text: str) -> list[tuple[bool, str]]:
    found, star = [], False
    for letter in text:
        if letter == "*":
            star = True
        else:
            found.append((star, letter))
            star = False
    return found


def _three(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (*sizes, *(1,) * (3 - len(sizes)))


def _paired(kernel: str, entry: _Entry, args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    if len(entry.codes) != len(args):
        raise LaunchError(f"{kernel}: expected {len(entry.codes)} arguments, got {len(args)}")
    return list(zip(entry.codes, args, strict=True))


def _argument(kernel: str, place: int, code: str, arg: Any) -> np.ndarray:
    """Return an array that holds what the kernel takes: an address, or a scalar."""
    if code.startswith("*"):
        if arg is None:
            return np.zeros(1, np.uintp)
        if not isinstance(arg, np.ndarray) or arg.dtype.char not in _alike(code[1]):
            raise LaunchError(f"{kernel}: expected an array of {code[1]!r} at {place}, got {_type(arg)}")
        if not arg.flags.c_contiguous:
            raise LaunchError(f"{kernel}: expected a C-contiguous array at {place}")
        return np.array([arg.ctypes.data], np.uintp)
    if not isinstance(arg, np.generic) or arg.dtype.char not in _alike(code):
        raise LaunchError(f"{kernel}: expected a scalar {code!r} at {place}, got {_type(arg)}")
    return np.array([arg])


def _alike(code: str) -> str:
    """Codes of NumPy for one type: int64 is long as well as long long."""
    return {"q": "ql", "Q": "QL"}.get(code, code)


def _type(arg: Any) -> str:
    return f"{type(arg).__name__} of {arg.dtype.char!r}" if hasattr(arg, "dtype") else type(arg).__name__


def variants(path: Path) -> tuple[str, ...]:
    """Return the kernels of a source, with the template arguments that are launched."""
    package = "dask_sdc." + ".".join(path.parts[path.parts.index("dask_sdc") + 1 : -1])
    found: tuple[str, ...] = importlib.import_module(f"{package}.{path.stem}").VARIANTS
    return found


@functools.cache
def program(path: Path) -> Program:
    """Return a source of the package, compiled."""
    return Program(path.name, source(path), variants(path))


def _host_text(text: str, kernels: tuple[str, ...]) -> str:
    """Put the emulation before a source and launchers of its kernels behind it."""
    launchers = []
    for number, kernel in enumerate(kernels):
        launchers.append(LAUNCHER.replace("NUMBER", str(number)).replace("KERNEL", kernel))
    return "\n".join([f'#include "{HEADER}"', text, *launchers])


def _built(name: str, text: str) -> Path:
    """Return a shared library, compiled unless it is there already."""
    if COMPILER is None:
        raise LaunchError("no C++ compiler on this machine")
    key = hashlib.sha256((text + HEADER.read_text("utf-8") + COMPILER + repr(FLAGS)).encode()).hexdigest()[
        :16
    ]
    target = _BUILT / f"{name}-{key}.so"
    if target.exists():
        return target
    _BUILT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_BUILT) as scratch:
        unit, library = Path(scratch) / f"{name}.cpp", Path(scratch) / target.name
        unit.write_text(text, "utf-8")
        done = subprocess.run(
            [COMPILER, *FLAGS, str(unit), "-o", str(library)], capture_output=True, text=True
        )
        if done.returncode:
            raise LaunchError(f"{name} does not compile for the host:\n{done.stderr}")
        library.replace(target)
    return target
