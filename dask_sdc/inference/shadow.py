"""Shadow audit of stages: which boundary chunks a spare computes again, and what a mismatch says.

The chunks of a stage are drawn as the shards of an accumulation are (`dask_sdc.policy.CoverageSampler`),
by the failure domain that computes them: every domain owes its share of audits, and at most ⌈1/rate⌉ chunks
in a row go without one. A mismatch is judged as one of an accumulation is (`dask_sdc.policy.decide`): it
takes a witness on a third domain to name anybody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from dask_sdc.inference.journal import ChunkRecord
from dask_sdc.inference.proof import ENVELOPE, sketch_error, sketch_rows
from dask_sdc.inference.session import SessionState
from dask_sdc.policy.sampling import CoverageSampler
from dask_sdc.policy.verdict import Closeness, Decision, Outcome, Status, Voice, decide


class ShadowAudit:
    """Draws the boundary chunks that a spare computes again.

    Parameters
    ----------
    rate : float
        Audits per chunk and stage, in [0, 1].
    seed : int, optional
        Decides where each domain's first audit falls.
    """

    def __init__(self, rate: float, seed: int = 0) -> None:
        self._sampler = CoverageSampler(rate, seed)

    def draw(self, domain: str, chunk: int) -> bool:
        """Say whether a chunk is audited; call once for every chunk of every stage, as it is computed.

        Parameters
        ----------
        domain : str
            Failure domain of the stage.
        chunk : int
            Number of the chunk.
        """
        return bool(self._sampler.draw(domain, (chunk,)))

    def refund(self, domain: str) -> None:
        """Owe an audit again that was drawn and not done: there was no spare, or it was lost."""
        self._sampler.refund(domain)

    def unaudited(self, domain: str) -> int:
        """Return how many chunks a domain computed since its last drawn one."""
        return self._sampler.unaudited(domain)


class ShadowAction(StrEnum):
    """What a finding asks for."""

    NOTHING = "nothing"  # they agree, or nothing can be said
    ASK = "ask"  # the voices in ``decision.needs`` are wanted
    EVICT = "evict"  # the stage computed wrongly: roll back and heal
    DROP = "drop"  # a spare computed wrongly: quarantine it; the session is right


@dataclass(frozen=True)
class ShadowFinding:
    """What the voices on one boundary chunk say.

    Parameters
    ----------
    session : str
        The session.
    stage : int
        The stage that was audited.
    chunk : int
        Number of the chunk.
    action : ShadowAction
        What to do.
    decision : Decision
        The verdict.
    position : int
        With EVICT: the position that the session is rolled back to (`SessionState.rolled_back`) before
        `run_recovery` evicts the stage; what came before it is believed.
    """

    session: str
    stage: int
    chunk: int
    action: ShadowAction
    decision: Decision
    position: int = -1


def voice(
    role: str,
    domain: str,
    records: Sequence[ChunkRecord] | None,
    *,
    fingerprint: str = "",
    status: Status | None = None,
) -> Voice:
    """Return what one side says of the chunk in question.

    Parameters
    ----------
    role : str
        "primary" for the stage, "audit" for the spare, "witness", "rerun_primary" or "rerun_audit".
    domain : str
        Failure domain on which it was computed.
    records : sequence of ChunkRecord or None
        Its outputs up to the chunk, which is the last one; None or empty if there are none.
    fingerprint : str, optional
        Digest of the environment.
    status : Status, optional
        Why there are none; "missing" if not given.
    """
    if not records:
        return Voice(role, domain, None, fingerprint, status or Status.MISSING)
    return Voice(role, domain, _said(records[-1]), fingerprint, Status.VALUE, tuple(records))


def _said(record: ChunkRecord) -> bytes:
    """Return a digest of outputs and of what was sampled from them."""
    tokens = b"".join(token.to_bytes(8, "big") for token in record.tokens)
    return hashlib.blake2b(record.digest + tokens, digest_size=16).digest() if tokens else record.digest


def judge_shadow(
    session: SessionState,
    stage: int,
    primary: Voice,
    audit: Voice,
    witness: Voice | None = None,
    rerun_primary: Voice | None = None,
    rerun_audit: Voice | None = None,
    *,
    clean: int = 0,
    envelope: float | None = ENVELOPE,
) -> ShadowFinding:
    """Judge one audited chunk.

    Parameters
    ----------
    session : SessionState
        The session.
    stage : int
        The stage.
    primary, audit, witness, rerun_primary, rerun_audit : Voice
        See `voice` and `dask_sdc.policy.decide`. The spare and the witness compute from the journal of the
        stage before, so a state that was bent in memory shows as well as a wrong product.
    clean : int, optional
        Position up to which an audit of this stage and session agreed already.
    envelope : float or None, optional
        Relative difference of sketches that is rounding; without sketches any difference is outside. None
        counts every bit, as between equal environments: the next token may hang on it.

    Returns
    -------
    ShadowFinding
    """

    def compare(a: Voice, b: Voice) -> Closeness:
        return compare_records(a.ref[-1], b.ref[-1], envelope)

    decision = decide(primary, audit, witness, rerun_primary, rerun_audit, compare=compare)
    chunk = primary.ref[-1].index if primary.ref else -1
    action, position = ShadowAction.NOTHING, -1
    if decision.outcome is Outcome.MISMATCH_PENDING:
        action = ShadowAction.ASK
    elif decision.outcome is Outcome.SUSPECT and primary.domain in decision.suspects:
        action = ShadowAction.EVICT
        position = _last_agreement(primary.ref, audit.ref, clean)
    elif decision.outcome is Outcome.SUSPECT:
        action = ShadowAction.DROP
    return ShadowFinding(session.session, stage, chunk, action, decision, position)


def compare_records(a: ChunkRecord, b: ChunkRecord, envelope: float | None = ENVELOPE) -> Closeness:
    """Compare two computations of one chunk: by bits, else by sketch, unless ``envelope`` is None."""
    if a.tokens != b.tokens:
        return Closeness.OUTSIDE
    if a.digest == b.digest:
        return Closeness.IDENTICAL
    if envelope is None:
        return Closeness.OUTSIDE
    rows, others = sketch_rows([a]), sketch_rows([b])
    alike = rows.keys() == others.keys() and rows.keys() == set(range(a.position, a.end))
    if not alike or any(sketch_error(rows[at], others[at]) > envelope for at in rows):
        return Closeness.OUTSIDE
    return Closeness.WITHIN


def first_divergence(
    recorded: Sequence[ChunkRecord], recomputed: Sequence[ChunkRecord], *, within: float | None = None
) -> ChunkRecord | None:
    """Return the first chunk of ``recorded`` that was recomputed to something else, None if there is none.

    Parameters
    ----------
    recorded, recomputed : sequence of ChunkRecord
        Two computations; only chunks of both count.
    within : float, optional
        Relative difference of sketches that counts as the same, between different environments; without
        it every bit counts.
    """
    known = {record.index: record for record in recomputed}
    for record in recorded:
        other = known.get(record.index)
        if other is None or _said(other) == _said(record):
            continue
        if compare_records(record, other, within) is Closeness.OUTSIDE:
            return record
    return None


def _last_agreement(
    recorded: Sequence[ChunkRecord], recomputed: Sequence[ChunkRecord] | None, clean: int
) -> int:
    """Everything since the last clean audit is in doubt, or since the first difference if all was redone."""
    first = first_divergence(recorded, recomputed or ())
    whole = {record.index for record in recomputed or ()} >= {record.index for record in recorded}
    return max(clean, first.position) if first is not None and whole else clean
