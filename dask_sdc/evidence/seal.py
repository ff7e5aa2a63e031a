"""Sealed statistics: canonical bytes, their digest, and who computed them where.

A worker returns one *frame* for a batch of shards::

    magic (4 bytes) | length of head (8) | xxh3_128 of head (16) | head | payload 0 | payload 1 | ...

The head is the canonical encoding of every field but the payloads, in columns, together with each
payload's length and digest. A flipped bit in the head is seen by the head's digest and spoils the
frame; one in a payload is seen by that payload's digest and spoils that shard alone.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dask_sdc.evidence.codec import DEFAULT_LIMITS, Limits, decode, digest, encode
from dask_sdc.exceptions import DecodeError, InputError, LimitExceeded

RECORD_STATUSES = frozenset({"ok", "violation", "error"})
BATCH_STATUSES = frozenset({"ok", "garbled", "misplaced"})
ROLES = frozenset({"primary", "audit", "witness", "rerun", "heal"})

_MAGIC = b"SDC\x01"
_PREFIX = struct.Struct(">4sQ16s")
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class SealedStatistic:
    """The sealed statistic of one shard.

    Parameters
    ----------
    shard_id : int
        The shard.
    status : {"ok", "violation", "error"}
        Whether the statistic was computed and its free checks hold.
    rows : int
        Number of samples of the shard.
    payload : bytes
        Canonical encoding of the state; empty after an error.
    digest : bytes
        xxh3_128 of the payload at the moment of sealing, 16 bytes.
    input_digest : bytes
        Digest of the input block, or empty where it is not hashed.
    elapsed : float
        Time that the kernel took, in seconds.
    notes : tuple of str
        Broken invariants, or the text of the error.
    """

    shard_id: int
    status: str
    rows: int
    payload: bytes
    digest: bytes
    input_digest: bytes = b""
    elapsed: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def intact(self) -> bool:
        """Whether the payload still has the digest that it was sealed with; computed anew each time."""
        return digest(self.payload) == self.digest

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible fields: digests in hex, the payload in base64."""
        return {
            "shard_id": self.shard_id,
            "status": self.status,
            "rows": self.rows,
            "payload": base64.b64encode(self.payload).decode("ascii"),
            "digest": self.digest.hex(),
            "input_digest": self.input_digest.hex(),
            "elapsed": self.elapsed,
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> SealedStatistic:
        """Rebuild a record from `to_dict`."""
        return cls(
            **{
                **fields,
                "payload": base64.b64decode(fields["payload"], validate=True),
                "digest": bytes.fromhex(fields["digest"]),
                "input_digest": bytes.fromhex(fields["input_digest"]),
                "notes": tuple(fields["notes"]),
            }
        )


@dataclass(frozen=True, slots=True)
class SealedBatch:
    """What one batch task returns: where it ran, and a record for every shard.

    Parameters
    ----------
    round : int
        Round of the accumulation.
    role : {"primary", "audit", "witness", "rerun", "heal"}
        Why the shards were computed.
    attempt : int
        0 for the first try.
    domain, worker : str
        Failure domain and worker address on which the batch really ran.
    fingerprint : str
        Digest of the environment, see `dask_sdc.evidence.fingerprint`.
    model_digest : bytes
        Digest of the statistic (with its model) as it was received.
    status : {"ok", "garbled", "misplaced"}
        "garbled" if an argument did not have its digest, "misplaced" if the batch ran elsewhere
        than it had to; there are no records then.
    records : tuple of SealedStatistic
        One per shard.
    """

    round: int
    role: str
    attempt: int
    domain: str
    worker: str
    fingerprint: str
    model_digest: bytes
    status: str = "ok"
    records: tuple[SealedStatistic, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InputError(f"expected a role among {sorted(ROLES)}, got {self.role!r}")
        if self.status not in BATCH_STATUSES:
            raise InputError(f"expected a batch status among {sorted(BATCH_STATUSES)}, got {self.status!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible fields."""
        fields = {name: getattr(self, name) for name in _BATCH_FIELDS}
        fields["model_digest"] = self.model_digest.hex()
        fields["records"] = [record.to_dict() for record in self.records]
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> SealedBatch:
        """Rebuild a batch from `to_dict`."""
        return cls(
            **{
                **fields,
                "model_digest": bytes.fromhex(fields["model_digest"]),
                "records": tuple(SealedStatistic.from_dict(record) for record in fields["records"]),
            }
        )


_BATCH_FIELDS = ("round", "role", "attempt", "domain", "worker", "fingerprint", "model_digest", "status")
_BATCH_TYPES = (int, str, int, str, str, str, bytes, str)


def seal_statistic(
    shard_id: int,
    state: Any,
    *,
    rows: int,
    status: str = "ok",
    input_digest: bytes = b"",
    elapsed: float = 0.0,
    notes: Sequence[str] = (),
) -> SealedStatistic:
    """Seal the state of one shard.

    Parameters
    ----------
    shard_id : int
        The shard.
    state : State
        Its state; encoded at once, so that later changes to it are not sealed.
    rows, status, input_digest, elapsed, notes
        See `SealedStatistic`.

    Raises
    ------
    EncodeError
        If the state holds a value outside the closed set of types.
    """
    payload = encode(state)
    return SealedStatistic(
        shard_id, status, rows, payload, digest(payload), input_digest, elapsed, tuple(notes)
    )


def failed_statistic(shard_id: int, notes: Sequence[str], *, elapsed: float = 0.0) -> SealedStatistic:
    """Return the record of a shard that could not be computed, with an empty payload.

    Parameters
    ----------
    shard_id : int
        The shard.
    notes : sequence of str
        What went wrong, such as the type of the error and its text.
    elapsed : float, optional
        Time until the error, in seconds.
    """
    return SealedStatistic(shard_id, "error", 0, b"", digest(b""), b"", elapsed, tuple(notes))


def seal_batch(batch: SealedBatch) -> bytes:
    """Return the frame of a batch; see the module for its layout.

    Raises
    ------
    InputError
        If a record has an unknown status or a digest that is not 16 bytes long.
    """
    records = batch.records
    for record in records:
        if record.status not in RECORD_STATUSES or len(record.digest) != _DIGEST_BYTES:
            raise InputError(
                f"shard {record.shard_id}: expected a status among {sorted(RECORD_STATUSES)} and a digest of "
                f"{_DIGEST_BYTES} bytes, got {record.status!r} and {len(record.digest)} bytes"
            )
    head = encode(
        (
            tuple(getattr(batch, name) for name in _BATCH_FIELDS),
            np.array([record.shard_id for record in records], np.int64),
            [record.status for record in records],
            np.array([record.rows for record in records], np.int64),
            np.array([len(record.payload) for record in records], np.int64),
            b"".join([record.digest for record in records]),
            [record.input_digest for record in records],
            np.array([record.elapsed for record in records], np.float64),
            {index: record.notes for index, record in enumerate(records) if record.notes},
        )
    )
    prefix = _PREFIX.pack(_MAGIC, len(head), digest(head))
    return b"".join([prefix, head, *[record.payload for record in records]])


def open_batch(frame: bytes, limits: Limits = DEFAULT_LIMITS) -> SealedBatch:
    """Open a frame; whether each record is `intact` is for the caller to ask.

    Parameters
    ----------
    frame : bytes
        What `seal_batch` returned, possibly damaged since.
    limits : Limits, optional
        Bounds for the frame and its head.

    Raises
    ------
    DecodeError
        If the frame's head or its length is damaged, so that no shard of it can be used.
    """
    frame = bytes(frame)
    if len(frame) > limits.max_bytes:
        raise LimitExceeded(f"expected a frame of at most {limits.max_bytes} bytes, got {len(frame)}")
    head, start = _open_head(frame)
    value = decode(head, limits)
    try:
        return _rebuild(value, frame, start)
    except (TypeError, ValueError, KeyError) as error:
        if isinstance(error, DecodeError):
            raise
        raise DecodeError(f"expected the columns of a sealed batch, got {error}") from None


def _open_head(frame: bytes) -> tuple[bytes, int]:
    if len(frame) < _PREFIX.size:
        raise DecodeError(f"expected a frame of at least {_PREFIX.size} bytes, got {len(frame)}")
    magic, size, seal = _PREFIX.unpack_from(frame)
    if magic != _MAGIC:
        raise DecodeError(f"expected a frame that begins with {_MAGIC!r}, got {magic!r}")
    start = _PREFIX.size + size
    head = frame[_PREFIX.size : start]
    if digest(head) != seal:
        raise DecodeError(f"damaged frame: expected a head of digest {seal.hex()}, got {digest(head).hex()}")
    return head, start


def _rebuild(value: Any, frame: bytes, start: int) -> SealedBatch:
    header, shards, statuses, rows, sizes, digests, inputs, elapsed, notes = value
    _check_columns(header, shards, statuses, rows, sizes, digests, inputs, elapsed)
    if not isinstance(notes, dict) or not all(map(_is_notes, notes.values())):
        raise DecodeError("expected notes as tuples of str, got others")
    if start + int(sizes.sum()) != len(frame):
        raise DecodeError(f"expected a frame of {start + int(sizes.sum())} bytes, got {len(frame)}")
    ends = (np.cumsum(sizes) + start).tolist()
    begins = [start, *ends]
    columns = zip(
        shards.tolist(), statuses, rows.tolist(), begins, ends, inputs, elapsed.tolist(), strict=False
    )
    records = [
        SealedStatistic(
            shard,
            status,
            count,
            frame[begin:end],
            digests[_DIGEST_BYTES * index : _DIGEST_BYTES * (index + 1)],
            input_digest,
            seconds,
            notes.get(index, ()),
        )
        for index, (shard, status, count, begin, end, input_digest, seconds) in enumerate(columns)
    ]
    return SealedBatch(**dict(zip(_BATCH_FIELDS, header, strict=True)), records=tuple(records))


def _check_columns(
    header: Any, shards: Any, statuses: Any, rows: Any, sizes: Any, digests: Any, inputs: Any, elapsed: Any
) -> None:
    """Refuse a head that carries its own digest but was not written by `seal_batch`."""
    if not isinstance(header, tuple) or tuple(map(type, header)) != _BATCH_TYPES:
        raise DecodeError(f"expected a batch header of {len(_BATCH_TYPES)} typed fields, got another")
    n = len(shards)
    numeric = all(
        isinstance(column, np.ndarray) and column.dtype == dtype and column.shape == (n,)
        for column, dtype in ((shards, "i8"), (rows, "i8"), (sizes, "i8"), (elapsed, "f8"))
    )
    if not numeric or len(statuses) != n or len(inputs) != n or len(digests) != _DIGEST_BYTES * n:
        raise DecodeError(f"expected columns of {n} shards, got others")
    if not RECORD_STATUSES.issuperset(statuses) or not all(type(item) is bytes for item in inputs):
        raise DecodeError("expected record statuses and input digests, got other values")
    if n and not 0 <= int(sizes.min()) <= int(sizes.max()) < 1 << 48:
        raise DecodeError(f"expected payload sizes >= 0, got {int(sizes.min())} to {int(sizes.max())}")


def _is_notes(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(note, str) for note in value)
