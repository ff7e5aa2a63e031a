"""Weight stores: what is written comes back, and what is not whole is not taken for it."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.storage import FsspecStore, LocalStore, MemoryStore, StorePath, ZipStore

from dask_sdc.exceptions import CorruptionError, InputError, InputTypeError, SDCWarning
from dask_sdc.inference.weights import (
    WeightStore,
    block_names,
    convert,
    narrow,
    open_source,
    shapes,
    store,
    tensors_of,
)
from tests.inference.weights.tiny import GPT2, LLAMA, TOKENIZER, MemorySource, random_tensors


@pytest.fixture
def memory() -> Iterator[str]:
    """URL of a folder in fsspec's memory file system, removed afterwards."""
    import fsspec

    files = fsspec.filesystem("memory")
    yield "memory://weights-of-test"
    if files.exists("/weights-of-test"):
        files.rm("/weights-of-test", recursive=True)


@pytest.fixture(params=["folder", "url", "store", "path in a store"])
def place(request: pytest.FixtureRequest, tmp_path: Path, memory: str) -> Any:
    """All kinds of destinations."""
    return {
        "folder": tmp_path / "weights",
        "url": memory,
        "store": MemoryStore(),
        "path in a store": StorePath(MemoryStore(), "models/a"),
    }[request.param]


@pytest.mark.parametrize("config", [LLAMA, replace(LLAMA, tied_embeddings=False), GPT2])
def test_all_comes_back(config: Any, place: Any) -> None:
    source = MemorySource(config)
    converted, opened = convert(source, place), WeightStore.open(place)
    assert converted.digest == opened.digest
    assert opened.config == config
    assert opened.names == list(shapes(config))
    assert opened.check() == {}
    assert opened.tokenizer() == TOKENIZER
    assert opened.tokenizer_digest == hashlib.sha256(TOKENIZER).hexdigest()
    for name, values in opened.load(opened.names).items():
        assert values.tobytes() == source.tensors[name].tobytes() and values.dtype == np.float32
        assert np.array_equal(opened.read(name, verify=False), values)


def test_without_a_tokenizer() -> None:
    opened = convert(MemorySource(LLAMA, text=None), MemoryStore())
    assert opened.tokenizer() is None and opened.tokenizer_digest is None and opened.check() == {}
    assert opened.digest == convert(MemorySource(LLAMA), MemoryStore()).digest


def test_unsupported_tokenizer_is_left_out_with_a_warning() -> None:
    class Strange(MemorySource):
        def tokenizer(self) -> bytes | None:
            raise InputError("tokenizer.ggml.model: expected gpt2, got 'llama'")

    with pytest.warns(SDCWarning, match="gets no tokenizer: tokenizer.ggml.model"):
        opened = convert(Strange(LLAMA), MemoryStore())
    assert opened.tokenizer() is None and opened.check() == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(dtype: str) -> None:
    source = MemorySource(LLAMA)
    opened = convert(source, MemoryStore(), dtype=dtype)
    for name, values in source.tensors.items():
        assert opened.dtype_of(name) == dtype
        assert opened.read(name).tobytes() == narrow(values, dtype).tobytes()
    size = 4 if dtype == "float32" else 2
    assert opened.nbytes(["norm.weight", "embed.weight", "norm.weight"]) == size * (8 + 17 * 8)
    assert opened.nbytes() == size * sum(map(math.prod, shapes(LLAMA).values()))


def test_mixed_formats_are_kept() -> None:
    source = MemorySource(LLAMA, random_tensors(LLAMA), {"norm.weight": "bfloat16"})
    source.tensors["norm.weight"] = narrow(source.tensors["norm.weight"], "bfloat16")
    opened = convert(source, MemoryStore())
    assert (opened.dtype_of("norm.weight"), opened.dtype_of("embed.weight")) == ("bfloat16", "float32")
    assert opened.read("norm.weight").dtype == np.uint16


def test_store_is_a_source() -> None:
    first = convert(MemorySource(LLAMA), MemoryStore())
    again = convert(first, MemoryStore())
    assert again.digest == first.digest and again.tokenizer() == TOKENIZER
    assert convert(first, MemoryStore(), dtype="float16").digest != first.digest


