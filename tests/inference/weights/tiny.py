"""Tiny models in memory, and files of them written without the package's own code."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_sdc.inference.model.config import ModelConfig
from dask_sdc.inference.weights import shapes

LLAMA = ModelConfig(
    architecture="llama",
    vocab_size=17,
    hidden_size=8,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=6,
    intermediate_size=12,
    max_context=32,
    tied_embeddings=True,
)
GPT2 = ModelConfig(
    architecture="gpt2",
    vocab_size=17,
    hidden_size=8,
    n_layers=2,
    n_heads=2,
    n_kv_heads=2,
    head_dim=4,
    intermediate_size=20,
    max_context=10,
    tied_embeddings=True,
    attention_bias=True,
    mlp_bias=True,
    activation="gelu_tanh",
)

HF_LLAMA = {
    "model_type": "llama",
    "vocab_size": 17,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 12,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}

TOKENIZER = b'{"not": "read by the store"}'


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Weights of a model, all different."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes(config).items()}


@dataclass
class MemorySource:
    """A `TensorSource` of arrays in memory."""

    config: ModelConfig
    tensors: dict[str, NDArray[Any]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    text: bytes | None = TOKENIZER

    def __post_init__(self) -> None:
        self.tensors = self.tensors or random_tensors(self.config)

    @property
    def names(self) -> list[str]:
        return list(self.tensors)

    def dtype_of(self, name: str) -> str:
        return self.dtypes.get(name, "float32")

    def read(self, name: str) -> NDArray[Any]:
        return self.tensors[name]

    def tokenizer(self) -> bytes | None:
        return self.text


def huggingface_llama(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Tensors of `HF_LLAMA` under Hugging Face's names, spelled out."""
    rng = np.random.default_rng(seed)
    shapes_ = {"model.embed_tokens.weight": (17, 8), "model.norm.weight": (8,)}
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes_ |= {
            f"{layer}.input_layernorm.weight": (8,),
            f"{layer}.self_attn.q_proj.weight": (24, 8),
            f"{layer}.self_attn.k_proj.weight": (12, 8),
            f"{layer}.self_attn.v_proj.weight": (12, 8),
            f"{layer}.self_attn.o_proj.weight": (8, 24),
            f"{layer}.post_attention_layernorm.weight": (8,),
            f"{layer}.mlp.gate_proj.weight": (12, 8),
            f"{layer}.mlp.up_proj.weight": (12, 8),
            f"{layer}.mlp.down_proj.weight": (8, 12),
        }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes_.items()}


def write_safetensors(
    path: Path, tensors: dict[str, NDArray[Any]], kinds: dict[str, str] | None = None
) -> None:
    """Write a safetensors file by hand; ``kinds`` overrides the dtype that the header states."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        kind = {"f4": "F32", "f2": "F16", "f8": "F64", "u2": "BF16"}[values.dtype.str[1:]]
        raw = np.ascontiguousarray(values).tobytes()
        header[name] = {
            "dtype": (kinds or {}).get(name, kind),
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_huggingface(folder: Path, tensors: dict[str, NDArray[Any]], **config: Any) -> Path:
    """Write a model folder; keywords are added to `HF_LLAMA`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF_LLAMA | config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder
