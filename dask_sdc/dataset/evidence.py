"""What the audits of a dataset compare, and the receipts that they leave."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence

from dask_sdc.dataset.work import Made
from dask_sdc.evidence.receipts import SDCAuditReceipt
from dask_sdc.policy.verdict import Decision, Outcome, Voice

__all__ = ["digest_of", "receipt_of"]


def digest_of(heard: Sequence[Made]) -> dict[int, bytes]:
    """Return a digest of each, over the samples that all of them have, by ``id``.

    A sample that one side could not have, while another had it, is no difference: it was tried in vain there.
    """
    common = [k for k in range(len(heard[0].digests)) if all(made.digests[k] for made in heard)]
    return {id(made): hashlib.sha256(b"".join(made.digests[k] for k in common)).digest() for made in heard}


def receipt_of(batch: int, decision: Decision, voices: Mapping[str, Voice], status: str) -> SDCAuditReceipt:
    """Return the receipt of a batch that was made to two results.

    Parameters
    ----------
    batch : int
        Its number, which stands as ``shard_id``.
    decision : Decision
        What was concluded.
    voices : mapping of str to Voice
        By role; each has its `Made` as ``ref``.
    status : str
        What became of the quarantine; see `SDCAuditReceipt`.
    """
    primary, audit, witness = voices["primary"], voices["audit"], voices.get("witness")
    made = {role: voice.ref for role, voice in voices.items() if voice.ref is not None}
    suspected = [one.worker for role, one in made.items() if voices[role].domain in decision.suspects]
    differ = [
        k
        for k, (a, b) in enumerate(zip(made["primary"].digests, made["audit"].digests, strict=True))
        if a and b and a != b
    ]
    return SDCAuditReceipt(
        round=0,
        shard_id=batch,
        primary_worker=made["primary"].worker,
        audit_worker=made["audit"].worker,
        primary_nbytes=0,
        audit_nbytes=0,
        first_diff_byte_offset=None,
        primary_sha256=_hex(primary),
        audit_sha256=_hex(audit),
        comparison_mode="samples",
        audit_rtol=0.0,
        audit_atol=0.0,
        max_abs_error=0.0,
        max_rel_error=0.0,
        mismatch_reason=f"samples {differ[:8]} of the batch were made with other bits",
        primary_canonical_sha256=None,
        audit_canonical_sha256=None,
        primary_value_repr=f"{sum(map(bool, made['primary'].digests))} samples",
        audit_value_repr=f"{sum(map(bool, made['audit'].digests))} samples",
        primary_domain=primary.domain,
        audit_domain=audit.domain,
        primary_fingerprint=primary.fingerprint,
        audit_fingerprint=audit.fingerprint,
        witness_fingerprint=witness.fingerprint if witness is not None else "",
        witness_worker=made["witness"].worker if "witness" in made else None,
        witness_domain=witness.domain if witness is not None and "witness" in made else None,
        verdict="mismatch" if decision.outcome is Outcome.SUSPECT else "inconclusive",
        suspected_workers=tuple(dict.fromkeys(suspected)),
        suspected_domains=decision.suspects,
        persistence=decision.persistence and str(decision.persistence),
        quarantine_status=status,
        decided={
            "outcome": str(decision.outcome),
            "reason": decision.reason,
            "trusted": decision.value,
            "voices": {role: {"domain": v.domain, "status": str(v.status)} for role, v in voices.items()},
        },
        decided_at=time.time(),
    )


def _hex(voice: Voice) -> str:
    return voice.digest.hex() if voice.digest is not None else ""
