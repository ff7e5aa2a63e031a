"""The scheduler's side of ranks that add up their counts.

Every hook is constant-time for each rank that it concerns; nothing that arrives here is unpickled or called.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from distributed import Scheduler, SchedulerPlugin

from dask_sdc.recovery.rounds import Answer, Holder, RankRounds

#: A group and a rank in it.
Seat = tuple[str, int]


@dataclass
class _Group:
    rounds: RankRounds
    owner: str
    timeout: float
    #: What all who have contributed to the open round wait for.
    answer: asyncio.Future[Answer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    deadline: asyncio.TimerHandle | None = None


class RecoverySchedulerPlugin(SchedulerPlugin):
    """Adds up what ranks contribute, and tells all of them when one is lost.

    A rank is known by its first contribution, or from when its task is announced. From then on it is lost
    when its worker or client leaves, and when its task ends, fails or is cancelled. One that nothing is known
    of is lost at the deadline, which begins with the first contribution to a round. Of rounds that are over
    nothing is kept but their number.
    """

    name = "dask_sdc_recovery"
    # One plugin a cluster, whoever registers it first.
    idempotent = True

    def __init__(self) -> None:
        self.groups: dict[str, _Group] = {}
        # Where ranks are, to find them in a hook: by worker or client, and by task.
        self._by_place: defaultdict[str, set[Seat]] = defaultdict(set)
        self._by_key: defaultdict[Any, set[Seat]] = defaultdict(set)
        self._by_owner: defaultdict[str, set[str]] = defaultdict(set)

    async def start(self, scheduler: Scheduler) -> None:
        """Add the RPC handlers."""
        self.scheduler = scheduler
        scheduler.handlers.update(
            sdc_ranks_open=self.open,
            sdc_ranks_expect=self.expect,
            sdc_ranks_sum=self.sum,
            sdc_ranks_close=self.close_group,
        )

    async def close(self) -> None:
        """Let nobody wait for a scheduler that closes."""
        self._close_all("the scheduler closes")

    # -- groups ----------------------------------------------------------------------------

    async def open(self, group: str, name: str, size: int, timeout: float, client: str) -> bool:
        """Begin a group of ranks; False if its client is not there (RPC handler)."""
        if client not in self.scheduler.clients:
            return False
        self.groups[group] = _Group(RankRounds(name, size), client, timeout)
        self._by_owner[client].add(group)
        return True

    async def expect(self, group: str, keys: Sequence[Any]) -> None:
        """Learn which tasks are going to be the ranks of a group, in their order (RPC handler)."""
        if (found := self.groups.get(group)) is not None:
            for rank, key in enumerate(keys):
                found.rounds.expect(rank, key)
                self._by_key[key].add((group, rank))

    async def close_group(self, group: str) -> None:
        """End a group (RPC handler)."""
        if group in self.groups:
            self._close(group, "its client closed it")

    def _close(self, group: str, why: str) -> None:
        """Tell who still waits, and forget everything."""
        found = self.groups.pop(group)
        _discard(self._by_owner, found.owner, group)
        for rank, holder in found.rounds.holders.items():
            self._unseat((group, rank), holder)
        message = f"{found.rounds.name}: expected an open group, {why}"
        self._settle(found, Answer("closed", message=message))

    def _close_all(self, why: str) -> None:
        for group in list(self.groups):
            self._close(group, why)

    # -- sums ------------------------------------------------------------------------------

    async def sum(
        self, group: str, rank: int, number: int, values: Sequence[int], place: str, key: Any, token: str
    ) -> dict[str, Any]:
        """Take a contribution, and answer when all ranks have made theirs (RPC handler)."""
        if (found := self.groups.get(group)) is None:
            return asdict(Answer("closed", message=f"rank {rank}: expected an open group, it was closed"))
        before = found.rounds.holders.get(rank)
        # A coroutine does not know which task it is; but it may have been announced.
        holder = Holder(place, before.key if key is None and before else key, token)
        refusal = found.rounds.contribute(rank, number, tuple(values), holder)
        if refusal is not None:
            return asdict(refusal)
        answer = found.answer
        if found.deadline is None:
            found.deadline = asyncio.get_running_loop().call_later(found.timeout, self._expire, group)
        if before != holder:
            self._seat((group, rank), holder, before)
        self._check(found)
        # A handler that is cancelled must not take the answer from the others.
        return asdict(await asyncio.shield(answer))

    def _seat(self, seat: Seat, holder: Holder, before: Holder | None) -> None:
        if before is not None:
            self._unseat(seat, before)
        self._by_place[holder.place].add(seat)
        if holder.key is not None:
            self._by_key[holder.key].add(seat)
        if holder.place not in self.scheduler.workers and holder.place not in self.scheduler.clients:
            # It left while its message was on its way, so no hook will tell of it.
            self._leave(seat, "has left the cluster")

    def _unseat(self, seat: Seat, holder: Holder) -> None:
        _discard(self._by_place, holder.place, seat)
        _discard(self._by_key, holder.key, seat)

    def _expire(self, group: str) -> None:
        # Only a round that is open has a deadline, and only a group that is open has a round.
        found = self.groups[group]
        self._settle(found, found.rounds.expire(found.timeout))

    def _check(self, found: _Group) -> None:
        if (outcome := found.rounds.outcome()) is not None:
            self._settle(found, outcome)

    def _settle(self, found: _Group, answer: Answer) -> None:
        """Answer everybody who waits, and begin the next round."""
        if found.deadline is not None:
            found.deadline.cancel()
            found.deadline = None
        found.answer.set_result(answer)
        found.answer = asyncio.get_running_loop().create_future()

    # -- ranks that are lost ---------------------------------------------------------------

    def _leave(self, seat: Seat, why: str) -> None:
        found = self.groups[seat[0]]
        found.rounds.leave(seat[1], why)
        self._check(found)

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
        """The ranks of a worker are lost with it."""
        for seat in list(self._by_place.get(worker, ())):
            self._leave(seat, "was lost with its worker")

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """A client's groups end with it; its ranks in groups of others are lost."""
        for group in list(self._by_owner.get(client, ())):
            self._close(group, "its client has left")
        for seat in list(self._by_place.get(client, ())):
            self._leave(seat, "was lost with its client")

    def transition(
        self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any
    ) -> None:
        """A rank whose task is over does not come again, unless the task is tried again."""
        if key not in self._by_key:
            return
        for group, rank in list(self._by_key[key]):
            rounds = self.groups[group].rounds
            place = rounds.holders[rank].place
            if place and place not in self.scheduler.workers:
                continue  # `remove_worker` comes next, and names the true reason
            if finish == "released" and start == "processing":
                rounds.step_back(rank)
            elif finish in _ENDS:
                self._leave((group, rank), _ENDS[finish])

    def restart(self, scheduler: Scheduler) -> None:
        """No task outlives a restart, and so no rank does."""
        self._close_all("the cluster was restarted")


#: States in which a task has come to its end, and what that means for its rank.
_ENDS = {
    "memory": "has ended",
    "erred": "has failed",
    "forgotten": "was cancelled",
}


def _discard(index: defaultdict[Any, set[Any]], key: Any, item: Any) -> None:
    """Take an item out of a set in an index, and the set with its last item."""
    if (found := index.get(key)) is not None:
        found.discard(item)
        if not found:
            del index[key]
