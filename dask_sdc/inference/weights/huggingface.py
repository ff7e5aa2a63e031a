"""Weights from a Hugging Face folder: config.json, *.safetensors and, if there, tokenizer.json.

The safetensors format is eight bytes of header length, a JSON header and raw little-endian data. It is
read here rather than through its library, which has no NumPy type for bfloat16.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_sdc.exceptions import InputError
from dask_sdc.inference.model.config import ModelConfig
from dask_sdc.inference.weights.naming import shapes
from dask_sdc.inference.weights.source import STORAGE

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# The limit of the format's own library.
_MAX_HEADER_BYTES = 100_000_000

_LLAMA = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_GPT2 = {
    "embed": "wte",
    "position": "wpe",
    "norm": "ln_f",
    "head": "lm_head",
    "attention_norm": "ln_1",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.o": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}

# Buffers that older versions saved beside the weights; they follow from the configuration.
_BUFFER = re.compile(r"\.(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")


@dataclass(frozen=True)
class _Stored:
    """Where a safetensors file holds a tensor."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self) -> NDArray[Any]:
        count = math.prod(self.shape)
        values = np.fromfile(self.path, STORAGE[self.dtype], count, offset=self.offset)
        return values.reshape(self.shape)


class HuggingFaceSource:
    """Tensors of a Hugging Face folder under canonical names; made by `open_huggingface`.

    Parameters
    ----------
    folder : path
        Folder with config.json and safetensors files.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self.config = ModelConfig.from_huggingface(_read_json(self._folder / "config.json"))
        self._stored = _read_headers(self._folder)
        self._prefix = "transformer." if any(name.startswith("transformer.") for name in self._stored) else ""
        self._check()

    @property
    def names(self) -> list[str]:
        """Canonical names of all tensors, in the order of the model's blocks."""
        return list(shapes(self.config))

    def dtype_of(self, name: str) -> str:
        """Return "float32", "float16" or "bfloat16"."""
        return self._stored[self._file_name(name)].dtype

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor, C-contiguous; bfloat16 as uint16."""
        values = self._stored[self._file_name(name)].read()
        if self.config.architecture == "gpt2":
            values = _from_conv1d(name, values)
        return np.ascontiguousarray(values)

    def tokenizer(self) -> bytes | None:
        """Return the content of tokenizer.json, or None if the folder has none."""
        path = self._folder / "tokenizer.json"
        return path.read_bytes() if path.exists() else None

    def _file_name(self, name: str) -> str:
        """Return the name under which the files hold a tensor."""
        table = _GPT2 if self.config.architecture == "gpt2" else _LLAMA
        stem, _, kind = name.rpartition(".")
        layers, layer, inner = "", "", stem
        if stem.startswith("layers."):
            _, layer, inner = stem.split(".", 2)
            layers = ("h." if table is _GPT2 else "model.layers.") + layer + "."
        prefix = "" if stem == "head" else self._prefix
        return f"{prefix}{layers}{table[inner]}.{kind}"

    def _check(self) -> None:
        """Refuse what is missing, of a wrong shape or not known, by name."""
        expected = {name: self._file_name(name) for name in self.names}
        if missing := sorted(set(expected.values()) - self._stored.keys()):
            raise InputError(
                f"expected the tensors {', '.join(missing)} in {self._folder}, got none of that name"
            )
        for name, shape in shapes(self.config).items():
            stored = self._stored[expected[name]]
            wanted = _conv1d_shape(name, shape) if self.config.architecture == "gpt2" else shape
            if stored.shape != wanted:
                raise InputError(f"{expected[name]}: expected shape {wanted}, got {stored.shape}")
        for name in sorted(self._stored.keys() - set(expected.values())):
            if name == "lm_head.weight" and self.config.tied_embeddings:
                self._check_tie()
            elif not _BUFFER.search(name):
                raise InputError(f"{name}: a tensor that {self.config.architecture} models do not have")

    def _check_tie(self) -> None:
        head, embed = self._stored["lm_head.weight"].read(), self.read("embed.weight")
        if not np.array_equal(head, embed):
            raise InputError(
                "lm_head.weight: expected the embedding, to which the config ties it, got another"
            )


def open_huggingface(folder: str | os.PathLike[str]) -> HuggingFaceSource:
    """Open a model folder as Hugging Face's ``save_pretrained`` writes it.

    Parameters
    ----------
    folder : str or path
        Folder with config.json, one or several safetensors files, and perhaps tokenizer.json.

    Returns
    -------
    HuggingFaceSource
        A `TensorSource`.

    Raises
    ------
    InputError
        The architecture, a field of the configuration or a tensor is not supported, missing, of a wrong
        shape or dtype, or a file is malformed. The message names it.
    """
    return HuggingFaceSource(folder)


def _conv1d_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which GPT-2's files hold a tensor: (in, out), and q, k, v side by side."""
    if ".attention." not in name and ".mlp." not in name:
        return shape
    turned = shape[::-1]
    return (*turned[:-1], 3 * turned[-1]) if _third(name) is not None else turned


def _from_conv1d(name: str, values: NDArray[Any]) -> NDArray[Any]:
    if ".attention." not in name and ".mlp." not in name:
        return values
    third = _third(name)
    if third is not None:
        values = np.split(values, 3, axis=-1)[third]
    return values.T


def _third(name: str) -> int | None:
    """Return which third of the fused projection a tensor is, None if it is not part of it."""
    found = re.search(r"\.attention\.([qkv])\.", name)
    return "qkv".index(found[1]) if found else None


def _read_headers(folder: Path) -> dict[str, _Stored]:
    found: dict[str, _Stored] = {}
    for path in _weight_files(folder):
        header, start = _read_header(path)
        for name, fields in header.items():
            if name == "__metadata__":
                continue
            if name in found:
                raise InputError(
                    f"{name}: expected in one file, got it in {found[name].path.name} and {path.name}"
                )
            found[name] = _parse(path, start, name, fields)
    return found


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InputError(f"{index}: expected a weight_map from names to files")
        # Only names within the folder, whatever the index says.
        return [folder / Path(name).name for name in sorted(set(weight_map.values()))]
    single = folder / "model.safetensors"
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"expected *.safetensors in {folder}, got none; pickled weights are not read")
    return files


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header and the offset at which the data begin."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise InputError(f"{path}: expected a safetensors header, got one of {length} bytes")
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise InputError(f"expected the file {path}, got none") from error
    except ValueError as error:
        raise InputError(f"{path}: expected a safetensors header, got {error}") from error
    if not isinstance(header, dict):
        raise InputError(f"{path}: expected a safetensors header, got {type(header).__name__}")
    return header, 8 + length


def _parse(path: Path, start: int, name: str, fields: Any) -> _Stored:
    try:
        kind, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        well_formed = all(isinstance(n, int) for n in (*shape, begin, end)) and min((1, *shape)) > 0 <= begin
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(f"{path}: expected dtype, shape and data_offsets of {name}, got {fields}") from error
    if kind not in _DTYPES:
        raise InputError(f"{name}: expected a dtype out of {', '.join(_DTYPES)}, got {kind!r} in {path}")
    dtype = _DTYPES[kind]
    if not well_formed or end - begin != math.prod(shape) * STORAGE[dtype].itemsize:
        raise InputError(f"{path}: shape {shape} of {name} does not fit its offsets {begin} to {end}")
    if start + end > path.stat().st_size:
        raise InputError(f"{path}: expected {start + end} bytes for {name}, got {path.stat().st_size}")
    return _Stored(path, dtype, shape, start + begin)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"expected the file {path}, got none") from error
    except ValueError as error:
        raise InputError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content
