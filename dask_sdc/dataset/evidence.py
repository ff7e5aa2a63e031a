"""What the audits of a dataset compare, and the receipts that they leave."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from dask_sdc.dataset.work import Made
from dask_sdc.evidence.receipts import SDCAuditReceipt
from dask_sdc.policy.receipts import receipt_of_voices
from dask_sdc.policy.verdict import Decision, Voice

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
    made = {role: voice.ref for role, voice in voices.items() if voice.ref is not None}
    first, second = made["primary"], made["audit"]
    pairs = enumerate(zip(first.digests, second.digests, strict=True))
    differ = [k for k, (a, b) in pairs if a and b and a != b]
    return receipt_of_voices(
        decision,
        voices,
        {role: one.worker for role, one in made.items()},
        status,
        decided={},
        round=0,
        shard_id=batch,
        comparison_mode="samples",
        mismatch_reason=f"samples {differ[:8]} of the batch were made with other bits",
        primary_sha256=_hex(voices["primary"]),
        audit_sha256=_hex(voices["audit"]),
        primary_value_repr=f"{sum(map(bool, first.digests))} samples",
        audit_value_repr=f"{sum(map(bool, second.digests))} samples",
    )


def _hex(voice: Voice) -> str:
    return voice.digest.hex() if voice.digest is not None else ""
