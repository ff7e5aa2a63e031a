"""CPU kernels of the closed-form statistics against what the machine can do, on one thread.

Moments against the read bandwidth of one thread, their errors against exact arithmetic, histograms against
``numpy.histogram``, covariance against ``dgemm`` of the same size. All contestants take turns.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from _bench import Bench, interleave, main
from threadpoolctl import threadpool_limits

from dask_sdc.statistics import Covariance, Histogram, Moments, ShardInfo, Statistic
from dask_sdc.statistics.kernels import jit
from dask_sdc.statistics.kernels.moments import prefetch

COLUMNS = 16


@jit(fastmath=True)
def read(flat: Any, ahead: Any) -> Any:
    """Add up an array in 64 lanes, with or without prefetching: the fastest of both is the bandwidth."""
    lanes = np.zeros(64)
    for at in range(0, flat.size - 255, 256):
        if ahead > 0:
            for line in range(0, 256, 8):
                prefetch(flat, at + ahead + line)
        for c in range(64):
            lanes[c] += (flat[at + c] + flat[at + 64 + c]) + (flat[at + 128 + c] + flat[at + 192 + c])
    return lanes.sum()


def update(statistic: Statistic, x: np.ndarray) -> Any:
    """Return the result of one block."""
    state = statistic.init(ShardInfo(x.shape[1:], x.dtype))
    return statistic.finalize(statistic.update(state, x))


def exact_errors(x: np.ndarray) -> dict[str, float]:
    """Largest relative error of each moment of a block; of M3 against the sum of its magnitudes.

    The mean is compared with rational arithmetic, central moments with a long double about it.
    """
    got = update(Moments(), x)
    errors = dict.fromkeys(("mean", "M2", "M3", "M4"), 0.0)
    for j in range(x.shape[1]):
        total = sum(map(Fraction, x[:, j].tolist()), Fraction(0))
        mean = total / len(x)
        high = np.longdouble(float(mean))
        d = (x[:, j].astype(np.longdouble) - high) - np.longdouble(float(mean - Fraction(float(mean))))
        errors["mean"] = max(errors["mean"], abs(float((Fraction(float(got.mean[j])) - mean) / mean)))
        for k, value in ((2, got.M2), (3, got.M3), (4, got.M4)):
            off = abs(np.longdouble(value[j]) - (d**k).sum()) / (np.abs(d) ** k).sum()
            errors[f"M{k}"] = max(errors[f"M{k}"], float(off))
    return errors


def moments(bench: Bench, rng: np.random.Generator) -> None:
    """Measure moments of (n, 16) float64."""
    x = rng.normal(3.0, 2.0, size=(1_000_000 if bench.quick else 4_000_000, COLUMNS))
    flat = x.reshape(-1)
    contestants = {
        "read": partial(read, flat, 0),
        "prefetched": partial(read, flat, 512),
        "order4": partial(update, Moments(), x),
        "order2": partial(update, Moments(order=2), x),
        "skipna": partial(update, Moments(skipna=True), x),
    }
    times = interleave(contestants, rounds=7 if bench.quick else 15)
    fastest = min(("read", "prefetched"), key=times.median)
    bench.figure("read_gb_s", x.nbytes / times.median(fastest) / 1e9)
    bench.figure("moments_of_read", times.ratio(fastest, "order4"), at_least=0.70)
    bench.figure("moments_order2_of_read", times.ratio(fastest, "order2"), at_least=0.70)
    bench.figure("moments_skipna_of_read", times.ratio(fastest, "skipna"))
    for name, error in exact_errors(x[: 100_000 if bench.quick else 1_000_000, :4]).items():
        bench.figure(f"{name}_error", error, at_most=1e-13)


def histograms(bench: Bench, rng: np.random.Generator) -> None:
    """Measure 1-d histograms; half of the values are on edges in the equality checks."""
    x = rng.normal(size=1_000_000 if bench.quick else 4_000_000)
    uniform = np.linspace(-4.0, 4.0, 51)
    cases = {
        "given_edges": np.sort(rng.normal(size=61)),
        "log_edges": np.logspace(-3, 1, 41),
        "clustered_edges": np.sort(np.append(rng.normal(0.1, 1e-5, 58), [-3.0, 3.0])),
    }
    contestants = {
        "numpy": partial(np.histogram, x, 50, (-4.0, 4.0)),
        "ours": partial(update, Histogram(uniform), x),
    }
    for name, edges in {"uniform_edges": uniform, **cases}.items():
        contestants[f"{name}_numpy"] = partial(np.histogram, x, edges)
        contestants[f"{name}_ours"] = partial(update, Histogram(edges), x)
        checked = np.concatenate((x[: len(x) // 2], rng.choice(edges, len(x) // 2)))
        equal = np.array_equal(update(Histogram(edges), checked).counts, np.histogram(checked, edges)[0])
        bench.figure(f"{name}_equal", equal, equal=True)
    times = interleave(contestants, rounds=5 if bench.quick else 11)
    bench.figure("uniform_speedup", times.ratio("numpy", "ours"), at_least=4.0)
    bench.figure(
        "uniform_edges_speedup", times.ratio("uniform_edges_numpy", "uniform_edges_ours"), at_least=1.0
    )
    for name in cases:
        bench.figure(f"{name}_speedup", times.ratio(f"{name}_numpy", f"{name}_ours"), at_least=1.0)


def covariances(bench: Bench, rng: np.random.Generator) -> None:
    """Measure covariance against xᵀy, the same sizes without symmetry, by one BLAS thread."""
    for d in (64, 128, 256):
        x = rng.normal(3.0, 2.0, size=((4 if bench.quick else 20) * 1_000_000 // d, d))
        contestants = {"dgemm": partial(np.matmul, x.T, x.copy()), "ours": partial(update, Covariance(), x)}
        with threadpool_limits(1, "blas"):
            times = interleave(contestants, rounds=5 if bench.quick else 11)
        bench.figure(f"covariance{d}_of_dgemm", times.ratio("dgemm", "ours"), at_least=0.65)


def measure(bench: Bench) -> None:
    """Measure all kernels."""
    rng = np.random.default_rng(0)
    moments(bench, rng)
    histograms(bench, rng)
    covariances(bench, rng)


if __name__ == "__main__":
    main("kernels_cpu", measure, __doc__)
