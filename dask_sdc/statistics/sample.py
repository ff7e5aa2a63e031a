"""A bounded, weighted random sample of rows: where the iterative models start from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.statistics.base import ShardInfo, State, Statistic
from dask_sdc.statistics.blocks import real_block, weighted_rows
from dask_sdc.statistics.kernels import is_numpy, namespace, to_host

__all__ = ["RowSample", "check_count", "check_features", "check_seed"]

Array = np.ndarray[Any, Any]


def check_count(name: str, value: Any) -> int:
    """Return a positive int, or refuse it by name."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InputTypeError(f"expected {name} to be an int, got {value!r}")
    if value < 1:
        raise InputError(f"expected {name} >= 1, got {value}")
    return int(value)


def check_seed(value: Any) -> int:
    """Return an int >= 0, or refuse it."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InputTypeError(f"expected seed to be an int, got {value!r}")
    if value < 0:
        raise InputError(f"expected seed >= 0, got {value}")
    return int(value)


def check_features(info: ShardInfo, expected: int | None = None) -> int:
    """Return the number of features of real samples of shape (d,), or refuse them."""
    if len(info.shape) != 1 or info.shape[0] < 1:
        raise InputError(f"expected samples of shape (d,) with d >= 1, got {info.shape}")
    if info.dtype.kind not in "biuf":
        raise InputTypeError(f"expected real samples, got dtype {info.dtype}")
    if expected is not None and info.shape[0] != expected:
        raise InputError(f"expected samples of {expected} features, got {info.shape[0]}")
    return info.shape[0]


@dataclass(frozen=True)
class RowSample(Statistic):
    """A random sample of rows without replacement, drawn in proportion to their weights.

    Every row gets the key e/w, with e exponential of rate 1 and w its weight; the rows with the
    smallest keys are the sample (Efraimidis and Spirakis, Information Processing Letters 97, 2006).
    So the union of two samples cut back to ``size`` is the sample of the union: a monoid. The random
    numbers of a row depend on the seeds, the shard and the row's place in the shard alone.

    Parameters
    ----------
    size : int
        Number of rows to keep.
    seed : int
        Mixed with the seed of the call and the shard.
    """

    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("size", self.size)
        check_seed(self.seed)

    def init(self, info: ShardInfo) -> State:
        """Return the empty sample of a shard."""
        features = check_features(info)
        return {
            "keys": np.empty(0),
            "rows": np.empty((0, features)),
            "count": 0,
            "stream": (info.seed, info.shard_id, 0),
        }

    def update(self, state: State, x: Any, weights: Any = None) -> State:
        """Offer the rows of a block to the sample."""
        x, w = weighted_rows(real_block(x, state["rows"].shape[1:], "a sample of rows"), weights)
        n = int(x.shape[0])
        seed, shard, drawn = state["stream"]
        bits = np.random.PCG64([self.seed, seed, shard])
        keys = -np.log1p(-np.random.Generator(bits.advance(drawn)).random(n))
        if w is not None:
            keys /= to_host(w)  # keys are drawn on the host
        chosen = _smallest(keys, self.size)
        rows = _rows(x, chosen)
        offered = {"keys": keys[chosen], "rows": rows, "count": n, "stream": (seed, shard, drawn + n)}
        merged = self.combine(state, offered)
        return {**merged, "stream": offered["stream"]}

    def combine(self, a: State, b: State) -> State:
        """Merge two samples; of equal keys the left one's rows come first."""
        keys = np.concatenate([a["keys"], b["keys"]])
        rows = np.concatenate([a["rows"], b["rows"]])
        chosen = np.argsort(keys, kind="stable")[: self.size]
        return {
            "keys": keys[chosen],
            "rows": rows[chosen],
            "count": a["count"] + b["count"],
            "stream": a["stream"] if a["stream"][2] else b["stream"],
        }

    def finalize(self, state: State) -> Any:
        """Return the sampled rows in the order in which they were drawn, shape (at most size, d)."""
        return state["rows"]

    def invariants(self, state: State) -> Iterable[str]:
        """Yield what is wrong with the keys and the number of rows."""
        keys, rows = state["keys"], state["rows"]
        if len(keys) != len(rows) or len(keys) > min(self.size, state["count"]):
            yield f"{len(rows)} rows and {len(keys)} keys in a sample of {self.size} of {state['count']}"
        elif len(keys) and (keys[0] < 0 or bool(np.any(np.diff(keys) < 0))):
            yield "the sample's keys do not ascend from zero"


def _smallest(keys: Array, size: int) -> Array:
    """Return the positions of the ``size`` smallest keys, ascending, ties by position."""
    candidates = np.arange(len(keys))
    if len(keys) > size:
        candidates = np.flatnonzero(keys <= np.partition(keys, size - 1)[size - 1])
    return candidates[np.argsort(keys[candidates], kind="stable")][:size]


def _rows(x: Any, chosen: Array) -> Array:
    """Gather rows of a block as float64 on the host."""
    if is_numpy(x):
        return np.asarray(x[chosen], dtype=np.float64)
    xp = namespace(x)
    return np.asarray(to_host(xp.take(x, xp.asarray(chosen), axis=0)), dtype=np.float64)
