"""How fast a machine decodes: one reference layer, timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dask_sdc.inference.model.cache import KVCache
from dask_sdc.inference.model.config import ModelConfig
from dask_sdc.inference.model.transformer import Transformer
from dask_sdc.inference.weights.naming import block_shapes
from dask_sdc.statistics.kernels import to_host
from dask_sdc.statistics.kernels.cuda import cupy_device, named_failures, release_unused

__all__ = ["decoding_pace", "levelled"]

Array = np.ndarray[Any, Any]

#: A layer of 51 MB, more than caches hold, as decoding is bound by reading weights.
_REFERENCE = ModelConfig(
    architecture="llama",
    vocab_size=1,
    hidden_size=1024,
    n_layers=1,
    n_heads=16,
    n_kv_heads=16,
    head_dim=64,
    intermediate_size=2816,
    max_context=16,
    sliding_window=(None,),
)

#: One of 809 MB for devices: their caches hold 51 MB, and so much is read in the time that a launch takes.
_WIDE = replace(
    _REFERENCE, hidden_size=4096, n_heads=32, n_kv_heads=32, head_dim=128, intermediate_size=11008
)

#: Passes that are timed; the best counts, as whatever else runs can only slow one down.
_PASSES = 7

#: Workers whose paces differ by less than this are taken for equally fast.
_ALIKE = 0.75


def decoding_pace(device: str = "cpu") -> float:
    """Return how many bytes of weights a second go by when one token is decoded here.

    Takes about a tenth of a second and 51 MB, on a device 2 GB of its memory for a moment; the first call in
    a process may compile.

    Parameters
    ----------
    device : {"cpu", "cuda"}
        Where it is decoded.

    Raises
    ------
    DeviceError
        If there is no device that CuPy can use, or its memory does not suffice.
    """
    with named_failures():
        if device == "cpu":
            return _pace(_REFERENCE, np)
        try:
            return _pace(_WIDE, cupy_device().xp)
        finally:
            release_unused()


def _pace(config: ModelConfig, xp: Any) -> float:
    shapes = block_shapes(config, "layers.0")
    tensors = {name: xp.full(shape, 0.01, np.float32) for name, shape in shapes.items()}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    layer = Transformer(config, range(1), False, False, tensors, xp=xp)
    del tensors
    cache = KVCache(config, range(1), capacity=_PASSES + 1, xp=xp)
    row = xp.ones((1, 1, config.hidden_size), np.float32)
    layer.forward(row, cache)
    return float(nbytes / min(_timed(layer, row, cache) for _ in range(_PASSES)))


def _timed(layer: Transformer, row: Array, cache: KVCache) -> float:
    began = time.perf_counter()
    to_host(layer.forward(row, cache))  # a device is done when its result is there
    return time.perf_counter() - began


def levelled(paces: Sequence[float]) -> list[float]:
    """Return paces relative to the fastest, those that differ by noise only made equal.

    From the fastest down, whoever reaches three quarters of the pace of the first of a group is in it.

    Parameters
    ----------
    paces : sequence of float
        Any unit, all > 0.

    Returns
    -------
    list of float
        In (0, 1], in the order in which they were given.
    """
    order = sorted(range(len(paces)), key=lambda k: -paces[k])
    found, head = [1.0] * len(paces), 0.0
    for k in order:
        if paces[k] < _ALIKE * head or not head:
            head = paces[k]
        found[k] = head / paces[order[0]]
    return found
