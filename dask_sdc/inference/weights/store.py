"""Weights in a Zarr v3 group, one array per tensor, each of which proves itself as it is read.

A store is written so that what an interrupted conversion leaves is never taken for a whole one: the
attributes that describe it come last. Every chunk has a crc32c; every tensor, every block and the
whole model have a sha256 (see `dask_sdc.inference.weights.manifest`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.store import Store
from zarr.codecs import BytesCodec, Crc32cCodec
from zarr.core.sync import sync
from zarr.errors import ContainsArrayError
from zarr.storage import FsspecStore, LocalStore, StorePath, ZipStore

from dask_sdc.exceptions import CorruptionError, InputError, InputTypeError, SDCWarning
from dask_sdc.inference.model.config import ModelConfig
from dask_sdc.inference.weights.manifest import FORMAT, UNFINISHED, Entry, Manifest
from dask_sdc.inference.weights.naming import shapes
from dask_sdc.inference.weights.source import STORAGE, TensorSource, check_dtype, is_finite, narrow, widen

_TOKENIZER = "tokenizer"
_CHUNK_BYTES = 16 * 2**20
# Enough to hide the latency of an object store; local disks and hashing are happy with fewer.
_READERS = 8


class WeightStore:
    """Proved, read-only access to converted weights; made by `open` or `convert`.

    It is itself a `TensorSource`, can be pickled if its Zarr store can, and may be used from several
    threads at once.

    Parameters
    ----------
    root : zarr.storage.StorePath
        Where the group lives.
    manifest : Manifest
        Its attributes, checked.
    """

    def __init__(self, root: StorePath, manifest: Manifest) -> None:
        self._root = root
        self._manifest = manifest

    @classmethod
    def open(cls, location: Any) -> WeightStore:
        """Open a store and prove its attributes; tensors are proved when they are read.

        Parameters
        ----------
        location : str, path, zarr.abc.store.Store, zarr.storage.StorePath or WeightStore
            A folder, a .zip file, an fsspec URL such as ``s3://bucket/model``, or a Zarr store.

        Returns
        -------
        WeightStore
            Read-only access.

        Raises
        ------
        InputError
            There is no weight store, or one of another version, or one whose conversion did not end.
        InputTypeError
            The location is of another type.
        CorruptionError
            The attributes are damaged.
        OSError
            The storage cannot be reached.
        """
        if isinstance(location, WeightStore):
            return location
        root = _locate(location, read_only=True)
        return cls(root, Manifest.from_dict(_attributes(root), str(root)))

    @property
    def location(self) -> str:
        """Where the store is, for messages."""
        return str(self._root)

    @property
    def config(self) -> ModelConfig:
        """Description of the model."""
        return self._manifest.config

    @property
    def names(self) -> list[str]:
        """Canonical names of all tensors, in the order of the model's blocks."""
        return list(shapes(self.config))

    @property
    def digest(self) -> str:
        """sha256 of configuration and weights, in hexadecimal; the tokenizer is not part of it."""
        return self._manifest.digest

    @property
    def tokenizer_digest(self) -> str | None:
        """sha256 of the tokenizer.json kept beside the weights, in hexadecimal."""
        return self._manifest.tokenizer

    def block_digest(self, block: str) -> str:
        """Return the sha256 of ``embed``, ``layers.{i}`` or ``head``, in hexadecimal.

        Raises
        ------
        InputError
            The model has no such block.
        """
        try:
            return self._manifest.blocks[block]
        except KeyError:
            known = ", ".join(self._manifest.blocks)
            raise InputError(f"expected one of the blocks {known}, got {block!r}") from None

    def dtype_of(self, name: str) -> str:
        """Return the format of a tensor: "float32", "float16" or "bfloat16" (read as uint16)."""
        return self._entry(name).dtype

    def nbytes(self, names: Iterable[str] | None = None) -> int:
        """Return the size in bytes of the named tensors, without repetition, or of all."""
        return sum(self._entry(name).nbytes for name in set(self.names if names is None else names))

    def read(self, name: str, verify: bool = True) -> NDArray[Any]:
        """Read one tensor.

        Parameters
        ----------
        name : str
            Its canonical name.
        verify : bool
            Whether to prove it by its sha256; the checksums of chunks are checked always.

        Returns
        -------
        numpy.ndarray
            The tensor, C-contiguous; bfloat16 as uint16.

        Raises
        ------
        InputError
            The model has no such tensor.
        CorruptionError
            It is missing or damaged.
        OSError
            The storage cannot be reached.
        """
        entry = self._entry(name)
        with _blaming(name, self.location):
            values = _read_array(self._root / name, STORAGE[entry.dtype], entry.shape)
            if verify:
                _prove(values, entry.sha256)
        return values

    def load(
        self, names: Iterable[str], progress: Callable[[str, int], None] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Read several tensors in parallel, each proved by its sha256.

        Parameters
        ----------
        names : iterable of str
            Canonical names, such as `tensors_of` gives for a stage.
        progress : callable, optional
            Called in this thread with name and size in bytes as each tensor arrives.

        Returns
        -------
        dict of str to numpy.ndarray
            In the order asked for.

        Raises
        ------
        InputError, CorruptionError, OSError
            As in `read`, for the first of the names that fails.
        """
        wanted = list(dict.fromkeys(names))
        for name in wanted:
            self._entry(name)
        with ThreadPoolExecutor(_READERS, "sdc-weights") as pool:
            futures = {pool.submit(self.read, name): name for name in wanted}
            try:
                for future in as_completed(futures):
                    values = future.result()
                    if progress is not None:
                        progress(futures[future], values.nbytes)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return {name: future.result() for future, name in futures.items()}

    def copy(self, names: Iterable[str], destination: str | os.PathLike[str]) -> WeightStore:
        """Copy some tensors, one at a time, into a folder.

        What an interrupted copy leaves is never taken for a whole one: its attributes, which are those of
        this store but for the tokenizer, come last. Each tensor is proved when it is read here, and when it
        was written there; one that was not copied is missing there when it is read.

        Parameters
        ----------
        names : iterable of str
            Canonical names, such as `tensors_of` gives for a stage.
        destination : str or path
            A new or empty folder, or one with an older or interrupted copy, which is replaced.

        Returns
        -------
        WeightStore
            The copy, open, with the digests of this store.

        Raises
        ------
        InputError
            The model has no such tensor, or the folder holds something else.
        CorruptionError
            A tensor is missing or damaged here, or was not written as it is.
        OSError
            One of the two cannot be reached.
        """
        wanted = list(dict.fromkeys(names))
        for name in wanted:
            self._entry(name)
        root = _locate(destination, read_only=False)
        _claim(root, overwrite=True)
        for name in wanted:
            _write_array(root, name, self.read(name))
        zarr.Group.open(root, zarr_format=3).attrs.put(replace(self._manifest, tokenizer=None).to_dict())
        return WeightStore.open(destination)

    def tokenizer(self) -> bytes | None:
        """Return the proved content of tokenizer.json, or None if the store has none.

        Raises
        ------
        CorruptionError, OSError
            As in `read`.
        """
        if self._manifest.tokenizer is None:
            return None
        with _blaming(_TOKENIZER, self.location):
            values = _read_array(self._root / _TOKENIZER, np.dtype("u1"), None)
            _prove(values, self._manifest.tokenizer)
        return values.tobytes()

    def check(self) -> dict[str, str]:
        """Read and prove everything in the store.

        Returns
        -------
        dict of str to str
            What is wrong, by the name of the tensor ("tokenizer" for that); empty if nothing is.

        Raises
        ------
        OSError
            The storage cannot be reached.
        """

        def reason(read: Callable[[], Any]) -> str | None:
            try:
                read()
            except CorruptionError as error:
                return str(error)
            return None

        readers: dict[str, Callable[[], Any]] = {name: partial(self.read, name) for name in self.names}
        readers[_TOKENIZER] = self.tokenizer
        with ThreadPoolExecutor(_READERS, "sdc-weights") as pool:
            reasons = dict(zip(readers, pool.map(reason, readers.values()), strict=True))
        return {name: why for name, why in reasons.items() if why is not None}

    def _entry(self, name: str) -> Entry:
        try:
            return self._manifest.tensors[name]
        except KeyError:
            raise InputError(f"expected the name of a tensor in {self.location}, got {name!r}") from None


def convert(
    source: TensorSource, destination: Any, *, dtype: str | None = None, overwrite: bool = False
) -> WeightStore:
    """Write a model's weights, and its tokenizer if it has one, into a weight store.

    Every tensor is read back and compared before the store is declared whole.

    Parameters
    ----------
    source : TensorSource
        Such as `open_huggingface`, `open_gguf` or `WeightStore.open` return.
    destination : str, path, zarr.abc.store.Store or zarr.storage.StorePath
        An empty or new folder, fsspec URL or Zarr store that can replace what it has written (a zip
        file cannot: convert into a folder and pack that).
    dtype : {"float32", "float16", "bfloat16"}, optional
        Format of all weights, rounded to nearest; by default each keeps its own.
    overwrite : bool
        Whether to replace a weight store that is there already. Nothing else is ever overwritten.

    Returns
    -------
    WeightStore
        The new store, open.

    Raises
    ------
    InputError
        The destination is taken or cannot be written; the source lacks a tensor, or one has a wrong
        shape, or values that are not finite or do not fit the format. The message names it.
    CorruptionError
        What was read back from the destination is not what was written.

    Warns
    -----
    SDCWarning
        The source has a tokenizer of a kind that is not supported; the store is written without it.
    """
    if dtype is not None:
        check_dtype(dtype)
    expected = shapes(source.config)
    if missing := [name for name in expected if name not in set(source.names)]:
        raise InputError(f"the source lacks the tensors {', '.join(missing)}")
    root = _locate(destination, read_only=False)
    _claim(root, overwrite)
    entries = {name: _copy(source, name, shape, root, dtype) for name, shape in expected.items()}
    manifest = Manifest(
        # As it will be read, so that the digest is the same before and after.
        fields=json.loads(json.dumps(source.config.to_dict())),
        tensors=entries,
        tokenizer=_copy_tokenizer(source, root),
    )
    zarr.Group.open(root, zarr_format=3).attrs.put(manifest.to_dict())
    return WeightStore.open(destination)


def _copy(
    source: TensorSource, name: str, shape: tuple[int, ...], root: StorePath, dtype: str | None
) -> Entry:
    values, format_ = source.read(name), source.dtype_of(name)
    if values.shape != shape:
        raise InputError(f"{name}: expected shape {shape}, got {values.shape}")
    if not is_finite(values, format_):
        raise InputError(f"{name}: expected finite weights, got NaN or infinity")
    if dtype not in (None, format_):
        values = narrow(widen(values, format_), dtype)
        format_ = dtype
        if not is_finite(values, format_):
            raise InputError(f"{name}: has weights beyond the range of {format_}")
    return Entry(format_, shape, _write_array(root, name, values))


def _copy_tokenizer(source: TensorSource, root: StorePath) -> str | None:
    try:
        content = source.tokenizer()
    except InputError as error:
        # Ids in, ids out works without.
        warnings.warn(f"the store gets no tokenizer: {error}", SDCWarning, stacklevel=3)
        return None
    return None if content is None else _write_array(root, _TOKENIZER, np.frombuffer(content, np.uint8))


def _write_array(root: StorePath, name: str, values: NDArray[Any]) -> str:
    """Write an array, prove it by reading it back, and return its sha256."""
    values = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    row = max(1, math.prod(values.shape[1:]) * values.itemsize)
    sha256 = hashlib.sha256(values.data).hexdigest()
    array = zarr.create_array(
        root / name,
        shape=values.shape,
        dtype=values.dtype,
        chunks=(max(1, min(len(values), _CHUNK_BYTES // row)), *values.shape[1:]),
        filters=None,
        serializer=BytesCodec(endian="little"),
        compressors=[Crc32cCodec()],
        fill_value=0,
        # Or else a chunk of zeros would be indistinguishable from one that was lost.
        config={"write_empty_chunks": True},
    )
    array[...] = values
    with _blaming(name, str(root)):
        _prove(_read_array(root / name, values.dtype, values.shape), sha256)
    return sha256


def _read_array(path: StorePath, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> NDArray[Any]:
    """Read an array after checking that its metadata say what they must; None allows any length."""
    array = zarr.Array.open(path)
    if array.dtype != dtype or (array.shape != shape if shape is not None else array.ndim != 1):
        got = f"{array.dtype} of shape {array.shape}"
        raise ValueError(f"expected {dtype} of shape {'(n,)' if shape is None else shape}, got {got}")
    return np.ascontiguousarray(array[...], dtype)


def _prove(values: NDArray[Any], sha256: str) -> None:
    found = hashlib.sha256(values.data).hexdigest()
    if found != sha256:
        raise ValueError(f"expected sha256 {sha256}, got {found}")


@contextmanager
def _blaming(name: str, where: str) -> Iterator[None]:
    """Turn whatever damaged bytes make Zarr raise into a `CorruptionError` that names the tensor.

    Only the failure to reach the storage stays what it is.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptionError(f"{name} is missing in {where}") from error
    except OSError as error:
        error.add_note(f"while reading {name} in {where}")
        raise
    except Exception as error:
        text = f"{name} is damaged in {where}: {type(error).__name__}: {error}"
        raise CorruptionError(text) from error


def _locate(location: Any, *, read_only: bool) -> StorePath:
    if isinstance(location, StorePath):
        return location
    if isinstance(location, Store):
        return StorePath(location)
    if isinstance(location, str) and "://" in location:
        return StorePath(FsspecStore.from_url(location, read_only=read_only))
    if not isinstance(location, str | os.PathLike):
        expected = "a path, an fsspec URL or a Zarr store"
        raise InputTypeError(f"weight store: expected {expected}, got {type(location).__name__}")
    # Absolute, as workers have folders of their own to be relative to.
    path = Path(location).absolute()
    if path.suffix == ".zip":
        return StorePath(ZipStore(path, mode="r"))
    return StorePath(LocalStore(path, read_only=read_only))


def _attributes(root: StorePath) -> dict[str, Any]:
    """Open the store, if it is not open yet, and read the attributes of the group."""
    try:
        sync(StorePath.open(root.store, root.path))
        return dict(zarr.Group.open(root, zarr_format=3).attrs)
    except (FileNotFoundError, ContainsArrayError) as error:
        raise InputError(
            f"expected a weight store in {root}, got nothing or something else; `dask sdc weights convert` "
            "makes one of a Hugging Face folder or a GGUF file"
        ) from error
    except OSError:
        raise
    except Exception as error:
        raise CorruptionError(f"{root} is damaged: {type(error).__name__}: {error}") from error


def _claim(root: StorePath, overwrite: bool) -> None:
    """Mark the destination as unfinished, after making sure that nothing is lost by it."""
    if root.read_only or not (root.store.supports_writes and root.store.supports_deletes):
        raise InputError(
            f"expected a destination that can be written and rewritten, got {root}, read-only or a zip"
        )
    if not sync(root.is_empty()):
        try:
            found = _attributes(root).get("format")
        except InputError:
            found = None
        if found != FORMAT:
            raise InputError(f"expected an empty destination or a weight store, got something else in {root}")
        if not overwrite:
            raise InputError(
                f"expected an empty destination, got a weight store in {root}; overwrite=True (--overwrite "
                "on the command line) replaces it"
            )
        # Before the first array goes, so that no interruption leaves a store that looks whole.
        zarr.Group.open(root, zarr_format=3).attrs.put(UNFINISHED)
    zarr.create_group(root, zarr_format=3, overwrite=True, attributes=UNFINISHED)
