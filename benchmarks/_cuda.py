"""CUDA compilers of this machine: nvcc of a toolkit, and NVRTC of a package from the registry."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dask_sdc.statistics.kernels.cuda.device import OPTIONS

#: That a compiler is the last one to know an architecture says nothing of the kernels.
_OLD_DEVICE = re.compile(r"^nvrtc: warning: Architectures prior to .* deprecated .*$", re.MULTILINE)


class CompileError(Exception):
    """A kernel that does not compile without a warning."""


class Nvcc:
    """The compiler driver of a toolkit.

    Parameters
    ----------
    path : str
        Of the executable.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        release = re.search(r"release ([\d.]+)", self._run("--version"))
        self.name = f"nvcc-{release[1] if release else 'unknown'}"
        self.architectures = {int(a) for a in re.findall(r"compute_(\d+)\b", self._run("--list-gpu-arch"))}

    def _run(self, *arguments: str) -> str:
        return subprocess.run([self.path, *arguments], capture_output=True, text=True, check=True).stdout

    def compile(self, name: str, text: str, kernels: tuple[str, ...], architecture: int) -> int:
        """Compile to machine code, warnings as errors; return its size in bytes."""
        pointers = ", ".join(f"reinterpret_cast<void*>(&{kernel})" for kernel in kernels)
        with tempfile.TemporaryDirectory() as folder:
            unit, built = Path(folder) / name, Path(folder) / "kernels.cubin"
            unit.write_text(f"{text}\nvoid* sdc_kernels[] = {{{pointers}}};\n", "utf-8")
            command = [self.path, *OPTIONS, "-cubin", f"-arch=sm_{architecture}"]
            command += ["-Werror", "all-warnings", "-o", str(built), str(unit)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode or done.stderr.strip():
                raise CompileError(f"{self.name}, sm_{architecture}, {name}:\n{done.stderr}")
            return built.stat().st_size


class Nvrtc:
    """The run-time compiler, which is what CuPy uses.

    Parameters
    ----------
    path : Path
        Of the shared library.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.name = f"nvrtc-{major.value}.{minor.value}"
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        supported = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", supported)
        self.architectures = set(supported)

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            raise CompileError(f"{function} returned {code}")

    def compile(self, name: str, text: str, kernels: tuple[str, ...], architecture: int) -> int:
        """Compile to machine code, warnings as errors; return its size in bytes."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
        try:
            for kernel in kernels:
                self._call("nvrtcAddNameExpression", program, kernel.encode())
            options = [*OPTIONS, f"--gpu-architecture=sm_{architecture}"]
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            code = self._library.nvrtcCompileProgram(program, len(options), given)
            log = self._log(program)
            if code or log:
                raise CompileError(f"{self.name}, sm_{architecture}, {name}:\n{log}")
            size = ctypes.c_size_t()
            self._call("nvrtcGetCUBINSize", program, ctypes.byref(size))
            return size.value
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _log(self, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(max(size.value, 1))
        self._call("nvrtcGetProgramLog", program, log)
        return _OLD_DEVICE.sub("", log.value.decode()).strip()


Compiler = Nvcc | Nvrtc


def compilers() -> list[Compiler]:
    """Return the compilers that are found, those first that are fast."""
    found: list[Compiler] = [Nvrtc(path) for path in _libraries()]
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = os.pathsep.join(filter(None, [toolkit and str(Path(toolkit) / "bin"), os.environ.get("PATH")]))
    nvcc = shutil.which("nvcc", path=places)
    return found if nvcc is None else [*found, Nvcc(nvcc)]


def _libraries() -> Iterator[Path]:
    """Yield NVRTC libraries of packages on the path of modules, whatever version of CUDA they are of."""
    seen = set()
    for folder in sys.path:
        for path in sorted(Path(folder or ".", "nvidia").glob("*/lib/libnvrtc.so.*")):
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path
