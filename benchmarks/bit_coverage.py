"""Every single-bit flip is caught, and the decoder stands whatever bytes it is given.

Three parts. *Sealed*: each bit of the frames of real statistics is flipped after sealing; the frame must be
refused or exactly the shard's own digest must fail. *Leaves*: each bit of each float64 leaf is flipped
before sealing; the audit of the same environment must differ. *Fuzz*: payloads are mutated at random; each
must be refused with a DecodeError or decode to a value that encodes to those very bytes and compares as
a mismatch, in bounded memory.
"""

from __future__ import annotations

import contextlib
import random
import resource
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
from _bench import Bench, main

from dask_sdc.evidence import (
    SealedBatch,
    compare_payloads,
    decode,
    digest,
    encode,
    open_batch,
    seal_batch,
    seal_statistic,
)
from dask_sdc.exceptions import DecodeError
from dask_sdc.statistics.base import ShardInfo, Statistic
from dask_sdc.statistics.covariance import Covariance
from dask_sdc.statistics.mixture import GaussianMixture
from dask_sdc.statistics.moments import Moments

TOLERANCE = 1e-12


def statistics(d: int) -> dict[str, Statistic]:
    """Return statistics to seal; the mixture's model is the one of a first round."""
    rng = np.random.default_rng(0)
    mixture = GaussianMixture(3, covariance_type="diag", seed=0)
    info = ShardInfo((d,), np.dtype("f8"))
    start = mixture.initialise(info)
    rows = rng.normal(size=(200, d))
    model = start.finalize(start.update(start.init(info), rows))
    return {"moments": Moments(), "covariance": Covariance(), "mixture": mixture.statistic(model)}


def states(d: int = 4) -> dict[str, Any]:
    """Return the state of one shard by name of its statistic."""
    x = np.random.default_rng(1).normal(size=(500, d))
    info = ShardInfo((d,), x.dtype)
    return {name: s.update(s.init(info), x) for name, s in statistics(d).items()}


def flipped(raw: bytes, bit: int) -> bytes:
    """Return bytes with one bit turned over."""
    damaged = bytearray(raw)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def sealed_flips() -> tuple[int, int]:
    """Flip each bit of frames; return how many there were and how many went unseen or hit another shard."""
    flips = missed = 0
    for state in states().values():
        shards = [seal_statistic(k, state, rows=500) for k in range(2)]
        batch = SealedBatch(0, "primary", 0, "d", "w", "f", bytes(16), "ok", tuple(shards))
        frame = seal_batch(batch)
        for bit in range(8 * len(frame)):
            flips += 1
            missed += not _frame_flip_is_caught(batch, flipped(frame, bit))
    return flips, missed


def _frame_flip_is_caught(batch: SealedBatch, frame: bytes) -> bool:
    try:
        opened = open_batch(frame)
    except DecodeError:
        return True
    bad = [k for k, record in enumerate(opened.records) if not record.intact]
    good = [record for record in opened.records if record.intact]
    # One shard is spoiled by its own payload, and the rest of the frame is as it was.
    return len(bad) == 1 and good == [r for k, r in enumerate(batch.records) if k != bad[0]]


