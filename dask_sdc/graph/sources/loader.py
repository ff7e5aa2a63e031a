"""Worker side of a source: what a batch task uses to get its shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from dask.typing import Key

from dask_sdc.exceptions import InputError, ShardError
from dask_sdc.graph.block import Block
from dask_sdc.graph.sources.column import Load, Part, namespace, native
from dask_sdc.statistics.blocks import check_one_place


class Field(NamedTuple):
    """Declared sample shape and type of one column."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, eq=False)
class Loader:
    """Everything that a worker needs to load the shards of one batch; picklable and immutable.

    Parameters
    ----------
    rows : mapping of int to int
        Samples of each shard of the batch.
    fields : mapping of str to Field
        Columns that there are, out of "x", "weights" and "target".
    parts : tuple of Part
        How to load them.
    dependencies : tuple of keys
        Futures whose values `reader`, `load` and `blocks` take, in this order.
    """

    rows: Mapping[int, int]
    fields: Mapping[str, Field]
    parts: tuple[Part, ...]
    dependencies: tuple[Key, ...]

    @property
    def shard_ids(self) -> tuple[int, ...]:
        """Shards of the batch, in order."""
        return tuple(self.rows)

    def reader(self, deps: Sequence[Any] = ()) -> Reader:
        """Return a reader for one pass over the batch on one thread.

        Raises
        ------
        InputError
            If ``deps`` does not hold one value for each of `dependencies`.
        """
        return Reader(self, deps)

    def load(self, shard_id: int, deps: Sequence[Any] = ()) -> Block:
        """Load one shard; its memory is the caller's.

        Raises
        ------
        ShardError
            If it cannot be loaded or is not what the source declared.
        """
        # a reader that is not closed never gives its buffer to anybody else
        return self.reader(deps).load(shard_id)

    def blocks(self, deps: Sequence[Any] = ()) -> Iterator[tuple[int, Block]]:
        """Yield all shards in order; a block is valid until the next one is asked for."""
        with self.reader(deps) as reader:
            for shard_id in self.rows:
                yield shard_id, reader.load(shard_id)


class Reader:
    """Loads shards of one batch one after another; a context manager for one thread.

    A block is valid until the next `load` or until the reader is closed: memory is reused. Whoever
    keeps a block copies it. After a shard failed, the others can still be loaded.
    """

    def __init__(self, loader: Loader, deps: Sequence[Any]) -> None:
        if len(deps) != len(loader.dependencies):
            raise InputError(f"expected {len(loader.dependencies)} dependency values, got {len(deps)}")
        self._loader = loader
        self._stack = ExitStack()
        values = dict(zip(loader.dependencies, deps, strict=True))
        self._loads: list[Load] = [part.open(values, self._stack) for part in loader.parts]

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give memory back; blocks that were loaded are no longer valid."""
        self._loads = []
        self._stack.close()

    def load(self, shard_id: int) -> Block:
        """Load and validate one shard.

        Raises
        ------
        ShardError
            If it cannot be loaded, or if type, shape or weights are not as declared.
        InputTypeError
            If some columns are on the host and some on a device.
        """
        rows = self._loader.rows.get(shard_id)
        if rows is None:
            raise ShardError(
                f"shard {shard_id} is not in this batch: expected one of {self._loader.shard_ids}",
                shard_id=shard_id,
            )
        try:
            values = {name: value for load in self._loads for name, value in load(shard_id).items()}
        except Exception as error:
            message = f"shard {shard_id} cannot be loaded: {type(error).__name__}: {error}"
            raise ShardError(message, shard_id=shard_id) from error
        columns = {
            name: _checked(name, shard_id, values[name], field, rows)
            for name, field in self._loader.fields.items()
        }
        check_one_place(columns, f"shard {shard_id}")
        return Block(**columns)


def _checked(name: str, shard_id: int, value: Any, field: Field, rows: int) -> Any:
    where = f"{name} of shard {shard_id}"
    if namespace(value) not in ("numpy", "cupy") or isinstance(value, np.ma.MaskedArray):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ShardError(f"{where}: expected a NumPy or CuPy array, got {kind}", shard_id=shard_id)
    expected = (rows, *field.shape)
    if value.shape != expected:
        raise ShardError(f"{where}: expected shape {expected}, got {value.shape}", shard_id=shard_id)
    if native(value.dtype) != field.dtype:
        raise ShardError(f"{where}: expected dtype {field.dtype}, got {value.dtype}", shard_id=shard_id)
    if name == "weights" and not valid_weights(value):
        bad = bad_weights(value)
        raise ShardError(f"{where}: expected finite weights >= 0, got {bad}", shard_id=shard_id)
    return value if value.dtype == field.dtype else value.astype(field.dtype)


def valid_weights(weights: Any) -> bool:
    """Say whether all weights are finite and not negative; written so that NaN fails and CuPy passes."""
    return bool(((weights >= 0) & (weights < float("inf"))).all())


def bad_weights(weights: Any) -> str:
    """Return the first weight that is not valid, with its position in the block."""
    index = int((~((weights >= 0) & (weights < float("inf")))).argmax())
    return f"{weights[index].item()} at row {index}"
