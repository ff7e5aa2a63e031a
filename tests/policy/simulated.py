"""A cluster without a cluster: a discrete-event simulation that executes a round's instructions.

Every domain has threads, a speed, a first-in-first-out queue and, if it is to misbehave, faults.
While it runs, the simulation checks what must hold at every step: placement (P3), that a suspect
is given nothing but reruns, and that the round ends within bounded time and a bounded number of
events.
"""

from __future__ import annotations

import heapq
import itertools
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from dask_sdc.evidence.codec import digest
from dask_sdc.evidence.seal import SealedBatch, SealedStatistic, failed_statistic
from dask_sdc.exceptions import SDCError
from dask_sdc.policy import cases
from dask_sdc.policy.messages import (
    Abort,
    Cancel,
    Close,
    Dispatch,
    DomainJoined,
    DomainLost,
    Done,
    Event,
    Evict,
    Failed,
    Instruction,
    Landed,
    Place,
    Quarantine,
    Quarantined,
    Settings,
    Tick,
)
from dask_sdc.policy.round import Round
from dask_sdc.policy.sampling import CoverageSampler
from dask_sdc.policy.verdict import Closeness, Decision, Outcome, Voice, decide

#: Values that differ by no more than this are inside the envelope.
ENVELOPE = 1e-3
#: What the environments F, G, ... add to every value: far inside the envelope.
ENVIRONMENTS = {"F": 0.0, "G": 1e-5, "H": 2e-5}
#: A value that is wrong, whatever the shard.
FAR = 1000.0

COMPUTE = ("transient", "persistent", "shifting", "near")
GARBLING = ("damaged", "garbled")
LOUD = ("error", "violation")
LOSSES = ("dropped", "misplaced", "failed", "silent", "late", "device_lost")
MESS = ("extra", "duplicate", "absurd_cost")


@dataclass(frozen=True)
class Fault:
    """What a domain does wrongly.

    Parameters
    ----------
    kind : str
        One of `COMPUTE`, `GARBLING`, `LOUD`, `LOSSES`, `MESS`.
    shards : frozenset of int, optional
        The shards that meet it; all by default.
    roles : frozenset of str, optional
        The roles that meet it; all by default.
    times : int, optional
        How many records (batches for what spoils a batch) meet it; no bound by default.
    since : float
        When it begins, in seconds.
    """

    kind: str
    shards: frozenset[int] | None = None
    roles: frozenset[str] | None = None
    times: int | None = None
    since: float = 0.0


@dataclass(frozen=True)
class Loss:
    """A domain leaves, and perhaps comes back."""

    domain: str
    at: float
    back: float | None = None


@dataclass
class Machine:
    """One simulated domain."""

    place: Place
    speed: float = 1.0
    faults: tuple[Fault, ...] = ()
    #: Whether a replacement of an evicted worker of this domain comes back, and after how long.
    returns: float | None = None
    alive: bool = True
    #: Whether its device is lost, which stays so until another process takes its place.
    deviceless: bool = False
    life: int = 0
    busy: int = 0
    queue: deque[Dispatch] = field(default_factory=deque)
    seen: Counter[Any] = field(default_factory=Counter)
    used: Counter[Fault] = field(default_factory=Counter)

    def meets(self, kind: str, order: Dispatch, shard_id: int | None, now: float) -> bool:
        """Say whether a fault of a kind strikes, and count it."""
        for fault in self.faults:
            if fault.kind != kind or now < fault.since:
                continue
            if fault.roles is not None and order.role not in fault.roles:
                continue
            struck = order.shard_ids if shard_id is None else (shard_id,)
            if fault.shards is not None and fault.shards.isdisjoint(struck):
                continue
            if fault.times is not None and self.used[fault] >= fault.times:
                continue
            self.used[fault] += 1
            return True
        return False


def truth(shard_id: int, fingerprint: str = "F") -> float:
    """Return the clean value of a shard in an environment."""
    return float(shard_id) + ENVIRONMENTS.get(fingerprint, 0.0)


def payload_of(value: float) -> bytes:
    """Return a value as it is sealed."""
    return struct.pack(">d", value)


def value_of(payload: bytes) -> float:
    """Return the value of a payload."""
    value: float = struct.unpack(">d", payload)[0]
    return value


