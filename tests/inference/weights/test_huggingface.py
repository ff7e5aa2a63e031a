"""Hugging Face folders: hand-written ones, and ones that transformers itself saves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError
from dask_sdc.inference.weights import open_huggingface, shapes
from dask_sdc.inference.weights.huggingface import _read_headers
from tests.inference.weights.tiny import HF_LLAMA, huggingface_llama, write_huggingface, write_safetensors


def test_llama_names(tmp_path: Path) -> None:
    tensors = huggingface_llama()
    source = open_huggingface(write_huggingface(tmp_path, tensors))
    names = {
        "embed.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "layers.0.attention_norm.weight": "model.layers.0.input_layernorm.weight",
        "layers.1.attention.q.weight": "model.layers.1.self_attn.q_proj.weight",
        "layers.1.attention.k.weight": "model.layers.1.self_attn.k_proj.weight",
        "layers.1.attention.v.weight": "model.layers.1.self_attn.v_proj.weight",
        "layers.0.attention.o.weight": "model.layers.0.self_attn.o_proj.weight",
        "layers.0.mlp_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "layers.0.mlp.gate.weight": "model.layers.0.mlp.gate_proj.weight",
        "layers.1.mlp.up.weight": "model.layers.1.mlp.up_proj.weight",
        "layers.1.mlp.down.weight": "model.layers.1.mlp.down_proj.weight",
    }
    for name, file_name in names.items():
        assert np.array_equal(source.read(name), tensors[file_name]), name
        assert source.dtype_of(name) == "float32"
    assert source.names == list(shapes(source.config))


def test_formats_are_kept(tmp_path: Path) -> None:
    tensors: dict[str, Any] = huggingface_llama()
    half, brain = "model.norm.weight", "model.embed_tokens.weight"
    tensors[half] = tensors[half].astype(np.float16)
    tensors[brain] = (tensors[brain].view(np.uint32) >> 16).astype(np.uint16)
    source = open_huggingface(write_huggingface(tmp_path, tensors))
    assert (source.dtype_of("norm.weight"), source.dtype_of("embed.weight")) == ("float16", "bfloat16")
    assert source.read("norm.weight").dtype == np.float16
    assert np.array_equal(source.read("embed.weight"), tensors[brain])


def test_several_files_with_an_index(tmp_path: Path) -> None:
    tensors = huggingface_llama()
    write_huggingface(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    write_safetensors(tmp_path / "consolidated.safetensors", {"tok_embeddings": np.zeros(3, np.float32)})
    weight_map = {}
    for i, (name, values) in enumerate(tensors.items()):
        weight_map[name] = f"model-{i}.safetensors"
        write_safetensors(tmp_path / weight_map[name], {name: values})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = open_huggingface(tmp_path)
    assert np.array_equal(source.read("embed.weight"), tensors["model.embed_tokens.weight"])


def test_old_buffers_are_ignored(tmp_path: Path) -> None:
    tensors = huggingface_llama()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    open_huggingface(write_huggingface(tmp_path, tensors))


def test_head_beside_a_tied_embedding(tmp_path: Path) -> None:
    tensors = huggingface_llama()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert "head.weight" not in open_huggingface(write_huggingface(tmp_path, tensors)).names
    tensors["lm_head.weight"][3, 3] += 1
    with pytest.raises(InputError, match=r"lm_head\.weight: expected the embedding"):
        open_huggingface(write_huggingface(tmp_path, tensors))


def test_untied_head(tmp_path: Path) -> None:
    tensors = huggingface_llama()
    tensors["lm_head.weight"] = np.ones((17, 8), np.float32)
    source = open_huggingface(write_huggingface(tmp_path, tensors, tie_word_embeddings=False))
    assert (source.read("head.weight") == 1).all()


def test_tokenizer(tmp_path: Path) -> None:
    source = open_huggingface(write_huggingface(tmp_path, huggingface_llama()))
    assert source.tokenizer() is None
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    assert source.tokenizer() == b"{}"


@pytest.mark.parametrize("name", sorted(huggingface_llama()))
def test_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    tensors = huggingface_llama()
    del tensors[name]
    with pytest.raises(InputError, match=f"tensors {name} in"):
        open_huggingface(write_huggingface(tmp_path, tensors))


@pytest.mark.parametrize("name", sorted(huggingface_llama()))
def test_wrong_shape_is_named(name: str, tmp_path: Path) -> None:
    tensors = huggingface_llama()
    tensors[name] = np.concatenate([tensors[name]] * 2)
    with pytest.raises(InputError, match=rf"^{name}: expected shape \(\d+, ?\d*\), got"):
        open_huggingface(write_huggingface(tmp_path, tensors))


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    tensors = huggingface_llama() | {"model.layers.0.mlp.experts.0.w1.weight": np.ones(2, np.float32)}
    with pytest.raises(InputError, match=r"experts\.0\.w1\.weight: a tensor that llama models do not have"):
        open_huggingface(write_huggingface(tmp_path, tensors))


def test_unsupported_dtype_is_named(tmp_path: Path) -> None:
    tensors: dict[str, Any] = huggingface_llama()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)
    with pytest.raises(InputError, match=r"model\.norm\.weight: expected a dtype out of .*, got 'F64'"):
        open_huggingface(write_huggingface(tmp_path, tensors))


def test_unsupported_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'mamba'"):
        open_huggingface(write_huggingface(tmp_path, huggingface_llama(), model_type="mamba"))


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _bad_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _listed_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def _only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _short_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)


def _garbled_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((3).to_bytes(8, "little") + b"{\xff}")


def _listed_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")


def _twice(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())


def _index_of_nothing(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def _index_of_a_lost_file(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../gone.safetensors"}}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_config, r"expected the file .*config\.json, got none"),
        (_bad_config, r"config\.json: expected JSON"),
        (_listed_config, r"config\.json: expected a JSON object, got list"),
        (_only_pickles, r"expected \*\.safetensors in .* pickled weights are not read"),
        (_short_file, r"model\.safetensors: expected \d+ bytes for model\..*, got \d+"),
        (_huge_header, r"model\.safetensors: expected a safetensors header, got one of 18446744073709551615"),
        (_garbled_header, r"model\.safetensors: expected a safetensors header"),
        (_listed_header, r"model\.safetensors: expected a safetensors header, got list"),
        (_twice, r"model\.embed_tokens\.weight: expected in one file, got it in a\.safetensors and b\."),
        (_index_of_nothing, r"index\.json: expected a weight_map"),
        (_index_of_a_lost_file, r"gone\.safetensors, got none"),
    ],
)
def test_malformed_folder_is_refused(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    damage(write_huggingface(tmp_path, huggingface_llama()))
    with pytest.raises(InputError, match=message):
        open_huggingface(tmp_path)


@given(data=st.data())
@settings(max_examples=150)
def test_any_header_gives_tensors_or_a_clear_error(tmp_path_factory: Any, data: st.DataObject) -> None:
    leaf = st.none() | st.integers(-3, 2**70) | st.sampled_from(["F32", "BF16", "I8", ""]) | st.floats()
    fields = st.fixed_dictionaries(
        {},
        optional={
            "dtype": leaf,
            "shape": st.lists(leaf, max_size=2) | leaf,
            "data_offsets": st.lists(leaf) | leaf,
        },
    )
    header = data.draw(st.dictionaries(st.sampled_from(["a", "b"]), fields | leaf))
    folder = tmp_path_factory.mktemp("headers")
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(32))
    try:
        found = _read_headers(folder)
    except InputError:
        return
    for stored in found.values():
        assert stored.read().shape == stored.shape


def saved_by_transformers(kind: str, folder: Path, dtype: str = "float32", **fields: Any) -> dict[str, Any]:
    """Save a small random model and return its state."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    small: dict[str, Any]
    if kind == "gpt2":
        small = {"vocab_size": 23, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12}
        config = transformers.GPT2Config(**small | fields)
    else:
        small = {
            "vocab_size": 23,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 24,
            "max_position_embeddings": 64,
        }
        maker = transformers.MistralConfig if kind == "mistral" else transformers.LlamaConfig
        config = maker(**small | fields)
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():  # Biases and norms begin as zeros and ones.
            parameter.normal_()
    model.save_pretrained(folder)
    return {name: values.detach() for name, values in model.state_dict().items()}


