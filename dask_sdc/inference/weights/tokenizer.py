"""Text to token ids and back, through the optional `tokenizers` library.

A tokenizer is known by the content of its tokenizer.json. GGUF files hold the same facts as metadata;
`from_gguf_metadata` writes them as such a file, for byte-level BPE.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from dask_sdc.exceptions import InputError

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_BYTE_WORDS = {**_BYTES, "use_regex": True}

# How a text is cut into words, by the name that GGUF gives to it.
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_BYTE_WORDS],
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_WORDS],
    "llama-bpe": [
        {"type": "Split", "pattern": {"Regex": _LLAMA3_WORDS}, "behavior": "Isolated", "invert": False},
        _BYTES,
    ],
}

# Token types of GGUF.
_CONTROL, _USER_DEFINED = 3, 4


class Tokenizer:
    """Encodes and decodes text.

    Parameters
    ----------
    content : bytes
        A tokenizer.json, such as `TensorSource.tokenizer` returns.

    Raises
    ------
    InputError
        The content is malformed.
    ImportError
        The `tokenizers` library is not installed; ids in, ids out needs none of this.
    """

    def __init__(self, content: bytes) -> None:
        import tokenizers

        self._content = content
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # The library raises no narrower class.
            raise InputError(f"expected a tokenizer.json, got {error}") from error

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[bytes]]:
        return type(self), (self._content,)

    @property
    def digest(self) -> str:
        """sha256 of the content, in hexadecimal."""
        return hashlib.sha256(self._content).hexdigest()

    @property
    def vocab_size(self) -> int:
        """Number of tokens, with those that were added."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of a text.

        Parameters
        ----------
        text : str
            Any text.
        special : bool
            Whether to add the tokens that begin or end a text, where the model has such.

        Returns
        -------
        list of int
            Token ids.
        """
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of token ids.

        Parameters
        ----------
        ids : iterable of int
            Token ids; one that does not exist gives nothing.
        skip_special : bool
            Whether to leave out the tokens that are no text.

        Returns
        -------
        str
            The text; bytes that are no UTF-8, as of half a character, become U+FFFD.
        """
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special))


def from_gguf_metadata(metadata: Mapping[str, Any]) -> bytes | None:
    """Write the tokenizer of a GGUF file as a tokenizer.json.

    Parameters
    ----------
    metadata : Mapping of str
        The file's metadata, of which the keys ``tokenizer.ggml.*`` are used.

    Returns
    -------
    bytes or None
        The content of a tokenizer.json; None if there is no tokenizer.

    Raises
    ------
    InputError
        The tokenizer is not byte-level BPE, or cuts words in a way that is not known here.
    """
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    model = fields.get("model")
    if model in (None, "none", "no_vocab"):
        return None
    if model != "gpt2":
        raise InputError(f"tokenizer.ggml.model: expected gpt2, that is byte-level BPE, got {model!r}")
    pre = fields.get("pre")
    if pre not in _PRE_TOKENIZERS:
        raise InputError(f"tokenizer.ggml.pre: expected one of {', '.join(_PRE_TOKENIZERS)}, got {pre!r}")
    if missing := {"tokens", "merges"} - fields.keys():
        raise InputError(f"expected tokenizer.ggml.{' and '.join(sorted(missing))}, got none")
    tokens = fields["tokens"]
    content = {
        "version": "1.0",
        "added_tokens": _added(tokens, fields.get("token_type", [])),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": _template(tokens, fields),
        "decoder": _BYTE_WORDS,
        "model": {
            "type": "BPE",
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": list(fields["merges"]),
        },
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _added(tokens: list[str], types: Iterable[int]) -> list[dict[str, Any]]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": tokens[i], **plain, "special": kind == _CONTROL}
        for i, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _template(tokens: list[str], fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what puts a token before or behind every text, None if nothing does."""
    wanted = {
        kind: fields[f"{kind}_token_id"]
        for kind in ("bos", "eos")
        if fields.get(f"add_{kind}_token") and f"{kind}_token_id" in fields
    }
    if not wanted:
        return None
    piece = {kind: [{"SpecialToken": {"id": tokens[i], "type_id": 0}}] for kind, i in wanted.items()}
    begin, end = piece.get("bos", []), piece.get("eos", [])
    first, second = ([{"Sequence": {"id": name, "type_id": 0}}] for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [*begin, *first, *end],
        "pair": [*begin, *first, *end, *begin, *second, *end],
        "special_tokens": {
            tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in wanted.values()
        },
    }
