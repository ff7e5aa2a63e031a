"""The shards of a round that wait for somebody to compute them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence


class Pool:
    """Shards that wait to be computed, by the domain that had better do it."""

    def __init__(self, shard_ids: Sequence[int], preferred: Mapping[int, str]) -> None:
        self._shared: deque[int] = deque()
        self._own: dict[str, deque[int]] = {}
        self._avoid: dict[int, set[str]] = {}
        self.retries: deque[int] = deque()
        for shard_id in shard_ids:
            home = preferred.get(shard_id)
            queue = self._shared if home is None else self._own.setdefault(home, deque())
            queue.append(shard_id)

    def __len__(self) -> int:
        return len(self._shared) + len(self.retries) + sum(map(len, self._own.values()))

    def __bool__(self) -> bool:
        return len(self) > 0

    def avoid(self, shard_id: int, domain: str) -> None:
        """Keep a shard's primary off a domain, as long as there is another."""
        self._avoid.setdefault(shard_id, set()).add(domain)

    def put_back(self, shard_id: int, domain: str) -> None:
        """Return a shard that was lost on a domain."""
        self.avoid(shard_id, domain)
        self.retries.append(shard_id)

    def take(self, domain: str, count: int, others: set[str]) -> list[int]:
        """Take up to ``count`` shards: retries first, then its own, shared, and others'."""
        if retried := self._take_retry(domain, others):
            return retried
        for queue in self._queues(domain):
            if queue:
                return [queue.popleft() for _ in range(min(count, len(queue)))]
        return []

    def _queues(self, domain: str) -> Iterable[deque[int]]:
        yield self._own.get(domain, deque())
        yield self._shared
        # Last, help out whoever has most left.
        yield max(self._own.values(), key=len, default=deque())

    def _take_retry(self, domain: str, others: set[str]) -> list[int]:
        for _ in range(len(self.retries)):
            shard_id = self.retries.popleft()
            avoided = self._avoid.get(shard_id, set())
            # A shard that every live domain failed goes round again, up to its retries.
            if domain not in avoided or others <= avoided:
                return [shard_id]
            self.retries.append(shard_id)
        return []


