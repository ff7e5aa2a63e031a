"""Stands for `pynvml`, on machines without a GPU: devices are what a JSON file says.

As a preload of Dask workers it takes the place of the library and gives every worker the GPU of its number.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

#: Environment variable with the path of the file.
VARIABLE = "FAKE_NVML"

NVML_AGGREGATE_ECC = 1
NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_ERROR_TIMEOUT = 10
nvmlEventTypeXidCriticalError = 8  # the library's own name

_heard: dict[str, int] = {}


class NVMLError(Exception):
    """As of the library."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


def dask_setup(worker: Any) -> None:
    """Let a worker have the GPU of its number."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(worker.name)
    sys.modules["pynvml"] = sys.modules[__name__]


def _devices() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(os.environ[VARIABLE]).read_text())
    return found


def write(path: Path, devices: list[dict[str, Any]]) -> None:
    """Say how the devices are from now on, at one stroke."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(devices))
    new.replace(path)


def nvmlInit() -> None:
    if VARIABLE not in os.environ:
        raise NVMLError(12)


def nvmlDeviceGetCount() -> int:
    return len(_devices())


def nvmlDeviceGetHandleByIndex(index: int) -> str:
    return str(_devices()[index]["uuid"])


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
    if uuid not in [device["uuid"] for device in _devices()]:
        raise NVMLError(15)
    return uuid


def _of(handle: str) -> dict[str, Any]:
    return next(device for device in _devices() if device["uuid"] == handle)


def nvmlDeviceGetUUID(handle: str) -> bytes:
    return handle.encode()


def nvmlDeviceGetName(handle: str) -> str:
    return "Fake H100"


def nvmlSystemGetDriverVersion() -> str:
    return "570.1"


def nvmlDeviceGetTotalEccErrors(handle: str, kind: int, counter: int) -> int:
    name = "uncorrected" if kind == NVML_MEMORY_ERROR_TYPE_UNCORRECTED else "corrected"
    if name not in _of(handle):
        raise NVMLError(3)
    return int(_of(handle)[name])


def nvmlDeviceGetRemappedRows(handle: str) -> tuple[int, int, int, int]:
    if "remapped" not in _of(handle):
        raise NVMLError(3)
    device = _of(handle)
    return 0, device["remapped"], int(device.get("pending", 0)), int(device.get("failed", 0))


def nvmlEventSetCreate() -> list[str]:
    return []


def nvmlDeviceRegisterEvents(handle: str, kinds: int, events: list[str]) -> None:
    assert kinds == nvmlEventTypeXidCriticalError
    events.append(handle)


def nvmlEventSetWait_v2(events: list[str], milliseconds: int) -> SimpleNamespace:
    deadline = time.monotonic() + milliseconds / 1000
    while time.monotonic() < deadline:
        for handle in events:
            xids = _of(handle).get("xids", [])
            if len(xids) > _heard.get(handle, 0):
                _heard[handle] = _heard.get(handle, 0) + 1
                return SimpleNamespace(device=handle, eventData=xids[_heard[handle] - 1])
        time.sleep(0.01)
    raise NVMLError(NVML_ERROR_TIMEOUT)


def nvmlEventSetFree(events: list[str]) -> None:
    events.clear()
