"""Audited rounds on two workers of one thread each, against other packages on the same two cores.

EM: iterations of a Gaussian mixture (8 components, 16 features, a million rows) in the middle of an audited
fit of a persisted dask array, against one iteration of mixle 0.8.2 (without audits on two workers; audited on
ten, the fewest with which its rate of 0.1 audits anything) and of scikit-learn on two threads, from the same
start. Peers run in processes of their own, with one BLAS thread per worker; their data are loaded before.
Moments: the kernel on two threads against what two threads can read (`kernels_cpu.py` has one thread, errors,
histograms and covariances), and audited rounds against ``da.mean`` and ``da.var`` computed together.

All contestants take turns. A quick run leaves out full covariances and mixle's ten workers, which take
minutes to start, and has no bounds where its fewer rows leave mostly the overhead of a round. Without mixle
(``pip install --no-deps mixle==0.8.2``) its figures are left out. An iteration of scikit-learn ends with one
more expectation step, as all its fits do.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import zarr
from _bench import Bench, Timings, interleave, main
from distributed import Client, LocalCluster, wait
from em_kernels import COMPONENTS, data, start
from kernels_cpu import COLUMNS, read, update

from dask_sdc import Auditor
from dask_sdc.statistics import GaussianMixture, Moments

SHARDS = 64

#: Iterations per fit; the start is so near that more would converge.
ITERATIONS = 4

#: Rows of a persisted block, and of a Zarr chunk of 16 MiB, whose moments are taken.
BLOCK, CHUNK = 62_500, 2**24 // (8 * COLUMNS)

#: Least speed-ups: unaudited mixle, mixle on ten workers at rates 0.1 and 1, scikit-learn.
REQUIRED = {
    "diag": {"mixle": 15, "mixle_0.1": 30, "mixle_1": 100, "sklearn": 7},
    "full": {"mixle": 4, "mixle_0.1": 10, "mixle_1": 20, "sklearn": 7},
}


class Peer:
    """Another package in a process of its own, see `_peer.py`.

    Parameters
    ----------
    name, kind, folder : str
        What `_peer.serve` takes.
    threads : int
        Threads of BLAS and OpenMP in each of its processes.
    """

    def __init__(self, name: str, kind: str, folder: str, threads: int) -> None:
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        script = str(Path(__file__).with_name("_peer.py"))
        self._process = subprocess.Popen(
            [sys.executable, "-P", script, name, kind, folder],  # -P: see _bench.py on coverage.py
            env={**os.environ, **dict.fromkeys(names, str(threads))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._name = name
        self._answer()

    def _answer(self) -> str:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise RuntimeError(f"{self._name} ended with exit code {self._process.wait()}")
        return line

    def step(self, rate: float = 0.0) -> np.ndarray:
        """Run one iteration and return its means, shape (k, d)."""
        print(rate, file=self._process.stdin, flush=True)
        return np.array(json.loads(self._answer()))

    def close(self) -> None:
        """End the process and what it has spawned."""
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()


@contextmanager
def cluster() -> Iterator[Client]:
    """Start two workers of one thread."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", silence_logs=50) as workers,
        Client(workers) as client,
    ):
        yield client


