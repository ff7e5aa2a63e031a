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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dask_sdc.evidence.seal import SealedStatistic, failed_statistic
from dask_sdc.exceptions import (
    DeviceError,
    DeviceLost,
    DeviceMemoryError,
    InputTypeError,
    NoDomainError,
    SDCError,
    ShardError,
)
from dask_sdc.policy.audits import AuditBatches
from dask_sdc.policy.cases import TOO_FEW, CaseBook, Finding, data_error, garbled_voice, voice_of
from dask_sdc.policy.healing import Healing, status_of
from dask_sdc.policy.messages import (
    Abort,
    Case,
    Close,
    DomainJoined,
    DomainLost,
    Done,
    Event,
    Evict,
    Exposed,
    Failed,
    Heard,
    Instruction,
    Landed,
    Place,
    Quarantined,
    RoundRecord,
    Settings,
    Tick,
)
from dask_sdc.policy.pool import Pool
from dask_sdc.policy.quarantine import QuarantineStatus
from dask_sdc.policy.roster import Domain, Outstanding, Roster
from dask_sdc.policy.sampling import CoverageSampler
from dask_sdc.policy.verdict import Closeness, Decision, Outcome, Status, Voice

#: Errors of a shard that are raised as what they are: they say what to do about the data or the cluster.
_RAISED: dict[str, type[SDCError]] = {
    error.__name__: error for error in (InputTypeError, DeviceError, DeviceMemoryError)
}

#: Why a shard is tried again that a batch came back without.
LEFT_OUT = "left out of its batch"


@dataclass(frozen=True)
class Step:
    """One line of a round's log: ``what`` ("computed" or "clean") happened to a shard on a domain."""

    what: str
    domain: str
    shard_id: int


