"""The domains of a round: who is there, who may be given work, and what each has in hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from dask_sdc.policy.messages import Cancel, Dispatch, Instruction, Place, RoundRecord


@dataclass
class Outstanding:
    """A batch that was sent and is not back.

    Attributes
    ----------
    order : Dispatch
    since : float
        When it was sent.
    parts : dict of int to str
        By shard, the part of its case that the batch answers; empty for primary and heal.
    """

    order: Dispatch
    since: float
    parts: dict[int, str] = field(default_factory=dict)


@dataclass
class Domain:
    """One failure domain as the round sees it.

    Attributes
    ----------
    live : bool
        Whether it has a worker.
    barred : str
        Why it is used no more in this call; empty if it is.
    suspect : bool
        Whether it is accused and its shards are being recomputed.
    failures : int
        How often it was lost or failed to return a batch.
    """

    place: Place
    live: bool = True
    barred: str = ""
    suspect: bool = False
    failures: int = 0
    last_heard: float = 0.0
    outstanding: dict[int, Outstanding] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the domain."""
        return self.place.domain

    @property
    def usable(self) -> bool:
        """Whether it may be given shards."""
        return self.live and not self.barred and not self.suspect

    @property
    def load(self) -> float:
        """Expected seconds of work in hand, per thread."""
        return sum(o.order.expected + 1e-6 for o in self.outstanding.values()) / self.place.slots

    def count(self, role: str) -> int:
        """Return the number of batches in hand in a role."""
        return sum(o.order.role == role for o in self.outstanding.values())


class Roster:
    """All domains of a round.

    Parameters
    ----------
    barred : mapping of str to str
        Domains that this call does not use.
    """

    def __init__(self, barred: dict[str, str]) -> None:
        self.domains: dict[str, Domain] = {}
        self.out: list[Instruction] = []
        #: Expected seconds per shard, once known.
        self.cost: float | None = None
        self.record: RoundRecord
        self._barred = barred
        self._next_batch = 0

    def __getitem__(self, name: str) -> Domain:
        return self.domains[name]

    def get(self, name: str | None) -> Domain | None:
        """Return a domain, None if it was never there."""
        return self.domains.get(name or "")

    def usable(self) -> list[Domain]:
        """Return the domains that may be given shards."""
        return [d for d in self.domains.values() if d.usable]

    def lanes(self) -> int:
        """Return how many lanes the usable domains are in."""
        return len({d.place.lane for d in self.usable()})

    def slots(self) -> int:
        """Return the threads of the usable domains."""
        return sum(d.place.slots for d in self.usable())

    def same_lane(self, one: str, other: str) -> bool:
        """Say whether two domains may not check each other."""
        return self.domains[one].place.lane == self.domains[other].place.lane

    def partner(self, apart: Iterable[Place]) -> Domain | None:
        """Pick a domain apart from others: of the environment of the first if one is, then the idlest."""
        places = list(apart)
        lanes = {place.lane for place in places}
        fingerprint = places[0].fingerprint if places else ""
        return min(
            (d for d in self.usable() if d.place.lane not in lanes),
            key=lambda d: (d.place.fingerprint != fingerprint, d.load, d.name),
            default=None,
        )

    # -- coming and going --------------------------------------------------------------

    def join(self, place: Place, now: float) -> None:
        """Add a domain, or note that it is back or has other threads."""
        known = self.domains.get(place.domain)
        if known is None:
            barred = self._barred.get(place.domain, "")
            self.domains[place.domain] = Domain(place, barred=barred, last_heard=now)
        elif known.live:
            known.place = replace(known.place, slots=place.slots)
        else:
            known.place, known.live, known.last_heard = place, True, now

    def fail(self, domain: Domain, max_retries: int) -> None:
        """Count one more failure of a domain; one too many bars it."""
        domain.failures += 1
        if domain.name not in self.record.failed:
            self.record.failed.append(domain.name)
        if domain.failures > max_retries and not domain.barred:
            self.bar(domain, f"failed {domain.failures} times")

    def bar(self, domain: Domain, why: str) -> None:
        """Use a domain no more in this call."""
        domain.barred = domain.barred or why
        if domain.name not in self.record.barred:
            self.record.barred.append(domain.name)

    # -- batches -----------------------------------------------------------------------

    def send(
        self,
        role: str,
        shard_ids: Sequence[int],
        domain: Domain,
        now: float,
        *,
        apart_from: Iterable[str] = (),
        attempt: int = 0,
        parts: dict[int, str] | None = None,
    ) -> int:
        """Give a domain a batch; return its number."""
        order = Dispatch(
            self._next_batch,
            role,
            attempt,
            tuple(shard_ids),
            domain.name,
            tuple(sorted(set(apart_from))),
            len(shard_ids) * (self.cost or 0.0),
        )
        self._next_batch += 1
        domain.outstanding[order.batch_id] = Outstanding(order, now, parts or {})
        self.record.evaluations += len(shard_ids)
        self.out.append(order)
        return order.batch_id

    def take_back(self, batch_id: int) -> Outstanding | None:
        """Remove a batch from whoever has it; None if it is superseded."""
        for domain in self.domains.values():
            if (found := domain.outstanding.pop(batch_id, None)) is not None:
                return found
        return None

    def cancel(self, batch_id: int) -> Outstanding | None:
        """Remove a batch and have the driver forget it."""
        self.out.append(Cancel(batch_id))
        return self.take_back(batch_id)

    def outstanding(self, role: str) -> list[Outstanding]:
        """Return the batches that are out in a role."""
        return [
            o for d in self.domains.values() for o in d.outstanding.values() if o.order.role == role
        ]

    def learn_cost(self, seconds: Sequence[float]) -> None:
        """Update the expected cost of a shard from measured ones."""
        if seconds:
            mean = max(sum(seconds) / len(seconds), 1e-7)
            self.cost = mean if self.cost is None else 0.7 * self.cost + 0.3 * mean
