"""What workers make samples with: importable there, and the same wherever it runs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from distributed import get_worker

from dask_sdc.dataset import Output, work
from dask_sdc.dataset.layout import Layout
from dask_sdc.recovery import SampleUnavailable
from tests.cluster.waiting import until

OUTPUTS = {
    "ids": Output("i8", (None,), 8),
    "hidden": Output("f4", (None, 4), 8, "ragged", like="ids"),
    "score": Output("f8"),
}


def made(k: int) -> dict[str, Any]:
    """Return the sample of a number."""
    rng = np.random.default_rng(int(k))
    n = int(rng.integers(1, 9))
    return {"ids": np.arange(n), "hidden": rng.normal(size=(n, 4)).astype("f4"), "score": np.float64(k)}


def some_fail(k: int) -> Any:
    """Fail for every 33rd number, and leave every 50th out."""
    if k % 33 == 7:
        raise ValueError(f"bad input {k}")
    return SampleUnavailable("not wanted") if k % 50 == 9 else made(k)


def expected(n: int) -> tuple[list[int], list[int]]:
    """Return the numbers that `some_fail` fails for, and leaves out."""
    failed = [k for k in range(n) if k % 33 == 7]
    return failed, [k for k in range(n) if k % 50 == 9 and k not in failed]


class Once:
    """Does something the first time that a number comes up, anywhere; a file says whether it did.

    Parameters
    ----------
    folder : path
        Where the files are.
    at : dict of int to str
        Per number what happens: "kill" or "freeze" this worker, or kill it "while it writes" what it makes
        next; "raise", "hang", or "nan" in the sample.
    """

    def __init__(self, folder: Path, at: dict[int, str]) -> None:
        self.folder, self.at = str(folder), at

    def __call__(self, k: int) -> Any:
        """Make a sample."""
        found = some_fail(k)
        what = self.at.get(int(k))
        if what is None or not self._first(int(k)):
            return found
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "while it writes":
            Path.replace = _die  # type: ignore[assignment,method-assign]
            return found
        if what == "hang":
            threading.Event().wait()
        if what == "raise":
            raise OSError("the first time only")
        return {**found, "score": np.float64("nan")}

    def _first(self, k: int) -> bool:
        try:
            (Path(self.folder) / str(k)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _die(*paths: Path) -> None:
    """Take the place of the moving of a file to where it belongs."""
    os.kill(os.getpid(), signal.SIGKILL)


class Large:
    """Makes the samples of `made`, and weighs some bytes."""

    def __init__(self, n_bytes: int) -> None:
        self.weight = bytes(n_bytes)

    def __call__(self, k: int) -> Any:
        """Make a sample."""
        return made(k)


class Killer:
    """Takes its worker along, every time."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, k: int) -> Any:
        """Make a sample, or die."""
        if k == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return made(k)


class Liar:
    """Flips a bit of some samples on one worker, silently.

    Parameters
    ----------
    worker : str
        Its address.
    every : int
        Of which samples.
    """

    def __init__(self, worker: str, every: int) -> None:
        self.worker, self.every = worker, every

    def __call__(self, k: int) -> Any:
        """Make a sample."""
        found = made(k)
        if get_worker().address == self.worker and k % self.every == 0:
            found["score"] = (found["score"].view(np.int64) ^ 1).view(np.float64)
        return found


class Broken:
    """Fails from some number on, and counts how often it was asked."""

    def __init__(self, folder: Path, first: int) -> None:
        self.folder, self.first = str(folder), first

    def __call__(self, k: int) -> Any:
        """Make a sample, or fail and say where."""
        if k >= self.first:
            with open(Path(self.folder) / get_worker().address.replace("/", "_"), "a") as file:
                file.write(f"{k}\n")
            raise RuntimeError("the simulator is gone")
        return made(k)


def at_row(row: Any) -> Any:
    """Return the sample of a row of an array."""
    return made(int(np.asarray(row).reshape(-1)[0]))


