"""Sources made of Dask arrays: lazy graphs that travel with a batch, and persisted blocks."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import getitem
from typing import Any

import cloudpickle
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import Task, TaskRef
from dask.highlevelgraph import HighLevelGraph
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError, RechunkWarning, ShardError
from dask_sdc.graph.sources import make_source
from tests.graph.source_blocks import column, random_array, run_loader
from tests.graph.source_strategies import cuts


def scaled(block: Any, block_info: Any = None) -> Any:
    return block * block_info[None]["chunk-location"][0]


OPERATIONS: list[Callable[[da.Array], da.Array]] = [
    lambda x: x,
    lambda x: x + 1,
    lambda x: x[::-1],
    lambda x: x[1:],
    lambda x: da.concatenate([x, x * 2]),
    lambda x: x - x.mean(axis=0),
    lambda x: x.rechunk((3, x.shape[1])),
    lambda x: (x.T @ x)[:, :1] + x[0],
    lambda x: da.overlap.map_overlap(np.abs, x, depth={0: 1, 1: 0}, boundary="reflect", allow_rechunk=True),
    lambda x: x.map_blocks(scaled, dtype=x.dtype),
    lambda x: da.where(x > 0, x, da.flip(x, axis=0)),
    lambda x: x.reshape((-1, 1, x.shape[1])),
]


@given(st.data(), st.integers(2, 24))
def test_random_graphs_give_what_dask_computes(data: st.DataObject, n: int) -> None:
    array = random_array((n, 2), "f8")
    x = da.from_array(array, chunks=((*(c for c in data.draw(cuts(n)) if c),), 2))
    for operation in data.draw(st.lists(st.sampled_from(OPERATIONS[:-1]), max_size=3)):
        if x.shape[0] > 1:
            x = operation(x)
    x = data.draw(st.sampled_from([OPERATIONS[0], OPERATIONS[-1]]))(x)
    x = x.rechunk(dict.fromkeys(range(1, x.ndim), -1))
    assert column(make_source(x)).tobytes() == x.compute(scheduler="sync").tobytes()


@given(st.data(), st.integers(1, 30))
def test_any_chunking_of_the_sample_axis(data: st.DataObject, n: int) -> None:
    sizes, other = data.draw(cuts(n)), data.draw(cuts(n))
    array, w = random_array((n, 3), "f4"), np.arange(float(n))
    x = da.from_array(array, chunks=(tuple(sizes), 3))
    lazy = da.from_array(w, chunks=(tuple(other),))
    with pytest.warns(RechunkWarning) if lazy.chunks[0] != x.chunks[0] else nullcontext():
        source = make_source(x, weights=lazy, target=w)
    assert source.rows == tuple(sizes)
    assert column(source).tobytes() == array.tobytes()
    assert column(source, "weights").tobytes() == w.tobytes() == column(source, "target").tobytes()


def test_other_axes_are_rechunked_with_a_warning() -> None:
    array = random_array((20, 6, 2), "f8")
    with pytest.warns(RechunkWarning, match=r"\(5, 4, 2\) to \(5, 6, 2\)") as record:
        source = make_source(da.from_array(array, chunks=(5, 4, 2)))
    assert record[0].filename == __file__
    assert source.warnings == (str(record[0].message),)
    assert source.rows == (5, 5, 5, 5)
    assert column(source).tobytes() == array.tobytes()


def test_rechunking_does_not_make_huge_blocks() -> None:
    x = da.zeros((20_000, 20_000), chunks=(5_000, 500))
    with pytest.warns(RechunkWarning):
        source = make_source(x)
    assert max(source.rows) * 160_000 <= 2**27
    assert sum(source.rows) == 20_000


def test_wrong_declarations_name_the_shard() -> None:
    def double_third(block: Any, block_info: Any = None) -> Any:
        return np.concatenate([block, block]) if block_info[None]["chunk-location"][0] == 2 else block

    x = da.ones((12, 2), chunks=(3, 2)).map_blocks(double_third, meta=np.ones((0, 0)))
    reader = make_source(x).batch(range(4)).reader()
    with pytest.raises(ShardError, match=r"x of shard 2: expected shape \(3, 2\), got \(6, 2\)") as caught:
        reader.load(2)
    assert caught.value.shard_id == 2
    assert reader.load(3).x.shape == (3, 2)

    x = da.ones((12, 2), chunks=(3, 2)).map_blocks(lambda b: b.astype("f4"), meta=np.ones((0, 0)))
    with pytest.raises(ShardError, match="x of shard 1: expected dtype float64, got float32"):
        make_source(x).batch([1]).load(1)

    x = da.ones((12, 2), chunks=(3, 2)).map_blocks(lambda b: b.tolist(), meta=np.ones((0, 0)))
    with pytest.raises(ShardError, match=r"expected a NumPy or CuPy array, got builtins\.list"):
        make_source(x).batch([1]).load(1)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_lazy_weights_are_checked_at_their_shard(bad: float) -> None:
    w = np.ones(12)
    w[7] = bad
    reader = make_source(da.ones((12, 2), chunks=(3, 2)), weights=da.from_array(w, chunks=3)).batch(range(4))
    assert reader.load(1).weights.tolist() == [1.0] * 3
    with pytest.raises(ShardError, match=f"weights of shard 2.*{bad} at row 1"):
        reader.load(2)


def failing(block: Any, block_info: Any = None) -> Any:
    if block_info[None]["chunk-location"][0] == 1:
        raise OSError("disk on fire")
    return block


def test_a_failure_belongs_to_its_shard_alone() -> None:
    x = da.ones((12, 2), chunks=(3, 2)).map_blocks(failing, meta=np.ones((0, 0)))
    with make_source(x).batch(range(4)).reader() as reader:
        for shard_id in (0, 2, 3):
            assert reader.load(shard_id).x.sum() == 6
        with pytest.raises(ShardError, match="shard 1 cannot be loaded: OSError: disk on fire") as caught:
            reader.load(1)
    assert caught.value.shard_id == 1
    assert isinstance(caught.value.__cause__, OSError)


def counted(calls: Counter[Any], rows: int, key: Any) -> np.ndarray[Any, Any]:
    calls[key] += 1
    return np.full((rows, 2), float(len(calls)))


def from_tasks(tasks: Sequence[Task], name: str, rows: Sequence[int]) -> da.Array:
    graph = HighLevelGraph.from_collections(name, {task.key: task for task in tasks})
    return da.Array(graph, name, (tuple(rows), (2,)), meta=np.ones((0, 0)))


def pairs(calls: Counter[Any], n: int) -> da.Array:
    """Return 2n shards, each one half of a block that its neighbour needs too."""
    big = [Task(("big", i), counted, calls, 4, ("big", i)) for i in range(n)]
    small = [
        Task(("half", 2 * i + j, 0), lambda b, j: b[2 * j : 2 * j + 2], TaskRef(("big", i)), j)
        for i in range(n)
        for j in (0, 1)
    ]
    return from_tasks([*big, *small], "half", [2] * (2 * n))


def test_what_shards_share_is_computed_once_a_batch() -> None:
    calls: Counter[Any] = Counter()
    source = make_source(pairs(calls, 3))
    for _ in source.batch(range(6)).blocks():
        pass
    assert calls == {("big", i): 1 for i in range(3)}
    for _ in source.batch([0, 2, 4]).blocks():
        pass
    assert calls == {("big", i): 2 for i in range(3)}


def test_a_shard_can_be_loaded_twice() -> None:
    calls: Counter[Any] = Counter()
    with make_source(pairs(calls, 1)).batch(range(2)).reader() as reader:
        first, again = reader.load(0).x, reader.load(0).x
        reader.load(1)
        assert calls == {("big", 0): 1}
        reader.load(1)
        assert calls == {("big", 0): 2}
    np.testing.assert_array_equal(first, again)


class Tracked(np.ndarray):
    """An array that can be weakly referenced and counted."""


def test_intermediates_are_freed_as_soon_as_nothing_needs_them() -> None:
    alive: set[Any] = set()
    peak: list[int] = []

    def make(key: Any, *previous: Any) -> Any:
        array = np.zeros((2, 2)).view(Tracked)
        weakref.finalize(array, alive.discard, key)
        alive.add(key)
        peak.append(len(alive))
        return array

    tasks = []
    for k in range(3):
        last = TaskRef(("seed", k))
        tasks.append(Task(last.key, make, last.key))
        for i in range(6):  # diamonds, which Dask does not fuse: our executor is under test
            a, b, c = (TaskRef((name, k, i)) for name in "abc")
            tasks += [Task(a.key, make, a.key, last), Task(b.key, make, b.key, last)]
            tasks.append(Task(c.key, make, c.key, a, b))
            last = c
        tasks.append(Task(("end", k, 0), lambda c: np.array(c) + 1, last))
    loader = make_source(from_tasks(tasks, "end", [2] * 3)).batch(range(3))
    assert len(loader.parts[0].nodes) >= 3 * 18
    for _, block in loader.blocks():
        assert block.x.sum() == 4
        assert not alive
    assert max(peak) == 3


def test_shared_values_are_freed_after_their_last_shard() -> None:
    alive: set[str] = set()

    def make() -> Any:
        array = np.zeros((4, 2)).view(Tracked)
        weakref.finalize(array, alive.discard, "base")
        alive.add("base")
        return array

    def cut(base: Any, k: int) -> Any:
        if k == 2:
            raise ValueError("no")
        return np.array(base[:2])

    tasks = [Task("base", make)] + [Task(("cut", k, 0), cut, TaskRef("base"), k) for k in range(4)]
    reader = make_source(from_tasks(tasks, "cut", [2] * 4)).batch([0, 1, 2]).reader()
    reader.load(0)
    reader.load(1)
    assert alive == {"base"}
    with pytest.raises(ShardError, match="no") as caught:
        reader.load(2)
    caught.value.__cause__.__traceback__ = None  # type: ignore[union-attr]
    del caught
    assert not alive


def test_only_the_frontier_of_shared_work_is_kept() -> None:
    """Of a chain that all shards share only its end is kept between them."""
    alive: set[int] = set()

    def make(previous: Any, number: int) -> Any:
        array = np.zeros((4, 2)).view(Tracked)
        weakref.finalize(array, alive.discard, number)
        alive.add(number)
        return array

    tasks = [Task(("c", i), make, TaskRef(("c", i - 1)) if i else None, i) for i in range(4)]
    tasks += [Task(("cut", k, 0), lambda b: np.array(b[:2]), TaskRef(("c", 3))) for k in range(3)]
    with make_source(from_tasks(tasks, "cut", [2] * 3)).batch(range(3)).reader() as reader:
        reader.load(0)
        assert len(alive) == 1
        reader.load(1)
        assert len(alive) == 1
    assert not alive


@pytest.mark.parametrize(
    ("array", "duplication"),
    [
        (da.random.default_rng(0).normal(size=(40, 2), chunks=(4, 2)), 1.0),
        (da.from_array(np.ones((40, 2)), chunks=(4, 2)).rechunk((10, 2)), 1.0),
        (da.random.default_rng(0).normal(size=(40, 2), chunks=(20, 2)).rechunk((4, 2)), 5.0),
    ],
)
def test_duplication_counts_work_that_is_repeated(array: da.Array, duplication: float) -> None:
    source = make_source(array)
    assert source.shared is (duplication > 1.5)
    if source.shared:
        assert 1.5 < source.duplication <= duplication
    else:
        assert source.duplication == duplication


@given(n=st.integers(1, 8), readers=st.integers(1, 8))
def test_duplication_against_a_direct_count(n: int, readers: int) -> None:
    """Every shard has one task of its own; the first ``readers`` of them share one more."""
    readers = min(n, readers)
    base = [Task("base", np.ones, (1, 2))]
    tasks = [Task(("s", k, 0), np.add, TaskRef("base") if k < readers else 1, 0) for k in range(n)]
    # a second dependent keeps Dask from fusing a single reader with the base
    exact = (n + readers) / (n + 1)
    source = make_source(from_tasks([*base, *tasks], "s", [1] * n))
    if readers > 1:
        assert source.shared is (exact > 1.5)
        assert source.duplication == exact or (source.shared and source.duplication > 1.5)
    else:
        assert source.duplication == 1.0


def test_work_that_all_shards_need_is_found_without_visiting_it_per_shard() -> None:
    x = da.random.default_rng(0).normal(size=(20_000, 2), chunks=(10, 2))
    source = make_source(x - x.mean(axis=0))
    assert source.shared


def test_long_light_chains_count_as_shared_work() -> None:
    """Each shard slices the one before: nothing to compute, but a closure of its own for every shard."""
    tasks = [Task(("v", 0, 0), getitem, np.ones((1, 2)), slice(None))]
    tasks += [Task(("v", k, 0), getitem, TaskRef(("v", k - 1, 0)), slice(None)) for k in range(1, 100)]
    assert make_source(from_tasks(tasks, "v", [1] * 100)).shared
    assert not make_source(from_tasks(tasks[:10], "v", [1] * 10)).shared


def test_dask_columns_share_one_graph() -> None:
    calls: Counter[Any] = Counter()
    both = pairs(calls, 2)
    source = make_source(both, weights=abs(both[:, 0]), target=both * 2)
    for _, block in source.batch(range(4)).blocks():
        np.testing.assert_array_equal(block.target, block.x * 2)
        np.testing.assert_array_equal(block.weights, block.x[:, 0])
    assert calls == {("big", i): 1 for i in range(2)}


def test_shared_literals_travel_once_a_batch() -> None:
    table = np.zeros(100_000)
    tasks = [Task(("t", k, 0), lambda t, k: t[2 * k : 2 * k + 4].reshape(2, 2), table, k) for k in range(20)]
    source = make_source(from_tasks(tasks, "t", [2] * 20))
    assert len(cloudpickle.dumps(source.batch(range(20)))) < 1.1 * table.nbytes


class FakeFuture(TaskRef):
    """A future that must not travel."""

    def __reduce__(self) -> Any:
        raise AssertionError("a future was pickled")


def test_futures_inside_tasks_become_dependencies() -> None:
    future = FakeFuture("elsewhere")
    tasks = [Task(("y", k, 0), np.multiply, future, k) for k in range(2)]
    tasks += [Task(("z", k, 0), np.add, 1, TaskRef(("y", k, 0))) for k in range(2)]  # fuses with y
    source = make_source(from_tasks(tasks, "z", [2, 2]))
    assert source.dependencies([1]) == ["elsewhere"]
    assert source.locality == (("elsewhere",), ("elsewhere",))
    loader = cloudpickle.loads(cloudpickle.dumps(source.batch([0, 1])))
    assert loader.dependencies == ("elsewhere",)
    blocks = dict(loader.blocks([np.full((2, 2), 3.0)]))
    assert [blocks[k].x[0, 0] for k in (0, 1)] == [1.0, 4.0]
    with pytest.raises(InputError, match="expected 1 dependency values, got 0"):
        loader.load(0)


class CupyLike:
    """Stands for a device array: only type, shape and dtype may be looked at."""

    __module__ = "cupy._core.core"
    shape = (3, 2)
    dtype = np.dtype("f8")


def test_device_blocks_pass_through_untouched() -> None:
    block = CupyLike()
    x = da.ones((6, 2), chunks=(3, 2)).map_blocks(lambda b: block, meta=np.ones((0, 0)))
    assert make_source(x).batch([1]).load(1).x is block


def test_persisted_and_mixed_arrays_on_a_cluster(cluster4: Client) -> None:
    lazy = da.random.default_rng(1).normal(size=(20, 2), chunks=(5, 2))
    expected = lazy.compute(scheduler="sync")
    x = lazy.persist()
    for array, reference in ((x, expected), (x * 2 - x[:1], expected * 2 - expected[:1])):
        source = make_source(array, weights=abs(lazy[:, 1]))
        held = {key for futures in source.locality for key in futures}
        assert held == set(map(tuple, da.core.flatten(x.__dask_keys__())))
        assert not source.shared
        for ids in ([0, 1], [3, 2]):
            loader = source.batch(ids)
            assert source.dependencies(ids) == list(loader.dependencies)
            futures = dict(x.dask)
            deps = [futures[key] for key in loader.dependencies]
            result = dict(cluster4.submit(run_loader, loader, *deps, pure=False).result(timeout=250))
            for k in ids:
                np.testing.assert_array_equal(result[k].x, reference[5 * k : 5 * k + 5])
                np.testing.assert_array_equal(result[k].weights, abs(expected[5 * k : 5 * k + 5, 1]))


def test_shared_source_is_persisted_and_replaced(cluster4: Client) -> None:
    lazy = da.random.default_rng(1).normal(size=(20, 2), chunks=(10, 2)).rechunk((5, 2))
    source = make_source(lazy, target=np.arange(20))
    assert source.shared
    (collection,) = source.collections()
    better = source.replace([cluster4.persist(collection)])
    assert not better.shared
    assert better.digest() == source.digest()
    loader = better.batch(range(4))
    assert len(loader.dependencies) == 4
    values = cluster4.gather([dict(better.collections()[0].dask)[key] for key in loader.dependencies])
    blocks = dict(loader.blocks(values))
    expected = lazy.compute(scheduler="sync")
    assert np.concatenate([blocks[k].x for k in range(4)]).tobytes() == expected.tobytes()
    assert np.concatenate([blocks[k].target for k in range(4)]).tolist() == list(range(20))
    with pytest.raises(InputError, match="chunks"):
        source.replace([da.ones((20, 2), chunks=(4, 2))])


def test_locally_persisted_arrays_travel_with_the_batch() -> None:
    x = da.random.default_rng(1).normal(size=(20, 2), chunks=(5, 2)).persist(scheduler="sync")
    source = make_source(x)
    assert source.dependencies(range(4)) == []
    assert column(source).tobytes() == x.compute(scheduler="sync").tobytes()


def test_digest_follows_how_the_array_was_made() -> None:
    def digest(value: float, chunk: int = 5) -> bytes:
        return make_source(da.full((20, 2), value, chunks=(chunk, 2))).digest()

    assert digest(1.0) == digest(1.0)
    assert len({digest(1.0), digest(2.0), digest(1.0, 4)}) == 3
