"""Reading a dataset back: lazily, and proved chunk by chunk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import dask.array as da
import numpy as np
import xarray as xr
import zarr
from dask.delayed import delayed
from zarr.abc.store import Store
from zarr.errors import ContainsArrayError
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ZipStore

from dask_sdc.dataset.layout import Arrays, Layout
from dask_sdc.dataset.outputs import Array
from dask_sdc.exceptions import CheckpointError, CorruptionError, InputError, InputTypeError
from dask_sdc.inference.pipeline.base import check_int
from dask_sdc.recovery import METADATA_KEY, RecoveryMetadata

__all__ = ["batches", "location", "open_dataset", "opened", "swept", "there", "verify_dataset", "writable"]

_ELSEWHERE = "expected one that all workers reach, got one in the memory of this process"


def location(store: Any) -> Any:
    """Return a store as it means the same to every worker: a local path becomes absolute.

    Raises
    ------
    InputTypeError
        If it is no path, URL or Zarr store.
    InputError
        If it is in the memory of one process.
    """
    if isinstance(store, str | os.PathLike):
        text = os.fspath(store)
        return _url(text) if "://" in text else str(Path(text).absolute())
    if not isinstance(store, Store):
        raise InputTypeError(f"store: expected a path, a URL or a Zarr store, got {type(store).__name__}")
    if isinstance(store, MemoryStore):
        raise InputError(f"store: {_ELSEWHERE}")
    return store


def _url(url: str) -> str:
    if url.startswith("memory://"):
        raise InputError(f"store: {_ELSEWHERE}")
    try:
        FsspecStore.from_url(url)
    except (ValueError, ImportError) as error:
        raise InputError(f"store: expected a URL of a known protocol, got {url}: {error}") from error
    return url


def writable(store: Any) -> Any:
    """Return the `location` of a store to which several processes can write.

    Raises
    ------
    InputError
        If it cannot be written to, or by one process only.
    """
    found = location(store)
    if isinstance(found, ZipStore):
        raise InputError("store: expected one that several workers can write to, got a ZipStore")
    if isinstance(found, Store) and found.read_only:
        raise InputError(
            f"store: expected one that can be written to, got a read-only {type(found).__name__}"
        )
    return found


def there(store: Any) -> bool | None:
    """Say what is at a place: None for nothing, True for a dataset that was not made to its end, else False.

    Raises
    ------
    InputError
        If there is something else, which is not to be replaced.
    """
    try:
        group = zarr.open_group(location(store), mode="r")
    except FileNotFoundError:
        return None
    except ContainsArrayError as error:
        raise InputError(f"store: expected nothing or a dataset at {store}, got an array") from error
    except NotADirectoryError as error:
        raise InputError(f"store: expected a path below directories, got {store}: {error}") from error
    except Exception as error:  # whatever a changed byte makes of it
        raise _damaged(error) from error
    unfinished = Layout.unfinished(group)
    if unfinished is None:
        raise InputError(f"store: expected nothing or a dataset at {store}, got another group")
    return unfinished


def _damaged(error: Exception) -> CorruptionError:
    why = f"{type(error).__name__}: {error}"
    return CorruptionError(f"the dataset's own metadata are damaged, or cannot be read: {why}")


def opened(store: Any, mode: Literal["r", "r+"] = "r") -> tuple[Layout, dict[str, Any], Arrays]:
    """Open a dataset: its layout, its job and its arrays.

    Raises
    ------
    CheckpointError
        If there is none.
    CorruptionError
        If its metadata are damaged, naming the array.
    """
    try:
        group = zarr.open_group(location(store), mode=mode, zarr_format=3)
    except FileNotFoundError as error:
        raise CheckpointError(f"expected a dataset at {store}, got nothing there") from error
    except (InputError, InputTypeError):
        raise
    except Exception as error:  # whatever a changed byte makes of it
        raise _damaged(error) from error
    return Layout.of(group)


def swept(store: Any) -> None:
    """Remove what writers that were killed in the middle left beside the chunks of a local dataset."""
    root = store.root if isinstance(store, LocalStore) else store
    if isinstance(root, str | Path) and "://" not in str(root):
        for leftover in Path(root).rglob("*.partial"):
            leftover.unlink(missing_ok=True)


def open_dataset(store: Any) -> xr.Dataset:
    """Open a dataset lazily; every chunk is proved by its checksum when it is read.

    Parameters
    ----------
    store : path, URL or zarr.abc.store.Store
        Where it is.

    Returns
    -------
    xarray.Dataset
        With a coordinate ``sample``, ``valid`` (whether a sample is there), ``failed`` (whether it was tried
        in vain), ``reason``, and the outputs. Batches that nobody has made yet are zeros, and not valid.

    Raises
    ------
    CheckpointError, CorruptionError
        See `opened`. Computing raises CorruptionError if a chunk is damaged, naming array and samples.
    """
    return _lazily(*opened(store))


def _lazily(layout: Layout, job: dict[str, Any], arrays: Arrays) -> xr.Dataset:
    read = partial(_read, layout, arrays)
    variables = {spec.name: (spec.dims, _lazy(read, layout, spec.name)) for spec in layout.specs.values()}
    coords = {"sample": np.arange(layout.samples)}
    return xr.Dataset(variables, coords, {"version": job["version"]})


def _lazy(read: Any, layout: Layout, name: str) -> Any:
    spec = layout.specs[name]
    dtype = np.dtype(object) if spec.dtype is str else spec.dtype
    rows = [layout.region(name, batch) for batch in range(layout.batches)]
    parts = [
        da.from_delayed(delayed(read)(name, batch), (part.stop - part.start, *spec.shape[1:]), dtype=dtype)
        for batch, part in enumerate(rows)
    ]
    return da.concatenate(parts) if parts else np.zeros(spec.shape, dtype)


def _read(layout: Layout, arrays: Arrays, name: str, batch: int) -> Array:
    array = layout.read(arrays, name, batch)
    return array.astype(object) if layout.specs[name].dtype is str else array


def verify_dataset(store: Any) -> int:
    """Prove every chunk of a dataset.

    Returns
    -------
    int
        Batches that are there and proved; others were never made.

    Raises
    ------
    CorruptionError
        If anything is damaged, naming the array and the samples.
    """
    layout, _, arrays = opened(store)
    return sum(layout.prove(arrays, batch) for batch in range(layout.batches))


def batches(store: Any, size: int) -> Iterator[dict[str, Any]]:
    """Yield what is there of a dataset in batches for training, with what each of them lacks.

    Parameters
    ----------
    store : path, URL or zarr.abc.store.Store
        Where the dataset is.
    size : int
        Samples per batch.

    Yields
    ------
    dict
        Padded arrays of the samples that are there, ``sample`` with their numbers, and under
        `METADATA_KEY` a `RecoveryMetadata` for `BatchRecoveryCoordinator.consume`. A batch that lost all of
        its samples is one padded, empty sample with the number -1, so that its rank still takes part.

    Raises
    ------
    CorruptionError
        See `open_dataset`.
    """
    size = check_int("size", size, 1)
    layout, job, arrays = opened(store)
    data = _lazily(layout, job, arrays)
    for begin in range(0, layout.samples, size):
        numbers = np.arange(begin, min(layout.samples, begin + size))
        valid = data["valid"].isel(sample=numbers).to_numpy()
        failed = int(data["failed"].isel(sample=numbers).to_numpy().sum())
        there = numbers[valid]
        batch: dict[str, Any] = {"sample": there if len(there) else np.array([-1])}
        for name in layout.outputs:
            batch |= _stacked(data, layout, name, there)
        batch[METADATA_KEY] = RecoveryMetadata(failed, locally_empty=not len(there))
        yield batch


def _stacked(data: xr.Dataset, layout: Layout, name: str, there: Array) -> dict[str, Array]:
    """Return samples as one padded array, with their lengths where these differ."""
    output = layout.outputs[name]
    if not output.variable:
        return {name: _rows(data[name], there)}
    lengths = _rows(data[f"{name}_length"], there)
    if output.layout == "padded":
        return {name: _rows(data[name], there)[:, : max(1, int(lengths.max()))], f"{name}_length": lengths}
    padded = np.zeros((max(1, len(there)), max(1, int(lengths.max())), *output.row), output.dtype)
    begins = _rows(data[f"{name}_begin"], there)
    for k, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        padded[k, :length] = data[name][int(begin) : int(begin + length)].to_numpy()
    return {name: padded, f"{name}_length": lengths}


def _rows(array: xr.DataArray, there: Array) -> Array:
    if len(there):
        found: Array = array.isel(sample=there).to_numpy()
        return found
    return np.zeros((1, *array.shape[1:]), array.dtype)
