"""The domains of a round: who is there, who may be given work, and what each has in hand.

Everything that is asked for on every batch (who is idlest, how many lanes and threads are there,
who has a batch) is kept up to date as it changes, so that a batch costs O(log domains).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from dask_sdc.policy.messages import Cancel, Dispatch, Instruction, Place, RoundRecord

#: Seconds that a batch counts for beyond its shards: whoever has fewer batches is idler.
_A_BATCH = 1e-6
#: A domain counts as at most this many times slower or faster than the mean.
_PACES = 16.0


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
class Mean:
    """A running mean."""

    total: float = 0.0
    count: int = 0

    def add(self, values: Sequence[float]) -> None:
        """Take in more values."""
        self.total += sum(values)
        self.count += len(values)

    def value(self, otherwise: float) -> float:
        """Return the mean, or something else if there are no values."""
        return self.total / self.count if self.count else otherwise


@dataclass
class Domain:
    """One failure domain as the round sees it; changed by the `Roster` alone.

    Attributes
    ----------
    live : bool
        Whether it has a worker.
    barred : str
        Why it is used no more in this call; empty if it is.
    failing : bool
        Whether it is barred for nothing but failing too often.
    suspect : bool
        Whether it is accused and its shards are being recomputed.
    failures : int
        How often it was lost or failed to return a batch.
    cost : Mean
        Measured seconds per shard.
    pace : float
        How many times longer a shard takes than in the mean of all domains.
    work : float
        Expected seconds of work in hand, as if none of it had begun.
    until : float
        When it is expected to be done with that.
    primaries : int
        Primary batches in hand.
    counted : bool
        Whether the roster counts it among the usable ones.
    """

    place: Place
    live: bool = True
    barred: str = ""
    failing: bool = False
    suspect: bool = False
    failures: int = 0
    last_heard: float = 0.0
    outstanding: dict[int, Outstanding] = field(default_factory=dict)
    cost: Mean = field(default_factory=lambda: Mean())
    pace: float = 1.0
    work: float = 0.0
    until: float = 0.0
    primaries: int = 0
    counted: bool = False

    @property
    def name(self) -> str:
        """Name of the domain."""
        return self.place.domain

    @property
    def usable(self) -> bool:
        """Whether it may be given shards."""
        return self.live and not self.barred and not self.suspect

    @property
    def hungry(self) -> bool:
        """Whether it has room for a primary: it keeps one that runs and one that is ready per thread."""
        return self.primaries < 2 * self.place.slots

    @property
    def power(self) -> float:
        """Expected work that it does in a second, in seconds of a mean thread."""
        return self.place.slots / self.pace


class Idlest:
    """Some domains by when they will be done; a look costs O(log domains), a change mostly nothing.

    Each domain has one valid entry, whose time may be earlier than its real one: that is put right
    when the entry is met at the top of the heap.

    Parameters
    ----------
    belongs : callable
        Whether a domain is one of them; asked when it is met, too.
    """

    def __init__(self, belongs: Callable[[Domain], bool]) -> None:
        self._belongs = belongs
        self._heap: list[tuple[float, str, Domain]] = []
        self._entered: dict[str, float] = {}

    def update(self, domain: Domain) -> None:
        """Take in a domain that is new here or will be done earlier."""
        if self._entered.get(domain.name, math.inf) > domain.until and self._belongs(domain):
            self._entered[domain.name] = domain.until
            heapq.heappush(self._heap, (domain.until, domain.name, domain))
            if len(self._heap) > 64 + 2 * len(self._entered):
                self._heap = [entry for entry in self._heap if self._entered.get(entry[1]) == entry[0]]
                heapq.heapify(self._heap)

    def first(self, accept: Callable[[Domain], bool]) -> Domain | None:
        """Return the idlest domain that a predicate accepts."""
        passed, found = [], None
        while self._heap and found is None:
            until, name, domain = entry = self._heap[0]
            if self._entered.get(name) != until:
                heapq.heappop(self._heap)  # an earlier one came after it
            elif not self._belongs(domain):
                heapq.heappop(self._heap)
                del self._entered[name]
            elif until < domain.until:
                self._entered[name] = domain.until
                heapq.heapreplace(self._heap, (domain.until, name, domain))
            elif accept(domain):
                found = domain
            else:
                heapq.heappop(self._heap)
                passed.append(entry)
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found


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
        #: Bytes of a shard's payload.
        self.nbytes = Mean()
        #: Time of the event that is being handled.
        self.now = 0.0
        self.record: RoundRecord
        self._barred = barred
        self._next_batch = 0
        self._holders: dict[int, Domain] = {}
        self._roles: dict[str, dict[int, Outstanding]] = {}
        self._lanes: Counter[int] = Counter()
        self._usable = 0
        self._seconds = Mean()
        self._power = 0.0
        # Over the usable domains that have work: how many, their power, and power times until.
        self._busy, self._busy_power, self._busy_until = 0, 0.0, 0.0
        self._all = Idlest(lambda d: d.counted)
        self._hungry = Idlest(lambda d: d.counted and d.hungry)
        self._alike: dict[str, Idlest] = {}

    def __getitem__(self, name: str) -> Domain:
        return self.domains[name]

    def get(self, name: str | None) -> Domain | None:
        """Return a domain, None if it was never there."""
        return self.domains.get(name or "")

    # -- who may be used ---------------------------------------------------------------

    def __len__(self) -> int:
        """Return how many domains are usable."""
        return self._usable

    def usable(self) -> list[Domain]:
        """Return the domains that may be given shards; O(domains)."""
        return [d for d in self.domains.values() if d.usable]

    def lanes(self) -> int:
        """Return how many lanes the usable domains are in."""
        return len(self._lanes)

    def power(self) -> float:
        """Return the expected work that the usable domains do in a second, in seconds of a mean thread."""
        return self._power

    def work(self) -> float:
        """Return the expected work that they still have in hand, in seconds of a mean thread."""
        return max(0.0, self._busy_until - self._busy_power * self.now)

    def same_lane(self, one: str, other: str) -> bool:
        """Say whether two domains may not check each other."""
        return self.domains[one].place.lane == self.domains[other].place.lane

    def find(self, accept: Callable[[Domain], bool]) -> Domain | None:
        """Return the idlest usable domain that a predicate accepts."""
        return self._all.first(accept)

    def hungry(self, accept: Callable[[Domain], bool]) -> Domain | None:
        """Return the idlest usable domain that has room for a primary and that a predicate accepts."""
        return self._hungry.first(accept)

    def partner(self, apart: Iterable[Place], shunned: Collection[str] = ()) -> Domain | None:
        """Pick a domain apart from others: not shunned, of the first one's environment, the idlest."""
        places = list(apart)
        lanes = {place.lane for place in places}
        alike = [self._alike_to(place.fingerprint) for place in places[:1]]
        for avoid in [shunned, ()] if shunned else [()]:
            for index in [*alike, self._all]:

                def accept(domain: Domain, avoid: Collection[str] = avoid) -> bool:
                    return domain.place.lane not in lanes and domain.name not in avoid

                if (found := index.first(accept)) is not None:
                    return found
        return None

    def _touch(self, domain: Domain) -> None:
        """Bring counts and indices up to date with a domain that came, went or changed its state."""
        if domain.usable != domain.counted:
            sign = 1 if domain.usable else -1
            self._weigh(domain, -1)
            domain.counted = domain.usable
            self._weigh(domain, 1)
            self._usable += sign
            self._lanes[domain.place.lane] += sign
            if not self._lanes[domain.place.lane]:
                del self._lanes[domain.place.lane]
        self._list(domain)

    def _weigh(self, domain: Domain, sign: int) -> None:
        """Add a domain to the sums over all of them, or take it out while it changes."""
        if not domain.counted:
            return
        self._power += sign * domain.power
        if domain.outstanding:
            self._busy += sign
            self._busy_power += sign * domain.power
            self._busy_until += sign * domain.power * domain.until
        if not self._busy:
            self._busy_power = self._busy_until = 0.0  # so that no rounding adds up

    def _list(self, domain: Domain) -> None:
        if domain.counted:
            self._all.update(domain)
            self._hungry.update(domain)
            self._alike_to(domain.place.fingerprint).update(domain)

    def _alike_to(self, fingerprint: str) -> Idlest:
        if fingerprint not in self._alike:
            self._alike[fingerprint] = Idlest(lambda d: d.counted and d.place.fingerprint == fingerprint)
        return self._alike[fingerprint]

    # -- coming and going --------------------------------------------------------------

    def join(self, place: Place, now: float) -> None:
        """Add a domain, or note that it is back or has other threads."""
        domain = self.domains.get(place.domain)
        if domain is None:
            barred = self._barred.get(place.domain, "")
            domain = self.domains[place.domain] = Domain(place, barred=barred, last_heard=now)
        elif domain.live:
            self._weigh(domain, -1)
            domain.place = replace(domain.place, slots=place.slots)
            self._weigh(domain, 1)
        else:
            domain.place, domain.live, domain.last_heard = place, True, now
        self._touch(domain)

    def leave(self, domain: Domain) -> None:
        """Note that a domain has no worker any more."""
        domain.live = False
        self._touch(domain)

    def fail(self, domain: Domain, max_retries: int, why: str) -> None:
        """Count one more failure of a domain; one too many bars it, unless it is the last."""
        domain.failures += 1
        if domain.name not in self.record.failed:
            self.record.failed.append(domain.name)
        others = self._usable - domain.counted
        if domain.failures > max_retries and not domain.barred and others:
            domain.failing = True
            self.bar(domain, f"failed {domain.failures} times, last: {why}")

    def bar(self, domain: Domain, why: str) -> None:
        """Use a domain no more in this call."""
        domain.barred = domain.barred or why
        if domain.name not in self.record.barred:
            self.record.barred.append(domain.name)
        self._touch(domain)

    def pardon(self) -> bool:
        """Use live domains again that are barred for nothing but failing; say whether there are any."""
        pardoned = [d for d in self.domains.values() if d.failing and d.live]
        for domain in pardoned:
            domain.barred, domain.failing = "", False
            self.record.barred.remove(domain.name)
            self._touch(domain)
        return bool(pardoned)

    def suspect(self, domain: Domain, suspected: bool) -> None:
        """Take a domain out of service while it is suspected, or put it back."""
        domain.suspect = suspected
        self._touch(domain)

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
            len(shard_ids) * (self.cost or 0.0) * domain.pace,
        )
        self._next_batch += 1
        self._weigh(domain, -1)
        outstanding = domain.outstanding[order.batch_id] = Outstanding(order, now, parts or {})
        self._holders[order.batch_id] = domain
        self._roles.setdefault(role, {})[order.batch_id] = outstanding
        weight = order.expected + _A_BATCH
        domain.work += weight
        domain.until = max(domain.until, now) + weight / domain.place.slots
        domain.primaries += role == "primary"
        self._weigh(domain, 1)
        # It stays in the indices as it was: what will be done later is put right when it is met.
        self.record.evaluations += len(shard_ids)
        self.out.append(order)
        return order.batch_id

    def take_back(self, batch_id: int) -> Outstanding | None:
        """Remove a batch from whoever has it; None if it is superseded."""
        domain = self._holders.pop(batch_id, None)
        if domain is None:
            return None
        self._weigh(domain, -1)
        outstanding = domain.outstanding.pop(batch_id)
        order = outstanding.order
        del self._roles[order.role][batch_id]
        domain.work = domain.work - order.expected - _A_BATCH if domain.outstanding else 0.0
        domain.until = self.now + domain.work / domain.place.slots
        domain.primaries -= order.role == "primary"
        self._weigh(domain, 1)
        self._list(domain)
        return outstanding

    def cancel(self, batch_id: int) -> Outstanding | None:
        """Remove a batch and have the driver forget it."""
        self.out.append(Cancel(batch_id))
        return self.take_back(batch_id)

    def holder(self, batch_id: int | None) -> Domain | None:
        """Return the domain that has a batch; None if it is superseded."""
        return None if batch_id is None else self._holders.get(batch_id)

    def outstanding(self, role: str) -> list[Outstanding]:
        """Return the batches that are out in a role."""
        return list(self._roles.get(role, {}).values())

    def learn_cost(
        self, domain: Domain, seconds: Sequence[float], nbytes: Sequence[int], waited: float
    ) -> None:
        """Update what a shard is expected to cost from measured times and sizes of one batch.

        Times are what workers say, so nonsense is not believed, nor more than was waited.
        """
        believed = [min(one, waited) for one in seconds if math.isfinite(one) and one >= 0.0]
        self.nbytes.add(nbytes)
        if not believed:
            return
        domain.cost.add(believed)
        self._seconds.add(believed)
        self.cost = max(self._seconds.value(0.0), 1e-7)
        self._weigh(domain, -1)
        domain.pace = min(max(domain.cost.value(0.0) / self.cost, 1 / _PACES), _PACES)
        self._weigh(domain, 1)
