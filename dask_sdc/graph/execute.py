"""What runs on a worker: one batch of shards, from its source to sealed statistics.

`ShardExecutor.run` is a short pipeline of overridable steps (receive, load, update, seal,
finish). Fault injection subclasses it; there is no other way in.
"""

from __future__ import annotations

import inspect
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import cloudpickle
import numpy as np
import xxhash

from dask_sdc.evidence.codec import digest
from dask_sdc.evidence.fold import first_nonfinite
from dask_sdc.evidence.seal import SealedBatch, SealedStatistic, failed_statistic, seal_batch, seal_statistic
from dask_sdc.exceptions import EncodeError, ShardError
from dask_sdc.graph.block import Block
from dask_sdc.statistics.base import ShardInfo, State, Statistic
from dask_sdc.statistics.kernels.cuda import device_failure, out_of_memory, release_unused

if TYPE_CHECKING:
    from dask_sdc.graph.sources import Loader, Reader

T = TypeVar("T")

#: Statistics kept unpickled per executor, by digest of their blob.
_CACHED_STATISTICS = 8


def contained(work: Callable[..., T], *args: Any) -> T:
    """Run code of a user on a worker; a call for an exit fails there, and does not take the worker along.

    Raises
    ------
    RuntimeError
        For what is no `Exception`, as SystemExit, and for StopIteration, which no future takes.
    """
    try:
        return work(*args)
    except StopIteration as error:
        raise RuntimeError(f"StopIteration: {error}") from error
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


class BatchContext(NamedTuple):
    """Who asks for a batch: the round, the role, the attempt and the shards."""

    round: int
    role: str
    attempt: int
    shard_ids: tuple[int, ...]


class ShardContext(NamedTuple):
    """The same for one shard."""

    round: int
    role: str
    attempt: int
    shard_id: int


@dataclass(frozen=True)
class Assignment:
    """One batch as it travels to a worker (pickled into an opaque, digested blob).

    Parameters
    ----------
    context : BatchContext
        Round, role, attempt and shards.
    domain : str or None
        The failure domain that must run it; None for any that is not ``apart_from``.
    apart_from : tuple of str
        Domains that must not run it.
    loader : Loader
        Re-reads the shards from their source.
    info : ShardInfo
        Sample shape, dtypes and seed; ``shard_id`` is filled in per shard.
    """

    context: BatchContext
    domain: str | None
    apart_from: tuple[str, ...]
    loader: Loader
    info: ShardInfo


@dataclass(frozen=True)
class Blob:
    """Pickled bytes with the digest that is checked before they are unpickled."""

    data: bytes
    digest: bytes

    @classmethod
    def of(cls, value: Any) -> Blob:
        """Pickle a value; the same value gives the same bytes within one driver."""
        data = cloudpickle.dumps(value)
        return cls(data, digest(data))


def accepted_columns(statistic: Statistic) -> frozenset[str]:
    """Return which of ``weights`` and ``target`` the statistic's update takes."""
    parameters = inspect.signature(statistic.update).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return frozenset({"weights", "target"})
    return frozenset({"weights", "target"} & parameters.keys())


def input_digest(block: Block) -> bytes:
    """Return the xxh3_128 digest of a block's host bytes, b"" for device blocks."""
    hasher = xxhash.xxh3_128()
    for column in block:
        if column is None:
            continue
        if not isinstance(column, np.ndarray):
            return b""
        hasher.update(np.ascontiguousarray(column).reshape(-1).view(np.uint8).data)
    return hasher.digest()


