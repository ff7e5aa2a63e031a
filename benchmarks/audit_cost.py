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
from dask_sdc.graph.execute import ShardContext, ShardExecutor, input_digest
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


def free_checks(bench: Bench) -> tuple[float, float]:
    """Return the largest shares of a ~50 ms shard that checks of the state and of the input take.

    The first is for seal, digest, finiteness and invariants; the second for hashing the block, which only
    statistics do whose kernel is much heavier. In CPU time of one thread.
    """
    rng = np.random.default_rng(0)
    state_share = input_share = 0.0
    for name, statistic, rows in (
        ("Moments", Moments(), 2_500_000),
        ("Covariance", Covariance(), 1_200_000),
        ("mixture, diag", _first_step(GaussianMixture(8, covariance_type="diag"), rng), 500_000),
        ("mixture, full", _first_step(GaussianMixture(8), rng), 150_000),
    ):
        block, info = Block(rng.normal(size=(rows, 16))), ShardInfo((16,), np.dtype(float))
        executor, context = ShardExecutor("0", "here", "fingerprint"), ShardContext(0, "primary", 0, 0)
        state = executor.update(statistic, info, block, context)
        kernel = _cpu(partial(executor.update, statistic, info, block, context))
        seal = _cpu(partial(executor.seal, statistic, state, block, context, 0.0))
        hashing = _cpu(partial(input_digest, block)) if statistic.hash_input else 0.0
        bench.say(
            f"  {name}: kernel {kernel * 1e3:.1f} ms, checks of the state {(seal - hashing) / kernel:.2%}, "
            f"of the input {hashing / kernel:.2%}"
        )
        state_share = max(state_share, (seal - hashing) / kernel)
        input_share = max(input_share, hashing / kernel)
    return state_share, input_share


def _cpu(work: Callable[[], object]) -> float:
    """Return the least CPU time of some calls, in seconds."""
    best = float("inf")
    for _ in range(7):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def _first_step(estimator: GaussianMixture, rng: np.random.Generator) -> Any:
    x = rng.normal(size=(1000, 16))
    info = ShardInfo(x.shape[1:], x.dtype)
    start = estimator.initialise(info)
    return estimator.statistic(start.finalize(start.update(start.init(info), x)))


def measure(bench: Bench) -> None:
    """Measure all of it; a quick run is too short for the bounds and gets 15 % of slack."""
    logging.getLogger("dask_sdc").setLevel(logging.ERROR)
    rounds, slack = (1, 1.15) if bench.quick else (11, 1.0)
    rates = (0.1,) if bench.quick else RATES
    contest = Contest()
    try:
        for rate, ratio in contest.run(Busy(loops_for(0.05)), 64, rates, rounds).items():
            limit = 1.02 if rate == 0 else 1 + rate + 0.03
            bench.figure(f"busy_64x50ms_rate_{rate:g}", ratio, at_most=limit * slack)
        for rate, ratio in contest.run(Sleepy(50), 64, rates, rounds).items():
            limit = 1.02 if rate == 0 else 1 + rate + 0.01
            bench.figure(f"sleeping_64x50ms_rate_{rate:g}", ratio, at_most=limit * slack)
        small = contest.run(Busy(loops_for(0.005)), 640, (0.1,), rounds)
        bench.figure("busy_640x5ms_rate_0.1", small[0.1], at_most=0.65 * slack)
    finally:
        contest.close()
    state_share, input_share = free_checks(bench)
    bench.figure("checks_of_state", state_share, at_most=0.02 * slack)
    bench.figure("checks_of_input", input_share)


if __name__ == "__main__":
    main("audit_cost", measure, __doc__)
