"""A whole audited accumulation as one lazy graph, to look at or to embed in other Dask work.

Primaries carry the label of their domain, audits the label of being apart from it. The last task
checks every digest, compares every audit with its primary and folds in canonical order. It can
detect but not heal: for a witness, quarantine and recomputation there is `Auditor.accumulate`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from dask._task_spec import List, Task, TaskRef
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.typing import Key

from dask_sdc.evidence.codec import digest
from dask_sdc.evidence.envelope import compare_payloads
from dask_sdc.evidence.fold import fold_sealed
from dask_sdc.evidence.seal import SealedBatch, SealedStatistic, open_batch
from dask_sdc.exceptions import CorruptionError, ShardError
from dask_sdc.graph.execute import Assignment, BatchContext, Blob
from dask_sdc.graph.layers import BatchTask, RunBatch, batch_graph
from dask_sdc.graph.sources import Source
from dask_sdc.statistics.base import ShardInfo, Statistic


@dataclass(frozen=True)
class Planned:
    """A batch of primaries with the audits drawn from it, and where both may run.

    Parameters
    ----------
    shard_ids : tuple of int
    restrictions : mapping of str to float
        Labels for the primaries.
    audited : tuple of int
        Shards that are computed twice; may be empty.
    audit_restrictions : mapping of str to float
        Labels for the audits.
    """

    shard_ids: tuple[int, ...]
    restrictions: Mapping[str, float]
    audited: tuple[int, ...] = ()
    audit_restrictions: Mapping[str, float] | None = None


def audited_graph(
    statistic: Statistic,
    source: Source,
    info: ShardInfo,
    plan: Sequence[Planned],
    run: RunBatch,
    *,
    name: str,
    rtol: float,
    atol: float,
) -> Delayed:
    """Return the lazy result of an audited accumulation.

    Parameters
    ----------
    statistic : Statistic
    source : Source
    info : ShardInfo
    plan : sequence of Planned
        Covers every shard once.
    run : callable
        See `batch_graph`.
    name : str
        Unique prefix of all keys.
    rtol, atol : float
        Tolerances of the comparison across environments.

    Returns
    -------
    dask.delayed.Delayed
        Computes to what ``statistic.finalize`` returns.
    """
    blob = Blob.of(statistic)

    def task(index: int, role: str, shard_ids: tuple[int, ...], where: Mapping[str, float]) -> BatchTask:
        assignment = Assignment(BatchContext(0, role, 0, shard_ids), None, (), source.batch(shard_ids), info)
        key = f"{name}-{role}-{index}"
        return BatchTask(key, role, blob, Blob.of(assignment), source.dependencies(shard_ids), where)

    primaries = [task(i, "primary", p.shard_ids, p.restrictions) for i, p in enumerate(plan)]
    audits = [
        task(i, "audit", p.audited, p.audit_restrictions or {}) for i, p in enumerate(plan) if p.audited
    ]
    graph = batch_graph([*primaries, *audits], run, name)
    last = f"{name}-result"
    keys = [List(*[TaskRef(t.key) for t in tasks]) for tasks in (primaries, audits)]
    node = Task(last, finish, blob.data, blob.digest, *keys, rtol, atol)
    layers: dict[str, Any] = {**graph.layers, last: MaterializedLayer({last: node})}
    edges: dict[str, set[str]] = {**graph.dependencies, last: set(graph.layers)}
    held = {key for t in (*primaries, *audits) for key in t.dependencies}
    if held:
        blocks = f"{name}-blocks"
        layers[blocks], edges[blocks] = MaterializedLayer(_futures(source, held)), set()
        for layer in graph.layers:
            edges[layer] = {blocks}
    return Delayed(last, HighLevelGraph(layers, edges))


def _futures(source: Source, held: Set[Key]) -> dict[Key, Any]:
    """Return the futures of persisted blocks, so that the graph keeps them alive."""
    graphs = [dict(array.__dask_graph__()) for array in source.collections()]
    return {key: node for nodes in graphs for key, node in nodes.items() if key in held}


def finish(
    statistic: bytes,
    statistic_digest: bytes,
    primaries: Sequence[bytes],
    audits: Sequence[bytes],
    rtol: float,
    atol: float,
) -> Any:
    """Compare the audits, fold the primaries, finalize.

    Raises
    ------
    CorruptionError
        If a digest does not fit or an audit disagrees with its primary.
    ShardError
        If a shard could not be computed.
    """
    if digest(statistic) != statistic_digest:
        raise CorruptionError("the statistic arrived garbled at the fold")
    declared: Statistic = pickle.loads(statistic)
    computed = _records(primaries)
    for shard_id, (audit, batch) in _records(audits).items():
        primary, primary_batch = computed[shard_id]
        _check(declared, primary, primary_batch, audit, batch, rtol, atol)
    state = fold_sealed(declared, [record for record, _ in computed.values()])
    return declared.finalize(state)


def _records(frames: Sequence[bytes]) -> dict[int, tuple[SealedStatistic, SealedBatch]]:
    found = {}
    for batch in map(open_batch, frames):
        if batch.status != "ok":
            raise CorruptionError(
                f"batch of {batch.role}: expected it to run as planned, it was {batch.status}",
                domain=batch.domain,
                worker=batch.worker,
            )
        found.update({record.shard_id: (record, batch) for record in batch.records})
    return found


def _check(
    statistic: Statistic,
    primary: SealedStatistic,
    primary_batch: SealedBatch,
    audit: SealedStatistic,
    audit_batch: SealedBatch,
    rtol: float,
    atol: float,
) -> None:
    where = f"shard {audit.shard_id}, domains {primary_batch.domain} and {audit_batch.domain}"
    if primary_batch.domain == audit_batch.domain:
        return  # not apart after all: says nothing, and is not counted as agreement
    for record in (primary, audit):
        if record.status == "error":
            raise ShardError(f"{where}: {'; '.join(record.notes)}", shard_id=record.shard_id)
    same_place = primary_batch.fingerprint == audit_batch.fingerprint
    comparison = compare_payloads(primary.payload, audit.payload, rtol=rtol, atol=atol, statistic=statistic)
    agreed = comparison.equal if same_place else comparison.within
    if not (agreed and primary.intact and audit.intact):
        raise CorruptionError(
            f"{where}: expected equal results, got {comparison.reason or 'different bits'} "
            f"(largest error {comparison.max_abs_error:.3g}); Auditor.accumulate can tell who is wrong",
            shard_id=audit.shard_id,
        )
