"""The forward pass: against formulas in float64, against itself in other chunks, and what it refuses."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import ContextOverflow, InputError
from dask_sdc.inference.model import KVCache, Transformer, set_threads, threads
from dask_sdc.inference.model.config import ModelConfig
from dask_sdc.inference.model.kernels import ArrayKernels
from tests.inference.model.reference import MODELS, logits, random_tensors, small

Array = np.ndarray[Any, Any]


def whole(config: ModelConfig, tensors: dict[str, Array] | None = None, **options: Any) -> Transformer:
    tensors = random_tensors(config) if tensors is None else tensors
    return Transformer(config, range(config.n_layers), True, True, tensors, **options)


def in_chunks(model: Transformer, ids: Array, sizes: list[int]) -> Array:
    """Feed ids (B, T) in chunks of these sizes, the last of them repeated."""
    kv = KVCache(model.config, model.layers, batch=len(ids))
    out, at = [], 0
    while at < ids.shape[1]:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        out.append(model.forward(ids[:, at : at + size], kv))
        at += size
    return np.concatenate(out, axis=1)


def by_arrays(model: Transformer, by_row: bool) -> ArrayKernels:
    """Return what a model on another array library would use."""
    return ArrayKernels(model._rows._blocks, model._rows._geometry, np, by_row=by_row)


def some_ids(config: ModelConfig, steps: int, batch: int = 1, seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, steps))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [1, 5, 40])
@pytest.mark.parametrize("invariant", [True, False])
def test_logits_are_those_of_the_formulas(name: str, chunk: int, invariant: bool) -> None:
    config = MODELS[name]
    tensors, ids = random_tensors(config), some_ids(config, 40)
    got = in_chunks(whole(config, tensors, invariant=invariant), ids, [chunk])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got[0], logits(config, tensors, ids[0]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("invariant", [True, False])
def test_narrow_weights_are_widened_exactly(name: str, dtype: str, invariant: bool) -> None:
    config = MODELS[name]
    tensors, ids = random_tensors(config, dtype=dtype), some_ids(config, 20)
    model = whole(config, tensors, invariant=invariant)
    expected = logits(config, tensors, ids[0])
    np.testing.assert_allclose(in_chunks(model, ids, [20])[0], expected, atol=2e-5, rtol=0)
    np.testing.assert_allclose(in_chunks(model, ids, [1])[0], expected, atol=2e-5, rtol=0)
    assert model.weights["layers.0.qkv"].itemsize == 2


@pytest.mark.parametrize("name", MODELS)
def test_the_array_path_agrees(name: str) -> None:
    config = MODELS[name]
    model, ids = whole(config), some_ids(config, 30, batch=2)
    expected = in_chunks(model, ids, [7])
    for by_row in (True, False):
        model._rows = model._bulk = by_arrays(model, by_row)
        np.testing.assert_allclose(in_chunks(model, ids, [7]), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
@given(sizes=st.lists(st.integers(1, 19), min_size=1, max_size=8))
def test_a_row_has_the_same_bits_in_every_chunk(name: str, sizes: list[int]) -> None:
    model, ids, alone = fixed(name)
    assert in_chunks(model, ids, list(sizes)).tobytes() == alone


@functools.cache
def fixed(name: str) -> tuple[Transformer, Array, bytes]:
    """Return a model, ids, and the bytes of their logits, position by position."""
    model, ids = whole(MODELS[name]), some_ids(MODELS[name], 48)
    return model, ids, in_chunks(model, ids, [1]).tobytes()


@pytest.mark.parametrize("name", ["sinks", "gpt2"])
def test_a_row_has_the_same_bits_in_every_batch(name: str) -> None:
    model = whole(MODELS[name])
    ids = some_ids(model.config, 30, batch=3)
    together = in_chunks(model, ids, [7])
    for b in range(3):
        assert in_chunks(model, ids[b : b + 1], [1]).tobytes() == together[b].tobytes()


def test_rows_of_the_array_path_have_the_same_bits_in_every_chunk() -> None:
    model, ids = whole(MODELS["sinks"]), some_ids(MODELS["sinks"], 30, batch=2)
    model._rows = model._bulk = by_arrays(model, True)
    alone = in_chunks(model, ids[1:], [1])
    assert in_chunks(model, ids, [6])[1].tobytes() == alone[0].tobytes()


def test_bits_do_not_depend_on_threads() -> None:
    config = small(hidden_size=320, intermediate_size=700)  # large enough to be shared
    model, ids = whole(config), some_ids(config, 12)
    try:
        set_threads(1)
        assert threads() == 1
        alone = in_chunks(model, ids, [3])
    finally:
        set_threads(None)
    assert in_chunks(model, ids, [3]).tobytes() == alone.tobytes()


def test_several_threads_may_compute_at_once() -> None:
    config = small(hidden_size=320, intermediate_size=700)
    model = whole(config)
    ids = [some_ids(config, 30, seed=seed) for seed in range(4)]
    expected = [in_chunks(model, each, [1]) for each in ids]
    got: dict[int, Array] = {}
    workers = [
        threading.Thread(target=lambda n=n: got.update({n: in_chunks(model, ids[n], [1])})) for n in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(got[n].tobytes() == expected[n].tobytes() for n in range(4))


@pytest.mark.parametrize("name", ["tied", "sinks", "gpt2"])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_stages_in_a_row_are_the_whole(name: str, cut: int) -> None:
    config = MODELS[name]
    tensors, ids = random_tensors(config), some_ids(config, 20)
    parts = [range(cut), range(cut, config.n_layers)]
    stages = [Transformer(config, part, k == 0, k == 1, tensors) for k, part in enumerate(parts)]
    caches = [KVCache(config, part) for part in parts]
    out = []
    for at in range(0, 20, 4):
        x = ids[:, at : at + 4]
        for stage, cache in zip(stages, caches, strict=True):
            x = stage.forward(x, cache)
            x.flags.writeable = False  # as it comes off the wire
        out.append(x)
    assert np.concatenate(out, axis=1).tobytes() == in_chunks(whole(config, tensors), ids, [4]).tobytes()


@pytest.mark.parametrize("name", ["llama", "sinks", "gpt2"])
def test_what_was_taken_back_leaves_no_trace(name: str) -> None:
    config = MODELS[name]
    model, ids = whole(config), some_ids(config, 60)
    expected = in_chunks(model, ids, [1])
    kv, out = KVCache(config, model.layers), []
    for at in range(0, 60, 5):
        model.forward(some_ids(config, 9, seed=at), kv)
        kv.truncate(at)
        out.append(model.forward(ids[:, at : at + 5], kv))
    assert np.concatenate(out, axis=1).tobytes() == expected.tobytes()


@pytest.mark.parametrize("invariant", [True, False])
def test_long_windows_run_in_bounded_memory(invariant: bool) -> None:
    config = small(sliding_window=(7, 30, 7), sinks=3, max_context=4000, n_layers=3)
    tensors, ids = random_tensors(config), some_ids(config, 2000)
    model = whole(config, tensors, invariant=invariant)
    kv = KVCache(config, model.layers)
    got = np.concatenate([model.forward(ids[:, at : at + 100], kv) for at in range(0, 2000, 100)], axis=1)
    assert (
        kv.nbytes
        <= KVCache.bytes_at(config, model.layers, 4000)
        < 4000 * KVCache.bytes_per_token(config, model.layers)
    )
    # A row depends on its window's windows and the sinks; the reference sees all of it.
    short = logits(config, tensors, ids[0, :300])
    np.testing.assert_allclose(got[0, :300], short, atol=3e-5, rtol=0)
    assert in_chunks(whole(config, tensors), ids, [1]).shape == got.shape


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("steps", [5, 40])
def test_only_the_wanted_rows_of_logits_are_computed(invariant: bool, steps: int) -> None:
    model = whole(MODELS["llama"], invariant=invariant)
    ids = some_ids(model.config, steps, batch=2)
    everything = in_chunks(model, ids, [steps])
    for rows in (0, 1, 3):
        kv = KVCache(model.config, model.layers, batch=2)
        some = model.forward(ids, kv, rows=rows)
        assert some.shape == (2, rows, 61)
        np.testing.assert_allclose(some, everything[:, steps - rows :], atol=2e-5, rtol=0)


def test_bounds_of_the_context() -> None:
    model = whole(MODELS["llama"])
    kv = KVCache(model.config, model.layers, capacity=10)
    model.forward(some_ids(model.config, 8), kv)
    with pytest.raises(ContextOverflow, match=r"at most 10 positions, got 8 \+ 3"):
        model.forward(some_ids(model.config, 3), kv)
    assert kv.length == 8
    assert model.forward(some_ids(model.config, 2), kv).shape == (1, 2, 61)


def bad_tensors(**changes: Any) -> dict[str, Array]:
    tensors = {**random_tensors(MODELS["llama"]), **{k.replace("__", "."): v for k, v in changes.items()}}
    return {name: value for name, value in tensors.items() if value is not None}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (bad_tensors(layers__1__mlp__up__weight=None), r"tensor layers\.1\.mlp\.up\.weight is missing"),
        (
            bad_tensors(norm__weight=np.ones(3, np.float32)),
            r"tensor norm\.weight: expected shape \(40,\), got \(3,\)",
        ),
        (bad_tensors(norm__weight=np.ones(40)), r"tensor norm\.weight: expected float32, .*got float64"),
        (bad_tensors(head__weight=None), r"tensor head\.weight is missing"),
    ],
)
def test_bad_tensors_are_named(tensors: dict[str, Array], message: str) -> None:
    with pytest.raises(InputError, match=message):
        whole(MODELS["llama"], tensors)


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (np.zeros((2, 3), int), r"expected shape \(1, 3\)"),
        (np.zeros((1, 0), int), "at least one position"),
        (np.zeros(3, int), "expected shape"),
        (np.zeros((1, 3)), "expected integer ids, got float64"),
        (np.array([[0, 61]]), r"expected ids in 0\.\.60, got 0\.\.61"),
        (np.array([[-1, 3]]), r"got -1\.\.3"),
    ],
)
def test_bad_chunks_are_refused(chunk: Array, message: str) -> None:
    model = whole(MODELS["llama"])
    kv = KVCache(model.config, model.layers)
    with pytest.raises(InputError, match=message):
        model.forward(chunk, kv)
    assert kv.length == 0


def test_activations_and_caches_must_fit() -> None:
    config = MODELS["llama"]
    stage = Transformer(config, range(1, 2), False, False, random_tensors(config))
    good = np.zeros((1, 2, 40), np.float32)
    with pytest.raises(InputError, match=r"expected one of range\(1, 2\), got range\(0, 1\)"):
        stage.forward(good, KVCache(config, range(1)))
    with pytest.raises(InputError, match="expected float32, got float64"):
        stage.forward(good.astype(float), KVCache(config, range(1, 2)))
    with pytest.raises(InputError, match=r"expected a range within 0\.\.3"):
        Transformer(config, range(2, 5), False, True, random_tensors(config))
    with pytest.raises(InputError, match=r"rows: expected 0\.\.2"):
        whole(config).forward(np.zeros((1, 2), int), KVCache(config, range(3)), rows=3)
