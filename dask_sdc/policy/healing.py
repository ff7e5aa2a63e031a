"""Healing: stage every shard that suspects may have spoiled, then commit in one step, or neither."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from dask_sdc.policy.cases import Finding, voice_of
from dask_sdc.policy.messages import Close, Heard, Quarantine, Settings
from dask_sdc.policy.quarantine import QuarantineStatus, Staged, StagingPlan, check_staging, plan
from dask_sdc.policy.roster import Domain, Outstanding, Roster
from dask_sdc.policy.verdict import Decision, Outcome, Status


class Healing:
    """The staging in progress, if any.

    Parameters
    ----------
    roster : Roster
    settings : Settings
        Whether suspects are removed from the cluster or only barred from this call; how often a
        shard may fail to be staged; how long the cluster may take to answer.
    owned : callable
        ``owned(names)`` returns the owner of every settled shard that these domains computed.
    """

    def __init__(
        self, roster: Roster, settings: Settings, owned: Callable[[Iterable[str]], dict[int, str]]
    ) -> None:
        self._roster = roster
        self._settings = settings
        self._owned = owned
        self._cases: dict[str, list[Finding]] = {}
        #: Accused while a commit is under way: their turn comes when it is over.
        self._later: dict[str, list[Finding]] = {}
        self._staged: dict[int, Heard] = {}
        self._attempts: Counter[int] = Counter()
        #: By shard, the survivors that could not stage it.
        self._failed_on: dict[int, frozenset[str]] = {}
        self._asked: dict[str, float] = {}
        self._refused: set[str] = set()
        self._failure: QuarantineStatus | None = None
        #: Suspects whose staging failed: they stay in service for the rest of the round.
        self._given_up: dict[str, QuarantineStatus] = {}

    @property
    def active(self) -> bool:
        """Whether anything is being staged or committed."""
        return bool(self._cases)

    @property
    def suspects(self) -> frozenset[str]:
        """The domains whose results are being staged."""
        return frozenset(self._cases)

    @property
    def committing(self) -> bool:
        """Whether the cluster has been asked to remove a domain."""
        return bool(self._asked)

    def accuse(self, name: str, finding: Finding) -> bool:
        """Add a case against a domain; say whether it is newly suspected."""
        if finding.decision.outcome is Outcome.SUSPECT and name not in self._roster.record.suspects:
            self._roster.record.suspects.append(name)
        if name in self._given_up:
            self._close(finding, self._given_up[name])
            return False
        for book in (self._cases, self._later):
            if name in book:
                book[name].append(finding)
                return False
        if self._roster[name].suspect:
            self._close(finding, self._status(name))  # it is out already
            return False
        (self._later if self.committing else self._cases)[name] = [finding]
        self._roster.suspect(self._roster[name], True)
        if not self.committing:
            self._drop_unsafe()
        return True

    def _drop_unsafe(self) -> None:
        """Give up what is staged, or being staged, in the lane of a suspect."""
        lanes = self._lanes()
        self._staged = {
            k: one for k, one in self._staged.items() if self._roster[one.domain].place.lane not in lanes
        }
        for outstanding in self._roster.outstanding("heal"):
            if self._roster[outstanding.order.domain].place.lane in lanes:
                self._roster.cancel(outstanding.order.batch_id)

    def _lanes(self) -> set[int]:
        return {self._roster[name].place.lane for name in self._cases}

    # -- staging -----------------------------------------------------------------------

    def step(self, busy: bool, wanted: bool, now: float) -> dict[int, Heard] | None:
        """Go on with the staging.

        Parameters
        ----------
        busy : bool
            Whether open cases still wait for a suspect.
        wanted : bool
            Whether anybody is still needed in this round, beyond the staging.
        now : float

        Returns
        -------
        dict of int to Heard or None
            The staged results once they are committed.
        """
        if not self._cases:
            return None
        if self.committing:
            return self._expire(now)
        affected = self._owned(self._cases)
        if self._failure is None:
            self._stage([k for k in sorted(affected) if k not in self._staged], now)
        if self._failure is None and wanted and not len(self._roster):
            self._failure = QuarantineStatus.NO_SAFE_SURVIVOR
        if self._failure is None and (busy or self._roster.outstanding("heal")):
            return None
        return self._commit(affected, now)

    def _stage(self, missing: Sequence[int], now: float) -> None:
        """Deal what is neither staged nor being staged to survivors."""
        if not missing:
            return
        out = {k for outstanding in self._roster.outstanding("heal") for k in outstanding.order.shard_ids}
        by_history: dict[frozenset[str], list[int]] = {}
        for shard_id in missing:
            if shard_id not in out:
                by_history.setdefault(self._failed_on.get(shard_id, frozenset()), []).append(shard_id)
        for failed, shard_ids in by_history.items():
            self._deal(shard_ids, failed, now)

    def _deal(self, shard_ids: Sequence[int], failed: Collection[str], now: float) -> None:
        lanes = self._lanes()
        safe = {d.name: d for d in self._roster.usable() if d.place.lane not in lanes}
        fresh = {name: d for name, d in safe.items() if name not in failed} or safe
        made = plan(
            {name: self._roster[name].place.lane for name in self._cases},
            dict.fromkeys(shard_ids, next(iter(self._cases))),
            {name: d.place.lane for name, d in fresh.items()},
            slots={name: d.place.slots for name, d in fresh.items()},
        )
        if isinstance(made, QuarantineStatus):
            self._failure = made
            return
        for name, share in made.by_survivor().items():
            self._send(share, fresh[name], now)

    def _send(self, shard_ids: Sequence[int], domain: Domain, now: float) -> None:
        self._roster.record.recomputed += len(shard_ids)
        # Two batches per thread, so that one that is lost costs half.
        size = max(1, -(-len(shard_ids) // (2 * domain.place.slots)))
        if self._roster.cost:
            size = min(size, max(1, int(self._settings.batch_max / self._roster.cost)))
        for i in range(0, len(shard_ids), size):
            chosen = shard_ids[i : i + size]
            attempt = max(self._attempts[k] for k in chosen)
            self._roster.send("heal", chosen, domain, now, apart_from=self._cases, attempt=attempt)

    def hear(self, outstanding: Outstanding, heard: Mapping[int, Heard]) -> None:
        """Take what came back of a staged batch."""
        order = outstanding.order
        sound = {k: one for k, one in heard.items() if voice_of("heal", one).status == Status.VALUE}
        self._staged.update(sound)
        self.again([k for k in order.shard_ids if k not in sound], order.domain)

    def again(self, shard_ids: Sequence[int], domain: str, charge: bool = True) -> None:
        """Stage shards that a domain lost on another; too many charged losses are the end of it."""
        for shard_id in shard_ids:
            self._failed_on[shard_id] = self._failed_on.get(shard_id, frozenset()) | {domain}
            self._attempts[shard_id] += charge
            if self._attempts[shard_id] > self._settings.max_retries:
                self._failure = QuarantineStatus.STAGING_FAILED

    # -- the end -----------------------------------------------------------------------

    def _commit(self, affected: Mapping[int, str], now: float) -> dict[int, Heard] | None:
        """Have the suspects removed, if all is staged; else nothing changes."""
        status = self._failure or self._checked(affected)
        if status is not QuarantineStatus.COMMITTED:
            self._give_up(self._cases, status)
            self._reset()
            return None
        for name in self._cases:
            if self._settings.quarantine and self._accused(name):
                shards = sorted({finding.case.shard_id for finding in self._cases[name]})
                why = f"wrong in round {self._roster.record.round}: shards {', '.join(map(str, shards))}"
                self._asked[name] = now
                self._roster.out.append(Quarantine(name, why))
        return None if self.committing else self._finish()

    def _checked(self, affected: Mapping[int, str]) -> QuarantineStatus:
        lanes = self._lanes()
        safe = tuple(name for name, d in self._roster.domains.items() if d.place.lane not in lanes)
        placements = tuple((k, one.domain) for k, one in self._staged.items() if k in affected)
        made = StagingPlan(tuple(self._cases), tuple((k, "") for k in affected), safe)
        return check_staging(made, [Staged(k, name, sound=True) for k, name in placements])

    def answered(self, name: str, failure: str) -> dict[int, Heard] | None:
        """Take the cluster's answer to a `Quarantine`; return staged results once committed."""
        if self._asked.pop(name, None) is None:
            return None
        if failure:
            self._refused.add(name)
        else:
            self._roster.record.quarantined.append(name)
        return None if self.committing else self._finish()

    def _expire(self, now: float) -> dict[int, Heard] | None:
        """No answer in time is a failure."""
        late = [name for name, since in self._asked.items() if now - since > self._settings.timeout]
        staged: dict[int, Heard] = {}
        for name in late:
            staged |= self.answered(name, "no answer") or {}
        return staged or None

    def _finish(self) -> dict[int, Heard]:
        """Bar the suspects and close their cases; every staged result replaces a tainted one.

        A suspect that the cluster did not remove keeps its results, and so do all if it removed none.
        """
        removed = self._roster.record.quarantined
        none = self._refused and not any(name in removed for name in self._cases)
        kept = {name: self._cases[name] for name in self._cases if none or name in self._refused}
        gone = {name: self._cases[name] for name in self._cases if name not in kept}
        staged = {k: self._staged[k] for k in self._owned(gone) if k in self._staged}
        for name, findings in gone.items():
            why = "suspect" if self._accused(name) else "in another environment"
            self._roster.bar(self._roster[name], f"{why} in round {self._roster.record.round}")
            for finding in findings:
                self._close(finding, self._status(name))
        self._give_up(kept, QuarantineStatus.STAGING_FAILED)
        self._reset()
        return staged

    def _status(self, name: str) -> QuarantineStatus:
        if name in self._roster.record.quarantined:
            return QuarantineStatus.COMMITTED
        return QuarantineStatus.NOT_NEEDED if self._settings.quarantine else QuarantineStatus.DISABLED

    def _give_up(self, cases: Mapping[str, Sequence[Finding]], status: QuarantineStatus) -> None:
        """Staging failed: nothing has changed, the suspects stay in service."""
        for outstanding in self._roster.outstanding("heal"):
            self._roster.cancel(outstanding.order.batch_id)
        for name, findings in cases.items():
            self._roster.suspect(self._roster[name], False)
            self._given_up[name] = status
            for finding in findings:
                self._close(finding, status)

    def _reset(self) -> None:
        self._cases, self._later = self._later, {}
        self._staged, self._failed_on, self._attempts = {}, {}, Counter()
        self._failure, self._refused = None, set()

    def _accused(self, name: str) -> bool:
        return any(f.decision.outcome is Outcome.SUSPECT for f in self._cases[name])

    def _close(self, finding: Finding, status: QuarantineStatus) -> None:
        decided = finding.decision.outcome is Outcome.SUSPECT
        text = str(status) if decided else status_of(finding.decision)
        self._roster.out.append(Close(finding.case, finding.decision, text))


def status_of(decision: Decision) -> str:
    """Return the quarantine status of a decision that accuses nobody."""
    if decision.reason.startswith("deferred:"):
        return decision.reason
    return str(QuarantineStatus.NOT_REQUESTED)
