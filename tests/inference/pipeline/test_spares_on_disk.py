"""Spares that have one stage in memory and the others on their local disk: tokens, memory and folders."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import async_poll_for, gen_cluster

from dask_sdc.exceptions import CorruptionError
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.pipeline.copies import Copies
from dask_sdc.inference.pipeline.placement import next_hot
from dask_sdc.inference.pipeline.worker import NAME, describe
from dask_sdc.inference.stage import TransformerStage
from dask_sdc.inference.weights.store import WeightStore
from tests.inference.pipeline.models import PROMPT, THREADS_OF_ZARR, generated

COUNT = 16
#: The tail has the tied embeddings and a norm more than the head: it is the largest.
STAGES, CUTS, HOT = 3, [2, 4], 2
Body = Callable[[Client, dict[str, Worker]], Awaitable[None]]


@pytest.fixture(scope="module")
def plain(store: WeightStore) -> tuple[int, ...]:
    return generated(store, PROMPT, COUNT)


@pytest.fixture
def movable(folder: Path, store: WeightStore, tmp_path: Path) -> Path:
    """Path of a copy of the weights that may be moved."""
    return Path(shutil.copytree(folder, tmp_path / "original.zarr"))


def in_cluster(body: Body, workers: int) -> None:
    """Run a coroutine function with a client of workers in this process."""

    @gen_cluster(
        client=True, nthreads=[("127.0.0.1", 1)] * workers, timeout=250, clean_kwargs=THREADS_OF_ZARR
    )
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        await body(c, {worker.address: worker for worker in workers})

    run()


def options(**more: Any) -> dict[str, Any]:
    return {"boundaries": CUTS, "spares": 1, "spare_weights": "disk", "timeout": 60.0, **more}


def folder_of(worker: Worker, pipeline: Pipeline) -> Path:
    return Path(worker.local_directory) / "sdc-stages" / pipeline.name


def in_memory(worker: Worker, pipeline: Pipeline) -> dict[int, int]:
    """Return the bytes of each stage that a worker has loaded without a seat for it."""
    stages = worker.plugins[NAME].spares.get(pipeline.name, {})
    return {number: stage.nbytes for number, stage in stages.items()}


def expect_policy(worker: Worker, pipeline: Pipeline, sizes: list[int]) -> None:
    """Check that a spare has one stage in memory, and the files of the others alone."""
    assert in_memory(worker, pipeline) == {HOT: sizes[HOT]}
    copies = {path.name: path for path in folder_of(worker, pipeline).iterdir()}
    assert set(copies) == {"0", "1"}
    for number, layers in (("0", range(2)), ("1", range(2, 4))):
        tensors = {path.name for path in copies[number].iterdir() if path.is_dir()}
        assert tensors == set(TransformerStage(pipeline.store, layers).names)


def sizes_of(store: WeightStore) -> list[int]:
    return [TransformerStage(store, layers).nbytes for layers in (range(2), range(2, 4), range(4, 6))]


async def tokens_with_loss(
    pipeline: Pipeline, stage: int, workers: dict[str, Worker], spoil: Callable[[], None]
) -> tuple[int, ...]:
    """Generate, and lose a stage's worker on the way."""
    tokens = []
    async for token in pipeline.stream(PROMPT, COUNT):
        tokens.append(token)
        if len(tokens) == 5:
            spoil()
            await workers[pipeline.workers[stage]].close()
    return tuple(tokens)


def test_a_lost_stage_comes_from_the_copy_and_the_policy_is_restored(
    movable: Path, plain: tuple[int, ...]
) -> None:
    away = movable.with_name("away.zarr")
    sizes = sizes_of(WeightStore.open(movable))
    assert max(sizes) == sizes[HOT]

    async def body(c: Client, workers: dict[str, Worker]) -> None:
        async with Pipeline(c, movable, **options()) as pipeline:
            [spare] = pipeline.spares
            expect_policy(workers[spare], pipeline, sizes)
            got = await tokens_with_loss(pipeline, 1, workers, lambda: movable.rename(away) and None)
            assert got == plain
            assert pipeline.workers[1] == spare and pipeline.recoveries[0].replays[0].exact
            away.rename(movable)

            def restored() -> bool:
                return bool(pipeline.spares) and len(pipeline._crew._whole(pipeline.workers)) == 1

            await async_poll_for(restored, timeout=60)
            [fresh] = pipeline.spares
            expect_policy(workers[fresh], pipeline, sizes)
            folders = [folder_of(workers[address], pipeline) for address in (spare, fresh)]
            assert all(folder.exists() for folder in folders)
        assert not any(folder.exists() for folder in folders)

    in_cluster(body, STAGES + 2)


