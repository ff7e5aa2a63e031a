"""Canonical names and shapes of a decoder's tensors, whatever file they come from.

::

    embed.weight  (V, D)                 position.weight  (max_context, D)          GPT-2 only
    layers.{i}.attention_norm.weight     (D,)                                       .bias: GPT-2
    layers.{i}.attention.q.weight        (n_heads * head_dim, D)
    layers.{i}.attention.{k,v}.weight    (n_kv_heads * head_dim, D)
    layers.{i}.attention.o.weight        (D, n_heads * head_dim)
    layers.{i}.mlp_norm.weight           (D,)                                       .bias: GPT-2
    layers.{i}.mlp.{gate,up}.weight      (intermediate, D)                          gate: Llama only
    layers.{i}.mlp.down.weight           (D, intermediate)
    norm.weight  (D,)                    head.weight  (V, D)                        absent if tied

Every linear weight is (out, in). A *block* is what a stage loads or leaves: ``embed``, ``layers.{i}``
or ``head``. With tied embeddings ``embed.weight`` belongs to both ``embed`` and ``head``.
"""

from __future__ import annotations

from collections.abc import Iterator

from dask_sdc.exceptions import InputError
from dask_sdc.inference.model.config import ModelConfig


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a model, in the order of its blocks."""
    found: dict[str, tuple[int, ...]] = {}
    for block in block_names(config):
        found |= block_shapes(config, block)
    return found


def block_names(config: ModelConfig) -> list[str]:
    """Return ``embed``, ``layers.0`` …, ``head``."""
    return ["embed", *(f"layers.{layer}" for layer in range(config.n_layers)), "head"]


def block_shapes(config: ModelConfig, block: str) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each tensor of one block.

    Parameters
    ----------
    config : ModelConfig
        The model.
    block : str
        One of `block_names`.

    Returns
    -------
    dict of str to tuple of int
        Shapes by canonical name.

    Raises
    ------
    InputError
        The model has no such block.
    """
    if block == "embed":
        return dict(_embedding(config))
    if block == "head":
        return dict(_head(config))
    kind, _, layer = block.partition(".")
    if kind != "layers" or not layer.isdecimal() or int(layer) >= config.n_layers or layer != str(int(layer)):
        raise InputError(f"expected embed, layers.0 to layers.{config.n_layers - 1} or head, got {block!r}")
    return {f"{block}.{name}": shape for name, shape in _layer(config)}


def tensors_of(config: ModelConfig, layers: range, first: bool, last: bool) -> list[str]:
    """Return the names of the tensors that a stage needs.

    Parameters
    ----------
    config : ModelConfig
        The model.
    layers : range
        The stage's layers; step 1, within ``range(config.n_layers)``.
    first, last : bool
        Whether the stage embeds token ids, and whether it computes logits.

    Returns
    -------
    list of str
        Canonical names, without repetition.

    Raises
    ------
    InputError
        The layers are not a run of the model's layers.
    """
    if layers.step != 1 or not 0 <= layers.start <= layers.stop <= config.n_layers:
        raise InputError(f"expected a run of layers within range(0, {config.n_layers}), got {layers}")
    blocks = [*(["embed"] if first else []), *(f"layers.{i}" for i in layers), *(["head"] if last else [])]
    return list(dict.fromkeys(name for block in blocks for name in block_shapes(config, block)))


def _embedding(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embed.weight", (config.vocab_size, config.hidden_size)
    if config.architecture == "gpt2":
        yield "position.weight", (config.max_context, config.hidden_size)


def _head(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _norm(config, "norm")
    yield ("embed" if config.tied_embeddings else "head") + ".weight", (config.vocab_size, config.hidden_size)


def _layer(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    yield from _norm(config, "attention_norm")
    yield from _linear("attention.q", heads, width, config.attention_bias)
    yield from _linear("attention.k", kv_heads, width, config.attention_bias)
    yield from _linear("attention.v", kv_heads, width, config.attention_bias)
    yield from _linear("attention.o", width, heads, config.attention_bias)
    yield from _norm(config, "mlp_norm")
    if config.architecture == "llama":
        yield from _linear("mlp.gate", inner, width, config.mlp_bias)
    yield from _linear("mlp.up", inner, width, config.mlp_bias)
    yield from _linear("mlp.down", width, inner, config.mlp_bias)


def _norm(config: ModelConfig, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (config.hidden_size,)
    if config.architecture == "gpt2":
        yield f"{name}.bias", (config.hidden_size,)


def _linear(name: str, out: int, width: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out, width)
    if bias:
        yield f"{name}.bias", (out,)
