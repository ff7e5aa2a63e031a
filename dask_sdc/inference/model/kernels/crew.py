"""Threads that help with compiled work, as many as the process may use and no more than are free."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numba

from dask_sdc.exceptions import InputError

__all__ = ["set_threads", "share", "threads"]

_lock = threading.Lock()
_threads: int | None = None
_pool: ThreadPoolExecutor | None = None
_pool_of: tuple[int, int] = (0, 0)
_busy: list[Future[None]] = []


def set_threads(count: int | None) -> None:
    """Set how many threads a forward pass of this process may use; results do not depend on it.

    Parameters
    ----------
    count : int or None
        At least 1 and at most ``NUMBA_NUM_THREADS``; None is all of these.

    Raises
    ------
    InputError
        If the count is outside of this.
    """
    global _threads
    most = _most()
    if count is not None and not 1 <= count <= most:
        raise InputError(f"threads: expected 1..{most}, got {count}")
    _threads = count


def threads() -> int:
    """Return how many threads a forward pass may use."""
    return _threads or _most()


def _most() -> int:
    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    return most


def share(function: Callable[..., None], *args: Any) -> None:
    """Call a function here and, with the same arguments, on every helper that is free.

    Parameters
    ----------
    function : callable
        Compiled without the GIL; its calls share a job (`dask_sdc.inference.model.kernels.work`), and the
        one here returns when the job is done. A helper that comes too late finds nothing to do and touches
        nothing.
    *args : object
        Its arguments.
    """
    global _busy
    count = threads()
    if count > 1:
        with _lock:
            _busy = [future for future in _busy if not future.done()]
            pool = _helpers(count - 1)
            _busy += [pool.submit(function, *args) for _ in range(count - 1 - len(_busy))]
    function(*args)


def _helpers(count: int) -> ThreadPoolExecutor:
    """Return the pool; a forked child and another number of threads have one of their own."""
    global _pool, _pool_of, _busy
    if _pool is None or _pool_of != (os.getpid(), count):
        if _pool is not None and _pool_of[0] == os.getpid():
            _pool.shutdown(wait=False)
        _pool, _pool_of, _busy = ThreadPoolExecutor(count, "sdc-rows"), (os.getpid(), count), []
    return _pool
