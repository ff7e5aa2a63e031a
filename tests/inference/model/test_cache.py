"""The KV cache: what it keeps, what it forgets, and how much memory that takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.evidence.codec import decode, encode
from dask_sdc.exceptions import ContextOverflow, InputError
from dask_sdc.inference.model import KVCache
from tests.inference.model.reference import small

WINDOWS = small(sliding_window=(None, 5, 9), sinks=2, max_context=100_000)
LAYERS = range(3)


def append(cache: KVCache, count: int) -> None:
    """Write each position's number into its keys, its negative into its values."""
    cache.reserve(count)
    for i in cache.layers:
        layer = cache.layer(i)
        for position in range(cache.length, cache.length + count):
            layer.k[:, :, position - layer.base] = position
            layer.v[:, :, position - layer.base] = -position
    cache.length += count


def seen(cache: KVCache, index: int) -> list[int]:
    """Return the positions that a new row of a layer can see, read from the keys."""
    layer = cache.layer(index)
    window = layer.window or cache.length + 1
    positions = [j for j in range(cache.length) if j > cache.length - window or j < cache.config.sinks]
    slots = [j if j < cache.config.sinks else j - layer.base for j in positions]
    assert all(layer.v[0, 0, slot, 0] == -layer.k[0, 0, slot, 0] for slot in slots)
    assert [int(layer.k[0, 0, slot, 0]) for slot in slots] == positions
    return positions


@given(st.lists(st.one_of(st.integers(1, 700), st.integers(-30, -1)), min_size=1, max_size=40))
def test_windows_hold_whatever_comes_and_goes(steps: list[int]) -> None:
    cache = KVCache(WINDOWS, LAYERS, rollback=30)
    longest = 0
    for step in steps:
        if step > 0:
            append(cache, step)
            longest = max(longest, step)
        else:
            # No more than `rollback` in all since the last chunk.
            cache.truncate(max(cache.length + step, cache.length - 30, 0))
            append(cache, -step)
        for i in LAYERS:
            seen(cache, i)
    bound = KVCache.bytes_at(WINDOWS, LAYERS, 100_000, chunk=longest)
    assert cache.nbytes <= bound
    assert cache.layer(1).slots <= 2 + 5 + 30 + max(longest, 256)


def test_full_layers_grow_in_blocks_up_to_the_capacity() -> None:
    cache = KVCache(small(), LAYERS, capacity=300)
    sizes = set()
    for _ in range(300):
        append(cache, 1)
        sizes.add(cache.layer(0).slots)
    assert sizes == {256, 300}
    assert (
        cache.nbytes
        == KVCache.bytes_at(small(), LAYERS, 300)
        == 300 * KVCache.bytes_per_token(small(), LAYERS)
    )


def test_bytes_per_token_counts_padded_heads() -> None:
    # 3 layers, keys and values, 2 heads of 12 padded to 16, 4 bytes
    assert KVCache.bytes_per_token(small(), LAYERS) == 3 * 2 * 2 * 16 * 4


def test_overflow_changes_nothing() -> None:
    cache = KVCache(small(), LAYERS, capacity=10)
    append(cache, 10)
    before = encode(cache.snapshot())
    with pytest.raises(ContextOverflow, match=r"at most 10 positions, got 10 \+ 1"):
        cache.reserve(1)
    assert encode(cache.snapshot()) == before


def test_a_window_that_is_gone_cannot_come_back() -> None:
    cache = KVCache(WINDOWS, LAYERS, rollback=4)
    append(cache, 300)
    append(cache, 300)
    with pytest.raises(InputError, match=r"layer 1 keeps positions from .* too few for a window of 5 at 200"):
        cache.truncate(200)
    with pytest.raises(InputError, match=r"to truncate to 0\.\.600, got 601"):
        cache.truncate(601)
    cache.truncate(600)
    assert cache.length == 600


@pytest.mark.parametrize("sizes", [[600], [1] * 600, [250, 250, 100]])
def test_snapshot_depends_on_positions_alone(sizes: list[int]) -> None:
    cache = KVCache(WINDOWS, LAYERS)
    for size in sizes:
        append(cache, size)
    snapshot = cache.snapshot()
    assert snapshot["length"] == 600
    assert snapshot["layer0"]["k"].shape == (1, 2, 600, 12)
    assert snapshot["layer1"]["k"][0, 0, :, 0].tolist() == [0, 1, 596, 597, 598, 599]
    assert snapshot["layer1"]["v"][0, 0, :, 0].tolist() == [0, -1, -596, -597, -598, -599]
    assert snapshot["layer1"]["first"] == 596
    assert encode(decode(encode(snapshot))) == encode(snapshot)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 8])
def test_snapshot_of_a_short_text_is_all_of_it(length: int) -> None:
    cache = KVCache(WINDOWS, LAYERS)
    if length:
        append(cache, length)
    kept = cache.snapshot()["layer2"]["k"][0, 0, :, 0].tolist()
    assert kept == list(range(length))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch >= 1"),
        ({"capacity": 0}, "capacity >= 1"),
        ({"rollback": -1}, "rollback >= 0"),
        ({"dtype": np.float64}, "expected dtype float32, got float64"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        KVCache(small(), LAYERS, **options)


def test_more_than_the_context_is_refused() -> None:
    with pytest.raises(ContextOverflow, match="at most 600 positions, got 601"):
        KVCache(small(), LAYERS, capacity=601)
