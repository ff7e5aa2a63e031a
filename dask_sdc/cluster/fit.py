"""Iterative fits: audited rounds, rolled back when a suspect may have spoiled earlier ones."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import cloudpickle
import numpy as np

from dask_sdc.cluster.checkpoint import CheckpointStore
from dask_sdc.cluster.driver import Memory, Pace, RoundResult
from dask_sdc.evidence.codec import digest, encode
from dask_sdc.exceptions import CheckpointError, EncodeError, InputError
from dask_sdc.graph.sources import Source
from dask_sdc.policy.quarantine import TaintHistory
from dask_sdc.policy.sampling import CoverageSampler
from dask_sdc.statistics.base import Estimator, ShardInfo, State, Statistic

#: Runs one audited round of a statistic.
RunRound = Callable[[Statistic, Memory], Awaitable[RoundResult]]


@dataclass(frozen=True)
class FitResult:
    """What a fit ends with.

    Attributes
    ----------
    estimator : Estimator
        What was fitted.
    model : State
        The last model, as the estimator's rounds use it.
    result : object
        The model as the estimator shows it (``estimator.result(model)``).
    converged : bool
        Whether the objective settled before ``max_iter``.
    n_iter : int
        Iterations that count; rolled-back ones do not.
    objective : float
        Objective of the last round.
    history : tuple of float
        Objective of every iteration.
    rollbacks : int
        How often the fit went back because a suspect may have spoiled earlier rounds.
    """

    estimator: Estimator
    model: State
    result: Any
    converged: bool
    n_iter: int
    objective: float
    history: tuple[float, ...]
    rollbacks: int


@dataclass
class Books:
    """What an auditor keeps from round to round.

    Attributes
    ----------
    sampler : CoverageSampler
        The audits that every domain owes.
    taint : TaintHistory
        What every domain computed since its last clean audit.
    round : int
        Number of the next round.
    """

    sampler: CoverageSampler
    taint: TaintHistory = field(default_factory=TaintHistory)
    round: int = 0


@dataclass
class _Progress:
    """Where a fit is. ``starts`` holds, by round, the state with which that round began."""

    model: State = None
    history: list[float] = field(default_factory=list)
    starts: dict[int, tuple[State, list[float]]] = field(default_factory=dict)
    converged: bool = False
    rollbacks: int = 0


class Fit:
    """One call of `Auditor.fit`.

    Parameters
    ----------
    estimator : Estimator
    source : Source
    run_round : callable
        Runs one audited round of a statistic.
    books : Books
        What the auditor keeps between rounds; replaced by a checkpoint's where there is one.
    seed : int
    max_iter : int
    tol : float
    store : CheckpointStore or None
    """

    def __init__(
        self,
        estimator: Estimator,
        source: Source,
        run_round: RunRound,
        books: Books,
        seed: int,
        max_iter: int,
        tol: float,
        store: CheckpointStore | None,
    ) -> None:
        self._estimator = estimator
        self._source = source
        self._run_round = run_round
        self._books = books
        self._seed = seed
        self._max_iter = max_iter
        self._tol = tol
        self._store = store
        self._memory = Memory()
        self._pace = Pace()
        self._binding = _binding(estimator, source, seed)

    async def run(self) -> FitResult:
        """Fit to convergence or ``max_iter``.

        Raises
        ------
        CheckpointError
            If the store holds the checkpoint of another fit.
        """
        progress = await asyncio.to_thread(self._resume)
        while not progress.converged and len(progress.history) < self._max_iter:
            if progress.model is None:
                await self._initialise(progress)
            else:
                await self._iterate(progress)
        return FitResult(
            self._estimator,
            progress.model,
            self._estimator.result(progress.model),
            progress.converged,
            len(progress.history),
            progress.history[-1],
            tuple(progress.history),
            progress.rollbacks,
        )

    async def _initialise(self, progress: _Progress) -> None:
        info = ShardInfo(self._source.shape, self._source.dtype, 0, self._seed, self._source.target_shape)
        first = self._estimator.initialise(info)
        if isinstance(first, Statistic):
            # A suspect that is found later may have spoiled this round too.
            progress.starts[self._books.round] = (None, [])
            result = await self._run_round(first, self._memory)
            first = first.finalize(result.state)
        progress.model = first
        await self._save(progress)

    async def _iterate(self, progress: _Progress) -> None:
        number = self._books.round
        progress.starts[number] = (progress.model, list(progress.history))
        statistic = self._estimator.statistic(progress.model)
        done = await self._run_round(statistic, self._memory)
        if self._roll_back(progress, done, number):
            return
        await self._pace.run(self._advance, progress, statistic, done.state)
        self._forget_safe_starts(progress)
        await self._save(progress)

    def _advance(self, progress: _Progress, statistic: Statistic, state: State) -> None:
        result = statistic.finalize(state)
        objective = float(self._estimator.objective(progress.model, result))
        progress.model = self._estimator.maximise(progress.model, result)
        if progress.history:
            progress.converged = self._estimator.converged(progress.history[-1], objective, self._tol)
        progress.history.append(objective)

    def _roll_back(self, progress: _Progress, done: RoundResult, number: int) -> bool:
        """Go back to the first round that a suspect may have spoiled, if that is an earlier one."""
        suspects = done.record.suspects
        tainted = self._books.taint.rollback_round(suspects) if suspects else None
        self._books.taint.forget(suspects)
        first = min((r for r in (tainted, done.spoiled) if r is not None), default=number)
        forgotten = done.spoiled is not None and done.spoiled < min(progress.starts)
        earlier = [start for start in progress.starts if start >= first]
        if min(earlier) >= number and not forgotten:
            return False
        # How a round began that was thought safe is forgotten: then all is done again.
        progress.model, history = (None, []) if forgotten else progress.starts[min(earlier)]
        progress.history = list(history)
        for start in earlier:
            del progress.starts[start]
        progress.rollbacks += 1
        return True

    def _forget_safe_starts(self, progress: _Progress) -> None:
        """Keep the models of rounds that somebody may still turn out to have spoiled."""
        taint = self._books.taint
        oldest = taint.rollback_round(taint.domains)
        for number in list(progress.starts):
            if oldest is None or number < oldest:
                del progress.starts[number]

    # -- checkpoints -------------------------------------------------------------------

    async def _save(self, progress: _Progress) -> None:
        if self._store is None:
            return
        await asyncio.to_thread(
            self._store.save,
            self._books.round,
            {
                "binding": self._binding,
                "model": progress.model,
                "history": list(progress.history),
                "converged": progress.converged,
                "rollbacks": progress.rollbacks,
                "starts": {n: list(start) for n, start in progress.starts.items()},
                "barred": dict(self._memory.barred),
                "round": self._books.round,
                "sampler": self._books.sampler.to_dict(),
                "taint": self._books.taint.to_dict(),
            },
        )

    def _resume(self) -> _Progress:
        saved = self._store.load() if self._store is not None else None
        if saved is None:
            return _Progress()
        if saved["binding"] != self._binding:
            differing = sorted(
                name for name in self._binding if saved["binding"].get(name) != self._binding[name]
            )
            raise CheckpointError(
                f"expected a checkpoint of this fit, got one with another {', '.join(differing)}"
            )
        self._memory.barred = dict(saved["barred"])
        self._books.round = max(self._books.round, saved["round"])
        self._books.sampler = CoverageSampler.from_dict(saved["sampler"])
        self._books.taint = TaintHistory.from_dict(saved["taint"])
        return _Progress(
            saved["model"],
            list(saved["history"]),
            {n: (model, list(history)) for n, (model, history) in saved["starts"].items()},
            saved["converged"],
            saved["rollbacks"],
        )


def _binding(estimator: Estimator, source: Source, seed: int) -> dict[str, Any]:
    """What a checkpoint belongs to: estimator with its settings, data, seed."""
    kind = type(estimator)
    return {
        "estimator": f"{kind.__module__}.{kind.__qualname__}",
        "settings": _settings_digest(estimator),
        "data": source.digest(),
        "shards": source.n_shards,
        "seed": seed,
    }


def _settings_digest(estimator: Any) -> bytes:
    if is_dataclass(estimator):
        try:
            return digest(encode({f.name: getattr(estimator, f.name) for f in fields(estimator)}))
        except EncodeError:
            pass
    return digest(cloudpickle.dumps(estimator))


def check_fit(estimator: Any, max_iter: Any, tol: Any) -> None:
    """Refuse what cannot be fitted.

    Raises
    ------
    InputError
        Names what was expected and what came.
    """
    if not isinstance(estimator, Estimator):
        raise InputError(f"expected an Estimator, got {type(estimator).__name__}")
    if isinstance(max_iter, bool) or not isinstance(max_iter, int | np.integer) or max_iter < 1:
        raise InputError(f"max_iter: expected an int of at least 1, got {max_iter!r}")
    numbers = int | float | np.integer | np.floating
    if isinstance(tol, bool) or not isinstance(tol, numbers) or not 0 <= tol < math.inf:
        raise InputError(f"tol: expected a finite number >= 0, got {tol!r}")
