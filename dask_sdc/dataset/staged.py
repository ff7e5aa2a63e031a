"""Samples made by a pipeline of staged inference: hidden states, logits, ids."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_sdc.dataset.inputs import Inputs, one_of
from dask_sdc.dataset.layout import Arrays
from dask_sdc.dataset.outputs import Output, Sample, checked_sample
from dask_sdc.dataset.report import DatasetReport, Progress, counted
from dask_sdc.dataset.work import Job, Rank
from dask_sdc.exceptions import GenerationFailed, InputError
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.recovery import SampleUnavailable

__all__ = ["GeneratedIds", "HiddenStates", "PipelineJob", "Produce"]

#: Samples of a batch that a pipeline works on at once.
_AT_ONCE = 4


class Produce(ABC):
    """What is wanted of a pipeline, for every prompt."""

    @abstractmethod
    def outputs(self, pipeline: Pipeline) -> dict[str, Output]:
        """Return what a sample consists of."""

    @abstractmethod
    async def sample(self, pipeline: Pipeline, prompt: Any) -> Sample:
        """Make a sample of a prompt, text or ids."""


@dataclass(frozen=True)
class HiddenStates(Produce):
    """Hidden states of chosen layers for given texts.

    A sample has ``ids`` and per layer ``hidden_<layer>``, the activations (positions, hidden size) that the
    layer puts out, in float32.

    Parameters
    ----------
    layers : sequence of int
        Layers, from 0.
    logits : bool
        Whether ``logits`` (positions, vocabulary) are wanted too.
    max_length : int, optional
        Longest prompt in ids; the context of the model by default.
    layout : {"ragged", "padded"}
        See `Output`.
    """

    layers: Sequence[int]
    logits: bool = False
    max_length: int | None = None
    layout: str = "ragged"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))

    def outputs(self, pipeline: Pipeline) -> dict[str, Output]:
        """Return ids, hidden states and, if they are wanted, logits."""
        config = pipeline.config
        if any(
            isinstance(k, bool) or not isinstance(k, int) or not 0 <= k < config.n_layers for k in self.layers
        ):
            raise InputError(f"layers: expected ints in 0..{config.n_layers - 1}, got {self.layers}")
        length = self.max_length or config.max_context
        found = {"ids": Output("<i8", (None,), length, self.layout)}
        for layer in self.layers:
            found[f"hidden_{layer}"] = Output(
                "<f4", (None, config.hidden_size), length, self.layout, like="ids"
            )
        if self.logits:
            found["logits"] = Output("<f4", (None, config.vocab_size), length, self.layout, like="ids")
        return found

    async def sample(self, pipeline: Pipeline, prompt: Any) -> Sample:
        """Feed a prompt and take what was asked for."""
        states = await pipeline.states(prompt, self.layers, logits=self.logits)
        found: Sample = {"ids": np.asarray(states.ids, "<i8")}
        found |= {f"hidden_{layer}": array for layer, array in states.hidden.items()}
        return found if states.logits is None else {**found, "logits": states.logits}


@dataclass(frozen=True)
class GeneratedIds(Produce):
    """Generated tokens: a sample has ``ids``, without the prompt.

    Parameters
    ----------
    max_new_tokens, temperature, top_p, seed
        See `Pipeline.generate`.
    layout : {"padded", "ragged"}
        See `Output`.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    layout: str = "padded"

    def outputs(self, pipeline: Pipeline) -> dict[str, Output]:
        """Return ids."""
        return {"ids": Output("<i8", (None,), self.max_new_tokens, self.layout)}

    async def sample(self, pipeline: Pipeline, prompt: Any) -> Sample:
        """Generate."""
        done = await pipeline.generate(
            prompt, self.max_new_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed
        )
        return {"ids": np.asarray(done.ids, "<i8")}


class PipelineJob:
    """Makes the batches of a dataset through a pipeline, several samples at a time.

    Parameters
    ----------
    pipeline : Pipeline
        Makes samples; heals and audits its stages itself.
    job : Job
        With a `Produce`.
    arrays : dict
        The opened arrays of the dataset.
    inputs, report, progress
        See `DatasetJob`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        job: Job,
        arrays: Arrays,
        inputs: Inputs,
        report: DatasetReport,
        progress: Progress,
    ) -> None:
        self._pipeline, self._job, self._inputs = pipeline, job, inputs
        self._report, self._progress = report, progress
        self._rank = Rank(job, arrays)
        self._done = report.kept

    async def run(self, batches: Iterable[int]) -> None:
        """Make some batches.

        Raises
        ------
        GenerationFailed
            If too many samples in a row fail.
        """
        for batch in batches:
            began, numbers = time.perf_counter(), self._rank.layout.samples_of(batch)
            samples, retries = await self._samples(await self._given(numbers), numbers)
            made = await asyncio.to_thread(
                self._rank.finish, batch, samples, retries, True, ("", "pipeline"), began
            )
            if made.fatal:
                raise GenerationFailed(f"the pipeline cannot go on: {made.fatal}", local_error=made.fatal)
            counted(self._report.ranks, made.domain, made.failures, made.seconds)
            self._report.retried += made.retries
            self._report.failures += made.failures
            self._report.reasons |= {numbers.start + k: why for k, why in enumerate(made.reasons) if why}
            self._done += len(numbers)
            self._progress.show(self._done, self._report.failures, len(self._report.reasons))

    async def _given(self, numbers: range) -> Any:
        given = self._inputs.batch(self._pipeline.client, numbers)
        if callable(given):
            return await asyncio.to_thread(given)
        return await given if hasattr(given, "add_done_callback") else given

    async def _samples(self, given: Any, numbers: range) -> tuple[list[Sample | SampleUnavailable], int]:
        room, attempts = asyncio.Semaphore(_AT_ONCE), 0

        async def one(k: int, number: int) -> Sample | SampleUnavailable:
            asked = one_of(given, k, self._job.dim)

            async def trip() -> Sample:
                nonlocal attempts
                attempts += 1
                made = await self._job.produce.sample(self._pipeline, asked)
                return checked_sample(self._job.outputs, made, asked)

            async with room:
                return await self._rank.guard.run_async(trip, description=f"sample {number}")

        made = await asyncio.gather(*(one(k, number) for k, number in enumerate(numbers)))
        return list(made), attempts - len(made)
