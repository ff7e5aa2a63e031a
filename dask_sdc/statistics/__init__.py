"""Statistics: pure numerics, no Dask."""

from __future__ import annotations

from dask_sdc.statistics.base import Estimator, ShardInfo, State, Statistic
from dask_sdc.statistics.fold import TreeFold, tree_fold

__all__ = [
    "Estimator",
    "ShardInfo",
    "State",
    "Statistic",
    "TreeFold",
    "tree_fold",
]
