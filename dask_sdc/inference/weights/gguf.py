"""Weights from a GGUF file, through the `gguf` library: dequantised, renamed, and Q and K put back in order.

Converters to this format interleave the two halves of each rotary pair in the rows of Q and K of Llama
models; the forward pass here keeps them apart, as Hugging Face does.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_sdc.exceptions import InputError
from dask_sdc.inference.model.config import ModelConfig
from dask_sdc.inference.weights.naming import shapes
from dask_sdc.inference.weights.tokenizer import from_gguf_metadata

_NAMES = {
    "embed": "token_embd",
    "position": "position_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}
_FUSED = "attn_qkv"
_ROPE_FACTORS = "rope_freqs.weight"

_KEPT = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# Keys below the architecture's name that are read, or say nothing that changes the numbers.
_KNOWN = {
    "attention.causal",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
}


class GGUFSource:
    """Tensors of a GGUF file under canonical names; made by `open_gguf`.

    Parameters
    ----------
    path : str or path
        The file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._metadata, self._tensors = _read(path)
        self.config = _config(self._metadata, self._tensors)
        self._check()

    @property
    def names(self) -> list[str]:
        """Canonical names of all tensors, in the order of the model's blocks."""
        return list(shapes(self.config))

    def dtype_of(self, name: str) -> str:
        """Return "float32" (quantised tensors too), "float16" or "bfloat16"."""
        return _KEPT.get(self._tensors[self._file_name(name)].tensor_type.name, "float32")

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor, C-contiguous and dequantised; bfloat16 as uint16.

        Raises
        ------
        InputError
            The library cannot dequantise its type.
        """
        values = _dequantise(self._tensors[self._file_name(name)])
        part = re.search(r"\.attention\.([qkv])\.", name)
        if part and self.config.architecture == "gpt2":
            values = np.split(values, 3)["qkv".index(part[1])]
        elif part and part[1] != "v":
            heads = self.config.n_heads if part[1] == "q" else self.config.n_kv_heads
            values = separate_rotary_halves(values, heads)
        return np.ascontiguousarray(values)

    def tokenizer(self) -> bytes | None:
        """Return the tokenizer as the content of a tokenizer.json, or None if the file has none.

        Raises
        ------
        InputError
            It is not byte-level BPE of a known kind.
        """
        return from_gguf_metadata(self._metadata)

    def _file_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if not stem.startswith("layers."):
            return f"{_NAMES[stem]}.{kind}"
        _, layer, inner = stem.split(".", 2)
        fused = self.config.architecture == "gpt2" and inner in ("attention.q", "attention.k", "attention.v")
        return f"blk.{layer}.{_FUSED if fused else _NAMES[inner]}.{kind}"

    def _check(self) -> None:
        """Refuse what is missing, of a wrong shape or not known, by name."""
        expected = {name: self._file_name(name) for name in self.names}
        if missing := sorted(set(expected.values()) - self._tensors.keys()):
            raise InputError(f"expected the tensors {', '.join(missing)}, got none of that name")
        if unknown := sorted(self._tensors.keys() - set(expected.values()) - {_ROPE_FACTORS}):
            raise InputError(
                f"{', '.join(unknown)}: tensors that {self.config.architecture} models do not have"
            )
        for name, shape in shapes(self.config).items():
            wanted = (3 * shape[0], *shape[1:]) if f".{_FUSED}." in expected[name] else shape
            got = _shape(self._tensors[expected[name]])
            if got != wanted:
                raise InputError(f"{expected[name]}: expected shape {wanted}, got {got}")


def open_gguf(path: str | os.PathLike[str]) -> GGUFSource:
    """Open a GGUF file of a Llama or GPT-2 model.

    Parameters
    ----------
    path : str or path
        The file.

    Returns
    -------
    GGUFSource
        A `TensorSource`; float32, float16 and bfloat16 tensors as they are, quantised ones as float32.

    Raises
    ------
    InputError
        The file is malformed, or its architecture, a key of its metadata or a tensor is not supported;
        the message names it.
    ImportError
        The `gguf` library is not installed.
    """
    return GGUFSource(path)


def separate_rotary_halves(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Undo the order in which GGUF keeps the rows of Q and K.

    Parameters
    ----------
    values : numpy.ndarray, shape (heads * head_dim, ...)
        Per head, rows ordered (0, half), (1, half + 1) and so on.
    heads : int
        Number of heads.

    Returns
    -------
    numpy.ndarray, the same shape
        Per head, rows ordered 0, 1, …, as rotary embeddings by halves need them.
    """
    rows = len(values) // heads
    split = values.reshape(heads, rows // 2, 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return metadata and tensors, by name."""
    from gguf import GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc, unused-ignore]
        # The library reads nothing beyond the end, and so counts to whatever length a damaged array claims.
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> NDArray[Any]:
            found: NDArray[Any] = super()._get(offset, dtype, count, override_order)
            if len(found) != count:
                raise ValueError(f"ends before the {count} values at byte {offset}")
            return found

    try:
        reader = Reader(path)
        metadata = {name: _value(field) for name, field in reader.fields.items()}
    except FileNotFoundError as error:
        raise InputError(f"expected a GGUF file {path}, got none") from error
    except Exception as error:  # Malformed files make the library raise whatever comes first.
        raise InputError(f"{path}: expected a GGUF file, got {type(error).__name__}: {error}") from error
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _value(field: Any) -> Any:
    """Return a metadata value; float32 as the shortest decimal that it rounds from, such as 1e-05."""
    value = field.contents()
    if isinstance(value, float) and field.parts[-1].dtype.itemsize == 4:
        return float(str(np.float32(value)))
    return value


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape))


