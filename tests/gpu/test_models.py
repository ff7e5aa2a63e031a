"""Models whose weights are on a device: against formulas in float64, the CPU, and themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dask_sdc.evidence.codec import encode
from dask_sdc.inference.host import Chunk, SessionSettings, StageHost
from dask_sdc.inference.model import KVCache, Transformer
from dask_sdc.inference.model.kernels.cuda import CapturedKernels
from dask_sdc.inference.stage import TransformerStage
from dask_sdc.inference.weights.store import WeightStore
from tests.gpu.backends import BACKENDS, Array, Backend, backend_of
from tests.inference.model.reference import MODELS, logits, random_tensors
from tests.inference.pipeline.models import PROMPT, generated, write_store

#: What float32 leaves of logits of order one.
TOLERANCE = 2e-5


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    return backend_of(request.param, monkeypatch)


#: All models on a card; elsewhere the others take longer than they say.
NAMES = [name if name in ("sinks", "gpt2") else pytest.param(name, marks=pytest.mark.gpu) for name in MODELS]


class Session:
    """A model and a cache on a backend."""

    def __init__(self, backend: Backend, name: str, batch: int = 1, invariant: bool = True) -> None:
        self.backend, self.config = backend, MODELS[name]
        layers = range(self.config.n_layers)
        tensors = random_tensors(self.config)
        self.model = Transformer(self.config, layers, True, True, tensors, invariant=invariant, xp=backend.xp)
        self.cache = KVCache(self.config, layers, batch, xp=backend.xp)

    def feed(self, ids: Array, **options: Any) -> Array:
        """Return the logits of more positions, on the host."""
        return self.backend.get(self.model.forward(self.backend.put(ids), self.cache, **options))

    def fed(self, ids: Array, sizes: list[int]) -> Array:
        """Return the logits of positions that come in chunks of these sizes."""
        ends = np.cumsum(sizes)
        chunks = zip(ends - sizes, ends, strict=True)
        return np.concatenate([self.feed(ids[:, begin:end]) for begin, end in chunks], axis=1)


def ids_of(name: str, batch: int, length: int) -> Array:
    return np.random.default_rng(1).integers(0, MODELS[name].vocab_size, (batch, length))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("invariant", [True, False])
def test_prefill_and_decode_are_those_of_the_formulas(backend: Backend, name: str, invariant: bool) -> None:
    ids = ids_of(name, 2, 30)
    got = Session(backend, name, 2, invariant).fed(ids, [20, 7, 1, 1, 1])
    expected = [logits(MODELS[name], random_tensors(MODELS[name]), row) for row in ids]
    np.testing.assert_allclose(got, np.stack(expected), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["llama", "sinks", "gpt2"])
def test_a_row_has_the_same_bits_in_every_chunk_and_batch(backend: Backend, name: str) -> None:
    ids = ids_of(name, 3, 24)
    together = Session(backend, name, 3).fed(ids, [20, 4])
    alone = Session(backend, name).fed(ids[1:2], [1] * 8 + [16])
    assert alone[0].tobytes() == together[1].tobytes()


def test_the_same_chunks_give_the_same_bits(backend: Backend) -> None:
    ids = ids_of("llama", 2, 40)
    for invariant in (True, False):
        runs = [Session(backend, "llama", 2, invariant).fed(ids, [33, 6, 1]) for _ in range(2)]
        assert runs[0].tobytes() == runs[1].tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("where", BACKENDS[1:])
def test_a_captured_step_has_the_bits_of_a_plain_one(
    where: str, name: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_of(where, monkeypatch)
    captured, plain = Session(backend, name, batch), Session(backend, name, batch)
    assert isinstance(captured.model._rows, CapturedKernels)
    plain.model._rows._able = False
    steps = 300 if where == "cupy" else 3  # on a card over splits, and over the growth of the cache
    ids = ids_of(name, batch, min(8 + steps, captured.config.max_context))
    sizes = [8] + [1] * (ids.shape[1] - 8)
    assert captured.fed(ids, sizes).tobytes() == plain.fed(ids, sizes).tobytes()
    assert captured.model._rows._able, "the step could not be captured"
    assert len(captured.model._rows._graphs) == 1 and len(plain.model._rows._graphs) == 0
    snapshots = [encode(session.cache.snapshot()) for session in (captured, plain)]
    assert snapshots[0] == snapshots[1]


def test_keys_and_values_are_those_of_the_cpu_and_come_to_the_host(backend: Backend) -> None:
    ids = ids_of("sinks", 2, 40)
    mine, cpu = Session(backend, "sinks", 2), Session(Backend("numpy", np), "sinks", 2)
    snapshots = []
    for session in (mine, cpu):
        session.fed(ids, [33, 7])
        snapshots.append(session.cache.snapshot())
        encode(snapshots[-1])  # which takes arrays of NumPy only
    for layer in ("layer0", "layer1", "layer2"):
        for part in ("k", "v"):
            np.testing.assert_allclose(snapshots[0][layer][part], snapshots[1][layer][part], atol=TOLERANCE)
    assert mine.cache.nbytes == cpu.cache.nbytes


def test_positions_are_taken_back(backend: Backend) -> None:
    ids = ids_of("llama", 1, 20)
    straight, back = Session(backend, "llama"), Session(backend, "llama")
    expected = straight.fed(ids, [12, 8])
    back.feed(ids[:, :12])
    back.feed(ids[:, :5])  # drafts that were wrong
    back.cache.truncate(12)
    assert back.feed(ids[:, 12:]).tobytes() == expected[:, 12:].tobytes()


def test_a_tree_of_drafts_has_the_bits_of_its_branches(backend: Backend) -> None:
    ids, parents = ids_of("llama", 1, 20), [-1, 0, 0]
    session = Session(backend, "llama")
    session.feed(ids[:, :16])
    tree = session.feed(ids[:, 16:], parents=parents)
    for row, path in ((1, [16, 17]), (2, [16, 17, 18]), (3, [16, 17, 19])):
        alone = Session(backend, "llama")
        alone.feed(ids[:, :16])
        steps = [alone.feed(ids[:, [p]]) for p in path]
        assert steps[-1][0, 0].tobytes() == tree[0, row].tobytes()
    session.cache.keep(16, [0, 1, 3])
    kept = session.feed(ids[:, :1])
    straight = Session(backend, "llama")
    straight.feed(np.concatenate([ids[:, :18], ids[:, 19:]], axis=1))
    assert straight.feed(ids[:, :1]).tobytes() == kept.tobytes()


def test_outputs_of_layers_are_kept(backend: Backend) -> None:
    ids = ids_of("llama", 1, 9)
    found = []
    for one in (backend, Backend("numpy", np)):
        session = Session(one, "llama")
        session.cache.tap([1])
        session.fed(ids, [5, 4])
        found.append(one.get(session.cache.tapped(1)))
    np.testing.assert_allclose(found[0], found[1], atol=TOLERANCE)


# -- stages --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    return write_store(tmp_path_factory.mktemp("weights") / "tiny.zarr")


def hosts(store: WeightStore, device: str) -> list[StageHost]:
    """Return two stages that are loaded, each in a host."""
    found = []
    for number, layers in enumerate((range(3), range(3, 6))):
        stage = TransformerStage(store, layers, device=device)
        stage.load()
        found.append(StageHost(stage, number, number == 1))
    return found


def test_stages_on_a_device_hand_over_arrays_of_the_host(backend: Backend, store: WeightStore) -> None:
    expected = generated(store, PROMPT, 12)
    first, second = hosts(store, "cpu" if backend.name == "numpy" else "cuda")
    for host in (first, second):
        host.open("s", SessionSettings(taps=(1, 4)))
    tokens: list[int] = []
    chunk, position = np.asarray([PROMPT]), 0
    while len(tokens) < 12:
        between = first.step(Chunk("s", len(tokens), position, chunk, 1))
        assert type(between.array) is np.ndarray and between.array.dtype == np.float32
        output = second.step(between.chunk)
        position += chunk.shape[1]
        tokens.append(output.record.tokens[-1])
        chunk = np.asarray([tokens[-1:]])
    assert tuple(tokens) == expected
    for host, layer in ((first, 1), (second, 4)):
        tapped = host.tapped("s")
        assert list(tapped) == [layer] and type(tapped[layer]) is np.ndarray
        encode(host.snapshot("s"))


def test_a_stage_on_a_device_is_replayed_to_the_bit(backend: Backend, store: WeightStore) -> None:
    device = "cpu" if backend.name == "numpy" else "cuda"
    first, _ = hosts(store, device)
    again, _ = hosts(store, device)
    for host in (first, again):
        host.open("s", SessionSettings())
    ids = np.random.default_rng(3).integers(0, 97, (1, 24))
    cuts = [(0, 16), (16, 17), (17, 18), (18, 24)]
    chunks = [Chunk("s", k, begin, ids[:, begin:end]) for k, (begin, end) in enumerate(cuts)]
    records = [first.step(chunk).record for chunk in chunks]
    replayed = again.replay(chunks, [end - begin for begin, end in cuts])
    assert [r.digest for r in replayed] == [r.digest for r in records]


def test_a_device_that_is_none_is_refused(store: WeightStore) -> None:
    with pytest.raises(ValueError, match="expected one of cpu, cuda, got 'tpu'"):
        TransformerStage(store, range(3), device="tpu")
