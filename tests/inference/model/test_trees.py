"""Trees of drafts: a row has the bits that it has at the end of its branch alone, and so has what is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dask_sdc.evidence.codec import encode
from dask_sdc.exceptions import InputError
from dask_sdc.inference.model import KVCache, Transformer
from dask_sdc.inference.model.kernels import ArrayKernels, branches
from tests.inference.model.reference import random_tensors, small, small_gpt2

PARENTS = (-1, 0, 1, -1, 3, 3, 0, 5, -1)


def paths(parents: tuple[int, ...]) -> list[list[int]]:
    """Return per row the rows of its branch, by going up."""
    found = [[0]]
    for node in range(len(parents)):
        path, at = [], node
        while at >= 0:
            path.append(at + 1)
            at = parents[at]
        found.append([0, *path[::-1]])
    return found


def test_branches() -> None:
    table = branches(PARENTS)
    assert [list(row[1 : 1 + row[0]]) for row in table] == paths(PARENTS)


def model(window: int | None, sinks: int, architecture: str) -> tuple[Any, Transformer]:
    llama = small(n_layers=2, sliding_window=(window, None), sinks=sinks)
    config = llama if architecture == "llama" else small_gpt2()
    return config, Transformer(config, range(2), True, True, random_tensors(config))


@pytest.mark.parametrize("prompt", [1, 2, 11])
@pytest.mark.parametrize(
    ("window", "sinks", "architecture"),
    [(None, 0, "llama"), (3, 0, "llama"), (3, 2, "llama"), (7, 1, "llama"), (None, 0, "gpt2")],
)
@pytest.mark.parametrize("kernels", ["rows", "arrays"])
def test_rows_have_the_bits_of_their_branch(
    prompt: int, window: int | None, sinks: int, architecture: str, kernels: str
) -> None:
    config, transformer = model(window, sinks, architecture)
    if kernels == "arrays":
        rows = transformer._rows
        transformer._rows = ArrayKernels(rows._blocks, rows._geometry, np, by_row=True)
    rng = np.random.default_rng(prompt)
    before = rng.integers(0, config.vocab_size, (1, prompt))
    nodes = rng.integers(0, config.vocab_size, (1, len(PARENTS) + 1))
    cache = KVCache(config, range(2))
    transformer.forward(before, cache)
    logits = transformer.forward(nodes, cache, parents=PARENTS)[0]
    for row, path in enumerate(paths(PARENTS)):
        alone = KVCache(config, range(2))
        transformer.forward(before, alone)
        for at in path:
            expected = transformer.forward(nodes[:, [at]], alone)[0, -1]
        assert logits[row].tobytes() == expected.tobytes()
    chosen = paths(PARENTS)[8]
    cache.keep(prompt, chosen)
    alone = KVCache(config, range(2))
    transformer.forward(np.concatenate([before, nodes[:, chosen]], axis=1), alone)
    assert encode(cache.snapshot()) == encode(alone.snapshot())
    following = rng.integers(0, config.vocab_size, (1, 3))
    a, b = (transformer.forward(following, one) for one in (cache, alone))
    assert a.tobytes() == b.tobytes()


def test_what_does_not_fit_is_refused() -> None:
    config, transformer = model(None, 0, "llama")
    cache = KVCache(config, range(2))
    with pytest.raises(InputError, match="expected 10 rows of a tree, got 3"):
        transformer.forward(np.zeros((1, 3), np.int64), cache, parents=PARENTS)
    transformer.forward(np.zeros((1, 3), np.int64), cache)
    for rows in ([0, 0], [1, 0], [2], [-1]):
        with pytest.raises(InputError, match="expected rising positions from 1 to 2"):
            cache.keep(1, rows)
