"""Who has contributed to a sum of ranks, and who cannot any more; knows nothing of time or of messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dask_sdc.exceptions import ClosedError, InputError, RankLost, SDCError, StaleRound


@dataclass(frozen=True)
class Holder:
    """Who speaks for a rank.

    Parameters
    ----------
    place : str
        Address of a worker, or id of a client; empty as long as it is not known.
    key : str, tuple or None
        Key of the task on a worker, where it is known.
    token : str
        New whenever a rank begins anew, so that a second one of the same rank is told from the first.
    """

    place: str
    key: Any
    token: str

    def __str__(self) -> str:
        task = [] if self.key is None else [f"task {self.key!r}"]
        return ", ".join([self.place or "not heard of yet", *task])


@dataclass(frozen=True)
class Answer:
    """What a rank is told.

    Parameters
    ----------
    status : str
        "sum", "lost", "stale", "refused" or "closed".
    values : tuple of int
        The sums.
    ranks : tuple of int
        Who was lost.
    message : str
        What was expected and what came.
    """

    status: str
    values: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    message: str = ""

    def unpack(self) -> tuple[int, ...]:
        """Return the sums, or raise what there is instead.

        Raises
        ------
        RankLost
            If a rank cannot come.
        StaleRound
            If the contribution was late, or a second one.
        InputError
            If it does not fit those of other ranks.
        ClosedError
            If the group is closed.
        """
        if self.status == "sum":
            return tuple(self.values)
        if self.status == "lost":
            raise RankLost(self.message, ranks=self.ranks)
        errors: dict[str, type[SDCError]] = {"stale": StaleRound, "refused": InputError}
        raise errors.get(self.status, ClosedError)(self.message)


class RankRounds:
    """The sums of one group of ranks, one after the other.

    A group that has lost a rank stays so: no later sum can be whole.

    Parameters
    ----------
    name : str
        Names the group in messages.
    size : int
        How many ranks there are.

    Attributes
    ----------
    number : int
        Of the open round.
    holders : dict of int to Holder
        Who last spoke for each rank.
    failure : Answer or None
        Why there will be no further sum.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.number = 0
        self.holders: dict[int, Holder] = {}
        self.failure: Answer | None = None
        self._given: dict[int, tuple[int, ...]] = {}
        # Ranks that may begin anew, and ranks that will never come again, with the reason.
        self._away: set[int] = set()
        self._gone: dict[int, str] = {}

    def expect(self, rank: int, key: Any) -> None:
        """Note which task will speak for a rank."""
        self.holders[rank] = Holder("", key, "")
        self._away.add(rank)

    def contribute(self, rank: int, number: int, values: tuple[int, ...], holder: Holder) -> Answer | None:
        """Take a rank's contribution.

        One that was made before is replaced if its task runs again, and counts once.

        Returns
        -------
        Answer or None
            Why it was not taken; None if it was.
        """
        if (refusal := self._refusal(rank, number, values, holder)) is None:
            self.holders[rank] = holder
            self._away.discard(rank)
            self._given[rank] = values
        return refusal

    def _refusal(self, rank: int, number: int, values: tuple[int, ...], holder: Holder) -> Answer | None:
        who = f"{self.name}: rank {rank} ({holder})"
        if self.failure is not None:
            return replace(self.failure, message=f"{self.failure.message}; {who} comes after that")
        if number != self.number:
            return Answer("stale", message=f"{who}: expected round {self.number}, got round {number}")
        known = self.holders.get(rank)
        if known is not None and known.token != holder.token and rank not in self._away:
            return Answer("stale", message=f"{who}: expected one of each rank, {known} speaks for it already")
        for other, given in self._given.items():
            if len(given) != len(values) and other != rank:
                return Answer(
                    "refused",
                    message=f"{who}: expected {len(given)} values as of rank {other}, got {len(values)}",
                )
        return None

    def outcome(self) -> Answer | None:
        """Return what everybody who waits is to be told, None if they have to wait on."""
        if not self._given:
            return None
        if self._gone:
            return self._fail(self._gone)
        if len(self._given) < self.size:
            return None
        sums = tuple(map(sum, zip(*self._given.values(), strict=True)))
        self._given.clear()
        self.number += 1
        return Answer("sum", sums)

    def step_back(self, rank: int) -> None:
        """Note that a rank's task was taken from its worker: it was cancelled, or begins anew.

        Who begins anew counts from round 0, and so can take part only while that is open.
        """
        if self.number == 0:
            self._away.add(rank)
        else:
            self.leave(rank, "was cancelled or begins anew")

    def leave(self, rank: int, why: str) -> None:
        """Note that a rank will never come again."""
        self._gone.setdefault(rank, f"rank {rank} ({self.holders[rank]}) {why}")

    def expire(self, seconds: float) -> Answer:
        """End the open round for want of those who have not come."""
        missing = [rank for rank in range(self.size) if rank not in self._given]
        return self._fail(
            {
                rank: f"rank {rank} ({self.holders.get(rank, 'not heard of yet')}) did not come "
                f"within {seconds:g} s"
                for rank in missing
            }
        )

    def _fail(self, lost: Mapping[int, str]) -> Answer:
        message = f"{self.name}, round {self.number}: {'; '.join(lost[rank] for rank in sorted(lost))}"
        self.failure = Answer("lost", ranks=tuple(sorted(lost)), message=message)
        self._given.clear()
        return self.failure