@pytest.mark.parametrize("damage", ["a byte", "all of it"])
def test_a_damaged_copy_is_refused_and_the_weights_come_from_the_original(
    movable: Path, plain: tuple[int, ...], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = "layers.3.mlp.up.weight"

    async def body(c: Client, workers: dict[str, Worker]) -> None:
        async with Pipeline(c, movable, **options()) as pipeline:
            [spare] = pipeline.spares
            copy = folder_of(workers[spare], pipeline) / "1"

            def spoil() -> None:
                if damage == "a byte":
                    flip(copy, name)
                else:
                    shutil.rmtree(copy)

            with caplog.at_level(logging.WARNING, logger="dask_sdc.inference"):
                assert await tokens_with_loss(pipeline, 1, workers, spoil) == plain
            assert pipeline.workers[1] == spare
            [said] = [text for text in caplog.messages if "local copy of stage 1 is given up" in text]
            assert damage == "all of it" or f"{name} is damaged" in said

    in_cluster(body, STAGES + 1)


def flip(copy: Path, name: str) -> None:
    """Flip a bit in the middle of a tensor's only chunk."""
    [chunk] = [path for path in (copy / name / "c").rglob("*") if path.is_file()]
    raw = bytearray(chunk.read_bytes())
    raw[len(raw) // 2] ^= 4
    chunk.write_bytes(raw)


def test_audits_load_what_is_on_disk_and_let_it_go(movable: Path, plain: tuple[int, ...]) -> None:
    sizes = sizes_of(WeightStore.open(movable))

    async def body(c: Client, workers: dict[str, Worker]) -> None:
        async with Pipeline(c, movable, **options(audit_rate=1.0)) as pipeline:
            [spare] = pipeline.spares
            movable.rename(movable.with_name("away.zarr"))
            done = await pipeline.generate(PROMPT, COUNT)
            assert done.ids == plain
            assert done.audited == (len(PROMPT) + COUNT - 1,) * STAGES
            expect_policy(workers[spare], pipeline, sizes)

    in_cluster(body, STAGES + 1)


@pytest.mark.slow
def test_spares_have_the_stages_in_turn_and_in_memory_by_default(movable: Path) -> None:
    sizes = sizes_of(WeightStore.open(movable))

    async def body(c: Client, workers: dict[str, Worker]) -> None:
        async with Pipeline(c, movable, **options(spares=3)) as pipeline:
            held = [in_memory(workers[address], pipeline) for address in pipeline.spares]
            assert held == [{HOT: sizes[2]}, {0: sizes[0]}, {1: sizes[1]}]
        async with Pipeline(c, movable, boundaries=CUTS, spares=1) as pipeline:
            [spare] = pipeline.spares
            assert in_memory(workers[spare], pipeline) == dict(enumerate(sizes))
            assert not folder_of(workers[spare], pipeline).exists()

    in_cluster(body, STAGES + 3)


def test_the_next_loaded_stage_is_the_rarest_and_then_the_largest() -> None:
    sizes, held = [5, 9, 9, 2], list[int | None]()
    for _ in range(9):
        held.append(next_hot(sizes, held))
    assert held == [1, 2, 0, 3] * 2 + [1]
    assert next_hot(sizes, [1, None, 3]) == 2


def test_what_is_being_written_when_a_pipeline_is_forgotten_is_removed_too(
    store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on, quick = threading.Event(), threading.Event(), TransformerStage.cached

    def slow(stage: TransformerStage, folder: str) -> TransformerStage:
        copy = quick(stage, folder)
        began.set()
        assert go_on.wait(60)
        return copy

    monkeypatch.setattr(TransformerStage, "cached", slow)

    async def body() -> None:
        copies = Copies(tmp_path / "copies")
        keeping = asyncio.ensure_future(copies.keep("p", 0, describe(TransformerStage(store, range(2)))))
        assert await asyncio.to_thread(began.wait, 60)
        assert copies.pipelines == {"p"} and not copies.holds("p", 0)
        forgetting = asyncio.ensure_future(copies.forget("p"))
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(keeping, forgetting)
        assert not copies.holds("p", 0) and not copies.pipelines
        assert not (tmp_path / "copies" / "p").exists()

    asyncio.run(body())


def test_a_copy_that_fails_leaves_nothing(movable: Path, tmp_path: Path) -> None:
    async def body() -> None:
        copies = Copies(tmp_path / "copies")
        blob = describe(TransformerStage(WeightStore.open(movable), range(2, 4)))
        flip(movable, "layers.3.mlp.up.weight")
        with pytest.raises(CorruptionError, match=r"layers\.3\.mlp\.up\.weight is damaged"):
            await copies.keep("p", 1, blob)
        assert not copies.pipelines and not (tmp_path / "copies" / "p" / "1").exists()

    asyncio.run(body())
