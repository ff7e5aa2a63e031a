"""The cases of a round: the voices on each audited shard, and when they decide it.

A case opens when an audit is queued, or when a primary arrives damaged, garbled or in breach of
an invariant. It asks for whatever voice is missing, survives the loss of any of them, and ends
in exactly one `Finding`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dask_sdc.exceptions import InvariantError, NonFiniteError, ShardError
from dask_sdc.policy.messages import Case, Heard
from dask_sdc.policy.roster import Domain, Roster
from dask_sdc.policy.verdict import Closeness, Decision, Outcome, Status, Voice, decide

#: Why an audit is skipped that nobody can do.
TOO_FEW = "fewer than two domains"
_STATUS = {"ok": Status.VALUE, "violation": Status.VIOLATION, "error": Status.ERROR}


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
        #: How many voices of each domain the open cases have heard.
        self._heard: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, shard_id: int) -> bool:
        return shard_id in self._open

    def involve(self, domains: Iterable[str]) -> bool:
        """Say whether an open case has heard any of some domains."""
        return any(self._heard[name] for name in domains)

    # -- what is heard -----------------------------------------------------------------

    def expect_audit(self, shard_id: int, batch_id: int, drawn_for: str) -> None:
        """Open a case for an audit that was queued beside its primary."""
        self._open[shard_id] = Case(shard_id, pending={"audit": batch_id}, asked=True, drawn_for=drawn_for)
        self._roster.record.audited += 1

    def displace(self, shard_id: int) -> tuple[str, int | None]:
        """Note that an awaited primary is to be computed elsewhere.

        Returns
        -------
        (str, int or None)
            The domain that owes the audit again that was drawn for it, empty if none does; and the
            lane of the audit, which the new primary had better keep off.
        """
        case = self._open.get(shard_id)
        if case is None:
            return "", None
        owing, case.drawn_for = case.drawn_for, ""
        auditor = self._auditor(case)
        return owing, None if auditor is None else auditor.place.lane

    def _auditor(self, case: Case) -> Domain | None:
        holder = self._roster.holder(case.pending.get("audit"))
        return holder or self._roster.get(case.domain("audit"))

    def hear_primary(self, shard_id: int, voice: Voice) -> None:
        """Add the primary; opens a case unless it is a plain value that nobody audits."""
        case = self._open.get(shard_id)
        if case is None:
            if voice.status == Status.VALUE:
                return
            case = self._open[shard_id] = Case(shard_id)
        auditor = self._auditor(case)
        if auditor is not None and self._roster.same_lane(auditor.name, voice.domain):
            # Not apart any more: it is audited anew.
            case.pending.pop("audit", None)
            if old := case.voices.pop("audit", None):
                self._heard[old.domain] -= 1
        self._add(case, "primary", voice)

    def hear(
        self, shard_id: int, part: str, batch_id: int, domain: str, voice: Voice | None, why: str = ""
    ) -> None:
        """Add a voice that a domain was asked for; None if it was lost."""
        case = self._open.get(shard_id)
        if case is None or case.pending.get(part) != batch_id:
            return
        del case.pending[part]
        if voice is not None and part in ("audit", "witness") and voice.status == Status.ERROR:
            # It says nothing of the primary: somebody else is asked.
            voice, why = None, f"the {part} raised an error"
        if voice is None:
            case.tried.add(domain)
            case.attempts[part] += 1
            if case.attempts[part] > self._max_retries:
                voice = _missing(part, why)
        if voice is not None:
            self._add(case, part, voice)
        self._changed[shard_id] = None

    def _add(self, case: Case, part: str, voice: Voice) -> None:
        case.voices[part] = voice
        self._heard[voice.domain] += 1
        self._changed[case.shard_id] = None

    def _close(self, case: Case) -> None:
        del self._open[case.shard_id]
        self._heard.subtract(voice.domain for voice in case.voices.values())

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
                self._close(case)
                findings.append(Finding(case, decision))
        return findings

    def _decide(self, case: Case, now: float) -> Decision | None:
        if not self._have(case, ["audit"], now):
            return None
        primary, audit = case.voices["primary"], case.voices["audit"]
        if audit.status == Status.MISSING:
            if primary.status == Status.VIOLATION:
                raise data_error(case.shard_id, primary, f"nobody could check it: {audit.ref}")
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
            self._add(case, part, _missing(part, TOO_FEW if part == "audit" else ""))
            return
        if part == "audit" and not case.asked:
            case.asked = True
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
        places = [self._roster[name].place for name in heard]
        return part, self._roster.partner(places, case.tried), heard

    def _refuse_bad_data(self, case: Case) -> None:
        """A violation that two domains show bit for bit is in the data, not in hardware."""
        primary, audit = case.voices["primary"], case.voices["audit"]
        alike = primary.status == audit.status == Status.VIOLATION
        if alike and primary.digest == audit.digest:
            raise data_error(case.shard_id, primary)


def voice_of(part: str, one: Heard) -> Voice:
    """Return a record as a voice; one whose payload lost its digest is damaged."""
    record = one.record
    status = _STATUS[record.status] if record.intact else Status.DAMAGED
    return Voice(part, one.domain, record.digest, one.fingerprint, status, one)


def garbled_voice(part: str, domain: str) -> Voice:
    """Return the voice of a domain that did not receive what it was sent."""
    return Voice(part, domain, None, "", Status.GARBLED)


def _missing(part: str, why: str) -> Voice:
    return Voice(part, "", None, "", Status.MISSING, why)


def data_error(shard_id: int, voice: Voice, how: str = "the same on every domain asked") -> ShardError:
    """Return the error for a shard whose data break the statistic; ``how`` says who else saw it."""
    text, worker = str(voice.status), ""
    if isinstance(voice.ref, Heard):
        text, worker = "; ".join(voice.ref.record.notes), voice.ref.worker
    kind = NonFiniteError if text.startswith("non-finite") else InvariantError
    return kind(
        f"shard {shard_id}: {text} (domain {voice.domain}, {how})",
        shard_id=shard_id,
        domain=voice.domain,
        worker=worker,
    )
