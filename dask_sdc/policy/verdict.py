"""The verdict on one shard: who, if anybody, computed it wrongly.

`decide` is a closed, pure function of at most five voices: primary, audit, witness, and one
rerun each of primary and audit. It never names a domain unless a third, apart domain contradicts
it and the other side reproduces itself.

How two voices relate:

- *agree*: the same digest, or different environments and inside the envelope.
- *close*: the same environment, different bits, inside the envelope. It calls for a follow-up
  and never accuses alone.
- *differ*: outside of the envelope, or either is not a value. A damaged payload or a garbled
  model differs from everything; a violated invariant only agrees with the same violation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from dask_sdc.exceptions import InputError


class Closeness(Enum):
    """What a comparison of two decoded payloads says."""

    IDENTICAL = "identical"
    WITHIN = "within"
    OUTSIDE = "outside"


class Status(StrEnum):
    """What a voice carries."""

    VALUE = "value"
    DAMAGED = "damaged"  # the payload does not fit its digest, or cannot be decoded
    GARBLED = "garbled"  # the worker received another model or batch than was sent
    VIOLATION = "violation"  # the state breaks a declared invariant
    ERROR = "error"  # the computation raised
    MISSING = "missing"  # nobody could be asked, or no answer came


_STATUSES = frozenset(Status)
_COMPARABLE = frozenset({Status.VALUE, Status.VIOLATION})


class Outcome(StrEnum):
    """What `decide` concludes; see `Decision`."""

    AGREE = "agree"
    MISMATCH_PENDING = "mismatch_pending"
    SUSPECT = "suspect"
    DEFERRED = "deferred"
    NOT_REPRODUCIBLE = "not_reproducible"
    INCONCLUSIVE = "inconclusive"
    ENVIRONMENT = "environment"
    SKIPPED = "skipped"


class Persistence(StrEnum):
    """Whether a suspect is wrong again when it is asked again."""

    TRANSIENT = "transient"
    PERSISTENT = "persistent"


#: Reasons, as they appear in receipts.
WITNESS_AGREES_WITH_PRIMARY = "witness_agrees_with_primary"
WITNESS_AGREES_WITH_AUDIT = "witness_agrees_with_audit"
NONTRANSITIVE_ENVELOPE = "deferred:nontransitive_envelope"
THREE_WAY_DISAGREEMENT = "deferred:three_way_disagreement"
INSUFFICIENT_WITNESSES = "deferred:insufficient_witnesses"
ENVIRONMENT_DIFFERENCE = "deferred:environment_difference"
ERROR_DIFFERENCE = "deferred:error_on_one_domain"
INVARIANT_DISAGREEMENT = "deferred:invariant_disagreement"
RERUN_MISSING = "deferred:rerun_missing"
RERUN_DIFFERS = "rerun_differs"
INVARIANT = "invariant"
ERROR = "error"


@dataclass(frozen=True, slots=True)
class Voice:
    """One answer for one shard.

    Parameters
    ----------
    role : str
        Role in which the shard was computed.
    domain : str
        Failure domain on which it really ran.
    digest : bytes or None
        Digest of the sealed payload; None where there is none.
    fingerprint : str
        Digest of the environment.
    status : str
        A `Status`.
    ref : object
        Whatever `compare` needs to find the payload; never looked at here.
    """

    role: str
    domain: str
    digest: bytes | None = None
    fingerprint: str = ""
    status: str = Status.VALUE
    ref: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.status not in _STATUSES:
            raise InputError(
                f"voice of {self.role}: expected a status of {', '.join(Status)}, got {self.status!r}"
            )
        if self.digest is None and self.status in _COMPARABLE:
            raise InputError(f"voice of {self.role}: expected a digest with status {self.status!r}, got None")


Compare = Callable[[Voice, Voice], Closeness]


@dataclass(frozen=True, slots=True)
class Decision:
    """What is concluded of one shard.

    Attributes
    ----------
    outcome : Outcome
        "agree": the primary stands. "mismatch_pending": the voices in `needs` are wanted.
        "suspect": `suspects` are named. "environment": nobody is accused, `barred` compute no
        more in this call. "inconclusive": the data or the program is at fault, not a domain.
        "deferred", "not_reproducible", "skipped": nobody is named; `reason` says why.
    suspects : tuple of str
        Domains that are accused.
    persistence : Persistence or None
        Whether the suspect repeated a wrong answer; None if it could not be asked again.
    reason : str
        Reason as it appears in the receipt.
    needs : tuple of str
        Arguments of `decide` that are still wanted: "witness", "rerun_primary", "rerun_audit".
    value : str or None
        Argument of `decide` whose payload is trusted; None if none is. A trusted payload may
        be a violation, which then is the data's.
    barred : tuple of str
        Domains whose shards are to be computed elsewhere, without an accusation.
    """

    outcome: Outcome
    suspects: tuple[str, ...] = ()
    persistence: Persistence | None = None
    reason: str = ""
    needs: tuple[str, ...] = ()
    value: str | None = None
    barred: tuple[str, ...] = ()


class _Relation(Enum):
    AGREE = "agree"
    CLOSE = "close"
    DIFFER = "differ"


def _relate(a: Voice, b: Voice, compare: Compare) -> _Relation:
    if a.status != b.status or a.status not in _COMPARABLE:
        return _Relation.DIFFER
    if a.digest == b.digest:
        return _Relation.AGREE
    if compare(a, b) is Closeness.OUTSIDE:
        return _Relation.DIFFER
    return _Relation.CLOSE if a.fingerprint == b.fingerprint else _Relation.AGREE


class _Case:
    """The voices of one shard, with their relations worked out once each."""

    def __init__(self, voices: Mapping[str, Voice], compare: Compare) -> None:
        self.voices = voices
        self._compare = compare
        self._known: dict[tuple[str, str], _Relation] = {}

    def relation(self, a: str, b: str) -> _Relation:
        if a == b:
            return _Relation.AGREE
        pair = (a, b) if a < b else (b, a)
        if pair not in self._known:
            self._known[pair] = _relate(self.voices[pair[0]], self.voices[pair[1]], self._compare)
        return self._known[pair]

    def agree(self, a: str, b: str) -> bool:
        return self.relation(a, b) is _Relation.AGREE

    def differ(self, a: str, b: str) -> bool:
        return self.relation(a, b) is _Relation.DIFFER

    def status(self, role: str) -> str:
        return self.voices[role].status

    def domain(self, role: str) -> str:
        return self.voices[role].domain

    def absent(self, role: str) -> bool:
        # A loud error says nothing of the value, so it is no voice at all for or against it.
        return self.status(role) in (Status.MISSING, Status.ERROR)


def decide(
    primary: Voice,
    audit: Voice,
    witness: Voice | None = None,
    rerun_primary: Voice | None = None,
    rerun_audit: Voice | None = None,
    *,
    compare: Compare,
) -> Decision:
    """Decide what the voices on one shard say.

    Parameters
    ----------
    primary, audit : Voice
        The value that is to be folded, and its recomputation on another domain.
    witness : Voice, optional
        The shard on a third domain; status "missing" if there is no such domain.
    rerun_primary, rerun_audit : Voice, optional
        The shard once more on the primary's and on the audit's domain.
    compare : callable
        Compares the payloads of two voices of different digest and equal status ("value" or
        "violation"); called at most once for a pair.

    Returns
    -------
    Decision
        Always one, for every combination of voices.
    """
    pair = _Case({"primary": primary, "audit": audit}, compare)
    missing = [role for role in pair.voices if pair.status(role) == Status.MISSING]
    if missing:
        return Decision(Outcome.SKIPPED, reason=f"skipped:{missing[0]}_missing")
    if primary.domain == audit.domain:
        return Decision(Outcome.SKIPPED, reason="skipped:same_domain")
    if primary.status == Status.VALUE and pair.agree("primary", "audit"):
        return Decision(Outcome.AGREE, reason="", value="primary")

    further = {"witness": witness, "rerun_primary": rerun_primary, "rerun_audit": rerun_audit}
    needs = tuple(role for role, voice in further.items() if voice is None)
    if needs:
        return Decision(Outcome.MISMATCH_PENDING, reason="mismatch", needs=needs)
    voices = {**pair.voices, **{role: _placed(role, voice, pair) for role, voice in further.items() if voice}}
    return _conclude(_Case(voices, compare))


def _placed(role: str, voice: Voice, pair: _Case) -> Voice:
    """Count a voice from the wrong domain as missing: it proves nothing there."""
    if role == "witness":
        fits = voice.domain not in (pair.domain("primary"), pair.domain("audit"))
    else:
        fits = voice.domain == pair.domain(role.removeprefix("rerun_"))
    return voice if fits else Voice(voice.role, voice.domain, status=Status.MISSING)


def _conclude(case: _Case) -> Decision:
    both = case.status("primary") == case.status("audit")
    if both and case.status("primary") == Status.ERROR:
        return _shared(case, Status.ERROR, ERROR, ERROR_DIFFERENCE)
    if case.status("primary") == Status.VIOLATION and case.agree("primary", "audit"):
        return _shared(case, Status.VIOLATION, INVARIANT, INVARIANT_DISAGREEMENT)
    if case.absent("witness"):
        return _deferred(case, INSUFFICIENT_WITNESSES)
    with_primary, with_audit = case.agree("witness", "primary"), case.agree("witness", "audit")
    if with_primary and with_audit:
        return _deferred(case, NONTRANSITIVE_ENVELOPE)
    if with_primary:
        return _odd_one_out(case, "audit", "primary", WITNESS_AGREES_WITH_PRIMARY)
    if with_audit:
        return _odd_one_out(case, "primary", "audit", WITNESS_AGREES_WITH_AUDIT)
    return _three_answers(case)


def _shared(case: _Case, status: Status, reason: str, otherwise: str) -> Decision:
    """Primary and audit fail alike: the data or the program, unless the witness succeeds."""
    if case.absent("witness") or case.status("witness") == status:
        return Decision(Outcome.INCONCLUSIVE, reason=reason)
    return _deferred(case, otherwise)


def _odd_one_out(case: _Case, odd: str, sound: str, reason: str) -> Decision:
    """One side is contradicted by the witness and by the other side."""
    again, sound_again = f"rerun_{odd}", f"rerun_{sound}"
    barred = (case.domain(odd),)
    right_again = case.agree(again, sound) and case.agree(again, "witness")
    if case.status(odd) == Status.ERROR:
        return Decision(
            Outcome.ENVIRONMENT, reason=ERROR_DIFFERENCE, value=sound, barred=() if right_again else barred
        )
    if case.absent(sound_again):
        return _deferred(case, RERUN_MISSING)
    if not case.agree(sound_again, sound):
        return Decision(Outcome.NOT_REPRODUCIBLE, reason=RERUN_DIFFERS, value=_trusted(case))
    if right_again:
        return Decision(Outcome.SUSPECT, barred, Persistence.TRANSIENT, reason, value=sound)
    if _far(case, odd, sound) or (not case.absent(again) and _far(case, again, sound)):
        persistence = None if case.absent(again) else Persistence.PERSISTENT
        return Decision(Outcome.SUSPECT, barred, persistence, reason, value=sound)
    if case.differ(odd, sound) or case.differ(odd, "witness"):
        return _deferred(case, NONTRANSITIVE_ENVELOPE)
    return Decision(Outcome.ENVIRONMENT, reason=ENVIRONMENT_DIFFERENCE, value=sound, barred=barred)


def _far(case: _Case, role: str, sound: str) -> bool:
    """Say whether a voice is outside of the envelope of both voices that agree."""
    return case.differ(role, sound) and case.differ(role, "witness")


def _three_answers(case: _Case) -> Decision:
    """Nobody agrees: not reproducible, two faults, or three environments."""
    sides = [side for side in ("primary", "audit") if not case.absent(f"rerun_{side}")]
    repeats = [case.agree(f"rerun_{side}", side) for side in sides]
    if sides and not any(repeats) and not _settled(case):
        return Decision(Outcome.NOT_REPRODUCIBLE, reason=RERUN_DIFFERS, value=_trusted(case))
    trio = ("primary", "audit", "witness")
    if not any(case.differ(a, b) for a in trio for b in trio):
        return Decision(Outcome.ENVIRONMENT, reason=ENVIRONMENT_DIFFERENCE, value=_trusted(case))
    return _deferred(case, THREE_WAY_DISAGREEMENT)


def _settled(case: _Case) -> bool:
    """Say whether a rerun agrees with the witness: then the task is reproducible after all."""
    return any(case.agree(f"rerun_{side}", "witness") for side in ("primary", "audit"))


def _deferred(case: _Case, reason: str) -> Decision:
    return Decision(Outcome.DEFERRED, reason=reason, value=_trusted(case))


def _trusted(case: _Case) -> str | None:
    """Return the value that two domains support best, or None if there is no such value.

    Support is counted in domains first, then in voices with the very same bits, then in voices
    that agree. Without agreement a value inside the envelope of every other one will do.
    """
    roles = [role for role in case.voices if case.status(role) == Status.VALUE]
    scores = {role: _support(case, role, roles) for role in roles}
    best = [role for role in roles if scores[role] == max(scores.values())]
    if not best:
        return None
    if scores[best[0]][0] >= 2:
        return best[0] if all(case.agree(best[0], role) for role in best) else None
    domains = {case.domain(role) for role in roles}
    alike = len(domains) >= 2 and not any(case.differ(a, b) for a in roles for b in roles)
    return roles[0] if alike else None


def _support(case: _Case, role: str, roles: list[str]) -> tuple[int, int, int]:
    friends = [other for other in roles if case.agree(role, other)]
    same = sum(case.voices[other].digest == case.voices[role].digest for other in friends)
    return len({case.domain(other) for other in friends}), same, len(friends)
