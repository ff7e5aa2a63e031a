"""Statistics of a known cost, for scripts that measure what is around them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_sdc.statistics import ShardInfo, Statistic


@dataclass(frozen=True)
class Busy(Statistic):
    """Keeps a core busy with a fixed amount of arithmetic.

    Parameters
    ----------
    loops : int
        Passes of about 0.1 ms over a small array.
    """

    loops: int

    def init(self, info: ShardInfo) -> dict[str, Any]:
        """Return nothing yet."""
        return {"n": 0, "sum": 0.0}

    def update(self, state: dict[str, Any], x: Any) -> dict[str, Any]:
        """Compute and add up."""
        grid = np.arange(16384.0)
        scratch = np.empty_like(grid)
        total = 0.0
        for _ in range(self.loops):
            np.sin(grid, out=scratch)
            total += float(scratch[7])
        return {"n": state["n"] + len(x), "sum": state["sum"] + total + float(x.sum())}

    def combine(self, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        """Add."""
        return {"n": a["n"] + b["n"], "sum": a["sum"] + b["sum"]}

    def finalize(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the totals."""
        return state


@dataclass(frozen=True)
class Sleepy(Busy):
    """Sleeps instead: what is left is the cost of scheduling alone.

    Parameters
    ----------
    loops : int
        Milliseconds per shard.
    """

    def update(self, state: dict[str, Any], x: Any) -> dict[str, Any]:
        """Sleep."""
        time.sleep(self.loops / 1000)
        return {"n": state["n"] + len(x), "sum": state["sum"] + float(x.sum())}


def loops_for(seconds: float) -> int:
    """Return how many passes of `Busy` take that long here and now."""
    work, x = Busy(200), np.zeros(1)
    best = min(_seconds(work, x) for _ in range(5))
    return max(1, round(200 * seconds / best))


def _seconds(work: Busy, x: Any) -> float:
    start = time.perf_counter()
    work.update({"n": 0, "sum": 0.0}, x)
    return time.perf_counter() - start
