"""One audited round as a pure state machine: events in, instructions out.

The round decides where every shard is computed, which are audited, what a mismatch means, and
when the answer is ready. It does no I/O, knows no cluster and no clock but the times that the
events carry, so that every path of it can be tested without a worker.

A shard's life::

    pool ──dispatch──▶ outstanding ──landed──▶ settled ──(all settled, no open case)──▶ done
      ▲                    │ lost                 │ its domain became suspect
      └────────────────────┘                      └──▶ staged on survivors ──commit──▶ settled
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dask_sdc.evidence.seal import SealedStatistic
from dask_sdc.exceptions import InvariantError, NoDomainError, NonFiniteError, SDCError, ShardError
from dask_sdc.policy.messages import (
    Abort,
    Cancel,
    Case,
    Close,
    Dispatch,
    DomainJoined,
    DomainLost,
    Done,
    Event,
    Evict,
    Failed,
    Heard,
    Instruction,
    Landed,
    Place,
    Quarantine,
    Quarantined,
    RoundRecord,
    Settings,
    Tick,
)
from dask_sdc.policy.pool import Pool
from dask_sdc.policy.sampling import CoverageSampler
from dask_sdc.policy.verdict import Closeness, Decision, Outcome, Status, Voice, decide


@dataclass
class _Domain:
    place: Place
    live: bool = True
    barred: str = ""
    suspect: bool = False
    failures: int = 0
    last_heard: float = 0.0
    outstanding: dict[int, _Outstanding] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        return self.live and not self.barred and not self.suspect

    @property
    def load(self) -> float:
        return sum(o.order.expected + 1e-6 for o in self.outstanding.values()) / self.place.slots


@dataclass
class _Outstanding:
    order: Dispatch
    since: float
    #: Parts of cases that this batch answers, by shard; empty for primary and heal.
    parts: dict[int, str] = field(default_factory=dict)


@dataclass
class _Healing:
    """Staging of every shard that suspects may have spoiled."""

    suspects: dict[str, list[tuple[Case, Decision]]] = field(default_factory=dict)
    todo: deque[int] = field(default_factory=deque)
    staged: dict[int, Heard] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)
    awaiting: set[str] = field(default_factory=set)
    failure: str = ""


class Round:
    """State machine of one audited round.

    Parameters
    ----------
    number : int
        Number of the round.
    shard_ids : sequence of int
        The shards to compute, in canonical order.
    places : iterable of Place
        Live domains.
    sampler : CoverageSampler
        Decides which shards of a domain are audited; carries the debt between rounds.
    compare : callable
        ``compare(a, b) -> Closeness`` of two voices that hold values.
    settings : Settings
    preferred : mapping of int to str, optional
        Domain that holds a shard's block or computed it in the last round.
    cost : float, optional
        Expected seconds per shard, if known.
    barred : mapping of str to str, optional
        Domains that must not be used in this call, with the reason.
    """

    def __init__(
        self,
        number: int,
        shard_ids: Sequence[int],
        places: Iterable[Place],
        sampler: CoverageSampler,
        compare: Callable[[Voice, Voice], Closeness],
        settings: Settings,
        *,
        preferred: Mapping[int, str] | None = None,
        cost: float | None = None,
        barred: Mapping[str, str] | None = None,
    ) -> None:
        self.settings = settings
        self.sampler = sampler
        self.compare = compare
        self.cost = cost
        self.settled: dict[int, Heard] = {}
        self.replaced = False
        self.done = False
        #: ("computed" or "clean", domain, shard) in the order in which it happened.
        self.log: list[tuple[str, str, int]] = []
        self._barred = dict(barred or {})
        self._domains: dict[str, _Domain] = {}
        self._n = len(shard_ids)
        self._pool = Pool(shard_ids, preferred or {})
        self._cases: dict[int, Case] = {}
        # Cases that lost a voice, judged once the loop that lost it is over.
        self._unjudged: list[Case] = []
        self._attempts: Counter[int] = Counter()
        self._errors: dict[int, dict[str, tuple[str, ...]]] = {}
        self._healing: _Healing | None = None
        self._gave_up_healing: dict[str, str] = {}
        self._next_batch = 0
        self._desolate_since: float | None = None
        self._out: list[Instruction] = []
        for place in places:
            self._join(place, 0.0)
        self.record = RoundRecord(number, self._n, len(self._usable()))

    # -- the machine -------------------------------------------------------------------

    def start(self, now: float) -> list[Instruction]:
        """Return the first instructions."""
        lanes = {d.place.lane for d in self._usable()}
        if len(lanes) < 2 and self.sampler.base_rate > 0:
            self.record.note = (
                f"no audit: {len(lanes)} failure domain(s) live, at least two are needed"
            )
        return self.handle(Tick(now))

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and return what to do about it."""
        self._out = []
        if self.done:
            return []
        try:
            self._take(event)
            self._advance(event.now)
        except SDCError as error:
            self.done = True
            self._out.append(Abort(error))
        return self._out

    def _take(self, event: Event) -> None:
        match event:
            case Landed():
                self._landed(event)
            case Failed():
                outstanding = self._pop(event.batch_id)
                if outstanding is not None:
                    self._lose(outstanding, event.why)
            case DomainLost():
                self._lost(event.domain, event.why)
            case DomainJoined():
                self._join(event.place, event.now)
            case Quarantined():
                self._quarantined(event)
            case Tick():
                self._check_silence(event.now)

    def _advance(self, now: float) -> None:
        self._check_desolation(now)
        self._heal_step(now)
        self._dispatch_primaries(now)
        settled = len(self.settled) == self._n
        if settled and not self._cases and self._healing is None:
            for domain in self._domains.values():
                for batch_id in list(domain.outstanding):
                    self._cancel(batch_id)
            self.done = True
            self._out.append(Done())

    # -- domains -----------------------------------------------------------------------

    def _usable(self) -> list[_Domain]:
        return [d for d in self._domains.values() if d.usable]

    def _join(self, place: Place, now: float) -> None:
        known = self._domains.get(place.domain)
        if known is None:
            self._domains[place.domain] = _Domain(
                place, barred=self._barred.get(place.domain, ""), last_heard=now
            )
        elif known.live:
            known.place = replace(known.place, slots=place.slots)
        else:
            known.place, known.live, known.last_heard = place, True, now

    def _lost(self, name: str, why: str) -> None:
        domain = self._domains.get(name)
        if domain is None or not domain.live:
            return
        domain.live = False
        domain.failures += 1
        if name not in self.record.failed:
            self.record.failed.append(name)
        if domain.failures > self.settings.max_retries and not domain.barred:
            domain.barred = f"failed {domain.failures} times"
            self.record.barred.append(name)
        self.record.reused += sum(h.domain == name for h in self.settled.values())
        for batch_id in list(domain.outstanding):
            outstanding = self._cancel(batch_id)
            if outstanding is not None:
                self._lose(outstanding, why)

    def _check_silence(self, now: float) -> None:
        for domain in list(self._domains.values()):
            if not domain.live or not domain.outstanding:
                continue
            head = next(iter(domain.outstanding.values()))
            waited = now - max(head.since, domain.last_heard)
            allowed = self.settings.timeout + 3 * head.order.expected
            if waited > allowed:
                why = f"silent for {waited:.1f} s with {len(domain.outstanding)} batches"
                self._out.append(Evict(domain.place.domain, why))
                self._lost(domain.place.domain, why)

    def _check_desolation(self, now: float) -> None:
        """Give up when nobody has been there to work for longer than the timeout."""
        if self._usable():
            self._desolate_since = None
            return
        if self._desolate_since is None:
            self._desolate_since = now
        waited = now - self._desolate_since
        if waited > self.settings.timeout or all(d.barred for d in self._domains.values()):
            states = {
                d.place.domain: d.barred or ("suspect" if d.suspect else "gone")
                for d in self._domains.values()
            }
            raise NoDomainError(
                f"expected a live failure domain to compute {self._n - len(self.settled)} "
                f"remaining shards, got none for {waited:.1f} s: {states}"
            )

    # -- dispatch ----------------------------------------------------------------------

    def _send(
        self,
        role: str,
        shard_ids: Sequence[int],
        domain: _Domain,
        now: float,
        *,
        apart_from: Iterable[str] = (),
        attempt: int = 0,
        parts: dict[int, str] | None = None,
    ) -> int:
        order = Dispatch(
            self._next_batch,
            role,
            attempt,
            tuple(shard_ids),
            domain.place.domain,
            tuple(sorted(set(apart_from))),
            len(shard_ids) * (self.cost or 0.0),
        )
        self._next_batch += 1
        domain.outstanding[order.batch_id] = _Outstanding(order, now, parts or {})
        self.record.evaluations += len(shard_ids)
        self._out.append(order)
        return order.batch_id

    def _dispatch_primaries(self, now: float) -> None:
        progress = True
        while progress and self._pool:
            progress = False
            for domain in sorted(self._usable(), key=lambda d: d.load):
                primaries = sum(o.order.role == "primary" for o in domain.outstanding.values())
                if primaries < 2 * domain.place.slots and self._dispatch_primary(domain, now):
                    progress = True

    def _dispatch_primary(self, domain: _Domain, now: float) -> bool:
        name = domain.place.domain
        others = {d.place.domain for d in self._usable()} - {name}
        shard_ids = self._pool.take(name, self._batch_size(), others)
        if not shard_ids:
            return False
        attempt = max(self._attempts[k] for k in shard_ids)
        self._send("primary", shard_ids, domain, now, attempt=attempt)
        # Shards that already have an audit case on the way keep it.
        fresh = [k for k in shard_ids if k not in self._cases]
        auditable = len({d.place.lane for d in self._usable()}) >= 2
        wanted = self.sampler.draw(name, fresh) if fresh and auditable else ()
        if wanted:
            self._dispatch_audits(wanted, domain, now)
        return True

    def _batch_size(self) -> int:
        """Guided self-scheduling: half of an even share, within the bounds for a batch."""
        slots = sum(d.place.slots for d in self._usable())
        guided = math.ceil(len(self._pool) / (2 * slots))
        if self._pool.retries or not self.cost:
            return 1
        least = math.ceil(self.settings.batch_min / self.cost)
        most = max(1, int(self.settings.batch_max / self.cost))
        even = math.ceil(self._n / slots)
        return min(max(guided, least), most, even)

    def _dispatch_audits(self, shard_ids: Sequence[int], primary: _Domain, now: float) -> None:
        """Queue audits at once, beside their primaries: they read from the source."""
        partner = self._partner([primary.place], primary.place.fingerprint)
        if partner is None:
            self.sampler.refund(primary.place.domain, len(shard_ids))
            self.record.skip("fewer than two domains", len(shard_ids))
            return
        self.record.audited += len(shard_ids)
        batch_id = self._send(
            "audit",
            shard_ids,
            partner,
            now,
            apart_from=[primary.place.domain],
            parts=dict.fromkeys(shard_ids, "audit"),
        )
        for shard_id in shard_ids:
            self._cases[shard_id] = Case(shard_id, pending={"audit": batch_id})
            self._pool.avoid(shard_id, partner.place.domain)

    def _partner(self, apart: Iterable[Place], fingerprint: str) -> _Domain | None:
        """Pick a domain that shares no lane with others, of the same environment if one is."""
        lanes = {place.lane for place in apart}
        able = [d for d in self._usable() if d.place.lane not in lanes]
        return min(
            able,
            key=lambda d: (d.place.fingerprint != fingerprint, d.load, d.place.domain),
            default=None,
        )

    def _pop(self, batch_id: int) -> _Outstanding | None:
        for domain in self._domains.values():
            if (found := domain.outstanding.pop(batch_id, None)) is not None:
                return found
        return None

    def _cancel(self, batch_id: int) -> _Outstanding | None:
        self._out.append(Cancel(batch_id))
        return self._pop(batch_id)

    # -- batches come back -------------------------------------------------------------

    def _landed(self, event: Landed) -> None:
        outstanding = self._pop(event.batch_id)
        if outstanding is None:
            return  # superseded
        order, result = outstanding.order, event.result
        domain = self._domains[order.domain]
        domain.last_heard = event.now
        if result.status == "misplaced" or (
            result.status == "ok" and result.domain != order.domain
        ):
            self._lose(outstanding, f"ran on {result.domain}, expected {order.domain}")
            return
        if result.status == "garbled":
            records = {}
        else:
            records = {
                r.shard_id: r for r in reversed(result.records) if r.shard_id in order.shard_ids
            }
        self._learn_cost(records.values())
        heard = {
            k: Heard(r, result.domain, result.worker, result.fingerprint, order.role, order.attempt)
            for k, r in records.items()
        }
        if result.status == "garbled":
            self._garbled(outstanding, event.now)
        elif order.role == "primary":
            self._primaries(outstanding, heard, event.now)
        elif order.role == "heal":
            self._staged(outstanding, heard)
        else:
            self._voices(outstanding, heard, event.now)

    def _learn_cost(self, records: Iterable[SealedStatistic]) -> None:
        seconds = [r.elapsed for r in records if r.status != "error"]
        if seconds:
            mean = max(sum(seconds) / len(seconds), 1e-7)
            self.cost = mean if self.cost is None else 0.7 * self.cost + 0.3 * mean

    def _primaries(
        self, outstanding: _Outstanding, heard: Mapping[int, Heard], now: float
    ) -> None:
        order = outstanding.order
        missing = [k for k in order.shard_ids if k not in heard]
        if missing:
            self._retry(missing, order.domain, "left out of its batch")
        for shard_id, one in heard.items():
            self.log.append(("computed", order.domain, shard_id))
            if one.record.status == "error":
                self._error(shard_id, one, now)
            else:
                self._primary(shard_id, one, now)

    def _primary(self, shard_id: int, one: Heard, now: float) -> None:
        voice = _voice("primary", one)
        case = self._cases.get(shard_id)
        if voice.status == Status.VALUE:
            self._settle(shard_id, one)
            if case is None:
                return
        elif case is None:
            case = self._cases[shard_id] = Case(shard_id)
        audited_by = case.domain("audit")
        if audited_by is not None and self._same_lane(audited_by, one.domain):
            del case.voices["audit"]  # not apart any more: audited anew
        case.voices["primary"] = voice
        self._judge(case, now)

    def _voices(self, outstanding: _Outstanding, heard: Mapping[int, Heard], now: float) -> None:
        for shard_id, part in outstanding.parts.items():
            case = self._cases.get(shard_id)
            if case is None or case.pending.get(part) != outstanding.order.batch_id:
                continue
            del case.pending[part]
            one = heard.get(shard_id)
            if one is None:
                self._voice_lost(case, part, "left out of its batch")
            else:
                case.voices[part] = _voice(part, one)
            self._judge(case, now)

    def _garbled(self, outstanding: _Outstanding, now: float) -> None:
        """The statistic did not arrive as it was sent: every shard of the batch is unheard."""
        order = outstanding.order
        if order.role == "heal":
            self._lose(outstanding, "received a garbled statistic")
            return
        if order.role == "primary":
            first, *rest = order.shard_ids
            case = self._cases.setdefault(first, Case(first))
            case.voices["primary"] = Voice("primary", order.domain, None, "", "garbled")
            self._judge(case, now)
            self._retry(rest, order.domain, "received a garbled statistic")
            return
        for shard_id, part in outstanding.parts.items():
            case_ = self._cases.get(shard_id)
            if case_ is not None and case_.pending.pop(part, None) is not None:
                case_.voices[part] = Voice(part, order.domain, None, "", "garbled")
                self._judge(case_, now)

    def _settle(self, shard_id: int, one: Heard) -> None:
        self.replaced |= shard_id in self.settled
        self.settled[shard_id] = one

    def _lose(self, outstanding: _Outstanding, why: str) -> None:
        """A batch is gone: its shards go back, its audits go elsewhere."""
        order = outstanding.order
        if order.role == "primary":
            self._retry(order.shard_ids, order.domain, why)
        elif order.role == "heal":
            self._heal_again(order.shard_ids, why)
        else:
            for shard_id, part in outstanding.parts.items():
                case = self._cases.get(shard_id)
                if case is not None and case.pending.get(part) == order.batch_id:
                    del case.pending[part]
                    self._voice_lost(case, part, why)
                    self._unjudged.append(case)

    def _retry(self, shard_ids: Iterable[int], domain: str, why: str) -> None:
        for shard_id in shard_ids:
            self._attempts[shard_id] += 1
            if self._attempts[shard_id] > self.settings.max_retries:
                raise ShardError(
                    f"shard {shard_id}: failed {self._attempts[shard_id]} times, "
                    f"last on domain {domain!r}: {why}",
                    shard_id=shard_id,
                    domain=domain,
                )
            self.record.recomputed += 1
            self._pool.put_back(shard_id, domain)

    def _error(self, shard_id: int, one: Heard, now: float) -> None:
        """Two domains with an error mean the data or the statistic; one may be the hardware."""
        errors = self._errors.setdefault(shard_id, {})
        repeated = one.domain in errors
        errors[one.domain] = one.record.notes
        others = any(d.place.domain not in errors for d in self._usable())
        if len(errors) >= 2 or repeated or not others:
            kind, note = (*one.record.notes, "", "")[:2]
            if f"shard {shard_id}" not in note:
                note = f"shard {shard_id}: {note}"
            raise ShardError(
                f"{note} ({kind} on {' and '.join(sorted(errors))}, worker {one.worker})",
                shard_id=shard_id,
                domain=one.domain,
                worker=one.worker,
            )
        self._retry([shard_id], one.domain, one.record.notes[-1])

    # -- cases -------------------------------------------------------------------------

    def _voice_lost(self, case: Case, part: str, why: str) -> None:
        case.attempts[part] += 1
        if case.attempts[part] > self.settings.max_retries:
            case.voices[part] = Voice(part, "", None, "", "missing", why)

    def _judge(self, case: Case, now: float) -> None:
        """Ask for what is still needed to decide a case, or decide it."""
        if self._cases.get(case.shard_id) is not case or "primary" not in case.voices:
            return
        primary = case.voices["primary"]
        audit = case.voices.get("audit")
        if audit is None:
            if "audit" not in case.pending:
                self._ask(case, "audit", now)
            return
        if audit.status == Status.ERROR:
            self._audit_error(case, audit, now)
            return
        if audit.status == Status.MISSING:
            self._audit_missing(case, audit)
            return
        self._refuse_bad_data(case)
        decision = decide(
            primary,
            audit,
            case.voices.get("witness"),
            case.voices.get("rerun_primary"),
            case.voices.get("rerun_audit"),
            compare=self.compare,
        )
        if decision.outcome is Outcome.AGREE and not case.mismatch:
            self._agreed(case, primary)
            return
        if not case.mismatch:
            case.mismatch = True
            self.record.mismatches += 1
        wanted = [p for p in decision.needs if p not in case.voices]
        for part in wanted:
            if part not in case.pending:
                self._ask(case, part, now)
        if case.pending or any(p not in case.voices for p in wanted):
            return
        self._decided(case, decision)

    def _ask(self, case: Case, part: str, now: float) -> None:
        """Send one more computation of a case's shard; missing if nobody can do it."""
        role, domain, apart = self._who(case, part)
        if domain is None:
            case.voices[part] = Voice(part, "", None, "", "missing", "no domain can do it")
            if part == "audit":
                self._audit_missing(case, case.voices["audit"])
            else:
                self._unjudged.append(case)
            return
        if part == "audit" and case.attempts[part] == 0:
            self.record.audited += 1
        case.pending[part] = self._send(
            role,
            [case.shard_id],
            domain,
            now,
            apart_from=apart,
            attempt=case.attempts[part],
            parts={case.shard_id: part},
        )

    def _who(self, case: Case, part: str) -> tuple[str, _Domain | None, list[str]]:
        if part.startswith("rerun_"):
            name = case.domain(part.removeprefix("rerun_"))
            domain = self._domains.get(name or "")
            # A suspect may still be asked to repeat itself; a dead one may not.
            return "rerun", domain if domain and domain.live and not domain.barred else None, []
        heard = [n for n in (case.domain("primary"), case.domain("audit")) if n]
        places = [self._domains[n].place for n in heard]
        fingerprint = places[0].fingerprint if places else ""
        return part, self._partner(places, fingerprint), heard

    def _audit_error(self, case: Case, audit: Voice, now: float) -> None:
        """An audit that raises says nothing about the primary: try another domain."""
        del case.voices["audit"]
        self._voice_lost(case, "audit", "the audit raised an error")
        if "audit" in case.voices:
            self._audit_missing(case, case.voices["audit"])
        else:
            self._ask(case, "audit", now)

    def _audit_missing(self, case: Case, audit: Voice) -> None:
        """No audit was possible: skipped with the reason, and owed again."""
        primary = case.voices["primary"]
        if primary.status == Status.VIOLATION:
            raise _data_error(case.shard_id, primary)
        del self._cases[case.shard_id]
        self.sampler.refund(primary.domain, 1)
        self.record.skip(str(audit.ref))
        if primary.status != Status.VALUE:
            self._retry([case.shard_id], primary.domain, f"its payload was {primary.status}")

    def _refuse_bad_data(self, case: Case) -> None:
        """A violation that two domains show bit for bit is in the data, not in hardware."""
        primary = case.voices["primary"]
        for part in ("audit", "witness"):
            other = case.voices.get(part)
            if (
                primary.status == Status.VIOLATION
                and other is not None
                and other.status == Status.VIOLATION
                and other.digest == primary.digest
            ):
                raise _data_error(case.shard_id, primary)

    def _agreed(self, case: Case, primary: Voice) -> None:
        del self._cases[case.shard_id]
        self.record.agreed += 1
        self.log.append(("clean", primary.domain, case.shard_id))

    def _decided(self, case: Case, decision: Decision) -> None:
        del self._cases[case.shard_id]
        trusted = case.voices.get(decision.value) if decision.value else None
        if trusted is not None and isinstance(trusted.ref, Heard):
            self._settle(case.shard_id, trusted.ref)
        names = decision.suspects or decision.barred
        if names:
            for name in names:
                self._suspect(name, case, decision)
            return
        if decision.outcome is Outcome.INCONCLUSIVE:
            raise _data_error(case.shard_id, case.voices["primary"])
        if case.shard_id not in self.settled:
            usable = [
                v.ref for v in case.voices.values() if v.status == Status.VALUE and isinstance(v.ref, Heard)
            ]
            if usable:
                self._settle(case.shard_id, usable[0])
            else:
                primary = case.voices["primary"]
                self._retry([case.shard_id], primary.domain, f"its payload was {primary.status}")
        self._out.append(Close(case, decision, _status_of(decision)))

    # -- healing -----------------------------------------------------------------------

    def _suspect(self, name: str, case: Case, decision: Decision) -> None:
        if name in self._gave_up_healing:
            self._out.append(Close(case, decision, self._gave_up_healing[name]))
            return
        if name not in self.record.suspects and decision.outcome is Outcome.SUSPECT:
            self.record.suspects.append(name)
        healing = self._healing = self._healing or _Healing()
        if name in healing.suspects:
            healing.suspects[name].append((case, decision))
            return
        domain = self._domains[name]
        domain.suspect = True
        healing.suspects[name] = [(case, decision)]
        self._withdraw(domain)
        healing.todo.extend(k for k, s in healing.staged.items() if s.domain == name)
        healing.staged = {k: s for k, s in healing.staged.items() if s.domain != name}
        tainted = sorted(k for k, s in self.settled.items() if s.domain == name)
        healing.todo.extend(k for k in tainted if k not in healing.staged)

    def _withdraw(self, domain: _Domain) -> None:
        """Take a suspect's work away, but for the reruns that open cases wait for."""
        for batch_id, outstanding in list(domain.outstanding.items()):
            if outstanding.order.role == "rerun":
                continue
            self._cancel(batch_id)
            order = outstanding.order
            if order.role == "primary":
                self._attempts.subtract(order.shard_ids)  # not their fault
            self._lose(outstanding, "its domain became suspect")

    def _heal_step(self, now: float) -> None:
        while self._unjudged:
            self._judge(self._unjudged.pop(), now)
        healing = self._healing
        if healing is None or healing.awaiting:
            return
        if not healing.failure and healing.todo:
            self._stage(healing, now)
        if healing.failure:
            self._unheal(healing)
            return
        outstanding = any(
            o.order.role == "heal" for d in self._domains.values() for o in d.outstanding.values()
        )
        involved = any(
            case.domain(part) in healing.suspects
            for case in self._cases.values()
            for part in ("primary", "audit", "witness")
        )
        if not healing.todo and not outstanding and not involved:
            self._commit(healing)

    def _stage(self, healing: _Healing, now: float) -> None:
        survivors = self._usable()
        lanes = {self._domains[name].place.lane for name in healing.suspects}
        safe = [d for d in survivors if d.place.lane not in lanes]
        if not safe:
            healing.failure = "deferred:no_safe_survivor"
            return
        size = max(1, math.ceil(len(healing.todo) / (2 * sum(d.place.slots for d in safe))))
        while healing.todo:
            target = min(safe, key=lambda d: (d.load, d.place.domain))
            chosen = [healing.todo.popleft() for _ in range(min(size, len(healing.todo)))]
            self.record.recomputed += len(chosen)
            self._send(
                "heal",
                chosen,
                target,
                now,
                apart_from=healing.suspects,
                attempt=max(healing.attempts[k] for k in chosen),
            )

    def _staged(self, outstanding: _Outstanding, heard: Mapping[int, Heard]) -> None:
        healing = self._healing
        if healing is None:
            return
        again = []
        for shard_id in outstanding.order.shard_ids:
            one = heard.get(shard_id)
            if one is not None and _voice("heal", one).status == Status.VALUE:
                healing.staged[shard_id] = one
            else:
                again.append(shard_id)
        self._heal_again(again, "its staged result is not usable")

    def _heal_again(self, shard_ids: Iterable[int], why: str) -> None:
        healing = self._healing
        if healing is None:
            return
        for shard_id in shard_ids:
            healing.attempts[shard_id] += 1
            if healing.attempts[shard_id] > self.settings.max_retries:
                healing.failure = "deferred:staging_failed"
            healing.todo.append(shard_id)

    def _commit(self, healing: _Healing) -> None:
        for name, cases in healing.suspects.items():
            accused = any(decision.outcome is Outcome.SUSPECT for _, decision in cases)
            if accused and self.settings.quarantine:
                reasons = sorted({f"shard {case.shard_id}" for case, _ in cases})
                healing.awaiting.add(name)
                self._out.append(
                    Quarantine(name, f"wrong in round {self.record.round}: {', '.join(reasons)}")
                )
        if not healing.awaiting:
            self._heal_done(healing)

    def _quarantined(self, event: Quarantined) -> None:
        healing = self._healing
        if healing is None or event.domain not in healing.awaiting:
            return
        healing.awaiting.discard(event.domain)
        if event.failure:
            healing.failure = "deferred:staging_failed"
        else:
            self.record.quarantined.append(event.domain)
        if not healing.awaiting:
            self._heal_done(healing)

    def _heal_done(self, healing: _Healing) -> None:
        """Commit in one step: every staged result replaces the tainted one."""
        for shard_id, one in healing.staged.items():
            self._settle(shard_id, one)
            self.log.append(("computed", one.domain, shard_id))
        for name, cases in healing.suspects.items():
            domain = self._domains[name]
            domain.barred = domain.barred or f"suspect in round {self.record.round}"
            if name not in self.record.barred:
                self.record.barred.append(name)
            for case, decision in cases:
                self._out.append(Close(case, decision, self._commit_status(name, decision)))
        self._healing = None

    def _commit_status(self, name: str, decision: Decision) -> str:
        if decision.outcome is Outcome.ENVIRONMENT:
            return _status_of(decision)
        if name in self.record.quarantined:
            return "committed"
        return "disabled" if not self.settings.quarantine else "not_needed"

    def _unheal(self, healing: _Healing) -> None:
        """Staging failed: nothing has changed, the suspects stay in service."""
        for domain in self._domains.values():
            for batch_id, outstanding in list(domain.outstanding.items()):
                if outstanding.order.role == "heal":
                    self._cancel(batch_id)
        for name, cases in healing.suspects.items():
            self._domains[name].suspect = False
            self._gave_up_healing[name] = healing.failure
            for case, decision in cases:
                self._out.append(Close(case, decision, healing.failure))
        self._healing = None

    # -- results -----------------------------------------------------------------------

    def _same_lane(self, a: str, b: str) -> bool:
        return self._domains[a].place.lane == self._domains[b].place.lane

    def owners(self) -> dict[int, str]:
        """Return the domain of every settled shard."""
        return {shard_id: one.domain for shard_id, one in self.settled.items()}


def _voice(part: str, one: Heard) -> Voice:
    record = one.record
    status = {"ok": "value", "violation": "violation", "error": "error"}[record.status]
    if not record.intact:
        status = "damaged"
    return Voice(part, one.domain, record.digest, one.fingerprint, status, one)


def _status_of(decision: Decision) -> str:
    return decision.reason if decision.reason.startswith("deferred:") else "not_requested"


def _data_error(shard_id: int, voice: Voice) -> ShardError:
    notes = "; ".join(voice.ref.record.notes) if isinstance(voice.ref, Heard) else ""
    kind = NonFiniteError if notes.startswith("non-finite") else InvariantError
    return kind(
        f"shard {shard_id}: {notes} (the same on every domain that computed it)",
        shard_id=shard_id,
        domain=voice.domain,
        worker=voice.ref.worker if isinstance(voice.ref, Heard) else "",
    )
