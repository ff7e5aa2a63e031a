"""Healing: stage every shard that suspects may have spoiled, then commit in one step, or neither."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from dask_sdc.policy.cases import Finding, voice_of
from dask_sdc.policy.messages import Close, Heard, Quarantine
from dask_sdc.policy.quarantine import (
    QuarantineStatus,
    Staged,
    StagingPlan,
    check_staging,
    plan,
)
from dask_sdc.policy.roster import Roster
from dask_sdc.policy.verdict import Decision, Outcome, Status


class Healing:
    """The staging in progress, if any.

    Parameters
    ----------
    roster : Roster
    quarantine : bool
        Whether suspects are to be removed from the cluster, or only barred from this call.
    max_retries : int
        How often a shard may fail to be staged.
    """

    def __init__(self, roster: Roster, quarantine: bool, max_retries: int) -> None:
        self._roster = roster
        self._quarantine = quarantine
        self._max_retries = max_retries
        self._cases: dict[str, list[Finding]] = {}
        self._plan: StagingPlan | None = None
        self._staged: dict[int, Heard] = {}
        self._unsent: list[tuple[int, str]] = []
        self._attempts: Counter[int] = Counter()
        self._awaiting: set[str] = set()
        self._failure: QuarantineStatus | None = None
        #: Suspects whose staging failed: they stay in service for the rest of the round.
        self._given_up: dict[str, QuarantineStatus] = {}

    @property
    def active(self) -> bool:
        """Whether anything is being staged or committed."""
        return bool(self._cases)

    def accuse(self, name: str, finding: Finding) -> bool:
        """Add a case against a domain; say whether it is newly suspected."""
        if name in self._given_up:
            self._close(finding, self._given_up[name])
            return False
        if finding.decision.outcome is Outcome.SUSPECT and name not in self._roster.record.suspects:
            self._roster.record.suspects.append(name)
        if name in self._cases:
            self._cases[name].append(finding)
            return False
        self._cases[name] = [finding]
        self._roster[name].suspect = True
        self._plan = None  # more is tainted and fewer survive: planned anew
        self._staged = {k: one for k, one in self._staged.items() if one.domain != name}
        return True

    # -- staging -----------------------------------------------------------------------

    def step(self, owners: Mapping[int, str], busy: bool, now: float) -> dict[int, Heard] | None:
        """Go on with the staging.

        Parameters
        ----------
        owners : mapping of int to str
            Who computed each settled shard.
        busy : bool
            Whether open cases still wait for a suspect.
        now : float

        Returns
        -------
        dict of int to Heard or None
            The staged results once they are committed.
        """
        if not self._cases or self._awaiting:
            return None
        if self._plan is None and self._failure is None:
            self._make_plan(owners)
        if self._failure is None:
            self._send(now)
        if self._failure is not None:
            self._give_up(self._failure)
            return None
        if self._unsent or busy or self._roster.outstanding("heal"):
            return None
        return self._commit()

    def _make_plan(self, owners: Mapping[int, str]) -> None:
        """Deal what the suspects computed to survivors, but for what is staged already."""
        for outstanding in self._roster.outstanding("heal"):
            self._roster.cancel(outstanding.order.batch_id)
        usable = self._roster.usable()
        made = plan(
            {name: self._roster[name].place.lane for name in self._cases},
            owners,
            {d.name: d.place.lane for d in usable},
            slots={d.name: d.place.slots for d in usable},
        )
        if isinstance(made, QuarantineStatus):
            self._failure = made
            return
        self._plan = made
        self._unsent = [(k, d) for k, d in made.placements if k not in self._staged]

    def _send(self, now: float) -> None:
        by_domain: dict[str, list[int]] = {}
        for shard_id, name in self._unsent:
            by_domain.setdefault(name, []).append(shard_id)
        self._unsent = []
        for name, shard_ids in by_domain.items():
            domain = self._roster[name]
            if not domain.usable:
                self.again(shard_ids)
                continue
            self._roster.record.recomputed += len(shard_ids)
            for chosen in _halves(shard_ids, domain.place.slots):
                attempt = max(self._attempts[k] for k in chosen)
                self._roster.send("heal", chosen, domain, now, apart_from=self._cases, attempt=attempt)

    def hear(self, shard_ids: Iterable[int], heard: Mapping[int, Heard]) -> None:
        """Take what came back of a staged batch."""
        failed = []
        for shard_id in shard_ids:
            one = heard.get(shard_id)
            if one is not None and voice_of("heal", one).status == Status.VALUE:
                self._staged[shard_id] = one
            else:
                failed.append(shard_id)
        self.again(failed)

    def again(self, shard_ids: Sequence[int]) -> None:
        """Stage lost shards on whoever is there now."""
        if not shard_ids or not self._cases:
            return
        self._attempts.update(shard_ids)
        if max(self._attempts[k] for k in shard_ids) > self._max_retries:
            self._failure = QuarantineStatus.STAGING_FAILED
        self._plan = None

    # -- the end -----------------------------------------------------------------------

    def _commit(self) -> dict[int, Heard] | None:
        staged = [Staged(k, one.domain, sound=True) for k, one in self._staged.items()]
        status = check_staging(self._plan, staged) if self._plan else QuarantineStatus.STAGING_FAILED
        if status is not QuarantineStatus.COMMITTED:
            self._give_up(status)
            return None
        for name in self._cases:
            if self._quarantine and self._accused(name):
                shards = sorted({finding.case.shard_id for finding in self._cases[name]})
                why = f"wrong in round {self._roster.record.round}: shards {', '.join(map(str, shards))}"
                self._awaiting.add(name)
                self._roster.out.append(Quarantine(name, why))
        return None if self._awaiting else self._finish()

    def answered(self, name: str, failure: str) -> dict[int, Heard] | None:
        """Take the cluster's answer to a `Quarantine`; return staged results once committed."""
        if name not in self._awaiting:
            return None
        self._awaiting.discard(name)
        if failure:
            self._failure = QuarantineStatus.STAGING_FAILED
        else:
            self._roster.record.quarantined.append(name)
        if self._awaiting:
            return None
        return self._finish()

    def _finish(self) -> dict[int, Heard]:
        """Bar the suspects and close their cases; every staged result replaces a tainted one."""
        for name, findings in self._cases.items():
            self._roster.bar(self._roster[name], f"suspect in round {self._roster.record.round}")
            for finding in findings:
                self._close(finding, self._status(name))
        staged = self._staged
        self._reset()
        return staged

    def _status(self, name: str) -> QuarantineStatus:
        if name in self._roster.record.quarantined:
            return QuarantineStatus.COMMITTED
        if self._failure is not None:
            return self._failure
        return QuarantineStatus.NOT_NEEDED if self._quarantine else QuarantineStatus.DISABLED

    def _give_up(self, status: QuarantineStatus) -> None:
        """Staging failed: nothing has changed, the suspects stay in service."""
        for outstanding in self._roster.outstanding("heal"):
            self._roster.cancel(outstanding.order.batch_id)
        for name, findings in self._cases.items():
            self._roster[name].suspect = False
            self._given_up[name] = status
            for finding in findings:
                self._close(finding, status)
        self._reset()

    def _reset(self) -> None:
        self._cases, self._plan, self._staged, self._unsent = {}, None, {}, []
        self._attempts, self._failure = Counter(), None

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


def _halves(shard_ids: Sequence[int], slots: int) -> list[Sequence[int]]:
    """Cut a domain's share into two batches per thread, so that one that is lost costs half."""
    size = max(1, -(-len(shard_ids) // (2 * slots)))
    return [shard_ids[i : i + size] for i in range(0, len(shard_ids), size)]