def _lost_device(record: SealedStatistic) -> bool:
    """Say whether a shard failed for nothing but that its worker's device is lost."""
    return record.status == "error" and record.notes[:1] == (DeviceLost.__name__,)


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

    Attributes
    ----------
    settled : dict of int to Heard
        The committed result of every shard so far.
    replaced : bool
        Whether a result that had settled was replaced since.
    log : list of Step
        What was computed and vouched for, in order.
    record : RoundRecord
        Instrumentation.
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
        self.settled: dict[int, Heard] = {}
        self.replaced = False
        self.done = False
        self.log: list[Step] = []
        self._n = len(shard_ids)
        self._by_owner: dict[str, dict[int, None]] = {}
        self._roster = Roster(dict(barred or {}))
        self._pool = Pool(shard_ids, preferred or {}, self._roster.find)
        self._roster.cost = cost
        for place in places:
            self._roster.join(place, 0.0)
        self.record = RoundRecord(number, self._n, len(self._roster))
        self._roster.record = self.record
        self._cases = CaseBook(self._roster, compare, settings.max_retries)
        self._healing = Healing(self._roster, settings, self._owned)
        self._attempts: Counter[int] = Counter()
        self._errors: dict[int, dict[str, tuple[str, ...]]] = {}
        self._desolate_since: float | None = None
        self._next_look = 0.0

    @property
    def cost(self) -> float | None:
        """Measured seconds per shard."""
        return self._roster.cost

    def audits(self, shard_id: int) -> bool:
        """Say whether a shard's result is being compared with another one."""
        return shard_id in self._cases

    def owners(self) -> dict[int, str]:
        """Return the domain of every settled shard."""
        return {shard_id: one.domain for shard_id, one in self.settled.items()}

    def _owned(self, names: Iterable[str]) -> dict[int, str]:
        return {shard_id: name for name in names for shard_id in self._by_owner.get(name, ())}

    # -- the machine -------------------------------------------------------------------

    def start(self, now: float) -> list[Instruction]:
        """Return the first instructions."""
        lanes = self._roster.lanes()
        self._next_look = now
        if lanes < 2 and self.sampler.base_rate > 0:
            self.record.note = f"no audit: {lanes} failure domain(s) live, at least two are needed"
        return self.handle(Tick(now))

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and return what to do about it."""
        out = self._roster.out = []
        self._roster.now = event.now
        if self.done:
            return out
        try:
            self._take(event)
            self._advance(event.now)
        except SDCError as error:
            self.done = True
            out.append(Abort(error))
        return out

    def _take(self, event: Event) -> None:
        match event:
            case Landed():
                self._landed(event)
            case Failed():
                self._failed(event)
            case DomainLost():
                self._lost(event.domain, event.why)
            case DomainJoined():
                self._roster.join(event.place, event.now)
            case Quarantined():
                self._commit(self._healing.answered(event.domain, event.failure))
            case Exposed():
                self._exposed(event)
            case Tick():
                pass

    def _advance(self, now: float) -> None:
        self._check_silence(now)
        self._check_desolation(now)
        while findings := self._cases.judge(now):
            for finding in findings:
                self._found(finding)
        while self._healing.active and self._heal(now):
            pass
        self._dispatch(now)
        if len(self.settled) == self._n and not self._cases and not self._healing.active:
            self.done = True
            self._roster.out.append(Done())

    def _heal(self, now: float) -> bool:
        """Go on with the staging; say whether one is over and the next may begin."""
        suspects = self._healing.suspects
        busy = self._cases.involve(suspects)
        wanted = len(self._pool) > 0 or len(self._cases) > 0
        self._commit(self._healing.step(busy, wanted, now))
        return self._healing.suspects != suspects

    # -- domains -----------------------------------------------------------------------

    def _lost(self, name: str, why: str) -> None:
        domain = self._roster.get(name)
        if domain is None or not domain.live:
            return
        self._roster.leave(domain)
        self._roster.fail(domain, self.settings.max_retries, why)
        self.record.reused += len(self._by_owner.get(name, ()))
        # Only what can have been running may have been the cause.
        running = set(list(domain.outstanding)[: domain.place.slots])
        for batch_id in list(domain.outstanding):
            outstanding = self._roster.cancel(batch_id)
            if outstanding is not None:
                self._lose(outstanding, why, charge=batch_id in running)

    def _failed(self, event: Failed) -> None:
        outstanding = self._roster.take_back(event.batch_id)
        if outstanding is not None:
            self._fail(outstanding.order.domain, event.why)
            self._lose(outstanding, event.why)

    def _fail(self, name: str, why: str) -> None:
        self._roster.fail(self._roster[name], self.settings.max_retries, why)

    def _check_silence(self, now: float) -> None:
        """A domain that sat on its oldest batch for too long is given up, dead or not."""
        if now < self._next_look:
            return
        self._next_look = now + self.settings.timeout / 20
        for domain in self._roster.domains.values():
            if not domain.live or not domain.outstanding:
                continue
            head = next(iter(domain.outstanding.values()))
            waited = now - max(head.since, domain.last_heard)
            if waited > self.settings.timeout + 3 * head.order.expected:
                why = f"silent for {waited:.1f} s with {len(domain.outstanding)} batches"
                self._roster.out.append(Evict(domain.name, why))
                self._lost(domain.name, why)

    def _check_desolation(self, now: float) -> None:
        """Give up when nobody has been there to work for longer than the timeout."""
        if len(self._roster) or self._healing.active or len(self.settled) == self._n:
            self._desolate_since = None
            return
        if self._desolate_since is None:
            self._desolate_since = now
        waited = now - self._desolate_since
        if waited > self.settings.timeout / 10 and self._roster.pardon():
            return
        domains = self._roster.domains.values()
        # Where nobody ever was, somebody may come yet.
        hopeless = all(d.barred and not (d.failing and d.live) for d in domains) if domains else False
        if waited > self.settings.timeout or hopeless:
            states = {d.name: d.barred or "gone" for d in domains}
            raise NoDomainError(
                f"expected a live failure domain to compute {self._n - len(self.settled)} "
                f"remaining shards, got none for {waited:.1f} s: {states}"
            )

    # -- dispatch ----------------------------------------------------------------------

    def _dispatch(self, now: float) -> None:
        """Keep two batches per thread in hand: one that runs and one that is ready to."""
        audits = AuditBatches(self._roster, self.settings.batch_min)
        while len(self._pool) and (domain := self._roster.hungry(self._pool.serves)):
            shard_ids = self._pool.take(domain, self._batch_size(domain))
            attempt = max(self._attempts[k] for k in shard_ids)
            self._roster.send("primary", shard_ids, domain, now, attempt=attempt)
            # A shard that is tried again keeps the case that it has.
            fresh = [k for k in shard_ids if k not in self._cases]
            if wanted := self.sampler.draw(domain.name, fresh, self.record.round):
                self._audit(wanted, domain, audits)
        audits.flush(self._cases)

    def _batch_size(self, domain: Domain) -> int:
        """Guided self-scheduling: two thirds of what a domain can take until all are done together.

        The last batches are not cut below `Settings.batch_min`, and no crumbs are left. A smaller
        part costs more batches, a larger one more imbalance; simulated, two thirds costs least.
        """
        roster, settings, left = self._roster, self.settings, len(self._pool)
        if not roster.cost:
            return 1
        # A shard brings the share of an audit with it.
        cost = roster.cost * domain.pace
        with_audit = 1.0 + self.sampler.base_rate
        even = (roster.work() + left * roster.cost * with_audit) / roster.power()
        in_hand = 0.0 if len(domain.outstanding) < domain.place.slots else domain.until - roster.now
        room = max(0.0, even - max(0.0, in_hand))
        if room > 2 * settings.batch_min:
            room *= 2 / 3
        size = max(round(room / (cost * with_audit)), math.ceil(settings.batch_min / cost))
        if (left - size) * cost < settings.batch_min / 2:
            size = left
        return min(size, self._most(domain, cost))

    def _most(self, domain: Domain, cost: float) -> int:
        """Return how many shards a batch may hold, ``cost`` seconds each."""
        settings = self.settings
        even = math.ceil(self._n / (self._roster.power() * domain.pace))
        fits = settings.batch_bytes / max(self._roster.nbytes.value(1.0), 1.0)
        return max(1, min(even, int(settings.batch_max / cost), int(fits), settings.batch_shards))

    def _audit(self, shard_ids: Sequence[int], primary: Domain, audits: AuditBatches) -> None:
        """Queue audits at once, beside their primaries: they read from the source."""
        if not audits.add(shard_ids, primary, self._cases):
            self.record.skip(TOO_FEW, len(shard_ids))
            # Owed once: one domain alone for a long time must not make a flood of audits later.
            self.sampler.refund(primary.name, 1)

    # -- batches come back -------------------------------------------------------------

    def _landed(self, event: Landed) -> None:
        outstanding = self._roster.take_back(event.batch_id)
        if outstanding is None:
            return  # superseded
        order, result = outstanding.order, event.result
        self._roster[order.domain].last_heard = event.now
        if result.status == "misplaced" or result.domain != order.domain:
            why = f"ran on {result.domain}, expected {order.domain}"
            self._fail(order.domain, why)
            self._lose(outstanding, why)
            return
        if result.status == "garbled":
            self._garbled(outstanding)
            return
        lost = next((r.notes[-1] for r in result.records if _lost_device(r)), "")
        if lost:
            # First, as what follows may end the round: whatever else that process computes fails as well.
            self._roster.out.append(Evict(order.domain, lost, result.worker))
        # Shards that were not asked for are ignored; of two records of one the first counts.
        asked = set(order.shard_ids)
        heard = {
            r.shard_id: Heard(r, result.domain, result.worker, result.fingerprint, order.role, order.attempt)
            for r in reversed(result.records)
            if r.shard_id in asked and not _lost_device(r)
        }
        self._learn(heard.values(), self._roster[order.domain], event.now - outstanding.since)
        why = lost or LEFT_OUT
        if len(heard) + len(event.void) < len(order.shard_ids) and not lost:
            self._fail(order.domain, why)
        if order.role == "primary":
            self._primaries(outstanding, heard, why)
        elif order.role == "heal":
            self._healing.hear(outstanding, heard)
        else:
            for shard_id, part in outstanding.parts.items():
                one = heard.get(shard_id)
                voice = None if one is None else voice_of(part, one)
                self._cases.hear(shard_id, part, order.batch_id, order.domain, voice, why)
        if lost:
            self._lost(order.domain, lost)

    def _learn(self, heard: Iterable[Heard], domain: Domain, waited: float) -> None:
        records = [one.record for one in heard if one.record.status != "error"]
        sizes = [len(record.payload) for record in records]
        self._roster.learn_cost(domain, [record.elapsed for record in records], sizes, waited)

    def _primaries(self, outstanding: Outstanding, heard: Mapping[int, Heard], why: str) -> None:
        order = outstanding.order
        self._retry([k for k in order.shard_ids if k not in heard], order.domain, why)
        for shard_id, one in heard.items():
            self.log.append(Step("computed", order.domain, shard_id))
            voice = voice_of("primary", one)
            if voice.status == Status.ERROR:
                self._error(shard_id, one)
                continue
            if shard_id in self._errors:
                self._blame(self._errors.pop(shard_id))
            if voice.status == Status.VALUE:
                self._settle(shard_id, one)
            self._cases.hear_primary(shard_id, voice)

    def _garbled(self, outstanding: Outstanding) -> None:
        """Nothing of a batch can be believed: one shard stands for all in a case."""
        order = outstanding.order
        if order.role == "heal":
            self._healing.again(order.shard_ids, order.domain)
        elif order.role == "primary":
            first, *rest = order.shard_ids
            self.log.append(Step("computed", order.domain, first))
            self._cases.hear_primary(first, garbled_voice("primary", order.domain))
            self._retry(rest, order.domain, "garbled on its way")
        else:
            for shard_id, part in outstanding.parts.items():
                voice = garbled_voice(part, order.domain)
                self._cases.hear(shard_id, part, order.batch_id, order.domain, voice)

    def _settle(self, shard_id: int, one: Heard) -> None:
        old = self.settled.get(shard_id)
        if old is not None:
            self.replaced |= old.record.payload != one.record.payload
            del self._by_owner[old.domain][shard_id]
        self.settled[shard_id] = one
        self._by_owner.setdefault(one.domain, {})[shard_id] = None

    def _lose(self, outstanding: Outstanding, why: str, charge: bool = True) -> None:
        """A batch is gone: its shards go back, its audits go elsewhere.

        ``charge`` says whether the loss counts against the shards.
        """
        order = outstanding.order
        if order.role == "primary":
            self._retry(order.shard_ids, order.domain, why, charge)
        elif order.role == "heal":
            self._healing.again(order.shard_ids, order.domain, charge)
        else:
            for shard_id, part in outstanding.parts.items():
                self._cases.hear(shard_id, part, order.batch_id, order.domain, None, why)

    def _retry(self, shard_ids: Iterable[int], domain: str, why: str, charge: bool = True) -> None:
        owing = set()
        for shard_id in shard_ids:
            self._attempts[shard_id] += charge
            if self._attempts[shard_id] > self.settings.max_retries:
                raise ShardError(
                    f"shard {shard_id}: failed {self._attempts[shard_id]} times, "
                    f"last on domain {domain!r}: {why}",
                    shard_id=shard_id,
                    domain=domain,
                )
            self.record.recomputed += 1
            drawn_for, lane = self._cases.displace(shard_id)
            owing.add(drawn_for)
            # On its last two tries it is alone: it may be the cause, and must not spoil others.
            last = max(1, self.settings.max_retries - 1)
            self._pool.put_back(shard_id, domain, lane, alone=self._attempts[shard_id] >= last)
        for name in owing - {""}:
            self.sampler.refund(name, 1)  # its audit vouches for another domain now

    def _blame(self, errors: Mapping[str, tuple[str, ...]]) -> None:
        """A shard came out after all: whoever raised an error on it did fail."""
        for name, notes in errors.items():
            self._fail(name, ": ".join(notes))

    def _error(self, shard_id: int, one: Heard) -> None:
        """Two domains with an error mean the data or the statistic; one may be the hardware."""
        errors = self._errors.setdefault(shard_id, {})
        repeated = one.domain in errors
        errors[one.domain] = one.record.notes
        others = self._roster.find(lambda d: d.name not in errors)
        if len(errors) >= 2 or repeated or others is None:
            kind, note = (*one.record.notes, "", "")[:2]
            if f"shard {shard_id}" not in note:
                note = f"shard {shard_id}: {note}"
            raise _RAISED.get(kind, ShardError)(
                f"{note} ({kind} on {' and '.join(sorted(errors))}, worker {one.worker})",
                shard_id=shard_id,
                domain=one.domain,
                worker=one.worker,
            )
        self._retry([shard_id], one.domain, one.record.notes[-1])

    # -- findings ----------------------------------------------------------------------

    def _found(self, finding: Finding) -> None:
        case, decision = finding.case, finding.decision
        primary = case.voices["primary"]
        if decision.outcome is Outcome.AGREE:
            self.record.agreed += 1
            self.log.append(Step("clean", primary.domain, case.shard_id))
            return
        if decision.outcome is Outcome.SKIPPED:
            self.record.skip(decision.reason)
            self.sampler.refund(case.drawn_for or primary.domain, 1)
        if decision.outcome is Outcome.INCONCLUSIVE:
            raise data_error(case.shard_id, primary)
        self._settle_case(finding)
        names = decision.suspects or decision.barred
        for name in names:
            if self._healing.accuse(name, finding):
                self._withdraw(self._roster[name])
        if not names and decision.outcome is not Outcome.SKIPPED:
            self._roster.out.append(Close(case, decision, status_of(decision)))

    def _exposed(self, event: Exposed) -> None:
        """Accuse a domain of what it read, without any result of it: others have shown it already."""
        if event.domain in self.record.suspects:
            return
        record = failed_statistic(event.shard_id, (event.why,))
        read = Heard(record, event.domain, "", "", "primary", 0)
        voices = {
            "primary": Voice("primary", event.domain, record.digest, "", Status.VIOLATION, read),
            "audit": voice_of("audit", event.by),
        }
        case = Case(event.shard_id, voices)
        decision = Decision(Outcome.SUSPECT, suspects=(event.domain,), reason=event.why, value="audit")
        self.record.mismatches += 1
        domain = self._roster.get(event.domain)
        if domain is None:
            self.record.suspects.append(event.domain)
            self._roster.out.append(Close(case, decision, str(QuarantineStatus.NOT_NEEDED)))
        elif self._healing.accuse(event.domain, Finding(case, decision)):
            self._withdraw(domain)

    def _settle_case(self, finding: Finding) -> None:
        """Commit the value that the case trusts; compute the shard again if there is none."""
        case = finding.case
        voice = case.voices.get(finding.decision.value or "")
        if voice is not None and voice.status == Status.VIOLATION:
            raise data_error(case.shard_id, voice)
        values = [] if case.shard_id in self.settled else list(case.voices.values())
        for one in [voice, *values]:
            if one is not None and one.status == Status.VALUE and isinstance(one.ref, Heard):
                if self.settled.get(case.shard_id) is not one.ref:
                    self._settle(case.shard_id, one.ref)
                    self.log.append(Step("computed", one.domain, case.shard_id))
                return
        if case.shard_id not in self.settled:
            primary = case.voices["primary"]
            self._retry([case.shard_id], primary.domain, f"its payload was {primary.status}")

    def _withdraw(self, domain: Domain) -> None:
        """Take a suspect's work away, but for the reruns that open cases wait for."""
        for batch_id, outstanding in list(domain.outstanding.items()):
            if outstanding.order.role != "rerun":
                self._roster.cancel(batch_id)
                self._lose(outstanding, "its domain became suspect", charge=False)

    def _commit(self, staged: Mapping[int, Heard] | None) -> None:
        for shard_id, one in (staged or {}).items():
            self._settle(shard_id, one)
            self.log.append(Step("computed", one.domain, shard_id))
        dealt: dict[str, list[int]] = {}
        for shard_id, one in (staged or {}).items():
            dealt.setdefault(one.domain, []).append(shard_id)
        for name, shard_ids in dealt.items():
            # Not audited themselves, they bring the next audit of their domain forward.
            if self.sampler.draw(name, shard_ids, self.record.round):
                self.sampler.refund(name, 1)
