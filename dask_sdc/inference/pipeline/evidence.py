"""What the audits of a pipeline leave behind: a receipt of every mismatch."""

from __future__ import annotations

import time

from dask_sdc.evidence.receipts import SDCAuditReceipt
from dask_sdc.inference.journal import ChunkRecord
from dask_sdc.inference.pipeline.audits import Mismatch
from dask_sdc.inference.shadow import ShadowAction
from dask_sdc.policy.verdict import Outcome, Voice

__all__ = ["receipt_of"]


def receipt_of(mismatch: Mismatch, status: str) -> SDCAuditReceipt:
    """Return the receipt of a chunk that was computed to two results.

    Parameters
    ----------
    mismatch : Mismatch
        The chunk, with all that was heard of it.
    status : str
        What became of the quarantine; see `SDCAuditReceipt`.

    Returns
    -------
    SDCAuditReceipt
        ``round`` is the number of the chunk and ``shard_id`` that of the stage. The payloads are known by
        the digests that travelled with the chunk, which stand where an accumulation has SHA-256.
    """
    finding, decision = mismatch.finding, mismatch.finding.decision
    voices, workers = mismatch.voices, mismatch.workers
    primary, audit, witness = voices["primary"], voices["audit"], voices.get("witness")
    sides = [_last(voice) for voice in (primary, audit)]
    first, second = (record.digest.hex() if record is not None else "" for record in sides)
    return SDCAuditReceipt(
        round=finding.chunk,
        shard_id=finding.stage,
        primary_worker=workers["primary"],
        audit_worker=workers["audit"],
        primary_nbytes=0,
        audit_nbytes=0,
        first_diff_byte_offset=None,
        primary_sha256=first,
        audit_sha256=second,
        comparison_mode="boundary",
        audit_rtol=0.0,
        audit_atol=0.0,
        max_abs_error=0.0,
        max_rel_error=0.0,
        mismatch_reason="the outputs of a stage were computed to other bits",
        primary_canonical_sha256=None,
        audit_canonical_sha256=None,
        primary_value_repr=_text(sides[0]),
        audit_value_repr=_text(sides[1]),
        primary_domain=primary.domain,
        audit_domain=audit.domain,
        primary_fingerprint=primary.fingerprint,
        audit_fingerprint=audit.fingerprint,
        witness_fingerprint=witness.fingerprint if witness is not None else "",
        witness_worker=workers.get("witness") or None,
        witness_domain=witness.domain or None if witness is not None else None,
        verdict="mismatch" if decision.outcome is Outcome.SUSPECT else "inconclusive",
        suspected_workers=tuple(dict.fromkeys(_suspected(mismatch))),
        suspected_domains=decision.suspects,
        persistence=decision.persistence and str(decision.persistence),
        quarantine_status=status,
        decided={
            "session": finding.session,
            "position": mismatch.position,
            "outcome": str(decision.outcome),
            "reason": decision.reason,
            "trusted": decision.value,
            "healed": _healed(mismatch),
            "voices": {role: {"domain": v.domain, "status": str(v.status)} for role, v in voices.items()},
        },
        decided_at=time.time(),
    )


def _last(voice: Voice) -> ChunkRecord | None:
    return voice.ref[-1] if voice.ref else None


def _text(record: ChunkRecord | None) -> str:
    if record is None:
        return "nothing"
    tokens = f", tokens {list(record.tokens[-4:])}" if record.tokens else ""
    return f"positions {record.position} to {record.end}{tokens}"


def _suspected(mismatch: Mismatch) -> list[str]:
    suspects, voices = mismatch.finding.decision.suspects, mismatch.voices
    heard = [role for role, voice in voices.items() if voice.domain in suspects and voice.ref]
    return [mismatch.workers[role] for role in heard]


def _healed(mismatch: Mismatch) -> str:
    finding = mismatch.finding
    if finding.action is ShadowAction.EVICT:
        return f"the stage was replaced and the session computed again from position {finding.position}"
    return "nothing was to be healed" if finding.action is ShadowAction.DROP else "see trusted"
