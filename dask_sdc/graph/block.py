"""The unit that a kernel sees: one shard in memory."""

from __future__ import annotations

from typing import Any, NamedTuple


class Block(NamedTuple):
    """One shard in memory, on host or device.

    Parameters
    ----------
    x : array, shape (n, ...)
        Samples. Memory may belong to the reader that loaded it: see
        `dask_sdc.graph.sources.Reader` for how long it is valid.
    weights : array, shape (n,), or None
        Real, finite and not negative.
    target : array, shape (n,) or (n, t), or None
        Targets of a regression.
    """

    x: Any
    weights: Any = None
    target: Any = None
