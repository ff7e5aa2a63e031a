"""Errors and warnings of dask_sdc.

::

    SDCError
    ├── InputError (ValueError)             refused before any work starts
    │   ├── InputTypeError (TypeError)
    │   ├── ClosedError                     a closed auditor, client or group of ranks
    │   ├── ContextOverflow                 prompt and new tokens beyond the context or the memory
    │   └── LeftoverKeys (RuntimeError)     a batch with internal keys that nobody took out
    ├── CodecError (ValueError)
    │   ├── EncodeError (TypeError)         a value outside the closed set of types
    │   └── DecodeError                     bytes that are not a canonical encoding
    │       └── LimitExceeded               ... or that claim to be larger than allowed
    ├── ShardError                          names shard, domain and worker
    │   ├── NonFiniteError (ArithmeticError)
    │   ├── InvariantError
    │   └── CorruptionError                 a damaged value that could not be healed
    ├── ClusterError (RuntimeError)
    │   ├── NoDomainError                   nobody is left to run a shard
    │   └── DeadlineExceeded (TimeoutError)
    ├── StageError                          names stage and session
    │   ├── StaleEpoch                      a late message of a stage that was given up
    │   └── GenerationInterrupted           carries committed tokens and a checkpoint
    │       ├── NoSpareError                nobody is left to take the place of a lost stage
    │       ├── ReplayMismatch              a replay did not reproduce what is on record
    │       └── StageTimeout (TimeoutError)
    ├── InvalidSample (ValueError)          a sample that is not what was declared
    ├── MissingSamples (LookupError)        a dataset that is not whole
    ├── GenerationFailed (RuntimeError)     raised on every rank when one of them cannot go on
    │   ├── RankLost                        a rank died, ended, or did not come in time
    │   └── StaleRound                      a rank that comes late, or twice
    ├── DeviceError (RuntimeError)          no CUDA device that CuPy can use
    │   ├── DeviceLost                      the context of a process on its device is dead
    │   └── DeviceMemoryError (MemoryError)  no memory left on a device
    ├── LedgerError                         the chain is broken, or somebody else writes
    └── CheckpointError                     a checkpoint that does not belong to this fit or generation

    SDCWarning (UserWarning)
    ├── AuditWarning                        the audit is weaker than asked for
    └── RechunkWarning                      the sample axis had to be rechunked
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class SDCError(Exception):
    """Base class; keeps its keyword fields through pickle."""

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.__dict__.update(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[SDCError], args: tuple[Any, ...], fields: dict[str, Any]) -> SDCError:
    # Not through __init__, which may not take what was set later, such as __notes__.
    error = cls(*args)
    error.__dict__.update(fields)
    return error


class InputError(SDCError, ValueError):
    """Bad input, refused before any work starts."""


class InputTypeError(InputError, TypeError):
    """Input of a type that is not supported."""


class ClosedError(InputError):
    """The auditor, the client or the group of ranks was closed."""


class ContextOverflow(InputError):
    """A prompt and its new tokens exceed the context or the memory for it; refused at admission."""


class LeftoverKeys(InputError, RuntimeError):
    """A batch has internal keys that somebody should have taken out."""


class CodecError(SDCError, ValueError):
    """Canonical encoding or decoding failed."""


class EncodeError(CodecError, TypeError):
    """A value has no canonical encoding; the message names its path and type."""


class DecodeError(CodecError):
    """Bytes are not a canonical encoding; nothing was executed or imported."""


class LimitExceeded(DecodeError):
    """Bytes claim a size, depth or item count above the decoder's limits."""


class ShardError(SDCError):
    """A shard could not be computed.

    Parameters
    ----------
    message : str
        What was expected and what came.
    shard_id : int, optional
        The shard; -1 where it is not known.
    domain, worker : str, optional
        Failure domain and worker address on which it happened.
    """

    shard_id: int
    domain: str
    worker: str

    def __init__(self, message: str = "", *, shard_id: int = -1, domain: str = "", worker: str = "") -> None:
        super().__init__(message, shard_id=shard_id, domain=domain, worker=worker)


class NonFiniteError(ShardError, ArithmeticError):
    """NaN or Inf where the statistic does not allow it."""


class InvariantError(ShardError):
    """A declared invariant of a statistic fails on several domains alike."""


class CorruptionError(ShardError):
    """A value is known to be damaged and could not be recomputed."""


class ClusterError(SDCError, RuntimeError):
    """The cluster cannot run the work."""


class NoDomainError(ClusterError):
    """No live failure domain is left to run a shard."""


class DeadlineExceeded(ClusterError, TimeoutError):
    """A phase did not end before its deadline."""


class StageError(SDCError):
    """A stage of a pipeline failed.

    Parameters
    ----------
    message : str
        What was expected and what came.
    stage : int, optional
        The stage that is at fault; -1 where it is not known.
    session : str, optional
        The session in which it happened.
    **fields
        Further facts, kept as attributes.
    """

    stage: int
    session: str

    def __init__(self, message: str = "", *, stage: int = -1, session: str = "", **fields: Any) -> None:
        super().__init__(message, stage=stage, session=session, **fields)


class StaleEpoch(StageError):
    """A message belongs to an epoch that was given up."""


class GenerationInterrupted(StageError):
    """A generation ended early; it can be resumed from what this error carries.

    Parameters
    ----------
    message : str
        What was expected and what came.
    committed : sequence of int, optional
        Tokens that were handed out; for a model that makes arrays, those that were not handed out yet.
    checkpoint : dask_sdc.inference.Checkpoint, optional
        What a later call resumes from; may hold fewer tokens than were handed out, where the
        last ones could not be proved.
    **fields
        As `StageError`.
    """

    committed: tuple[Any, ...]
    checkpoint: Any

    def __init__(
        self, message: str = "", *, committed: Iterable[Any] = (), checkpoint: Any = None, **fields: Any
    ) -> None:
        super().__init__(message, committed=tuple(committed), checkpoint=checkpoint, **fields)


class NoSpareError(GenerationInterrupted):
    """No spare is left to take the place of a lost stage."""


class ReplayMismatch(GenerationInterrupted):
    """A replay did not reproduce what was recorded.

    Parameters
    ----------
    message : str
        What was expected and what came.
    position : int, optional
        First position that is not proved.
    what : str, optional
        What differs: "weights", "chunk", "digest", "sketch" or "token".
    **fields
        As `GenerationInterrupted`; ``stage`` is the stage that was replayed.
    """

    position: int
    what: str

    def __init__(self, message: str = "", *, position: int = -1, what: str = "", **fields: Any) -> None:
        super().__init__(message, position=position, what=what, **fields)


class StageTimeout(GenerationInterrupted, TimeoutError):
    """The stages did not answer before their deadline."""


class InvalidSample(SDCError, ValueError):
    """A sample is not what was declared; the message names the array."""


class MissingSamples(SDCError, LookupError):
    """Samples of a dataset are not there; the message names the first of them."""


class GenerationFailed(SDCError, RuntimeError):
    """Every rank stops generating, since one of them cannot go on.

    Parameters
    ----------
    message : str
        What was expected and what came.
    local_error : str, optional
        Why this rank cannot go on; empty on the others.
    **fields
        Further facts, kept as attributes.
    """

    local_error: str

    def __init__(self, message: str = "", *, local_error: str = "", **fields: Any) -> None:
        super().__init__(message, local_error=local_error, **fields)


class RankLost(GenerationFailed):
    """A rank died, ended, or did not come before the deadline.

    Parameters
    ----------
    message : str
        Names the ranks, where they were, and what became of them.
    ranks : sequence of int, optional
        Which ones; empty where it is not known.
    **fields
        As `GenerationFailed`.
    """

    ranks: tuple[int, ...]

    def __init__(self, message: str = "", *, ranks: Iterable[int] = (), **fields: Any) -> None:
        super().__init__(message, ranks=tuple(ranks), **fields)


class StaleRound(GenerationFailed):
    """A rank contributes to a round that is over, or while another one speaks for it."""


class DeviceError(SDCError, RuntimeError):
    """No CUDA device can be used: none is there, or CuPy, the driver and the device do not go together."""


class DeviceLost(DeviceError):
    """A device was lost in the middle of work: only another process, or another device, can go on."""


class DeviceMemoryError(DeviceError, MemoryError):
    """A device has no memory left.

    Parameters
    ----------
    message : str
        What was asked for, in use and allowed.
    asked, used, limit : int or None, optional
        The same in bytes, where it is known: of the allocation that failed, in use by the pool of CuPy, and
        allowed to that pool.
    """

    asked: int | None
    used: int | None
    limit: int | None

    def __init__(
        self,
        message: str = "",
        *,
        asked: int | None = None,
        used: int | None = None,
        limit: int | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(message, asked=asked, used=used, limit=limit, **fields)


class LedgerError(SDCError):
    """The ledger's hash chain is broken or another writer holds it."""


class CheckpointError(SDCError):
    """A checkpoint is damaged or belongs to another fit or generation."""


class SDCWarning(UserWarning):
    """Base class of the package's warnings."""


class AuditWarning(SDCWarning):
    """The audit is weaker than what was asked for; the message says why."""


class RechunkWarning(SDCWarning):
    """Data were rechunked along the sample axis."""
