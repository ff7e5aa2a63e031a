"""Batches and the end that all ranks agree on: behaviour C.4."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from dask_sdc.exceptions import GenerationFailed, InputError, InputTypeError, LeftoverKeys, RankLost
from dask_sdc.recovery import (
    METADATA_KEY,
    AllReduce,
    BatchRecoveryCoordinator,
    RecoveryMetadata,
    SingleProcess,
)

LOST = RecoveryMetadata(2, False, False, "")
FATAL = RecoveryMetadata(3, True, True, "sample 9: 3 attempts failed")


class Threads:
    """Ranks that are threads: the reference that has no cluster."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.given: list[tuple[int, ...]] = [()] * size
        self.ranks = [ThreadRank(self, rank) for rank in range(size)]


class ThreadRank:
    def __init__(self, group: Threads, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.size = len(group.given)

    def sum(self, values: Sequence[int]) -> tuple[int, ...]:
        self.group.given[self.rank] = tuple(values)
        self.group.barrier.wait()
        total = tuple(sum(column) for column in zip(*self.group.given, strict=True))
        self.group.barrier.wait()
        return total


class Broken:
    """An all-reduce that a rank is missing from."""

    rank, size = 1, 3

    def sum(self, values: Sequence[int]) -> tuple[int, ...]:
        raise RankLost("rank 2 did not come", ranks=[2])


def batch(metadata: Any = LOST, **more: Any) -> dict[str, Any]:
    return {"x": [1.0], METADATA_KEY: metadata, **more}


def outcome(coordinator: BatchRecoveryCoordinator) -> int | GenerationFailed:
    try:
        return coordinator.synchronize()
    except GenerationFailed as error:
        return error


# -- consume -----------------------------------------------------------------------------------


def test_the_metadata_are_taken_out_and_counted() -> None:
    coordinator = BatchRecoveryCoordinator("train")
    first, second, plain = batch(), batch(RecoveryMetadata(5, True)), {"x": [2.0]}
    for one in (first, second, plain):
        coordinator.consume(one)
    assert first == second == {"x": [1.0]} and plain == {"x": [2.0]}
    assert coordinator.local == RecoveryMetadata(7, True)
    assert coordinator.synchronize() == 7


@pytest.mark.parametrize("wrong", [None, {"failure_count": 1}, 3, "x", RecoveryMetadata])
def test_metadata_of_another_type_are_a_type_error(wrong: Any) -> None:
    coordinator = BatchRecoveryCoordinator("train")
    with pytest.raises(TypeError, match="train: expected RecoveryMetadata under '__recovery__', got a"):
        coordinator.consume(batch(wrong))
    assert coordinator.local == RecoveryMetadata()


@pytest.mark.parametrize("key", ["__index__", "__", "__loss"])
def test_a_left_over_internal_key_is_refused_before_anything_is_added(key: str) -> None:
    coordinator = BatchRecoveryCoordinator("train")
    with pytest.raises(RuntimeError, match="two underscores") as caught:
        coordinator.consume(batch(FATAL, **{key: 1}), synchronize=True)
    assert isinstance(caught.value, LeftoverKeys) and key in str(caught.value)
    assert coordinator.local == RecoveryMetadata()


def test_other_keys_are_the_users() -> None:
    coordinator = BatchRecoveryCoordinator("train")
    coordinator.consume({METADATA_KEY: LOST, "_x": 1, 3: 2, ("__a",): 3})
    assert coordinator.local == LOST


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (RecoveryMetadata(), []),
        (RecoveryMetadata(2), ["train: 2 samples of a batch are missing"]),
        (RecoveryMetadata(0, True), ["train: a batch has no sample left; an empty one stands in for it"]),
    ],
)
def test_failures_and_empty_batches_are_warned_of(
    caplog: pytest.LogCaptureFixture, metadata: RecoveryMetadata, expected: list[str]
) -> None:
    BatchRecoveryCoordinator("train").consume(batch(metadata))
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == expected


# -- synchronize -------------------------------------------------------------------------------


def test_it_starts_from_nothing_afterwards() -> None:
    coordinator = BatchRecoveryCoordinator("train")
    coordinator.consume(batch())
    assert [coordinator.synchronize(), coordinator.synchronize()] == [2, 0]


