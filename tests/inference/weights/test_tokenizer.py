"""Tokenizers, from a tokenizer.json and from GGUF metadata."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError
from dask_sdc.inference.weights import Tokenizer
from dask_sdc.inference.weights.tokenizer import from_gguf_metadata

tokenizers = pytest.importorskip("tokenizers")

TEXT = (
    "The quick brown fox, isn't it? 12345 times 6. Größe 東京 \U0001f600\n\n  indented text\t"
    "don't we've THEY'RE  2024-01-01 x=1; "
) * 3


def trained(pre_tokenizer: Any) -> Any:
    """A byte-level BPE trained by the library itself on a little text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=alphabet,
        special_tokens=["<|end|>", "<|begin|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def byte_level(use_regex: bool = True) -> Any:
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def split_words(name: str) -> Any:
    """The way of cutting words, built with the library's classes."""
    pre = tokenizers.pre_tokenizers
    if name == "gpt-2":
        return byte_level()
    if name == "smollm":
        return pre.Sequence([pre.Digits(individual_digits=True), byte_level()])
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre.Sequence([pre.Split(tokenizers.Regex(words), "isolated"), byte_level(False)])


def metadata_of(tokenizer: Any, pre: str, **more: Any) -> dict[str, Any]:
    """What a converter writes into a GGUF file for a tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3, 3] + [1] * (len(tokens) - 2),
        "merges": merges,
        "eos_token_id": 0,
        "bos_token_id": 1,
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | more).items()}


@pytest.fixture(scope="module", params=["gpt-2", "smollm", "llama-bpe"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Tokenizer]:
    """The library's own tokenizer, and ours made from the GGUF metadata of it."""
    original = trained(split_words(request.param))
    content = from_gguf_metadata(metadata_of(original, request.param))
    assert content is not None
    return original, Tokenizer(content)


@given(text=st.text(max_size=40) | st.text("a1 \n\t'sIN\u00e9", max_size=40))
def test_gguf_tokenizer_agrees_with_the_original(pair: tuple[Any, Tokenizer], text: str) -> None:
    original, ours = pair
    ids = original.encode(text).ids
    assert ours.encode(text) == ids
    assert ours.decode(ids, skip_special=False) == original.decode(ids, skip_special_tokens=False)


@given(text=st.text(max_size=40))
def test_text_comes_back(pair: tuple[Any, Tokenizer], text: str) -> None:
    assert pair[1].decode(pair[1].encode(text)) == text


def test_merges_matter(pair: tuple[Any, Tokenizer]) -> None:
    assert len(pair[1].encode(TEXT)) < len(TEXT.encode()) / 1.5


def test_special_tokens(pair: tuple[Any, Tokenizer]) -> None:
    ours = pair[1]
    assert ours.encode("<|end|>quick") == [0, *ours.encode("quick")]
    assert ours.decode([0, *ours.encode("quick")]) == "quick"
    assert ours.decode([0, *ours.encode("quick")], skip_special=False) == "<|end|>quick"


def test_begin_and_end_are_added_where_the_model_says_so() -> None:
    original = trained(byte_level())
    fields = metadata_of(original, "gpt-2", add_bos_token=True, add_eos_token=True)
    content = from_gguf_metadata(fields)
    assert content is not None
    ours = Tokenizer(content)
    plain = original.encode("quick fox").ids
    assert ours.encode("quick fox") == [1, *plain, 0]
    assert ours.encode("quick fox", special=False) == plain


def test_digest_size_and_pickle(pair: tuple[Any, Tokenizer]) -> None:
    original, ours = pair
    copy = pickle.loads(pickle.dumps(ours))
    assert copy.digest == ours.digest and len(ours.digest) == 64
    assert copy.encode(TEXT) == ours.encode(TEXT)
    assert ours.vocab_size == original.get_vocab_size()


def test_from_a_tokenizer_json() -> None:
    original = trained(byte_level())
    assert Tokenizer(original.to_str().encode()).encode(TEXT) == original.encode(TEXT).ids


def test_no_tokenizer() -> None:
    assert from_gguf_metadata({"general.architecture": "llama"}) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "llama"}, r"tokenizer\.ggml\.model: expected gpt2.*got 'llama'"),
        ({"pre": "tekken"}, r"tokenizer\.ggml\.pre: expected one of gpt-2.*, got 'tekken'"),
        ({"pre": None}, r"tokenizer\.ggml\.pre: .* got None"),
    ],
)
def test_unsupported_tokenizer_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_gguf_metadata(metadata_of(trained(byte_level()), **{"pre": "gpt-2"} | fields))


def test_incomplete_metadata_is_named() -> None:
    with pytest.raises(InputError, match=r"tokenizer\.ggml\.merges and tokens"):
        from_gguf_metadata({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"})


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_malformed_content_is_refused(content: bytes) -> None:
    with pytest.raises(InputError, match=r"expected a tokenizer\.json"):
        Tokenizer(content)
