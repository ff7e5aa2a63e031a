"""Generation that fails honestly: retries per sample, and an end that all ranks agree on.

Nothing here needs a cluster; how ranks on Dask add up their counts stands in `dask_sdc.recovery.cluster`.
"""

from __future__ import annotations

from dask_sdc.recovery.all_reduce import AllReduce, MPIAllReduce, SingleProcess, TorchAllReduce
from dask_sdc.recovery.batch import METADATA_KEY, BatchRecoveryCoordinator
from dask_sdc.recovery.guard import Backoff, GenerationRecoveryGuard
from dask_sdc.recovery.outcome import RecoveryMetadata, SampleUnavailable

__all__ = [
    "METADATA_KEY",
    "AllReduce",
    "Backoff",
    "BatchRecoveryCoordinator",
    "GenerationRecoveryGuard",
    "MPIAllReduce",
    "RecoveryMetadata",
    "SampleUnavailable",
    "SingleProcess",
    "TorchAllReduce",
]
