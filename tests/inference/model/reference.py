"""Small models, and the whole forward pass over again in float64, one plain formula after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_sdc.inference.model.config import ModelConfig, RopeScaling
from dask_sdc.inference.weights.naming import shapes

Array = np.ndarray[Any, Any]

LLAMA3 = RopeScaling("llama3", 4.0, 1.0, 4.0, 32)


def small(**changes: Any) -> ModelConfig:
    """Return a llama of three layers; head_dim 12 is no whole vector."""
    values: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": 61,
        "hidden_size": 40,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 12,
        "intermediate_size": 52,
        "max_context": 600,
        "norm_eps": 1e-5,
    }
    return ModelConfig(**{**values, **changes})


def small_gpt2(**changes: Any) -> ModelConfig:
    """Return a GPT-2 of two layers."""
    return small(
        **{
            "architecture": "gpt2",
            "n_layers": 2,
            "n_kv_heads": 4,
            "head_dim": 10,
            "tied_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "activation": "gelu_tanh",
            "max_context": 200,
            **changes,
        }
    )


MODELS = {
    "llama": small(),
    "tied": small(tied_embeddings=True, n_kv_heads=1),
    "biases": small(attention_bias=True, mlp_bias=True, n_kv_heads=4, rope_theta=500.0),
    "linear": small(rope_scaling=RopeScaling("linear", 2.0)),
    "llama3": small(rope_scaling=LLAMA3),
    "window": small(sliding_window=(7, None, 9)),
    "sinks": small(sliding_window=(7, None, 9), sinks=2),
    "gpt2": small_gpt2(),
}


def random_tensors(config: ModelConfig, seed: int = 0, dtype: str = "float32") -> dict[str, Array]:
    """Return weights that keep activations of order one and give logits a clear largest."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes(config).items():
        values = rng.normal(size=shape) / (np.sqrt(shape[-1]) if len(shape) > 1 else 4.0)
        if "norm.weight" in name:
            values += 1.0
        if name == "embed.weight":
            values *= np.sqrt(shape[-1])
        tensors[name] = _stored(values.astype(np.float32), dtype)
    return tensors


def _stored(values: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def logits(config: ModelConfig, tensors: dict[str, Array], ids: Array) -> Array:
    """Return the logits (T, V) of one sequence of ids (T,) in float64."""
    w = {name: _widened(value) for name, value in tensors.items()}
    h = w["embed.weight"][ids]
    if config.architecture == "gpt2":
        h = h + w["position.weight"][: len(ids)]
    for i in range(config.n_layers):
        at = f"layers.{i}"
        x = _norm(config, w, f"{at}.attention_norm", h)
        h = h + _attention(config, w, i, x)
        x = _norm(config, w, f"{at}.mlp_norm", h)
        up = _linear(w, f"{at}.mlp.up", x)
        if config.architecture == "llama":
            gate = _linear(w, f"{at}.mlp.gate", x)
            inner = gate / (1 + np.exp(-gate)) * up
        else:
            inner = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        h = h + _linear(w, f"{at}.mlp.down", inner)
    head = w["embed.weight"] if config.tied_embeddings else w["head.weight"]
    return _norm(config, w, "norm", h) @ head.T


def _widened(value: Array) -> Array:
    if value.dtype == np.uint16:
        value = (value.astype(np.uint32) << 16).view(np.float32)
    return value.astype(np.float64)


def _linear(w: dict[str, Array], name: str, x: Array) -> Array:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def _norm(config: ModelConfig, w: dict[str, Array], name: str, x: Array) -> Array:
    if config.architecture == "gpt2":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps)
    return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)


def _attention(config: ModelConfig, w: dict[str, Array], layer: int, x: Array) -> Array:
    at, size = f"layers.{layer}.attention", len(x)
    q, k, v = (_linear(w, f"{at}.{part}", x).reshape(size, -1, config.head_dim) for part in "qkv")
    if config.architecture == "llama":
        q, k = _rotated(config, q), _rotated(config, k)
    window = config.sliding_window[layer] or size
    out = np.zeros_like(q)
    for t in range(size):
        seen = [j for j in range(t + 1) if j > t - window or j < config.sinks]
        for head in range(config.n_heads):
            kv = head // config.group
            scores = k[seen, kv] @ q[t, head] / np.sqrt(config.head_dim)
            p = np.exp(scores - scores.max())
            out[t, head] = p / p.sum() @ v[seen, kv]
    return _linear(w, f"{at}.o", out.reshape(size, -1))


def _rotated(config: ModelConfig, x: Array) -> Array:
    half = config.head_dim // 2
    out = np.empty_like(x)
    for i in range(half):
        frequency = _frequency(config, i)
        for t in range(len(x)):
            turn = np.exp(1j * t * frequency) * (x[t, :, i] + 1j * x[t, :, i + half])
            out[t, :, i], out[t, :, i + half] = turn.real, turn.imag
    return out


def _frequency(config: ModelConfig, i: int) -> float:
    frequency = float(config.rope_theta ** (-2 * i / config.head_dim))
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    wave = 2 * np.pi / frequency
    if wave > scaling.original_context / scaling.low_freq_factor:
        return frequency / scaling.factor
    if wave < scaling.original_context / scaling.high_freq_factor:
        return frequency
    smooth = (scaling.original_context / wave - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency
