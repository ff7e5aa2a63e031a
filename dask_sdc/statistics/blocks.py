"""What the statistics accept as a block of samples, checked in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.statistics.kernels import dtype_of, is_numpy, namespace, place_of, to_host


def checked_block(x: Any, shape: tuple[int, ...]) -> Any:
    """Return ``x`` as an array of shape (n, *shape) of a supported dtype.

    Parameters
    ----------
    x : array_like
        Samples; NumPy and CuPy arrays pass through, sequences become NumPy arrays.
    shape : tuple of int
        Shape of one sample.

    Raises
    ------
    InputTypeError
        If the dtype is not bool, integer, float16/32/64 or complex64/128, or if the array is masked.
    InputError
        If the shape of a sample is another one.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise InputTypeError("expected a plain array, got a masked one; fill it with NaN and use skipna")
    if not hasattr(x, "dtype") or not hasattr(x, "__array_namespace__"):
        x = np.asarray(x)
    try:
        dtype = dtype_of(x)
    except TypeError as error:  # a type that NumPy does not know
        raise InputTypeError(f"expected an array of numbers, got {x.dtype}") from error
    kind, size = dtype.kind, dtype.itemsize
    if kind not in "biufc" or size > (16 if kind == "c" else 8):
        raise InputTypeError(f"expected bool, int, float up to 64 or complex up to 128 bits, got {x.dtype}")
    if x.ndim == 0 or tuple(x.shape[1:]) != shape:
        raise InputError(f"expected a block of shape (n, {', '.join(map(str, shape))}), got {tuple(x.shape)}")
    return x


def real_block(x: Any, shape: tuple[int, ...], what: str) -> Any:
    """Return ``x`` as by `checked_block`, refusing complex samples in the name of ``what``."""
    x = checked_block(x, shape)
    if dtype_of(x).kind == "c":
        raise InputTypeError(f"{what} needs real samples, got {x.dtype}")
    return x


def check_one_place(columns: Mapping[str, Any], what: str = "") -> None:
    """Refuse arrays of which some are on the host and some on a device.

    Parameters
    ----------
    columns : mapping of str to array
        Arrays by name; None is no array.
    what : str, optional
        What they are columns of, for the message.

    Raises
    ------
    InputTypeError
        Naming which column is where.
    """
    places = {name: place_of(array) for name, array in columns.items() if array is not None}
    if len(set(places.values())) > 1:
        where = ", ".join(f"{name} on the {place}" for name, place in places.items())
        raise InputTypeError(
            f"{what}{': ' if what else ''}expected all columns on the host or all on a device, got {where}"
        )


def weighted_rows(x: Any, weights: Any, *others: Any) -> tuple[Any, ...]:
    """Return ``(x, weights, *others)`` without the samples of weight zero.

    A sample of weight zero is the same as no sample, whatever its values are. Unweighted blocks
    (``weights`` None) pass through. Weights stay where they are: of a device, only single numbers come here.

    Returns
    -------
    tuple
        Block, weights as a float64 array of shape (n,) or None, and the other arrays. Weights are of NumPy,
        and C-contiguous, unless they came as an array of the block's own library.

    Raises
    ------
    InputError
        If weights are not one real number per sample, or any is negative or not finite.
    InputTypeError
        If some arrays are on the host and some on a device.
    """
    check_one_place({"x": x, "weights": weights, "target": others[0] if others else None})
    if weights is None:
        return (x, None, *others)
    w = _checked_weights(_alike(x, weights), int(x.shape[0]))
    keep = w > 0
    if bool(namespace(w).all(keep)):
        return (x, w, *others)
    return (_chosen(x, keep), w[keep], *(None if o is None else _chosen(o, keep) for o in others))


def weight_of(x: Any, weights: Any) -> float:
    """Return the sum of the weights of a block, as `weighted_rows` returns them."""
    return float(x.shape[0] if weights is None else namespace(weights).sum(weights))


def _alike(x: Any, weights: Any) -> Any:
    """Return weights as an array of the library of the block, or of NumPy."""
    if type(weights) is type(x) and (place_of(x) == "device" or not is_numpy(x)):
        return weights
    return np.ascontiguousarray(to_host(weights) if hasattr(weights, "dtype") else weights)


def _checked_weights(w: Any, n: int) -> Any:
    xp = namespace(w)
    if dtype_of(w).kind not in "biuf" or tuple(w.shape) != (n,):
        raise InputError(f"expected real weights of shape ({n},), got {w.dtype} of shape {tuple(w.shape)}")
    w = xp.astype(w, xp.float64, copy=False)
    bad = ~((w >= 0) & (w < float("inf")))
    if bool(xp.any(bad)):
        first = int(xp.argmax(xp.astype(bad, xp.int8)))
        raise InputError(f"expected finite weights >= 0, got {float(w[first])} at sample {first}")
    return w


def _chosen(x: Any, keep: Any) -> Any:
    """Return the rows of a block that a mask keeps, which may be NumPy's where the block is not."""
    if type(keep) is type(x):
        return x[keep]
    return x[to_host(keep) if is_numpy(x) else namespace(x).asarray(keep)]


def feature_count(shape: tuple[int, ...], what: str) -> int:
    """Return d of samples of shape (d,), d >= 1.

    Raises
    ------
    InputError
        If samples have another shape.
    """
    if len(shape) != 1 or shape[0] < 1:
        raise InputError(f"{what} needs samples of shape (d,) with d >= 1, got {tuple(shape)}")
    return shape[0]
