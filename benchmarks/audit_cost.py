"""What auditing costs, against a plain Dask graph of the same kernels on two workers.

Plain Dask runs one task per shard and one that adds the states up, once with its default worker
saturation and once with an infinite one; the quicker of the two counts. All contestants are timed in
turn. Ratios are medians over rounds of audited / plain time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import dask
import numpy as np
from _bench import Bench, interleave, main
from _kernels import Busy, Sleepy, loops_for
from distributed import Client, LocalCluster

from dask_sdc import Auditor
from dask_sdc.graph.block import Block
from dask_sdc.graph.execute import ShardContext, ShardExecutor
from dask_sdc.statistics import Covariance, GaussianMixture, Moments, ShardInfo

RATES = (0.0, 0.1, 0.3)


def plain(client: Client, statistic: Busy, shards: int) -> Any:
    """Compute one task per shard, and add up in one more."""
    info = ShardInfo((), np.dtype(float))
    parts = client.map(
        partial(_one, statistic, info), [np.full(1, float(k)) for k in range(shards)], pure=False
    )
    return client.submit(_add, statistic, parts, pure=False).result()


def _one(statistic: Busy, info: ShardInfo, x: Any) -> Any:
    return statistic.update(statistic.init(info), x)


def _add(statistic: Busy, parts: list[Any]) -> Any:
    return reduce(statistic.combine, parts)


class Contest:
    """Two plain clusters and an audited one, of two workers each."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.default = self._client()
        with dask.config.set({"distributed.scheduler.worker-saturation": float("inf")}):
            self.infinite = self._client()
        self.audited = self._client()

    def _client(self) -> Client:
        cluster = LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50
        )
        client = Client(cluster)
        self.stack += [cluster, client]
        return client

    def close(self) -> None:
        """Stop everything."""
        for thing in reversed(self.stack):
            thing.close()

    def run(self, statistic: Busy, shards: int, rates: tuple[float, ...], rounds: int) -> dict[float, float]:
        """Return audited / plain by rate."""
        data = [np.full(1, float(k)) for k in range(shards)]
        auditors = {rate: Auditor(self.audited, audit_rate=rate, seed=1) for rate in rates}
        contestants: dict[str, Callable[[], object]] = {
            "default": partial(plain, self.default, statistic, shards),
            "infinite": partial(plain, self.infinite, statistic, shards),
        }
        for rate, auditor in auditors.items():
            contestants[f"rate {rate}"] = partial(auditor.accumulate, statistic, data)
        times = interleave(contestants, rounds)
        for auditor in auditors.values():
            auditor.close()
        best = min(("default", "infinite"), key=times.median)
        return {rate: times.ratio(f"rate {rate}", best) for rate in rates}


def free_checks(bench: Bench) -> float:
    """Return the largest share of a shard's time that seal, digests and invariants take."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100_000, 16))
    block, info = Block(x), ShardInfo((16,), np.dtype(float))
    estimator = GaussianMixture(8, covariance_type="diag")
    worst = 0.0
    executor = ShardExecutor("0", "here", "fingerprint")
    context = ShardContext(0, "primary", 0, 0)
    for statistic in (Moments(), Covariance(), _first_step(estimator, x)):
        update = partial(executor.update, statistic, info, block, context)

        def whole(statistic: Any = statistic, update: Callable[[], Any] = update) -> None:
            executor.seal(statistic, update(), block, context, time.perf_counter())

        times = interleave({"update": update, "whole": whole}, 9 if bench.quick else 31, warmup=2)
        share = times.ratio("whole", "update") - 1
        bench.say(f"  free checks of {type(statistic).__name__}: {share:.2%}")
        worst = max(worst, share)
    return worst


def _first_step(estimator: GaussianMixture, x: Any) -> Any:
    info = ShardInfo(x.shape[1:], x.dtype)
    start = estimator.initialise(info)
    if hasattr(start, "update"):
        start = start.finalize(start.update(start.init(info), x))
    return estimator.statistic(start)


def measure(bench: Bench) -> None:
    """Measure all of it."""
    logging.getLogger("dask_sdc").setLevel(logging.ERROR)
    rounds = 3 if bench.quick else 11
    contest = Contest()
    try:
        busy = contest.run(Busy(loops_for(0.05)), 64, RATES, rounds)
        for rate, ratio in busy.items():
            limit = 1.02 if rate == 0 else 1 + rate + 0.03
            bench.figure(f"busy_64x50ms_rate_{rate:g}", ratio, at_most=limit)
        for rate, ratio in contest.run(Sleepy(50), 64, RATES[1:], rounds).items():
            bench.figure(f"sleeping_64x50ms_rate_{rate:g}", ratio, at_most=1 + rate + 0.01)
        small = contest.run(Busy(loops_for(0.005)), 640, (0.1,), rounds)
        bench.figure("busy_640x5ms_rate_0.1", small[0.1], at_most=0.65)
    finally:
        contest.close()
    bench.figure("free_checks", free_checks(bench), at_most=0.02)


if __name__ == "__main__":
    main("audit_cost", measure, __doc__)
