"""Evidence: canonical bytes, comparison within an envelope, folds, receipts and the ledger."""

from __future__ import annotations

from dask_sdc.evidence.codec import DEFAULT_LIMITS, Limits, decode, digest, encode
from dask_sdc.evidence.display import bounded_repr
from dask_sdc.evidence.envelope import Comparison, LeafError, compare, compare_payloads
from dask_sdc.evidence.fingerprint import BlasBuild, EnvironmentFingerprint, environment_fingerprint
from dask_sdc.evidence.fold import (
    SealedFold,
    checkpointed_fold,
    finite_guarded_fold,
    first_nonfinite,
    fold_sealed,
)
from dask_sdc.evidence.ledger import Ledger, LedgerCheck, LedgerEntry, read, verify
from dask_sdc.evidence.receipts import SDCAuditReceipt, first_diff_byte_offset, make_receipt
from dask_sdc.evidence.seal import (
    SealedBatch,
    SealedStatistic,
    failed_statistic,
    open_batch,
    seal_batch,
    seal_statistic,
)

__all__ = [
    "DEFAULT_LIMITS",
    "BlasBuild",
    "Comparison",
    "EnvironmentFingerprint",
    "LeafError",
    "Ledger",
    "LedgerCheck",
    "LedgerEntry",
    "Limits",
    "SDCAuditReceipt",
    "SealedBatch",
    "SealedFold",
    "SealedStatistic",
    "bounded_repr",
    "checkpointed_fold",
    "compare",
    "compare_payloads",
    "decode",
    "digest",
    "encode",
    "environment_fingerprint",
    "failed_statistic",
    "finite_guarded_fold",
    "first_diff_byte_offset",
    "first_nonfinite",
    "fold_sealed",
    "make_receipt",
    "open_batch",
    "read",
    "seal_batch",
    "seal_statistic",
    "verify",
]
