"""The shards of a round that wait for somebody to compute them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dask_sdc.policy.roster import Domain

#: ``find(accept)`` returns a usable domain that a predicate accepts, or None.
Find = Callable[[Callable[[Domain], bool]], Domain | None]


@dataclass(frozen=True)
class _Burden:
    """What shards that are tried again have in common.

    Attributes
    ----------
    failed : frozenset of str
        Domains that failed to return them.
    lane : int or None
        Lane of their audit, which is void if the primary is computed there too.
    alone : bool
        Whether each has to be a batch of its own, so that it spoils no other.
    """

    failed: frozenset[str]
    lane: int | None
    alone: bool

    def rank(self, domain: Domain) -> int:
        """Say how bad a choice a domain is: 0, 1 or 2."""
        return 2 if domain.name in self.failed else int(domain.place.lane == self.lane)


class Pool:
    """Shards that wait to be computed, by the domain that had better do it.

    Parameters
    ----------
    shard_ids : sequence of int
    preferred : mapping of int to str
        Domain that had better compute a shard.
    find : callable
        Looks among the usable domains.
    """

    def __init__(self, shard_ids: Sequence[int], preferred: Mapping[int, str], find: Find) -> None:
        self._find = find
        self._shared: deque[int] = deque()
        self._own: dict[str, deque[int]] = {}
        self._failed: dict[int, frozenset[str]] = {}
        self._retries: dict[_Burden, deque[int]] = {}
        self._first = len(shard_ids)  # shards that were never tried
        self._again = 0
        for shard_id in shard_ids:
            home = preferred.get(shard_id)
            queue = self._shared if home is None else self._own.setdefault(home, deque())
            queue.append(shard_id)
        # Longest first; an entry goes stale when its queue shrinks, and is put right when it is met.
        self._longest = [(-len(queue), name) for name, queue in self._own.items()]
        heapq.heapify(self._longest)

    def __len__(self) -> int:
        return self._first + self._again

    def put_back(self, shard_id: int, domain: str, lane: int | None = None, alone: bool = False) -> None:
        """Return a shard that was lost on a domain; ``lane`` is that of its audit."""
        failed = self._failed[shard_id] = self._failed.get(shard_id, frozenset()) | {domain}
        self._retries.setdefault(_Burden(failed, lane, alone), deque()).append(shard_id)
        self._again += 1

    def serves(self, domain: Domain) -> bool:
        """Say whether there is a shard that a domain may take."""
        return self._first > 0 or self._burden(domain) is not None

    def take(self, domain: Domain, count: int) -> list[int]:
        """Take up to ``count`` shards: retries first, then its own, shared, and others'."""
        burden = self._burden(domain)
        if burden is not None:
            return self._take_again(burden, count)
        queue = self._queue(domain.name)
        taken = [queue.popleft() for _ in range(min(count, len(queue)))]
        self._first -= len(taken)
        return taken

    def _queue(self, name: str) -> deque[int]:
        queue = self._own.get(name) or self._shared
        while not queue and self._longest:
            # Last, help out whoever has most left.
            size, other = heapq.heappop(self._longest)
            if left := len(self._own[other]):
                heapq.heappush(self._longest, (-left, other))
            if left == -size:
                queue = self._own[other]
        return queue

    def _burden(self, domain: Domain) -> _Burden | None:
        """Return which retries a domain may take: those for which nobody usable is a better choice."""
        for burden in self._retries:
            rank = burden.rank(domain)
            if not rank or self._find(lambda d, b=burden, r=rank: b.rank(d) < r) is None:  # type: ignore[misc]
                return burden
        return None

    def _take_again(self, burden: _Burden, count: int) -> list[int]:
        queue = self._retries[burden]
        taken = [queue.popleft() for _ in range(1 if burden.alone else min(count, len(queue)))]
        if not queue:
            del self._retries[burden]
        self._again -= len(taken)
        return taken
