"""A statistic of twenty lines, as a user would write it."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_sdc.statistics import ShardInfo, Statistic


class Sums(Statistic):
    """Count and sum of every column."""

    def init(self, info: ShardInfo) -> dict[str, Any]:
        return {"n": 0, "sum": np.zeros(info.shape)}

    def update(self, state: dict[str, Any], x: Any) -> dict[str, Any]:
        return {"n": state["n"] + len(x), "sum": state["sum"] + x.sum(axis=0)}

    def combine(self, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        return {"n": a["n"] + b["n"], "sum": a["sum"] + b["sum"]}

    def finalize(self, state: dict[str, Any]) -> dict[str, Any]:
        return state


def integer_blocks(shards: int = 32, rows: int = 50) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    """Blocks of integers, whose sums are exact in any order."""
    rng = np.random.default_rng(3)
    return [rng.integers(-1000, 1000, (rows, 3)).astype(float) for _ in range(shards)]
