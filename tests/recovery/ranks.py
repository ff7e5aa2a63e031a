"""What ranks do; a module of its own, so that worker processes import no more than that."""

from __future__ import annotations

import threading
from typing import Any

from dask_sdc.recovery import BatchRecoveryCoordinator, RecoveryMetadata
from dask_sdc.recovery.cluster import DaskAllReduce


def sums(rank: DaskAllReduce, rounds: int = 1) -> list[tuple[int, ...]]:
    return [rank.sum([rank.rank, number]) for number in range(rounds)]


async def sums_async(rank: DaskAllReduce, rounds: int = 1) -> list[tuple[int, ...]]:
    return [await rank.sum_async([rank.rank, number]) for number in range(rounds)]


def expected(size: int, rounds: int = 1) -> list[tuple[int, ...]]:
    return [(size * (size - 1) // 2, size * number) for number in range(rounds)]


def lone_thread(rank: DaskAllReduce) -> list[Any]:
    """Sum in a thread that knows nothing of the task."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(sums(rank)))
    thread.start()
    thread.join()
    return found


def generate(rank: DaskAllReduce, hangs: int, fatal: int = -1) -> list[int]:
    """Synchronise twice, with one rank that hangs before the second time."""
    coordinator = BatchRecoveryCoordinator("train", all_reduce=rank)
    totals = []
    for _ in range(2):
        coordinator.consume({"__recovery__": RecoveryMetadata(rank.rank)})
        totals.append(coordinator.synchronize())
        if rank.rank == hangs:
            threading.Event().wait(200)
    return totals