@given(
    seed=st.integers(0, 2**16),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    layers=st.integers(1, 2),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
@settings(max_examples=8)
def test_any_model_comes_back(seed: int, heads: tuple[int, int], layers: int, dtype: str) -> None:
    config = replace(
        LLAMA, n_heads=heads[0], n_kv_heads=heads[1], n_layers=layers, sliding_window=(None,) * layers
    )
    source = MemorySource(config, random_tensors(config, seed))
    opened = convert(source, MemoryStore(), dtype=dtype)
    assert all(opened.read(n).tobytes() == narrow(v, dtype).tobytes() for n, v in source.tensors.items())


def test_layout_of_the_store(tmp_path: Path) -> None:
    """Any Zarr library can read it, and any sha256 proves it."""
    source = MemorySource(LLAMA)
    opened = convert(source, tmp_path)
    group = zarr.open_group(tmp_path, mode="r")
    attributes = dict(group.attrs)
    assert attributes["format"] == "dask-sdc-weights" and attributes["version"] == 1
    for name, values in source.tensors.items():
        assert np.array_equal(group[name][...], values)
        assert attributes["tensors"][name] == {
            "dtype": "float32",
            "shape": list(values.shape),
            "sha256": hashlib.sha256(values.tobytes()).hexdigest(),
        }
        metadata = json.loads((tmp_path / name / "zarr.json").read_text())
        assert [codec["name"] for codec in metadata["codecs"]] == ["bytes", "crc32c"]
    rows = [
        ["norm.weight", *attributes["tensors"]["norm.weight"].values()],
        ["embed.weight", *attributes["tensors"]["embed.weight"].values()],
    ]
    order = ["dtype", "shape", "sha256"]
    assert list(attributes["tensors"]["norm.weight"]) == order
    head = hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
    assert opened.block_digest("head") == attributes["blocks"]["head"] == head
    whole = {"blocks": attributes["blocks"], "config": attributes["config"]}
    text = json.dumps(whole, separators=(",", ":"), sort_keys=True)
    assert opened.digest == attributes["digest"] == hashlib.sha256(text.encode()).hexdigest()


def test_chunks_are_whole_rows_below_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_CHUNK_BYTES", 5 * 8 * 4 + 3)
    source = MemorySource(LLAMA)
    opened = convert(source, tmp_path)
    assert zarr.open_array(tmp_path / "embed.weight", mode="r").chunks == (5, 8)
    assert zarr.open_array(tmp_path / "layers.0.attention.o.weight", mode="r").chunks == (1, 24)
    assert all(np.array_equal(opened.read(name), values) for name, values in source.tensors.items())


def test_digests_tell_models_apart() -> None:
    source = MemorySource(LLAMA)
    plain = convert(source, MemoryStore())
    changed = random_tensors(LLAMA)
    changed["layers.1.mlp.up.weight"][3, 3] = np.nextafter(changed["layers.1.mlp.up.weight"][3, 3], 9)
    other = convert(MemorySource(LLAMA, changed), MemoryStore())
    differing = [b for b in block_names(LLAMA) if plain.block_digest(b) != other.block_digest(b)]
    assert differing == ["layers.1"] and plain.digest != other.digest
    same_weights = convert(MemorySource(replace(LLAMA, rope_theta=9.0), source.tensors), MemoryStore())
    assert same_weights.digest != plain.digest
    assert same_weights.block_digest("head") == plain.block_digest("head")


def test_load_reports_progress_in_this_thread() -> None:
    opened = convert(MemorySource(LLAMA), MemoryStore())
    names = tensors_of(LLAMA, range(1, 2), False, True)
    seen: dict[str, int] = {}

    def progress(name: str, nbytes: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        seen[name] = nbytes

    loaded = opened.load(names, progress)
    assert list(loaded) == names
    assert seen == {name: values.nbytes for name, values in loaded.items()}


def test_several_threads_read_at_once() -> None:
    source = MemorySource(LLAMA)
    opened = convert(source, MemoryStore())
    with ThreadPoolExecutor(4) as pool:
        for loaded in pool.map(lambda _: opened.load(opened.names), range(8)):
            assert all(np.array_equal(loaded[name], values) for name, values in source.tensors.items())


def test_pickle(tmp_path: Path) -> None:
    opened = convert(MemorySource(LLAMA), tmp_path)
    assert np.array_equal(
        pickle.loads(pickle.dumps(opened)).read("embed.weight"), opened.read("embed.weight")
    )


def test_read_only_store_and_zip(tmp_path: Path) -> None:
    source = MemorySource(LLAMA)
    digest = convert(source, tmp_path / "weights").digest
    read_only = WeightStore.open(LocalStore(tmp_path / "weights", read_only=True))
    assert read_only.digest == digest and read_only.check() == {}
    shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "weights")
    for location in (
        tmp_path / "packed.zip",
        str(tmp_path / "packed.zip"),
        ZipStore(tmp_path / "packed.zip"),
    ):
        packed = WeightStore.open(location)
        assert packed.digest == digest and packed.check() == {}


def test_folder_without_write_permission(tmp_path: Path) -> None:
    digest = convert(MemorySource(LLAMA), tmp_path / "weights").digest
    for path in [*(tmp_path / "weights").rglob("*"), tmp_path / "weights"]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert WeightStore.open(tmp_path / "weights").digest == digest
    finally:
        for path in [tmp_path / "weights", *(tmp_path / "weights").rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.mark.parametrize("read_only", ["store", "zip"])
def test_destination_that_cannot_be_written(read_only: str, tmp_path: Path) -> None:
    places = {"store": MemoryStore(read_only=True), "zip": ZipStore(tmp_path / "a.zip", mode="w")}
    with pytest.raises(InputError, match="destination that can be written and rewritten"):
        convert(MemorySource(LLAMA), places[read_only])
    assert list(tmp_path.iterdir()) == []


def test_taken_destination(place: Any) -> None:
    first = convert(MemorySource(LLAMA), place).digest
    with pytest.raises(InputError, match=r"overwrite=True \(--overwrite on the command line\) replaces it"):
        convert(MemorySource(GPT2), place)
    assert WeightStore.open(place).digest == first
    second = convert(MemorySource(GPT2), place, overwrite=True)
    assert second.digest != first and second.check() == {}
    assert WeightStore.open(place).names == list(shapes(GPT2))


@pytest.mark.parametrize("what", ["file", "array", "group"])
def test_nothing_else_is_overwritten(what: str, tmp_path: Path) -> None:
    if what == "file":
        (tmp_path / "thesis.tex").write_text("years of work")
    elif what == "array":
        zarr.create_array(tmp_path, shape=3, dtype="f4")[:] = 1
    else:
        zarr.create_group(tmp_path).attrs["title"] = "years of work"
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    # Old versions of Zarr do not say that there is an array.
    with pytest.raises((InputError, CorruptionError), match=r"got something else in|is damaged"):
        convert(MemorySource(LLAMA), tmp_path, overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def _missing(source: MemorySource) -> None:
    del source.tensors["norm.weight"]


def _nan(source: MemorySource) -> None:
    source.tensors["norm.weight"][1] = np.nan


def _shape(source: MemorySource) -> None:
    source.tensors["norm.weight"] = np.ones(9, np.float32)


def _large(source: MemorySource) -> None:
    source.tensors["norm.weight"][1] = 70000


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_missing, r"lacks the tensors norm\.weight"),
        (_nan, r"norm\.weight: expected finite weights"),
        (_shape, r"norm\.weight: expected shape \(8,\), got \(9,\)"),
        (_large, r"norm\.weight: has weights beyond the range of float16"),
    ],
)
def test_bad_source_is_named(spoil: Callable[[MemorySource], None], message: str) -> None:
    source = MemorySource(LLAMA)
    spoil(source)
    with pytest.raises(InputError, match=message):
        convert(source, MemoryStore(), dtype="float16")


