"""The two protocols that everything else is built on: `Statistic` and `Estimator`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

#: A state or model: None, bool, int, float, complex, str, bytes, list, tuple, dict with
#: str or int keys, and NumPy arrays of kinds b, i, u, f, c, S, U, M, m.
State = Any


@dataclass(frozen=True)
class ShardInfo:
    """What a statistic may know of a shard before it sees its samples.

    Parameters
    ----------
    shape : tuple of int
        Shape of one sample, that is of a block without its sample axis.
    dtype : numpy.dtype
        Data type of the block.
    shard_id : int
        Position of the shard along the sample axis; outlives any worker.
    seed : int
        Seed of the whole call; `rng` mixes it with the shard.
    target_shape : tuple of int or None
        Shape of one target sample; None without targets.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shard_id: int = 0
    seed: int = 0
    target_shape: tuple[int, ...] | None = None

    def rng(self) -> np.random.Generator:
        """Generator that depends on (seed, shard_id) alone, never on the worker."""
        return np.random.default_rng([self.seed, self.shard_id])


class Statistic(ABC):
    """An additive sufficient statistic: a monoid with init, update, combine, finalize.

    Subclasses are small, immutable, picklable declarations (a frozen dataclass is the natural
    form). States hold only the closed set of types (see `State`). `update` and `combine` may
    reuse the memory of their first argument and return it.

    Attributes
    ----------
    finite : bool
        Whether every float of a state must be finite. True means that NaN or Inf anywhere is
        an error at the shard that shows it.
    hash_input : bool
        Whether the kernel is heavier than a hash of its input block (about 20 GB/s), so that
        each shard's input is hashed, while it is hot in cache, in every round.
    """

    finite: bool = True
    hash_input: bool = False

    @abstractmethod
    def init(self, info: ShardInfo) -> State:
        """Return the identity of `combine` for samples of this shape and dtype."""

    @abstractmethod
    def update(self, state: State, x: Any) -> State:
        """Add a block of samples ``x`` of shape ``(n, *info.shape)`` to a state.

        A statistic that takes weights or targets declares keyword parameters ``weights``
        (shape (n,)) or ``target`` (shape (n, ...)); it is given them only when the caller did.
        """

    @abstractmethod
    def combine(self, a: State, b: State) -> State:
        """Merge two states; called in canonical shard order, as a tree of fixed shape."""

    @abstractmethod
    def finalize(self, state: State) -> Any:
        """Turn the state of all samples into the result that the user sees."""

    def magnitudes(self, state: State) -> Mapping[str, Any] | None:
        """Return M = Σ|terms| for fields of a dict state, for the envelope λ·√n·u·M.

        Keys name fields of the state; values broadcast against them. Fields that are left out
        fall back to the relative tolerance.
        """
        return None

    def terms(self, state: State) -> float:
        """Return n, the number of terms that were added up, for the envelope."""
        return 1.0

    def invariants(self, state: State) -> Iterable[str]:
        """Yield one line for every declared invariant that the state of one shard breaks."""
        return ()


class Estimator(ABC):
    """A model fitted by rounds: statistic of a model, then a new model from the statistic.

    Models are `State` values (usually a dict of arrays), so that they can be sealed, hashed
    and checkpointed.
    """

    @abstractmethod
    def initialise(self, info: ShardInfo) -> State | Statistic:
        """Return the first model, or a `Statistic` whose result is the first model.

        A statistic is accumulated over the data like any other round, with per-shard seeded
        randomness from `ShardInfo.rng`.
        """

    @abstractmethod
    def statistic(self, model: State) -> Statistic:
        """Return the statistic that one round accumulates under ``model``."""

    @abstractmethod
    def maximise(self, model: State, result: Any) -> State:
        """Return the next model from the finalized statistic of a round."""

    @abstractmethod
    def objective(self, model: State, result: Any) -> float:
        """Return the objective of ``model``, as seen by the round that used it."""

    def converged(self, previous: float, current: float, tol: float) -> bool:
        """Say whether the objective has settled: ``|current - previous| <= tol``."""
        return abs(current - previous) <= tol

    def result(self, model: State) -> Any:
        """Turn the last model into what the user sees."""
        return model

    def log_density(self, model: State) -> Statistic:
        """Return the statistic of Σ log p(x) under ``model``.

        Raises
        ------
        NotImplementedError
            If the model has no density.
        """
        raise NotImplementedError(f"{type(self).__name__} has no log density")
