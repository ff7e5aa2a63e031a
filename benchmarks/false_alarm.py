"""Clean audits raise no alarm, whatever the order, precision, threads or instruction set.

Processes with different environments (threads of BLAS, instruction sets of BLAS, NumPy and Numba; their
fingerprints differ) compute the same shards, each with its rows in another order and split into other blocks.
Every pair of a primary and an audit is compared as the auditor does it, at the default tolerances. Besides
the built-in statistics there is a plain one that adds up in its own precision, naively or pairwise.

The second part is the envelope's power: which flipped bits of a float leaf are outside, and how large the
smallest relative change is that is caught in an audit across environments. (In one environment every bit is.)
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from _bench import Bench, main

from dask_sdc.evidence import (
    SealedBatch,
    SealedStatistic,
    compare_payloads,
    decode,
    encode,
    environment_fingerprint,
    open_batch,
    seal_batch,
    seal_statistic,
)
from dask_sdc.statistics.base import ShardInfo, Statistic
from dask_sdc.statistics.covariance import Covariance
from dask_sdc.statistics.kmeans import KMeansStatistic
from dask_sdc.statistics.mixture import GaussianMixture
from dask_sdc.statistics.moments import Moments

TOLERANCE = 1e-12  # the default of Auditor
FEATURES = 3

#: Environments: what they set, and which order and blocking of rows they use.
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "one_thread": {"OPENBLAS_NUM_THREADS": "1"},
    "two_threads": {"OPENBLAS_NUM_THREADS": "2"},
    "old_blas": {"OPENBLAS_CORETYPE": "Nehalem", "OPENBLAS_NUM_THREADS": "1"},
    "no_vectors": {
        "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3",
        "NUMBA_CPU_NAME": "x86-64",
        "OPENBLAS_CORETYPE": "Prescott",
        "OPENBLAS_NUM_THREADS": "1",
    },
}


@dataclass(frozen=True)
class PlainSum(Statistic):
    """Σx in the precision of the data, in an order that the environment chooses."""

    order: int

    def init(self, info: ShardInfo) -> Any:
        """Return the sums of no rows."""
        zeros = np.zeros(info.shape, info.dtype)
        return {"n": 0, "sum": zeros, "size": np.zeros(info.shape)}

    def update(self, state: Any, x: Any) -> Any:
        """Add rows: pairwise, one after the other, from the back, or as a product."""
        ways = (
            lambda: np.sum(np.ascontiguousarray(x.T), axis=1),
            lambda: np.add.accumulate(x, axis=0)[-1],
            lambda: np.add.accumulate(x[::-1], axis=0)[-1],
            lambda: np.ones(len(x), x.dtype) @ x,
        )
        size = np.sum(np.abs(x), axis=0, dtype=np.float64)
        return self.combine(state, {"n": len(x), "sum": ways[self.order](), "size": size})

    def combine(self, a: Any, b: Any) -> Any:
        """Add sums."""
        return {key: a[key] + b[key] for key in a}

    def finalize(self, state: Any) -> Any:
        """Return the sums."""
        return state["sum"]

    def magnitudes(self, state: Any) -> Mapping[str, Any]:
        """Return Σ|x|."""
        return {"sum": state["size"]}

    def terms(self, state: Any) -> float:
        """Return the number of rows."""
        return float(state["n"])


def data(shard: int) -> np.ndarray[Any, Any]:
    """Return the rows of a shard: a kind of data, a precision and a length that depend on its number."""
    rng = np.random.default_rng([9, shard])
    n = int(rng.integers(1, 400)) if shard % 7 else 4000
    normal = rng.normal(size=(n, FEATURES))
    kinds = (
        normal,
        1e3 + normal,
        1e9 + normal,
        1e6 * (-1.0) ** np.arange(n)[:, None] + normal,
        np.exp(3 * normal),
        1e-100 * normal,
        np.rint(100 * normal),
        normal * [1e-8, 1.0, 1e8],
    )
    x = kinds[shard % len(kinds)]
    return np.asarray(x, np.float32 if shard // len(kinds) % 2 and shard % len(kinds) != 5 else np.float64)


def statistics(x: np.ndarray[Any, Any], order: int) -> dict[str, Statistic]:
    """Return the statistics of a shard; models are drawn from its rows as a fit would."""
    rows = np.asarray(x[:60], np.float64)
    spread = np.std(rows, axis=0) + 1e-3 * np.max(np.abs(rows), axis=0) + 1e-300
    centres = np.mean(rows, axis=0) + spread * np.array([[-1.0], [0.0], [1.0]])
    found: dict[str, Statistic] = {
        "plain": PlainSum(order),
        "moments": Moments(),
        "moments2": Moments(order=2, skipna=True),
        "covariance": Covariance(),
        "kmeans": KMeansStatistic(centres),
    }
    covariances = {
        "full": np.stack([np.diag(spread**2)] * 3),
        "tied": np.diag(spread**2),
        "diag": np.stack([spread**2] * 3),
        "spherical": np.full(3, np.max(spread) ** 2),
    }
    for kind, covariance in covariances.items():
        start = {"weights": np.full(3, 1 / 3), "means": centres, "covariances": covariance}
        mixture = GaussianMixture(3, covariance_type=kind, init=start)
        found[f"mixture_{kind}"] = mixture.statistic(mixture.initialise(ShardInfo((FEATURES,), x.dtype)))
    return found


def compute(name: str, shards: int) -> bytes:
    """Return the frame of all statistics of all shards, as this environment computes them."""
    number = list(ENVIRONMENTS).index(name)
    records = []
    for shard in range(shards):
        x = data(shard)
        rng = np.random.default_rng([number, shard])
        shuffled = x[rng.permutation(len(x))]
        blocks = np.array_split(shuffled, rng.integers(1, 4))
        for index, statistic in enumerate(statistics(x, number).values()):
            state = statistic.init(ShardInfo((FEATURES,), x.dtype))
            for block in blocks:
                if len(block):
                    state = statistic.update(state, block)
            broken = tuple(statistic.invariants(state))
            status = "violation" if broken else "ok"
            records.append(
                seal_statistic(100 * shard + index, state, rows=len(x), status=status, notes=broken)
            )
    fingerprint = environment_fingerprint().digest()
    return seal_batch(SealedBatch(0, "audit", 0, name, name, fingerprint, bytes(16), "ok", tuple(records)))


def frames(names: list[str], shards: int) -> list[SealedBatch]:
    """Let environments compute, two at a time on two cores."""
    opened = []
    for start in range(0, len(names), 2):
        running = [
            subprocess.Popen(
                [sys.executable, __file__, "compute", name, str(shards)],
                env=os.environ | ENVIRONMENTS[name],
                stdout=subprocess.PIPE,
            )
            for name in names[start : start + 2]
        ]
        for process in running:
            frame = process.communicate()[0]
            if process.returncode:
                raise RuntimeError(f"{process.args}: expected exit code 0, got {process.returncode}")
            opened.append(open_batch(frame))
    return opened


def alarms(bench: Bench, batches: list[SealedBatch], shards: int) -> None:
    """Compare every pair of environments on every shard and statistic."""
    audits, bitwise, alarmed = 0, 0, Counter[str]()
    for shard in range(shards):
        for index, (name, statistic) in enumerate(statistics(data(shard), 0).items()):
            payloads = [record_of(batch, shard, index).payload for batch in batches]
            for a, b in itertools.combinations(payloads, 2):
                comparison = compare_payloads(a, b, rtol=TOLERANCE, atol=TOLERANCE, statistic=statistic)
                audits += 1
                bitwise += comparison.equal
                if not comparison.within:
                    alarmed[name] += 1
                    bench.say(f"  alarm: {name}, shard {shard}: {comparison.reason}: {comparison.leaves}")
    violated = [record for batch in batches for record in batch.records if record.status != "ok"]
    for record in violated[:5]:
        bench.say(f"  violation: shard {record.shard_id // 100}: {record.notes}")
    bench.figure("clean_audits", audits, at_least=1_000 if bench.quick else 100_000)
    bench.figure("not_bitwise_equal", audits - bitwise, at_least=1)
    bench.figure("fingerprints", len({batch.fingerprint for batch in batches}), equal=len(batches))
    bench.figure("false_alarms", alarmed.total(), equal=0)
    bench.figure("false_violations", len(violated), equal=0)


def record_of(batch: SealedBatch, shard: int, index: int) -> SealedStatistic:
    """Return the record of a shard and of the statistic at a position."""
    per_shard = len(batch.records) // (batch.records[-1].shard_id // 100 + 1)
    return batch.records[shard * per_shard + index]


def power(bench: Bench, batches: list[SealedBatch], shards: range) -> None:
    """Flip every bit of one element of every float leaf, and audit across two environments."""
    flips, caught = Counter[str](), Counter[str]()
    smallest: dict[str, list[float]] = {"float32": [], "float64": []}
    for shard in shards:
        for index, statistic in enumerate(statistics(data(shard), 0).values()):
            a, b = (record_of(batch, shard, index).payload for batch in batches[:2])
            for key, leaf in decode(b).items():
                kind = getattr(leaf, "dtype", np.dtype(type(leaf))).name
                if kind not in smallest or not np.asarray(leaf).size:
                    continue
                changes = list(changes_caught(a, b, key, statistic))
                flips[kind] += len(changes)
                caught[kind] += sum(seen for seen, _ in changes)
                smallest[kind].append(min(change for seen, change in changes if seen))
    for kind in smallest:
        bench.figure(f"flips_caught_{kind}", caught[kind] / flips[kind])
        bench.figure(f"smallest_change_caught_{kind}", float(np.median(smallest[kind])))


def changes_caught(a: bytes, b: bytes, key: str, statistic: Statistic) -> Iterator[tuple[bool, float]]:
    """Yield, for every bit, whether its flip is outside of the envelope and its relative size."""
    value = np.atleast_1d(decode(b)[key]).reshape(-1)[0]
    for bit in range(8 * value.dtype.itemsize):
        damaged = decode(b)
        leaf = np.atleast_1d(damaged[key])
        word = leaf.reshape(-1).view(f"u{value.dtype.itemsize}")
        word[0] ^= word.dtype.type(1 << bit)
        damaged[key] = (
            leaf.reshape(np.shape(damaged[key])) if isinstance(damaged[key], np.ndarray) else float(leaf[0])
        )
        comparison = compare_payloads(a, encode(damaged), rtol=TOLERANCE, atol=TOLERANCE, statistic=statistic)
        with np.errstate(all="ignore"):
            change = abs(float(leaf.reshape(-1)[0]) - float(value)) / max(abs(float(value)), 1e-300)
        yield not comparison.within, change if np.isfinite(change) else np.inf


def measure(bench: Bench) -> None:
    """Compute everywhere, compare everything."""
    shards = 60 if bench.quick else 2_000
    names = list(ENVIRONMENTS)
    *batches, again = frames([*names, names[0]], shards)
    differing = sum(a.digest != b.digest for a, b in zip(batches[0].records, again.records, strict=True))
    bench.figure("same_environment_differences", differing, equal=0)
    alarms(bench, batches, shards)
    power(bench, batches, range(1, 17, 8) if bench.quick else range(64))


if __name__ == "__main__":
    if sys.argv[1:2] == ["compute"]:
        sys.stdout.buffer.write(compute(sys.argv[2], int(sys.argv[3])))
    else:
        main("false_alarm", measure, __doc__)