def test_unknown_dtype_touches_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="got 'int4'"):
        convert(MemorySource(LLAMA), tmp_path / "weights", dtype="int4")
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize("at", [0, 1, 7, 19, len(shapes(LLAMA))])
@pytest.mark.parametrize("replaced", [False, True])
def test_interrupted_conversion(at: int, replaced: bool) -> None:
    """A conversion that ends at any tensor is not taken for a whole one, and can be done over."""
    place = MemoryStore()
    if replaced:
        convert(MemorySource(LLAMA, random_tensors(LLAMA, 1)), place)

    class Interrupted(MemorySource):
        left = at

        def read(self, name: str) -> Any:
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            return super().read(name)

        def tokenizer(self) -> bytes | None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(Interrupted(LLAMA), place, overwrite=replaced)
    with pytest.raises(InputError, match="whose conversion did not end"):
        WeightStore.open(place)
    assert convert(MemorySource(LLAMA), place, overwrite=True).check() == {}


def test_write_that_does_not_stick_is_seen() -> None:
    """Storage that loses a bit on the way: the conversion says so, and leaves nothing that looks whole."""

    class Lossy(MemoryStore):
        async def set(self, key: str, value: Any, byte_range: Any = None) -> None:
            if key == "layers.0.mlp.up.weight/c/0/0":
                raw = bytearray(value.to_bytes())
                raw[5] ^= 1
                value = type(value).from_bytes(bytes(raw))
            await super().set(key, value, byte_range)

    place = Lossy()
    with pytest.raises(CorruptionError, match=r"^layers\.0\.mlp\.up\.weight is damaged"):
        convert(MemorySource(LLAMA), place)
    with pytest.raises(InputError, match="did not end"):
        WeightStore.open(place)