def persisted(client: Client, path: Path, chunks: int) -> Any:
    """Have the workers read their blocks of a .npy file."""
    shape = np.load(path, mmap_mode="r").shape
    bounds = [shape[0] * i // chunks for i in range(chunks + 1)]
    blocks = [
        da.from_delayed(dask.delayed(_rows)(path, a, b), (b - a, *shape[1:]), np.float64)
        for a, b in itertools.pairwise(bounds)
    ]
    x = client.persist(da.concatenate(blocks))
    wait(x)
    return x


def _rows(path: Path, begin: int, end: int) -> np.ndarray:
    return np.array(np.load(path, mmap_mode="r")[begin:end])


# -- EM ------------------------------------------------------------------------------------------


def fit(auditor: Auditor, estimator: GaussianMixture, x: Any) -> None:
    """Run some audited iterations from the start."""
    done = auditor.fit(estimator, x, max_iter=ITERATIONS, tol=0.0)
    if done.n_iter != ITERATIONS or auditor.rounds[-1].audited < 1 or auditor.receipts:
        raise RuntimeError(f"expected {ITERATIONS} clean, audited iterations, got {auditor.report()}")


def speed_up(bench: Bench, kind: str, name: str, times: Timings, base: str, rows: int) -> None:
    """Hand in rows per second and speed-up of one peer; fewer rows than a million have no bound."""
    bench.figure(f"{kind}_{name}_mrows_s", rows / times.median(name) / 1e6)
    bound = None if bench.quick else REQUIRED[kind][name]
    bench.figure(f"{kind}_over_{name}", times.ratio(name, base) * ITERATIONS, at_least=bound)


def mixture(bench: Bench, client: Client, kind: str, folder: Path, with_mixle: bool) -> None:
    """Compare iterations of one covariance type."""
    rows = 250_000 if bench.quick else 1_000_000
    sample, means = data(rows)
    model = start(kind, means)
    invert = np.reciprocal if kind == "diag" else np.linalg.inv
    np.save(folder / "rows.npy", sample)
    np.savez(folder / "start.npz", precisions=invert(model["covariances"]), **model)
    x = persisted(client, folder / "rows.npy", SHARDS)
    estimator = GaussianMixture(COMPONENTS, kind, init=model)
    with Auditor(client, audit_rate=0.1, seed=1) as tenth, Auditor(client, audit_rate=1.0, seed=1) as all_:
        expected = tenth.fit(estimator, x, max_iter=1).result.means
        ours = {"ours": partial(fit, tenth, estimator, x)}
        with opened(bench, {"sklearn": 2, **({"mixle": 1} if with_mixle else {})}, kind, folder) as steps:
            agree(bench, kind, expected, steps)
            times = interleave(ours | steps, rounds=2 if bench.quick else 9)
        bench.figure(f"{kind}_mrows_s", rows * ITERATIONS / times.median("ours") / 1e6)
        for name in steps:
            speed_up(bench, kind, name, times, "ours", rows)
        if bench.quick or not with_mixle:
            return
        with opened(bench, {"mixle_audited": 1}, kind, folder) as steps:
            agree(bench, kind, expected, steps)
            step = steps["mixle_audited"]
            ours["ours_all"] = partial(fit, all_, estimator, x)
            times = interleave(
                ours | {"mixle_0.1": partial(step, 0.1), "mixle_1": partial(step, 1.0)}, rounds=3
            )
    bench.figure(f"{kind}_rate_1_mrows_s", rows * ITERATIONS / times.median("ours_all") / 1e6)
    speed_up(bench, kind, "mixle_0.1", times, "ours", rows)
    speed_up(bench, kind, "mixle_1", times, "ours_all", rows)


def agree(bench: Bench, kind: str, expected: np.ndarray, steps: dict[str, Callable[..., np.ndarray]]) -> None:
    """Check that peers arrive at the same means."""
    for name, step in steps.items():
        apart = float(np.max(np.abs(step() - expected)))
        bench.figure(f"{kind}_{name}_apart", apart, at_most=1e-9)


@contextmanager
def opened(
    bench: Bench, peers: dict[str, int], kind: str, folder: Path
) -> Iterator[dict[str, Callable[..., np.ndarray]]]:
    """Start peers; yield what runs an iteration of each."""
    started: dict[str, Peer] = {}
    try:
        for name, threads in peers.items():
            bench.say(f"  {name}, {kind}: loading")
            started[name] = Peer(name, kind, str(folder), threads)
        yield {name: peer.step for name, peer in started.items()}
    finally:
        for peer in started.values():
            peer.close()


# -- moments -------------------------------------------------------------------------------------


def two_threads(bench: Bench, x: np.ndarray) -> None:
    """Compare the moments of two halves with reading them, each on a thread of its own."""
    halves = np.array_split(x, 2)
    with ThreadPoolExecutor(2) as pool:

        def both(function: Callable[[np.ndarray], Any]) -> None:
            list(pool.map(function, halves))

        contestants = {
            "read": partial(both, lambda half: read(half.reshape(-1), 0)),
            "prefetched": partial(both, lambda half: read(half.reshape(-1), 512)),
            "moments": partial(both, partial(update, Moments())),
        }
        times = interleave(contestants, rounds=7 if bench.quick else 21)
    fastest = min(("read", "prefetched"), key=times.median)
    bench.figure("two_threads_read_gb_s", x.nbytes / times.median(fastest) / 1e9)
    bench.figure("moments_of_two_threads_read", times.ratio(fastest, "moments"), at_least=0.55)


def means_and_variances(x: Any) -> tuple[np.ndarray, np.ndarray]:
    """Compute both together with Dask."""
    return dask.compute(x.mean(axis=0), x.var(axis=0))  # type: ignore[no-any-return, no-untyped-call]


def audited_moments(
    bench: Bench, name: str, client: Client, ours: Any, theirs: Any, required: float | None
) -> None:
    """Compare audited moments with Dask's mean and variance on the same cluster."""
    with Auditor(client, audit_rate=0.1, seed=1) as auditor:
        got, (mean, variance) = auditor.accumulate(Moments(), ours), means_and_variances(theirs)
        apart = max(np.max(np.abs(got.mean / mean - 1)), np.max(np.abs(got.variance() / variance - 1)))
        bench.figure(f"{name}_apart", float(apart), at_most=1e-9)
        contestants = {
            "audited": partial(auditor.accumulate, Moments(), ours),
            "dask": partial(means_and_variances, theirs),
        }
        times = interleave(contestants, rounds=5 if bench.quick else 15)
    bench.figure(f"{name}_seconds", times.median("audited"))
    bench.figure(f"{name}_over_dask", times.ratio("dask", "audited"), at_least=required)


def moments(bench: Bench, client: Client, folder: Path) -> None:
    """Measure moments of (n, 16) float64."""
    rows = 1_000_000 if bench.quick else 4_000_000
    x = np.random.default_rng(0).normal(3.0, 2.0, size=(rows, COLUMNS))
    two_threads(bench, x)
    np.save(folder / "moments.npy", x)
    blocks = persisted(client, folder / "moments.npy", rows // BLOCK)
    audited_moments(bench, "persisted_moments", client, blocks, blocks, None if bench.quick else 5.0)
    del blocks
    array = zarr.create_array(
        str(folder / "x.zarr"), shape=x.shape, chunks=(CHUNK, COLUMNS), dtype="f8", compressors=None
    )
    array[:] = x
    audited_moments(bench, "zarr_moments", client, array, da.from_zarr(array), 2.2)


def measure(bench: Bench) -> None:
    """Measure all of it."""
    with_mixle = importlib.util.find_spec("mixle") is not None
    if not with_mixle:
        bench.say("mixle is not installed: its figures are left out (pip install --no-deps mixle==0.8.2)")
    with tempfile.TemporaryDirectory() as name, cluster() as client:
        folder = Path(name)
        moments(bench, client, folder)
        for kind in ("diag",) if bench.quick else ("diag", "full"):
            mixture(bench, client, kind, folder, with_mixle)


if __name__ == "__main__":
    main("peers", measure, __doc__)