def compare(a: Voice, b: Voice) -> Closeness:
    """Compare the values of two voices."""
    one, other = value_of(a.ref.record.payload), value_of(b.ref.record.payload)
    if one == other:
        return Closeness.IDENTICAL
    return Closeness.WITHIN if abs(one - other) <= ENVELOPE else Closeness.OUTSIDE


def place(i: int, slots: int = 1, fingerprint: str = "F", lane: int | None = None) -> Place:
    """Return the i-th domain, by default in a lane of its own."""
    return Place(f"d{i}", i if lane is None else lane, slots, fingerprint)


@dataclass
class Simulation:
    """One round on a simulated cluster.

    Parameters
    ----------
    machines : iterable of Machine
    shards : int
    cost : callable or float
        Seconds that a shard takes at speed 1.
    rate : float
        Of the audit; not looked at if a sampler is given.
    losses : iterable of Loss
    refuse : mapping of str to str
        What `Quarantine` of a domain answers, if it fails.
    bad : mapping of int to str
        Shards whose data are at fault: "violation" or "error" wherever they are computed.
    latency : float
        Seconds from the driver to a worker.
    overhead : float
        Seconds of a thread that every batch costs.
    """

    machines: Iterable[Machine]
    shards: int
    cost: Callable[[int], float] | float = 0.05
    rate: float = 0.25
    settings: Settings = field(default_factory=lambda: Settings(timeout=5.0))
    sampler: CoverageSampler | None = None
    losses: Iterable[Loss] = ()
    refuse: Mapping[str, str] = field(default_factory=dict)
    bad: Mapping[int, str] = field(default_factory=dict)
    latency: float = 0.005
    overhead: float = 0.003
    tick: float = 0.5
    seed: int = 0
    number: int = 0
    known_cost: float | None = None
    preferred: Mapping[int, str] | None = None
    barred: Mapping[str, str] | None = None
    max_events: int = 100_000

    def __post_init__(self) -> None:
        self.domains = {m.place.domain: m for m in self.machines}
        self.now = 0.0
        self.sent: list[tuple[float, Dispatch]] = []
        self.cancelled: set[int] = set()
        self.closed: list[Close] = []
        self.evicted: list[str] = []
        self.quarantines: list[str] = []
        self.landed: dict[int, Landed] = {}
        self.error: SDCError | None = None
        self.events = 0
        self._serial = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], Event | None]]] = []
        self._gone: set[str] = set()
        self.sampler = self.sampler or CoverageSampler(self.rate, self.seed)
        self.round = Round(
            self.number,
            range(self.shards),
            [m.place for m in self.domains.values()],
            self.sampler,
            compare,
            self.settings,
            preferred=self.preferred,
            cost=self.known_cost,
            barred=self.barred,
        )

    # -- running -----------------------------------------------------------------------

    def run(self) -> Simulation:
        """Run to the end; returns itself."""
        with mock.patch.object(cases, "decide", self._decide):
            for loss in self.losses:
                self._at(loss.at, self._leave, loss.domain, loss.back)
            self._at(self.tick, self._ticking)
            self._execute(self.round.start(0.0))
            while not self.round.done:
                assert self._agenda, f"deadlock at {self.now}"
                self.now, _, happen = heapq.heappop(self._agenda)
                event = happen()
                if event is not None:
                    self.events += 1
                    assert self.events < self.max_events, f"no end after {self.events} events: {self}"
                    self._execute(self.round.handle(event))
            assert self.round.handle(Tick(self.now)) == []
            assert self.round.handle(DomainJoined(place(99), self.now)) == []
        if self.error is None:
            assert sorted(self.round.settled) == list(range(self.shards))
        return self

    def _at(self, when: float, do: Callable[..., Event | None], *args: Any) -> None:
        heapq.heappush(self._agenda, (max(when, self.now), next(self._serial), lambda: do(*args)))

    def _ticking(self) -> Event:
        self._at(self.now + self.tick, self._ticking)
        return Tick(self.now)

    def _execute(self, instructions: list[Instruction]) -> None:
        cancelled = {i.batch_id for i in instructions if isinstance(i, Cancel)}
        for instruction in instructions:
            match instruction:
                case Dispatch():
                    self.sent.append((self.now, instruction))
                    self._check_placement(instruction, instruction.batch_id in cancelled)
                    life = self.domains[instruction.domain].life
                    self._at(self.now + self.latency, self._arrive, instruction, life)
                case Cancel():
                    self.cancelled.add(instruction.batch_id)
                case Evict():
                    self.evicted.append(instruction.domain)
                    returns = self.domains[instruction.domain].returns
                    back = None if returns is None else self.now + returns
                    self._at(self.now + self.latency, self._leave, instruction.domain, back)
                case Quarantine():
                    assert not self.round._cases.involve([instruction.domain]), "a case waits for it"
                    self.quarantines.append(instruction.domain)
                    self._at(self.now + self.latency, self._quarantine, instruction.domain)
                case Close():
                    self.closed.append(instruction)
                case Abort():
                    self.error = instruction.error
                case Done():
                    assert self.round.done

    # -- the cluster -------------------------------------------------------------------

    def _arrive(self, order: Dispatch, life: int) -> None:
        machine = self.domains[order.domain]
        if machine.alive and machine.life == life and order.batch_id not in self.cancelled:
            machine.queue.append(order)
            self._work(machine)

    def _work(self, machine: Machine) -> None:
        while machine.queue and machine.busy < machine.place.slots:
            order = machine.queue.popleft()
            if order.batch_id in self.cancelled:
                continue
            machine.busy += 1
            if machine.meets("silent", order, None, self.now):
                continue  # its thread never comes back
            seconds = sum(map(self._seconds, order.shard_ids)) / machine.speed + self.overhead
            self._at(self.now + seconds, self._finish, machine, machine.life, order)

    def _seconds(self, shard_id: int) -> float:
        return self.cost(shard_id) if callable(self.cost) else self.cost

    def _finish(self, machine: Machine, life: int, order: Dispatch) -> None:
        if life != machine.life:
            return
        machine.busy -= 1
        late = 20.0 if machine.meets("late", order, None, self.now) else 0.0
        self._at(self.now + self.latency + late, self._reply, order, self._answer(machine, order))
        self._work(machine)

    def _reply(self, order: Dispatch, result: SealedBatch | None) -> Event:
        # Even a cancelled batch may be on its way already: it is told all the same.
        if result is None:
            return Failed(order.batch_id, "lost on its way", self.now)
        event = Landed(order.batch_id, result, self.now)
        if order.batch_id not in self.cancelled:
            self.landed[order.batch_id] = event
        return event

    def _leave(self, domain: str, back: float | None) -> Event | None:
        machine = self.domains[domain]
        if not machine.alive:
            return None
        machine.alive, machine.busy = False, 0
        machine.life += 1
        machine.queue.clear()
        if back is not None:
            self._at(back, self._join, machine)
        return DomainLost(domain, "its worker left", self.now)

    def _join(self, machine: Machine) -> Event | None:
        if machine.alive or machine.place.domain in self._gone:
            return None
        machine.alive, machine.deviceless = True, False
        return DomainJoined(machine.place, self.now)

    def _quarantine(self, domain: str) -> Event:
        failure = self.refuse.get(domain, "")
        if not failure:
            self._gone.add(domain)
            self._at(self.now + self.latency, self._leave, domain, None)
        return Quarantined(domain, failure, self.now)

    # -- what a domain answers ---------------------------------------------------------

    def _answer(self, machine: Machine, order: Dispatch) -> SealedBatch | None:
        if machine.meets("failed", order, None, self.now):
            return None
        mark = machine.place
        batch = SealedBatch(
            self.number, order.role, order.attempt, mark.domain, f"w-{mark.domain}", mark.fingerprint, b""
        )
        if machine.meets("misplaced", order, None, self.now):
            return replace(batch, domain="elsewhere", status="misplaced")
        if machine.meets("garbled", order, None, self.now):
            return replace(batch, status="garbled")
        records = [self._record(machine, order, k) for k in order.shard_ids]
        records = [r for r in records if not machine.meets("dropped", order, r.shard_id, self.now)]
        if machine.meets("extra", order, None, self.now):
            records.append(self._sealed(self.shards + 7, 3.0))
        if machine.meets("duplicate", order, None, self.now) and records:
            records.append(self._sealed(records[0].shard_id, FAR))
        return replace(batch, records=tuple(records))

    def _record(self, machine: Machine, order: Dispatch, shard_id: int) -> SealedStatistic:
        def meets(kind: str) -> bool:
            return machine.meets(kind, order, shard_id, self.now)

        if machine.deviceless or meets("device_lost"):
            machine.deviceless = True
            return failed_statistic(shard_id, ("DeviceLost", "DeviceLost: uncorrectable ECC error"))
        value = truth(shard_id, machine.place.fingerprint)
        status, notes = "ok", ()
        if self.bad.get(shard_id) == "error" or meets("error"):
            return SealedStatistic(
                shard_id, "error", 0, b"", digest(b""), elapsed=0.001, notes=("ValueError", "it broke")
            )
        if self.bad.get(shard_id) == "violation":
            status, notes = "violation", ("total: expected 3, got 4",)
        machine.seen[shard_id] += 1
        if meets("transient") and machine.seen[shard_id] == 1:
            value += FAR
        if meets("persistent"):
            value += 2 * FAR + machine.place.lane
        if meets("shifting"):
            value += 3 * FAR + machine.seen[shard_id] + 0.01 * machine.place.lane
        if meets("near"):
            value += 1e-7
        if meets("violation"):
            value, status, notes = -FAR - machine.place.lane, "violation", ("total: expected 3, got 5",)
        sealed = self._sealed(shard_id, value, status, notes)
        sealed = replace(sealed, elapsed=sealed.elapsed / machine.speed)
        if meets("damaged"):
            flipped = bytes([sealed.payload[0] ^ 1]) + sealed.payload[1:]
            sealed = replace(sealed, payload=flipped)
        if meets("absurd_cost"):
            sealed = replace(sealed, elapsed=[float("nan"), float("inf"), -1.0, 1e300][shard_id % 4])
        return sealed

    def _sealed(
        self, shard_id: int, value: float, status: str = "ok", notes: tuple[str, ...] = ()
    ) -> SealedStatistic:
        payload = payload_of(value)
        return SealedStatistic(
            shard_id, status, 1, payload, digest(payload), b"", self._seconds(shard_id), notes
        )

    # -- what must always hold ---------------------------------------------------------

    def lane(self, domain: str) -> int:
        """Return the lane of a domain."""
        return self.domains[domain].place.lane

    def _decide(self, primary: Voice, audit: Voice, *further: Voice | None, **kwargs: Any) -> Decision:
        """Check placement on the voices that are really weighed."""
        heard = [v.domain for v in (primary, audit) if v.domain]
        if len(heard) == 2:
            assert self.lane(heard[0]) != self.lane(heard[1]), "an audit in its primary's lane"
        witness = further[0] if further else None
        if witness is not None and witness.domain:
            assert self.lane(witness.domain) not in map(self.lane, heard), "a witness that is not apart"
        for rerun, of in zip(further[1:], (primary, audit), strict=False):
            assert rerun is None or not rerun.domain or rerun.domain == of.domain
        return decide(primary, audit, *further, **kwargs)

    def _check_placement(self, order: Dispatch, cancelled: bool) -> None:
        lane = self.lane(order.domain)
        if order.role in ("audit", "witness", "heal"):
            assert order.apart_from and lane not in map(self.lane, order.apart_from)
        known = self.round._roster[order.domain]
        if not cancelled:
            assert known.live, f"{order} is sent to a domain that is gone"
            assert order.role == "rerun" or known.usable, f"{order} is sent to one that is not to be used"

    # -- what came of it ---------------------------------------------------------------

    @property
    def values(self) -> dict[int, float]:
        """The settled values."""
        return {k: value_of(one.record.payload) for k, one in self.round.settled.items()}

    @property
    def clean_values(self) -> dict[int, float]:
        """What a clean cluster gives, each shard in the environment of who computed it."""
        return {k: truth(k, one.fingerprint) for k, one in self.round.settled.items()}

    def accused(self) -> set[str]:
        """Return everybody who was accused anywhere."""
        named = {name for close in self.closed for name in close.decision.suspects}
        record = self.round.record
        return named | set(record.suspects) | set(record.quarantined) | set(self.quarantines)

    def outcomes(self) -> Counter[Outcome]:
        """Return how often each outcome was closed."""
        return Counter(close.decision.outcome for close in self.closed)
