"""Pipelines of users' own stages: a climate emulator on real data, and a filter bank, that lose stages."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import xarray as xr
from distributed import Client
from scipy.signal import butter, sosfilt
from threadpoolctl import threadpool_limits

from dask_sdc.exceptions import (
    CheckpointError,
    ClosedError,
    ContextOverflow,
    GenerationInterrupted,
    InputError,
    InputTypeError,
    NoSpareError,
    ReplayMismatch,
    SDCError,
    StageError,
)
from dask_sdc.faults.stages import StageFault, arm_stage_fault
from dask_sdc.inference import Checkpoint
from dask_sdc.inference.emulator import LinearEmulator, fit_linear_emulator, rollout
from dask_sdc.inference.journal import boundary_digest
from dask_sdc.inference.pipeline import ArrayPipeline
from dask_sdc.inference.session import LossKind
from dask_sdc.inference.stage import Stage
from tests.inference.pipeline.models import left_over
from tests.inference.pipeline.test_losses import signalled

Array = np.ndarray[Any, Any]

STEPS = 12


class FilterBank(Stage):
    """A filter with infinite impulse response. It cannot take back what it has seen."""

    def __init__(self, sections: Array, growth: int = 0) -> None:
        self.sections, self.growth = sections, growth

    def load(self) -> None:
        pass

    def init(self, *, batch: int = 1, capacity: int | None = None) -> dict[str, Any]:
        return {"position": 0, "memory": np.zeros((len(self.sections), batch, 2))}

    def forward(self, chunk: Array, state: dict[str, Any], *, rows: int | None = None) -> Array:
        if not np.isfinite(chunk).all():
            raise ValueError("expected finite samples")
        out = []
        for t in range(chunk.shape[1]):
            y, state["memory"] = sosfilt(self.sections, chunk[:, t : t + 1], axis=1, zi=state["memory"])
            out.append(y)
        state["position"] += chunk.shape[1]
        return np.concatenate(out, axis=1)

    def position(self, state: dict[str, Any]) -> int:
        return int(state["position"])

    def snapshot(self, state: dict[str, Any]) -> dict[str, Any]:
        return dict(state)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.sections.tobytes()).hexdigest()

    @property
    def nbytes(self) -> int:
        return int(self.sections.nbytes)

    @property
    def bytes_per_position(self) -> int:
        return self.growth


class Unnamed(FilterBank):
    """A stage whose digest is no text."""

    digest = 5  # type: ignore[assignment]


class Missing(FilterBank):
    """A stage whose weights are not where they should be."""

    def load(self) -> None:
        raise FileNotFoundError(2, "No such file", "weights.bin")


class Spoilt(FilterBank):
    """A stage that the first process cannot load which has loaded another one, as a spare does."""

    loaded: ClassVar[set[int]] = set()

    def __init__(self, number: int, file: Path) -> None:
        super().__init__(SECTIONS[number])
        self.number, self.file = number, file

    def load(self) -> None:
        self.loaded.add(self.number)
        if len(self.loaded) > 1 and not self.file.exists():
            self.file.write_text(str(os.getpid()))
        if self.file.exists() and self.file.read_text() == str(os.getpid()):
            raise OSError(28, "No space left on device")


class Deadly(FilterBank):
    """A stage whose worker ends at the second chunk, as one would that runs out of memory."""

    def forward(self, chunk: Array, state: dict[str, Any], *, rows: int | None = None) -> Array:
        if state["position"]:
            os._exit(1)
        return super().forward(chunk, state)


class Quitter(FilterBank):
    """A stage that calls for an exit, where it is told to."""

    def __init__(self, sections: Array, where: str) -> None:
        super().__init__(sections)
        self.where = where

    def load(self) -> None:
        self._quit("load")

    def init(self, *, batch: int = 1, capacity: int | None = None) -> dict[str, Any]:
        self._quit("init")
        return super().init(batch=batch)

    def forward(self, chunk: Array, state: dict[str, Any], *, rows: int | None = None) -> Array:
        self._quit("forward")
        return super().forward(chunk, state)

    def _quit(self, where: str) -> None:
        if where == self.where:
            sys.exit(f"no licence to {where}")


SECTIONS = [butter(2, [low, low + 0.1], "band", output="sos") for low in (0.1, 0.3, 0.5)]
SIGNAL = np.random.default_rng(7).normal(size=(2, 90))
CHUNKS = [SIGNAL[:, begin : begin + 5] for begin in range(0, 90, 5)]


def bank(growth: int = 0) -> list[Stage]:
    return [FilterBank(sections, growth) for sections in SECTIONS]


def filtered(x: Array) -> Array:
    for sections in SECTIONS:
        x = sosfilt(sections, x, axis=1)
    return x


@pytest.fixture(scope="module")
def climate() -> tuple[LinearEmulator, Array]:
    """An emulator of air temperature over North America, and two winters to begin with."""
    samples = pytest.importorskip("iris_sample_data")
    with xr.open_dataset(Path(samples.path) / "A1B_north_america.nc", engine="h5netcdf") as data:
        field = data["air_temperature"].values.astype(np.float64)
    return fit_linear_emulator(field, 6, order=2), np.stack([field[:10], field[20:30]])


def alone(emulator: LinearEmulator, history: Array, steps: int = STEPS) -> Array:
    """The same rollout in this process, with one thread for products, as workers have."""
    stages = emulator.stages()
    for stage in stages:
        stage.load()
    with threadpool_limits(1):
        return rollout(stages, history, steps)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_climate_rollout_loses_a_stage_and_no_bit(
    fresh_cluster: Callable[[int], Client], climate: tuple[LinearEmulator, Array], stage: int, number: int
) -> None:
    emulator, history = climate
    expected = alone(emulator, history)
    with contextlib.ExitStack() as stack:
        pipeline = stack.enter_context(ArrayPipeline(fresh_cluster(4), emulator.stages(), timeout=3.0))
        made = []
        for field in pipeline.stream_rollout(history, STEPS, prefill_chunk=4):
            made.append(field)
            if len(made) == 5:
                stack.enter_context(signalled(pipeline.client, pipeline.workers[stage], number))
        np.testing.assert_array_equal(np.concatenate(made, axis=1), expected)
        [report] = pipeline.recoveries
        assert [(loss.stage, loss.kind) for loss in report.losses] == [(stage, LossKind.UNREACHABLE)]


def test_a_stream_of_stages_that_take_nothing_back(fresh_cluster: Callable[[int], Client]) -> None:
    """The chunks in flight were lost with the tail: stages before it are fed anew, and nobody is replaced."""
    with contextlib.ExitStack() as stack:
        pipeline = stack.enter_context(ArrayPipeline(fresh_cluster(4), bank(), depth=4, timeout=5.0))
        before, made = pipeline.workers, []
        for part in pipeline.run(iter(CHUNKS)):
            made.append(part)
            if len(made) == 6:
                stack.enter_context(signalled(pipeline.client, before[2], signal.SIGKILL))
        assert [part.shape for part in made] == [(2, 5)] * len(CHUNKS)
        np.testing.assert_array_equal(np.concatenate(made, axis=1), filtered(SIGNAL))
        after = pipeline.workers
        assert [k for k in range(3) if before[k] != after[k]] == [2]


@pytest.fixture(scope="module")
def client(shared_cluster4: str) -> Iterator[Client]:
    with Client(shared_cluster4) as client:
        yield client


@pytest.fixture(scope="module")
def pipeline(client: Client) -> Iterator[ArrayPipeline]:
    with ArrayPipeline(client, bank()) as pipeline:
        yield pipeline


def test_a_whole_rollout_is_that_of_one_process(
    client: Client, climate: tuple[LinearEmulator, Array]
) -> None:
    emulator, history = climate
    with ArrayPipeline(client, emulator.stages(), spares=0) as pipeline:
        np.testing.assert_array_equal(pipeline.rollout(history, STEPS), alone(emulator, history))
        first = history[:1, :1]
        np.testing.assert_array_equal(pipeline.rollout(first, 1), alone(emulator, first, 1))
        assert pipeline.recoveries == []


def test_an_interrupted_rollout_goes_on_and_proves_what_came_before(
    fresh_cluster: Callable[[int], Client], climate: tuple[LinearEmulator, Array]
) -> None:
    emulator, history = climate
    expected = alone(emulator, history)
    client = fresh_cluster(3)
    with ArrayPipeline(client, emulator.stages(), spares=0) as pipeline:
        made = []
        with pytest.raises(NoSpareError) as caught:
            for field in pipeline.stream_rollout(history, STEPS, prefill_chunk=4):
                made.append(field)
                if len(made) == 5:
                    client.retire_workers([pipeline.workers[1]])
    made += caught.value.committed
    checkpoint = Checkpoint.from_bytes(caught.value.checkpoint.to_bytes())
    assert len(checkpoint.chunks) == 2 + len(made)
    client.cluster.scale(4)
    client.wait_for_workers(3, timeout=60)
    with ArrayPipeline(client, emulator.stages(), spares=0) as pipeline:
        left = STEPS - len(made)
        rest = pipeline.rollout(history, left, prefill_chunk=4, resume=checkpoint)
        np.testing.assert_array_equal(np.concatenate([*made, rest], axis=1), expected)
        with pytest.raises(CheckpointError, match="expected 4 positions with digest"):
            pipeline.rollout(history + 1, left, prefill_chunk=4, resume=checkpoint)
        other = Checkpoint((), model_digest=pipeline.digest, chunks=((4, *checkpoint.chunks[0][1:2], "00"),))
        with pytest.raises(ReplayMismatch, match="expected output 00 of chunk 0"):
            pipeline.rollout(history, left, prefill_chunk=4, resume=other)


@pytest.mark.slow
def test_silent_corruption_of_a_users_stage_is_found_and_healed(
    fresh_cluster: Callable[[int], Client],
) -> None:
    client = fresh_cluster(5)
    with ArrayPipeline(client, bank(), spares=2, audit_rate=1.0) as pipeline:
        victim = pipeline.workers[1]
        arm_stage_fault(pipeline, StageFault("activation", 1, step=4))
        made = list(pipeline.run(CHUNKS))
        np.testing.assert_array_equal(np.concatenate(made, axis=1), filtered(SIGNAL))
        [receipt] = pipeline.receipts
        assert receipt.primary_worker == victim
        assert victim not in pipeline.workers


def test_a_worker_that_cannot_load_a_stage_is_passed_over(
    fresh_cluster: Callable[[int], Client], tmp_path: Path
) -> None:
    client, file = fresh_cluster(4), tmp_path / "pid"
    with ArrayPipeline(client, [Spoilt(number, file) for number in (0, 1)], spares=1) as pipeline:
        pids = client.run(os.getpid)
        [spoilt] = [address for address, pid in pids.items() if pid == int(file.read_text())]
        assert set(pipeline.spares) - {spoilt} == pids.keys() - {spoilt, *pipeline.workers}
    with pytest.raises(StageError, match=r"stage [01]: expected worker .* to load it, got OSError.*No space"):
        ArrayPipeline(client, [Spoilt(number, tmp_path / "2") for number in (0, 1)], spares=2)


@pytest.mark.parametrize("where", ["load", "init", "forward"])
def test_a_stage_that_calls_for_an_exit_takes_no_worker_along(
    fresh_cluster: Callable[[int], Client], where: str
) -> None:
    client = fresh_cluster(3)
    before = client.run(os.getpid)
    stages = [FilterBank(SECTIONS[0]), Quitter(SECTIONS[1], where)]
    told = pytest.raises(SDCError, match=f"stage 1.*SystemExit: no licence to {where}")
    with told, ArrayPipeline(client, stages, timeout=5.0) as pipeline:
        list(pipeline.run(CHUNKS))
    assert client.run(os.getpid) == before


@pytest.mark.slow
def test_a_chunk_that_no_worker_can_take_ends_its_session_and_no_other(
    fresh_cluster: Callable[[int], Client],
) -> None:
    bad = [*CHUNKS[:3], np.full((2, 5), np.nan), *CHUNKS[3:]]
    with ArrayPipeline(fresh_cluster(5), bank(), spares=2, timeout=5.0) as pipeline:
        made, good = [], pipeline.run(CHUNKS)
        first = next(good)
        named = r"position 15 on two workers.*expected finite"
        with pytest.raises(GenerationInterrupted, match=named) as caught:
            for part in pipeline.run(bad):
                made.append(part)
        made += caught.value.committed
        # Of the three chunks before it those count that had come back.
        np.testing.assert_array_equal(np.concatenate(made, axis=1), filtered(SIGNAL)[:, : 5 * len(made)])
        assert len(caught.value.checkpoint.chunks) == len(made) <= 3
        np.testing.assert_array_equal(np.concatenate([first, *good], axis=1), filtered(SIGNAL))


def test_what_the_source_raises_comes_through(pipeline: ArrayPipeline) -> None:
    def source() -> Iterator[Array]:
        yield CHUNKS[0]
        raise LookupError("the disk is gone")

    with pytest.raises(LookupError, match="the disk is gone"):
        list(pipeline.run(source()))
    assert list(pipeline.run([])) == []
    np.testing.assert_array_equal(next(pipeline.run(CHUNKS)), filtered(SIGNAL)[:, :5])
    ragged = [SIGNAL[:, :1], SIGNAL[:, 1:40], SIGNAL[:, 40:]]
    np.testing.assert_array_equal(np.concatenate(list(pipeline.run(ragged)), axis=1), filtered(SIGNAL))
    assert pipeline.recoveries == []


def test_a_source_that_ends_before_the_checkpoint_is_refused(pipeline: ArrayPipeline) -> None:
    made = list(pipeline.run(CHUNKS[:4]))
    digests = [[boundary_digest(array).hex() for array in arrays] for arrays in (CHUNKS, made)]
    chunks = tuple((5, fed, out) for fed, out in zip(*digests, strict=False))
    checkpoint = Checkpoint((), model_digest=pipeline.digest, chunks=chunks)
    assert len(list(pipeline.run(CHUNKS[:6], resume=checkpoint))) == 2
    for few in (3, 0):
        with pytest.raises(CheckpointError, match=f"expected 4 at least, as the checkpoint has, got {few}"):
            list(pipeline.run(CHUNKS[:few], resume=checkpoint))


def test_an_interrupt_from_the_keyboard_comes_through_and_ends_the_session(pipeline: ArrayPipeline) -> None:
    over = threading.Event()

    def source() -> Iterator[Array]:
        yield CHUNKS[0]
        os.kill(os.getpid(), signal.SIGINT)
        over.wait(60)

    # A shell that runs the tests in the background has them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(pipeline.run(source()))
    finally:
        signal.signal(signal.SIGINT, before)
        over.set()
    assert not any(pipeline.client.run(sessions, pipeline.name).values())
    np.testing.assert_array_equal(next(pipeline.run(CHUNKS)), filtered(SIGNAL)[:, :5])


def sessions(name: str, dask_worker: Any) -> list[str]:
    """Return the sessions that a worker has of a pipeline."""
    seat = dask_worker.plugins["dask_sdc-stages"].seats.get(name)
    return [] if seat is None else list(seat.host.sessions)


def test_a_recovery_while_the_source_is_read(client: Client) -> None:
    """What was in flight is fed again, though the source has nothing more to give."""
    with ArrayPipeline(client, bank(), spares=0) as pipeline:

        def source() -> Iterator[Array]:
            yield from CHUNKS[:2]
            loop: Any = client.loop
            repaired = pipeline._running.repair("a test")
            asyncio.run_coroutine_threadsafe(repaired, loop.asyncio_loop).result(60)

        made = np.concatenate(list(pipeline.run(source())), axis=1)
        np.testing.assert_array_equal(made, filtered(SIGNAL)[:, :10])
        assert len(pipeline.recoveries) == 1


def test_closing_ends_a_session_that_waits_for_memory(client: Client) -> None:
    pipeline = ArrayPipeline(client, bank(growth=1), spares=0, state_bytes=200)
    first = pipeline.run(CHUNKS, capacity=90)
    next(first)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, pipeline.run(CHUNKS, capacity=90))
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        pipeline.close()
        with pytest.raises(ClosedError):
            waiting.result(30)
    with pytest.raises(ClosedError):
        list(first)


def test_auditors_that_were_no_spares_let_go_of_the_stages(client: Client) -> None:
    with ArrayPipeline(client, bank()[:2], spares=0, audit_rate=1.0) as pipeline:
        assert len(list(pipeline.run(CHUNKS[:3]))) == 3
        held = client.run(left_over)
        assert sum(pipeline.name in names for names in held.values()) > 2
    assert not any(pipeline.name in names for names in client.run(left_over).values())


def test_a_stage_that_cannot_be_loaded_is_named_with_its_worker(client: Client) -> None:
    stages = [FilterBank(SECTIONS[0]), Missing(SECTIONS[1])]
    with pytest.raises(
        StageError, match=r"stage 1: expected worker tcp:.* to load it, got FileNotFoundError"
    ):
        ArrayPipeline(client, stages)


@pytest.mark.slow
def test_a_chunk_that_ends_every_worker_ends_its_session_first(
    fresh_cluster: Callable[[int], Client],
) -> None:
    """Workers that a nanny starts again are new ones, so nothing else would bound it."""
    with ArrayPipeline(fresh_cluster(6), [Deadly(SECTIONS[0])], spares=1, timeout=5.0) as pipeline:
        with pytest.raises(GenerationInterrupted, match="stage 0 failed at position 5 on 4 workers"):
            list(pipeline.run(CHUNKS[:2]))
        assert len(pipeline.recoveries) == 4
        np.testing.assert_array_equal(next(pipeline.run(CHUNKS[:1])), sosfilt(SECTIONS[0], CHUNKS[0], axis=1))


@pytest.mark.parametrize(
    ("chunks", "error", "match"),
    [
        (SIGNAL, InputTypeError, "iterable of arrays"),
        (7, InputTypeError, "iterable of arrays"),
        ([SIGNAL[0]], InputError, r"expected shape \(batch, positions"),
        ([SIGNAL[:, :0]], InputError, r"none of them 0, got \(2, 0\)"),
        ([["a", "b"]], InputTypeError, "array of numbers"),
        ([SIGNAL.astype(np.longdouble)], InputTypeError, "no extended precision"),
        ([np.ma.masked_less(SIGNAL, 0)], InputTypeError, "no mask, got MaskedArray"),
        ([CHUNKS[0], CHUNKS[0][:1]], InputError, "chunk 1: expected float64 of shape"),
        ([CHUNKS[0], CHUNKS[0].astype("f4")], InputError, "got float32"),
    ],
)
def test_bad_chunks_are_refused(
    pipeline: ArrayPipeline, chunks: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        list(pipeline.run(chunks))
    assert pipeline.recoveries == []


def test_bad_settings_are_refused(client: Client, pipeline: ArrayPipeline) -> None:
    for stages, error in (
        ([], InputError),
        ([3], InputTypeError),
        (3, InputTypeError),
        ([Unnamed(SECTIONS[0])], InputTypeError),
    ):
        with pytest.raises(error, match="stage"):
            ArrayPipeline(client, stages)  # type: ignore[arg-type]
    for settings in ({"depth": 0}, {"spares": -1}, {"timeout": 0}, {"audit_rate": 2}, {"state_bytes": 0}):
        with pytest.raises(InputError, match=next(iter(settings))):
            ArrayPipeline(client, bank(), **settings)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="steps: expected an int of at least 1, got 0"):
        pipeline.rollout(SIGNAL, 0)
    with pytest.raises(CheckpointError, match="model digest: expected"):
        pipeline.rollout(SIGNAL, 1, resume=Checkpoint((1, 2)))
    with ArrayPipeline(client, bank(growth=2**20), spares=0, state_bytes=2**22) as growing:
        with pytest.raises(InputError, match="capacity: expected positions"):
            growing.run(CHUNKS)
        with pytest.raises(ContextOverflow, match="expected at most 4 positions"):
            list(growing.run([SIGNAL[:, :1]], capacity=3))
        assert len(list(growing.run([SIGNAL[:, :1]], capacity=2))) == 1
        with pytest.raises(ContextOverflow, match=r"chunk 1: expected 1 positions at most.*got 2"):
            list(growing.run([SIGNAL[:, :1], SIGNAL[:, :2]], capacity=2))
    with pytest.raises(ClosedError):
        growing.run(CHUNKS)


def test_with_an_asynchronous_client(shared_cluster4: str) -> None:
    async def body() -> None:
        async with (
            Client(shared_cluster4, asynchronous=True) as client,
            ArrayPipeline(client, bank(), spares=0) as pipeline,
        ):
            made = [part async for part in pipeline.run(CHUNKS)]
            np.testing.assert_array_equal(np.concatenate(made, axis=1), filtered(SIGNAL))
            assert (await pipeline.rollout(SIGNAL, 2)).shape == (2, 2)

    asyncio.run(body())