LLAMA_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.1.attention.q.weight": "model.layers.1.self_attn.q_proj.weight",
    "layers.1.attention.o.weight": "model.layers.1.self_attn.o_proj.weight",
    "layers.0.mlp.down.weight": "model.layers.0.mlp.down_proj.weight",
    "norm.weight": "model.norm.weight",
}


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_llama(kind: str, tied: bool, tmp_path: Path) -> None:
    state = saved_by_transformers(kind, tmp_path, tie_word_embeddings=tied)
    source = open_huggingface(tmp_path)
    for name, file_name in LLAMA_NAMES.items():
        assert np.array_equal(source.read(name), state[file_name].numpy()), name
    assert ("head.weight" in source.names) is not tied
    if not tied:
        assert np.array_equal(source.read("head.weight"), state["lm_head.weight"].numpy())


def test_transformers_llama_with_biases_in_bfloat16(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = saved_by_transformers("llama", tmp_path, "bfloat16", attention_bias=True, mlp_bias=True)
    source = open_huggingface(tmp_path)
    for name in [*LLAMA_NAMES, "layers.0.attention.v.bias", "layers.1.mlp.gate.bias"]:
        file_name = (
            LLAMA_NAMES.get(name)
            or {
                "layers.0.attention.v.bias": "model.layers.0.self_attn.v_proj.bias",
                "layers.1.mlp.gate.bias": "model.layers.1.mlp.gate_proj.bias",
            }[name]
        )
        assert source.dtype_of(name) == "bfloat16"
        bits = state[file_name].view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(source.read(name), bits), name


def test_transformers_gpt2(tmp_path: Path) -> None:
    state = {name: v.numpy() for name, v in saved_by_transformers("gpt2", tmp_path).items()}
    source = open_huggingface(tmp_path)
    fused, bias = (state[f"transformer.h.1.attn.c_attn.{kind}"] for kind in ("weight", "bias"))
    expected = {
        "embed.weight": state["transformer.wte.weight"],
        "position.weight": state["transformer.wpe.weight"],
        "layers.1.attention.q.weight": fused[:, :16].T,
        "layers.1.attention.k.weight": fused[:, 16:32].T,
        "layers.1.attention.v.weight": fused[:, 32:].T,
        "layers.1.attention.q.bias": bias[:16],
        "layers.1.attention.k.bias": bias[16:32],
        "layers.1.attention.v.bias": bias[32:],
        "layers.0.attention.o.weight": state["transformer.h.0.attn.c_proj.weight"].T,
        "layers.0.attention.o.bias": state["transformer.h.0.attn.c_proj.bias"],
        "layers.0.attention_norm.bias": state["transformer.h.0.ln_1.bias"],
        "layers.0.mlp_norm.weight": state["transformer.h.0.ln_2.weight"],
        "layers.0.mlp.up.weight": state["transformer.h.0.mlp.c_fc.weight"].T,
        "layers.0.mlp.down.weight": state["transformer.h.0.mlp.c_proj.weight"].T,
        "layers.0.mlp.down.bias": state["transformer.h.0.mlp.c_proj.bias"],
        "norm.bias": state["transformer.ln_f.bias"],
    }
    for name, values in expected.items():
        assert np.array_equal(source.read(name), values), name
        assert source.read(name).flags.c_contiguous
    for name, shape in shapes(source.config).items():
        assert source.read(name).shape == shape


def test_gpt2_without_the_prefix_and_with_old_buffers(tmp_path: Path) -> None:
    saved_by_transformers("gpt2", tmp_path)
    wanted = {name: open_huggingface(tmp_path).read(name) for name in open_huggingface(tmp_path).names}
    safetensors = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "model.safetensors"
    old = {name.removeprefix("transformer."): v for name, v in safetensors.load_file(path).items()}
    write_safetensors(path, old | {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)})
    source = open_huggingface(tmp_path)
    assert all(np.array_equal(source.read(name), values) for name, values in wanted.items())


def test_config_of_the_hand_written_folder_is_what_it_says(tmp_path: Path) -> None:
    config = open_huggingface(write_huggingface(tmp_path, huggingface_llama())).config
    assert (config.n_layers, config.head_dim, config.vocab_size) == (2, 6, HF_LLAMA["vocab_size"])
