"""What became of samples: one that could not be had, and the count of many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from dask_sdc.exceptions import InputTypeError


@dataclass(frozen=True)
class SampleUnavailable:
    """Stands in for a sample that could not be had.

    Parameters
    ----------
    reason : str
        Why, in one sentence.
    counts_as_failure : bool
        Whether it was tried in vain; not so for one that was skipped, or refused by an open breaker.
    consecutive_failures : int
        Samples in a row that were tried in vain, this one included.
    fatal : bool
        Whether the rank should stop: too many samples in a row failed.
    """

    reason: str = ""
    counts_as_failure: bool = False
    consecutive_failures: int = 0
    fatal: bool = False


@dataclass(frozen=True)
class RecoveryMetadata:
    """What was lost in one batch, or in many.

    With `combine` and `identity` a commutative monoid, so that the order in which parts arrive does not
    matter and Dask can reduce them: ``bag.fold(RecoveryMetadata.combine, initial=RecoveryMetadata())``.

    Parameters
    ----------
    failure_count : int
        Samples that were tried in vain.
    locally_empty : bool
        Whether a batch had no sample left, so that a padded one stands in for it.
    fatal : bool
        Whether a rank should stop.
    error : str
        Why it should.
    """

    failure_count: int = 0
    locally_empty: bool = False
    fatal: bool = False
    error: str = ""

    @classmethod
    def from_unavailable(cls, unavailable: Iterable[SampleUnavailable], *, locally_empty: bool) -> Self:
        """Count the samples that a batch lacks.

        Parameters
        ----------
        unavailable : iterable of SampleUnavailable
            In the order in which they were tried.
        locally_empty : bool
            Whether the batch has no sample at all.

        Returns
        -------
        RecoveryMetadata
            Counts only what counts as a failure; the first fatal sample gives the error.

        Raises
        ------
        InputTypeError
            If something else is among them.
        """
        lost = tuple(unavailable)
        for sample in lost:
            if not isinstance(sample, SampleUnavailable):
                raise InputTypeError(f"expected SampleUnavailable, got a {type(sample).__name__}")
        fatal = [sample for sample in lost if sample.fatal]
        return cls(
            failure_count=sum(sample.counts_as_failure for sample in lost),
            locally_empty=locally_empty,
            fatal=bool(fatal),
            error=fatal[0].reason if fatal else "",
        )

    @classmethod
    def identity(cls) -> Self:
        """Return what changes nothing: a batch that lacks nothing."""
        return cls()

    def combine(self, other: RecoveryMetadata) -> RecoveryMetadata:
        """Return what was lost in both.

        Parameters
        ----------
        other : RecoveryMetadata
            Of other batches.

        Returns
        -------
        RecoveryMetadata
            Failures add up. The rest is that of either: fatal or locally empty if one of them is, with the
            error that sorts first of those that are not empty, since the order of parts must not matter.
        """
        return RecoveryMetadata(
            failure_count=self.failure_count + other.failure_count,
            locally_empty=self.locally_empty or other.locally_empty,
            fatal=self.fatal or other.fatal,
            error=min(filter(None, (self.error, other.error)), default=""),
        )
