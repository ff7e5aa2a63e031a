"""Layers are cut by the pace and the free memory of devices, where stages are to be on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

import dask_sdc.inference.pace as pace_module
from dask_sdc.exceptions import DeviceError, DeviceMemoryError, InputError
from dask_sdc.inference.pace import decoding_pace
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.pipeline.devices import with_memories, with_paces
from dask_sdc.inference.pipeline.placement import Candidate, place
from dask_sdc.inference.pipeline.worker import StageWorkerPlugin
from dask_sdc.statistics.kernels.cuda import device as device_module
from dask_sdc.statistics.kernels.cuda import free_memory
from tests.cuda.emulated import COMPILER
from tests.gpu import fakes
from tests.gpu.backends import BACKENDS, backend_of
from tests.inference.pipeline.models import PROMPT, THREADS_OF_ZARR, generated, write_store

emulated = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")

#: A layer that an emulation has time for.
SMALL = replace(
    pace_module._REFERENCE, hidden_size=16, n_heads=2, n_kv_heads=1, head_dim=8, intermediate_size=16
)


# -- how fast a device is -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_pace_is_that_of_the_device(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend_of(backend, monkeypatch)
    if backend == "emulated":
        monkeypatch.setattr(pace_module, "_WIDE", SMALL)
    assert decoding_pace("cuda") > 0
    if backend == "emulated":
        device: Any = pace_module.cupy_device()
        assert any(kernel.startswith("row_product") for kernel in device.launched)


def test_a_device_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Any:
        raise fakes.OutOfMemoryError(1 << 30, 70 << 30)

    monkeypatch.setattr(pace_module, "cupy_device", full)
    with pytest.raises(DeviceMemoryError, match=r"asked for 1,073,741,824 bytes"):
        decoding_pace("cuda")


@pytest.mark.parametrize(
    ("free", "limit", "used", "expected"),
    [(1000, 0, 300, 1000), (1000, 900, 300, 600), (100, 900, 300, 100), (1000, 200, 300, 0)],
)
def test_free_memory_is_within_the_limit_of_the_pool(
    free: int, limit: int, used: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = SimpleNamespace(get_limit=lambda: limit, used_bytes=lambda: used)
    runtime = SimpleNamespace(memGetInfo=lambda: (free, 2000))
    xp = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime), get_default_memory_pool=lambda: pool)
    monkeypatch.setattr(device_module, "cupy_device", lambda: SimpleNamespace(xp=xp))
    assert free_memory() == expected


@pytest.mark.gpu
def test_free_memory_is_some_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    xp = backend_of("cupy", monkeypatch).xp
    assert 0 < free_memory() <= xp.cuda.runtime.memGetInfo()[1]


# -- who takes which layers -----------------------------------------------------------------------------


class Answers:
    """Routes to workers that answer what they are told to; None has left."""

    def __init__(self, **of: Any) -> None:
        self.of, self.asked = of, list[tuple[str, str]]()

    async def call(self, address: str, method: str, **arguments: Any) -> Any:
        """Return the pace or the memory of a worker's device."""
        assert arguments == ({"device": "cuda"} if method == "pace" else {})
        self.asked.append((address, method))
        answer = self.of[address]
        if answer is None:
            raise OSError("gone")
        if isinstance(answer, Exception):
            raise answer
        return answer[["pace", "room"].index(method)]


HOSTS = [Candidate("a", "A", 10**9, 1.0), Candidate("b", "B", 10**9, 0.2), Candidate("c", "C", 10**9, 1.0)]


def seen(routes: Any) -> list[Candidate]:
    async def ask() -> list[Candidate]:
        return await with_paces(routes, await with_memories(routes, HOSTS))

    return asyncio.run(ask())


def test_candidates_are_as_their_devices_are() -> None:
    found = seen(Answers(a=(1e11, 5000), b=(4e11, 70), c=(3.9e11, 0)))
    assert found == [
        Candidate("a", "A", 5000, 0.25),
        Candidate("b", "B", 70, 1.0),
        Candidate("c", "C", 1, 1.0),
    ]


