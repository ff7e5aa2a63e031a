"""Stages whose weights wait on a worker's local disk until they are needed."""

from __future__ import annotations

import asyncio
import logging
import pickle
import shutil
from pathlib import Path

import cloudpickle

from dask_sdc.exceptions import SDCError
from dask_sdc.graph.execute import contained
from dask_sdc.inference.stage import Stage

__all__ = ["Copies", "load_stage"]

logger = logging.getLogger("dask_sdc.inference")


class Copies:
    """The copies on one worker, by pipeline and stage.

    Parameters
    ----------
    folder : path
        Where they go; a folder of the worker's own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # What a stage is loaded from; None for one that is loaded from what everybody loads it from.
        self._copies: dict[str, dict[int, bytes | None]] = {}
        self._writing: dict[tuple[str, int], asyncio.Future[None]] = {}

    @property
    def pipelines(self) -> set[str]:
        """Names of the pipelines that have copies here."""
        return {*self._copies, *(pipeline for pipeline, _ in self._writing)}

    def holds(self, pipeline: str, number: int) -> bool:
        """Say whether a stage waits here."""
        return number in self._copies.get(pipeline, {})

    async def keep(self, pipeline: str, number: int, blob: bytes) -> None:
        """Copy what a stage loads, unless that was done; whoever asks meanwhile waits for the same."""
        key = (pipeline, number)
        if self.holds(*key):
            return
        if key not in self._writing:
            self._writing[key] = asyncio.ensure_future(self._write(pipeline, number, blob))
        await asyncio.shield(self._writing[key])

    async def _write(self, pipeline: str, number: int, blob: bytes) -> None:
        folder = self._folder / pipeline / str(number)
        try:
            copy = await asyncio.to_thread(_written, blob, folder)
        except BaseException as error:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise OSError(f"no copy in {folder}: {error}") from error
            raise
        finally:
            self._writing.pop((pipeline, number))
        self._copies.setdefault(pipeline, {})[number] = copy

    def load(self, pipeline: str, number: int, blob: bytes) -> Stage:
        """Load a stage from its copy, or from ``blob`` if there is none or it is missing or damaged."""
        copies = self._copies.get(pipeline, {})
        copy = copies.get(number)
        if copy is not None:
            try:
                return load_stage(copy)
            except (SDCError, OSError) as error:
                copies[number] = None
                logger.warning(
                    "Pipeline %s: the local copy of stage %d is given up, its weights are read where they "
                    "came from: %s",
                    pipeline,
                    number,
                    error,
                )
        return load_stage(blob)

    async def forget(self, pipeline: str) -> None:
        """Remove the copies of a pipeline, after those that are being written."""
        writing = [task for (name, _), task in self._writing.items() if name == pipeline]
        await asyncio.gather(*writing, return_exceptions=True)
        if self._copies.pop(pipeline, None) is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder / pipeline, ignore_errors=True)


def load_stage(blob: bytes) -> Stage:
    """Return a stage that came, loaded and proved."""
    stage: Stage = contained(pickle.loads, blob)
    contained(stage.load)
    return stage


def _written(blob: bytes, folder: Path) -> bytes | None:
    """Copy what a stage loads to a folder that nobody else uses."""
    shutil.rmtree(folder, ignore_errors=True)  # what was interrupted
    stage: Stage = contained(pickle.loads, blob)
    copy = contained(stage.cached, str(folder))
    if copy is stage:
        return None
    described: bytes = contained(cloudpickle.dumps, copy)
    return described
