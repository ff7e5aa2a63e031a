"""Canonical names and shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_sdc.exceptions import InputError
from dask_sdc.inference.weights import block_names, block_shapes, shapes, tensors_of
from tests.inference.weights.tiny import GPT2, LLAMA


def test_blocks_in_order() -> None:
    assert block_names(LLAMA) == ["embed", "layers.0", "layers.1", "head"]


def test_llama_layer() -> None:
    assert block_shapes(LLAMA, "layers.1") == {
        "layers.1.attention_norm.weight": (8,),
        "layers.1.attention.q.weight": (24, 8),
        "layers.1.attention.k.weight": (12, 8),
        "layers.1.attention.v.weight": (12, 8),
        "layers.1.attention.o.weight": (8, 24),
        "layers.1.mlp_norm.weight": (8,),
        "layers.1.mlp.gate.weight": (12, 8),
        "layers.1.mlp.up.weight": (12, 8),
        "layers.1.mlp.down.weight": (8, 12),
    }


def test_gpt2_layer() -> None:
    assert block_shapes(GPT2, "layers.0") == {
        "layers.0.attention_norm.weight": (8,),
        "layers.0.attention_norm.bias": (8,),
        "layers.0.attention.q.weight": (8, 8),
        "layers.0.attention.q.bias": (8,),
        "layers.0.attention.k.weight": (8, 8),
        "layers.0.attention.k.bias": (8,),
        "layers.0.attention.v.weight": (8, 8),
        "layers.0.attention.v.bias": (8,),
        "layers.0.attention.o.weight": (8, 8),
        "layers.0.attention.o.bias": (8,),
        "layers.0.mlp_norm.weight": (8,),
        "layers.0.mlp_norm.bias": (8,),
        "layers.0.mlp.up.weight": (20, 8),
        "layers.0.mlp.up.bias": (20,),
        "layers.0.mlp.down.weight": (8, 20),
        "layers.0.mlp.down.bias": (8,),
    }


def test_outer_blocks() -> None:
    untied = replace(LLAMA, tied_embeddings=False)
    assert block_shapes(LLAMA, "embed") == {"embed.weight": (17, 8)}
    assert block_shapes(LLAMA, "head") == {"norm.weight": (8,), "embed.weight": (17, 8)}
    assert block_shapes(untied, "head") == {"norm.weight": (8,), "head.weight": (17, 8)}
    assert block_shapes(GPT2, "embed") == {"embed.weight": (17, 8), "position.weight": (10, 8)}
    assert block_shapes(GPT2, "head") == {"norm.weight": (8,), "norm.bias": (8,), "embed.weight": (17, 8)}


@pytest.mark.parametrize("config", [LLAMA, replace(LLAMA, tied_embeddings=False), GPT2])
def test_stages_cover_the_model(config: object) -> None:
    first = tensors_of(config, range(0, 1), True, False)
    last = tensors_of(config, range(1, 2), False, True)
    assert set(first) | set(last) == set(shapes(config))
    assert set(first) & set(last) == ({"embed.weight"} if config.tied_embeddings else set())
    assert tensors_of(config, range(0, 2), True, True) == list(shapes(config))


def test_stage_without_layers() -> None:
    assert tensors_of(LLAMA, range(2, 2), False, True) == ["norm.weight", "embed.weight"]


@pytest.mark.parametrize("layers", [range(0, 3), range(-1, 1), range(0, 2, 2), range(2, 1)])
def test_strange_layers_are_refused(layers: range) -> None:
    with pytest.raises(InputError, match=r"range\(0, 2\), got range"):
        tensors_of(LLAMA, layers, False, False)


@pytest.mark.parametrize(
    "block", ["layers.2", "layers.00", "layers.-1", "layers.\u0661", "tail", "layers", ""]
)
def test_unknown_block_is_refused(block: str) -> None:
    with pytest.raises(InputError, match=f"got '{block}'"):
        block_shapes(LLAMA, block)
