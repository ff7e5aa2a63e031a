"""Task graphs of audited batches: one layer per role and placement.

Low-level fusion drops annotations, so nothing here is ever fused: every role has a
`MaterializedLayer` of single tasks with its own resource restrictions, and role, round and
attempt are part of every key, since equal keys are never computed twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask._task_spec import List, Task, TaskRef
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.typing import Key

from dask_sdc.graph.execute import Blob

#: Signature of `run_batch`: what a batch task calls on its worker.
RunBatch = Callable[[bytes, bytes, bytes, bytes, Sequence[Any]], bytes]


@dataclass(frozen=True)
class BatchTask:
    """One batch as a task.

    Parameters
    ----------
    key : str
        Unique key; begins with ``sdc-`` and names role, round and attempt.
    role : str
        Role, which names the layer.
    statistic, batch : Blob
        What travels, opaque to the scheduler.
    dependencies : sequence of Dask keys
        Results that the batch reads.
    restrictions : mapping of str to float
        Resources (labels of quantity 0) that a worker must advertise.
    """

    key: str
    role: str
    statistic: Blob
    batch: Blob
    dependencies: Sequence[Key]
    restrictions: Mapping[str, float]


def batch_graph(tasks: Iterable[BatchTask], run: RunBatch, name: str) -> HighLevelGraph:
    """Return the graph of some batches.

    Parameters
    ----------
    tasks : iterable of BatchTask
    run : callable
        Called as ``run(statistic, its digest, batch, its digest, dependencies)``.
    name : str
        Unique prefix for the names of the layers.
    """
    groups: defaultdict[tuple[str, tuple[tuple[str, float], ...]], dict[Any, Task]]
    groups = defaultdict(dict)
    for task in tasks:
        where = tuple(sorted(task.restrictions.items()))
        groups[task.role, where][task.key] = _node(task, run)
    layers = {
        f"{name}-{role}-{index}": MaterializedLayer(
            nodes, annotations={"resources": dict(where)} if where else None
        )
        for index, ((role, where), nodes) in enumerate(groups.items())
    }
    return HighLevelGraph(layers, {layer: set() for layer in layers})


def _node(task: BatchTask, run: RunBatch) -> Task:
    return Task(
        task.key,
        run,
        task.statistic.data,
        task.statistic.digest,
        task.batch.data,
        task.batch.digest,
        List(*[TaskRef(key) for key in task.dependencies]),
    )
