"""CUDA kernels proved without a card: they compile for three generations, and run on the host.

Every ``.cu`` is compiled for sm_70, sm_80 and sm_90, all kernels that are launched and no warning, by
NVRTC (the package nvidia-cuda-nvrtc-cu12, in the extra ``dev``) or nvcc; without --quick by all that
are found. CUDA 13 no longer knows sm_70: where nothing older is there, that is said, and sm_75 stands
in for it.

The same sources, compiled for the host with tests/cuda/host_cuda.h, are held against long double and
plain NumPy, in three orders of threads and blocks. Errors are in roundings of float64 (float32 for
models) of the sum of magnitudes. What the machine has no compiler for is skipped, and the closing line
says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import array_api_compat.numpy as numpy_api
import numpy as np
from _bench import Bench, main
from _cuda import Compiler, compilers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dask_sdc.inference.model.cache import LayerCache  # noqa: E402
from dask_sdc.inference.model.kernels.cuda.attention import attend_chunk, attend_rows  # noqa: E402
from dask_sdc.inference.model.kernels.cuda.rows import normalise  # noqa: E402
from dask_sdc.statistics import mixture_model  # noqa: E402
from dask_sdc.statistics.gaussian import components_of  # noqa: E402
from dask_sdc.statistics.kernels import covariance, kmeans, mixture, moments  # noqa: E402
from dask_sdc.statistics.kernels.cuda import source  # noqa: E402
from dask_sdc.statistics.kernels.cuda.histogram import cuda_count  # noqa: E402
from dask_sdc.statistics.kernels.cuda.kmeans import assign, cuda_lloyd  # noqa: E402
from dask_sdc.statistics.kernels.cuda.mixture import cuda_expectation  # noqa: E402
from tests.cuda.emulated import COMPILER, HostDevice, program, variants  # noqa: E402

ARCHITECTURES = (70, 80, 90)
#: What stands in for an architecture that no compiler knows.
STAND_IN = {70: 75}

U, U32 = 2.0**-53, 2.0**-24
Array = np.ndarray


def sources() -> list[Path]:
    """Return the kernels of the package."""
    import dask_sdc

    return sorted(Path(dask_sdc.__file__).parent.rglob("*.cu"))


def chosen(found: list[Compiler], every: bool) -> Iterator[tuple[int, Compiler]]:
    """Yield what to compile with for each architecture."""
    for wanted in ARCHITECTURES:
        for architecture in (wanted, STAND_IN.get(wanted)):
            able = [compiler for compiler in found if architecture in compiler.architectures]
            if able:
                yield from ((architecture, compiler) for compiler in (able if every else able[:1]))
                break


def compile_all(bench: Bench) -> None:
    """Compile all kernels for all architectures."""
    found = compilers()
    if not found:
        bench.figure("compiled", "skipped(neither_NVRTC_nor_nvcc)")
        return
    pairs = list(chosen(found, every=not bench.quick))
    files = sources()
    jobs = [(path, *pair) for pair in pairs for path in files]

    def compile_one(job: tuple[Path, int, Compiler]) -> int:
        path, architecture, compiler = job
        compiler.compile(path.name, source(path), variants(path), architecture)
        return len(variants(path))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = sum(pool.map(compile_one, jobs))
    for architecture, compiler in pairs:
        bench.figure(f"sm_{architecture}", compiler.name)
    for wanted in ARCHITECTURES:
        if wanted not in {architecture for architecture, _ in pairs}:
            bench.figure(f"sm_{wanted}", "skipped(unknown_to_" + "_".join(c.name for c in found) + ")")
    bench.figure("compiled", kernels, equal=len(pairs) * sum(len(variants(path)) for path in files))


class Orders:
    """Runs of one computation in several orders of threads and blocks, which must give the same bits."""

    def __init__(self) -> None:
        self.differences = 0
        self.launches = 0

    def __call__(self, run: Callable[[HostDevice], Any]) -> Any:
        """Return the result."""
        found = []
        for schedule, most in ((0, None), (1, 1), (7, 3)):
            device = HostDevice(schedule, most)
            found.append(run(device))
            self.launches += len(device.launched)
        values = [list(r.values()) if isinstance(r, dict) else list(r) for r in found]
        bits = [[np.asarray(v).tobytes() for v in row if v is not None] for row in values]
        self.differences += bits.count(bits[0]) != len(bits)
        return found[0]


def moments_error(orders: Orders, n: int) -> float:
    """Error of moments about a mean of 1e9 times the spread, of weights, gaps and odd sizes."""
    worst = 0.0
    for p, dtype, centre, gaps in ((1, "f8", 1e9, 0.0), (3, "f4", 10.0, 0.3), (257, "f8", -3.0, 0.1)):
        rng = np.random.default_rng(p)
        x = (centre + rng.normal(size=(max(n // p, 2), p))).astype(dtype)
        x[rng.random(x.shape) < gaps] = np.nan
        w = rng.uniform(0.5, 2, len(x)) if gaps else None
        got = orders(lambda device, x=x, w=w: moments.device_moments(device, x, w, True, True))
        here = ~np.isnan(x)
        mass = here * (np.ones(len(x)) if w is None else w)[:, None].astype(np.longdouble)
        wide = np.where(here, x - np.asarray(centre, dtype), 0).astype(np.longdouble)
        d = (wide - (mass * wide).sum(axis=0) / mass.sum(axis=0)) * here
        for k in (2, 3, 4):
            size = (mass * abs(d) ** k).sum(axis=0)
            worst = max(worst, float(np.max(abs(got[f"M{k}"] - (mass * d**k).sum(axis=0)) / size)) / U)
    return worst


def wrong_counts(orders: Orders, n: int) -> int:
    """Counts that differ from those of a search, on uniform and uneven edges and on the edges themselves."""
    rng, wrong = np.random.default_rng(1), 0
    for edges in (np.linspace(-3, 3, 101), np.geomspace(1e-5, 1e5, 41), np.linspace(-4, 4, 3001)):
        for dtype in ("f4", "f8"):
            x = np.concatenate([rng.normal(size=n), rng.choice(edges, n), [np.nan, np.inf, -np.inf]])
            x = x.astype(dtype)
            counts = orders(lambda device, x=x, e=edges: cuda_count(device, x[:, None], (e,), None, 1))[0]
            wide = x.astype(np.float64)
            slots = np.searchsorted(edges, wide, side="right") - (wide == edges[-1])
            slots[np.isnan(wide)] = len(edges) + 1
            wrong += int(np.sum(counts != np.bincount(slots, minlength=len(edges) + 2)))
    return wrong


def scatter_error(orders: Orders, n: int) -> float:
    """Error of a scatter matrix about a mean of 1e6 times the spread."""
    x = 1e6 + np.random.default_rng(2).normal(size=(n, 7))
    got = orders(lambda device: covariance.scatter_of(covariance.DeviceCentred(device, x, None)))
    d = (x - 1e6).astype(np.longdouble)
    d -= d.mean(axis=0)
    exact = np.einsum("ri,rj->ij", d, d)
    size = np.sqrt(np.outer(exact.diagonal(), exact.diagonal()))
    return float(np.max(abs(got["scatter"] - exact) / size)) / U


def kmeans_errors(orders: Orders, n: int) -> tuple[int, float]:
    """Labels that are not those of plain float64, and the largest error of the sums."""
    rng = np.random.default_rng(3)
    x, centres = np.round(rng.normal(size=(n, 5)), 1).astype("f4"), np.round(rng.normal(size=(11, 5)), 1)
    label, _ = orders(lambda device: assign(device, x, centres))
    distance = np.zeros((len(centres), n))
    for j in range(x.shape[1]):  # in the order of the CPU kernel, one rounding after the other
        z = x[:, j].astype(np.float64) - centres[:, j, None]
        distance += z * z
    wrong = int(np.sum(label != distance.argmin(axis=0)))
    got = kmeans.LloydSums(*orders(lambda device: cuda_lloyd(device, x, None, centres)))
    z = x.astype(np.longdouble) - centres[label]
    exact = np.array([z[label == k].sum(axis=0) for k in range(11)])
    size = np.array([abs(z[label == k]).sum(axis=0) for k in range(11)])
    return wrong, float(np.max(abs(got.sums - exact) / size)) / U


def mixture_error(orders: Orders, n: int) -> float:
    """Error of responsibilities and moments of all kinds of components against plain expressions."""
    rng, worst = np.random.default_rng(4), 0.0
    x = rng.normal(0, 2, (n, 3)).astype("f4")
    full = np.eye(3) + 0.2
    for kind, given in (
        ("full", [full] * 5),
        ("tied", full),
        ("diag", np.ones((5, 3))),
        ("spherical", np.ones(5)),
    ):
        model = mixture_model(
            np.full(5, 0.2), rng.normal(0, 2, (5, 3)), covariances=given, covariance_type=kind
        )
        components = components_of(model, kind)
        got = orders(lambda device, c=components: cuda_expectation(device, c, x, None))
        for mine, other in zip(
            got, mixture.array_api_expectation(numpy_api, components, x, None), strict=True
        ):
            worst = max(worst, float(np.max(abs(mine - other)) / np.max(np.abs(other))) / U)
    return worst


def model_errors(orders: Orders, steps: int) -> tuple[float, float]:
    """Errors of norms, and of decode and prefill attention with a window and sinks."""
    rng = np.random.default_rng(5)
    x, gain = rng.normal(size=(3, 577)).astype("f4"), np.ones(577, np.float32)
    norm = orders(lambda device: (normalise(device, x, gain, np.empty(0, "f4"), 1e-5),))[0]
    wide = x.astype(np.longdouble)
    exact = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5)
    of_norm = float(np.max(abs(norm - exact))) / U32
    length, heads, width, window, sinks = 300, 6, 48, 150, 3
    k, v = (rng.normal(size=(1, 2, length + steps, width)).astype("f4") for _ in range(2))
    q = (rng.normal(size=(steps, heads, width)) / np.sqrt(width)).astype("f4")
    layer = LayerCache(k, v, window)
    mixed = np.empty((steps, heads, width))
    for t, h in np.ndindex(steps, heads):
        seen = [s for s in range(length + t + 1) if s > length + t - window or s < sinks]
        score = k[0, h // 3, seen].astype(np.longdouble) @ q[t, h]
        p = np.exp(score - score.max())
        mixed[t, h] = p / p.sum() @ v[0, h // 3, seen]
    of_attention = 0.0
    for attend in (
        lambda device: (attend_rows(device, q, layer, steps, length, sinks, None),),
        lambda device: (attend_chunk(device, q, layer, steps, length, sinks),),
    ):
        got = orders(attend)[0].reshape(mixed.shape)
        of_attention = max(of_attention, float(np.max(abs(got - mixed))) / U32)
    return of_norm, of_attention


def run_all(bench: Bench) -> None:
    """Run the kernels on the host."""
    if COMPILER is None:
        bench.figure("emulated", "skipped(no_C++_compiler)")
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(program, sources()))
    n, orders = 2000 if bench.quick else 50_000, Orders()
    bench.figure("moments_roundings", moments_error(orders, n), at_most=64)
    bench.figure("wrong_counts", wrong_counts(orders, n), equal=0)
    bench.figure("scatter_roundings", scatter_error(orders, n // 4), at_most=64)
    labels, sums = kmeans_errors(orders, n)
    bench.figure("wrong_labels", labels, equal=0)
    bench.figure("kmeans_roundings", sums, at_most=64)
    bench.figure("mixture_roundings", mixture_error(orders, n // 4), at_most=4096)
    norm, attention = model_errors(orders, 20 if bench.quick else 150)
    bench.figure("norm_roundings32", norm, at_most=8)
    bench.figure("attention_roundings32", attention, at_most=64)
    bench.figure("launches", orders.launches)
    bench.figure("results_that_depend_on_the_order", orders.differences, equal=0)


def measure(bench: Bench) -> None:
    """Run on the host, then compile."""
    run_all(bench)
    compile_all(bench)


if __name__ == "__main__":
    main("kernels_host", measure, __doc__)
