"""Ranks on a Dask cluster that add up their counts through the scheduler."""

from __future__ import annotations

from dask_sdc.recovery.cluster.group import DaskAllReduce, RankGroup
from dask_sdc.recovery.cluster.scheduler_plugin import RecoverySchedulerPlugin

__all__ = ["DaskAllReduce", "RankGroup", "RecoverySchedulerPlugin"]
