"""Every statistic under every kind of fault: found, the right party named, the answer bit-identical.

On a cluster of four worker processes. ``compute`` flips a bit of a state before it is sealed, ``sealed``
one of the payload after that, ``model`` one of the statistic that a worker received; ``audit`` and
``witness`` compute wrongly in that role only. A witness is only asked after a mismatch, so there another
domain makes one mistake first: two faulty domains, of which the answer must not depend.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from _bench import Bench, main
from distributed import Client, LocalCluster, Nanny

from dask_sdc import Auditor
from dask_sdc.evidence.codec import encode
from dask_sdc.faults.plan import Fault, FaultPlan
from dask_sdc.faults.plugin import FaultInjector
from dask_sdc.statistics import (
    PCA,
    Covariance,
    GaussianMixture,
    Histogram,
    KMeans,
    LinearRegression,
    Moments,
)

Work = Callable[[Auditor], Any]
#: Statistic, place of the fault, whether it is persistent.
Case = tuple[str, str, bool]

PLACES = ("compute", "sealed", "model", "audit", "witness")
SHARDS = 24
NAMES = ("0", "1", "2", "3")


def blocks() -> list[Any]:
    """Three well separated clusters in four dimensions, shuffled, in ragged blocks."""
    rng = np.random.default_rng(5)
    x = np.concatenate([rng.normal(m, 1.0, (800, 4)) for m in (-6, 0, 6)])
    rng.shuffle(x)
    return np.array_split(x, SHARDS)


def works() -> dict[str, Work]:
    """Every statistic and model of the package."""
    x = blocks()
    y = [b @ np.array([1.0, -2.0, 0.5, 3.0]) for b in x]
    edges = [np.linspace(-10, 10, 9)] * 4
    table: dict[str, Work] = {
        "moments": lambda a: a.accumulate(Moments(), x),
        "covariance": lambda a: a.accumulate(Covariance(), x),
        "histogram": lambda a: a.accumulate(Histogram(edges), x),
        "regression": lambda a: a.accumulate(LinearRegression(), x, target=y),
        "pca": lambda a: a.accumulate(PCA(2), x),
        "kmeans": lambda a: a.fit(KMeans(3, seed=0), x, max_iter=3, tol=0).model,
    }
    for kind in ("full", "tied", "diag", "spherical"):
        model = GaussianMixture(3, covariance_type=kind, seed=0)
        table[f"mixture-{kind}"] = lambda a, m=model: a.fit(m, x, max_iter=3, tol=0).model
    return table


def canonical(result: Any) -> bytes:
    """Return a result's bits."""
    return encode(dict(vars(result)) if hasattr(result, "__dict__") else result)


def faults(place: str, persistent: bool, domain: str, other: str) -> list[Fault]:
    """Return the faults of one case on ``domain``."""
    times = None if persistent else 1
    if place in ("compute", "sealed", "model"):
        role = None if persistent else "primary"
        return [Fault("one_bit", place, domain=domain, role=role, times=times)]
    if place == "audit":
        roles = {"audit", "rerun"} if persistent else {"audit"}
        return [Fault("one_bit", "compute", domain=domain, role=roles, times=times)]
    return [
        Fault("one_bit", "compute", domain=other, role="primary", times=1, seed=1),
        Fault("one_bit", "compute", domain=domain, role="witness", times=times, seed=2),
    ]


class Arena:
    """A cluster of four workers that is made up to four again after a quarantine."""

    def __init__(self) -> None:
        self.cluster = LocalCluster(
            n_workers=4, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50
        )
        self.client = Client(self.cluster)
        self.spares: list[Nanny] = []

    def names(self) -> list[str]:
        """Return four live domains."""
        info = self.client.scheduler_info(n_workers=-1)["workers"]
        there = {str(worker["name"]) for worker in info.values()}
        for name in set(NAMES) - there:
            self.spares.append(self.cluster.sync(self._start, name))
        self.client.wait_for_workers(4, timeout=60)
        return list(NAMES)

    async def _start(self, name: str) -> Nanny:
        """Start a worker in the place of one that was removed."""
        return await Nanny(self.cluster.scheduler_address, nthreads=1, name=name, silence_logs=50)

    @contextmanager
    def injected(self, *planned: Fault) -> Iterator[None]:
        """Deliver faults for the time of a block."""
        injector = FaultInjector(FaultPlan(list(planned)))
        self.client.register_plugin(injector, name=injector.name)
        try:
            yield
        finally:
            self.client.unregister_worker_plugin(injector.name)

    def close(self) -> None:
        """Stop the cluster."""
        self.client.close()
        for nanny in self.spares:
            self.cluster.sync(nanny.close)
        self.cluster.close()


