"""Everything that wants a GPU: the tests, and the kernels against the bandwidth of the card.

One card, no network, less than 8 minutes. First all tests that are marked ``gpu``, by pytest in a process of
its own. Then each kernel, timed by events of the device: bytes that it has to move, the fraction of the copy
bandwidth measured in the same run, and how much quicker it is than plain CuPy expressions for the same.
A call is timed whole, with its allocations and the copy of its small result to the host.

Prints one table and writes the same to ``gpu_check.json``. Without a device that CuPy can use, says so in one
line and is done. ``--quick`` takes smaller blocks and fewer rounds, on which targets mean little.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _bench import Bench, interleave, main
from _gpu_cases import Case, cases

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dask_sdc.exceptions import DeviceError  # noqa: E402
from dask_sdc.statistics.kernels.cuda import cupy_device  # noqa: E402

REPORT = Path("gpu_check.json")
#: Seconds that the tests may take, so that all of this stays below 8 minutes.
TESTS = 240.0
#: Least share of the copy bandwidth, and least speed against plain expressions, by group of cases.
OF_COPY = {"moments": 0.85, "histogram": 0.85, "decode": 0.75}
OF_PLAIN = {"scatter": 0.9, "expectation": 3.0}
#: What audits of every tenth shard may add, as on the CPU: 1.13 times a run without.
AUDIT = 1.13

#: Runs functions in turn and returns the seconds of each in every round.
Timer = Callable[[dict[str, Callable[[], object]], int], dict[str, list[float]]]


@dataclass(frozen=True)
class Row:
    """What was measured of one case.

    Parameters
    ----------
    name, group : str
        Of the case.
    seconds, plain : float
        Median times of the kernels and of plain expressions; NaN where there are none.
    nbytes : int
        What has to be moved.
    of_copy : float
        Bytes per second over those of a copy.
    speedup : float
        Plain over seconds.
    """

    name: str
    group: str
    seconds: float
    plain: float
    nbytes: int
    of_copy: float
    speedup: float


def unavailable() -> str | None:
    """Say why there is nothing to check here."""
    try:
        cupy_device()
    except DeviceError as error:
        return str(error)
    return None


def row_of(case: Case, timer: Timer, bandwidth: float, rounds: int) -> Row:
    """Measure one case; ``bandwidth`` in bytes per second."""
    contestants = {"kernel": case.kernel} | ({"plain": case.plain} if case.plain else {})
    times = {name: statistics.median(taken) for name, taken in timer(contestants, rounds).items()}
    seconds, plain = times["kernel"], times.get("plain", float("nan"))
    return Row(
        case.name,
        case.group,
        seconds,
        plain,
        case.nbytes,
        case.nbytes / seconds / bandwidth,
        plain / seconds,
    )


def table(rows: Sequence[Row], bandwidth: float) -> str:
    """Return what was measured as text."""
    lines = [f"{'copy bandwidth':<36}{bandwidth / 1e9:>10.0f} GB/s"]
    lines.append(f"{'case':<36}{'ms':>10}{'MB':>10}{'of copy':>10}{'plain ms':>10}{'speedup':>10}")
    for row in rows:
        lines.append(
            f"{row.name:<36}{row.seconds * 1e3:>10.3f}{row.nbytes / 1e6:>10.1f}{row.of_copy:>10.2f}"
            f"{row.plain * 1e3:>10.3f}{row.speedup:>10.2f}"
        )
    return "\n".join(lines)


def judge(bench: Bench, rows: Sequence[Row]) -> None:
    """Hand in the worst of every group that has a target."""
    for group, target in OF_COPY.items():
        bench.figure(f"{group}_of_copy", min(r.of_copy for r in rows if r.group == group), at_least=target)
    for group, target in OF_PLAIN.items():
        bench.figure(f"{group}_speedup", min(r.speedup for r in rows if r.group == group), at_least=target)


def say_rates(bench: Bench, rows: Sequence[Row]) -> None:
    """Hand in tokens a second of a captured step, and of one launch after the other."""
    for row in rows:
        if row.group == "step":
            bench.figure("tokens_per_s_captured", 1 / row.seconds)
            bench.figure("tokens_per_s_plain", 1 / row.plain)


def event_timer(cupy: Any) -> Timer:
    """Return a timer that takes events of the device."""

    def timer(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for number in range(-2, rounds):  # two to compile and to fill the pool
            for name, function in contestants.items():
                start, end = cupy.cuda.Event(), cupy.cuda.Event()
                start.record()
                function()
                end.record()
                end.synchronize()
                if number >= 0:
                    seconds[name].append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
        return seconds

    return timer


def copy_bandwidth(cupy: Any, timer: Timer, size: int, rounds: int) -> float:
    """Return the bytes per second that a copy within the device reads and writes."""
    source = cupy.zeros(size, dtype=cupy.uint8)
    target = cupy.empty_like(source)
    taken = timer({"copy": lambda: cupy.copyto(target, source)}, rounds)["copy"]
    return 2 * size / statistics.median(taken)


def run_tests(bench: Bench) -> None:
    """Run all tests that want a device."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS)
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = -1, f"{error.stdout or ''}\nno end after {TESTS:g} s"
    bench.say("\n".join(output.splitlines()[-40:]))
    bench.figure("tests_exit_code", code, equal=0)
    bench.figure("tests_s", time.perf_counter() - start)


