"""What a worker does for a dataset: make the samples of one batch, and write them."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import zarr
from distributed import get_worker

from dask_sdc.cluster.worker_plugin import NAME
from dask_sdc.dataset.inputs import one_of
from dask_sdc.dataset.layout import Arrays, Layout, checksum
from dask_sdc.dataset.outputs import Output, Sample, checked_sample
from dask_sdc.evidence.codec import decode, digest, encode
from dask_sdc.exceptions import CorruptionError
from dask_sdc.graph.execute import contained
from dask_sdc.recovery import GenerationRecoveryGuard, RecoveryMetadata, SampleUnavailable

__all__ = ["Job", "Made", "Rank", "fence", "lose_batch", "make_batch", "make_samples"]

#: Jobs that a process remembers, with their guards and opened arrays.
_REMEMBERED = 4

#: Seconds for which a fence waits for those who write: longer than whoever asks for it does.
_PATIENCE = 60.0

#: Longest reason that is stored, in characters.
_REASON = 500


@dataclass(frozen=True)
class Job:
    """What all batches of a dataset have in common, as it travels to workers.

    Parameters
    ----------
    name : str
        A name that no other job has.
    produce : callable
        Makes a sample of an input.
    outputs, samples, batch_size
        See `Layout`.
    store : object
        Where the dataset is; must mean the same to every worker.
    guard : GenerationRecoveryGuard
        As new; every rank goes on with a copy of its own.
    dim : str or None
        See `one_of`.
    """

    name: str
    produce: Any
    outputs: Mapping[str, Output]
    samples: int
    batch_size: int
    store: Any
    guard: GenerationRecoveryGuard
    dim: str | None

    @property
    def layout(self) -> Layout:
        """How it is stored."""
        return Layout(self.outputs, self.samples, self.batch_size)

    def of(self, samples: int, dim: str | None) -> Job:
        """Return it for some number of samples along a dimension."""
        return replace(self, samples=samples, dim=dim)

    def spare_guard(self, samples: int) -> GenerationRecoveryGuard:
        """Return a guard that tries as often and never stops within some samples."""
        guard = copy(self.guard)
        guard.max_consecutive_failures = samples + 1
        return guard


@dataclass(frozen=True)
class Made:
    """What became of a batch; travels in the canonical encoding.

    Parameters
    ----------
    batch : int
        Its number.
    worker, domain : str
        Who made it, and the failure domain of that.
    digests : tuple of bytes
        Per sample a digest of its arrays; empty for one that is missing.
    reasons : tuple of str
        Per sample why it is missing; empty for one that is there.
    failures : int
        Missing samples that were tried in vain.
    retries : int
        Attempts that failed and were made again.
    fatal : str
        Why the rank stopped, in which case nothing was written; empty if it did not.
    seconds : float
        Time that it took.
    row : bytes
        Digest of what vouches for it in the store; empty if it was not written.
    """

    batch: int
    worker: str
    domain: str
    digests: tuple[bytes, ...]
    reasons: tuple[str, ...]
    failures: int
    retries: int
    fatal: str
    seconds: float
    row: bytes = b""

    def to_bytes(self) -> bytes:
        """Return the canonical encoding."""
        return encode(dict(vars(self)))

    @classmethod
    def from_bytes(cls, frame: bytes) -> Made:
        """Read it back; raises `CodecError` for anything else."""
        return cls(**decode(frame))


class Rank:
    """What one process keeps of a job: its guard, and the opened dataset.

    Parameters
    ----------
    job : Job
        The job.
    arrays : dict, optional
        The opened arrays of the dataset; opened when they are needed first.
    """

    def __init__(self, job: Job, arrays: Arrays | None = None) -> None:
        self.job, self.layout = job, job.layout
        self.guard = job.guard
        self._arrays = arrays

    def finish(
        self,
        batch: int,
        samples: Sequence[Sample | SampleUnavailable],
        retries: int,
        writes: bool,
        where: tuple[str, str],
        began: float,
    ) -> Made:
        """Write a batch, unless the rank has to stop, and say what became of it."""
        numbers = self.layout.samples_of(batch)
        samples = [_explained(number, one) for number, one in zip(numbers, samples, strict=False)]
        lost = [one for one in samples if isinstance(one, SampleUnavailable)]
        metadata = RecoveryMetadata.from_unavailable(lost, locally_empty=len(lost) == len(samples))
        row = b""
        if writes and not metadata.fatal:
            if self._arrays is None:
                self._arrays = self.layout.arrays(zarr.open_group(self.job.store, mode="r+"))
            row = self.layout.write(self._arrays, batch, self.layout.laid_out(batch, samples))
        return Made(
            batch,
            *where,
            tuple(b"" if isinstance(one, SampleUnavailable) else _digest(one) for one in samples),
            tuple(one.reason if isinstance(one, SampleUnavailable) else "" for one in samples),
            metadata.failure_count,
            retries,
            metadata.error,
            time.perf_counter() - began,
            row,
        )


_RANKS: OrderedDict[bytes, Rank] = OrderedDict()
_LOCK = threading.Lock()


def _rank_of(blob: bytes, key: bytes) -> Rank:
    """Return what this process keeps of a job; the threads of a worker are one rank."""
    with _LOCK:
        if key not in _RANKS:
            if digest(blob) != key:
                raise CorruptionError("the job of a dataset has changed on its way to this worker")
            _RANKS[key] = Rank(cloudpickle.loads(blob))
            while len(_RANKS) > _REMEMBERED:
                _RANKS.popitem(last=False)
        _RANKS.move_to_end(key)
        return _RANKS[key]


#: Up to which order this process writes no batches of a job any more, by the key of the job, and the orders
#: that its threads are writing.
_FENCED: dict[bytes, int] = {}
_WRITING: set[tuple[bytes, int]] = set()
_DOOR = threading.Condition()


@contextmanager
def _writing(key: bytes, serial: int) -> Iterator[None]:
    """Let an order write that was not fenced off."""
    with _DOOR:
        if serial <= _FENCED.get(key, 0):
            raise RuntimeError("this batch is made elsewhere: its worker was named as a suspect")
        _WRITING.add((key, serial))
    try:
        yield
    finally:
        with _DOOR:
            _WRITING.remove((key, serial))
            _DOOR.notify_all()


def _fence(key: bytes, serial: int) -> None:
    with _DOOR:
        _FENCED[key] = last = max(serial, _FENCED.get(key, 0))
        _DOOR.wait_for(lambda: not any(one == key and order <= last for one, order in _WRITING), _PATIENCE)


async def fence(key: bytes, serial: int) -> None:
    """Have this process write nothing more of the orders of a job up to some serial number.

    A thread cannot be stopped: one that is still at a batch would write it over that of who made it again.

    Parameters
    ----------
    key : bytes
        Digest of the pickled `Job`.
    serial : int
        Of the last order that is not wanted any more. When this returns, none of them writes.
    """
    await asyncio.to_thread(_fence, key, serial)


def make_samples(
    job: Job, guard: GenerationRecoveryGuard, batch: Any, numbers: range
) -> tuple[list[Sample | SampleUnavailable], int]:
    """Make samples one by one, until one is fatal; return them, and how many attempts were repeated."""
    made: list[Sample | SampleUnavailable] = []
    attempts = 0
    for k, number in enumerate(numbers):

        def trip(k: int = k) -> Sample | SampleUnavailable:
            nonlocal attempts
            attempts += 1
            asked = one_of(batch, k, job.dim)
            value = contained(job.produce, asked)
            if isinstance(value, SampleUnavailable):
                return value  # it says itself that there is none
            return checked_sample(job.outputs, value, asked)

        made.append(guard.run(trip, description=f"sample {number}"))
        if isinstance(made[-1], SampleUnavailable) and made[-1].fatal:
            break
    return made, attempts - len(made)


def make_batch(blob: bytes, key: bytes, batch: int, serial: int, inputs: Any, writes: bool) -> bytes:
    """Make a batch and write it; the task that runs on a worker.

    Parameters
    ----------
    blob, key : bytes
        The pickled `Job`, and its digest.
    batch : int
        Number of the batch.
    serial : int
        Number of the order; see `fence`.
    inputs : object
        What `Inputs.batch` returned.
    writes : bool
        Whether it is written, or made for comparison only.

    Returns
    -------
    bytes
        A `Made`.

    Raises
    ------
    CorruptionError
        If the job is not what was sent.
    """
    began, rank = time.perf_counter(), _rank_of(blob, key)
    numbers = rank.layout.samples_of(batch)
    given = inputs() if callable(inputs) else inputs
    # An audit counts no failures: those that its rank has to answer for are in batches of its own.
    guard = rank.guard if writes else rank.job.spare_guard(len(numbers))
    if writes and guard.consecutive_failures >= guard.max_consecutive_failures:
        # A batch that came to a rank before the driver heard that it had stopped.
        stopped = SampleUnavailable(f"rank {_where()[1]} had stopped", fatal=True)
        return rank.finish(batch, [stopped], 0, True, _where(), began).to_bytes()
    samples, retries = make_samples(rank.job, guard, given, numbers)
    with _writing(key, serial) if writes else nullcontext():
        return rank.finish(batch, samples, retries, writes, _where(), began).to_bytes()


def lose_batch(blob: bytes, key: bytes, batch: int, serial: int, why: str) -> bytes:
    """Write a batch of which nothing could be had, since nobody came back who tried; a task."""
    began, rank = time.perf_counter(), _rank_of(blob, key)
    lost = [SampleUnavailable(f"sample {n}: {why}", True) for n in rank.layout.samples_of(batch)]
    with _writing(key, serial):
        return rank.finish(batch, lost, 0, True, _where(), began).to_bytes()


def _digest(sample: Sample) -> bytes:
    """Return a digest of a sample's arrays."""
    return hashlib.sha256(b"".join(checksum(sample[name]) for name in sorted(sample))).digest()


def _explained(number: int, one: Sample | SampleUnavailable) -> Sample | SampleUnavailable:
    """Return it with a reason that is there, that can be stored as UTF-8, and that has an end."""
    if not isinstance(one, SampleUnavailable):
        return one
    reason = str(one.reason or f"sample {number}: unavailable, no reason given")[:_REASON]
    return replace(one, reason=reason.encode("utf-8", "backslashreplace").decode()[:_REASON])


def _where() -> tuple[str, str]:
    """Return the address of this worker and the failure domain that it belongs to."""
    worker = get_worker()
    plugin: Any = worker.plugins[NAME]
    return worker.address, plugin.executor.domain
