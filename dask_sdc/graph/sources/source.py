"""From user data to a `Source`: the client side."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import dask.array as da
import numpy as np
import xxhash
from dask.typing import Key

from dask_sdc.exceptions import InputError, InputTypeError, RechunkWarning
from dask_sdc.graph.sources.column import Column, LoadableColumn, namespace
from dask_sdc.graph.sources.lazy import DaskColumn
from dask_sdc.graph.sources.loader import Field, Loader, bad_weights, valid_weights
from dask_sdc.graph.sources.memory import MemoryColumn
from dask_sdc.graph.sources.subgraph import Graph

#: Work that inlining a shard's own graph may repeat before the data are better persisted first.
MAX_DUPLICATION = 1.5


class Source:
    """Data cut into shards along the sample axis, with what is needed to load them anywhere.

    Made by `make_source`.

    Attributes
    ----------
    rows : tuple of int
        Samples of each shard; zeros are allowed.
    shape : tuple of int
        Shape of one sample.
    dtype : numpy.dtype
        Type of x, in native byte order.
    target_shape : tuple of int or None
        Shape of one target, None without targets.
    weighted : bool
        Whether there are weights.
    warnings : tuple of str
        Remarks that were issued as `RechunkWarning` when the source was made.
    """

    def __init__(self, columns: Mapping[str, Column], notes: Sequence[str] = ()) -> None:
        x = columns["x"]
        self._columns = dict(columns)
        self.rows = x.rows
        self.shape = x.shape
        self.dtype = x.dtype
        self.target_shape = columns["target"].shape if "target" in columns else None
        self.weighted = "weights" in columns
        self.warnings = tuple(notes)

    @property
    def n_shards(self) -> int:
        """Number of shards."""
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns once loaded."""
        return sum(self.rows) * sum(column.row_nbytes for column in self._columns.values())

    @property
    def shared(self) -> bool:
        """Whether shards share so much upstream work that the data should be persisted first."""
        return self.duplication > MAX_DUPLICATION

    @cached_property
    def duplication(self) -> float:
        """Work of all shards computed each on its own, over the work of computing them together.

        Counted in tasks; 1.0 where there is no Dask graph; a lower bound where `shared` is True.
        """
        return self._graph.duplication(MAX_DUPLICATION) if self._graph else 1.0

    @cached_property
    def locality(self) -> tuple[tuple[Key, ...], ...]:
        """Keys of the futures that each shard starts from: where they are is where it runs cheaply."""
        if self._graph is None:
            return ((),) * self.n_shards
        return tuple(tuple(self._graph.futures((k,))) for k in range(self.n_shards))

    @cached_property
    def _graph(self) -> Graph | None:
        arrays = {name: c.array for name, c in self._columns.items() if isinstance(c, DaskColumn)}
        return Graph(arrays) if arrays else None

    def digest(self) -> bytes:
        """Return 16 bytes that identify the data, to bind checkpoints to them.

        In memory: xxh3_128 of the contents. Dask: the array's name (a token of how it was made).
        Zarr: location, shape, type and chunks. Where contents are not read, data that are
        overwritten in place keep their digest.
        """
        state = xxhash.xxh3_128()
        for name, column in self._columns.items():
            identity = column.identity()
            state.update(f"{name} {column.rows} {len(identity)} ".encode() + identity)
        return state.digest()

    def dependencies(self, shard_ids: Sequence[int]) -> list[Key]:
        """Return the keys of futures that a batch of these shards must depend on, in the loader's order."""
        self._check_ids(shard_ids)
        return self._graph.futures(shard_ids) if self._graph else []

    def batch(self, shard_ids: Sequence[int]) -> Loader:
        """Return the loader of these shards.

        Raises
        ------
        InputError
            If a shard does not exist or is named twice.
        """
        self._check_ids(shard_ids)
        parts = [c.part(shard_ids) for c in self._columns.values() if isinstance(c, LoadableColumn)]
        if self._graph:
            parts.append(self._graph.part(shard_ids))
        return Loader(
            {k: self.rows[k] for k in shard_ids},
            {name: Field(column.shape, column.dtype) for name, column in self._columns.items()},
            tuple(parts),
            tuple(key for part in parts for key in part.dependencies),
        )

    def _check_ids(self, shard_ids: Sequence[int]) -> None:
        wrong = [k for k in shard_ids if not 0 <= k < self.n_shards]
        if wrong or len(set(shard_ids)) != len(shard_ids):
            raise InputError(
                f"expected distinct shards out of 0..{self.n_shards - 1}, got {list(shard_ids)[:20]}"
            )

    def collections(self) -> tuple[da.Array, ...]:
        """Return the Dask arrays behind this source, to be persisted together where `shared` is True."""
        return tuple(c.array for c in self._columns.values() if isinstance(c, DaskColumn))

    def replace(self, collections: Sequence[da.Array]) -> Source:
        """Return the same source on other Dask arrays with the same chunks, usually persisted ones.

        Raises
        ------
        InputError
            If their number, chunks or types differ from `collections`.
        """
        old = self.collections()
        before, after = ([(a.chunks, a.dtype) for a in arrays] for arrays in (old, collections))
        if before != after:
            raise InputError(f"expected Dask arrays with chunks and dtypes {before}, got {after}")
        arrays = iter(collections)
        columns = {
            name: DaskColumn(name, c.rows, c.shape, c.dtype, next(arrays)) if isinstance(c, DaskColumn) else c
            for name, c in self._columns.items()
        }
        return Source(columns, self.warnings)


