"""Receipts of what is compared by digests alone, bit by bit: chunks of stages and batches of samples."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from dask_sdc.evidence.receipts import SDCAuditReceipt
from dask_sdc.policy.verdict import Decision, Outcome, Voice

__all__ = ["receipt_of_voices"]


def receipt_of_voices(
    decision: Decision,
    voices: Mapping[str, Voice],
    workers: Mapping[str, str],
    status: str,
    *,
    decided: Mapping[str, Any],
    **fields: Any,
) -> SDCAuditReceipt:
    """Return the receipt of a decision.

    Parameters
    ----------
    decision : Decision
        What was concluded.
    voices : mapping of str to Voice
        By role.
    workers : mapping of str to str
        Who answered, by role; empty or missing for a role that was not heard.
    status : str
        What became of the quarantine; see `SDCAuditReceipt`.
    decided : mapping
        What is added to outcome, reason, trusted role and voices.
    **fields
        ``round``, ``shard_id``, ``comparison_mode``, ``mismatch_reason``, and of either side
        ``_sha256`` and ``_value_repr``.
    """
    primary, audit, witness = voices["primary"], voices["audit"], voices.get("witness")
    heard = [role for role, voice in voices.items() if voice.domain in decision.suspects and voice.ref]
    return SDCAuditReceipt(
        primary_worker=workers["primary"],
        audit_worker=workers["audit"],
        primary_nbytes=0,
        audit_nbytes=0,
        first_diff_byte_offset=None,
        audit_rtol=0.0,
        audit_atol=0.0,
        max_abs_error=0.0,
        max_rel_error=0.0,
        primary_canonical_sha256=None,
        audit_canonical_sha256=None,
        primary_domain=primary.domain,
        audit_domain=audit.domain,
        primary_fingerprint=primary.fingerprint,
        audit_fingerprint=audit.fingerprint,
        witness_fingerprint=witness.fingerprint if witness is not None else "",
        witness_worker=workers.get("witness") or None,
        witness_domain=witness.domain or None if witness is not None else None,
        verdict="mismatch" if decision.outcome is Outcome.SUSPECT else "inconclusive",
        suspected_workers=tuple(dict.fromkeys(workers[role] for role in heard)),
        suspected_domains=decision.suspects,
        persistence=decision.persistence and str(decision.persistence),
        quarantine_status=status,
        decided={
            "outcome": str(decision.outcome),
            "reason": decision.reason,
            "trusted": decision.value,
            "voices": {role: {"domain": v.domain, "status": str(v.status)} for role, v in voices.items()},
            **decided,
        },
        decided_at=time.time(),
        **fields,
    )