@pytest.mark.parametrize("all_reduce", [SingleProcess(), Broken()])
def test_it_is_reset_before_anything_can_fail(all_reduce: AllReduce) -> None:
    coordinator = BatchRecoveryCoordinator("train", all_reduce=all_reduce)
    with pytest.raises(GenerationFailed):
        coordinator.consume(batch(FATAL), synchronize=True)
    assert coordinator.local == RecoveryMetadata()


def run_ranks(given: Sequence[RecoveryMetadata]) -> list[int | GenerationFailed]:
    coordinators = [BatchRecoveryCoordinator("train", all_reduce=rank) for rank in Threads(len(given)).ranks]
    for coordinator, metadata in zip(coordinators, given, strict=True):
        coordinator.consume(batch(metadata))
    with ThreadPoolExecutor(len(given)) as threads:
        return list(threads.map(outcome, coordinators))


def test_failures_are_summed_over_ranks_and_rank_0_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert run_ranks([RecoveryMetadata(n) for n in (1, 0, 5)]) == [6, 6, 6]
    totals = [r.getMessage() for r in caplog.records if "ranks" in r.getMessage()]
    assert totals == ["train: 6 samples are missing on 3 ranks"]


def test_a_fatal_rank_raises_on_every_rank_and_its_error_only_where_it_is_known() -> None:
    outcomes = run_ranks([RecoveryMetadata(1), FATAL, RecoveryMetadata()])
    assert all(type(error) is GenerationFailed for error in outcomes)
    assert all("train: 1 of 3 ranks cannot go on; 4 samples failed" in str(error) for error in outcomes)
    assert [FATAL.error in str(error) for error in outcomes] == [False, True, False]
    assert [error.local_error for error in outcomes] == ["", FATAL.error, ""]  # type: ignore[union-attr]


def test_a_lost_rank_is_named_and_the_local_error_too() -> None:
    coordinator = BatchRecoveryCoordinator("train", all_reduce=Broken())
    coordinator.consume(batch(FATAL))
    with pytest.raises(RankLost, match=f"rank 2 did not come; on this rank: {FATAL.error}") as caught:
        coordinator.synchronize()
    assert caught.value.ranks == (2,)
    assert caught.value.local_error == FATAL.error
    with pytest.raises(RankLost, match=r"^rank 2 did not come$"):
        coordinator.synchronize()


# -- what adds up ------------------------------------------------------------------------------


def test_without_torch_distributed_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    coordinator = BatchRecoveryCoordinator("train", device="cuda:0")
    coordinator.consume(batch())
    assert coordinator.synchronize() == 2


def test_torch_distributed_is_used_where_it_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(tensor: Any, group: Any) -> None:
        tensor.values = [7 * value for value in tensor.values]

    def tensor(values: Sequence[int], dtype: str, device: str) -> Any:
        assert (dtype, device) == ("int64", "cuda:3")
        made = SimpleNamespace(values=list(values))
        made.tolist = lambda: made.values
        return made

    distributed = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda group: 4,
        get_world_size=lambda group: 7,
        all_reduce=all_reduce,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(tensor=tensor, int64="int64"))
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    coordinator = BatchRecoveryCoordinator("train", device="cuda:3")
    coordinator.consume(batch())
    assert coordinator.synchronize() == 14


def test_a_device_belongs_to_the_all_reduce_that_is_given() -> None:
    with pytest.raises(InputError, match="device='cpu'"):
        BatchRecoveryCoordinator("train", device="cpu", all_reduce=SingleProcess())


def test_it_can_be_awaited() -> None:
    coordinator = BatchRecoveryCoordinator("train", all_reduce=SingleProcess())
    coordinator.consume(batch())
    assert asyncio.run(coordinator.synchronize_async()) == 2
    coordinator.consume(batch(FATAL))
    with pytest.raises(GenerationFailed, match=FATAL.error):
        asyncio.run(coordinator.synchronize_async())


def test_what_cannot_be_awaited_says_so_and_loses_nothing() -> None:
    coordinator = BatchRecoveryCoordinator("train", all_reduce=Broken())
    coordinator.consume(batch())
    with pytest.raises(InputTypeError, match="expected an all-reduce with sum_async, got Broken"):
        asyncio.run(coordinator.synchronize_async())
    assert coordinator.local == LOST