def _dequantise(tensor: Any) -> NDArray[Any]:
    from gguf.quants import dequantize

    kind = tensor.tensor_type.name
    if kind in ("F32", "F16"):
        return np.asarray(tensor.data).reshape(_shape(tensor))
    if kind == "BF16":
        return np.ascontiguousarray(tensor.data).view("<u2").reshape(_shape(tensor))
    try:
        return np.asarray(dequantize(tensor.data, tensor.tensor_type)).reshape(_shape(tensor))
    except (NotImplementedError, KeyError) as error:
        raise InputError(f"{tensor.name}: the type {kind} cannot be dequantised") from error


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelConfig:
    """Read the configuration out of the metadata, by way of the fields of a Hugging Face config."""
    architecture = metadata.get("general.architecture")
    if architecture not in ("llama", "gpt2"):
        raise InputError(f"general.architecture: expected llama or gpt2, got {architecture!r}")
    fields = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    if unknown := sorted(fields.keys() - _KNOWN):
        raise InputError(f"{architecture}.{unknown[0]} = {fields[unknown[0]]!r}: not supported")
    if fields.get("expert_count"):
        raise InputError(f"{architecture}.expert_count: expected none, got {fields['expert_count']}")
    if "token_embd.weight" not in tensors:
        raise InputError("expected the tensor token_embd.weight, got none of that name")
    common = {
        "model_type": architecture,
        "vocab_size": _shape(tensors["token_embd.weight"])[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    try:
        # Before anything is made for each layer: a damaged number may be huge.
        if fields["block_count"] > len(tensors):
            got = f"{fields['block_count']} blocks in {len(tensors)} tensors"
            raise InputError(f"{architecture}.block_count: expected at most one for each tensor, got {got}")
        read = _llama_fields if architecture == "llama" else _gpt2_fields
        return ModelConfig.from_huggingface(common | read(fields, tensors))
    except KeyError as error:
        raise InputError(f"expected {architecture}.{error.args[0]} in the metadata, got none") from error
    except (TypeError, ArithmeticError) as error:
        raise InputError(
            f"expected positive numbers in the metadata of {architecture}, got {fields}"
        ) from error


def _llama_fields(fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    heads, width = fields["attention.head_count"], fields["embedding_length"]
    head_dim = fields.get("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.get(key, head_dim) != head_dim:
            raise InputError(f"llama.{key}: expected {head_dim}, that of the keys, got {fields[key]}")
    return {
        "hidden_size": width,
        "num_hidden_layers": fields["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": _uniform(
            "llama.attention.head_count_kv", fields.get("attention.head_count_kv")
        ),
        "head_dim": head_dim,
        "intermediate_size": _uniform("llama.feed_forward_length", fields["feed_forward_length"]),
        "max_position_embeddings": fields["context_length"],
        "rms_norm_eps": fields["attention.layer_norm_rms_epsilon"],
        "rope_theta": fields.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(fields, tensors, head_dim),
        "sliding_window": fields.get("attention.sliding_window"),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _gpt2_fields(fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "n_embd": fields["embedding_length"],
        "n_layer": fields["block_count"],
        "n_head": fields["attention.head_count"],
        "n_positions": fields["context_length"],
        "n_inner": fields["feed_forward_length"],
        "layer_norm_epsilon": fields["attention.layer_norm_epsilon"],
    }


def _uniform(name: str, value: Any) -> Any:
    """Return a value that may be given per layer, if it is the same for all."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise InputError(f"{name}: expected the same value for all layers, got {value}")
    return value[0]


def _rope_scaling(
    fields: Mapping[str, Any], tensors: Mapping[str, Any], head_dim: int
) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type", "none")
    if _ROPE_FACTORS in tensors:
        if kind != "none":
            raise InputError(f"llama.rope.scaling.type: expected none beside {_ROPE_FACTORS}, got {kind!r}")
        theta = fields.get("rope.freq_base", 10000.0)
        return _llama3_scaling(_dequantise(tensors[_ROPE_FACTORS]), theta, head_dim)
    if kind == "none":
        return None
    return {"rope_type": kind, "factor": fields.get("rope.scaling.factor", 1.0)}


def _llama3_scaling(factors: NDArray[Any], theta: float, head_dim: int) -> dict[str, Any] | None:
    """Find the parameters that give these factors by which the rotary frequencies are divided.

    GGUF keeps the factors, a configuration the parameters. All published models have the same but for
    the largest factor, which can be read off.
    """
    factor = float(factors.max())
    if factor == 1.0:
        return None
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(factors, llama3_factors(scaling, theta, head_dim), rtol=1e-5, atol=0):
        raise InputError(f"{_ROPE_FACTORS}: expected the factors of a Llama 3 model, got others")
    return scaling


def llama3_factors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> NDArray[np.float64]:
    """Return what the rotary frequencies of a Llama 3 model are divided by.

    Parameters
    ----------
    scaling : Mapping
        The field ``rope_scaling`` of a Hugging Face configuration.
    theta : float
        Base of the frequencies.
    head_dim : int
        Size of a head.

    Returns
    -------
    numpy.ndarray of float64, shape (head_dim // 2,)
        1 for short waves, ``factor`` for those longer than the original context, in between harmonic.
    """
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    factors: NDArray[np.float64] = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return factors
