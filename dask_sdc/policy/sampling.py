"""Which shards are audited: stratified by domain, with a debt that carries over.

Every domain owes ``rate`` audits per shard that it computes. With ``k = ceil(1 / rate)``:

- **share**: after N shards of a domain the number of its audits differs from ``rate * N`` by
  less than `SHARE_BOUND`, whatever N;
- **gap**: at most k shards in a row of one domain go unaudited, however they are dealt to rounds
  and calls, and among any k rounds in a row in which it computes anything there is an audit. So
  a persistent fault of a domain meets an audit within k rounds, not with luck;
- **position**: within these bounds the shard is drawn that the domain has computed most often
  without an audit, ties by the seed. So a fixed list of shards a round does not meet the same
  position every time, and every position has its turn.

Method: audits fall due when the debt crosses a whole number (Bresenham's line). Each may move
back by less than k places and forward to just before the next one falls due, as long as the gap
allows it. A gap of k unaudited shards, one more than k - 1, is used only if two of them belong to
one round. Where an audit moved back, the next may be forced before it falls due; the debt is then
negative for a while. How a sequence is cut into calls moves audits by less than k places, and
never touches the bounds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Self

from dask_sdc.exceptions import InputError, InputTypeError

#: Debts are whole multiples of 2**-60, so that they add up without rounding.
_UNIT = 1 << 60
#: ``|audits - rate * shards|`` stays below this for every domain.
SHARE_BOUND = 2.0
#: Shards that are remembered per domain; the ones that came first are forgotten first.
REMEMBERED = 1 << 16
_MASK = (1 << 64) - 1


def check_rate(rate: Any, name: str = "audit_rate") -> float:
    """Return ``rate`` as a float.

    Raises
    ------
    InputTypeError
        If it is not a real number; a bool is not.
    InputError
        If it is not finite or not in [0, 1].
    """
    if isinstance(rate, bool) or not isinstance(rate, Real):
        raise InputTypeError(f"{name}: expected a real number in [0, 1], got {rate!r}")
    value = float(rate)
    if not 0.0 <= value <= 1.0:  # also refuses NaN
        raise InputError(f"{name}: expected a finite number in [0, 1], got {rate!r}")
    return value


def longest_run(rate: float) -> int:
    """Return k = ceil(1 / rate), the most shards in a row that go unaudited; rate > 0."""
    return math.ceil(min(1.0 / rate, 2.0**1000))


def _mix(x: int) -> int:
    """Scramble 64 bits (the finaliser of SplitMix64, Steele et al. 2014)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


@dataclass(slots=True)
class _Account:
    """What one domain owes and what it had audited."""

    key: int
    rate: float
    debt: int  # in units of 2**-60 audits
    computed: int = 0
    drawn: int = 0
    run: int = 0  # unaudited shards since the last audit
    shared: bool = False  # two shards of the run belong to one round
    round: int | None = None
    last: tuple[int, int] | None = None
    waits: dict[int, int] = field(default_factory=dict)  # shard -> times computed since its audit

    def enter(self, round_number: int | None, n: int) -> None:
        """Begin a call of n >= 1 shards."""
        again = round_number is not None and round_number == self.round and self.run > 0
        self.shared = self.shared or again or n > 1
        self.round = round_number

    def audit(self, place: int, shard: int) -> None:
        self.waits[shard] = -1  # becomes 0 when the call is closed
        self.last = (self.computed + place, shard)
        self.drawn += 1

    def leave(self, shards: Sequence[int], run: int, audited: bool) -> None:
        """Close a call; new shards begin as if it were their turn."""
        turn = longest_run(self.rate) if self.rate > 0.0 else 0
        for shard in shards:
            self.waits[shard] = self.waits.get(shard, turn) + 1
        while len(self.waits) > REMEMBERED:
            del self.waits[next(iter(self.waits))]
        self.run = run
        self.shared = run > 1 if audited else self.shared
        self.computed += len(shards)


