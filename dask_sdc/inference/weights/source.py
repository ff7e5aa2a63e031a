"""What every source of weights offers, and the three formats in which weights are kept.

NumPy has no bfloat16: such weights travel as uint16, the upper half of the float32 bits, and their
dtype is told by name.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dask_sdc.exceptions import InputError
from dask_sdc.inference.model.config import ModelConfig

#: NumPy type, little-endian, of each weight format.
STORAGE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}


class TensorSource(Protocol):
    """Weights of one model under canonical names (see `dask_sdc.inference.weights.naming`)."""

    @property
    def config(self) -> ModelConfig:
        """Description of the model."""

    @property
    def names(self) -> list[str]:
        """Canonical names of all tensors, in the order of the model's blocks."""

    def dtype_of(self, name: str) -> str:
        """Return "float32", "float16" or "bfloat16"."""

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor on the host, C-contiguous; bfloat16 as uint16."""

    def tokenizer(self) -> bytes | None:
        """Return the content of a tokenizer.json, or None where the source has none."""


def check_dtype(dtype: str) -> str:
    """Return the name of a weight format, or raise `InputError` if it is none."""
    if dtype not in STORAGE:
        raise InputError(f"expected a dtype out of {', '.join(STORAGE)}, got {dtype!r}")
    return dtype


def widen(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Return weights of a format as float32, exactly.

    Parameters
    ----------
    values : numpy.ndarray
        Weights as they are kept, of type ``STORAGE[dtype]``.
    dtype : {"float32", "float16", "bfloat16"}
        Their format.

    Returns
    -------
    numpy.ndarray of float32
        The same shape.
    """
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def narrow(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Return float32 weights in a format, rounded to nearest, ties to even.

    Parameters
    ----------
    values : numpy.ndarray of float32
        Finite weights.
    dtype : {"float32", "float16", "bfloat16"}
        The format wanted.

    Returns
    -------
    numpy.ndarray
        Of type ``STORAGE[dtype]``; infinite where the format's range is exceeded.
    """
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        # Adding half of the last place, less one bit where the place is even, and cutting off.
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(STORAGE[dtype], copy=False)


def is_finite(values: NDArray[Any], dtype: str) -> bool:
    """Say whether no weight is NaN or infinite."""
    if dtype == "bfloat16":
        return not bool(((values & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(values).all())
