"""What every domain saw of every shard's input, and whose reading is to be believed.

A digest of an input block that differs from earlier ones means one of three things: the reader
read wrongly, an earlier reader did, or a persisted block changed in memory. Whoever read first is
not right for that, and nobody is accused on two voices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Reading(Enum):
    """What a reading is worth.

    ``SOUND``: nothing speaks against it, or what does is left to the comparison of results.
    ``VOID``: it is to be done again, where there is a persisted block, of a fresh one.
    ``WRONG``: two other domains, or the reader itself, say otherwise.
    """

    SOUND = "sound"
    VOID = "void"
    WRONG = "wrong"


class Judgement(NamedTuple):
    """What a reading is worth, and who is shown to have read wrongly, by two others or more."""

    reading: Reading
    exposed: frozenset[str] = frozenset()


@dataclass
class InputBook:
    """The digests of all shards' inputs, with the domains that saw them.

    Attributes
    ----------
    seen : dict of int to (dict of bytes to (dict of str to int))
        By shard and digest, who read it so, and in which round first.
    misread : dict of str to (set of int)
        By domain, the shards whose persisted block it alone saw differ. One may have changed in memory,
        perhaps on its way; two are no chance.
    spoiled : int or None
        The first round in which somebody read otherwise than is now known to be right.
    """

    seen: dict[int, dict[bytes, dict[str, int]]] = field(default_factory=dict)
    misread: dict[str, set[int]] = field(default_factory=dict)
    spoiled: int | None = None

    def judge(
        self,
        shard_id: int,
        digest: bytes,
        domain: str,
        *,
        role: str,
        audited: bool,
        persisted: bool,
        number: int,
    ) -> Judgement:
        """Note a reading and say what it is worth.

        Parameters
        ----------
        shard_id : int
        digest : bytes
            Of the input block.
        domain : str
            Who read it.
        role : str
            What for: what is not a primary is compared with other results in any case.
        audited : bool
            Whether a primary is compared with an audit too.
        persisted : bool
            Whether it was read from the cluster's memory, and not from its source.
        number : int
            Number of the round.
        """
        seen = self.seen.setdefault(shard_id, {})
        others = [readers for other, readers in seen.items() if other != digest]
        again = domain in seen.get(digest, ())
        itself = any(domain in readers for readers in others)
        rivals = max((readers.keys() - {domain} for readers in others), key=len, default=set())
        wavering = {name for readers in others for name in readers}
        support = seen.get(digest, {}).keys() - wavering - {domain}
        seen.setdefault(digest, {}).setdefault(domain, number)
        if not others:
            return Judgement(Reading.SOUND)
        if support and len(support) >= len(rivals):
            self._believe(shard_id, digest, number)
            return Judgement(Reading.SOUND, self._exposed(shard_id, rivals, role, persisted))
        outvoted = len(rivals) >= 2 and not support
        if persisted:
            return self._of_memory(shard_id, digest, again, itself and not outvoted, number)
        if role != "primary" or (again and not outvoted) or not (itself or rivals):
            return Judgement(Reading.SOUND)
        if itself:
            # One of its readings was wrong, perhaps the earlier one.
            self._spoil([readers[domain] for readers in others if domain in readers], number)
            return Judgement(Reading.WRONG)
        if audited:
            return Judgement(Reading.SOUND)
        return Judgement(Reading.WRONG if outvoted else Reading.VOID)

    def _exposed(self, shard_id: int, rivals: set[str], role: str, persisted: bool) -> frozenset[str]:
        if len(rivals) != 1:
            return frozenset()
        if not persisted:
            return frozenset(rivals if role == "primary" else ())
        (name,) = rivals
        shards = self.misread.setdefault(name, set())
        shards.add(shard_id)
        return frozenset(rivals if len(shards) > 1 else ())

    def _of_memory(self, shard_id: int, digest: bytes, again: bool, alone: bool, number: int) -> Judgement:
        """Judge a contradicted reading of a persisted block: the second one is of a fresh block."""
        if not again:
            return Judgement(Reading.VOID)
        if alone:
            self._believe(shard_id, digest, number)
        return Judgement(Reading.SOUND)

    def other(self, shard_id: int, digest: bytes) -> bytes:
        """Return the digest that most domains saw instead; the first of equals; its own if none did."""
        others = {d: len(readers) for d, readers in self.seen[shard_id].items() if d != digest}
        return max(others, key=others.__getitem__, default=digest)

    def _believe(self, shard_id: int, digest: bytes, number: int) -> None:
        """Forget the readings that turned out wrong, but not what they may have spoiled."""
        seen = self.seen[shard_id]
        self._spoil([r for d, readers in seen.items() if d != digest for r in readers.values()], number)
        self.seen[shard_id] = {digest: seen[digest]}

    def _spoil(self, rounds: list[int], number: int) -> None:
        earlier = [r for r in (*rounds, self.spoiled) if r is not None and r < number]
        self.spoiled = min(earlier, default=None)