class CoverageSampler:
    """Draws the shards to audit; see the module's description for what it guarantees.

    Parameters
    ----------
    rate : float
        Audits per computed shard, in [0, 1].
    seed : int
        Decides where each domain's first audit falls and which of equal shards is drawn.

    Attributes
    ----------
    base_rate : float
        The rate of every domain whose rate was not changed; see `rate`.
    seed : int
        As given.

    Raises
    ------
    InputError
        If the rate is not a finite real number in [0, 1] or the seed no int.
    """

    def __init__(self, rate: float, seed: int = 0) -> None:
        self.base_rate = check_rate(rate)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InputTypeError(f"seed: expected an int, got {seed!r}")
        self.seed = seed
        self._accounts: dict[str, _Account] = {}

    def _account(self, domain: str) -> _Account:
        account = self._accounts.get(domain)
        if account is None:
            raw = hashlib.blake2b(f"{self.seed}:{domain}".encode(), digest_size=16).digest()
            phase = int.from_bytes(raw[:8], "big") % _UNIT
            account = _Account(int.from_bytes(raw[8:], "big"), self.base_rate, phase)
            self._accounts[domain] = account
        return account

    def rate(self, domain: str) -> float:
        """Return the rate of one domain."""
        account = self._accounts.get(domain)
        return self.base_rate if account is None else account.rate

    def set_rate(self, domain: str, rate: float) -> None:
        """Change the rate of one domain from its next shard on; the debt is kept.

        Raises
        ------
        InputError
            If the rate is not a finite real number in [0, 1].
        """
        self._account(domain).rate = check_rate(rate)

    def draw(self, domain: str, shard_ids: Sequence[int], round_number: int | None = None) -> tuple[int, ...]:
        """Draw the shards to audit among those that a domain is about to compute.

        Parameters
        ----------
        domain : str
            The domain that computes the shards.
        shard_ids : sequence of int
            The shards, without repetition, in the order in which they are computed.
        round_number : int, optional
            The round that they belong to, if a round is drawn in several calls: it lets an
            audit move from one call into the next. Without it every call counts as a round.

        Returns
        -------
        tuple of int
            The shards to audit, in the same order.
        """
        if len(set(shard_ids)) != len(shard_ids):
            raise InputError(f"domain {domain}: expected distinct shards, got {list(shard_ids)!r}")
        account = self._account(domain)
        if not shard_ids:
            return ()
        account.enter(round_number, len(shard_ids))
        places = _places(account, shard_ids) if account.rate > 0.0 else []
        run = len(shard_ids) - 1 - places[-1] if places else account.run + len(shard_ids)
        account.leave(shard_ids, run, bool(places))
        return tuple(shard_ids[place] for place in places)

    def refund(self, domain: str, n: int = 1) -> None:
        """Owe ``n`` audits again that were drawn and could not be done.

        They fall due at once: the next shard that the domain computes is drawn.

        Raises
        ------
        InputError
            If ``n`` is not an int of at least 0.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise InputError(f"refund of domain {domain}: expected an int >= 0, got {n!r}")
        account = self._account(domain)
        account.debt += n * _UNIT
        if n and account.rate > 0.0:
            account.run = max(account.run, longest_run(account.rate))

    def debt(self, domain: str) -> float:
        """Return the audits that a domain owes; negative where one was done early."""
        return self._account(domain).debt / _UNIT

    def unaudited(self, domain: str) -> int:
        """Return how many shards the domain computed since its last drawn one."""
        return self._account(domain).run

    def computed(self, domain: str) -> int:
        """Return how many shards the domain computed."""
        return self._account(domain).computed

    def last_audited(self, domain: str) -> tuple[int, int] | None:
        """Return (position, shard) of the last draw; the position counts the domain's shards from 0."""
        return self._account(domain).last

    def to_dict(self) -> dict[str, Any]:
        """Return the whole state in closed types, for a checkpoint."""
        return {
            "rate": self.base_rate,
            "seed": self.seed,
            "domains": {
                domain: {
                    "rate": a.rate,
                    "debt": a.debt,
                    "computed": a.computed,
                    "drawn": a.drawn,
                    "run": a.run,
                    "last": None if a.last is None else list(a.last),
                    "shared": a.shared,
                    "round": a.round,
                    "waits": [[shard, wait] for shard, wait in a.waits.items()],
                }
                for domain, a in self._accounts.items()
            },
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Rebuild a sampler that goes on exactly as the saved one would have."""
        sampler = cls(state["rate"], state["seed"])
        for domain, saved in state["domains"].items():
            account = sampler._account(domain)
            account.rate = check_rate(saved["rate"])
            account.debt, account.computed = saved["debt"], saved["computed"]
            account.drawn, account.run = saved["drawn"], saved["run"]
            account.last = None if saved["last"] is None else (saved["last"][0], saved["last"][1])
            account.round, account.shared = saved["round"], saved["shared"]
            account.waits = dict(saved["waits"])
        return sampler


def _places(account: _Account, shards: Sequence[int]) -> list[int]:
    """Choose the places of a call that are audited, and settle the debt."""
    n, k = len(shards), longest_run(account.rate)
    step = max(1, round(account.rate * _UNIT))
    places: list[int] = []
    previous, deadline = -1, max(0, k - account.run - (not account.shared))
    while previous < n - 1:
        # The debt reaches a whole audit at `due`, and one more at `following`.
        left = account.debt - len(places) * _UNIT
        due = max(previous + 1, -((left - _UNIT) // step) - 1)
        following = -((left - 2 * _UNIT) // step) - 1
        first = min(max(previous + 1, due - k + 1), deadline)
        final = max(first, min(deadline, following - 1))
        if first >= n:
            break
        place, wait = _longest_wait(account, shards, range(first, min(final, n - 1) + 1), k)
        if min(due, deadline) >= n and wait <= 2 * k:
            break  # nothing falls due in this call, and nobody waits so long that it cannot wait
        if final >= n and wait < k:
            break  # the next call may have one that has waited longer
        account.audit(place, shards[place])
        places.append(place)
        previous, deadline = place, place + k + 1
    account.debt += n * step - len(places) * _UNIT
    return places


def _longest_wait(account: _Account, shards: Sequence[int], places: range, new: int) -> tuple[int, int]:
    """Return the place of the shard that was computed most often without an audit, and how often."""
    waits = [account.waits.get(shards[place], new) for place in places]
    longest = max(waits)
    tied = [place for place, wait in zip(places, waits, strict=True) if wait == longest]
    return tied[_mix(account.key + account.drawn * 0x9E3779B97F4A7C15 & _MASK) % len(tied)], longest
