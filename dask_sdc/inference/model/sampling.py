"""The next token from a row of logits, a function of position and seed and of nothing that came before."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_sdc.exceptions import InputError, NonFiniteError

__all__ = ["sample"]

_U64 = (1 << 64) - 1


def sample(
    logits: np.ndarray[Any, Any], position: int, seed: int = 0, temperature: float = 0.0, top_p: float = 1.0
) -> int:
    """Return the token that stands at a position.

    The random number is Philox's, keyed by seed and position (Salmon et al. 2011): whoever computes the same
    logits at the same position draws the same token, in whatever order, after whatever failure.

    Parameters
    ----------
    logits : ndarray, shape (V,)
        One row of logits.
    position : int
        Position of the token that is drawn, at least 0.
    seed : int
        Seed of the text.
    temperature : float
        Divides the logits; 0 takes the largest, the lowest id of several.
    top_p : float
        Mass of the smallest set of likeliest tokens that is drawn from, in (0, 1]; the token that reaches it
        belongs to it, and of equally likely tokens the lower id comes first.

    Returns
    -------
    int
        The token id.

    Raises
    ------
    InputError
        If a setting is out of range.
    NonFiniteError
        If there is a NaN, or no largest logit.
    """
    if not (np.isfinite(temperature) and temperature >= 0):
        raise InputError(f"temperature: expected a finite number of at least 0, got {temperature!r}")
    if not 0 < top_p <= 1:
        raise InputError(f"top_p: expected a number in (0, 1], got {top_p!r}")
    if logits.ndim != 1 or not logits.size or position < 0:
        raise InputError(f"expected logits (V,) and position >= 0, got {logits.shape} and {position}")
    best = int(np.argmax(logits))  # the first of several, and the first NaN if there is one
    if not np.isfinite(logits[best]):
        raise NonFiniteError(f"position {position}: expected a finite largest logit, got {logits[best]}")
    if temperature == 0:
        return best
    weights = np.exp((logits.astype(np.float64) - np.float64(logits[best])) / temperature)
    ids = np.arange(len(weights))
    if top_p < 1:
        ids = _nucleus(weights, top_p)
        weights = weights[ids]
    total = np.cumsum(weights)  # one after the other, so in a fixed order
    bits = np.random.Philox(key=np.array([seed & _U64, position], np.uint64))
    drawn = np.random.Generator(bits).random() * total[-1]
    return int(ids[min(np.searchsorted(total, drawn, side="right"), len(ids) - 1)])


def _nucleus(weights: np.ndarray[Any, Any], top_p: float) -> np.ndarray[Any, Any]:
    """Return the ids of the nucleus, the likeliest first (Holtzman et al. 2020)."""
    total = float(np.cumsum(weights)[-1])
    # Whatever lies at or below this has at most 1 - top_p together: sorting the rest is enough.
    likely = np.flatnonzero(weights > (1 - top_p) * total / len(weights) * (1 - 1e-9))
    ordered = likely[np.argsort(-weights[likely], kind="stable")]
    mass = np.cumsum(weights[ordered])
    return ordered[: int(np.searchsorted(mass, top_p * total, side="left")) + 1]