def test_layers_are_cut_by_devices() -> None:
    """By the hosts, the second worker would have the fewest layers; a little memory is a little stage."""
    by_pace = seen(Answers(a=(1e11, 10**9), b=(4e11, 10**9), c=None))
    chosen, cuts = place(by_pace, 2, 0, [1.0] * 5, [100] * 5)
    assert ([one.address for one in chosen], cuts) == (["b", "a"], (4,))
    by_memory = seen(Answers(a=(1e11, 10**9), b=(4e11, 2 * 210), c=None))
    chosen, cuts = place(by_memory, 2, 0, [1.0] * 5, [100] * 5)
    assert ([one.address for one in chosen], cuts) == (["b", "a"], (2,))
    with pytest.raises(InputError, match="memory for 500 bytes of weights"):
        place(seen(Answers(a=(1e11, 300), b=(4e11, 420), c=None)), 2, 0, [1.0] * 5, [100] * 5)


def test_a_worker_that_left_is_no_candidate_and_one_without_a_device_an_error() -> None:
    assert [one.address for one in seen(Answers(a=(1.0, 1), b=None, c=(1.0, 1)))] == ["a", "c"]
    with pytest.raises(DeviceError, match="no device"):
        seen(Answers(a=(1.0, 1), b=DeviceError("no device"), c=(1.0, 1)))


# -- whole pipelines --------------------------------------------------------------------------------------


def in_cluster(body: Callable[[Client, list[str]], Any]) -> None:
    """Run a test where workers and their devices are in this process."""

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, timeout=250, clean_kwargs=THREADS_OF_ZARR)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        await body(c, [worker.address for worker in workers])

    run()


@emulated
def test_a_pipeline_on_devices_is_cut_by_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second worker has the better device and the slower processor."""
    backend_of("emulated", monkeypatch)
    store, asked = write_store(tmp_path / "weights"), list[str]()

    async def body(c: Client, workers: list[str]) -> None:
        async def pace(self: StageWorkerPlugin, device: str = "cpu") -> float:
            asked.append(device)
            better = (self.worker.address == workers[1]) == (device == "cuda")
            return 9e9 if better else 3e9

        async def room(self: StageWorkerPlugin) -> int:
            asked.append("room")
            return 10**6

        monkeypatch.setattr(StageWorkerPlugin, "pace", pace)
        monkeypatch.setattr(StageWorkerPlugin, "room", room)
        async with Pipeline(c, store, stages=2, spares=0) as pipeline:
            assert pipeline.workers == (workers[0], workers[1])
            on_hosts = pipeline.boundaries
        assert set(asked) == {"cpu"}
        async with Pipeline(c, store, stages=2, spares=0, device="cuda") as pipeline:
            assert pipeline.workers == (workers[1], workers[0])
            assert pipeline.boundaries == on_hosts and on_hosts[0] > 3
            assert {"cuda", "room"} <= set(asked)
            done = await pipeline.generate(PROMPT, 8)
        assert done.ids == generated(store, PROMPT, 8)

    in_cluster(body)


@emulated
def test_caches_have_their_part_of_what_is_free_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend_of("emulated", monkeypatch)
    store = write_store(tmp_path / "weights")

    async def body(c: Client, workers: list[str]) -> None:
        async def pace(self: StageWorkerPlugin, device: str = "cpu") -> float:
            assert device == "cpu", "what is cut already needs no pace, nor the memory to measure it"
            return 1.0

        async def room(self: StageWorkerPlugin) -> int:
            return 400_000

        monkeypatch.setattr(StageWorkerPlugin, "pace", pace)
        monkeypatch.setattr(StageWorkerPlugin, "room", room)
        async with Pipeline(c, store, stages=2, boundaries=[3], spares=0, device="cuda") as pipeline:
            sizes = [part.bytes_per_position for part in pipeline._parts]
            assert pipeline._running.budget == 100_000 // max(sizes)

    in_cluster(body)
