"""The attributes of a weight store: what it holds, with a digest of everything.

The digest of a tensor is the sha256 of its bytes in C order, little-endian. That of a block covers
the names, dtypes, shapes and digests of its tensors, and that of the model the configuration and all
blocks; each is the sha256 of JSON without spaces and with sorted keys.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from dask_sdc.exceptions import CorruptionError, InputError, SDCError
from dask_sdc.inference.model.config import ModelConfig
from dask_sdc.inference.weights.naming import block_names, block_shapes, shapes
from dask_sdc.inference.weights.source import STORAGE

FORMAT = "dask-sdc-weights"
VERSION = 1

#: Attributes of a store that is being written.
UNFINISHED: dict[str, Any] = {"format": FORMAT, "version": VERSION, "unfinished": True}


@dataclass(frozen=True)
class Entry:
    """What is known of one tensor.

    Parameters
    ----------
    dtype : {"float32", "float16", "bfloat16"}
        Its format.
    shape : tuple of int
        Its shape.
    sha256 : str
        Digest of its bytes, in hexadecimal.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * STORAGE[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """Contents of a weight store.

    Parameters
    ----------
    fields : dict
        The model's configuration as JSON values, from `ModelConfig.to_dict`.
    tensors : dict of str to Entry
        All tensors of the model, by canonical name.
    tokenizer : str or None
        sha256 of the tokenizer.json that the store holds beside the weights; not part of `digest`.
    """

    fields: dict[str, Any]
    tensors: dict[str, Entry]
    tokenizer: str | None

    @cached_property
    def config(self) -> ModelConfig:
        """Description of the model."""
        return ModelConfig.from_dict(self.fields)

    @cached_property
    def blocks(self) -> dict[str, str]:
        """Digest of every block, in hexadecimal."""
        return {block: self._block_digest(block) for block in block_names(self.config)}

    @cached_property
    def digest(self) -> str:
        """Digest of the whole model, in hexadecimal."""
        return _json_digest({"config": self.fields, "blocks": self.blocks})

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes of the store."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "config": self.fields,
            "tensors": {name: asdict(entry) for name, entry in self.tensors.items()},
            "blocks": self.blocks,
            "digest": self.digest,
            "tokenizer": self.tokenizer,
        }

    @classmethod
    def from_dict(cls, attributes: Mapping[str, Any], where: str) -> Manifest:
        """Read the attributes of a store and prove them by their digests.

        Parameters
        ----------
        attributes : Mapping
            What `to_dict` returned, after JSON.
        where : str
            The store, for messages.

        Returns
        -------
        Manifest
            What the store holds.

        Raises
        ------
        InputError
            This is no weight store, one of another version, or one whose conversion did not end.
        CorruptionError
            The attributes do not agree with one another.
        """
        _check_kind(attributes, where)
        try:
            manifest = cls(
                fields=attributes["config"],
                tensors={name: _entry(fields) for name, fields in attributes["tensors"].items()},
                tokenizer=attributes["tokenizer"],
            )
            faults = list(manifest._faults(attributes))
        except (SDCError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            text = f"the attributes of {where} are damaged: {type(error).__name__}: {error}"
            raise CorruptionError(text) from error
        if faults:
            raise CorruptionError(f"the attributes of {where} are damaged: {'; '.join(faults)}")
        return manifest

    def _block_digest(self, block: str) -> str:
        rows = [[name, *asdict(self.tensors[name]).values()] for name in block_shapes(self.config, block)]
        return _json_digest(rows)

    def _faults(self, attributes: Mapping[str, Any]) -> Iterable[str]:
        if unknown := attributes.keys() ^ self.to_dict().keys():
            yield f"unknown or missing: {', '.join(sorted(unknown))}"
        expected = shapes(self.config)
        if names := self.tensors.keys() ^ expected.keys():
            yield f"tensors that are missing or too many: {', '.join(sorted(names))}"
        for name, entry in self.tensors.items():
            if entry.shape != expected.get(name, entry.shape):
                yield f"{name} is said to be of shape {entry.shape}, expected {expected[name]}"
        if not isinstance(attributes["blocks"], dict) or attributes["blocks"].keys() != self.blocks.keys():
            yield "the list of blocks is not the model's"
        else:
            for block, digest in self.blocks.items():
                if attributes["blocks"][block] != digest:
                    tensors = ", ".join(block_shapes(self.config, block))
                    yield f"block {block} does not have its digest (one of {tensors})"
        if attributes["digest"] != self.digest:
            yield f"the model's digest is {self.digest}, expected {attributes['digest']}"
        if not (self.tokenizer is None or _is_digest(self.tokenizer)):
            yield f"the tokenizer's digest is {self.tokenizer!r}"


def _check_kind(attributes: Mapping[str, Any], where: str) -> None:
    if attributes.get("format") != FORMAT:
        raise InputError(f"expected a weight store in {where}, got attributes {sorted(attributes)}")
    if attributes.get("version") != VERSION:
        raise InputError(
            f"expected version {VERSION} of the weight store {where}, got {attributes.get('version')!r}"
        )
    if "unfinished" in attributes:
        raise InputError(f"expected a whole weight store in {where}, got one whose conversion did not end")


def _entry(fields: Mapping[str, Any]) -> Entry:
    entry = Entry(fields["dtype"], tuple(fields["shape"]), fields["sha256"])
    if len(fields) != 3 or entry.dtype not in STORAGE or not _is_digest(entry.sha256):
        raise ValueError(f"expected dtype, shape and sha256 of a tensor, got {dict(fields)}")
    return entry


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _json_digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
