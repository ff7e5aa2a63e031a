"""Folds of sealed statistics: digest, decode, combine in canonical order, and look at every step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dask_sdc.evidence.codec import DEFAULT_LIMITS, Limits, decode, digest, encode
from dask_sdc.evidence.display import bounded_repr
from dask_sdc.evidence.seal import SealedStatistic
from dask_sdc.exceptions import (
    CheckpointError,
    CorruptionError,
    DecodeError,
    InputError,
    InvariantError,
    NonFiniteError,
    SDCError,
    ShardError,
)
from dask_sdc.statistics.base import State, Statistic
from dask_sdc.statistics.fold import TreeFold


class SealedFold(TreeFold[Any]):
    """Incremental fold of sealed payloads that checks every step for NaN and Inf.

    Payloads may arrive in any order; the result depends on none of it, see `TreeFold`. Unless the statistic
    declares ``finite = False``, every float and complex of every payload, of every combined state (counts
    included) and of the result is checked, and the fold stops at the first one that is not finite.

    Parameters
    ----------
    statistic : Statistic
        Combines the states.
    n : int
        Number of shards, at least 1.
    limits : Limits, optional
        Bounds of the decoder.

    Raises
    ------
    InputError
        If ``n`` is not an int of at least 1.
    """

    def __init__(self, statistic: Statistic, n: int, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__(self._combine_guarded, n)
        self._statistic = statistic
        self._limits = limits
        self._shard = -1
        self.steps = 0

    def add_payload(self, shard_id: int, payload: bytes) -> None:
        """Decode a payload and fold it.

        Raises
        ------
        CorruptionError
            If the payload is not a canonical encoding.
        NonFiniteError
            If it, or a state combined with it, holds NaN or Inf; names shard, step and field.
        ShardError
            If the states cannot be combined.
        InputError
            If the shard is outside 0..n-1 or was added before.
        """
        self._shard = shard_id
        try:
            state = decode(payload, self._limits)
        except DecodeError as error:
            raise CorruptionError(
                f"shard {shard_id}: expected a canonical encoding, got {error}", shard_id=shard_id
            ) from None
        self._check(state, "its payload")
        # Inf and NaN are found by the guard, which says more than NumPy's warnings.
        with np.errstate(over="ignore", invalid="ignore"):
            self.add(shard_id, state)

    def add_record(self, record: SealedStatistic) -> None:
        """Fold a sealed statistic after checking its status and its digest.

        Raises
        ------
        CorruptionError
            If the payload changed after it was sealed.
        InvariantError, ShardError
            If the record is one of a violation or of an error.
        """
        where = f"shard {record.shard_id}"
        if record.status != "ok":
            kind = InvariantError if record.status == "violation" else ShardError
            raise kind(
                f"{where}: expected status ok, got {record.status}: {'; '.join(record.notes)}",
                shard_id=record.shard_id,
            )
        if not record.intact:
            raise CorruptionError(
                f"{where}: expected a payload of digest {record.digest.hex()} as sealed, "
                f"got {digest(record.payload).hex()}",
                shard_id=record.shard_id,
            )
        self.add_payload(record.shard_id, record.payload)

    def result(self) -> State:
        """Return the folded state, checked once more.

        Raises
        ------
        InputError
            If shards are missing.
        NonFiniteError
            If it holds NaN or Inf.
        """
        state = super().result()
        self._check(state, f"the result after step {self.steps}")
        return state

    def checkpoint(self) -> bytes:
        """Return bytes (a digest and canonical bytes) from which `restore` goes on with an equal result."""
        nodes = [(level, k, boxed[0]) for (level, k), boxed in sorted(self._nodes.items())]
        body = encode((self.n, self.steps, bytes(self._seen), nodes))
        return digest(body) + body

    @classmethod
    def restore(cls, statistic: Statistic, checkpoint: bytes, limits: Limits = DEFAULT_LIMITS) -> SealedFold:
        """Rebuild a fold from `checkpoint`.

        Raises
        ------
        CheckpointError
            If the bytes are not such a checkpoint, or changed since.
        """
        seal, body = checkpoint[:16], checkpoint[16:]
        if digest(body) != seal:
            raise CheckpointError(f"expected a fold of digest {seal.hex()}, got {digest(body).hex()}")
        try:
            n, steps, seen, nodes = decode(body, limits)
            fold = cls(statistic, n, limits)
            fold._nodes = {(level, k): (state,) for level, k, state in nodes}
            if type(steps) is not int or type(seen) is not bytes or len(seen) != n:
                raise ValueError("another number of shards")
        except (SDCError, TypeError, ValueError) as error:
            raise CheckpointError(f"expected a checkpoint of a fold, got {error}") from error
        fold.steps = steps
        fold._seen[:] = seen
        fold._left = seen.count(0)
        return fold

    def _combine_guarded(self, a: State, b: State) -> State:
        self.steps += 1
        try:
            state = self._statistic.combine(a, b)
        except SDCError:
            raise
        except Exception as error:
            raise ShardError(
                f"shard {self._shard}, step {self.steps}: expected states that combine, "
                f"got {type(error).__name__}: {error}",
                shard_id=self._shard,
            ) from error
        self._check(state, f"the state after step {self.steps}")
        return state

    def _check(self, state: State, what: str) -> None:
        if not self._statistic.finite:
            return
        path = first_nonfinite(state)
        if path is not None:
            raise NonFiniteError(
                f"shard {self._shard}: expected finite values, "
                f"got NaN or Inf in {what}{path and f' at {path}'}",
                shard_id=self._shard,
            )


def first_nonfinite(state: State) -> str | None:
    """Return the path of the first leaf with NaN or Inf, such as ``['mean']``; None if there is none."""
    kind = type(state)
    if kind is np.ndarray:
        if state.dtype.kind in "fc" and b"\0" in np.isfinite(state).tobytes():
            return ""
    elif kind is dict:
        return _first_of(state.items())
    elif kind is list or kind is tuple:
        return _first_of(enumerate(state))
    elif isinstance(state, (float, np.floating)):
        return None if math.isfinite(state) else ""
    elif isinstance(state, (complex, np.complexfloating)):
        return None if math.isfinite(state.real) and math.isfinite(state.imag) else ""
    return None


def _first_of(items: Iterable[tuple[Any, State]]) -> str | None:
    for key, item in items:
        path = first_nonfinite(item)
        if path is not None:
            return f"[{bounded_repr(key, 60)}]{path}"
    return None


def finite_guarded_fold(
    statistic: Statistic, payloads: Mapping[int, bytes] | Sequence[bytes], *, limits: Limits = DEFAULT_LIMITS
) -> State:
    """Fold payloads in canonical shard order and check finiteness at every step.

    Parameters
    ----------
    statistic : Statistic
        Combines the states.
    payloads : mapping of int to bytes, or sequence of bytes
        Canonical encodings by shard, 0..n-1 without a gap.
    limits : Limits, optional
        Bounds of the decoder.

    Returns
    -------
    State
        Bit-identical for the same payloads, in whatever order they were computed.

    Raises
    ------
    NonFiniteError
        At the first payload or step that shows NaN or Inf; nothing after it is folded.
    CorruptionError
        If a payload cannot be decoded.
    InputError
        If there is no payload, or one is missing.
    """
    ordered = _in_order(payloads)
    fold = SealedFold(statistic, len(ordered), limits)
    for shard_id, payload in ordered:
        fold.add_payload(shard_id, payload)
    return fold.result()


def checkpointed_fold(
    statistic: Statistic,
    payloads: Mapping[int, bytes] | Sequence[bytes],
    *,
    checkpoint_after: int,
    limits: Limits = DEFAULT_LIMITS,
) -> State:
    """Fold as `finite_guarded_fold` does, but go through bytes midway; the result is equal bit for bit.

    Parameters
    ----------
    statistic, payloads
        See `finite_guarded_fold`.
    checkpoint_after : int
        Number of payloads, 0..n, after which the fold is written to bytes, dropped and rebuilt.
    limits : Limits, optional
        Bounds of the decoder.

    Raises
    ------
    InputError
        If ``checkpoint_after`` is outside 0..n.
    """
    ordered = _in_order(payloads)
    if isinstance(checkpoint_after, bool) or not 0 <= checkpoint_after <= len(ordered):
        raise InputError(f"expected checkpoint_after in 0..{len(ordered)}, got {checkpoint_after!r}")
    fold = SealedFold(statistic, len(ordered), limits)
    for position, (shard_id, payload) in enumerate(ordered):
        if position == checkpoint_after:
            fold = SealedFold.restore(statistic, fold.checkpoint(), limits)
        fold.add_payload(shard_id, payload)
    if checkpoint_after == len(ordered):
        fold = SealedFold.restore(statistic, fold.checkpoint(), limits)
    return fold.result()


def fold_sealed(
    statistic: Statistic,
    records: Iterable[SealedStatistic],
    *,
    shards: int | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> State:
    """Fold sealed statistics in canonical shard order, each checked against its digest before use.

    Parameters
    ----------
    statistic : Statistic
        Combines the states.
    records : iterable of SealedStatistic
        One per shard, in any order.
    shards : int, optional
        Number of shards that there have to be; by default as many as there are records.
    limits : Limits, optional
        Bounds of the decoder.

    Returns
    -------
    State

    Raises
    ------
    CorruptionError
        If a payload changed after it was sealed or cannot be decoded; names the shard.
    NonFiniteError, InvariantError, ShardError
        See `SealedFold`.
    InputError
        If a shard is missing, given twice or unknown.
    """
    ordered = sorted(records, key=lambda record: record.shard_id)
    fold = SealedFold(statistic, len(ordered) if shards is None else shards, limits)
    for record in ordered:
        fold.add_record(record)
    return fold.result()


def _in_order(payloads: Mapping[int, bytes] | Sequence[bytes]) -> list[tuple[int, bytes]]:
    if isinstance(payloads, Mapping):
        return sorted(payloads.items())
    return list(enumerate(payloads))
