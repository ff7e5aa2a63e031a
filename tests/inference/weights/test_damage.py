"""Damage to a converted store is refused, naming the tensor, or harmless."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from dask_sdc.exceptions import CorruptionError, InputError, SDCError
from dask_sdc.inference.weights import WeightStore, block_names, block_shapes, convert, shapes
from tests.inference.weights.tiny import LLAMA, TOKENIZER, MemorySource, random_tensors

SMALL = replace(LLAMA, n_layers=1, sliding_window=(None,))
TENSORS = random_tensors(SMALL)
NORM, QUERY = "layers.0.attention_norm.weight", "layers.0.attention.q.weight"


def contents() -> dict[str, bytes]:
    """Keys and bytes of a whole store."""
    kept: dict[str, Any] = {}
    convert(MemorySource(SMALL, TENSORS), MemoryStore(kept))
    return {key: value.to_bytes() for key, value in kept.items()}


WHOLE = contents()


def store_of(files: dict[str, bytes]) -> MemoryStore:
    make = default_buffer_prototype().buffer.from_bytes
    return MemoryStore({key: make(raw) for key, raw in files.items()}, read_only=True)


def flipped(raw: bytes, at: int, mask: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :]


def outcome(files: dict[str, bytes], names: list[str]) -> str:
    """Read tensors of a store: what is said of it, "" if all is as it was. Wrong numbers fail the test."""
    try:
        opened = WeightStore.open(store_of(files))
        for name in names:
            if name == "tokenizer":
                assert opened.tokenizer() == TOKENIZER
            else:
                assert opened.read(name).tobytes() == TENSORS[name].tobytes(), name
        assert opened.config == SMALL
        assert opened.digest == json.loads(WHOLE["zarr.json"])["attributes"]["digest"]
    except SDCError as error:
        return str(error)
    return ""


def masks(at: int) -> Iterator[int]:
    """One bit that moves with the place, and all bits."""
    yield 1 << at % 8
    yield 0xFF


def test_whole_store_is_whole() -> None:
    assert outcome(WHOLE, [*shapes(SMALL), "tokenizer"]) == ""


@pytest.mark.parametrize("name", [NORM, "layers.0.attention.k.weight", "tokenizer"])
def test_every_byte_of_the_data_and_their_checksum(name: str) -> None:
    keys = [key for key in WHOLE if key.startswith(f"{name}/c")]
    assert len(keys) == 1
    raw = WHOLE[keys[0]]
    for at in range(len(raw)):
        said = outcome(WHOLE | {keys[0]: flipped(raw, at, 1 << at % 8)}, [name])
        assert said.startswith(f"{name} is damaged"), (at, said)


def test_every_byte_of_the_array_metadata() -> None:
    name, key = NORM, f"{NORM}/zarr.json"
    refused = 0
    for at in range(len(WHOLE[key])):
        said = outcome(WHOLE | {key: flipped(WHOLE[key], at, 1 << at % 8)}, [name])
        refused += bool(said)
        assert not said or said.startswith((f"{name} is damaged", f"{name} is missing")), (at, said)
    assert refused > len(WHOLE[key]) / 2


def flips_of_attributes(step: int) -> Iterator[tuple[int, str]]:
    raw = WHOLE["zarr.json"]
    for at in range(0, len(raw), step):
        for mask in masks(at):
            yield at, outcome(WHOLE | {"zarr.json": flipped(raw, at, mask)}, [NORM])


def test_bytes_of_the_attributes() -> None:
    # A step that is prime to the line lengths meets every kind of field.
    said = [text for _, text in flips_of_attributes(7)]
    assert sum(map(bool, said)) > len(said) / 2


@pytest.mark.slow
def test_every_byte_of_the_attributes() -> None:
    said = [text for _, text in flips_of_attributes(1)]
    assert sum(map(bool, said)) > len(said) / 2


@pytest.mark.slow
def test_every_byte_of_every_file() -> None:
    for key, raw in WHOLE.items():
        name = key.split("/")[0]
        if name == "zarr.json":
            continue
        for at in range(len(raw)):
            for mask in masks(at):
                said = outcome(WHOLE | {key: flipped(raw, at, mask)}, [name])
                assert not said or name in said, (key, at, said)
                assert said or key.endswith("zarr.json"), (key, at)


@pytest.mark.parametrize("name", [*shapes(SMALL), "tokenizer"])
@pytest.mark.parametrize("lost", ["array", "metadata", "chunk"])
def test_what_is_missing_is_named(name: str, lost: str) -> None:
    prefix = {"array": f"{name}/", "metadata": f"{name}/zarr.json", "chunk": f"{name}/c"}[lost]
    files = {key: raw for key, raw in WHOLE.items() if not key.startswith(prefix)}
    assert len(files) < len(WHOLE)
    opened = WeightStore.open(store_of(files))
    said = opened.check()
    assert list(said) == [name]
    assert said[name].startswith(f"{name} is {'damaged' if lost == 'chunk' else 'missing'} in")
    if name != "tokenizer":
        with pytest.raises(CorruptionError, match=name):
            opened.load(opened.names)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 100])
def test_short_chunk(length: int) -> None:
    key = f"{QUERY}/c/0/0"
    assert outcome(WHOLE | {key: WHOLE[key][:length]}, [QUERY]).startswith(f"{QUERY} is damaged")


def test_swapped_tensors_of_the_same_shape() -> None:
    """Both have right checksums, and both are refused."""
    one, two = "layers.0.attention.k.weight", "layers.0.attention.v.weight"
    files = dict(WHOLE)
    for kind in ("zarr.json", "c/0/0"):
        files[f"{one}/{kind}"], files[f"{two}/{kind}"] = WHOLE[f"{two}/{kind}"], WHOLE[f"{one}/{kind}"]
    said = WeightStore.open(store_of(files)).check()
    assert sorted(said) == [one, two]
    assert all("expected sha256" in text for text in said.values())


def test_all_damaged_tensors_are_named_at_once() -> None:
    files = dict(WHOLE)
    for name in (NORM, QUERY):
        key = next(key for key in WHOLE if key.startswith(f"{name}/c"))
        files[key] = flipped(WHOLE[key], 3, 4)
    assert sorted(WeightStore.open(store_of(files)).check()) == sorted([NORM, QUERY])


def with_attributes(**changes: Any) -> dict[str, bytes]:
    group = json.loads(WHOLE["zarr.json"])
    group["attributes"] |= changes
    return WHOLE | {"zarr.json": json.dumps(group).encode()}


ATTRIBUTES = json.loads(WHOLE["zarr.json"])["attributes"]


def changed(name: str, **fields: Any) -> dict[str, Any]:
    tensors = json.loads(json.dumps(ATTRIBUTES["tensors"]))
    tensors[name] |= fields
    return tensors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors": changed(NORM, sha256="0" * 64)}, f"block layers.0 does not have its digest.*{NORM}"),
        ({"tensors": changed(NORM, sha256="zz")}, "expected dtype, shape and sha256"),
        ({"tensors": changed(NORM, dtype="int8")}, "expected dtype, shape and sha256"),
        ({"tensors": changed(NORM, shape=[9])}, rf"{NORM} is said to be of shape \(9,\), expected \(8,\)"),
        ({"tensors": changed(NORM, more=1)}, "expected dtype, shape and sha256"),
        ({"tensors": {}}, "damaged"),
        ({"tensors": []}, "damaged"),
        ({"tensors": ATTRIBUTES["tensors"] | {"extra": ATTRIBUTES["tensors"][NORM]}}, "too many: extra"),
        ({"blocks": {}}, "list of blocks"),
        ({"blocks": ATTRIBUTES["blocks"] | {"head": "0" * 64}}, "block head .*norm.weight, embed.weight"),
        ({"digest": "0" * 64}, "the model's digest is"),
        ({"config": ATTRIBUTES["config"] | {"rope_theta": 9.0}}, "the model's digest is"),
        ({"config": ATTRIBUTES["config"] | {"n_layers": -1}}, "n_layers"),
        ({"config": {}}, "damaged"),
        ({"config": None}, "damaged"),
        ({"tokenizer": 3}, "the tokenizer's digest is 3"),
        ({"surplus": 1}, "unknown or missing: surplus"),
    ],
)
def test_attributes_that_disagree(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptionError, match=message):
        WeightStore.open(store_of(with_attributes(**changes)))


@pytest.mark.parametrize("key", sorted(ATTRIBUTES))
def test_missing_attribute(key: str) -> None:
    group = json.loads(WHOLE["zarr.json"])
    del group["attributes"][key]
    with pytest.raises((CorruptionError, InputError)):
        WeightStore.open(store_of(WHOLE | {"zarr.json": json.dumps(group).encode()}))


def test_array_of_zeros_is_on_disk() -> None:
    """Or else a lost chunk could not be told from it."""
    zeros = TENSORS | {NORM: np.zeros(8, np.float32)}
    kept: dict[str, Any] = {}
    convert(MemorySource(SMALL, zeros), MemoryStore(kept))
    assert f"{NORM}/c/0" in kept


@pytest.mark.parametrize("block", block_names(SMALL))
def test_each_tensor_counts_for_its_block(block: str) -> None:
    plain = convert(MemorySource(SMALL, TENSORS), MemoryStore()).block_digest(block)
    for name in block_shapes(SMALL, block):
        values = TENSORS[name].copy()
        values.flat[0] += 1
        other = convert(MemorySource(SMALL, TENSORS | {name: values}), MemoryStore())
        assert other.block_digest(block) != plain, name
