"""xarray objects, brought to plain arrays whose first axis is the sample axis.

Sample dimensions are stacked in the order in which the caller names them (the last varies fastest).
A DataArray keeps its other dimensions, in their own order, as the shape of a sample. A Dataset
becomes (n, p): its variables in the order of ``data_vars``, each with its other dimensions flattened
in C order, side by side, in the type that NumPy promotes all of them to. A variable that lacks some
of the sample dimensions is repeated along them; one that has none of them is refused.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from xarray.core.indexing import ExplicitlyIndexed

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.graph.sources.column import check_dtype, even_rows
from dask_sdc.graph.sources.lazy import rows_only

Labelled = xr.DataArray | xr.Dataset


class Unlabeller:
    """Turns xarray objects that share sample dimensions into plain arrays.

    Parameters
    ----------
    data : DataArray or Dataset
        The samples; weights and targets are aligned to its sample dimensions.
    dim : str, sequence of str or None
        Sample dimension(s); None if there is only one dimension.
    notes : list of str
        Receives remarks for the user.

    Raises
    ------
    InputError
        If a dimension does not exist or is not named although there are several.
    """

    def __init__(self, data: Labelled, dim: Any, notes: list[str]) -> None:
        self._data = data
        self._notes = notes
        names = sample_dims(data, dim)
        self.sizes: Mapping[Hashable, int] = {name: data.sizes[name] for name in names}

    def plain(self, name: str, obj: Any) -> Any:
        """Return a NumPy or Dask array; anything that is not an xarray object comes back as it is."""
        if not isinstance(obj, xr.DataArray | xr.Dataset):
            return obj
        self._check_labels(name, obj)
        if isinstance(obj, xr.DataArray):
            return self._stack(name, obj.variable)
        return self._features(name, obj)

    def _check_labels(self, name: str, obj: Labelled) -> None:
        shared = [dim for dim in self.sizes if dim in obj.dims]
        if not shared:
            raise InputError(
                f"{name} has none of the sample dimensions {tuple(self.sizes)}: got {tuple(obj.dims)}"
            )
        if obj is self._data:
            return
        try:
            exclude = (set(obj.dims) | set(self._data.dims)) - set(shared)
            xr.align(self._data, obj, join="exact", copy=False, exclude=exclude)
        except ValueError as error:
            raise InputError(f"{name} does not line up with x along {shared}: {error}") from error

    def _features(self, name: str, dataset: xr.Dataset) -> Any:
        if not dataset.data_vars:
            raise InputError(f"{name} is a Dataset without data variables: expected at least one")
        columns = []
        for key, array in dataset.data_vars.items():
            if not set(array.dims) & set(self.sizes):
                raise InputError(
                    f"variable {key!r} of {name} has none of the sample dimensions {tuple(self.sizes)}, "
                    f"only {array.dims}: select variables first, as in ds[[...]]"
                )
            stacked = self._stack(f"variable {key!r} of {name}", array.variable)
            columns.append(stacked.reshape((stacked.shape[0], -1)) if stacked.ndim != 2 else stacked)
        dtype = np.result_type(*(column.dtype for column in columns))
        columns = [column.astype(dtype) for column in columns]
        if not any(isinstance(column, da.Array) for column in columns):
            return np.concatenate(columns, axis=1)
        joined: Any = da.concatenate(columns, axis=1)
        return joined.rechunk({1: -1})

    def _stack(self, name: str, variable: xr.Variable) -> Any:
        """Move the sample dimensions first and merge them into one axis."""
        check_dtype(name, variable.dtype)
        variable = self._lazy(variable)
        other = [d for d in variable.dims if d not in self.sizes]
        sizes = dict(self.sizes) | {d: variable.sizes[d] for d in other}
        if any(d not in variable.dims for d in self.sizes):
            variable = variable.set_dims(sizes)  # type: ignore[no-untyped-call]
        array: Any = variable.transpose(*sizes).data
        shape = (math.prod(self.sizes.values()), *(sizes[d] for d in other))
        if isinstance(array, np.ndarray):
            return array.reshape(shape)
        if not isinstance(array, da.Array):
            raise InputTypeError(f"{name} holds a {type(array).__qualname__}: expected a NumPy or Dask array")
        array = rows_only(name, array, self._notes)
        return array if array.shape == shape else array.reshape(shape)

    def _lazy(self, variable: xr.Variable) -> xr.Variable:
        """Chunk a variable that is still in its file, so that workers read it and not the client."""
        if variable._in_memory or not isinstance(variable._data, ExplicitlyIndexed):
            return variable
        first = next(d for d in self.sizes if d in variable.dims)
        n = max(variable.sizes[first], 1)
        rows = even_rows(n, variable.nbytes // n)
        return variable.chunk({first: max(rows, default=1)})


def sample_dims(data: Labelled, dim: Any) -> tuple[Hashable, ...]:
    """Return the sample dimensions that the caller means.

    Raises
    ------
    InputError
        Naming the dimensions that there are.
    """
    have = tuple(data.dims)
    if dim is None and len(have) == 1:
        return have
    if dim is None:
        raise InputError(f"dim is needed: expected the sample dimension(s) of x, one or more of {have}")
    names = (dim,) if isinstance(dim, str) or not isinstance(dim, Iterable) else tuple(dim)
    if not names or len(set(names)) != len(names):
        raise InputError(f"dim: expected distinct dimensions out of {have}, got {names}")
    missing = [name for name in names if name not in have]
    if missing:
        raise InputError(f"dim: x has no dimension {missing}; it has {have}")
    return names
