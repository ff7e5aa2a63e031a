"""When kernels are compiled, and what happens where nothing can be cached."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
from numba.core.caching import CacheImpl

from dask_sdc.statistics.kernels import jit, moments

NOTHING_COMPILED = """
import pkgutil, sys
import dask_sdc.statistics
from numba.core.dispatcher import Dispatcher
kernels = [
    (name, value)
    for name, module in sys.modules.items()
    if name.startswith("dask_sdc")
    for value in vars(module).values()
    if isinstance(value, Dispatcher)
]
assert len(kernels) > 10, kernels
compiled = [(name, kernel) for name, kernel in kernels if kernel.signatures]
assert not compiled, compiled
"""


def test_nothing_is_compiled_at_import() -> None:
    subprocess.run([sys.executable, "-c", NOTHING_COMPILED], check=True, timeout=300)


def test_works_where_no_cache_is_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x: float) -> float:
        return 2 * x

    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    kernel = jit()(double)
    assert kernel(2.0) == 4.0 and kernel.stats.cache_path is None


def test_caches_where_it_can() -> None:
    assert moments._merge.stats.cache_path


def test_concurrent_calls_give_the_bits_of_one() -> None:
    """Kernels run without the GIL and share nothing."""
    x = np.random.default_rng(0).normal(size=(20_000, 5))
    expected = moments.block_moments(x, None, True, False)
    results: list[dict[str, np.ndarray]] = []

    def work() -> None:
        results.extend(moments.block_moments(x, None, True, False) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert all(result[f].tobytes() == expected[f].tobytes() for result in results for f in expected)