#: What can go wrong in a sample that harms no other one, and what its reason says of it.
ODD = {
    "a reason that is no UTF-8": r"ValueError: \udcff",
    "sys.exit": "RuntimeError: SystemExit: 3",
    "a task that was cancelled": "RuntimeError: CancelledError",
    "left out without a reason": "sample 5: unavailable, no reason given",
    "left out with another reason": "17",
    "left out, no UTF-8": r"\udcff",
    "a masked value": "expected no masked values, got some",
    "an input that is spoilt": "ValueError: 6.0",
}


class Odd:
    """Does something odd for the number 5, in every attempt."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self, row: Any) -> Any:
        """Make a sample of an array, which it changes."""
        row += 1
        return self._odd(row) if row[0] == 6 else row[0]

    def _odd(self, row: Any) -> Any:
        match self.what:
            case "a reason that is no UTF-8":
                raise ValueError("\udcff")
            case "sys.exit":
                sys.exit(3)
            case "a task that was cancelled":
                raise asyncio.CancelledError
            case "left out without a reason":
                return SampleUnavailable()
            case "left out with another reason":
                return SampleUnavailable(17)  # type: ignore[arg-type]
            case "left out, no UTF-8":
                return SampleUnavailable("\udcff")
            case "a masked value":
                return np.ma.masked_array(1.0, mask=True)
        raise ValueError(row[0])


class _Written:
    """Knows which batches of a dataset, of one sample each, are there."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.folder, self.store = str(folder), str(store)

    def written(self, k: int) -> bool:
        """Say whether somebody vouches for a batch."""
        return bool(np.any(zarr.open_array(Path(self.store) / "checksums", mode="r")[k]))

    def first(self, what: str, k: int) -> bool:
        """Say whether nobody has done something yet, and note at which number it is done."""
        try:
            with (Path(self.folder) / what).open("x") as file:
                file.write(str(k))
        except FileExistsError:
            return False
        return True


class LateLiar(_Written):
    """Is wrong on one worker: at the first batch at once, at the second when it was made again elsewhere.

    The last sample is there when that second batch was written, or was refused to be.

    Parameters
    ----------
    folder, store : path
        Of files that say what happened, and of the dataset.
    worker : str
        Address of who lies; it has two threads.
    last : int
        Number of the last sample.
    """

    def __init__(self, folder: Path, store: Path, worker: str, last: int) -> None:
        super().__init__(folder, store)
        self.worker, self.last = worker, last

    def __call__(self, k: int) -> Any:
        """Make a sample."""
        found = made(k)
        if get_worker().address == self.worker:
            if self.first("wrong", k):
                found["score"] += 1
            elif not self.written(k) and self.first("late", k):
                until(lambda: self.written(k))
                found["score"] += 1
                work._writing = partial(self._told, work._writing, threading.get_ident())
        elif k == self.last:
            until((Path(self.folder) / "over").exists)
        return found

    @contextmanager
    def _told(self, writing: Any, thread: int, *order: Any) -> Iterator[None]:
        """Take the place of the door of a worker; say when a thread has left it."""
        try:
            with writing(*order):
                yield
        finally:
            if threading.get_ident() == thread:
                (Path(self.folder) / "over").touch()


class Overwriter(_Written):
    """Takes its worker along at sample 0; when that is there after all, somebody writes over it."""

    def __call__(self, k: int) -> Any:
        """Make a sample."""
        if k == 0 and self.first("killed", k):
            os.kill(os.getpid(), signal.SIGKILL)
        if k == 1:
            until(lambda: self.written(0))
            if self.first("overwritten", k):
                layout, _, arrays = Layout.of(zarr.open_group(self.store, mode="r+"))
                layout.write(arrays, 0, layout.laid_out(0, [{**made(0), "score": np.array(-1.0)}]))
        return made(k)
