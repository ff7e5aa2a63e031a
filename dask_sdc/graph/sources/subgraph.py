"""Part of a Dask graph that a batch carries with it and runs inside one task.

An audit must read its shard again *from the source*, so it cannot depend on the primary's tasks:
the culled subgraph of a shard travels with the batch and is executed by a minimal, synchronous
executor. Nodes that several shards of a batch share are computed once, and every intermediate is
dropped as soon as nothing pending needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from operator import getitem
from typing import Any

from dask._task_spec import (
    Alias,
    DataNode,
    GraphNode,
    Task,
    TaskRef,
    _execute_subgraph,
    convert_legacy_graph,
)
from dask.array import Array, chunk
from dask.array.core import concatenate3
from dask.base import optimize
from dask.core import flatten
from dask.typing import Key

from dask_sdc.graph.sources.column import Load, Part

Nodes = Mapping[Key, GraphNode]

#: Functions that only move bytes: repeating them per shard costs less than keeping their results.
_LIGHT = frozenset({getitem, chunk.getitem, concatenate3})
#: Visited nodes per node of the graph above which counting stops: the graph is shared, whatever it does.
_MAX_VISITS = 16


@dataclass(frozen=True, eq=False)
class GraphPart(Part):
    """Subgraph of one batch for all columns that are Dask arrays.

    Parameters
    ----------
    names : tuple of str
        Columns.
    outputs : mapping of int to tuple of keys
        For each shard the key of each column, in the order of ``names``.
    nodes : mapping
        The graph; keys that are in no node are futures.
    futures : tuple of keys
        Those keys, in the order of first use.
    """

    names: tuple[str, ...]
    outputs: Mapping[int, tuple[Key, ...]]
    nodes: Nodes
    futures: tuple[Key, ...]

    @property
    def dependencies(self) -> tuple[Key, ...]:
        """Keys of the futures that the subgraph starts from."""
        return self.futures

    def open(self, deps: Mapping[Key, Any], stack: ExitStack) -> Load:
        """Return the executor's load function."""
        run = GraphRun(self, deps)
        stack.callback(run.close)
        return run.load


class GraphRun:
    """One execution of a `GraphPart`, shard by shard, on one thread."""

    def __init__(self, part: GraphPart, deps: Mapping[Key, Any]) -> None:
        self._part = part
        self._deps = deps
        self._closures = {k: topological(part.nodes, keys) for k, keys in part.outputs.items()}
        self._uses = Counter(key for closure in self._closures.values() for key in closure)
        self._frontier = self._find_frontier()
        self._held: dict[Key, Any] = {}

    def _find_frontier(self) -> frozenset[Key]:
        """Keys to keep between shards: shared, and read by something that is shared less.

        A key whose dependents all serve the very same shards is only ever reached through them.
        """
        nodes, uses = self._part.nodes, self._uses
        shared = {key for keys in self._part.outputs.values() for key in keys if uses[key] > 1}
        for key in uses:
            shared.update(d for d in nodes[key].dependencies if uses[d] > max(1, uses[key]))
        return frozenset(shared)

    def load(self, shard_id: int) -> dict[str, Any]:
        """Compute the blocks of one shard."""
        keys = self._part.outputs[shard_id]
        try:
            return dict(zip(self._part.names, self._evaluate(keys), strict=True))
        finally:
            self._release(shard_id)

    def _evaluate(self, keys: Sequence[Key]) -> list[Any]:
        nodes = self._part.nodes
        order = topological(nodes, keys, known=self._held)
        pending = Counter(d for key in order for d in nodes[key].dependencies)
        pending.update(keys)
        values: dict[Key, Any] = {}
        for key in order:
            needed = nodes[key].dependencies
            # GraphNode checks its arguments against *all* values that it is given: give it only its own
            values[key] = nodes[key]({d: self._value(d, values) for d in needed})
            if key in self._frontier and self._uses[key]:
                self._held[key] = values[key]
            pending.subtract(needed)
            for dep in needed:
                if not pending[dep]:
                    values.pop(dep, None)
        return [self._value(key, values) for key in keys]

    def _value(self, key: Key, values: Mapping[Key, Any]) -> Any:
        for known in (values, self._held):
            if key in known:
                return known[key]
        return self._deps[key]

    def _release(self, shard_id: int) -> None:
        """Drop what only this shard was still waiting for; loading it once more recomputes."""
        for key in self._closures.pop(shard_id, ()):
            self._uses[key] -= 1
            if not self._uses[key]:
                self._held.pop(key, None)

    def close(self) -> None:
        """Drop all values that are still held."""
        self._held.clear()