def make_source(data: Any, *, weights: Any = None, target: Any = None, dim: Any = None) -> Source:
    """Cut data into shards along its sample axis.

    Parameters
    ----------
    data : array or path
        Samples along the first axis. A dask array (one shard per chunk), a Zarr array or the path or
        URL of one (one shard per row of chunks), a list of NumPy blocks (one shard each), a NumPy
        array (shards of about 16 MiB), or an xarray DataArray or Dataset with ``dim``. Of bool,
        integer, float16/32/64 or complex type.
    weights : same kinds, shape (n,), optional
        Real, finite, not negative: checked now if in memory, else when a shard is loaded. As a
        DataArray it may have some of the sample dimensions and is repeated along the others.
    target : same kinds, shape (n,) or (n, t), optional
        Targets of a regression.
    dim : str or sequence of str, optional
        Sample dimension(s) of an xarray object, stacked in this order; see `labelled` for the order
        of a Dataset's features. May be left out if there is one dimension only.

    Returns
    -------
    Source

    Raises
    ------
    InputError
        For unknown chunk sizes, an empty sample axis, lengths or shapes that do not match, dimensions
        that do not exist, invalid weights.
    InputTypeError
        For types of data that are not supported, and for columns on the host beside others on a device.

    Warns
    -----
    RechunkWarning
        If a dask array had to be rechunked.

    Notes
    -----
    NumPy data travel from the client with every batch that needs them, audits included: give large
    data as a dask or Zarr array, which workers read from the source.
    """
    if data is None:
        raise InputTypeError("x is None: expected samples, see the kinds of data that are supported")
    notes: list[str] = []
    inputs = {"x": data, "weights": weights, "target": target}
    inputs = {name: value for name, value in inputs.items() if value is not None}
    if _is_labelled(data):
        from dask_sdc.graph.sources.labelled import Unlabeller

        unlabeller = Unlabeller(data, dim, notes)
        inputs = {name: unlabeller.plain(name, value) for name, value in inputs.items()}
    elif dim is not None:
        raise InputError(f"dim names dimensions of an xarray object, but x is {_typename(data)}")
    columns = {name: _column(name, value, notes) for name, value in inputs.items()}
    _check_places(columns)
    columns = {name: _aligned(column, columns["x"], notes) for name, column in columns.items()}
    for note in notes:
        warnings.warn(note, RechunkWarning, stacklevel=2)
    return Source(columns, notes)


def _column(name: str, data: Any, notes: list[str]) -> Column:
    if isinstance(data, da.Array):
        return DaskColumn.from_array(name, data, notes)
    if isinstance(data, list | tuple):
        return MemoryColumn.from_blocks(name, data)
    if isinstance(data, np.ndarray) and not isinstance(data, np.ma.MaskedArray):
        return MemoryColumn.split(name, data)
    if isinstance(data, str | os.PathLike) or namespace(data) == "zarr":
        return _zarr_column(name, data)
    raise InputTypeError(
        f"{name} is {_typename(data)}: expected a dask array, a NumPy array, a list of NumPy blocks, a Zarr "
        f"array or path, or (with x an xarray object) a DataArray or Dataset{_hint(data)}"
    )


def _zarr_column(name: str, data: Any) -> Column:
    import zarr

    from dask_sdc.graph.sources.stored import ZarrColumn, open_path, refuse_group

    if isinstance(data, str | os.PathLike):
        data = open_path(name, data)
    if isinstance(data, zarr.Group):
        refuse_group(name, data)
    return ZarrColumn.from_array(name, data)


def _aligned(column: Column, x: Column, notes: list[str]) -> Column:
    """Check weights or targets against x and cut them into the same shards."""
    if column.name == "x":
        return column
    n, total = sum(x.rows), sum(column.rows)
    if total != n:
        raise InputError(f"{column.name} has {total} rows: expected {n}, as many as x")
    if column.name == "weights":
        _check_weights(column)
    elif len(column.shape) > 1:
        raise InputError(f"target has sample shape {column.shape}: expected (n,) or (n, t)")
    return column.realign(x.rows, notes)


def _check_places(columns: Mapping[str, Column]) -> None:
    """Refuse columns of which some are known to be on the host and some on a device."""
    places = {name: column.place for name, column in columns.items() if column.place is not None}
    if len(set(places.values())) > 1:
        where = ", ".join(f"{name} on the {place}" for name, place in places.items())
        raise InputTypeError(
            f"expected all columns on the host or all on a device, got {where}; "
            "move one with x.map_blocks(cupy.asarray) or x.map_blocks(cupy.asnumpy)"
        )


def _check_weights(column: Column) -> None:
    if column.shape:
        raise InputError(f"weights have sample shape {column.shape}: expected one number a sample, (n,)")
    if column.dtype.kind == "c":
        raise InputTypeError(f"weights are {column.dtype}: expected real numbers")
    if isinstance(column, MemoryColumn):
        for index, block in enumerate(column.blocks):
            if not valid_weights(block):
                raise InputError(
                    f"block {index} of weights: expected finite weights >= 0, got {bad_weights(block)}"
                )


def _is_labelled(data: Any) -> bool:
    return namespace(data) == "xarray" and hasattr(data, "dims")


def _typename(data: Any) -> str:
    return f"{type(data).__module__}.{type(data).__qualname__}"


def _hint(data: Any) -> str:
    """Return what to do about a kind of data that is often meant."""
    hints = {
        "pandas": "; use .to_numpy()",
        "dask": "; use .to_dask_array(lengths=True) of a DataFrame, dask.array.from_delayed of a delayed",
        "distributed": "; use dask.array.from_delayed(future, shape, dtype)",
        "cupy": "; use dask.array.from_array(x, chunks=..., asarray=False)",
        "xarray": "; weights and target may be xarray objects only if x is one",
        "numpy": "; fill masked values, with .filled(np.nan) for example",
    }
    return hints.get(namespace(data), "")
