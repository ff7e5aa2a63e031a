"""Logits and greedy texts against transformers, on small random models with configurations of their own."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest

from dask_sdc.inference.model import KVCache, ModelConfig, Transformer, sample

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what it would rather have installed
    transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**{**SIZES, **changes})


CASES = {
    "grouped": llama(num_key_value_heads=2),
    "tied": llama(num_key_value_heads=1, tie_word_embeddings=True),
    "biases": llama(attention_bias=True, mlp_bias=True, head_dim=16),
    "llama3": llama(num_key_value_heads=3, rope_parameters=LLAMA3),
    "linear": llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
    "mistral": (
        transformers.MistralForCausalLM,
        transformers.MistralConfig(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=9),
    ),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(
            vocab_size=97, n_embd=48, n_layer=3, n_head=4, n_positions=256, initializer_range=0.2
        ),
    ),
}

LLAMA_NAMES = {
    "model.embed_tokens": "embed",
    "model.norm": "norm",
    "lm_head": "head",
    "model.": "",
    "self_attn": "attention",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "_proj": "",
}
GPT2_NAMES = {
    "transformer.wte": "embed",
    "transformer.wpe": "position",
    "transformer.ln_f": "norm",
    "transformer.h.": "layers.",
    "ln_1": "attention_norm",
    "ln_2": "mlp_norm",
    "attn.c_proj": "attention.o",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
    "lm_head": "head",
}


def tensors_of(model: Any, config: ModelConfig) -> dict[str, np.ndarray[Any, Any]]:
    """Return a model's weights by canonical names."""
    found = {}
    for name, value in model.state_dict().items():
        array = value.detach().float().numpy().copy()
        gpt2 = config.architecture == "gpt2"
        for old, new in (GPT2_NAMES if gpt2 else LLAMA_NAMES).items():
            name = name.replace(old, new)
        if gpt2 and array.ndim == 2 and name.startswith("layers"):
            array = np.ascontiguousarray(array.T)  # Conv1D keeps (in, out)
        if "attn.c_attn" in name:
            for part, piece in zip("qkv", np.split(array, 3), strict=True):
                found[name.replace("attn.c_attn", f"attention.{part}")] = piece
        else:
            found[name] = array
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("invariant", [True, False])
def test_logits_and_greedy_text_are_theirs(name: str, invariant: bool) -> None:
    kind, settings = CASES[name]
    torch.manual_seed(7)
    theirs = kind(settings).eval()
    config = ModelConfig.from_huggingface(json.loads(settings.to_json_string()))
    ours = Transformer(
        config, range(config.n_layers), True, True, tensors_of(theirs, config), invariant=invariant
    )
    prompt = np.random.default_rng(3).integers(3, 97, (1, 33))
    with torch.no_grad():
        # Past the window and past llama3's original context.
        text = theirs.generate(
            torch.from_numpy(prompt), max_new_tokens=48, min_new_tokens=48, do_sample=False, pad_token_id=0
        ).numpy()
        logits = theirs(torch.from_numpy(text)).logits.numpy()
    kv = KVCache(config, ours.layers)
    got = ours.forward(text, kv)
    np.testing.assert_allclose(got, logits, atol=1e-4, rtol=0)
    assert greedy(ours, prompt, 48, banned=2) == text[0, 33:].tolist()


def greedy(model: Transformer, prompt: np.ndarray[Any, Any], count: int, banned: int) -> list[int]:
    """Generate without the token that ends a text, as min_new_tokens has it."""
    kv = KVCache(model.config, model.layers)
    chunk, ids = prompt, []
    for _ in range(count):
        row = model.forward(chunk, kv, rows=1)[0, 0].copy()
        if model.config.eos_ids == (banned,):
            row[banned] = -np.inf
        ids.append(sample(row, kv.length))
        chunk = np.array([ids[-1:]])
    return ids
