"""Counts what the batches of a rank lack, and stops all ranks together."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from dask_sdc.exceptions import GenerationFailed, InputError, InputTypeError, LeftoverKeys
from dask_sdc.recovery.all_reduce import AllReduce, prevailing
from dask_sdc.recovery.outcome import RecoveryMetadata

logger = logging.getLogger("dask_sdc.recovery")

#: Key under which a batch carries its `RecoveryMetadata`; `BatchRecoveryCoordinator.consume` takes it out.
METADATA_KEY = "__recovery__"


class BatchRecoveryCoordinator:
    """One rank's count of what its batches lack; all ranks add up theirs from time to time.

    Every rank has to synchronise equally often.

    Parameters
    ----------
    phase : str
        Names the work in messages, such as "train" or "validation".
    device : str or torch.device, optional
        Where torch.distributed adds up, if ``all_reduce`` is not given.
    all_reduce : AllReduce, optional
        Adds up over ranks. By default that is torch.distributed where the program has initialised it, and
        otherwise there is one rank only.

    Raises
    ------
    InputError
        If both ``device`` and ``all_reduce`` are given.

    Examples
    --------
    >>> coordinator = BatchRecoveryCoordinator("train")
    >>> batch = {"x": [1.0], METADATA_KEY: RecoveryMetadata(failure_count=2)}
    >>> coordinator.consume(batch)
    >>> coordinator.synchronize(), batch
    (2, {'x': [1.0]})
    """

    def __init__(self, phase: str, *, device: Any = None, all_reduce: AllReduce | None = None) -> None:
        if device is not None and all_reduce is not None:
            raise InputError(f"expected device={device!r} to be given to the all-reduce, got both here")
        self.phase = phase
        self._device = device
        self._all_reduce = all_reduce
        self._local = RecoveryMetadata()

    @property
    def local(self) -> RecoveryMetadata:
        """What this rank's batches lacked since it last synchronised."""
        return self._local

    def consume(self, batch: MutableMapping[Any, Any], *, synchronize: bool = False) -> None:
        """Take the metadata out of a batch, and count them.

        Parameters
        ----------
        batch : mutable mapping
            Has no key `METADATA_KEY` afterwards; one that had none before lacks nothing.
        synchronize : bool
            Call `synchronize` after that.

        Raises
        ------
        InputTypeError
            If there is something else under `METADATA_KEY`; a TypeError.
        LeftoverKeys
            If another key begins with two underscores: nobody has taken it out. A RuntimeError; nothing
            was counted.
        GenerationFailed
            As `synchronize`.
        """
        metadata = batch.pop(METADATA_KEY, RecoveryMetadata())
        if not isinstance(metadata, RecoveryMetadata):
            raise InputTypeError(
                f"{self.phase}: expected RecoveryMetadata under {METADATA_KEY!r}, "
                f"got a {type(metadata).__name__}"
            )
        if left := sorted(key for key in batch if isinstance(key, str) and key.startswith("__")):
            raise LeftoverKeys(f"{self.phase}: expected no key with two underscores in a batch, got {left}")
        if metadata.failure_count:
            logger.warning("%s: %d samples of a batch are missing", self.phase, metadata.failure_count)
        if metadata.locally_empty:
            logger.warning("%s: a batch has no sample left; an empty one stands in for it", self.phase)
        self._local = self._local.combine(metadata)
        if synchronize:
            self.synchronize()

    def synchronize(self) -> int:
        """Add up over all ranks what they lacked since they last did.

        Returns
        -------
        int
            Failed samples of all ranks. Rank 0 logs it.

        Raises
        ------
        GenerationFailed
            On every rank, if one of them has a fatal sample, or cannot be reached any more. Names the local
            error on the ranks that have one.
        """
        local = self._take()
        all_reduce = self._reducer()
        try:
            sums = all_reduce.sum((local.fatal, local.failure_count))
        except GenerationFailed as error:
            _add_local(error, local)
            raise
        return self._judge(sums, local, all_reduce)

    async def synchronize_async(self) -> int:
        """Do the same without blocking the event loop.

        Returns
        -------
        int
            Failed samples of all ranks.

        Raises
        ------
        GenerationFailed
            As `synchronize`.
        InputTypeError
            If the all-reduce cannot be awaited.
        """
        all_reduce = self._reducer()
        sum_async = getattr(all_reduce, "sum_async", None)
        if sum_async is None:
            raise InputTypeError(f"expected an all-reduce with sum_async, got {type(all_reduce).__name__}")
        local = self._take()
        try:
            sums = await sum_async((local.fatal, local.failure_count))
        except GenerationFailed as error:
            _add_local(error, local)
            raise
        return self._judge(sums, local, all_reduce)

    def _reducer(self) -> AllReduce:
        # Late, since a program may initialise torch.distributed after it made this.
        return prevailing(self._device) if self._all_reduce is None else self._all_reduce

    def _take(self) -> RecoveryMetadata:
        # First of all: whatever happens now, nothing is counted twice.
        local, self._local = self._local, RecoveryMetadata()
        return local

    def _judge(self, sums: tuple[int, ...], local: RecoveryMetadata, all_reduce: AllReduce) -> int:
        fatal, failures = sums
        if all_reduce.rank == 0:
            level = logging.WARNING if failures or fatal else logging.INFO
            logger.log(level, "%s: %d samples are missing on %d ranks", self.phase, failures, all_reduce.size)
        if fatal:
            error = GenerationFailed(
                f"{self.phase}: {fatal} of {all_reduce.size} ranks cannot go on; {failures} samples failed "
                f"since all ranks last synchronised"
            )
            _add_local(error, local)
            raise error
        return failures


def _add_local(error: GenerationFailed, local: RecoveryMetadata) -> None:
    """Add what this rank knows of itself to what all ranks know."""
    if local.error:
        error.args = (f"{error}; on this rank: {local.error}",)
        error.local_error = local.error
