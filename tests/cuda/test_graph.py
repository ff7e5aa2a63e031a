"""Decode steps that are captured and replayed: bits of plain ones, and captured anew when they must be."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from dask_sdc.exceptions import DeviceLost
from dask_sdc.inference.model import KVCache, Transformer
from dask_sdc.inference.model.kernels import array_kernels
from dask_sdc.inference.model.kernels.cuda import CapturedKernels, CudaKernels
from dask_sdc.statistics.kernels.cuda.device import _Cupy
from tests.cuda.emulated import COMPILER, HostDevice
from tests.gpu.fakes import CUDARuntimeError
from tests.inference.model.reference import MODELS, random_tensors

emulated = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")

Array = np.ndarray[Any, Any]


class Counting(HostDevice):
    """Counts captures."""

    captures = 0

    def capture(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Capture, and count it."""
        self.captures += 1
        return super().capture(work)


def models(name: str, device: HostDevice) -> tuple[Transformer, Transformer]:
    """Return a model whose steps are captured, and one whose are plain."""
    found = []
    for captured in (True, False):
        config = MODELS[name]
        model = Transformer(config, range(config.n_layers), True, True, random_tensors(config))
        parts = model._rows._blocks, model._rows._geometry
        model._rows = (
            CapturedKernels(*parts, device) if captured else CudaKernels(*parts, HostDevice(), by_row=True)
        )
        model._bulk = model._rows
        found.append(model)
    return found[0], found[1]


def filled(model: Transformer, length: int, batch: int = 1) -> KVCache:
    """Return a cache of positions that nobody has computed."""
    cache, rng = KVCache(model.config, model.layers, batch), np.random.default_rng(length)
    while cache.length < length:  # as they come, so that windows drop what they do
        steps = min(40, length - cache.length)
        cache.reserve(steps)
        for layer in cache.cached:
            slot = cache.length - layer.base
            for array in (layer.k, layer.v):
                shape = array[:, :, slot : slot + steps].shape
                array[:, :, slot : slot + steps] = rng.normal(size=shape)
        cache.length += steps
    return cache


def ids(model: Transformer, batch: int, steps: int) -> Array:
    return np.random.default_rng(steps).integers(0, model.config.vocab_size, (batch, steps))


@emulated
@pytest.mark.parametrize(
    ("name", "length", "batch", "steps"),
    # over the first split, the growth of the cache and the next split, and a window that is moved down
    [("llama", 125, 1, 6), ("biases", 254, 2, 5), ("gpt2", 0, 3, 3), ("sinks", 383, 1, 9)],
)
def test_replays_have_the_bits_of_plain_steps(name: str, length: int, batch: int, steps: int) -> None:
    device = Counting()
    captured, plain = models(name, device)
    tokens = ids(plain, batch, steps)
    caches = [filled(model, length, batch) for model in (captured, plain)]
    for t in range(steps):
        mine, reference = (
            model.forward(tokens[:, t : t + 1], cache)
            for model, cache in zip((captured, plain), caches, strict=True)
        )
        assert mine.tobytes() == reference.tobytes()
    for one, two in zip(*(cache.cached for cache in caches), strict=True):
        used = length + steps - one.base
        assert one.k[:, :, :used].tobytes() == two.k[:, :, :used].tobytes()
        assert one.v[:, :, :used].tobytes() == two.v[:, :, :used].tobytes()
    assert 1 <= device.captures < steps


@emulated
def test_a_step_is_captured_when_it_must_be_and_only_then() -> None:
    device = Counting()
    model, _ = models("llama", device)
    cache = filled(model, 125)
    counts = []
    for t in range(8):
        model.forward(ids(model, 1, 8)[:, t : t + 1], cache)
        counts.append(device.captures)
    assert counts == [1, 1, 1, 2, 2, 2, 2, 2]  # 125 to 127 are in one split, 128 is in the second
    cache.truncate(126)
    model.forward(ids(model, 1, 1), cache)
    assert device.captures == 3
    layer = cache.cached[1]
    layer.v = layer.v.copy()  # moved
    model.forward(ids(model, 1, 1), cache)
    model.forward(ids(model, 1, 3), cache)  # a chunk of more is plain
    assert device.captures == 4


@emulated
def test_sessions_have_graphs_of_their_own_as_long_as_they_are_there() -> None:
    device = Counting()
    captured, plain = models("llama", device)
    tokens = ids(plain, 1, 4)
    caches = [[filled(model, length) for length in (3, 9)] for model in (captured, plain)]
    for t in range(4):
        for k in range(2):
            mine, reference = (
                model.forward(tokens[:, t : t + 1], held[k])
                for model, held in zip((captured, plain), caches, strict=True)
            )
            assert mine.tobytes() == reference.tobytes()
    kernels = captured._rows
    assert isinstance(kernels, CapturedKernels)
    assert device.captures == 2 and len(kernels._graphs) == 2
    caches.clear()
    gc.collect()
    assert len(kernels._graphs) == 0


@emulated
def test_outputs_of_layers_have_the_bits_that_they_have_inside_of_a_step() -> None:
    """The last of them is what the whole step returns."""
    captured, _ = models("llama", HostDevice())
    model = Transformer(MODELS["llama"], captured.layers, False, False, random_tensors(MODELS["llama"]))
    model._rows = model._bulk = captured._rows
    x = np.random.default_rng(1).normal(size=(1, 1, model.config.hidden_size)).astype(np.float32)
    caches = [filled(model, 7) for _ in range(2)]
    caches[0].tap([0, model.layers.stop - 1])
    tapped, whole = (model.forward(x, cache) for cache in caches)
    assert tapped.tobytes() == whole.tobytes()
    assert caches[0].tapped(model.layers.stop - 1).tobytes() == whole.tobytes()


