"""What samples are made from: how many there are, and how a batch of them reaches a worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from dask.base import is_dask_collection
from dask.delayed import delayed
from distributed import Client

from dask_sdc.exceptions import InputError, InputTypeError

__all__ = ["Inputs", "inputs_of", "one_of"]


class Inputs(ABC):
    """Inputs, in order.

    Attributes
    ----------
    count : int
        How many there are.
    """

    count: int

    @abstractmethod
    def batch(self, client: Client, numbers: range) -> Any:
        """Return what gives some inputs on a worker: a value, a Dask future, or a callable without arguments.

        Each of them is, or gives, something of which `one_of` finds every input.
        """

    #: Dimension along which the inputs of a batch lie; None where they are indexed by number.
    dim: str | None = None


class Listed(Inputs):
    """Inputs in a list; a batch of them travels with its task."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items, self.count = items, len(items)

    def batch(self, client: Client, numbers: range) -> Any:
        """Return a slice."""
        return self._items[numbers.start : numbers.stop]


class Bagged(Inputs):
    """Items of a dask bag, whose partitions stay on the workers."""

    def __init__(self, client: Client, partitions: Sequence[Any], lengths: Sequence[int]) -> None:
        self._partitions, self.count = list(partitions), sum(lengths)
        ends = np.cumsum(lengths)
        self._places = list(zip((ends - lengths).tolist(), ends.tolist(), strict=True))

    def batch(self, client: Client, numbers: range) -> Any:
        """Return a future of the items, of however many partitions."""
        parts, cuts = [], []
        for part, (begin, end) in zip(self._partitions, self._places, strict=True):
            if begin < numbers.stop and end > numbers.start:
                parts.append(part)
                cuts.append((max(0, numbers.start - begin), min(end, numbers.stop) - begin))
        return client.submit(_cut, parts, cuts, pure=False)


class Sliced(Inputs):
    """Rows of a dask array, or of an xarray object along a dimension; a batch is sliced lazily."""

    def __init__(self, data: Any, dim: str | None) -> None:
        self._data, self.dim = data, dim
        self.count = int(data.shape[0] if dim is None else data.sizes[dim])

    def batch(self, client: Client, numbers: range) -> Any:
        """Return a future of the rows, or the rows where they are in memory."""
        rows = slice(numbers.start, numbers.stop)
        part = self._data[rows] if self.dim is None else self._data.isel({self.dim: rows})
        if is_dask_collection(part):
            part = client.compute(part)
        return part


class Stored(Inputs):
    """Rows of a Zarr array, which workers read themselves."""

    def __init__(self, array: Any) -> None:
        self._array, self.count = array, int(array.shape[0])

    def batch(self, client: Client, numbers: range) -> Any:
        """Return what reads the rows."""
        return partial(_read, self._array, numbers.start, numbers.stop)


def one_of(batch: Any, k: int, dim: str | None) -> Any:
    """Return one input of a batch; of an array a copy, as an attempt that writes to it must harm no other."""
    one = batch[k] if dim is None else batch.isel({dim: k})
    return one.copy() if dim is not None or isinstance(one, np.ndarray) else one


def _read(array: Any, begin: int, end: int) -> Any:
    return np.asarray(array[begin:end])


def _cut(parts: Sequence[Sequence[Any]], cuts: Sequence[tuple[int, int]]) -> list[Any]:
    return [item for part, (begin, end) in zip(parts, cuts, strict=True) for item in list(part)[begin:end]]


async def inputs_of(client: Client, given: Any, dim: str | None) -> Inputs:
    """Return inputs of any kind.

    Parameters
    ----------
    client : Client
        Holds the partitions of a bag.
    given : dask bag or array, xarray object, Zarr array or path of one, ndarray, or iterable
        The inputs. Of an array every row is one; other iterables are read to their end.
    dim : str or None
        Of an xarray object the dimension along which the inputs lie; None is the first one.

    Raises
    ------
    InputTypeError
        If they are of no kind that is known.
    InputError
        If there is no such dimension, or how many there are is not known.
    """
    if hasattr(given, "dims") and hasattr(given, "isel"):
        dims = [str(name) for name in given.dims]
        if not dims or (dim is not None and dim not in dims):
            raise InputError(f"sample_dim: expected one of {dims}, got {dim!r}")
        return Sliced(given, dim or dims[0])
    if dim is not None:
        raise InputError(
            f"sample_dim: expected an xarray object to go with {dim!r}, got {type(given).__name__}"
        )
    if hasattr(given, "columns"):  # iterating over one gives the names of its columns
        raise InputTypeError(
            f"inputs: expected rows, such as df.to_dict('records'), got {type(given).__name__}"
        )
    if isinstance(given, str | Path):
        return Stored(_zarr_array(given))
    if type(given).__module__.split(".")[0] == "zarr":
        return Stored(_zarr_array(given))
    if hasattr(given, "to_delayed") and hasattr(given, "map_partitions"):
        return await _bagged(client, given)
    if is_dask_collection(given) and hasattr(given, "chunks"):
        if not given.ndim or np.isnan(given.shape[0]):
            raise InputError(
                f"inputs: expected an array with a known number of rows, got shape {given.shape}"
            )
        return Sliced(given, None)
    if isinstance(given, np.ndarray):
        if not given.ndim:
            raise InputError("inputs: expected an array with rows, got one without axes")
        return Listed(given)  # type: ignore[arg-type]  # rows are indexed as items are
    if isinstance(given, dict | bytes) or not isinstance(given, Iterable):
        raise InputTypeError(
            "inputs: expected a dask bag or array, an xarray object, a Zarr array or path, or an iterable, "
            f"got {type(given).__name__}"
        )
    return Listed(list(given))


def _zarr_array(given: Any) -> Any:
    import zarr

    if isinstance(given, str | Path):
        given = zarr.open(given, mode="r")
    if not isinstance(given, zarr.Array) or not given.ndim:
        raise InputTypeError(f"inputs: expected a Zarr array with rows, got {type(given).__name__}")
    return given


async def _bagged(client: Client, bag: Any) -> Bagged:
    partitions = client.compute([delayed(list)(part) for part in bag.to_delayed(optimize_graph=False)])
    lengths = await client.gather(client.map(len, partitions, pure=False), asynchronous=True)
    return Bagged(client, partitions, lengths)
