"""Row kernels against float64, their work sharing, and the mark that keeps stale machine code away."""

from __future__ import annotations

import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError
from dask_sdc.inference.model import set_threads, threads
from dask_sdc.inference.model.kernels import rows
from dask_sdc.inference.model.kernels.work import new_job

Array = np.ndarray[Any, Any]


def product(h: Array, w: Array) -> Array:
    w = w.view()
    w.flags.writeable = False  # as weights are
    out = np.empty((len(h), len(w)), np.float32)
    rows.head(new_job(1), h, w, out)
    return out


@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 24), st.integers(0, 9))
def test_products_have_few_roundings(count: int, outputs: int, vectors: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    h = rng.normal(size=(count, 16 * vectors)).astype(np.float32)
    w = rng.normal(size=(outputs, 16 * vectors)).astype(np.float32)
    exact = h.astype(np.float64) @ w.astype(np.float64).T
    magnitude = np.abs(h.astype(np.float64)) @ np.abs(w.astype(np.float64)).T
    # At most 8 terms of a run, the runs, and 4 steps of folding.
    roundings = 8 + vectors / 8 + 4
    assert (np.abs(product(h, w) - exact) <= roundings * 2.0**-24 * magnitude).all()


def test_bits_are_the_written_order() -> None:
    """The order of summation in NumPy, where fused multiply-adds are emulated in float64."""
    rng = np.random.default_rng(0)
    # Few bits each, so that products are exact in float64 and their sum rounds once.
    h, w = (np.round(rng.normal(size=(1, 320)) * 512).astype(np.float32) / 512 for _ in range(2))
    total = np.zeros(16, np.float32)
    for start in range(0, 320, 128):
        run = np.zeros(16, np.float32)
        for i in range(start, min(320, start + 128), 16):
            exact = h[0, i : i + 16].astype(np.float64) * w[0, i : i + 16].astype(np.float64)
            run = (run.astype(np.float64) + exact).astype(np.float32)
        total = total + run
    while len(total) > 1:
        total = total[: len(total) // 2] + total[len(total) // 2 :]
    assert product(h, w).tobytes() == total.tobytes()


@pytest.mark.parametrize("helpers", [0, 1, 5])
def test_a_job_is_done_once_by_whoever_comes(helpers: int) -> None:
    rng = np.random.default_rng(1)
    h = rng.normal(size=(3, 512)).astype(np.float32)
    w = rng.normal(size=(4000, 512)).astype(np.float32)
    expected = product(h, w)
    w.flags.writeable = False
    out, job = np.full((3, 4000), np.nan, np.float32), new_job(1)
    crew = [threading.Thread(target=rows.head, args=(job, h, w, out)) for _ in range(helpers)]
    for helper in crew:
        helper.start()
    rows.head(job, h, w, out)
    assert out.tobytes() == expected.tobytes()
    out[:] = 0
    rows.head(job, h, w, out)  # a helper that comes too late
    for helper in crew:
        helper.join()
    assert not out.any()


def test_special_values_are_kept() -> None:
    h = np.zeros((1, 16), np.float32)
    h[0, 3] = np.inf
    w = np.ones((3, 16), np.float32)
    w[1, 3], w[2, 5] = 0.0, np.nan
    assert product(h, w).tolist()[0][0] == np.inf
    assert np.isnan(product(h, w)[0, 1:]).all()


def test_threads_are_bounded() -> None:
    try:
        set_threads(1)
        assert threads() == 1
        with pytest.raises(InputError, match=r"threads: expected 1\.\.\d+, got 0"):
            set_threads(0)
        with pytest.raises(InputError, match=r"got 100000"):
            set_threads(100_000)
        assert threads() == 1
    finally:
        set_threads(None)


def test_kernels_name_the_sources_that_they_are_compiled_from() -> None:
    """Set `COMPILED_IN` in rows.py to what this shows, or old machine code is taken from disk."""
    folder = Path(rows.__file__).parent
    sources = b"".join((folder / name).read_bytes() for name in ("vector.py", "work.py"))
    assert f"{zlib.crc32(sources):08x}" == rows.COMPILED_IN
