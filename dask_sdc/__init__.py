"""Audit, attribute and heal silent data corruption on Dask clusters."""

from __future__ import annotations

from dask_sdc import config
from dask_sdc.exceptions import (
    AuditWarning,
    CheckpointError,
    ClosedError,
    ClusterError,
    CodecError,
    CorruptionError,
    DeadlineExceeded,
    DecodeError,
    EncodeError,
    InputError,
    InputTypeError,
    InvariantError,
    LedgerError,
    LimitExceeded,
    NoDomainError,
    NonFiniteError,
    RechunkWarning,
    SDCError,
    SDCWarning,
    ShardError,
)

__version__ = "0.1.0"

__all__ = [
    "AuditWarning",
    "CheckpointError",
    "ClosedError",
    "ClusterError",
    "CodecError",
    "CorruptionError",
    "DeadlineExceeded",
    "DecodeError",
    "EncodeError",
    "InputError",
    "InputTypeError",
    "InvariantError",
    "LedgerError",
    "LimitExceeded",
    "NoDomainError",
    "NonFiniteError",
    "RechunkWarning",
    "SDCError",
    "SDCWarning",
    "ShardError",
    "__version__",
    "config",
]
