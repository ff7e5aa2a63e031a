"""What mismatches leave behind: a receipt of each, whether an audit or a recovery came upon it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dask_sdc.evidence.receipts import SDCAuditReceipt
from dask_sdc.inference.journal import ChunkRecord
from dask_sdc.inference.ops import Outvoted
from dask_sdc.inference.pipeline.audits import Located, Mismatch, envelope_of
from dask_sdc.inference.session import SessionState
from dask_sdc.inference.shadow import ShadowAction, judge_shadow, voice
from dask_sdc.policy.receipts import receipt_of_voices
from dask_sdc.policy.verdict import ENVIRONMENT_DIFFERENCE, Decision, Outcome, Voice

__all__ = ["mismatch_of", "receipt_of"]


def mismatch_of(outvoted: Outvoted, former: str, known: Callable[[str], Located]) -> Mismatch:
    """Return what a recovery found to be wrong in the terms of an audit.

    Parameters
    ----------
    outvoted : Outvoted
        The output. The spare that made it twice stands for the auditor, the other one for the witness.
    former : str
        Address of who held the stage when it was put on record, which cannot be asked again.
    known : callable
        Returns where a worker is, or was.
    """
    workers = {"primary": former, "audit": outvoted.holder, "witness": outvoted.other}
    heard = {"primary": outvoted.recorded, "audit": outvoted.made, "witness": outvoted.made}
    where = {role: known(address) for role, address in workers.items()}
    voices = {
        role: voice(role, where[role].domain, [said], fingerprint=where[role].fingerprint)
        for role, said in heard.items()
    }
    voices["rerun_primary"] = voice("rerun_primary", where["primary"].domain, None)
    voices["rerun_audit"] = replace(voices["audit"], role="rerun_audit")
    envelope = envelope_of([place.fingerprint for place in where.values()])
    session, stage, position = SessionState(outvoted.session), outvoted.stage, outvoted.recorded.position
    finding = judge_shadow(session, stage, *voices.values(), clean=position, envelope=envelope)
    if envelope is not None and not (outvoted.recorded.sketch and outvoted.made.sketch):
        # Only a sketch tells an error from the rounding of another machine.
        other = Decision(Outcome.ENVIRONMENT, reason=ENVIRONMENT_DIFFERENCE)
        finding = replace(finding, action=ShadowAction.NOTHING, decision=other, position=-1)
    return Mismatch(finding, position, voices, workers)


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
    finding = mismatch.finding
    first, second = (_last(mismatch.voices[role]) for role in ("primary", "audit"))
    return receipt_of_voices(
        finding.decision,
        mismatch.voices,
        mismatch.workers,
        status,
        decided={
            "session": finding.session,
            "position": mismatch.position,
            "healed": _healed(mismatch),
        },
        round=finding.chunk,
        shard_id=finding.stage,
        comparison_mode="boundary",
        mismatch_reason="the outputs of a stage were computed to other bits",
        primary_sha256=_hex(first),
        audit_sha256=_hex(second),
        primary_value_repr=_text(first),
        audit_value_repr=_text(second),
    )


def _hex(record: ChunkRecord | None) -> str:
    return "" if record is None else record.digest.hex()


def _last(voice: Voice) -> ChunkRecord | None:
    return voice.ref[-1] if voice.ref else None


def _text(record: ChunkRecord | None) -> str:
    if record is None:
        return "nothing"
    tokens = f", tokens {list(record.tokens[-4:])}" if record.tokens else ""
    return f"positions {record.position} to {record.end}{tokens}"


def _healed(mismatch: Mismatch) -> str:
    finding = mismatch.finding
    if finding.action is ShadowAction.EVICT:
        return f"the stage was replaced and the session computed again from position {finding.position}"
    return "nothing was to be healed" if finding.action is ShadowAction.DROP else "see trusted"
