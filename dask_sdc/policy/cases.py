"""The cases of a round: the voices on each audited shard, and when they decide it.

A case opens when an audit is queued, or when a primary arrives damaged, garbled or in breach of
an invariant. It asks for whatever voice is missing, survives the loss of any of them, and ends
in exactly one `Finding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dask_sdc.exceptions import InvariantError, NonFiniteError, ShardError
from dask_sdc.policy.messages import Case, Heard
from dask_sdc.policy.roster import Domain, Roster
from dask_sdc.policy.verdict import Closeness, Decision, Outcome, Status, Voice, decide


@dataclass(frozen=True)
class Finding:
    """How a case ended.

    Attributes
    ----------
    case : Case
    decision : Decision
        Its outcome is "agree", "skipped", or one that needs a receipt.
    """

    case: Case
    decision: Decision


class CaseBook:
    """All open cases.

    Parameters
    ----------
    roster : Roster
        Who can be asked.
    compare : callable
        ``compare(a, b) -> Closeness`` of two voices that hold values.
    max_retries : int
        How often a voice may be lost before it counts as missing.
    """

    def __init__(
        self, roster: Roster, compare: Callable[[Voice, Voice], Closeness], max_retries: int
    ) -> None:
        self._roster = roster
        self._compare = compare
        self._max_retries = max_retries
        self._open: dict[int, Case] = {}
        self._changed: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, shard_id: int) -> bool:
        return shard_id in self._open

    def involve(self, domains: Iterable[str]) -> bool:
        """Say whether an open case has heard any of some domains."""
        names = set(domains)
        return any(
            case.domain(part) in names for case in self._open.values() for part in ("primary", "audit")
        )

    # -- what is heard -----------------------------------------------------------------

    def expect_audit(self, shard_id: int, batch_id: int) -> None:
        """Open a case for an audit that was queued beside its primary."""
        self._open[shard_id] = Case(shard_id, pending={"audit": batch_id})

    def hear_primary(self, shard_id: int, voice: Voice) -> None:
        """Add the primary; opens a case unless it is a plain value that nobody audits."""
        case = self._open.get(shard_id)
        if case is None:
            if voice.status == Status.VALUE:
                return
            case = self._open[shard_id] = Case(shard_id)
        auditor = case.domain("audit")
        if auditor is not None and self._roster.same_lane(auditor, voice.domain):
            del case.voices["audit"]  # not apart any more: it is audited anew
        case.voices["primary"] = voice
        self._changed[shard_id] = None

    def hear(self, shard_id: int, part: str, batch_id: int, voice: Voice | None, why: str = "") -> None:
        """Add a voice that was asked for; None if it was lost."""
        case = self._open.get(shard_id)
        if case is None or case.pending.get(part) != batch_id:
            return
        del case.pending[part]
        if voice is not None and part == "audit" and voice.status == Status.ERROR:
            # It says nothing of the primary: somebody else is asked.
            voice, why = None, "the audit raised an error"
        if voice is not None:
            case.voices[part] = voice
        else:
            self._lost(case, part, why)
        self._changed[shard_id] = None

    def _lost(self, case: Case, part: str, why: str) -> None:
        case.attempts[part] += 1
        if case.attempts[part] > self._max_retries:
            case.voices[part] = _missing(part, why)

    # -- judging -----------------------------------------------------------------------

    def judge(self, now: float) -> list[Finding]:
        """Ask for what changed cases still need; return those that are decided.

        Raises
        ------
        ShardError
            If the data, not a domain, are at fault.
        """
        findings = []
        while self._changed:
            shard_id = next(iter(self._changed))
            del self._changed[shard_id]
            case = self._open.get(shard_id)
            if case is None or "primary" not in case.voices:
                continue
            decision = self._decide(case, now)
            if decision is not None:
                del self._open[shard_id]
                findings.append(Finding(case, decision))
        return findings

    def _decide(self, case: Case, now: float) -> Decision | None:
        if not self._have(case, ["audit"], now):
            return None
        primary, audit = case.voices["primary"], case.voices["audit"]
        if audit.status == Status.MISSING:
            if primary.status == Status.VIOLATION:
                raise data_error(case.shard_id, primary)
            return Decision(Outcome.SKIPPED, reason=str(audit.ref))
        self._refuse_bad_data(case)
        decision = self._weigh(case)
        if decision.outcome is Outcome.AGREE:
            return decision
        if not case.mismatch:
            case.mismatch = True
            self._roster.record.mismatches += 1
        if decision.needs:
            return self._weigh(case) if self._have(case, decision.needs, now) else None
        return decision

    def _weigh(self, case: Case) -> Decision:
        further = ("witness", "rerun_primary", "rerun_audit")
        return decide(
            case.voices["primary"],
            case.voices["audit"],
            *(case.voices.get(part) for part in further),
            compare=self._compare,
        )

    def _have(self, case: Case, parts: Iterable[str], now: float) -> bool:
        """Ask for voices that are neither there nor on their way; say whether all are there."""
        for part in parts:
            if part not in case.voices and part not in case.pending:
                self._ask(case, part, now)
        return all(part in case.voices for part in parts)

    def _ask(self, case: Case, part: str, now: float) -> None:
        role, domain, apart = self._who(case, part)
        if domain is None:
            case.voices[part] = _missing(part, "fewer than two domains" if part == "audit" else "")
            return
        if part == "audit" and not case.attempts[part]:
            self._roster.record.audited += 1
        case.pending[part] = self._roster.send(
            role,
            [case.shard_id],
            domain,
            now,
            apart_from=apart,
            attempt=case.attempts[part],
            parts={case.shard_id: part},
        )

    def _who(self, case: Case, part: str) -> tuple[str, Domain | None, list[str]]:
        if part.startswith("rerun_"):
            domain = self._roster.get(case.domain(part.removeprefix("rerun_")))
            # A suspect may still be asked to repeat itself; one that is gone may not.
            return "rerun", domain if domain and domain.live and not domain.barred else None, []
        heard = [name for name in (case.domain("primary"), case.domain("audit")) if name]
        return part, self._roster.partner([self._roster[name].place for name in heard]), heard

    def _refuse_bad_data(self, case: Case) -> None:
        """A violation that two domains show bit for bit is in the data, not in hardware."""
        primary, audit = case.voices["primary"], case.voices["audit"]
        alike = primary.status == audit.status == Status.VIOLATION
        if alike and primary.digest == audit.digest:
            raise data_error(case.shard_id, primary)


def voice_of(part: str, one: Heard) -> Voice:
    """Return a record as a voice; one whose payload lost its digest is damaged."""
    record = one.record
    status = {"ok": Status.VALUE, "violation": Status.VIOLATION, "error": Status.ERROR}[record.status]
    if not record.intact:
        status = Status.DAMAGED
    return Voice(part, one.domain, record.digest, one.fingerprint, status, one)


def garbled_voice(part: str, domain: str) -> Voice:
    """Return the voice of a domain that did not receive what it was sent."""
    return Voice(part, domain, None, "", Status.GARBLED)


def _missing(part: str, why: str) -> Voice:
    return Voice(part, "", None, "", Status.MISSING, why)


def data_error(shard_id: int, voice: Voice) -> ShardError:
    """Return the error for a shard whose data break the statistic."""
    text, worker = str(voice.status), ""
    if isinstance(voice.ref, Heard):
        text, worker = "; ".join(voice.ref.record.notes), voice.ref.worker
    kind = NonFiniteError if text.startswith("non-finite") else InvariantError
    return kind(
        f"shard {shard_id}: {text} (the same on every domain that computed it)",
        shard_id=shard_id,
        domain=voice.domain,
        worker=worker,
    )
