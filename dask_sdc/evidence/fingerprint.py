"""Environment fingerprint: what has to be the same for two workers to agree bit for bit."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl

from dask_sdc.evidence.codec import digest, encode

_PACKAGES = ("dask-sdc", "numpy", "numba", "llvmlite", "scipy")
_SETTINGS = (  # they change which instructions run
    "MKL_CBWR",
    "NPY_DISABLE_CPU_FEATURES",
    "NUMBA_CPU_FEATURES",
    "NUMBA_CPU_NAME",
    "NUMBA_DISABLE_JIT",
    "NUMBA_ENABLE_AVX",
)
# Flags of floating-point units; the others tell kernels and hypervisors apart, not results.
_ISA_FLAG = re.compile(r"(?:sse|ssse|avx|fma|f16c|amx|asimd|sve|neon|vsx)\w*")


@dataclass(frozen=True)
class BlasBuild:
    """One BLAS library and how it is set up.

    Parameters
    ----------
    library : str
        Such as "openblas" or "mkl".
    version : str
        Its version; empty where it does not tell.
    architecture : str
        The kernels that it chose, such as "Zen"; empty where it does not tell.
    threads : int
        Number of threads that it uses.
    """

    library: str
    version: str
    architecture: str
    threads: int


@dataclass(frozen=True)
class EnvironmentFingerprint:
    """What the bits of a floating-point result depend on.

    Parameters
    ----------
    machine, cpu_model : str
        Instruction set and CPU model.
    isa : tuple of str
        Floating-point flags of the CPU, sorted.
    libc, python : str
        Versions; the C library brings exp and log.
    packages : tuple of (str, str)
        Names and versions of the packages that compute.
    settings : tuple of (str, str)
        Environment variables that change which instructions run, where set.
    blas : tuple of BlasBuild
        The BLAS that NumPy uses.
    device_model : str
        GPU model, driver and runtime as the caller tells them; empty on the CPU.
    """

    machine: str
    cpu_model: str
    isa: tuple[str, ...]
    libc: str
    python: str
    packages: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, str], ...]
    blas: tuple[BlasBuild, ...]
    device_model: str = ""

    def digest(self) -> str:
        """Return 16 hex digits that are equal for equal fingerprints."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return digest(encode(self.to_dict()))[:8].hex()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible fields."""
        fields = asdict(self)
        fields["isa"] = list(self.isa)
        fields["packages"], fields["settings"] = dict(self.packages), dict(self.settings)
        fields["blas"] = [asdict(build) for build in self.blas]
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> EnvironmentFingerprint:
        """Rebuild a fingerprint from `to_dict`."""
        return cls(
            **{
                **fields,
                "isa": tuple(fields["isa"]),
                "packages": tuple(sorted(fields["packages"].items())),
                "settings": tuple(sorted(fields["settings"].items())),
                "blas": tuple(BlasBuild(**build) for build in fields["blas"]),
            }
        )


@lru_cache(maxsize=16)
def environment_fingerprint(device_model: str = "") -> EnvironmentFingerprint:
    """Return the fingerprint of this process.

    It is taken once: call ``environment_fingerprint.cache_clear()`` after changing the number of BLAS
    threads.

    Parameters
    ----------
    device_model : str, optional
        What the caller knows of the device that computes, when it is not the CPU.
    """
    cpu_model, isa = _cpu()
    return EnvironmentFingerprint(
        machine=platform.machine(),
        cpu_model=cpu_model,
        isa=isa,
        libc=" ".join(platform.libc_ver()).strip(),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        packages=tuple(sorted((name, _version(name)) for name in _PACKAGES)),
        settings=tuple((name, os.environ[name]) for name in _SETTINGS if name in os.environ),
        blas=_blas(),
        device_model=device_model,
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cpu() -> tuple[str, tuple[str, ...]]:
    """CPU model and floating-point flags; outside Linux the system's own short name has to do."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor(), ()
    # x86 says "model name" and "flags", arm64 "CPU part" and "Features"
    fields = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    model = fields.get("model name") or f"{fields.get('CPU implementer', '')} {fields.get('CPU part', '')}"
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return model.strip(), tuple(sorted(flag for flag in flags if _ISA_FLAG.fullmatch(flag)))


def _blas() -> tuple[BlasBuild, ...]:
    """The BLAS of NumPy alone: another one that is loaded by and by must not change the fingerprint."""
    libraries = [library for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"]
    own = str(Path(np.__file__).parent.parent / "numpy.libs")  # where wheels keep it
    libraries = [library for library in libraries if library["filepath"].startswith(own)] or libraries
    return tuple(
        BlasBuild(
            library["internal_api"],
            library.get("version") or "",
            library.get("architecture") or "",
            int(library["num_threads"]),
        )
        for library in sorted(libraries, key=lambda library: str(library["filepath"]))
    )
