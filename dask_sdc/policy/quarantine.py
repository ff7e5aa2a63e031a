"""Quarantine: what a suspect may have spoiled, who recomputes it, and who stays out.

Nothing here touches a cluster. `plan` says what has to be staged on whom, `check_staging` whether
what came back may be committed; the driver does both steps or neither.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from dask_sdc.exceptions import InputError, InputTypeError


class QuarantineStatus(StrEnum):
    """What became of a quarantine, as receipts say it."""

    NOT_REQUESTED = "not_requested"
    DISABLED = "disabled"
    NOT_NEEDED = "not_needed"
    COMMITTED = "committed"
    NO_SAFE_SURVIVOR = "deferred:no_safe_survivor"
    AMBIGUOUS_SHARD_OWNERSHIP = "deferred:ambiguous_shard_ownership"
    DUPLICATE_SURVIVOR_PLACEMENT = "deferred:duplicate_survivor_placement"
    STAGING_FAILED = "deferred:staging_failed"


# -- taint ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CleanRecord:
    """The last clean audit of a domain.

    Parameters
    ----------
    round : int
        Round of the audited shard.
    shard_id : int
        The shard.
    position : int
        How many shards the domain had computed before it, in all rounds.
    """

    round: int
    shard_id: int
    position: int


class TaintHistory:
    """What every domain computed since its last clean audit.

    A clean audit clears the audited shard and everything that the domain computed before it;
    the coverage of the sampler keeps the rest short. All of it is tainted once the domain
    becomes suspect.
    """

    def __init__(self) -> None:
        self._open: dict[str, dict[tuple[int, int], int]] = {}
        self._count: dict[str, int] = {}
        self._clean: dict[str, CleanRecord] = {}

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains that have computed anything."""
        return tuple(self._count)

    def computed(self, domain: str, round_number: int, shard_ids: Iterable[int]) -> None:
        """Note that a domain computed shards of a round, in this order."""
        shards = self._open.setdefault(domain, {})
        count = self._count.get(domain, 0)
        for shard_id in shard_ids:
            shards.pop((round_number, shard_id), None)  # computed again: the later one counts
            shards[round_number, shard_id] = count
            count += 1
        self._count[domain] = count

    def clean(self, domain: str, round_number: int, shard_id: int) -> CleanRecord | None:
        """Note a clean audit of a shard, and clear what the domain computed up to it.

        Returns
        -------
        CleanRecord or None
            The last clean audit of the domain. It is not moved by a shard that is not open:
            one that a later clean audit has cleared, or that another domain computed.
        """
        shards = self._open.get(domain, {})
        position = shards.get((round_number, shard_id))
        if position is not None:
            self._clean[domain] = CleanRecord(round_number, shard_id, position)
            while shards and shards[first := next(iter(shards))] <= position:
                del shards[first]
        return self._clean.get(domain)

    def last_clean(self, domain: str) -> CleanRecord | None:
        """Return the last clean audit of a domain, None if it never had one."""
        return self._clean.get(domain)

    def tainted(self, domains: Iterable[str]) -> tuple[tuple[int, int], ...]:
        """Return (round, shard) of everything that these domains may have spoiled, in order."""
        return tuple(sorted({key for domain in domains for key in self._open.get(domain, ())}))

    def rollback_round(self, domains: Iterable[str]) -> int | None:
        """Return the first round that these domains may have spoiled; None if there is none.

        A fit goes back to the model with which that round started.
        """
        return min((key[0] for domain in domains for key in self._open.get(domain, ())), default=None)

    def forget(self, domains: Iterable[str]) -> None:
        """Drop what these domains computed, once it was all computed again by others."""
        for domain in domains:
            self._open.pop(domain, None)

    def to_dict(self) -> dict[str, Any]:
        """Return the whole state in closed types, for a checkpoint."""
        return {
            domain: {
                "count": count,
                "clean": None if (record := self._clean.get(domain)) is None else asdict(record),
                "open": [[*key, place] for key, place in self._open.get(domain, {}).items()],
            }
            for domain, count in self._count.items()
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Rebuild a history from `to_dict`."""
        history = cls()
        for domain, saved in state.items():
            history._count[domain] = saved["count"]
            history._open[domain] = {(r, shard): place for r, shard, place in saved["open"]}
            if saved["clean"] is not None:
                history._clean[domain] = CleanRecord(**saved["clean"])
        return history


# -- staging ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """What has to be recomputed, on whom, before suspects may be removed.

    Attributes
    ----------
    suspects : tuple of str
        Domains to remove once the plan has been carried out.
    placements : tuple of (int, str)
        Every affected shard of this round, in order, and the survivor that recomputes it.
    survivors : tuple of str
        All safe survivors: a shard that fails on one may be staged on another.
    rollback_round : int or None
        The earliest round that the suspects may have spoiled; an iterative fit that is past it
        goes back to the model with which it started.
    """

    suspects: tuple[str, ...]
    placements: tuple[tuple[int, str], ...]
    survivors: tuple[str, ...]
    rollback_round: int | None = None

    @property
    def shard_ids(self) -> tuple[int, ...]:
        """The affected shards."""
        return tuple(shard_id for shard_id, _ in self.placements)

    def by_survivor(self) -> dict[str, tuple[int, ...]]:
        """Return the shards that each survivor recomputes."""
        dealt: dict[str, list[int]] = {}
        for shard_id, domain in self.placements:
            dealt.setdefault(domain, []).append(shard_id)
        return {domain: tuple(shard_ids) for domain, shard_ids in dealt.items()}


@dataclass(frozen=True, slots=True)
class Staged:
    """What came back of one staged shard: who computed it, and whether it is sound."""

    shard_id: int
    domain: str
    sound: bool


def plan(
    suspects: Mapping[str, int],
    owners: Mapping[int, str | Collection[str]],
    live: Mapping[str, int],
    *,
    history: TaintHistory | None = None,
    slots: Mapping[str, int] | None = None,
    enabled: bool = True,
) -> StagingPlan | QuarantineStatus:
    """Plan the removal of suspects, or say why it cannot be.

    Parameters
    ----------
    suspects : mapping of str to int
        Accused domains and their lanes, live or not.
    owners : mapping of int to (str or collection of str)
        Who computed each shard of this round: one domain, or all that claim it.
    live : mapping of str to int
        Live domains that are in service, and their lanes; may hold the suspects.
    history : TaintHistory, optional
        What the suspects computed since their last clean audits.
    slots : mapping of str to int, optional
        Threads of the live domains, to share the work out by; one each by default.
    enabled : bool
        Whether suspects are to be quarantined at all.

    Returns
    -------
    StagingPlan or QuarantineStatus
        "not_needed" without suspects, "disabled" if not enabled,
        "deferred:ambiguous_shard_ownership" if it is not clear whether a suspect computed a
        shard, "deferred:no_safe_survivor" if no live domain is apart from all suspects.
    """
    if not suspects:
        return QuarantineStatus.NOT_NEEDED
    if not enabled:
        return QuarantineStatus.DISABLED
    affected = _affected(suspects, owners)
    if affected is None:
        return QuarantineStatus.AMBIGUOUS_SHARD_OWNERSHIP
    lanes = set(suspects.values())
    survivors = tuple(d for d, lane in live.items() if lane not in lanes and d not in suspects)
    if not survivors:
        return QuarantineStatus.NO_SAFE_SURVIVOR
    back = None if history is None else history.rollback_round(suspects)
    return StagingPlan(tuple(suspects), _deal(affected, survivors, slots or {}), survivors, back)


def _affected(suspects: Mapping[str, int], owners: Mapping[int, str | Collection[str]]) -> list[int] | None:
    """Return the suspects' shards, or None if a shard has no owner or a suspect among several."""
    affected = []
    for shard_id, owner in owners.items():
        if isinstance(owner, str):
            if owner in suspects:
                affected.append(shard_id)
            continue
        claims = set(owner)
        if not claims or (len(claims) > 1 and not claims.isdisjoint(suspects)):
            return None
        if not claims.isdisjoint(suspects):
            affected.append(shard_id)
    return sorted(affected)


def _deal(
    shard_ids: Iterable[int], survivors: Collection[str], slots: Mapping[str, int]
) -> tuple[tuple[int, str], ...]:
    """Give every shard to the survivor that would be done with it first."""
    queue = [(1 / slots.get(d, 1), i, d, 1) for i, d in enumerate(survivors)]
    heapq.heapify(queue)
    placements = []
    for shard_id in shard_ids:
        _, i, domain, count = queue[0]
        placements.append((shard_id, domain))
        heapq.heapreplace(queue, ((count + 1) / slots.get(domain, 1), i, domain, count + 1))
    return tuple(placements)


def check_staging(staging: StagingPlan, staged: Iterable[Staged]) -> QuarantineStatus:
    """Say whether staged shards may be committed; if not, nothing may be changed.

    Returns
    -------
    QuarantineStatus
        "committed" if every affected shard came back sound, once, from a safe survivor;
        "deferred:duplicate_survivor_placement" if one came back twice;
        "deferred:staging_failed" otherwise.
    """
    wanted, survivors, seen = set(staging.shard_ids), set(staging.survivors), set()
    failed = False
    for one in staged:
        if one.shard_id in seen:
            return QuarantineStatus.DUPLICATE_SURVIVOR_PLACEMENT
        seen.add(one.shard_id)
        failed |= not one.sound or one.domain not in survivors
    return QuarantineStatus.STAGING_FAILED if failed or seen != wanted else QuarantineStatus.COMMITTED


# -- who stays out ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Detention:
    """One domain in quarantine.

    Parameters
    ----------
    domain : str
        The domain.
    reason : str
        One line, as in the receipt.
    round : int
        Round in which it was put there.
    offences : int
        How often it has been put there.
    clean : int
        Clean checks in a row since.
    """

    domain: str
    reason: str
    round: int
    offences: int = 1
    clean: int = 0


class QuarantineList:
    """The domains that stay out until a clean probation.

    Parameters
    ----------
    probation : int
        Clean checks in a row (screenings, or audits of work that is thrown away) that a domain
        needs before it may be released. Every further offence doubles it.

    Raises
    ------
    InputError
        If ``probation`` is not an int of at least 1.
    """

    def __init__(self, probation: int = 3) -> None:
        if isinstance(probation, bool) or not isinstance(probation, int):
            raise InputTypeError(f"probation: expected an int, got {probation!r}")
        if probation < 1:
            raise InputError(f"probation: expected at least 1, got {probation}")
        self.probation = probation
        self._detained: dict[str, Detention] = {}
        self._offences: dict[str, int] = {}

    def __contains__(self, domain: object) -> bool:
        return domain in self._detained

    def __iter__(self) -> Iterator[Detention]:
        return iter(self._detained.values())

    def __len__(self) -> int:
        return len(self._detained)

    def add(self, domain: str, *, round_number: int, reason: str) -> Detention:
        """Put a domain in quarantine; one that is there already starts its probation anew."""
        if domain not in self._detained:
            self._offences[domain] = self._offences.get(domain, 0) + 1
        self._detained[domain] = Detention(domain, reason, round_number, self._offences[domain])
        return self._detained[domain]

    def checked(self, domain: str, clean: bool) -> int:
        """Note the result of one check of a domain; return the clean checks still wanted.

        Raises
        ------
        InputError
            If the domain is not in quarantine.
        """
        held = self._held(domain)
        self._detained[domain] = Detention(
            held.domain, held.reason, held.round, held.offences, held.clean + 1 if clean else 0
        )
        return self.wanted(domain)

    def wanted(self, domain: str) -> int:
        """Return how many clean checks a domain still needs for its release.

        Raises
        ------
        InputError
            If the domain is not in quarantine.
        """
        held = self._held(domain)
        return max(0, (self.probation << (held.offences - 1)) - held.clean)

    def release(self, domain: str) -> Detention:
        """Let a domain back in.

        Raises
        ------
        InputError
            If the domain is not in quarantine or its probation is not over.
        """
        held = self._held(domain)
        if missing := self.wanted(domain):
            raise InputError(
                f"domain {domain}: expected {held.clean + missing} clean checks in a row"
                f" before its release, got {held.clean}"
            )
        return self._detained.pop(domain)

    def _held(self, domain: str) -> Detention:
        if domain not in self._detained:
            raise InputError(
                f"domain {domain}: expected one in quarantine ({', '.join(self._detained) or 'none is'}),"
                " it is not"
            )
        return self._detained[domain]

    def to_dict(self) -> dict[str, Any]:
        """Return the whole list in closed types, for a checkpoint."""
        return {
            "probation": self.probation,
            "offences": dict(self._offences),
            "detained": [asdict(one) for one in self],
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Rebuild a list from `to_dict`."""
        restored = cls(state["probation"])
        restored._offences = dict(state["offences"])
        restored._detained = {one["domain"]: Detention(**one) for one in state["detained"]}
        return restored
