"""How long a persistent fault of one domain stays unseen, and what the policy costs.

By simulation of the policy alone: 16 domains, rate 0.1. A domain becomes faulty at the start of
any round; it is seen in the first round in which one of its shards is audited. Rounds in which the
domain computes nothing do not count. Random sampling of the same rate runs beside it. The audits
that the faulty domain does for others are left out, so the real figures are better. Measured again on a
real cluster of 4 worker processes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import numpy as np
from _bench import Bench, main
from _kernels import Busy
from distributed import Client, LocalCluster

from dask_sdc import Auditor, Fault, FaultInjector, FaultPlan
from dask_sdc.policy import (
    CoverageSampler,
    DomainMap,
    Identity,
    StagingPlan,
    TaintHistory,
    Voice,
    decide,
    longest_run,
    plan,
    screen,
)

RATE, DOMAINS = 0.1, 16
#: Calls of shard ids by domain, for one round.
Deal = dict[int, list[list[int]]]
Draw = Callable[[int, list[int], int], bool]


def even(per_domain: int, batch: int | None = None) -> Callable[[int, random.Random], Deal]:
    """Every domain computes its own shards, always the same."""

    def deal(number: int, rng: random.Random) -> Deal:
        size = batch or per_domain
        return {
            d: [
                list(range(d * per_domain + i, d * per_domain + min(i + size, per_domain)))
                for i in range(0, per_domain, size)
            ]
            for d in range(DOMAINS)
        }

    return deal


def scattered(total: int) -> Callable[[int, random.Random], Deal]:
    """A number of shards in all, each on a random domain in every round."""

    def deal(number: int, rng: random.Random) -> Deal:
        dealt: Deal = {}
        for shard in range(total):
            dealt.setdefault(rng.randrange(DOMAINS), []).append([shard])
        return dealt

    return deal


def home(total: int) -> Callable[[int, random.Random], Deal]:
    """A number of shards in all, each always on the same domain."""
    return lambda number, rng: {shard % DOMAINS: [[shard]] for shard in range(total)}


SHAPES = {
    "1_each": even(1),
    "2_each": even(2),
    "3_each": even(3),
    "10_each": even(10),
    "10_each_in_batches_of_1": even(10, batch=1),
    "10_each_in_batches_of_3": even(10, batch=3),
    "64_each": even(64),
    "1_in_all": home(1),
    "5_in_all": home(5),
    "1_scattered": scattered(1),
    "5_scattered": scattered(5),
    "40_scattered": scattered(40),
}


def waits(deal: Callable[[int, random.Random], Deal], draw: Draw, rounds: int, seed: int) -> Iterator[int]:
    """Yield the rounds to detection for every domain and every round in which its fault begins."""
    rng = random.Random(seed)
    active: dict[int, list[bool]] = {}
    for number in range(rounds):
        for domain, calls in deal(number, rng).items():
            seen = [draw(domain, ids, number) for ids in calls]
            active.setdefault(domain, []).append(any(seen))
    for hits in active.values():
        places = np.flatnonzero(hits)
        if len(places):
            onsets = np.arange(places[-1] + 1)
            yield from (places[np.searchsorted(places, onsets)] - onsets + 1).tolist()


def stratified(seed: int) -> Draw:
    sampler = CoverageSampler(RATE, seed)
    return lambda domain, ids, number: bool(sampler.draw(str(domain), ids, number))


def at_random(seed: int) -> Draw:
    rng = random.Random(seed)
    return lambda domain, ids, number: sum(rng.random() < RATE for _ in ids) > 0


def simulate(bench: Bench) -> None:
    seeds, rounds = (4, 400) if bench.quick else (10, 1500)
    bound = longest_run(RATE)
    worst = 0
    for name, deal in SHAPES.items():
        span = rounds * DOMAINS if name == "1_scattered" else rounds
        found = [w for seed in range(seeds) for w in waits(deal, stratified(seed), span, seed)]
        luck = [w for seed in range(seeds) for w in waits(deal, at_random(seed), span, seed)]
        p99, unlucky = np.percentile(found, 99), np.percentile(luck, 99)
        worst = max(worst, *found)
        figures = f"p99 {p99:.0f}, longest {max(found)}; random p99 {unlucky:.0f}"
        bench.say(f"  {name}: {figures} ({len(found)} faults)")
        if name == "1_each":
            bench.figure("p99_1_shard_a_round", float(p99), at_most=bound)
            bench.figure("p99_random", float(unlucky), at_least=40)
    bench.figure("longest_of_all_shapes", worst, at_most=bound)


def share(bench: Bench) -> None:
    """Audits against rate times shards, and whether every position has its turn."""
    off, unseen = 0.0, 0
    for seed in range(5 if bench.quick else 50):
        for n in (1, 2, 5, 10, 20):
            sampler, audits, positions = CoverageSampler(RATE, seed), 0, set()
            for number in range(100):
                drawn = sampler.draw("d", range(n), number)
                audits += len(drawn)
                positions.update(drawn)
            off = max(off, abs(audits - RATE * 100 * n))
            unseen += n - len(positions)
    bench.figure("audits_off_the_share", round(off, 2), at_most=2)
    bench.figure("positions_never_audited", unseen, equal=0)


def cost(bench: Bench) -> None:
    """One round of all policy at 10,000 domains with 10 shards each."""
    count, shards = 10_000, 10
    workers = [Identity(f"tcp://10.0.0.1:{i}", f"w{i}", f"h{i}", i) for i in range(count)]
    names = [f"h{i}" for i in range(count)]
    owners = {k: names[k % count] for k in range(count * shards)}
    sampler = CoverageSampler(RATE, 1)
    history = TaintHistory()
    domains = DomainMap(workers, "host")
    kernels = {f"k{i}": b"digest" for i in range(8)}

    def one_round(number: int) -> int:
        audits = 0
        for i, name in enumerate(names):
            ids = range(i, count * shards, count)
            drawn = sampler.draw(name, ids, number)
            history.computed(name, number, ids)
            for shard in drawn:
                domains.restrictions(name)
                domains.restrictions(apart_from=[name])
                partner = names[(i + 1) % count]
                voices = (Voice("primary", name, b"x", "F"), Voice("audit", partner, b"x", "F"))
                audits += decide(*voices, compare=_never).outcome == "agree"
                history.clean(name, number, shard)
        suspects = {name: domains.lane(name) for name in names[:3]}
        staged = plan(suspects, owners, domains.live_lanes(), history=history)
        assert isinstance(staged, StagingPlan) and len(staged.placements) == 3 * shards
        return audits

    def timed(action: Callable[[], object]) -> float:
        # The policy is one thread of pure Python: its own time is what it costs.
        start = time.process_time()
        action()
        return time.process_time() - start

    def build_map() -> None:
        built = DomainMap(workers)
        for worker in workers:
            built.labels(worker.address)

    build = timed(build_map)
    numbers = iter(range(100))
    seconds = sorted(timed(lambda: one_round(next(numbers))) for _ in range(3 if bench.quick else 9))
    screening = timed(lambda: screen(dict.fromkeys(names, kernels), dict.fromkeys(names, "F")))
    bench.say(f"  10,000 domains: map and labels {build:.2f} s, screening {screening:.2f} s")
    bench.figure("seconds_a_round_at_10000_domains", seconds[len(seconds) // 2], at_most=1.0)
    bench.figure("seconds_for_map_and_screening", build + screening, at_most=1.0)


def _never(a: Voice, b: Voice) -> object:
    raise AssertionError(f"equal digests need no comparison: {a}, {b}")


def on_cluster(bench: Bench) -> None:
    """Rounds to detection on a real cluster of 4, one shard per domain and round."""
    with (
        LocalCluster(
            n_workers=4, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50
        ) as cluster,
        Client(cluster) as client,
    ):
        rounds = [rounds_to_accuse(client, seed) for seed in range(4 if bench.quick else 40)]
    bench.figure("cluster_of_4_trials", len(rounds))
    bench.figure("cluster_of_4_longest", max(rounds), at_most=10)


def rounds_to_accuse(client: Client, seed: int) -> int:
    """Return the round in which the faulty domain is named; nobody else may be."""
    data = [np.full(1, float(k)) for k in range(4)]
    injector = FaultInjector(FaultPlan([Fault("one_bit", "compute", domain="2", bit=62)]))
    with Auditor(client, audit_rate=RATE, seed=seed, quarantine=False) as auditor:
        client.register_plugin(injector)
        try:
            while not auditor.receipts and len(auditor.rounds) < 50:
                auditor.accumulate(Busy(1), data)
        finally:
            client.unregister_worker_plugin(injector.name)
        assert {r.suspected_domains for r in auditor.receipts} == {("2",)}
        return len(auditor.rounds)


def measure(bench: Bench) -> None:
    simulate(bench)
    share(bench)
    cost(bench)
    on_cluster(bench)


if __name__ == "__main__":
    main("coverage", measure, __doc__)