class ShardExecutor:
    """Computes batches of shards on one worker.

    Parameters
    ----------
    domain : str
        Failure domain of this worker.
    worker : str
        Address of this worker.
    fingerprint : str
        Digest of the environment; equal fingerprints promise equal bits.
    """

    def __init__(self, domain: str, worker: str, fingerprint: str) -> None:
        self.domain = domain
        self.worker = worker
        self.fingerprint = fingerprint
        self._statistics: OrderedDict[bytes, Statistic] = OrderedDict()

    # -- the pipeline ------------------------------------------------------------------

    def run(self, statistic: Blob, batch: Blob, dependencies: Sequence[Any]) -> bytes:
        """Compute one batch and return its frame (canonical bytes, see `seal_batch`)."""
        if digest(batch.data) != batch.digest:
            return self._frame(BatchContext(-1, "primary", -1, ()), b"", "garbled", [])
        assignment: Assignment = pickle.loads(batch.data)
        context = assignment.context
        received = self.receive(statistic.data, context)
        model_digest = digest(received)
        records: list[SealedStatistic] = []
        if model_digest != statistic.digest:
            status = "garbled"
        elif not self._placed(assignment):
            status = "misplaced"
        else:
            status = "ok"
            declared = self._statistic(received, model_digest)
            records = self.records(declared, assignment, dependencies)
        return self.finish(self._frame(context, model_digest, status, records), context)

    def receive(self, blob: bytes, context: BatchContext) -> bytes:
        """Take delivery of the statistic (with its model) before its digest is checked."""
        return blob

    def records(
        self, statistic: Statistic, assignment: Assignment, dependencies: Sequence[Any]
    ) -> list[SealedStatistic]:
        """Return one sealed record per shard of the assignment."""
        batch = assignment.context
        with assignment.loader.reader(dependencies) as reader:
            return [
                self.record(
                    statistic,
                    assignment.info,
                    reader,
                    ShardContext(batch.round, batch.role, batch.attempt, shard_id),
                )
                for shard_id in batch.shard_ids
            ]

    def record(
        self, statistic: Statistic, info: ShardInfo, reader: Reader, context: ShardContext
    ) -> SealedStatistic:
        """Load, update and seal one shard; a failure becomes an ``error`` record.

        Where a device has no memory left, what nobody uses is given back, and the shard tried once more.
        """
        start = time.perf_counter()
        info = replace(info, shard_id=context.shard_id)
        try:
            try:
                return self._computed(statistic, info, reader, context, start)
            except Exception as exc:
                if not out_of_memory(exc):
                    raise
            # Not within the handler, whose traceback holds what is to be given back.
            release_unused()
            return self._computed(statistic, info, reader, context, start)
        except BaseException as exc:
            # A worker loses the task of whoever calls for an exit in one of its threads.
            failure = device_failure(exc) or exc
            kind = type(failure).__name__
            note = str(failure) if isinstance(failure, ShardError) else f"{kind}: {failure}"
            return failed_statistic(context.shard_id, (kind, note), elapsed=time.perf_counter() - start)

    def _computed(
        self, statistic: Statistic, info: ShardInfo, reader: Reader, context: ShardContext, start: float
    ) -> SealedStatistic:
        block = self.load(reader, context)
        state = self.update(statistic, info, block, context)
        return self.seal(statistic, state, block, context, start)

    def load(self, reader: Reader, context: ShardContext) -> Block:
        """Read the shard's block from its source; it is valid until the next load."""
        return reader.load(context.shard_id)

    def update(self, statistic: Statistic, info: ShardInfo, block: Block, context: ShardContext) -> State:
        """Return the statistic's state of one block."""
        columns = {k: v for k, v in block._asdict().items() if k != "x" and v is not None}
        return statistic.update(statistic.init(info), block.x, **columns)

    def seal(
        self,
        statistic: Statistic,
        state: State,
        block: Block,
        context: ShardContext,
        start: float,
    ) -> SealedStatistic:
        """Encode and digest a state, after the checks that every shard gets for free."""
        notes = tuple(self.violations(statistic, state))
        try:
            return seal_statistic(
                context.shard_id,
                state,
                rows=int(block.x.shape[0]),
                status="violation" if notes else "ok",
                input_digest=input_digest(block) if statistic.hash_input else b"",
                elapsed=time.perf_counter() - start,
                notes=notes,
            )
        except EncodeError as exc:
            raise ShardError(
                f"shard {context.shard_id}: {type(statistic).__name__} returned a state that "
                f"cannot be sealed: {exc}",
                shard_id=context.shard_id,
            ) from exc

    def violations(self, statistic: Statistic, state: State) -> list[str]:
        """Return what is wrong with a state: non-finite values, broken invariants."""
        if statistic.finite:
            path = first_nonfinite(state)
            if path is not None:
                return [f"non-finite value at {path or 'the state itself'}"]
        return list(statistic.invariants(state))

    def finish(self, frame: bytes, context: BatchContext) -> bytes:
        """Hand over the frame of the whole batch."""
        return frame

    # -- beside the pipeline -----------------------------------------------------------

    def warm(self, statistic: Blob, info: ShardInfo, columns: frozenset[str]) -> float:
        """Compile what a shard of this kind will need; return the seconds it took.

        Runs the kernels on two synthetic samples. What they raise is left to the first real
        shard, which names itself.
        """
        start = time.perf_counter()
        try:
            declared = self._statistic(statistic.data, statistic.digest)
            block = _synthetic(info, columns)
            context = ShardContext(-1, "warm", 0, 0)
            first, second = (self.update(declared, info, block, context) for _ in range(2))
            declared.combine(first, second)
        except BaseException:
            pass
        return time.perf_counter() - start

    def _placed(self, assignment: Assignment) -> bool:
        wanted = assignment.domain in (None, self.domain)
        return wanted and self.domain not in assignment.apart_from

    def _statistic(self, blob: bytes, blob_digest: bytes) -> Statistic:
        cached = self._statistics.get(blob_digest)
        if cached is None:
            cached = self._statistics[blob_digest] = pickle.loads(blob)
            while len(self._statistics) > _CACHED_STATISTICS:
                self._statistics.popitem(last=False)
        return cached

    def _frame(
        self,
        context: BatchContext,
        model_digest: bytes,
        status: str,
        records: list[SealedStatistic],
    ) -> bytes:
        return seal_batch(
            SealedBatch(
                context.round,
                context.role,
                context.attempt,
                self.domain,
                self.worker,
                self.fingerprint,
                model_digest,
                status,
                tuple(records),
            )
        )


def _synthetic(info: ShardInfo, columns: frozenset[str]) -> Block:
    rng = np.random.default_rng(0)
    x = (rng.random((2, *info.shape)) * 8).astype(info.dtype)
    weights = np.ones(2) if "weights" in columns else None
    target = np.ones((2, *(info.target_shape or ()))) if "target" in columns else None
    return Block(x, weights, target)
