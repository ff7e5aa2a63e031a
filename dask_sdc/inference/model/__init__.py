"""Decoders: configuration, KV cache, forward pass, sampling."""

from __future__ import annotations

from dask_sdc.inference.model.cache import KVCache
from dask_sdc.inference.model.config import ModelConfig, RopeScaling
from dask_sdc.inference.model.kernels import set_threads, threads
from dask_sdc.inference.model.sampling import sample
from dask_sdc.inference.model.transformer import Transformer

__all__ = ["KVCache", "ModelConfig", "RopeScaling", "Transformer", "sample", "set_threads", "threads"]