class Graph:
    """The optimised graph of all Dask columns of a source, client side."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.names = tuple(arrays)
        optimised = optimize(*arrays.values())
        merged: dict[Key, Any] = {}
        for array in optimised:
            merged.update(array.__dask_graph__())
        self.nodes: Nodes = {k: _plain(node) for k, node in convert_legacy_graph(merged).items()}
        columns = [tuple(_flat(array.__dask_keys__())) for array in optimised]
        self.outputs: list[tuple[Key, ...]] = list(zip(*columns, strict=True))
        needed = set(chain(*self.outputs, *(node.dependencies for node in self.nodes.values())))
        self._from_futures = not needed <= self.nodes.keys()

    def futures(self, shard_ids: Iterable[int]) -> list[Key]:
        """Return the keys of the futures that these shards start from, in the order of first use."""
        return self._cull(shard_ids)[1] if self._from_futures else []

    def part(self, shard_ids: Sequence[int]) -> GraphPart:
        """Return the culled subgraph of these shards."""
        nodes, futures = self._cull(shard_ids)
        outputs = {k: self.outputs[k] for k in shard_ids}
        return GraphPart(self.names, outputs, nodes, tuple(futures))

    def _cull(self, shard_ids: Iterable[int]) -> tuple[dict[Key, GraphNode], list[Key]]:
        wanted = [key for k in shard_ids for key in self.outputs[k]]
        order = topological(self.nodes, wanted)
        futures = dict.fromkeys(
            d for key in order for d in _ordered(self.nodes[key].dependencies) if d not in self.nodes
        )
        futures.update(dict.fromkeys(key for key in wanted if key not in self.nodes))
        return {key: self.nodes[key] for key in order}, list(futures)

    def duplication(self, limit: float) -> float:
        """Return how many times more work it is to compute each shard on its own.

        The sum over shards of the tasks in a shard's own graph, over the tasks of the whole graph.
        Tasks that only slice or concatenate do not count. Counting stops above ``limit``, so the
        value is a lower bound there; it costs O(limit x size of the graph).
        """
        heavy = {key for key, node in self.nodes.items() if _is_heavy(node)}
        total, visited = 0, 0
        for keys in self.outputs:
            closure = topological(self.nodes, keys)
            total += sum(key in heavy for key in closure)
            visited += len(closure)
            if total > limit * len(heavy) or visited > _MAX_VISITS * len(self.nodes):
                return max(limit, total / max(len(heavy), 1)) + 1.0
        return total / len(heavy) if heavy else 1.0


def topological(nodes: Nodes, keys: Iterable[Key], known: Mapping[Key, Any] | None = None) -> list[Key]:
    """Return the nodes that ``keys`` need, dependencies first, without descending below ``known``."""
    order: dict[Key, None] = {}
    stack = [(key, False) for key in reversed(list(keys))]
    while stack:
        key, expanded = stack.pop()
        if key in order or key not in nodes or (known is not None and key in known):
            continue
        if expanded:
            order[key] = None
        else:
            stack.append((key, True))
            stack.extend((d, False) for d in reversed(_ordered(nodes[key].dependencies)))
    return list(order)


def _flat(keys: Any) -> Iterator[Key]:
    """Flatten the nested lists in which an array gives its keys."""
    yield from flatten(keys)


def _ordered(keys: frozenset[Key]) -> list[Key]:
    """Return keys in an order that is the same in every process, which that of a set is not."""
    return sorted(keys, key=str) if len(keys) > 1 else list(keys)


def _plain(node: GraphNode) -> GraphNode:
    """Replace futures inside a task by references to their keys: a future must not be pickled."""
    if not isinstance(node, Task):
        return node
    if node.func is _execute_subgraph:
        inner = {key: _plain(child) for key, child in node.args[0].items()}
        return Task(node.key, node.func, inner, *node.args[1:], _data_producer=node.data_producer)
    arguments = (*node.args, *node.kwargs.values())
    futures = [a for a in arguments if isinstance(a, TaskRef) and type(a) is not TaskRef]
    subs: dict[Key, Any] = {future.key: TaskRef(future.key) for future in futures}
    return node.substitute(subs) if subs else node


def _is_heavy(node: GraphNode) -> bool:
    if isinstance(node, (Alias, DataNode)):
        return False
    if isinstance(node, Task) and node.func is _execute_subgraph:
        return any(_is_heavy(child) for child in node.args[0].values())
    return not isinstance(node, Task) or node.func not in _LIGHT
