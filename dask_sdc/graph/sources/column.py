"""One named column of a source (x, weights or target), cut into shards along its first axis.

A `Column` lives on the client and knows shapes, types and identity. Its `Part` is what travels to
a worker: small, picklable, and able to load the shards of one batch there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from dask.typing import Key

from dask_sdc.exceptions import InputError, InputTypeError

#: Loads one shard: shard id -> {column name: array}.
Load = Callable[[int], Mapping[str, Any]]

#: Bytes of a shard where the data do not prescribe a cut: large against the cost of a task, small
#: enough that a few of them fit into a worker's memory and that a rerun is cheap.
SHARD_NBYTES = 16 * 2**20
#: Least number of shards where the data do not prescribe a cut: fewer cannot be spread over domains.
MIN_SHARDS = 8

_ITEM_BYTES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}


class Part(ABC):
    """Worker side of one or more columns for the shards of one batch."""

    @property
    def dependencies(self) -> tuple[Key, ...]:
        """Keys of the futures whose values `open` needs, in the order of first use."""
        return ()

    @abstractmethod
    def open(self, deps: Mapping[Key, Any], stack: ExitStack) -> Load:
        """Return the function that loads one shard; what it must give back is left on ``stack``."""


@dataclass(frozen=True, eq=False)
class Column(ABC):
    """One column cut into shards.

    Parameters
    ----------
    name : {"x", "weights", "target"}
        Used in messages.
    rows : tuple of int
        Samples of each shard.
    shape : tuple of int
        Shape of one sample.
    dtype : numpy.dtype
        In native byte order, whatever is stored.
    """

    name: str
    rows: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        check_dtype(self.name, self.dtype)
        if not sum(self.rows):
            raise InputError(f"{self.name} has no samples: expected a sample axis of length >= 1, got 0")

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First and last row (exclusive) of each shard."""
        return list(pairwise(accumulate(self.rows, initial=0)))

    @property
    def row_nbytes(self) -> int:
        """Bytes of one sample."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    @abstractmethod
    def identity(self) -> bytes:
        """Return bytes that differ when the stored data differ, as far as that is cheap to know."""

    @property
    def place(self) -> str | None:
        """Where blocks will be, "host" or "device"; None where only a loaded block tells."""
        return "host"

    @abstractmethod
    def realign(self, rows: tuple[int, ...], notes: list[str]) -> Column:
        """Return the same data cut into shards of ``rows``; remarks for the user go to ``notes``."""


class LoadableColumn(Column):
    """A column that loads on its own; Dask columns do not, they share one graph (see `subgraph`)."""

    @abstractmethod
    def part(self, shard_ids: Sequence[int]) -> Part:
        """Return what a worker needs to load these shards."""


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in native byte order; structured types are refused later, as they are."""
    return dtype.newbyteorder("=")


def check_dtype(name: str, dtype: np.dtype[Any]) -> None:
    """Refuse every type that the statistics have no arithmetic for.

    Raises
    ------
    InputTypeError
        For object, string, datetime, structured and extended-precision types.
    """
    if dtype.itemsize not in _ITEM_BYTES.get(dtype.kind, ()):
        raise InputTypeError(
            f"{name} has dtype {dtype}: expected bool, an integer, float16/32/64 or complex64/128"
        )


def namespace(array: Any) -> str:
    """Return the root package of an array's type, so that CuPy is known without importing it."""
    return type(array).__module__.partition(".")[0]


def even_rows(n: int, row_nbytes: int) -> tuple[int, ...]:
    """Cut ``n`` rows into equal shards of about `SHARD_NBYTES`, the last one ragged."""
    count = min(n, max(MIN_SHARDS, -(-n * row_nbytes // SHARD_NBYTES)))
    size = -(-n // max(count, 1))
    return tuple(min(size, n - start) for start in range(0, n, max(size, 1)))
