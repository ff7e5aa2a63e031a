"""CUDA kernels of the forward pass, run on the host, against formulas in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_sdc.inference.model import KVCache, Transformer
from dask_sdc.inference.model.cache import LayerCache
from dask_sdc.inference.model.kernels import branches
from dask_sdc.inference.model.kernels.cuda import CudaKernels
from dask_sdc.inference.model.kernels.cuda.attention import attend_chunk, attend_rows
from dask_sdc.inference.model.kernels.cuda.rows import activate, normalise, turn
from tests.cuda.emulated import COMPILER, HostDevice
from tests.inference.model.reference import MODELS, logits, random_tensors

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")

Array = np.ndarray[Any, Any]

NONE = np.empty(0, np.float32)


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.normal(size=shape).astype(np.float32)


def schedules() -> list[HostDevice]:
    return [HostDevice(0), HostDevice(1, 1), HostDevice(7, 2)]


# -- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 31, 40, 127, 576, 4096, 5000])
@pytest.mark.parametrize("shifted", [False, True])
def test_norms_are_those_of_float64(size: int, shifted: bool) -> None:
    rng = np.random.default_rng(size)
    x = normal(rng, 3, size) + np.float32(10 * shifted)
    gain, shift = normal(rng, size), normal(rng, size) if shifted else NONE
    wide = x.astype(np.float64)
    wide = wide - wide.mean(axis=1, keepdims=True) if shifted else wide
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * gain + (shift if shifted else 0)
    found = [normalise(device, x, gain, shift, 1e-5) for device in schedules()]
    np.testing.assert_allclose(found[0], expected, rtol=3e-7, atol=3e-7)
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
    assert normalise(HostDevice(), x[1:2], gain, shift, 1e-5).tobytes() == found[0][1].tobytes()


@pytest.mark.parametrize("size", [1, 6, 52, 1536])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_activations_are_those_of_float64(size: int, gated: bool, biased: bool) -> None:
    rng = np.random.default_rng(size)
    y = 4 * normal(rng, 5, size * (1 + gated))
    y[0, 0], y[1, 0] = -200.0, 200.0
    bias = normal(rng, y.shape[1]) if biased else NONE
    z = (y + bias if biased else y).astype(np.float64)
    if gated:
        gate, up = z[:, :size], z[:, size:]
        expected = gate / (1 + np.exp(-gate)) * up
    else:
        expected = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    found = [activate(device, y, bias, gated) for device in schedules()]
    np.testing.assert_allclose(found[0], expected, rtol=2e-6, atol=2e-6)
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()


@pytest.mark.parametrize(("head_dim", "biased"), [(16, False), (12, True), (64, False), (0, True)])
def test_queries_and_keys_are_turned_into_the_cache(head_dim: int, biased: bool) -> None:
    """A width of 16 with fewer elements that turn is a padded head; none at all is GPT-2."""
    rng, (batch, steps, heads, kv_heads) = np.random.default_rng(0), (2, 3, 4, 2)
    width, half = max(head_dim + -head_dim % 16, 16), head_dim // 2
    qkv = normal(rng, batch * steps, (heads + 2 * kv_heads) * width)
    bias = normal(rng, qkv.shape[1]) if biased else NONE
    angle = rng.uniform(0, 6, (steps, half))
    turns = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    k, v = normal(rng, batch, kv_heads, 9, width), normal(rng, batch, kv_heads, 9, width)
    before = k.copy(), v.copy()
    q = turn(HostDevice(7), qkv, bias, turns, steps, heads, 0.25, k, v, 9, 5)
    z = (qkv + bias if biased else qkv).astype(np.float64).reshape(batch, steps, -1, width)
    low, high = z[..., :half], z[..., half : 2 * half]
    c, s = np.cos(angle)[None, :, None], np.sin(angle)[None, :, None]
    turned = np.concatenate([low * c - high * s, high * c + low * s, z[..., 2 * half :]], axis=-1)
    np.testing.assert_allclose(q.reshape(turned[:, :, :heads].shape), turned[:, :, :heads] * 0.25, atol=1e-6)
    keys = turned[:, :, heads : heads + kv_heads].transpose(0, 2, 1, 3)
    np.testing.assert_allclose(k[:, :, 4:7], keys, atol=1e-6)
    np.testing.assert_allclose(v[:, :, 4:7], z[:, :, -kv_heads:].transpose(0, 2, 1, 3), atol=1e-6)
    for array, old in zip((k, v), before, strict=True):
        assert array[:, :, :4].tobytes() == old[:, :, :4].tobytes()
        assert array[:, :, 7:].tobytes() == old[:, :, 7:].tobytes()


# -- attention -----------------------------------------------------------------------------------


class Case(NamedTuple):
    """One call of attention: shapes, and what is visible."""

    batch: int = 1
    steps: int = 1
    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    length: int = 0
    base: int = 0
    window: int | None = None
    sinks: int = 0

    def arrays(self, seed: int = 0) -> tuple[Array, LayerCache]:
        """Return queries, and a cache whose unused slots are NaN."""
        rng = np.random.default_rng(seed)
        used = self.length + self.steps - self.base
        shape = self.batch, self.kv_heads, used + 5, self.width
        k, v = normal(rng, *shape), normal(rng, *shape)
        k[:, :, used:], v[:, :, used:] = np.nan, np.nan
        q = normal(rng, self.batch * self.steps, self.heads, self.width) / np.float32(np.sqrt(self.width))
        return q, LayerCache(k, v, self.window, self.base)

    def slots(self, position: int) -> Array:
        """Return the slots that a row at a position sees."""
        window = position + 1 if self.window is None else self.window
        seen = [s for s in range(position + 1) if s > position - window or s < self.sinks]
        return np.array([s if s < self.sinks else s - self.base for s in seen])

    def expected(self, q: Array, layer: LayerCache) -> Array:
        """Return the mix of every row in float64."""
        group, out = self.heads // self.kv_heads, np.empty(q.shape)
        for row, head in np.ndindex(q.shape[:2]):
            b, t = divmod(row, self.steps)
            slots = self.slots(self.length + t)
            out[row, head] = mix(q[row, head], *(a[b, head // group, slots] for a in (layer.k, layer.v)))
        return out.reshape(len(q), -1)


def mix(q: Array, k: Array, v: Array) -> Array:
    score = k.astype(np.float64) @ q
    p = np.exp(score - score.max())
    return p / p.sum() @ v


CASES = {
    "first token": Case(),
    "alone": Case(length=300, heads=1, kv_heads=1),
    "grouped": Case(length=515, heads=12, kv_heads=3, width=64),
    "one key head": Case(length=130, heads=11, kv_heads=1, width=48),
    "wide": Case(length=40, heads=2, kv_heads=1, width=256),
    "batch": Case(batch=3, steps=5, length=126),
    "window": Case(length=700, steps=3, window=37),
    "window of a split": Case(length=511, steps=2, window=128),
    "sinks": Case(length=900, steps=3, window=50, sinks=4),
    "dropped": Case(batch=2, length=900, steps=3, base=600, window=50, sinks=4),
    "sinks in reach": Case(length=10, steps=9, window=8, sinks=6),
    "prompt": Case(batch=2, steps=150),
    "prompt of a window": Case(steps=200, window=33, sinks=2, width=32),
    "long prompt": Case(steps=70, length=333, heads=6, kv_heads=2, width=80),
    "edge": Case(steps=64, length=64),
    "chunk behind a dropped window": Case(steps=66, length=1000, base=500, window=100, sinks=3),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_of_float64(name: str) -> None:
    case = CASES[name]
    q, layer = case.arrays()
    expected = case.expected(q, layer)
    rows = attend_rows(HostDevice(), q, layer, case.steps, case.length, case.sinks, None)
    np.testing.assert_allclose(rows, expected, atol=2e-6)
    chunk = attend_chunk(HostDevice(), q, layer, case.steps, case.length, case.sinks)
    np.testing.assert_allclose(chunk, expected, atol=2e-6)
    for schedule in (1, 7):
        again = attend_rows(HostDevice(schedule), q, layer, case.steps, case.length, case.sinks, None)
        assert again.tobytes() == rows.tobytes()
        again = attend_chunk(HostDevice(schedule), q, layer, case.steps, case.length, case.sinks)
        assert again.tobytes() == chunk.tobytes()


@given(
    st.integers(1, 70), st.integers(0, 300), st.sampled_from([None, 1, 7, 64, 129]), st.integers(0, 5),
    st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=25)
def test_attention_of_any_shape(steps: int, length: int, window: int | None, sinks: int, seed: int) -> None:
    oldest = length - (window or length + 1) + 1
    base = max(0, oldest - sinks) if window is not None and seed % 2 else 0
    case = Case(steps=steps, length=length, base=base, window=window, sinks=sinks, heads=2)
    q, layer = case.arrays(seed)
    expected = case.expected(q, layer)
    np.testing.assert_allclose(
        attend_rows(HostDevice(), q, layer, steps, length, sinks, None), expected, atol=2e-6
    )
    np.testing.assert_allclose(
        attend_chunk(HostDevice(), q, layer, steps, length, sinks), expected, atol=2e-6
    )


def test_large_scores_overflow_nothing() -> None:
    case = Case(length=300, heads=1, kv_heads=1)
    q, layer = case.arrays()
    q *= 1e4
    for got in (
        attend_rows(HostDevice(), q, layer, 1, 300, 0, None),
        attend_chunk(HostDevice(), q, layer, 1, 300, 0),
    ):
        np.testing.assert_allclose(got, case.expected(q, layer), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tiled", [False, True])
def test_a_row_has_the_same_bits_in_every_chunk_and_batch(tiled: bool) -> None:
    case = Case(batch=2, steps=90, length=100, window=77, sinks=3)
    q, layer = case.arrays()

    def attend(q: Array, layer: LayerCache, steps: int, length: int) -> Array:
        if tiled:
            return attend_chunk(HostDevice(), q, layer, steps, length, case.sinks)
        return attend_rows(HostDevice(), q, layer, steps, length, case.sinks, None)

    together = attend(q, layer, 90, 100).reshape(2, 90, -1)
    alone = LayerCache(layer.k[1:], layer.v[1:], layer.window)
    for begin, end in ((0, 1), (1, 18), (18, 83), (83, 90)):
        rows = np.ascontiguousarray(q.reshape(2, 90, 4, 16)[1, begin:end])
        assert attend(rows, alone, end - begin, 100 + begin).tobytes() == together[1, begin:end].tobytes()


def test_rows_are_launched_in_pieces_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    import dask_sdc.inference.model.kernels.cuda.attention as launch

    case = Case(batch=3, steps=4, length=150)
    q, layer = case.arrays()
    whole = attend_rows(HostDevice(), q, layer, 4, 150, 0, None)
    for rows in (1, 3, 5, 8):
        monkeypatch.setattr(launch, "_PIECE", rows * 4 * 4 * 2 * (16 + 2))
        device = HostDevice()
        assert attend_rows(device, q, layer, 4, 150, 0, None).tobytes() == whole.tobytes()
        assert len(device.launched) > 2


@pytest.mark.parametrize("window", [None, 6])
def test_rows_of_a_tree_have_the_bits_of_their_branch(window: int | None) -> None:
    parents, length = [-1, 0, 0, 2, -1], 127
    tree = branches(parents)
    case = Case(steps=len(tree), length=length, window=window, sinks=1)
    q, layer = case.arrays()
    got = attend_rows(HostDevice(), q, layer, len(tree), length, 1, tree)
    for row, (count, *path) in enumerate(tree.tolist()):
        order = [*range(length), *(length + step for step in path[:count])]
        straight = LayerCache(*(np.ascontiguousarray(a[:, :, order]) for a in (layer.k, layer.v)), window)
        alone = attend_rows(HostDevice(), q[row : row + 1], straight, 1, length + count - 1, 1, None)
        assert alone.tobytes() == got[row].tobytes()


# -- layers --------------------------------------------------------------------------------------


def on_device(name: str, by_row: bool, device: HostDevice) -> Transformer:
    """Return a model that uses the CUDA kernels, as one on a GPU does."""
    config = MODELS[name]
    model = Transformer(config, range(config.n_layers), True, True, random_tensors(config))
    blocks, geometry = model._rows._blocks, model._rows._geometry
    model._rows = CudaKernels(blocks, geometry, device, by_row=True)
    model._bulk = model._rows if by_row else CudaKernels(blocks, geometry, device)
    return model


def in_chunks(model: Transformer, ids: Array, sizes: list[int]) -> Array:
    cache, out, at = KVCache(model.config, model.layers, batch=len(ids)), [], 0
    for size in sizes:
        out.append(model.forward(ids[:, at : at + size], cache))
        at += size
    return np.concatenate(out, axis=1)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_formulas(name: str) -> None:
    ids = np.random.default_rng(1).integers(0, MODELS[name].vocab_size, (2, 40))
    expected = np.stack([logits(MODELS[name], random_tensors(MODELS[name]), row) for row in ids])
    for by_row in (True, False):
        device = HostDevice()
        got = in_chunks(on_device(name, by_row, device), ids, [30, 9, 1])
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=0)
        assert any(kernel.startswith("attention_chunk") for kernel in device.launched) != by_row


def test_a_row_of_the_model_has_the_same_bits_in_every_chunk() -> None:
    ids = np.random.default_rng(2).integers(0, 61, (2, 24))
    model = on_device("sinks", True, HostDevice())
    together = in_chunks(model, ids, [20, 4])
    assert in_chunks(model, ids[1:], [1] * 24)[0].tobytes() == together[1].tobytes()


def test_a_tree_of_drafts_has_the_bits_of_its_branches() -> None:
    model, rng = on_device("sinks", True, HostDevice()), np.random.default_rng(3)
    ids, parents = rng.integers(0, 61, (1, 20)), [-1, 0, 0]
    cache = KVCache(model.config, model.layers)
    model.forward(ids[:, :16], cache)
    tree = model.forward(ids[:, 16:], cache, parents=parents)
    for row, path in ((1, [16, 17]), (2, [16, 17, 18]), (3, [16, 17, 19])):
        alone = KVCache(model.config, model.layers)
        model.forward(ids[:, :16], alone)
        steps = [model.forward(ids[:, [p]], alone) for p in path]
        assert steps[-1][0, 0].tobytes() == tree[0, row].tobytes()
