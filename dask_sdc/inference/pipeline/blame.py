"""Whether a stage was lost for what it was fed: then every spare is lost at the same position as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_sdc.exceptions import GenerationInterrupted, NoSpareError
from dask_sdc.inference.ops import RecoveryReport
from dask_sdc.inference.pipeline.fed import FedSession
from dask_sdc.inference.session import Loss, LossKind

__all__ = ["Blame"]

#: Workers that a stage may be lost on without a word, at one position of a session, before that is to blame.
_LIVES = 4


class Blame:
    """Counts at which positions of which sessions stages were lost.

    Parameters
    ----------
    timeout : float
        Seconds without an answer after which a stage counts as frozen.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        # Workers on which a stage failed, by stage, session and position.
        self._failures: dict[tuple[int, str, int], list[str]] = {}

    def forget(self, name: str) -> None:
        """Forget a session that is over."""
        for key in [key for key in self._failures if key[1] == name]:
            del self._failures[key]

    def spread(
        self, report: RecoveryReport, holders: Sequence[str], flying: Mapping[int, FedSession]
    ) -> set[str]:
        """Give those sessions up in the report that stages were lost for, and return who is innocent of it.

        Parameters
        ----------
        report : RecoveryReport
            Of a recovery.
        holders : sequence of str
            Who held each stage before it.
        flying : mapping of int to FedSession
            The chunks that were on their way.
        """
        innocent: set[str] = set()
        lost = {loss.stage: loss for loss in report.losses}
        for loss in lost.values():
            if loss.kind is LossKind.FAILED and loss.chunk in flying:
                innocent |= self._charge(flying[loss.chunk], loss, holders[loss.stage], report, 2)
            elif loss.kind in (LossKind.FROZEN, LossKind.UNREACHABLE):
                # All that were on their way may have been the end of it.
                for session in set(flying.values()):
                    innocent |= self._charge(session, loss, holders[loss.stage], report, _LIVES)
        return innocent

    def _charge(
        self, session: FedSession, loss: Loss, holder: str, report: RecoveryReport, lives: int
    ) -> set[str]:
        position = session.begin_of(loss.chunk)
        failed = self._failures.setdefault((loss.stage, session.name, position), [])
        failed.append(holder)
        if len(failed) < lives:
            return set()
        times = "two" if lives == 2 else lives
        report.abandoned[session.name] = GenerationInterrupted(
            f"session {session.name}: stage {loss.stage} failed at position {position} on {times} workers: "
            f"{loss.detail or self._too_slow(loss.stage, len(failed))}",
            stage=loss.stage,
            session=session.name,
            committed=session.state().committed,
            checkpoint=session.state().checkpoint(),
        )
        return set(failed) if loss.detail else set()

    def explain(self, error: NoSpareError, flying: Mapping[int, FedSession]) -> None:
        """Say so where a stage only took too long, on the last spare as well."""
        for loss in reversed(vars(error)["report"].losses):
            session = flying.get(loss.chunk)
            slow = loss.kind is LossKind.FROZEN
            if session is None or loss.stage != error.stage or not slow:
                continue
            before = self._failures.get((loss.stage, session.name, session.begin_of(loss.chunk)), [])
            error.args = (f"{error}; {self._too_slow(loss.stage, len(before) + 1)}",)
            return

    def _too_slow(self, stage: int, workers: int) -> str:
        each = f"each of {workers} workers" if workers > 1 else "the worker that had it"
        return (
            f"stage {stage} answered, but took longer than timeout={self._timeout:g} s for a chunk on "
            f"{each}: raise timeout if that is what it takes"
        )
