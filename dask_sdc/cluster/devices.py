"""What NVML tells a worker of its GPUs: which there are, and how they are.

Without the library, a driver or a device there is nothing to tell. A device that does not count something
says so by an error of NVML, which leaves a gap in its record and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from dask_sdc.policy.health import DeviceHealth
from dask_sdc.statistics.kernels.cuda import cupy_version, workspace

#: Milliseconds for which a thread waits for an event before it looks whether it is to end.
_WAIT = 1000


def _nvml() -> ModuleType | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library or no driver: there is no GPU
        return None
    found: ModuleType = pynvml
    return found


def visible_gpus() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this process may use, in CUDA order."""
    nvml = _nvml()
    if nvml is None:
        return ()
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(uuids)
    chosen = [entry.strip() for entry in visible.split(",") if entry.strip()]
    return tuple(
        uuids[int(entry)] if entry.isdigit() and int(entry) < len(uuids) else entry for entry in chosen
    )


def device_model() -> str:
    """Return what results of this process's GPU depend on beside the data; empty without a GPU."""
    nvml, uuids = _nvml(), visible_gpus()
    if nvml is None or not uuids:
        return ""
    try:
        name = _text(nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByUUID(uuids[0])))
    except nvml.NVMLError:  # such as for an abbreviated UUID: then it is like no other
        name = uuids[0]
    driver = _text(nvml.nvmlSystemGetDriverVersion())
    return f"{name}, driver {driver}, {cupy_version() or 'no CuPy'}, workspace {workspace()}"


class DeviceWatch:
    """Reads the health of some GPUs, and listens for critical errors of theirs.

    Parameters
    ----------
    uuids : sequence of str
        The GPUs.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self._xids: dict[str, list[int]] = {uuid: [] for uuid in uuids}
        self._over = threading.Event()
        self._known: dict[str, DeviceHealth] = {}

    def read(self) -> tuple[list[DeviceHealth], list[str]]:
        """Return how the GPUs are, and what has become worse since the last time.

        A GPU of which NVML knows nothing any more is left out.
        """
        nvml = _nvml()
        devices, worse = [], []
        for uuid, xids in self._xids.items() if nvml is not None else ():
            with contextlib.suppress(nvml.NVMLError):  # type: ignore[union-attr]
                device = _health(nvml, uuid, tuple(xids))
                worse += [f"{uuid}: {what}" for what in device.worse_than(self._known.get(uuid, device))]
                self._known[uuid] = device
                devices.append(device)
        return devices, worse

    def listen(self) -> None:
        """Note critical errors from now on, in a thread."""
        nvml = _nvml()
        if nvml is None:
            return
        events = nvml.nvmlEventSetCreate()
        for uuid in self._xids:
            with contextlib.suppress(nvml.NVMLError):  # it reports none
                nvml.nvmlDeviceRegisterEvents(_device(nvml, uuid), nvml.nvmlEventTypeXidCriticalError, events)
        threading.Thread(target=self._hear, args=(nvml, events), name="sdc-xids", daemon=True).start()

    def _hear(self, nvml: Any, events: Any) -> None:
        while not self._over.is_set():
            try:
                event = nvml.nvmlEventSetWait_v2(events, _WAIT)
                uuid = _text(nvml.nvmlDeviceGetUUID(event.device))
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    self._over.wait(_WAIT / 1000)  # a device that is lost reports nothing, at once
                continue
            # MIG instances share the errors of their GPU.
            for own in [uuid] if uuid in self._xids else self._xids:
                self._xids[own].append(int(event.eventData))
        nvml.nvmlEventSetFree(events)

    def close(self) -> None:
        """Stop listening."""
        self._over.set()


def _device(nvml: Any, uuid: str) -> Any:
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if uuid.startswith("MIG") else handle


def _health(nvml: Any, uuid: str, xids: tuple[int, ...]) -> DeviceHealth:
    handle = _device(nvml, uuid)

    def errors(kind: int) -> int | None:
        counted = _told(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, kind, nvml.NVML_AGGREGATE_ECC)
        return None if counted is None else int(counted)

    _, remapped, pending, failed = _told(nvml, nvml.nvmlDeviceGetRemappedRows, handle) or (None, None, 0, 0)
    return DeviceHealth(
        uuid,
        _text(nvml.nvmlDeviceGetName(handle)),
        errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        remapped,
        bool(pending),
        bool(failed),
        xids,
    )


def _told(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
