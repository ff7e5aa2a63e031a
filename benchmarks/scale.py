"""100,000 shards through one round on a real scheduler, with kernels that do next to nothing.

The scheduler is a process of its own. Its CPU time per shard is compared with that of a plain Dask graph
of one task per shard; driver memory is the growth of this process's peak resident set during the round.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from pathlib import Path
from typing import Any

import dask.array as da
import psutil
from _bench import Bench, main
from _kernels import Busy
from distributed import Client
from distributed.deploy.subprocess import SubprocessCluster

from dask_sdc import Auditor


def scheduler_seconds(client: Client) -> float:
    """Return the CPU seconds that the scheduler's process has used."""
    return float(client.run_on_scheduler(_cpu_seconds))


def _cpu_seconds() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system


def peak_mib() -> float:
    """Return the peak resident set of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _one(k: int) -> dict[str, Any]:
    return {"n": 1, "sum": float(k)}


def _add(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"n": sum(p["n"] for p in parts), "sum": sum(p["sum"] for p in parts)}


def plain(client: Client, shards: int, fan_in: int = 500) -> Any:
    """Compute one task per shard and add up in groups."""
    parts = client.map(_one, range(shards), pure=False)
    groups = [client.submit(_add, parts[i : i + fan_in], pure=False) for i in range(0, shards, fan_in)]
    return client.submit(_add, groups, pure=False).result()


def measure(bench: Bench) -> None:
    """Run both."""
    logging.getLogger("dask_sdc").setLevel(logging.ERROR)
    shards = 10_000 if bench.quick else 100_000
    # Workers are processes of their own here and need to find `_kernels`.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with (
        SubprocessCluster(
            worker_kwargs={"nthreads": 1}, n_workers=2, dashboard_address=":0", silence_logs=50
        ) as cluster,
        Client(cluster) as client,
        Auditor(client, audit_rate=0.1, seed=1) as auditor,
    ):
        client.wait_for_workers(2, timeout=60)
        auditor.accumulate(Busy(0), da.arange(100, chunks=1))
        before = scheduler_seconds(client)
        start = time.perf_counter()
        total = plain(client, shards)
        wall = time.perf_counter() - start
        per_plain = (scheduler_seconds(client) - before) / shards
        bench.say(f"  plain: {wall:.1f} s, scheduler {per_plain * 1e6:.0f} us per shard")

        source = da.arange(shards, chunks=1, dtype=float)
        peak, before = peak_mib(), scheduler_seconds(client)
        start = time.perf_counter()
        result = auditor.accumulate(Busy(0), source)
        wall = time.perf_counter() - start
        per_audited = (scheduler_seconds(client) - before) / shards
        record = auditor.rounds[-1]
        bench.say(
            f"  audited: {wall:.1f} s, {record.audited} audits, scheduler {per_audited * 1e6:.0f} us a shard"
        )
    bench.figure("shards", record.shards, equal=shards)
    bench.figure("result_right", result["n"] == shards and result["sum"] == total["sum"], equal=True)
    bench.figure("audited_share", record.agreed / shards, at_least=0.099)
    bench.figure("scheduler_time_ratio", per_audited / per_plain, at_most=1.3)
    bench.figure("driver_growth_mib", peak_mib() - peak, at_most=1024)


if __name__ == "__main__":
    main("scale", measure, __doc__)
