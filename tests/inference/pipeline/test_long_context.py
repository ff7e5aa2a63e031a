"""A prompt of 32768 tokens goes through two stages in bounded memory, and gives the right tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dask_sdc.inference.model.cache import KVCache
from dask_sdc.inference.stage import TransformerStage
from dask_sdc.inference.weights.store import WeightStore, convert
from tests.inference.model.reference import logits, random_tensors
from tests.inference.pipeline.long_context import CHUNK, CONFIG, COUNT, CUT, JOURNAL, LENGTH, prompt
from tests.inference.weights.tiny import MemorySource

ROOT = Path(__file__).parents[3]
TENSORS = random_tensors(CONFIG)
#: Chunks that may be on their way at once: what waits at and behind a stage, on its way, and in the writer.
ON_THE_WAY = 24
#: For allocators, ids as Python ints on the side of the caller, tables of rotations, and threads.
ALLOWANCE = 16 * 2**20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    return convert(MemorySource(CONFIG, TENSORS, text=None), tmp_path_factory.mktemp("long") / "model.zarr")


def in_one_process(store: WeightStore, ids: tuple[int, ...], chunk: int) -> list[int]:
    """Generate greedily with the whole model in chunks of this size."""
    stage = TransformerStage(store, range(CONFIG.n_layers))
    stage.load()
    state, tokens = stage.init(), []
    for at in range(0, len(ids), chunk):
        y = stage.forward(np.asarray([ids[at : at + chunk]]), state, rows=1)
    for _ in range(COUNT):
        tokens.append(int(y[0, -1].argmax()))
        y = stage.forward(np.asarray([tokens[-1:]]), state, rows=1)
    return tokens


def by_the_formulas(ids: tuple[int, ...]) -> list[int]:
    tokens = list(ids)
    for _ in range(COUNT):
        tokens.append(int(logits(CONFIG, TENSORS, np.asarray(tokens))[-1].argmax()))
    return tokens[len(ids) :]


def generated_apart(store: WeightStore, folder: Path) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.inference.pipeline.long_context"]
    done = subprocess.run(
        [*command, str(store.location).removeprefix("file://"), str(folder / "spill")],
        # What is freed goes back at once, so that what is measured is what is held.
        env=os.environ | {"PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "65536"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.slow
def test_a_long_prompt_takes_bounded_memory(store: WeightStore, tmp_path: Path) -> None:
    expected = in_one_process(store, prompt(), 1000)  # and the kernels are compiled
    said = generated_apart(store, tmp_path)
    assert said["tokens"] == expected
    assert said["short"] == by_the_formulas(prompt(1024))

    layers = (range(CUT), range(CUT, CONFIG.n_layers))
    bounds = [KVCache.bytes_at(CONFIG, part, LENGTH + COUNT, chunk=CHUNK) for part in layers]
    assert all(position >= LENGTH for position in said["positions"])
    assert all(size <= bound for size, bound in zip(said["caches"], bounds, strict=True))
    # All layers of the first stage have a window: nothing of it grows with the text.
    assert bounds[0] == KVCache.bytes_at(CONFIG, layers[0], 2 * CHUNK, chunk=CHUNK)
    assert len(said["journals"]) == 1 and 0 < said["journals"][0] <= JOURNAL
    assert said["spilled"][0] >= LENGTH // CHUNK - JOURNAL // (CHUNK * CONFIG.hidden_size * 4)

    chunk = CHUNK * CONFIG.hidden_size * 4
    # A cache that grows is copied: the old one and the new one are there at once.
    bound = 2 * sum(bounds) + JOURNAL + ON_THE_WAY * chunk + ALLOWANCE
    print(f"peak grew by {said['grown'] / 2**20:.1f} MiB, bound {bound / 2**20:.1f} MiB")
    assert said["grown"] <= bound
    # What would be kept without windows and without the spill does not fit under it.
    unbounded = LENGTH * (KVCache.bytes_per_token(CONFIG, range(CONFIG.n_layers)) + CONFIG.hidden_size * 4)
    assert bound < unbounded