def audited(arena: Arena, work: Work, rate: float, *planned: Fault) -> tuple[bytes, Auditor]:
    """Run one case; return the bits of its answer and the auditor."""
    with Auditor(arena.client, audit_rate=rate, seed=1) as auditor:
        with arena.injected(*planned):
            answer = canonical(work(auditor))
        for domain in list(auditor.quarantined):
            auditor.release(domain)
        return answer, auditor


def accused(auditor: Auditor) -> set[str]:
    """Return every domain that a receipt suspects."""
    return {domain for receipt in auditor.receipts for domain in receipt.suspected_domains}


def measure(bench: Bench) -> None:
    """Run the matrix."""
    logging.getLogger("dask_sdc").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    table = works()
    todo = quick_cases() if bench.quick else all_cases(table)
    arena = Arena()
    wrong = unseen = blamed = 0
    try:
        clean = {}
        for name in dict.fromkeys(name for name, _, _ in todo):
            arena.names()
            clean[name], auditor = audited(arena, table[name], 1.0)
            blamed += bool(auditor.receipts)
        for number, (name, place, persistent) in enumerate(todo):
            names = arena.names()
            domain, other = names[number % 4], names[(number + 1) % 4]
            answer, auditor = audited(arena, table[name], 1.0, *faults(place, persistent, domain, other))
            guilty = {domain, other} if place == "witness" else {domain}
            same = answer == clean[name]
            seen = bool(auditor.receipts) and (place == "witness" or accused(auditor) == guilty)
            innocent = accused(auditor) - guilty
            wrong += not same
            unseen += not seen
            blamed += len(innocent)
            bench.say(
                f"{name:18} {place:8} {'persistent' if persistent else 'transient':10} "
                f"{'equal' if same else 'DIFFERS':8} accused {sorted(accused(auditor))}"
                f"{'' if seen else ' NOT FOUND'}{' INNOCENT' if innocent else ''}"
            )
        double, double_blamed = two_faulty(arena, table["moments"], 1 if bench.quick else 12)
    finally:
        arena.close()
    bench.figure("cases", len(todo), equal=7 if bench.quick else 100)
    bench.figure("different", wrong, equal=0)
    bench.figure("not_found", unseen, equal=0)
    bench.figure("innocent_accused", blamed, equal=0)
    bench.figure("two_faulty_cases", double)
    bench.figure("two_faulty_innocent_accused", double_blamed, equal=0)


def all_cases(table: dict[str, Work]) -> list[Case]:
    """Return the whole matrix."""
    return [(name, place, persistent) for name in table for place in PLACES for persistent in (False, True)]


def quick_cases() -> list[Case]:
    """Return every place once, a transient fault and a fit."""
    places: list[Case] = [("moments", place, True) for place in PLACES]
    return [*places, ("moments", "compute", False), ("mixture-diag", "compute", True)]


def two_faulty(arena: Arena, work: Work, rounds: int) -> tuple[int, int]:
    """Two of four domains compute wrongly, each in its own way; count innocents that are blamed."""
    blamed = 0
    for number in range(rounds):
        names = arena.names()
        guilty = {names[number % 4], names[(number + 1 + number // 4) % 4]}
        planned = [Fault("one_bit", "compute", domain=name, seed=i) for i, name in enumerate(sorted(guilty))]
        _, auditor = audited(arena, work, 0.5, *planned)
        blamed += len(accused(auditor) - guilty)
    return rounds, blamed


if __name__ == "__main__":
    main("heal_matrix", measure, __doc__)
