"""What a sample has to be: names, dtypes, shapes and lengths of its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_sdc.exceptions import InputError, InputTypeError, InvalidSample

__all__ = ["Output", "check_outputs", "checked_sample"]

Array = np.ndarray[Any, Any]
Sample = dict[str, Array]

#: Kinds of numbers that are stored.
_KINDS = "biufc"

#: Arrays that a dataset has beside its outputs; `Layout` makes them.
RESERVED = ("sample", "valid", "failed", "reason", "checksums")


@dataclass(frozen=True)
class Output:
    """One array of a sample.

    Parameters
    ----------
    dtype : dtype
        Its dtype; a sample of another one is invalid, and never converted.
    shape : tuple of int
        Its shape; the first entry may be None for a length that differs from sample to sample.
    max_length : int, optional
        Longest such length; needed where there is one.
    layout : {"padded", "ragged"}
        How different lengths are stored. Padded: one row per sample, filled up. Ragged: one sample behind the
        other, within what a batch has room for; begin and length of each are in an index.
    like : str, optional
        Another output of variable length that it has to be as long as.
    exact : bool
        Whether it has to be the very values that were asked for: the input itself, or what the input has
        under the name of the output. So wrong ids are never stored.
    finite : bool
        Whether NaN and infinities are invalid.

    Raises
    ------
    InputError
        If they do not go together.
    InputTypeError
        If the dtype is not one of numbers.
    """

    dtype: Any
    shape: tuple[int | None, ...] = ()
    max_length: int | None = None
    layout: str = "padded"
    like: str | None = None
    exact: bool = False
    finite: bool = True

    def __post_init__(self) -> None:
        dtype = np.dtype(self.dtype).newbyteorder("<")
        if dtype.kind not in _KINDS:
            raise InputTypeError(f"dtype: expected numbers, got {dtype}")
        shape = tuple(self.shape)
        whole = shape[1:] if self.variable else shape
        if not all(map(_counts, whole)):
            raise InputError(f"shape: expected ints of at least 1, the first perhaps None, got {shape}")
        if self.variable != (self.max_length is not None):
            raise InputError(
                f"max_length: expected one where a length is None, got {self.max_length} for {shape}"
            )
        if self.max_length is not None and not _counts(self.max_length):
            raise InputError(f"max_length: expected an int of at least 1, got {self.max_length!r}")
        if self.layout not in ("padded", "ragged") or (self.layout == "ragged" and not self.variable):
            raise InputError(
                f"layout: expected 'padded', or 'ragged' for a variable length, got {self.layout!r}"
            )
        if self.like is not None and not self.variable:
            raise InputError(f"like: expected a variable length to go with {self.like!r}, got shape {shape}")
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", tuple(None if n is None else int(n) for n in shape))
        object.__setattr__(self, "max_length", None if self.max_length is None else int(self.max_length))

    @property
    def variable(self) -> bool:
        """Whether its length differs from sample to sample."""
        return bool(self.shape) and self.shape[0] is None

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of one position where the length is variable, else of the whole."""
        rest = self.shape[1:] if self.variable else self.shape
        return tuple(int(n) for n in rest if n is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return it with JSON-compatible values."""
        return {**vars(self), "dtype": self.dtype.str, "shape": list(self.shape)}


def _counts(n: Any) -> bool:
    return isinstance(n, int | np.integer) and not isinstance(n, bool) and bool(n >= 1)


def check_outputs(outputs: Any) -> dict[str, Output]:
    """Return declared outputs as a dict.

    Raises
    ------
    InputTypeError
        If it is no mapping of names to `Output`.
    InputError
        If there is none, or a name cannot be used.
    """
    if not isinstance(outputs, Mapping) or not all(isinstance(one, Output) for one in outputs.values()):
        raise InputTypeError(f"outputs: expected a mapping of names to Output, got {type(outputs).__name__}")
    if not outputs:
        raise InputError("outputs: expected one at least, got none")
    for name, output in outputs.items():
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
            raise InputError(
                f"outputs: expected names that are identifiers and none of {RESERVED}, got {name!r}"
            )
        if output.like is not None and not (output.like in outputs and outputs[output.like].variable):
            raise InputError(
                f"output {name}: expected like= an output of variable length, got {output.like!r}"
            )
    # Layout stores these beside an output of variable length.
    beside = {
        f"{name}_{what}" for name, one in outputs.items() if one.variable for what in ("begin", "length")
    }
    if taken := sorted(beside & outputs.keys()):
        raise InputError(f"outputs: expected names other than those of the index of another one, got {taken}")
    return dict(outputs)


def checked_sample(outputs: Mapping[str, Output], made: Any, asked: Any) -> Sample:
    """Return the arrays of a sample.

    Parameters
    ----------
    outputs : mapping of str to Output
        What it has to be.
    made : object
        What `produce` returned: a mapping, or for a single output its array.
    asked : object
        The input that it was made from.

    Raises
    ------
    InvalidSample
        If it is anything else.
    """
    if not isinstance(made, Mapping) and len(outputs) == 1:
        made = {next(iter(outputs)): made}
    if not isinstance(made, Mapping) or set(made) != set(outputs):
        got = sorted(map(str, made)) if isinstance(made, Mapping) else type(made).__name__
        raise InvalidSample(f"expected the arrays {sorted(outputs)}, got {got}")
    sample = {name: _checked(name, output, made[name]) for name, output in outputs.items()}
    for name, output in outputs.items():
        if output.like is not None and len(sample[name]) != len(sample[output.like]):
            raise InvalidSample(
                f"{name}: expected {len(sample[output.like])} positions, as {output.like} has, "
                f"got {len(sample[name])}"
            )
        if output.exact:
            _check_exact(name, sample[name], asked)
    return sample


def _checked(name: str, output: Output, value: Any) -> Array:
    if np.ma.is_masked(value):
        raise InvalidSample(f"{name}: expected no masked values, got some")
    array = np.asarray(value)
    if array.dtype.newbyteorder("<") != output.dtype:
        raise InvalidSample(f"{name}: expected {output.dtype}, got {array.dtype}")
    fits = array.ndim == len(output.shape) and array.shape[array.ndim - len(output.row) :] == output.row
    if not fits:
        raise InvalidSample(f"{name}: expected shape {output.shape}, got {array.shape}")
    if output.max_length is not None and len(array) > output.max_length:
        raise InvalidSample(f"{name}: expected at most {output.max_length} positions, got {len(array)}")
    if output.finite and array.dtype.kind in "fc" and not np.isfinite(array).all():
        bad = int(array.size - np.isfinite(array).sum())
        raise InvalidSample(f"{name}: expected finite values, got {bad} others")
    return np.array(array, output.dtype, order="C")  # not ascontiguousarray, which adds an axis to a scalar


def _check_exact(name: str, array: Array, asked: Any) -> None:
    wanted = asked[name] if isinstance(asked, Mapping) else asked
    wanted = np.asarray(wanted)
    if wanted.shape != array.shape or not np.array_equal(wanted, array):
        at = "another shape"
        if wanted.shape == array.shape:
            at = f"another value at {tuple(int(k) for k in np.argwhere(wanted != array)[0])}"
        raise InvalidSample(f"{name}: expected the values that were asked for, got {at}")
