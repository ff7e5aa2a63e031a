"""Model configurations: round trips, what Hugging Face files say, and refusals that name the field."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from dask_sdc.exceptions import InputError
from dask_sdc.inference.model import ModelConfig, RopeScaling
from tests.inference.model.reference import MODELS, small

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 100,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
}


@pytest.mark.parametrize("name", MODELS)
def test_round_trips(name: str) -> None:
    config = MODELS[name]
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_defaults_of_an_old_llama_file() -> None:
    config = ModelConfig.from_huggingface(LLAMA)
    assert (config.n_kv_heads, config.head_dim, config.max_context) == (4, 16, 2048)
    assert (config.norm_eps, config.rope_theta, config.rope_scaling) == (1e-6, 10000.0, None)
    assert config.sliding_window == (None, None)
    assert not config.tied_embeddings


def test_both_spellings_of_rope() -> None:
    scaling = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "factor": 8.0,
    }
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {**scaling, "type": "llama3"}}
    new = {**LLAMA, "rope_parameters": {**scaling, "rope_type": "llama3", "rope_theta": 5e5}}
    expected = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    for file in (old, new):
        config = ModelConfig.from_huggingface(file)
        assert (config.rope_theta, config.rope_scaling) == (5e5, expected)


def test_windows_and_ids() -> None:
    mistral = {
        **LLAMA,
        "model_type": "mistral",
        "sliding_window": 8,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
    }
    config = ModelConfig.from_huggingface(mistral)
    assert (config.sliding_window, config.bos_ids, config.eos_ids) == ((8, 8), (1,), (2, 3))
    mixed = {**mistral, "layer_types": ["full_attention", "sliding_attention"]}
    assert ModelConfig.from_huggingface(mixed).sliding_window == (None, 8)


def test_gpt2_file() -> None:
    config = ModelConfig.from_huggingface(GPT2)
    assert config.architecture == "gpt2"
    assert (config.intermediate_size, config.head_dim, config.tied_embeddings) == (256, 16, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type: .*got 'mamba'"),
        ({"model_type": None}, "model_type: .*got None"),
        ({"hidden_act": "relu"}, "hidden_act: .*got 'relu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling: .*got 'yarn'"),
        ({"rope_scaling": 3}, "rope_scaling: expected a mapping"),
        ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ({"rope_interleaved": True}, "rope_interleaved: .*got True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: .*got 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["chunked", "full_attention"]}, "layer_types: .*chunked"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types: .*sliding_attention"),
        ({"layer_types": ["full_attention"] * 3}, "sliding_window: expected 2 entries"),
        ({"num_key_value_heads": 3}, "n_kv_heads: expected a divisor of 4"),
        ({"head_dim": 15}, "head_dim: .*even number, got 15"),
        ({"vocab_size": 0}, "vocab_size: expected an int of at least 1, got 0"),
        ({"rms_norm_eps": -1.0}, "norm_eps: expected a positive number, got -1.0"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelConfig.from_huggingface({**LLAMA, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "relu"}, "activation_function"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_what_is_not_supported_of_gpt2_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelConfig.from_huggingface({**GPT2, **change})


def test_missing_and_unknown_fields_are_named() -> None:
    with pytest.raises(InputError, match="lacks 'vocab_size'"):
        ModelConfig.from_huggingface({k: v for k, v in LLAMA.items() if k != "vocab_size"})
    with pytest.raises(InputError, match="unknown fields \\['spin'\\]"):
        ModelConfig.from_dict({**small().to_dict(), "spin": 1})
    plain = small().to_dict()
    del plain["n_heads"]
    with pytest.raises(InputError, match="n_heads"):
        ModelConfig.from_dict(plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "rwkv"}, "architecture: .*got 'rwkv'"),
        ({"activation": "gelu_tanh"}, "activation: llama needs silu"),
        ({"sinks": -1}, "sinks"),
        ({"sliding_window": (0, 1, 1)}, "sliding_window"),
        ({"n_layers": True}, "n_layers"),
        ({"architecture": "gpt2", "activation": "gelu_tanh"}, "gpt2 has biases everywhere"),
    ],
)
def test_bad_values_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small(**change)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("yarn", 2.0), "got 'yarn'"),
        (("linear", 0.0), "factor"),
        (("llama3", 2.0, 4.0, 4.0), "low_freq_factor < high_freq_factor"),
        (("llama3", 2.0, 1.0, 4.0, 0), "original_context"),
    ],
)
def test_bad_rope_scaling_is_named(values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RopeScaling(*values)
