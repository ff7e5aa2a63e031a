"""Statistics that misbehave, and functions that run on the cluster.

Workers import this module and nothing of pytest or of `distributed.utils_test` with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distributed import Scheduler, worker_client

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


def from_within(blocks: list[Any]) -> dict[str, Any]:
    with worker_client() as client, Auditor(client, audit_rate=0.25, seed=1) as auditor:
        found: dict[str, Any] = auditor.accumulate(Sums(), blocks)
        return found


def tasks(dask_scheduler: Scheduler) -> list[str]:
    return [str(key) for key in dask_scheduler.tasks]


def topics(dask_scheduler: Scheduler) -> dict[str, str]:
    return dict(dask_scheduler.plugins[NAME].topics)
