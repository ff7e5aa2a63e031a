"""Which fault hits what, decided without a cluster.

A `Fault` says what happens, at which step of a shard's computation, and to whom; a `FaultPlan`
is a validated list of them. Matching is pure: it depends on the context alone, so that a
persistent fault repeats itself exactly on the same failure domain. How often a fault was
delivered is kept apart, in a `Tally`.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import xxhash

from dask_sdc.evidence.codec import decode, encode
from dask_sdc.evidence.seal import ROLES
from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.faults.flips import (
    flip_bits,
    flip_state_bit,
    flip_state_bits,
    inject_bit_flip,
    poison_state,
    scale_state_value,
    stick_bits,
    stick_state_bit,
)
from dask_sdc.statistics.base import State

#: Faults that flip or force bits; legal at every step.
BIT_KINDS = frozenset({"one_bit", "multi_bit", "stuck_at"})
#: Faults that change a number; legal where there are numbers.
VALUE_KINDS = frozenset({"value", "nan"})
#: Faults of the process and not of a value; they happen on entering a step.
ACTION_KINDS = frozenset({"delayed", "killed", "frozen"})
KINDS = BIT_KINDS | VALUE_KINDS | ACTION_KINDS | {"dropped"}
#: Steps: the blob of the statistic as received, the samples as loaded, the state before it is
#: sealed, the payload after that, the bytes that go back.
STEPS = frozenset({"model", "input", "compute", "sealed", "frame"})
#: Steps that belong to one shard and hold numbers.
_SHARD_STEPS = frozenset({"input", "compute", "sealed"})

#: A multi-bit fault flips this many bits: more than the two that common ECC detects.
MULTI_BITS = 3

_Names: TypeAlias = str | Collection[str] | None
_Numbers: TypeAlias = int | Collection[int] | None


@dataclass(frozen=True)
class FaultContext:
    """One step of one task, as a fault sees it.

    Parameters
    ----------
    where : {"model", "input", "compute", "sealed", "frame"}
        The step.
    domain : str
        Failure domain of the worker.
    worker, name : str
        Address and name of the worker.
    role : {"primary", "audit", "witness", "rerun", "heal"}
        Role of the task.
    round, attempt : int
        Round and attempt of the task.
    shards : tuple of int
        The shard at steps "input", "compute" and "sealed"; all those of the batch at "model"
        and "frame".
    """

    where: str
    domain: str
    worker: str
    name: str
    role: str
    round: int
    attempt: int
    shards: tuple[int, ...]


@dataclass(frozen=True)
class Fault:
    """What happens, where, to whom and how often.

    A selector is one value, a collection of values, or None for any. What is left open (which
    leaf, which bit) is drawn from the seed, the failure domain and the shard: the same on every
    repetition there, something else on any other domain.

    Parameters
    ----------
    kind : str
        ``one_bit``, ``multi_bit``, ``stuck_at`` (a bit line forced to ``level``), ``value`` (a
        number times ``factor``), ``nan``, ``dropped`` (the shard's record is left out),
        ``delayed``, ``killed`` (SIGKILL) or ``frozen`` (SIGSTOP).
    where : {"compute", "sealed", "model", "input", "frame"}
        The state before it is sealed; the payload after that, its digest left as it was; the
        blob of the statistic as the worker received it; the samples as the worker loaded them;
        the bytes that go back. ``value`` and ``nan`` need "input", "compute" or "sealed";
        ``dropped`` needs "frame". ``delayed``, ``killed`` and ``frozen`` happen on entering the
        step: at "compute" the shard has been started and not yet accumulated.
    domain, worker, role : str or collection of str, optional
        Failure domains; workers, by address or name; roles.
    shard, round, attempt : int or collection of int, optional
        Shards, rounds and attempts. A fault of a whole batch matches if any of its shards does.
    times : int, optional
        How often at most on the whole cluster: 1 is a transient fault, None (the default) a
        persistent one.
    probability : float
        In (0, 1]: how often a match has the fault, drawn anew for each shard, role, round and
        attempt (an intermittent fault).
    bit : int, optional
        The bit, modulo their number; drawn if left open.
    level : {0, 1}
        What a ``stuck_at`` bit reads as.
    factor : float
        What a ``value`` is multiplied by; -1 turns its sign.
    delay : float
        How long a ``delayed`` step blocks its thread, in seconds.
    seed : int
        Draws what is left open.

    Raises
    ------
    InputError
        If a field is out of its range, or the kind cannot happen at that step.
    """

    kind: str
    where: str = "compute"
    domain: _Names = None
    worker: _Names = None
    shard: _Numbers = None
    role: _Names = None
    round: _Numbers = None
    attempt: _Numbers = None
    times: int | None = None
    probability: float = 1.0
    bit: int | None = None
    level: int = 1
    factor: float = 1.5
    delay: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, KINDS)
        _one_of("where", self.where, STEPS)
        self._check_step()
        for name in ("domain", "worker", "role"):
            object.__setattr__(self, name, _selector(name, getattr(self, name), str))
        for name in ("shard", "round", "attempt"):
            object.__setattr__(self, name, _selector(name, getattr(self, name), int))
        for role in self.role or ():
            _one_of("role", role, ROLES)
        self._check_numbers()

    def _check_step(self) -> None:
        allowed = STEPS
        if self.kind in VALUE_KINDS:
            allowed = _SHARD_STEPS
        elif self.kind == "dropped":
            allowed = frozenset({"frame"})
        if self.where not in allowed:
            raise InputError(
                f"expected a fault of kind {self.kind!r} at one of the steps {sorted(allowed)}, "
                f"got {self.where!r}"
            )

    def _check_numbers(self) -> None:
        for name, least in (("times", 1), ("bit", 0), ("level", 0), ("seed", 0)):
            if name in ("level", "seed") or getattr(self, name) is not None:
                object.__setattr__(self, name, _whole(name, getattr(self, name), least))
        for name in ("probability", "factor", "delay"):
            object.__setattr__(self, name, _real(name, getattr(self, name)))
        _one_of("level", self.level, frozenset({0, 1}))
        if not 0 < self.probability <= 1:
            raise InputError(f"expected a probability in (0, 1], got {self.probability!r}")
        if self.factor == 1:
            raise InputError("expected a factor other than 1, which changes nothing, got 1")
        if self.delay <= 0:
            raise InputError(f"expected a delay of more than 0 seconds, got {self.delay!r}")

    def matches(self, context: FaultContext) -> bool:
        """Say whether the fault is meant for this step of this task."""
        return (
            self.where == context.where
            and _selects(self.domain, context.domain)
            and _selects(self.worker, context.worker, context.name)
            and _selects(self.role, context.role)
            and _selects(self.round, context.round)
            and _selects(self.attempt, context.attempt)
            and _selects(self.shard, *context.shards)
            and self._strikes(context)
        )

    def _strikes(self, context: FaultContext) -> bool:
        if self.probability == 1:
            return True
        occasion = (context.role, context.round, context.attempt, context.shards)
        draw = np.random.default_rng([*self.key(context), _number(repr(occasion))]).random()
        return bool(draw < self.probability)

    def key(self, context: FaultContext) -> tuple[int, ...]:
        """Return what seeds the choices left open.

        The domain is part of it, because two broken machines do not go wrong alike; the round,
        role and attempt are not, because one broken machine does.
        """
        shard = context.shards if context.where in _SHARD_STEPS else ()
        return (self.seed, _number(self.kind), _number(context.domain), *shard)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible fields; selectors are sorted lists or None."""
        return {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Fault:
        """Rebuild a fault from `to_dict`.

        Raises
        ------
        InputError
            If a field is unknown, missing or out of its range.
        """
        known = {field.name for field in fields(cls)}
        if not isinstance(record, Mapping) or not {"kind"} <= record.keys() <= known:
            raise InputError(f"expected a fault with fields among {sorted(known)}, got {record!r}")
        return cls(**record)


@dataclass(frozen=True)
class FaultPlan:
    """The faults of one test.

    Parameters
    ----------
    faults : sequence of Fault
        In the order in which they are delivered where several match.
    """

    faults: tuple[Fault, ...]

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        if not isinstance(faults, Sequence) or not all(isinstance(fault, Fault) for fault in faults):
            raise InputTypeError(f"expected a sequence of Fault, got {faults!r}")
        object.__setattr__(self, "faults", tuple(faults))

    def match(self, context: FaultContext) -> list[Fault]:
        """Return the faults that are meant for a step, without regard to ``times``."""
        return [self.faults[index] for index in self.indices(context)]

    def indices(self, context: FaultContext) -> list[int]:
        """Return the positions in the plan of the faults that `match` returns."""
        return [i for i, fault in enumerate(self.faults) if fault.matches(context)]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible fields."""
        return {"faults": [fault.to_dict() for fault in self.faults]}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> FaultPlan:
        """Rebuild a plan from `to_dict`.

        Raises
        ------
        InputError
            If it is not the record of a plan.
        """
        if not isinstance(record, Mapping) or record.keys() != {"faults"}:
            raise InputError(f"expected a plan with the one field 'faults', got {record!r}")
        if not isinstance(record["faults"], list):
            raise InputError(f"expected a list of faults, got {record['faults']!r}")
        return cls([Fault.from_dict(fault) for fault in record["faults"]])


@dataclass(frozen=True)
class Delivery:
    """One fault that was delivered: its position in the plan, its kind, and to what."""

    index: int
    kind: str
    context: FaultContext


class Tally:
    """Counts the deliveries of one plan; safe to use from several threads.

    Attributes
    ----------
    deliveries : list of Delivery
        In the order in which they were claimed.
    """

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self._counts: Counter[int] = Counter()
        self._lock = threading.Lock()

    def claim(self, delivery: Delivery, times: int | None) -> bool:
        """Record a delivery and return True, unless it would be one more than ``times``."""
        with self._lock:
            if times is not None and self._counts[delivery.index] >= times:
                return False
            self._counts[delivery.index] += 1
            self.deliveries.append(delivery)
            return True


def corrupt_state(fault: Fault, state: State, context: FaultContext) -> State:
    """Return the state as the fault leaves it.

    Parameters
    ----------
    fault : Fault
        Of a kind that changes bits or values.
    state : State
        The closed set of types.
    context : FaultContext
        Seeds what the fault leaves open.

    Raises
    ------
    InputError
        If the fault cannot change this state: a NaN among integers, a bit that sticks at what
        it is.
    """
    key = fault.key(context)
    if fault.kind == "value":
        return scale_state_value(state, fault.factor, key)
    if fault.kind == "nan":
        return poison_state(state, key)
    if fault.kind == "multi_bit":
        return flip_state_bits(state, MULTI_BITS, key, fault.bit)
    bit = _drawn_bit(key) if fault.bit is None else fault.bit
    if fault.kind == "stuck_at":
        return stick_state_bit(state, bit, fault.level, key)
    return flip_state_bit(state, bit)


def corrupt_bytes(fault: Fault, payload: bytes, context: FaultContext) -> bytes:
    """Return the bytes as the fault leaves them.

    Parameters
    ----------
    fault : Fault
        Of a kind that changes bits, or values inside of a sealed payload.
    payload : bytes
        A canonical encoding if the fault changes a value.
    context : FaultContext
        Seeds what the fault leaves open.

    Raises
    ------
    InputError
        If the fault cannot change these bytes.
    """
    if fault.kind in VALUE_KINDS:
        return encode(corrupt_state(fault, decode(payload), context))
    key = fault.key(context)
    if fault.kind == "multi_bit":
        return flip_bits(payload, MULTI_BITS, key, fault.bit)
    bit = _drawn_bit(key) if fault.bit is None else fault.bit
    if fault.kind == "stuck_at":
        return stick_bits(payload, bit, fault.level)
    return inject_bit_flip(payload, bit)


# -- checks --------------------------------------------------------------------------------


def _drawn_bit(key: tuple[int, ...]) -> int:
    # Far above any length, so that the modulo leaves no offset out.
    return int(np.random.default_rng(key).integers(1 << 62))


def _number(text: str) -> int:
    return int(xxhash.xxh3_64_intdigest(text.encode()))


def _selects(selector: Any, *values: Any) -> bool:
    return selector is None or any(value in selector for value in values)


def _selector(name: str, value: Any, kind: type) -> frozenset[Any] | None:
    if value is None:
        return None
    single = isinstance(value, str | int) or not isinstance(value, Collection)
    check = _whole if kind is int else _text
    members = frozenset(check(name, member) for member in ([value] if single else value))
    if not members:
        raise InputError(f"expected None or at least one {name}, got an empty collection")
    return members


def _one_of(name: str, value: Any, allowed: frozenset[Any]) -> None:
    if not isinstance(value, str | int) or value not in allowed:
        raise InputError(f"expected {name} to be one of {sorted(allowed)}, got {value!r}")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InputTypeError(f"expected a str for {name!r}, got {value!r}")
    return value


def _whole(name: str, value: Any, least: int = 0) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise InputTypeError(f"expected an integer for {name!r}, got {value!r}")
    if value < least:
        raise InputError(f"expected {name!r} to be at least {least}, got {value!r}")
    return int(value)


def _real(name: str, value: Any) -> float:
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        raise InputTypeError(f"expected a number for {name!r}, got {value!r}")
    if not math.isfinite(value):
        raise InputError(f"expected a finite number for {name!r}, got {value!r}")
    return float(value)