def test_nothing_there(tmp_path: Path, memory: str) -> None:
    for location in (tmp_path / "none", memory, MemoryStore(), tmp_path / "none.zip"):
        with pytest.raises(InputError, match="expected a weight store in"):
            WeightStore.open(location)
    assert list(tmp_path.iterdir()) == []


def test_relative_path_is_that_of_whoever_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = pickle.loads(pickle.dumps(convert(MemorySource(LLAMA), "model")))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert store.check() == {}
    assert str(tmp_path / "model") in store.location


def test_something_else_there() -> None:
    place = MemoryStore()
    zarr.create_group(place, attributes={"title": "temperatures"})
    with pytest.raises(InputError, match=r"expected a weight store in .*\['title'\]"):
        WeightStore.open(place)
    array = MemoryStore()
    zarr.create_array(array, shape=3, dtype="f4")
    with pytest.raises((InputError, CorruptionError), match=r"got nothing or something else|is damaged"):
        WeightStore.open(array)


def test_other_version() -> None:
    place = MemoryStore()
    convert(MemorySource(LLAMA), place)
    zarr.open_group(place, mode="r+").attrs["version"] = 2
    with pytest.raises(InputError, match=r"expected version 1 of the weight store .*, got 2"):
        WeightStore.open(place)


def test_location_of_another_type() -> None:
    with pytest.raises(InputTypeError, match="got int"):
        WeightStore.open(3)


def test_unknown_names() -> None:
    opened = convert(MemorySource(LLAMA), MemoryStore())
    for act in (opened.read, opened.dtype_of, lambda name: opened.load([name]), lambda n: opened.nbytes([n])):
        with pytest.raises(InputError, match=r"got 'layers\.9\.q'"):
            act("layers.9.q")
    with pytest.raises(InputError, match="got 'tail'"):
        opened.block_digest("tail")


def test_unreachable_storage_stays_an_os_error() -> None:
    """A network that is down says nothing about the weights."""

    class Down(MemoryStore):
        down = False

        async def get(self, *args: Any, **kwargs: Any) -> Any:
            if Down.down:
                raise ConnectionResetError("no route")
            return await super().get(*args, **kwargs)

        def get_sync(self, *args: Any, **kwargs: Any) -> Any:
            if Down.down:
                raise ConnectionResetError("no route")
            return super().get_sync(*args, **kwargs)

    opened = convert(MemorySource(LLAMA), Down())
    Down.down = True
    with pytest.raises(ConnectionResetError) as caught:
        opened.load(["norm.weight"])
    assert "while reading norm.weight" in caught.value.__notes__[0]
    with pytest.raises(ConnectionResetError):
        opened.check()


def test_fsspec_store_object(memory: str) -> None:
    digest = convert(MemorySource(LLAMA), memory).digest
    assert WeightStore.open(FsspecStore.from_url(memory, read_only=True)).digest == digest


def test_source_of_no_known_kind_is_told_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    expected = r"expected a Hugging Face folder .*, a \.gguf file or a weight store, got none of them"
    with pytest.raises(InputError, match=expected):
        open_source(tmp_path)
    with pytest.raises(InputError, match="got nothing or something else"):
        open_source(tmp_path / "gone")
