"""Stages of a transformer over a weight store: identity, proof of the weights, and what travels."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dask_sdc.evidence.codec import encode
from dask_sdc.exceptions import ContextOverflow, CorruptionError, InputError
from dask_sdc.inference.model import KVCache, ModelConfig, Transformer
from dask_sdc.inference.stage import Stage, TransformerStage
from dask_sdc.inference.weights import WeightStore, convert
from tests.inference.model.reference import random_tensors, small
from tests.inference.weights.tiny import MemorySource

CONFIG = small(n_layers=4, tied_embeddings=True)


def stored(path: Path, config: ModelConfig = CONFIG, seed: int = 0) -> WeightStore:
    return convert(MemorySource(config, random_tensors(config, seed)), str(path / f"weights{seed}"))


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return stored(tmp_path)


def three(store: WeightStore) -> list[TransformerStage]:
    stages = [TransformerStage(store, layers) for layers in (range(1), range(1, 3), range(3, 4))]
    for stage in stages:
        stage.load()
    return stages


def test_three_stages_compute_what_the_whole_model_does(store: WeightStore) -> None:
    stages, ids = three(store), np.arange(12).reshape(1, 12)
    whole = Transformer(CONFIG, range(4), True, True, random_tensors(CONFIG))
    kv = KVCache(CONFIG, range(4))
    states: list[Any] = [stage.init(capacity=50) for stage in stages]
    for at in range(0, 12, 3):
        chunk: Any = ids[:, at : at + 3]
        for stage, state in zip(stages, states, strict=True):
            chunk = stage.forward(chunk, state, rows=1)
        assert chunk.tobytes() == whole.forward(ids[:, at : at + 3], kv, rows=1).tobytes()
    assert [stage.position(state) for stage, state in zip(stages, states, strict=True)] == [12] * 3
    joined: dict[str, Any] = {}
    for stage, state in zip(stages, states, strict=True):
        joined |= stage.snapshot(state)
    assert encode(joined) == encode(kv.snapshot())


def test_positions_are_taken_back(store: WeightStore) -> None:
    stage = three(store)[1]
    x = np.random.default_rng(0).normal(size=(1, 8, 40)).astype(np.float32)
    state = stage.init()
    stage.forward(x, state)
    stage.truncate(state, 3)
    again = stage.forward(x[:, 3:], state)
    assert stage.position(state) == 8
    assert again.tobytes() == stage.forward(x, stage.init())[:, 3:].tobytes()


def test_a_stage_reads_its_own_block_only(store: WeightStore) -> None:
    seen: list[tuple[str, int]] = []
    stage = TransformerStage(store, range(1, 3), progress=lambda name, size: seen.append((name, size)))
    stage.load()
    assert {name[:9] for name, _ in seen} == {"layers.1.", "layers.2."}
    assert sum(size for _, size in seen) == stage.nbytes == store.nbytes(stage.names)
    assert sorted(name for name, _ in seen) == sorted(stage.names)
    assert stage.bytes_per_position == 2 * 2 * 2 * 16 * 4


def test_first_and_last_follow_from_the_layers(store: WeightStore) -> None:
    assert [(s.first, s.last) for s in three(store)] == [(True, False), (False, False), (False, True)]
    headless = TransformerStage(store, range(4), last=False)
    headless.load()
    assert headless.forward(np.zeros((1, 2), int), headless.init()).shape == (1, 2, 40)


def test_a_damaged_block_does_not_load(tmp_path: Path) -> None:
    store = stored(tmp_path)
    path = next((tmp_path / "weights0" / "layers.2.mlp.up.weight").rglob("c/*/*"))
    content = bytearray(path.read_bytes())
    content[100] ^= 4
    path.write_bytes(content)
    good, bad = TransformerStage(store, range(2)), TransformerStage(store, range(1, 3))
    good.load()
    with pytest.raises(CorruptionError, match=r"layers\.2\.mlp\.up\.weight"):
        bad.load()
    with pytest.raises(InputError, match=r"stage of range\(1, 3\) is not loaded"):
        bad.forward(np.zeros((1, 1, 40), np.float32), bad.init())


def test_digest_names_weights_and_place(tmp_path: Path) -> None:
    store, other = stored(tmp_path), stored(tmp_path, seed=1)
    stages = [
        TransformerStage(store, range(2)),
        TransformerStage(store, range(1, 2)),
        TransformerStage(store, range(2), first=False),
        TransformerStage(store, range(2, 4)),
        TransformerStage(other, range(2)),
    ]
    assert len({stage.digest for stage in stages}) == 5
    assert TransformerStage(stored_again(tmp_path), range(2)).digest == stages[0].digest


def stored_again(path: Path) -> WeightStore:
    (path / "again").mkdir()
    return stored(path / "again")


def test_weights_do_not_travel(store: WeightStore) -> None:
    stage = three(store)[1]
    sent = pickle.dumps(stage)
    assert len(sent) < stage.nbytes
    arrived = pickle.loads(sent)
    assert arrived.digest == stage.digest
    with pytest.raises(InputError, match="not loaded"):
        arrived.model  # noqa: B018
    arrived.load()
    x = np.ones((1, 2, 40), np.float32)
    assert arrived.forward(x, arrived.init()).tobytes() == stage.forward(x, stage.init()).tobytes()


def test_what_does_not_fit_is_refused(store: WeightStore) -> None:
    with pytest.raises(InputError, match="run of layers"):
        TransformerStage(store, range(3, 6))
    with pytest.raises(ContextOverflow, match="at most 600"):
        TransformerStage(store, range(2)).init(capacity=601)


def test_a_stage_that_cannot_take_back_says_so() -> None:
    class Sum(Stage):
        """A running sum: the least that a stage can be."""

        digest, nbytes = "", 0

        def load(self) -> None:
            pass

        def init(self, *, batch: int = 1, capacity: int | None = None) -> list[Any]:
            return [0, np.zeros(batch)]

        def forward(self, chunk: Any, state: list[Any], *, rows: int | None = None) -> Any:
            out = state[1] + np.cumsum(chunk, axis=1)
            state[:] = [state[0] + chunk.shape[1], out[:, -1]]
            return out

        def position(self, state: list[Any]) -> int:
            return int(state[0])

        def snapshot(self, state: list[Any]) -> Any:
            return state

    stage = Sum()
    state = stage.init()
    stage.forward(np.ones((1, 3)), state)
    assert stage.forward(np.ones((1, 2)), state).tolist() == [[4.0, 5.0]]
    assert (stage.position(state), stage.bytes_per_position) == (5, 0)
    with pytest.raises(InputError, match="Sum cannot take back positions, asked for 2"):
        stage.truncate(state, 2)
    assert stage.cached("nowhere") is stage


def test_a_cached_stage_loads_from_its_copy_and_has_its_own_tensors_only(tmp_path: Path) -> None:
    store, copy = stored(tmp_path), tmp_path / "copy"
    stage = TransformerStage(store, range(1, 3))
    local = stage.cached(str(copy))
    assert (local.digest, local.nbytes) == (stage.digest, stage.nbytes)
    assert local.layers == range(1, 3) and not local.first and not local.last
    assert {path.name for path in copy.iterdir() if path.is_dir()} == set(stage.names)
    stage.load()
    shutil.rmtree(tmp_path / "weights0")
    local = pickle.loads(pickle.dumps(local))
    local.load()
    x = np.random.default_rng(0).normal(size=(1, 5, 40)).astype(np.float32)
    assert local.forward(x, local.init()).tobytes() == stage.forward(x, stage.init()).tobytes()
    with pytest.raises(CorruptionError, match=r"layers\.0\.attention_norm\.weight is missing"):
        local.store.read("layers.0.attention_norm.weight")


@pytest.mark.parametrize("head_and_tail", [True, False])
def test_a_flipped_byte_of_a_copy_is_refused(store: WeightStore, tmp_path: Path, head_and_tail: bool) -> None:
    layers = range(4) if head_and_tail else range(1, 2)
    local = TransformerStage(store, layers).cached(str(tmp_path / "copy"))
    name = "embed.weight" if head_and_tail else "layers.1.mlp.down.weight"
    flip(tmp_path / "copy" / name)
    with pytest.raises(CorruptionError, match=rf"{name} is damaged"):
        local.load()


def test_what_is_damaged_is_not_copied_and_what_was_interrupted_is_not_whole(
    store: WeightStore, tmp_path: Path
) -> None:
    stage, copy = TransformerStage(store, range(1, 3)), tmp_path / "copy"
    path = tmp_path / "weights0" / stage.names[-1]
    kept = shutil.copytree(path, tmp_path / "kept")
    flip(path)
    with pytest.raises(CorruptionError, match=rf"{stage.names[-1]} is damaged"):
        stage.cached(str(copy))
    assert (copy / stage.names[0]).exists()
    with pytest.raises(InputError, match="whole weight store"):
        WeightStore.open(copy)
    shutil.rmtree(path)
    shutil.move(kept, path)
    stage.cached(str(copy)).load()


def test_a_copy_replaces_nothing_but_a_copy(store: WeightStore, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("text")
    with pytest.raises(InputError, match="expected"):
        TransformerStage(store, range(1)).cached(str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "file").read_text() == "text"
    with pytest.raises(InputError, match=r"layers\.9"):
        store.copy(["layers.9.mlp_norm.weight"], tmp_path / "other")
    assert not (tmp_path / "other").exists()


def flip(tensor: Path) -> None:
    """Flip a bit in the middle of a tensor's only chunk."""
    [chunk] = [path for path in (tensor / "c").rglob("*") if path.is_file()]
    raw = bytearray(chunk.read_bytes())
    raw[len(raw) // 2] ^= 4
    chunk.write_bytes(raw)