def audit_overhead(cupy: Any, quick: bool) -> float:
    """Return the time of audited over that of plain accumulation of blocks on the device."""
    import dask.array as da
    from distributed import Client, LocalCluster

    from dask_sdc import Auditor, Covariance

    shards, size = (16, 1 << 14) if quick else (64, 1 << 17)
    x = da.random.default_rng(0).normal(size=(shards * size, 256), chunks=(size, 256)).astype("f4")
    with (
        LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        blocks = x.map_blocks(cupy.asarray, dtype="f4", meta=cupy.empty((0, 256), "f4")).persist()
        with (
            Auditor(client, audit_rate=0.0, domain="worker") as plain,
            Auditor(client, audit_rate=0.1, domain="worker") as audited,
        ):
            contestants = {
                name: lambda a=auditor: a.accumulate(Covariance(), blocks)
                for name, auditor in (("plain", plain), ("audited", audited))
            }
            return interleave(contestants, 3 if quick else 7).ratio("audited", "plain")


def device_facts(cupy: Any) -> dict[str, Any]:
    """Return what the figures belong to."""
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {
        "device": properties["name"].decode(),
        "memory": properties["totalGlobalMem"],
        "driver": runtime.driverGetVersion(),
        "cuda": runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "numpy": np.__version__,
    }


def write_report(path: Path, facts: dict[str, Any], bandwidth: float, rows: Sequence[Row]) -> None:
    """Write what was measured; NaN as null, which JSON has."""
    found = [{k: None if v != v else v for k, v in asdict(row).items()} for row in rows]
    report = {**facts, "copy_bytes_per_second": bandwidth, "cases": found}
    path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def measure(bench: Bench) -> None:
    """Run the tests, then the kernels."""
    run_tests(bench)
    device = cupy_device()
    cupy, rounds = device.xp, 5 if bench.quick else 25
    free, _ = cupy.cuda.runtime.memGetInfo()
    size = min(free // 16, (1 << 28) if bench.quick else (1 << 32))
    timer = event_timer(cupy)
    bandwidth = copy_bandwidth(cupy, timer, size, rounds)
    facts, rows = device_facts(cupy), []
    for case in cases(device, size):
        rows.append(row_of(case, timer, bandwidth, rounds))
        cupy.get_default_memory_pool().free_all_blocks()
    bench.say(f"{facts}\n{table(rows, bandwidth)}")
    write_report(REPORT, facts, bandwidth, rows)
    judge(bench, rows)
    say_rates(bench, rows)
    bench.figure("audit_overhead", audit_overhead(cupy, bench.quick), at_most=AUDIT)


if __name__ == "__main__":
    reason = unavailable()
    if reason is None or {"-h", "--help"} & set(sys.argv):
        main("gpu_check", measure, __doc__)
    else:
        print(f"SKIP gpu_check: {reason}")
