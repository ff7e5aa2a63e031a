"""What a round is told, what it tells, and the records that both speak of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dask_sdc.evidence.seal import SealedBatch, SealedStatistic
from dask_sdc.exceptions import SDCError
from dask_sdc.policy.verdict import Decision, Voice

# -- what the driver tells the round ---------------------------------------------------


@dataclass(frozen=True)
class Landed:
    """A batch came back; the records of ``void`` shards were taken out through no fault of its domain."""

    batch_id: int
    result: SealedBatch
    now: float
    void: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Failed:
    """A batch will not come back, or what came is not a frame."""

    batch_id: int
    why: str
    now: float


@dataclass(frozen=True)
class DomainLost:
    """The last worker of a domain left."""

    domain: str
    why: str
    now: float


@dataclass(frozen=True)
class DomainJoined:
    """A worker of a domain is ready."""

    place: Place
    now: float


@dataclass(frozen=True)
class Quarantined:
    """The cluster answered a `Quarantine`; ``failure`` is empty if it is done."""

    domain: str
    failure: str
    now: float


@dataclass(frozen=True)
class Exposed:
    """The input that a domain read for a shard is not what the shard's was, as ``by`` and another show."""

    domain: str
    shard_id: int
    why: str
    by: Heard
    now: float


@dataclass(frozen=True)
class Tick:
    """Time passed."""

    now: float


Event = Landed | Failed | DomainLost | DomainJoined | Quarantined | Exposed | Tick

# -- what the round tells the driver ---------------------------------------------------


@dataclass(frozen=True)
class Dispatch:
    """Compute a batch on ``domain``, which is none of ``apart_from``."""

    batch_id: int
    role: str
    attempt: int
    shard_ids: tuple[int, ...]
    domain: str
    apart_from: tuple[str, ...]
    expected: float


@dataclass(frozen=True)
class Cancel:
    """Forget a batch."""

    batch_id: int


@dataclass(frozen=True)
class Evict:
    """Give a domain up: all of a silent one, or the one worker that lost its device."""

    domain: str
    why: str
    worker: str = ""


@dataclass(frozen=True)
class Quarantine:
    """Remove a domain and its data from the cluster, and keep it out."""

    domain: str
    why: str


@dataclass(frozen=True)
class Close:
    """A mismatch has been decided; write its receipt."""

    case: Case
    decision: Decision
    status: str


@dataclass(frozen=True)
class Abort:
    """The round cannot be completed."""

    error: SDCError


@dataclass(frozen=True)
class Done:
    """Every shard is settled and every case closed."""


Instruction = Dispatch | Cancel | Evict | Quarantine | Close | Abort | Done

# -- state -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A live domain: its lane, threads and environment."""

    domain: str
    lane: int
    slots: int
    fingerprint: str = ""


@dataclass(frozen=True)
class Settings:
    """What a round is told about how to run.

    Parameters
    ----------
    max_retries : int
        How often a shard or a domain may fail before it is given up.
    timeout : float
        Seconds without a sign of life after which a domain counts as silent, beyond what its
        work is expected to take.
    quarantine : bool
        Whether named suspects are removed from the cluster.
    batch_min, batch_max : float
        Bounds for the expected time of one batch, in seconds.
    batch_bytes, batch_shards : int
        Upper bounds for the expected size of the frame that a batch returns, in bytes, and for its shards.
    """

    max_retries: int = 3
    timeout: float = 300.0
    quarantine: bool = True
    batch_min: float = 0.03
    batch_max: float = 2.0
    batch_bytes: int = 1 << 26
    batch_shards: int = 1 << 14


@dataclass(frozen=True)
class Heard:
    """A record together with who computed it."""

    record: SealedStatistic
    domain: str
    worker: str
    fingerprint: str
    role: str
    attempt: int


@dataclass
class Case:
    """All voices on one audited shard.

    Attributes
    ----------
    voices : dict of str to Voice
        By part: primary, audit, witness, rerun_primary, rerun_audit.
    pending : dict of str to int
        Batches on their way, by part.
    asked : bool
        Whether its audit has been asked for, and so counted.
    attempts : Counter of str
        How often a part was lost.
    tried : set of str
        Domains that lost a part.
    drawn_for : str
        Domain on whose account the audit was drawn and not yet owed again; empty if on none's.
    """

    shard_id: int
    voices: dict[str, Voice] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)
    asked: bool = False
    attempts: Counter[str] = field(default_factory=Counter)
    tried: set[str] = field(default_factory=set)
    drawn_for: str = ""
    #: Set once a mismatch was seen: counted once, and it needs a receipt.
    mismatch: bool = False

    def domain(self, part: str) -> str | None:
        """Return the domain of a voice that was heard."""
        voice = self.voices.get(part)
        return voice.domain if voice is not None and voice.status != "missing" else None


@dataclass
class RoundRecord:
    """Instrumentation of one round.

    Attributes
    ----------
    round : int
        Number of the round within its auditor.
    shards, domains : int
        Shards to compute; domains that were live at the start.
    audited, agreed, mismatches : int
        Audits that were asked for, ended in agreement, ended in a mismatch.
    skipped : dict of str to int
        Audits that could not be done, by reason.
    evaluations : int
        Shard computations in all roles.
    reused, recomputed : int
        Results kept although their domain failed; shards computed again because their domain
        failed or became suspect.
    failed, barred, suspects, quarantined : list of str
        Domains.
    seconds : float
        Wall time.
    note : str
        Why the audit was weaker than asked for, if it was.
    """

    round: int
    shards: int
    domains: int
    audited: int = 0
    agreed: int = 0
    mismatches: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    evaluations: int = 0
    reused: int = 0
    recomputed: int = 0
    failed: list[str] = field(default_factory=list)
    barred: list[str] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    seconds: float = 0.0
    note: str = ""

    def skip(self, reason: str, count: int = 1) -> None:
        """Count audits that could not be done."""
        self.skipped[reason] = self.skipped.get(reason, 0) + count

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**self.__dict__, "skipped": dict(self.skipped)}