# -- where there can be none ------------------------------------------------------------------------


class Refusing(HostDevice):
    """Cannot capture."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.asked = error, 0

    def capture(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Raise."""
        self.asked += 1
        raise self.error


@emulated
@pytest.mark.parametrize(
    "error",
    [
        AttributeError("'Stream' object has no attribute 'begin_capture'"),
        NotImplementedError("calling cuBLAS API during stream capture is currently unsupported"),
        CUDARuntimeError(900, "cudaErrorStreamCaptureUnsupported: operation not permitted"),
    ],
    ids=["old", "cuBLAS", "capture"],
)
def test_steps_that_cannot_be_captured_are_plain(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    device = Refusing(error)
    captured, plain = models("llama", device)
    tokens = ids(plain, 1, 3)
    caches = [filled(model, 5) for model in (captured, plain)]
    with caplog.at_level(logging.DEBUG, "dask_sdc.inference.model.kernels.cuda.graph"):
        for t in range(3):
            mine, reference = (
                model.forward(tokens[:, t : t + 1], cache)
                for model, cache in zip((captured, plain), caches, strict=True)
            )
            assert mine.tobytes() == reference.tobytes()
    assert device.asked == 1
    [record] = caplog.records
    assert str(error) in record.getMessage() and type(error).__name__ in record.getMessage()


@emulated
def test_a_lost_device_is_no_reason_to_go_on() -> None:
    for error in (CUDARuntimeError(700), DeviceLost("device lost")):
        model, _ = models("llama", Refusing(error))
        with pytest.raises(type(error)):
            model.forward(ids(model, 1, 1), filled(model, 5))


def test_models_on_the_host_are_never_captured() -> None:
    config = MODELS["llama"]
    model = Transformer(config, range(config.n_layers), True, True, random_tensors(config))
    kernels = array_kernels(model._rows._blocks, model._rows._geometry, np, by_row=True)
    assert not any(isinstance(one, CudaKernels) for one in (model._rows, model._wide, model._bulk, kernels))


# -- what is asked of CuPy ----------------------------------------------------------------------------


class FakeCupy:
    """Notes what is called of ``cupy.cuda``, and lets nobody wait or allocate elsewhere while it captures."""

    def __init__(self) -> None:
        self.cuda = self
        self.notes: list[str] = []

    def get_allocator(self) -> str:
        """Return the allocator that is in use."""
        return "the user's"

    def MemoryPool(self, allocator: str) -> FakePool:
        """Return a pool on top of an allocator."""
        self.notes.append(f"pool on {allocator}")
        return FakePool()

    @contextmanager
    def using_allocator(self, allocator: Callable[[int], None]) -> Iterator[None]:
        """Note an allocator while it is in use."""
        self.notes.append("allocate from the pool")
        try:
            yield
        finally:
            self.notes.append("allocate as before")

    def get_current_stream(self) -> FakeStream:
        """Return the stream of whoever captures."""
        return FakeStream(self, "current")

    def Stream(self, non_blocking: bool) -> FakeStream:
        """Return a new stream."""
        assert non_blocking  # a blocking one may not capture while others use the legacy stream
        return FakeStream(self, "side")


class FakePool:
    """A pool of nothing."""

    def malloc(self, size: int) -> None:
        """Allocate nothing."""


class FakeStream:
    """Notes its calls."""

    def __init__(self, cupy: FakeCupy, name: str) -> None:
        self.cupy, self.name = cupy, name

    def __enter__(self) -> FakeStream:
        self.cupy.notes.append(f"{self.name} enter")
        return self

    def __exit__(self, *error: object) -> None:
        self.cupy.notes.append(f"{self.name} leave")

    def synchronize(self) -> None:
        """Note it."""
        self.cupy.notes.append(f"{self.name} synchronize")

    def begin_capture(self) -> None:
        """Note it."""
        self.cupy.notes.append(f"{self.name} begin")

    def end_capture(self) -> FakeStream:
        """Return what can be launched."""
        self.cupy.notes.append(f"{self.name} end")
        return self

    def launch(self) -> None:
        """Note it."""
        self.cupy.notes.append("launch")


def test_a_capture_is_warmed_up_and_has_memory_of_its_own() -> None:
    cupy = FakeCupy()
    work = iter(["warm", "captured"])
    replay = _Cupy(cupy).capture(lambda: cupy.notes.append(kind := next(work)) or kind)
    assert cupy.notes == [
        *("pool on the user's", "current synchronize", "allocate from the pool", "side enter"),
        *(
            "warm",
            "side synchronize",
            "side begin",
            "captured",
            "side end",
            "side leave",
            "allocate as before",
        ),
    ]
    cupy.notes.clear()
    assert [replay(), replay()] == ["captured"] * 2 and cupy.notes == ["launch"] * 2
    assert isinstance(replay._pool, FakePool)  # or its memory would go to others


def test_a_capture_that_fails_is_ended() -> None:
    cupy = FakeCupy()

    def work() -> None:
        if "side begin" in cupy.notes:
            raise NotImplementedError("cuBLAS")

    with pytest.raises(NotImplementedError, match="cuBLAS"):
        _Cupy(cupy).capture(work)
    assert cupy.notes[-3:] == ["side end", "side leave", "allocate as before"]
