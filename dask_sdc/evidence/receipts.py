"""Receipts: the record of one mismatch and of all that was decided about it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dask_sdc.evidence.codec import DEFAULT_LIMITS, Limits, decode, encode
from dask_sdc.evidence.display import bounded_repr
from dask_sdc.evidence.envelope import Comparison
from dask_sdc.evidence.seal import SealedBatch, SealedStatistic
from dask_sdc.exceptions import DecodeError, InputError

VERDICTS = frozenset({"agree", "mismatch", "inconclusive", "skipped"})
PERSISTENCES = frozenset({"transient", "persistent"})
QUARANTINE_STATUSES = frozenset({"not_requested", "disabled", "not_needed", "committed"})

# The policy knows the reasons: no_safe_survivor, staging_failed, three_way_disagreement ...
_DEFERRED = re.compile(r"deferred:[a-z_]+")


@dataclass(frozen=True)
class SDCAuditReceipt:
    """One mismatch between two computations of a shard.

    Parameters
    ----------
    round, shard_id : int
        Where in the work it happened.
    primary_worker, audit_worker : str
        Addresses of the two workers.
    primary_nbytes, audit_nbytes : int
        Sizes of the two payloads, in bytes.
    first_diff_byte_offset : int or None
        First byte in which the payloads differ (the shorter length if one begins with the other);
        None if they are equal.
    primary_sha256, audit_sha256 : str
        SHA-256 of the payloads as they came, in hex.
    comparison_mode : str
        See `Comparison.mode`.
    audit_rtol, audit_atol : float
        Tolerances of the comparison.
    max_abs_error, max_rel_error : float
        Largest errors over all leaves.
    mismatch_reason : str
        First reason of the comparison.
    primary_canonical_sha256, audit_canonical_sha256 : str or None
        SHA-256 of the canonical encoding of the decoded values; None where undecodable.
    primary_value_repr, audit_value_repr : str
        Bounded text of the decoded values, or why they could not be decoded.
    primary_domain, audit_domain : str
        Failure domains of the two.
    primary_lane, audit_lane, witness_lane : int or None
        Lanes that the placement labels spoke of.
    primary_role, audit_role : str
        Roles in which the two were computed.
    primary_fingerprint, audit_fingerprint, witness_fingerprint : str
        Digests of the environments.
    witness_worker, witness_domain : str or None
        The third voice, if there was one.
    verdict : {"agree", "mismatch", "inconclusive", "skipped"}
        What was concluded in the end.
    suspected_workers, suspected_domains : tuple of str
        Who was suspected; empty if nobody.
    persistence : {"transient", "persistent"} or None
        Whether the rerun on the suspect repeated the fault; None if there was no rerun.
    quarantine_status : str
        One of `QUARANTINE_STATUSES`, or "deferred:" with the reason.
    envelope : tuple of dict
        Error, allowed error and reason of every leaf that differs, see `LeafError`.
    decided : mapping
        Anything else that was decided, by name; JSON-compatible.
    detected_at, decided_at : float or None
        Seconds since the epoch, as the caller's clock told them.
    """

    round: int
    shard_id: int
    primary_worker: str
    audit_worker: str
    primary_nbytes: int
    audit_nbytes: int
    first_diff_byte_offset: int | None
    primary_sha256: str
    audit_sha256: str
    comparison_mode: str
    audit_rtol: float
    audit_atol: float
    max_abs_error: float
    max_rel_error: float
    mismatch_reason: str
    primary_canonical_sha256: str | None
    audit_canonical_sha256: str | None
    primary_value_repr: str
    audit_value_repr: str
    primary_domain: str = ""
    audit_domain: str = ""
    primary_lane: int | None = None
    audit_lane: int | None = None
    witness_lane: int | None = None
    primary_role: str = "primary"
    audit_role: str = "audit"
    primary_fingerprint: str = ""
    audit_fingerprint: str = ""
    witness_fingerprint: str = ""
    witness_worker: str | None = None
    witness_domain: str | None = None
    verdict: str = "mismatch"
    suspected_workers: tuple[str, ...] = ()
    suspected_domains: tuple[str, ...] = ()
    persistence: str | None = None
    quarantine_status: str = "not_requested"
    envelope: tuple[dict[str, Any], ...] = ()
    decided: Mapping[str, Any] = field(default_factory=dict)
    detected_at: float | None = None
    decided_at: float | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("verdict", self.verdict, VERDICTS),
            ("persistence", self.persistence, PERSISTENCES | {None}),
        ):
            if value not in allowed:
                raise InputError(f"expected {name} among {sorted(map(str, allowed))}, got {value!r}")
        if self.quarantine_status not in QUARANTINE_STATUSES and not _DEFERRED.fullmatch(
            self.quarantine_status
        ):
            raise InputError(
                f"expected quarantine_status among {sorted(QUARANTINE_STATUSES)} or deferred:<reason>, "
                f"got {self.quarantine_status!r}"
            )

    def summary(self) -> str:
        """Return one line for people."""
        who = ", ".join(self.suspected_domains or self.suspected_workers) or "nobody"
        persistence = f" ({self.persistence})" if self.persistence else ""
        witness = f", witness {self.witness_domain or self.witness_worker}" if self.witness_worker else ""
        primary = self.primary_domain or self.primary_worker
        audit = self.audit_domain or self.audit_worker
        return (
            f"round {self.round} shard {self.shard_id}: {self.verdict} of {primary} and {audit}{witness}; "
            f"max abs {self.max_abs_error:.3g} rel {self.max_rel_error:.3g}; suspected {who}{persistence}; "
            f"quarantine {self.quarantine_status}; {self.mismatch_reason or 'inside of the envelope'}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible fields; floats that are not finite become "inf", "-inf" and "nan"."""
        return {item.name: _to_json(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SDCAuditReceipt:
        """Rebuild a receipt from `to_dict`, also after a trip through JSON.

        Raises
        ------
        InputError
            If a field is unknown or missing.
        """
        known = {item.name for item in fields(cls)}
        if values.keys() != known:
            raise InputError(
                f"expected the fields of a receipt, got {sorted(values.keys() ^ known)} in excess"
            )
        restored = dict(values)
        for name in ("audit_rtol", "audit_atol", "max_abs_error", "max_rel_error"):
            restored[name] = float(values[name])
        for name in ("suspected_workers", "suspected_domains"):
            restored[name] = tuple(values[name])
        restored["envelope"] = tuple(_leaf_from_json(leaf) for leaf in values["envelope"])
        return cls(**restored)


def make_receipt(
    primary: SealedStatistic,
    audit: SealedStatistic,
    comparison: Comparison,
    *,
    primary_batch: SealedBatch,
    audit_batch: SealedBatch,
    limits: Limits = DEFAULT_LIMITS,
    **decisions: Any,
) -> SDCAuditReceipt:
    """Build the receipt of two records that were compared.

    Parameters
    ----------
    primary, audit : SealedStatistic
        The two records of one shard.
    comparison : Comparison
        What `compare_payloads` found.
    primary_batch, audit_batch : SealedBatch
        The batches that they came in: worker, domain, role and fingerprint.
    limits : Limits, optional
        Bounds of the decoder that makes the value texts; nothing is unpickled.
    **decisions
        Any other field of `SDCAuditReceipt`, such as ``witness_worker`` or ``verdict``.

    Returns
    -------
    SDCAuditReceipt
    """
    known: dict[str, Any] = {
        "round": primary_batch.round,
        "shard_id": primary.shard_id,
        "first_diff_byte_offset": first_diff_byte_offset(primary.payload, audit.payload),
        "comparison_mode": comparison.mode,
        "audit_rtol": comparison.rtol,
        "audit_atol": comparison.atol,
        "max_abs_error": comparison.max_abs_error,
        "max_rel_error": comparison.max_rel_error,
        "mismatch_reason": comparison.reason,
        "envelope": tuple(comparison.to_dict()["leaves"]),
    }
    for side, record, batch in (("primary", primary, primary_batch), ("audit", audit, audit_batch)):
        known |= {f"{side}_{name}": value for name, value in _describe(record, batch, limits).items()}
    return SDCAuditReceipt(**(known | decisions))


def _describe(record: SealedStatistic, batch: SealedBatch, limits: Limits) -> dict[str, Any]:
    canonical: str | None = None
    try:
        value = decode(record.payload, limits)
        canonical = hashlib.sha256(encode(value)).hexdigest()
        text = bounded_repr(value)
    except DecodeError as error:
        text = f"<undecodable: {error}>"
    return {
        "worker": batch.worker,
        "domain": batch.domain,
        "role": batch.role,
        "fingerprint": batch.fingerprint,
        "nbytes": len(record.payload),
        "sha256": hashlib.sha256(record.payload).hexdigest(),
        "canonical_sha256": canonical,
        "value_repr": text,
    }


def first_diff_byte_offset(a: bytes, b: bytes) -> int | None:
    """Return the first offset at which two byte strings differ, None if they are equal.

    Where one begins with the other it is the length of the shorter.
    """
    if a == b:
        return None
    low, high = 0, min(len(a), len(b))  # a[:low] == b[:low]; bisect so that memcmp does the work
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _to_json(value: Any) -> Any:
    """Tuples as lists and non-finite floats as strings: what strict JSON can carry."""
    if isinstance(value, float) and not abs(value) < float("inf"):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    return value


def _leaf_from_json(leaf: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name: float(leaf[name]) for name in ("abs_error", "rel_error", "allowed")}
    return {**leaf, **numbers}
