"""`generate_dataset`: a dataset of many samples, some of which cannot be had."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import dask
import numpy as np
import xarray as xr
from distributed import Client
from zarr.errors import ContainsArrayError

from dask_sdc.cluster.session import Session, expect_open
from dask_sdc.dataset.inputs import Inputs, inputs_of
from dask_sdc.dataset.job import UNTIL, DatasetJob, Rules
from dask_sdc.dataset.layout import Arrays, Layout
from dask_sdc.dataset.outputs import Output, check_outputs
from dask_sdc.dataset.reading import open_dataset, opened, swept, there, writable
from dask_sdc.dataset.report import DatasetReport, Progress, to_json
from dask_sdc.dataset.staged import PipelineJob, Produce
from dask_sdc.dataset.work import Job
from dask_sdc.evidence.ledger import Ledger
from dask_sdc.exceptions import CheckpointError, InputError, InputTypeError, MissingSamples
from dask_sdc.graph.execute import Blob
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.pipeline.base import check_int, check_number
from dask_sdc.policy.sampling import CoverageSampler
from dask_sdc.recovery import Backoff, GenerationRecoveryGuard

__all__ = ["GeneratedDataset", "generate_dataset"]

logger = logging.getLogger("dask_sdc.dataset")

_ON_MISSING = ("generate", "skip", "warn", "raise")


class GeneratedDataset(NamedTuple):
    """What `generate_dataset` returns.

    Attributes
    ----------
    dataset : xarray.Dataset
        Opened lazily; see `open_dataset`.
    report : DatasetReport
        What became of the samples.
    """

    dataset: xr.Dataset
    report: DatasetReport


def generate_dataset(
    client_or_pipeline: Client | Pipeline,
    inputs: Any,
    produce: Any,
    store: Any,
    *,
    outputs: Mapping[str, Output] | None = None,
    batch_size: int = 32,
    sample_dim: str | None = None,
    version: str = "",
    resume: bool = False,
    overwrite: bool = False,
    on_missing: str = "generate",
    retries: int = 2,
    max_consecutive_failures: int = 20,
    retry_on: Callable[[Exception], bool] | None = None,
    backoff: Backoff | None = None,
    max_retries: int = 3,
    timeout: float | None = None,
    audit_rate: float = 0.0,
    audit_seed: int = 0,
    quarantine: bool = True,
    ledger: Any = None,
    progress: bool = False,
) -> Any:
    """Make a sample of every input and write them to Zarr.

    Samples are made in batches by the workers of a cluster. One that fails is tried again and then counted
    as missing, with the reason; a rank on which many fail in a row stops the job. What was written is vouched
    for by checksums, and a job that ended early goes on from there.

    Parameters
    ----------
    client_or_pipeline : Client or Pipeline
        The cluster whose workers call ``produce``, or a pipeline of staged inference.
    inputs : dask bag or array, xarray object, Zarr array or path of one, ndarray, or iterable
        What samples are made from. Of an array every row is one.
    produce : callable, HiddenStates or GeneratedIds
        ``produce(input)`` returns a mapping of output names to arrays, or the array of a single output; a
        `SampleUnavailable` that it returns is a sample that is left out. For a pipeline: what is wanted.
    store : path, URL or zarr.abc.store.Store
        A Zarr v3 group that does not exist yet, or the one to go on with.
    outputs : mapping of str to Output
        What a sample consists of; known already for a pipeline.
    batch_size : int
        Samples that one task makes and writes, as whole chunks.
    sample_dim : str, optional
        Dimension of an xarray object along which the inputs lie; the first one by default.
    version : str
        Whatever else samples depend on, such as the version of a model; a dataset of another one is not
        continued.
    resume : bool
        Go on with what is there: only batches are made again that no checksum vouches for.
    overwrite : bool
        Replace the dataset that is there; nothing else is ever replaced.
    on_missing : {"generate", "skip", "warn", "raise"}
        What is done about samples that are not there yet: make them, leave them out, leave them out with a
        warning, or raise `MissingSamples` naming them.
    retries : int
        Attempts at a sample after the first one; making and checking it count as one.
    max_consecutive_failures : int
        From this many failed samples in a row of one rank on, the job stops. A rank is a worker process.
    retry_on, backoff
        See `GenerationRecoveryGuard`.
    max_retries : int
        How often a batch may fail as a whole, or be lost with its worker while it is made alone, and is made
        again. One that takes its worker along every time is missing.
    timeout : float, optional
        Seconds that a batch may take; its worker is given up then. Without it only a worker that leaves is.
    audit_rate : float
        Share of the batches of each failure domain that another domain makes once more. Where the two differ,
        a third one and both again are heard; a domain that is named is quarantined, and what it made is made
        again. Only domains of equal environments are compared.
    audit_seed : int
        Decides which batches.
    quarantine : bool
        Whether domains that are named are taken out of service.
    ledger : str or path, optional
        File to which receipts and the report are appended.
    progress : bool
        Whether a bar with rate, failures and missing samples is shown.

    Returns
    -------
    GeneratedDataset
        A coroutine that gives it, with an asynchronous client.

    Raises
    ------
    InputError, InputTypeError
        For bad arguments, before any work starts.
    CheckpointError
        If what is there belongs to another job.
    CorruptionError
        If its metadata are damaged.
    GenerationFailed
        If the breaker of a rank opened, naming it, or a batch failed as a whole. What was written stays.
    MissingSamples
        See ``on_missing``.

    Examples
    --------
    >>> made = generate_dataset(  # doctest: +SKIP
    ...     client, range(1000), simulate, "fields.zarr", outputs={"field": Output("f8", (64, 64))}
    ... )
    >>> made.dataset["field"].mean("sample").compute()  # doctest: +SKIP
    """
    pipeline = client_or_pipeline if isinstance(client_or_pipeline, Pipeline) else None
    client = client_or_pipeline.client if isinstance(client_or_pipeline, Pipeline) else client_or_pipeline
    if not isinstance(client, Client):
        raise InputTypeError(f"expected a Client or a Pipeline, got {type(client).__name__}")
    if pipeline is not None:
        if not isinstance(produce, Produce):
            raise InputTypeError(
                f"produce: expected HiddenStates or GeneratedIds, got {type(produce).__name__}"
            )
        if outputs is not None:
            raise InputError("outputs: expected none beside a pipeline, which knows them")
        if audit_rate:
            raise InputError("audit_rate: expected that of the pipeline itself, which audits its stages")
        outputs = produce.outputs(pipeline)
        version = f"{version} {pipeline.store.digest} {produce}"
    elif not callable(produce):
        raise InputTypeError(f"produce: expected a callable, got {type(produce).__name__}")
    declared = check_outputs(outputs)
    batch_size = check_int("batch_size", batch_size, 1)
    max_retries = check_int("max_retries", max_retries, 0)
    if on_missing not in _ON_MISSING:
        raise InputError(f"on_missing: expected one of {_ON_MISSING}, got {on_missing!r}")
    if timeout is not None and check_number("timeout", timeout) == 0:
        raise InputError(f"timeout: expected seconds > 0, got {timeout!r}")
    if resume and overwrite:
        raise InputError("expected resume or overwrite, got both")
    making = _Making(
        client,
        pipeline,
        Job(
            uuid.uuid4().hex,
            produce,
            declared,
            -1,
            batch_size,
            writable(store),
            GenerationRecoveryGuard(retries, max_consecutive_failures, retry_on=retry_on, backoff=backoff),
            None,
        ),
        version,
        Rules(CoverageSampler(audit_rate, audit_seed), quarantine, max_retries, timeout),
        ledger,
        progress,
    )
    return client.sync(making.run, inputs, sample_dim, resume, overwrite, on_missing)


class _Making:
    """One call of `generate_dataset`."""

    def __init__(
        self,
        client: Client,
        pipeline: Pipeline | None,
        job: Job,
        version: str,
        rules: Rules,
        ledger: Any,
        progress: bool,
    ) -> None:
        self._client, self._pipeline, self._job, self._version = client, pipeline, job, version
        self._rules, self._ledger, self._shown = rules, ledger, progress

    async def run(self, *arguments: Any) -> GeneratedDataset:
        """Make it, unless the client is closed in the middle."""
        try:
            return await self._run(*arguments)
        except asyncio.CancelledError:
            expect_open(self._client, until=UNTIL)  # whose loop takes along whatever runs on it
            raise

    async def _run(
        self, given: Any, dim: str | None, resume: bool, overwrite: bool, on_missing: str
    ) -> GeneratedDataset:
        """Prepare the store, make what is to be made, and open it."""
        began = time.monotonic()
        inputs = await inputs_of(self._client, given, dim)
        self._job = job = self._job.of(inputs.count, inputs.dim)
        blob = None if self._pipeline is not None else _pickled(job)
        layout, arrays, new = await asyncio.to_thread(self._prepared, resume, overwrite)
        kept = set() if new else await _vouched(layout, arrays)
        todo = [batch for batch in range(layout.batches) if batch not in kept]
        report = DatasetReport(inputs.count)
        report.kept = sum(len(layout.samples_of(batch)) for batch in kept)
        if on_missing == "generate":
            ledger = None if self._ledger is None else Ledger(self._ledger)
            try:
                await self._make(job, blob, inputs, layout, arrays, todo, report, ledger)
                await asyncio.to_thread(swept, job.store)
                report.seconds = time.monotonic() - began
                if ledger is not None:
                    ledger.append("dataset", to_json(report))
            finally:
                if ledger is not None:
                    ledger.close()
        elif todo:
            _leave_out(layout, todo, on_missing)
        await asyncio.to_thread(_count, layout, arrays, report)
        report.seconds = time.monotonic() - began
        return GeneratedDataset(await asyncio.to_thread(open_dataset, job.store), report)

    def _prepared(self, resume: bool, overwrite: bool) -> tuple[Layout, Arrays, bool]:
        """Create the dataset, or open the one that is there, of the same job; say whether it is new."""
        job, unfinished = self._job, there(self._job.store)
        if unfinished is None:
            return job.layout, self._created(), True
        if resume and not unfinished:
            layout, before, arrays = opened(job.store, "r+")
            return layout, _same(before, self._description(), arrays), False
        if resume or overwrite:
            return job.layout, self._created(overwrite=True), True
        raise InputError(f"store: expected nothing at {job.store} without resume or overwrite, got a dataset")

    def _created(self, overwrite: bool = False) -> Arrays:
        store = self._job.store
        try:
            return self._job.layout.create(store, self._description(), overwrite)
        except (OSError, ContainsArrayError) as error:  # it is there and no dataset, or cannot be written
            raise InputError(
                f"store: expected a place to write to, with nothing or a dataset in it, got {store}: {error}"
            ) from error

    def _description(self) -> dict[str, Any]:
        job = self._job
        return {
            "outputs": {name: output.to_dict() for name, output in job.outputs.items()},
            "samples": job.samples,
            "batch_size": job.batch_size,
            "version": self._version,
        }

    async def _make(
        self,
        job: Job,
        blob: Blob | None,
        inputs: Inputs,
        layout: Layout,
        arrays: Arrays,
        todo: list[int],
        report: DatasetReport,
        ledger: Ledger | None,
    ) -> None:
        progress = Progress(inputs.count, self._shown)
        progress.begin(report.kept)
        try:
            if blob is None:
                assert self._pipeline is not None
                await PipelineJob(self._pipeline, job, arrays, inputs, report, progress).run(todo)
            else:
                await self._on_workers(blob, inputs, layout, arrays, todo, report, progress, ledger)
        finally:
            progress.end()

    async def _on_workers(
        self,
        blob: Blob,
        inputs: Inputs,
        layout: Layout,
        arrays: Arrays,
        todo: list[int],
        report: DatasetReport,
        progress: Progress,
        ledger: Ledger | None,
    ) -> None:
        session = Session(self._client, "auto", None, dask.config.get("sdc.lanes"), False, 60.0)
        await session.attach()
        making = DatasetJob(
            self._client,
            session,
            blob,
            layout,
            arrays,
            inputs,
            report,
            progress,
            self._rules,
            ledger,
        )
        try:
            await making.run(todo)
        finally:
            making.summarise()
            await session.detach()


async def _vouched(layout: Layout, arrays: Arrays) -> set[int]:
    numbers = range(layout.batches)
    proved = await asyncio.gather(*(asyncio.to_thread(layout.vouched, arrays, batch) for batch in numbers))
    return {batch for batch, whole in zip(numbers, proved, strict=True) if whole}


def _pickled(job: Job) -> Blob:
    try:
        return Blob.of(job)
    except Exception as error:  # whatever something in it says of being pickled
        raise InputTypeError(
            f"produce: expected what can be sent to workers, as retry_on and store too, got {error}"
        ) from error


def _same(before: Mapping[str, Any], now: Mapping[str, Any], arrays: Arrays) -> Arrays:
    wrong = [
        f"{name}: expected {before[name]!r}, got {now[name]!r}" for name in now if before[name] != now[name]
    ]
    if wrong:
        raise CheckpointError("the dataset that is there is of another job: " + "; ".join(wrong))
    return arrays


def _leave_out(layout: Layout, todo: list[int], on_missing: str) -> None:
    numbers = [number for batch in todo for number in layout.samples_of(batch)]
    message = (
        f"expected {layout.samples} samples, got {layout.samples - len(numbers)}; missing {numbers[:10]}"
    )
    message += " and more" if len(numbers) > 10 else ""
    if on_missing == "raise":
        raise MissingSamples(message)
    if on_missing == "warn":
        logger.warning(message)


def _count(layout: Layout, arrays: Arrays, report: DatasetReport) -> None:
    valid = [layout.read(arrays, "valid", batch) for batch in range(layout.batches)]
    report.valid = int(sum(np.count_nonzero(part) for part in valid))
    report.missing = report.samples - report.valid