def leaf_flips() -> tuple[int, int]:
    """Flip each bit of float64 leaves before sealing; return how many, and how many an audit would miss."""
    flips = missed = 0
    for state in states().values():
        audit = digest(encode(state))
        for path, bit in _float_bits(state):
            damaged = decode(encode(state))
            leaf = np.asarray(damaged[path])
            damaged[path] = leaf
            raw = leaf.reshape(-1).view(np.uint64)
            raw[bit // 64] ^= np.uint64(1 << bit % 64)
            if not isinstance(state[path], np.ndarray):
                damaged[path] = float(leaf)
            flips += 1
            missed += digest(encode(damaged)) == audit
    return flips, missed


def _float_bits(state: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for path, leaf in state.items():
        if isinstance(leaf, float) or (isinstance(leaf, np.ndarray) and leaf.dtype == np.float64):
            yield from ((path, bit) for bit in range(64 * np.asarray(leaf).size))


class Mutator:
    """Draws mutated payloads: flips, other bytes, cuts, copies, and lengths that claim too much."""

    def __init__(self, payloads: list[bytes], seed: int) -> None:
        self.payloads = payloads
        self.rng = random.Random(seed)

    def __call__(self) -> tuple[bytes, bytes]:
        """Return an original and what became of it."""
        original = self.rng.choice(self.payloads)
        raw = bytearray(original)
        kinds = [self._flip, self._byte, self._cut, self._copy, self._length, self._noise]
        for kind in self.rng.choices(kinds, k=self.rng.randrange(1, 4)):
            if raw:
                kind(raw)
        return original, bytes(raw)

    def _at(self, raw: bytearray) -> int:
        return self.rng.randrange(len(raw))

    def _flip(self, raw: bytearray) -> None:
        raw[self._at(raw)] ^= 1 << self.rng.randrange(8)

    def _byte(self, raw: bytearray) -> None:
        raw[self._at(raw)] = self.rng.choice(b"NTFifcsbltdag\0\xff")

    def _cut(self, raw: bytearray) -> None:
        start = self._at(raw)
        del raw[start : start + self.rng.randrange(1, 20)]

    def _copy(self, raw: bytearray) -> None:
        start, into = self._at(raw), self._at(raw)
        raw[into:into] = raw[start : start + self.rng.randrange(1, 20)]

    def _length(self, raw: bytearray) -> None:
        start = self._at(raw)
        raw[start : start + 8] = (1 << self.rng.randrange(64)).to_bytes(8, "big")

    def _noise(self, raw: bytearray) -> None:
        start = self._at(raw)
        raw[start : start + 4] = self.rng.randbytes(4)


def fuzz_payloads() -> list[bytes]:
    """Return small payloads that hold every tag, and those of real statistics."""
    everything = [
        {"a": 1, 2: -(10**30), "f": [1.5, -0.0, 1j], "s": ("ü", b"\0\1", None, True, False)},
        {
            "f8": np.arange(3.0),
            "f4": np.ones((2, 2), "f4"),
            "b": np.array([True, False]),
            "U": np.array(["ab", "c"]),
        },
        [
            np.array(7, "u2"),
            np.empty((0, 3), "c8"),
            np.array([b"xy"]),
            np.array(["2020"], "M8[D]"),
            np.float32(2),
        ],
        [[[[[[[1]]]]]], {1: {2: {3: {}}}}],
    ]
    return [encode(value) for value in (*everything, *states(2).values())]


def fuzz(bench: Bench, count: int) -> None:
    """Feed mutated payloads to decoder and comparison, and watch memory."""
    mutate = Mutator(fuzz_payloads(), seed=2)
    refused = decoded = unchanged = broken = 0
    _one_round(mutate)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        outcome = _one_round(mutate)
        refused += outcome == "refused"
        decoded += outcome == "decoded"
        unchanged += outcome == "unchanged"
        broken += outcome == "broken"
        if number and not number % 250_000:
            bench.say(f"  {number} payloads")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    bench.figure("mutated_payloads", count)
    bench.figure("decode_errors", refused)
    bench.figure("mismatches", decoded, at_least=1)
    bench.figure("unchanged", unchanged)
    bench.figure("broken_promises", broken, equal=0)
    bench.figure("rss_growth_MiB", float(grown), at_most=64)
    bench.figure("peak_of_one_decode_KiB", _peak_of_one(mutate, 2_000), at_most=1024)


def _one_round(mutate: Mutator) -> str:
    """Anything but DecodeError leaves here and fails the run."""
    original, payload = mutate()
    if payload == original:
        return "unchanged"
    try:
        value = decode(payload)
    except DecodeError:
        return "refused"
    comparison = compare_payloads(original, payload, rtol=TOLERANCE, atol=TOLERANCE)
    return "decoded" if encode(value) == payload and not comparison.equal else "broken"


def _peak_of_one(mutate: Mutator, count: int) -> float:
    """Return the most that decoding one mutated payload (of about 1 KiB) allocated, in KiB."""
    peak = 0
    tracemalloc.start()
    for _ in range(count):
        payload = mutate()[1]
        tracemalloc.reset_peak()
        held = tracemalloc.get_traced_memory()[0]
        with contextlib.suppress(DecodeError):
            decode(payload)
        peak = max(peak, tracemalloc.get_traced_memory()[1] - held)
    tracemalloc.stop()
    return peak / 1024


def measure(bench: Bench) -> None:
    """Run the three parts."""
    flips, missed = sealed_flips()
    bench.figure("sealed_flips", flips)
    bench.figure("sealed_missed", missed, equal=0)
    flips, missed = leaf_flips()
    bench.figure("leaf_flips", flips)
    bench.figure("leaf_missed", missed, equal=0)
    fuzz(bench, 50_000 if bench.quick else 1_000_000)


if __name__ == "__main__":
    main("bit_coverage", measure, __doc__)
