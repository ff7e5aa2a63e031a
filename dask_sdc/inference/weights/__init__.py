"""Weights: read from Hugging Face folders and GGUF files, kept in Zarr, proved by digest."""

from dask_sdc.inference.weights.formats import open_source
from dask_sdc.inference.weights.gguf import GGUFSource, open_gguf
from dask_sdc.inference.weights.huggingface import HuggingFaceSource, open_huggingface
from dask_sdc.inference.weights.naming import block_names, block_shapes, shapes, tensors_of
from dask_sdc.inference.weights.source import TensorSource, narrow, widen
from dask_sdc.inference.weights.store import WeightStore, convert
from dask_sdc.inference.weights.tokenizer import Tokenizer

__all__ = [
    "GGUFSource",
    "HuggingFaceSource",
    "TensorSource",
    "Tokenizer",
    "WeightStore",
    "block_names",
    "block_shapes",
    "convert",
    "narrow",
    "open_gguf",
    "open_huggingface",
    "open_source",
    "shapes",
    "tensors_of",
    "widen",
]
