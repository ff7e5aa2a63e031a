"""Audit, attribute and heal silent data corruption on Dask clusters."""

from __future__ import annotations

from dask_sdc import config
from dask_sdc.cluster.auditor import Auditor
from dask_sdc.cluster.fit import FitResult
from dask_sdc.evidence.fold import checkpointed_fold, finite_guarded_fold
from dask_sdc.evidence.receipts import SDCAuditReceipt
from dask_sdc.exceptions import (
    AuditWarning,
    CheckpointError,
    ClosedError,
    ClusterError,
    CodecError,
    ContextOverflow,
    CorruptionError,
    DeadlineExceeded,
    DecodeError,
    EncodeError,
    GenerationInterrupted,
    InputError,
    InputTypeError,
    InvariantError,
    LedgerError,
    LimitExceeded,
    NoDomainError,
    NonFiniteError,
    NoSpareError,
    RechunkWarning,
    ReplayMismatch,
    SDCError,
    SDCWarning,
    ShardError,
    StageError,
    StageTimeout,
    StaleEpoch,
)
from dask_sdc.faults.flips import inject_bit_flip
from dask_sdc.faults.plan import Fault, FaultPlan
from dask_sdc.faults.plugin import FaultInjector, arm_corruption, clear_corruption
from dask_sdc.policy.report import Report
from dask_sdc.statistics import (
    PCA,
    Covariance,
    Estimator,
    GaussianMixture,
    Histogram,
    KMeans,
    LinearRegression,
    Moments,
    ShardInfo,
    Statistic,
)

__version__ = "0.1.0"

__all__ = [
    "PCA",
    "AuditWarning",
    "Auditor",
    "CheckpointError",
    "ClosedError",
    "ClusterError",
    "CodecError",
    "ContextOverflow",
    "CorruptionError",
    "Covariance",
    "DeadlineExceeded",
    "DecodeError",
    "EncodeError",
    "Estimator",
    "Fault",
    "FaultInjector",
    "FaultPlan",
    "FitResult",
    "GaussianMixture",
    "GenerationInterrupted",
    "Histogram",
    "InputError",
    "InputTypeError",
    "InvariantError",
    "KMeans",
    "LedgerError",
    "LimitExceeded",
    "LinearRegression",
    "Moments",
    "NoDomainError",
    "NoSpareError",
    "NonFiniteError",
    "RechunkWarning",
    "ReplayMismatch",
    "Report",
    "SDCAuditReceipt",
    "SDCError",
    "SDCWarning",
    "ShardError",
    "ShardInfo",
    "StageError",
    "StageTimeout",
    "StaleEpoch",
    "Statistic",
    "__version__",
    "arm_corruption",
    "checkpointed_fold",
    "clear_corruption",
    "config",
    "finite_guarded_fold",
    "inject_bit_flip",
]
