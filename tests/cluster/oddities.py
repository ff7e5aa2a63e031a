"""Statistics that misbehave, and functions that run on the cluster.

Workers import this module and nothing of pytest or of `distributed.utils_test` with it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Scheduler, Worker, worker_client

from dask_sdc.cluster.auditor import Auditor
from dask_sdc.cluster.worker_plugin import NAME
from dask_sdc.statistics.base import ShardInfo, Statistic
from tests.cluster.sums import Sums
from tests.cluster.waiting import until


class Strange(Sums):
    """Its state is of a type that has no canonical encoding."""

    def init(self, info: ShardInfo) -> Any:
        return {1, 2}


class Turns(Sums):
    """Its update returns another type than its init."""

    def update(self, state: Any, x: Any) -> Any:
        return {"n": {1}}


class Fails(Sums):
    """Its update cannot take one of the blocks."""

    def __init__(self, poison: float) -> None:
        self.poison = poison

    def update(self, state: dict[str, Any], x: Any) -> dict[str, Any]:
        if len(x) and x[0, 0] == self.poison:
            raise ZeroDivisionError("nothing to divide by")
        return super().update(state, x)


class Exits(Fails):
    """Its update wants to end the process."""

    def update(self, state: dict[str, Any], x: Any) -> dict[str, Any]:
        if len(x) and x[0, 0] == self.poison:
            raise SystemExit(3)
        return super().update(state, x)


class Waits(Sums):
    """It takes until a file appears, so that a user can interrupt it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def update(self, state: dict[str, Any], x: Any) -> dict[str, Any]:
        (self.folder / "started").touch()
        until((self.folder / "go").exists)
        return super().update(state, x)


class Nothing(Statistic):
    """A statistic that adds nothing up."""

    def init(self, info: ShardInfo) -> None:
        return None

    def update(self, state: None, x: Any) -> None:
        return None

    def combine(self, a: None, b: None) -> None:
        return None

    def finalize(self, state: None) -> str:
        return "nothing"


class Gated(Statistic):
    """Another statistic, whose updates wait until a file appears."""

    hash_input = True

    def __init__(self, inner: Statistic, folder: Path) -> None:
        self.inner = inner
        self.folder = folder

    def init(self, info: ShardInfo) -> Any:
        return self.inner.init(info)

    def update(self, state: Any, x: Any) -> Any:
        (self.folder / "started").touch()
        until((self.folder / "go").exists)
        return self.inner.update(state, x)

    def combine(self, a: Any, b: Any) -> Any:
        return self.inner.combine(a, b)

    def finalize(self, state: Any) -> Any:
        return self.inner.finalize(state)


class Slow(Sums):
    """Sums whose shards are held up, on one worker or on all, until a file appears."""

    def __init__(self, folder: Path, shard_ids: frozenset[int]) -> None:
        self.folder = folder
        self.shard_ids = shard_ids

    def init(self, info: ShardInfo) -> dict[str, Any]:
        return {**super().init(info), "shard": info.shard_id}

    def update(self, state: dict[str, Any], x: Any) -> dict[str, Any]:
        shard = state["shard"]
        if shard in self.shard_ids and not (self.folder / "go").exists():
            (self.folder / f"started-{shard}-{os.getpid()}").touch()
            until((self.folder / "go").exists)
        return {**super().update(state, x), "shard": 0}

    def combine(self, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        return {**super().combine(a, b), "shard": 0}


def from_within(blocks: list[Any]) -> dict[str, Any]:
    with worker_client() as client, Auditor(client, audit_rate=0.25, seed=1) as auditor:
        found: dict[str, Any] = auditor.accumulate(Sums(), blocks)
        return found


def tasks(dask_scheduler: Scheduler) -> list[str]:
    return [str(key) for key in dask_scheduler.tasks]


def topics(dask_scheduler: Scheduler) -> dict[str, str]:
    return dict(dask_scheduler.plugins[NAME].topics)


def produced(dask_scheduler: Scheduler) -> list[str]:
    """Domains that have computed something."""
    return list(dask_scheduler.plugins[NAME]._produced)


def flip(dask_worker: Worker, key: Any) -> int:
    """Flip one bit of a block in this worker's memory; return how many blocks were hit."""
    block = dask_worker.data.get(key)
    if block is None:
        return 0
    spoilt = block.copy()
    spoilt.view(np.uint8)[0, 6] ^= 1
    dask_worker.data[key] = spoilt
    return 1
