"""What CuPy raises, and arrays that claim to be CuPy's, for machines where CuPy is not installed.

Workers import this module and nothing of pytest with it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from dask_sdc.inference.stage import Stage, TransformerStage
from dask_sdc.statistics.base import State
from tests.cluster.sums import Sums


class CUDARuntimeError(RuntimeError):
    """As in ``cupy_backends.cuda.api.runtime``."""

    def __init__(self, status: int, text: str = "cudaErrorIllegalAddress: an illegal memory access") -> None:
        self.status = status
        super().__init__(text)


class CUDADriverError(CUDARuntimeError):
    """As in ``cupy_backends.cuda.api.driver``."""


class CUBLASError(CUDARuntimeError):
    """As in ``cupy_backends.cuda.libs.cublas``."""


class OutOfMemoryError(MemoryError):
    """As in ``cupy.cuda.memory``."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        text = f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes"
        super().__init__(f"{text}, limit set to: {limit:,} bytes)." if limit else f"{text}).")


for _error, _module in (
    (CUDARuntimeError, "cupy_backends.cuda.api.runtime"),
    (CUDADriverError, "cupy_backends.cuda.api.driver"),
    (CUBLASError, "cupy_backends.cuda.libs.cublas"),
    (OutOfMemoryError, "cupy.cuda.memory"),
):
    _error.__module__ = _module


class DeviceArray(np.ndarray):
    """An array that says that it is CuPy's, and goes with no NumPy array, as CuPy's do."""

    def get(self) -> np.ndarray[Any, Any]:
        """Return a copy on the host."""
        return np.array(self.view(np.ndarray))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        """Compute what NumPy does, refusing its arrays."""
        if any(type(x) is np.ndarray for x in (*inputs, *(out or ()))):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        if out is not None:
            options["out"] = tuple(_plain(x) for x in out)
        result = getattr(ufunc, method)(*map(_plain, inputs), **options)
        if out is not None:
            return out[0]
        return np.asarray(result).view(DeviceArray) if result is not None else None


def _plain(x: Any) -> Any:
    return x.view(np.ndarray) if isinstance(x, DeviceArray) else x


DeviceArray.__module__ = "cupy"


def on_device(array: Any) -> DeviceArray:
    """Return a copy of an array that says that it is on a device."""
    return np.array(array).view(DeviceArray)


class Namespace:
    """NumPy by the name of CuPy, as far as a stage needs it."""

    __name__ = "cupy"

    def array(self, array: Any, order: str = "C") -> DeviceArray:
        """Return a copy on the device."""
        return on_device(np.array(array, order="C"))


#: Whether the device of this process is lost: every call fails from then on.
lost = False


def use_device(flag: Path) -> None:
    """Fail for ever in the first process that comes here, as one whose device is lost does."""
    global lost
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
        lost = True
    except FileExistsError:
        pass
    if lost:
        raise CUDARuntimeError(214, "cudaErrorECCUncorrectable: uncorrectable ECC error encountered")


class LosesDevice(Sums):
    """Sums whose first block costs a device."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def update(self, state: State, x: Any) -> State:
        """Add a block, if the device is there."""
        use_device(self.flag)
        return super().update(state, x)


class Hungry(Sums):
    """Sums that run out of memory: once per process, or always."""

    fed = False

    def __init__(self, always: bool) -> None:
        self.always = always

    def update(self, state: State, x: Any) -> State:
        """Add a block, if there is memory."""
        if self.always or not Hungry.fed:
            Hungry.fed = True
            raise OutOfMemoryError(1 << 30, 70 << 30, 72 << 30)
        return super().update(state, x)


class LostStage(TransformerStage):
    """Layers whose device is lost at a position, in the first process that gets there."""

    flag: Path
    at: int

    def forward(self, chunk: Any, state: Any, *, rows: int | None = None) -> Any:
        """Take a chunk, if the device is there."""
        if self.position(state) >= self.at:
            use_device(self.flag)
        return super().forward(chunk, state, rows=rows)


class DoublingStage(Stage):
    """A stage on a device: what comes is doubled there."""

    xp = Namespace()  # type: ignore[assignment]

    def load(self) -> None:
        """Nothing to load."""

    def init(self, *, batch: int = 1, capacity: int | None = None) -> Any:
        """Return the positions that were seen."""
        return {"length": 0}

    def forward(self, chunk: Any, state: Any, *, rows: int | None = None) -> Any:
        """Return twice the chunk, refusing one that is on the host."""
        assert type(chunk) is DeviceArray
        state["length"] += chunk.shape[1]
        return on_device(2 * np.asarray(chunk))

    def position(self, state: Any) -> int:
        """Return the positions that were seen."""
        return int(state["length"])

    def snapshot(self, state: Any) -> Any:
        """Return the state."""
        return state

    @property
    def digest(self) -> str:
        """Of nothing."""
        return "0" * 64

    @property
    def nbytes(self) -> int:
        """Of nothing."""
        return 0
