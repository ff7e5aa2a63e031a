"""Which kind of source a path is."""

from __future__ import annotations

import os
from pathlib import Path

from dask_sdc.exceptions import InputError
from dask_sdc.inference.weights.gguf import open_gguf
from dask_sdc.inference.weights.huggingface import open_huggingface
from dask_sdc.inference.weights.source import TensorSource
from dask_sdc.inference.weights.store import WeightStore


def open_source(location: str | os.PathLike[str]) -> TensorSource:
    """Open weights of any supported kind.

    Parameters
    ----------
    location : str or path
        A .gguf file, a Hugging Face folder (one with a config.json), or where a weight store is.

    Returns
    -------
    TensorSource
        The weights.

    Raises
    ------
    InputError
        It is none of these, or not supported; the message names what.
    """
    path = Path(location)
    if path.suffix == ".gguf":
        return open_gguf(path)
    if (path / "config.json").exists():
        return open_huggingface(path)
    try:
        return WeightStore.open(location)
    except InputError as error:
        if path.is_dir() and not (path / "zarr.json").exists():
            expected = "a Hugging Face folder (with config.json), a .gguf file or a weight store"
            raise InputError(f"{path}: expected {expected}, got none of them") from error
        raise
