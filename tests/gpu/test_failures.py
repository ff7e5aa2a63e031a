"""Devices that are missing, full or lost, and columns that are not all in one place; needs no GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest

from dask_sdc.cluster.devices import device_model
from dask_sdc.exceptions import (
    DeviceError,
    DeviceLost,
    DeviceMemoryError,
    InputError,
    InputTypeError,
    ShardError,
)
from dask_sdc.graph.execute import ShardContext, ShardExecutor
from dask_sdc.graph.sources import make_source
from dask_sdc.inference.host import Chunk, SessionSettings, StageHost
from dask_sdc.inference.model import KVCache, Transformer
from dask_sdc.inference.stage import TransformerStage
from dask_sdc.statistics import Covariance, LinearRegression, Moments, ShardInfo
from dask_sdc.statistics.base import Statistic
from dask_sdc.statistics.kernels.cuda import (
    cupy_device,
    device_failure,
    named_failures,
    out_of_memory,
    workspace,
)
from dask_sdc.statistics.kernels.cuda.shapes import pieces
from tests.cuda.emulated import HostDevice
from tests.gpu import fakes
from tests.inference.model.reference import MODELS, random_tensors

ROOT = Path(__file__).parent.parent.parent
X = np.arange(12.0).reshape(4, 3)


# -- what exceptions mean ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        *(fakes.CUDARuntimeError(code) for code in (214, 220, 700, 702, 710, 716, 719, 999)),
        fakes.CUDADriverError(719, "CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"),
    ],
    ids=lambda error: f"{type(error).__name__}-{error.status}",
)
def test_errors_that_stick_are_a_lost_device(error: Exception) -> None:
    found = device_failure(error)
    assert type(found) is DeviceLost and str(error) in str(found) and str(error.status) in str(found)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            fakes.CUDARuntimeError(35, "cudaErrorInsufficientDriver: too old"),
            "got CUDARuntimeError: cudaErrorI",
        ),
        (fakes.CUDARuntimeError(100, "cudaErrorNoDevice: none"), "cudaErrorNoDevice"),
        (fakes.CUDADriverError(209, "CUDA_ERROR_NO_BINARY_FOR_GPU: no"), "CUDA_ERROR_NO_BINARY"),
        (RuntimeError("CuPy failed to load libnvrtc.so.12: OSError: no such file"), "libnvrtc.so.12"),
        (ImportError("libcublas.so.12: cannot open shared object file"), "libcublas.so.12"),
    ],
    ids=["old driver", "no device", "no code", "no NVRTC", "no cuBLAS"],
)
def test_cupy_and_a_driver_that_do_not_go_together_are_named(error: Exception, text: str) -> None:
    found = device_failure(error)
    assert type(found) is DeviceError and text in str(found) and "expected a CUDA device" in str(found)


@pytest.mark.parametrize(
    ("error", "sizes"),
    [
        (fakes.OutOfMemoryError(1 << 30, 5, 7000), (1 << 30, 5, 7000)),
        (fakes.OutOfMemoryError(1 << 30, 5), (1 << 30, 5, None)),
        (fakes.CUDARuntimeError(2, "cudaErrorMemoryAllocation: out of memory"), (None,) * 3),
        (fakes.CUBLASError(3, "CUBLAS_STATUS_ALLOC_FAILED"), (None,) * 3),
        (MemoryError("std::bad_alloc: out_of_memory: CUDA error (failed to allocate 8 bytes)"), (None,) * 3),
    ],
    ids=["limit", "no limit", "runtime", "cuBLAS", "RMM"],
)
def test_no_memory_on_a_device_says_what_was_asked_for(
    error: Exception, sizes: tuple[int | None, ...]
) -> None:
    found = device_failure(error)
    assert isinstance(found, DeviceMemoryError) and isinstance(found, MemoryError)
    assert (found.asked, found.used, found.limit) == sizes
    shown = [f"{size:,} bytes" for size in sizes if size is not None] or [str(error)]
    assert all(text in str(found) for text in shown)
    assert out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 8 GiB for an array"),
        RuntimeError("cudaErrorIllegalAddress"),
        ImportError("No module named 'pandas'"),
        fakes.CUDARuntimeError(1, "cudaErrorInvalidValue: invalid argument"),
        fakes.CUBLASError(7, "CUBLAS_STATUS_INVALID_VALUE"),
        ValueError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_are_what_they_are(error: Exception) -> None:
    assert device_failure(error) is None and not out_of_memory(error)
    with pytest.raises(type(error)) as caught, named_failures():
        raise error
    assert caught.value is error


def test_causes_are_looked_at_and_cycles_end() -> None:
    outer = ShardError("shard 3 cannot be loaded")
    outer.__cause__ = inner = fakes.CUDARuntimeError(700)
    inner.__cause__ = outer
    assert type(device_failure(outer)) is DeviceLost
    inner.status = 1
    assert device_failure(outer) is None


def test_a_named_failure_keeps_its_cause_and_is_named_once() -> None:
    error = fakes.CUDARuntimeError(719)
    with pytest.raises(DeviceLost) as caught, named_failures(), named_failures():
        raise error
    assert caught.value.__cause__ is error


def test_the_real_exceptions_of_cupy_are_known() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    assert type(device_failure(cupy.cuda.runtime.CUDARuntimeError(700))) is DeviceLost
    assert type(device_failure(cupy.cuda.runtime.CUDARuntimeError(100))) is DeviceError
    found = device_failure(cupy.cuda.memory.OutOfMemoryError(1000, 5, 7))
    assert isinstance(found, DeviceMemoryError) and (found.asked, found.used, found.limit) == (1000, 5, 7)


# -- no device -----------------------------------------------------------------------------------


def fake_cupy(devices: int | Exception, driver: int = 11080) -> ModuleType:
    """Return a module that is CuPy for CUDA 12.9 as far as looking for devices goes."""

    def count() -> int:
        if isinstance(devices, Exception):
            raise devices
        return devices

    runtime = SimpleNamespace(
        CUDARuntimeError=fakes.CUDARuntimeError,
        getDeviceCount=count,
        runtimeGetVersion=lambda: 12090,
        driverGetVersion=lambda: driver,
    )
    module = ModuleType("cupy")
    vars(module).update(__version__="14.2.0", cuda=SimpleNamespace(runtime=runtime))
    return module


@contextmanager
def as_cupy(monkeypatch: pytest.MonkeyPatch, module: ModuleType | None) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "cupy", module)
    cupy_device.cache_clear()
    yield
    cupy_device.cache_clear()


@pytest.mark.parametrize(
    ("module", "texts"),
    [
        (None, ["cupy-cuda12x or cupy-cuda13x", "ModuleNotFoundError"]),
        (fake_cupy(0), ["got no device", "a driver for CUDA 11.8", "CUDA_VISIBLE_DEVICES='7'"]),
        (
            fake_cupy(fakes.CUDARuntimeError(35, "cudaErrorInsufficientDriver: insufficient")),
            ["a driver for CUDA 12 or later", "CuPy 14.2.0", "insufficient", "a driver for CUDA 11.8"],
        ),
        (fake_cupy(fakes.CUDARuntimeError(35, "cudaErrorInsufficientDriver"), 0), ["with no driver"]),
    ],
    ids=["no CuPy", "no device", "old driver", "no driver"],
)
def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, module: Any, texts: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with as_cupy(monkeypatch, module), pytest.raises(DeviceError) as caught:
        cupy_device()
    assert all(text in str(caught.value) for text in texts), str(caught.value)


def test_a_device_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_cupy(1)
    with as_cupy(monkeypatch, module):
        assert cupy_device().xp is module and cupy_device() is cupy_device()


def test_a_stage_for_a_device_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = TransformerStage.__new__(TransformerStage)
    stage.device = "cuda"
    with as_cupy(monkeypatch, fake_cupy(0)), pytest.raises(DeviceError, match="got no device"):
        stage.load()


# -- no memory -----------------------------------------------------------------------------------


class Pool:
    """A memory pool that notes when it is emptied."""

    def __init__(self) -> None:
        self.emptied = 0

    def free_all_blocks(self) -> None:
        """Give back what nobody uses."""
        self.emptied += 1


@pytest.mark.parametrize("always", [False, True])
def test_a_full_device_is_emptied_once_and_then_said(monkeypatch: pytest.MonkeyPatch, always: bool) -> None:
    pool, module = Pool(), ModuleType("cupy")
    module.get_default_memory_pool = lambda: pool  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(fakes.Hungry, "fed", False)
    executor, statistic = ShardExecutor("d", "w", ""), fakes.Hungry(always)
    with make_source([X]).batch([0]).reader() as reader:
        record = executor.record(
            statistic, ShardInfo((3,), X.dtype), reader, ShardContext(0, "primary", 0, 0)
        )
    assert pool.emptied == 1
    if not always:
        assert record.status == "ok" and record.rows == 4
        return
    kind, note = record.notes
    assert (record.status, kind) == ("error", "DeviceMemoryError")
    assert f"asked for {1 << 30:,} bytes, in use {70 << 30:,} bytes, limit of the pool {72 << 30:,}" in note


def test_the_workspace_is_configured_once_and_cuts_blocks() -> None:
    x = np.zeros((300_000, 4), np.int64)
    try:
        sizes = {}
        for text in ("1MiB", "4MiB"):
            with dask.config.set({"sdc.device.workspace": text}):
                workspace.cache_clear()
                sizes[text] = [len(piece) for piece, _ in pieces(HostDevice(), x, None)]
        with dask.config.set({"sdc.device.workspace": "1GiB"}):
            assert workspace() == 4 << 20  # as it was when it was first needed
            workspace.cache_clear()
        with (
            dask.config.set({"sdc.device.workspace": "1kB"}),
            pytest.raises(InputError, match="1 MiB, got 1000"),
        ):
            workspace()
    finally:
        workspace.cache_clear()
    assert sizes["1MiB"][0] == 1 << 15 and sizes["4MiB"][0] == 1 << 17
    assert all(sum(cut) == len(x) for cut in sizes.values())


# -- in one place --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statistic", "columns", "where"),
    [
        (Moments(), {"weights": fakes.on_device(np.ones(4))}, "x on the host, weights on the device"),
        (Covariance(), {"weights": fakes.on_device(np.ones(4))}, "x on the host, weights on the device"),
        (LinearRegression(), {"target": fakes.on_device(np.ones(4))}, "x on the host, target on the device"),
    ],
    ids=["moments", "covariance", "regression"],
)
def test_a_statistic_refuses_columns_in_two_places(
    statistic: Statistic, columns: dict[str, Any], where: str
) -> None:
    target = () if "target" in columns else None
    state = statistic.init(ShardInfo((3,), X.dtype, target_shape=target))
    with pytest.raises(InputTypeError, match=where):
        statistic.update(state, X, **columns)


def device_array(array: Any) -> da.Array:
    return da.from_array(array, chunks=2).map_blocks(fakes.on_device, meta=fakes.on_device(array[:0]))


@pytest.mark.parametrize(
    ("x", "columns", "where"),
    [
        (X, {"weights": device_array(np.ones(4))}, "x on the host, weights on the device"),
        (device_array(X), {"weights": np.ones(4)}, "x on the device, weights on the host"),
        (device_array(X), {"target": np.ones(4)}, "x on the device, target on the host"),
    ],
)
def test_a_source_of_columns_in_two_places_is_refused_at_once(x: Any, columns: Any, where: str) -> None:
    with pytest.raises(InputTypeError, match=where):
        make_source(x, **columns)


def test_a_shard_with_columns_in_two_places_names_them() -> None:
    """Which of the blocks are on a device shows on the worker only: the array says NumPy of all."""

    def some(block: Any, block_info: Any = None) -> Any:
        number = block_info[0]["chunk-location"][0] if block_info else 0
        return fakes.on_device(block) if number == 1 else block

    x = da.from_array(X, chunks=(1, 3)).map_blocks(some, meta=X[:0])
    source = make_source(x, weights=np.ones(4))
    with source.batch(range(source.n_shards)).reader() as reader:
        assert len(reader.load(0).x) == 1
        with pytest.raises(InputTypeError, match=r"shard 1: .*x on the device, weights on the host"):
            reader.load(1)
        record = ShardExecutor("d", "w", "").record(
            Moments(), ShardInfo((3,), X.dtype), reader, ShardContext(0, "primary", 0, 1)
        )
    assert record.notes[0] == "InputTypeError" and "weights on the host" in record.notes[1]


def test_a_model_refuses_tokens_and_keys_that_are_elsewhere() -> None:
    config = MODELS["llama"]
    model = Transformer(config, range(config.n_layers), True, True, random_tensors(config))
    cache, ids = KVCache(config, model.layers), np.ones((1, 3), np.int64)
    with pytest.raises(InputTypeError, match="on the host, as the model is, got the chunk on the device"):
        model.forward(fakes.on_device(ids), cache)
    for layer in cache.cached:
        layer.k = fakes.on_device(layer.k)
    with pytest.raises(InputTypeError, match="the chunk on the host, the KV cache on the device"):
        model.forward(ids, cache)
    assert cache.length == 0


# -- stages --------------------------------------------------------------------------------------


def test_chunks_cross_to_the_device_of_a_stage_and_back() -> None:
    host = StageHost(fakes.DoublingStage(), 0, False)
    host.open("s", SessionSettings(sampled=False))
    chunk = np.arange(6.0, dtype=np.float32).reshape(1, 2, 3)
    output = host.step(Chunk("s", 0, 0, chunk))
    assert type(output.array) is np.ndarray
    np.testing.assert_array_equal(output.array, 2 * chunk)


def test_a_stage_that_loses_its_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(fakes.DoublingStage):
        def forward(self, chunk: Any, state: Any, *, rows: int | None = None) -> Any:
            raise fakes.CUDARuntimeError(700)

    host = StageHost(Lost(), 0, False)
    host.open("s", SessionSettings(sampled=False))
    with pytest.raises(DeviceLost, match="cudaErrorIllegalAddress"):
        host.step(Chunk("s", 0, 0, np.ones((1, 2, 3), np.float32)))


# -- fingerprints --------------------------------------------------------------------------------


def test_a_fingerprint_tells_devices_and_workspaces_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def handle_of(uuid: str) -> str:
        if uuid != "GPU-1":
            raise NVMLError("Not Found")
        return uuid

    card = {"name": "NVIDIA H200"}
    nvml = ModuleType("pynvml")
    vars(nvml).update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetHandleByUUID=handle_of,
        nvmlDeviceGetUUID=lambda handle: "GPU-1",
        nvmlDeviceGetName=lambda handle: card["name"],
        nvmlSystemGetDriverVersion=lambda: b"570.1",
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    one = device_model()
    card["name"] = "NVIDIA A100"
    other = device_model()
    assert one.startswith("NVIDIA H200, driver 570.1, ") and f"workspace {workspace()}" in one
    assert other != one
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8a")
    assert device_model().startswith("GPU-8a, driver 570.1, ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_model() == ""


def test_a_lost_device_is_told_without_importing_cupy() -> None:
    script = """
import sys
sys.modules["cupy"] = None  # whoever imports it now fails
from dask_sdc.statistics.kernels.cuda import device_failure
from tests.gpu.fakes import CUDARuntimeError
print(type(device_failure(CUDARuntimeError(700))).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "DeviceLost"
