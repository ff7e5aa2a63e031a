"""The frame of every benchmark script: options, figures with bounds, one closing line.

A script reads::

    from _bench import Bench, interleave, main

    def measure(bench: Bench) -> None:
        times = interleave({"plain": plain, "audited": audited}, rounds=3 if bench.quick else 15)
        bench.figure("ratio", times.ratio("audited", "plain"), at_most=1.13)

    if __name__ == "__main__":
        main("audit_cost", measure, __doc__)

Its last line is ``PASS audit_cost: ratio=1.09`` or ``FAIL audit_cost: ratio=1.2 (at most 1.13)``, with exit
code 0 or 1; 2 after an exception.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# The folder of a script comes first on the path, where coverage.py would stand in for the package of that
# name, which Numba uses if it is there.
sys.modules.setdefault("coverage", None)  # type: ignore[arg-type]


@dataclass
class Bench:
    """What a script measured so far.

    Parameters
    ----------
    quick : bool
        Whether to end within 60 s on two cores instead of measuring well.
    """

    quick: bool = False
    figures: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Print a line of progress at once."""
        print(text, flush=True)

    def figure(
        self,
        name: str,
        value: Any,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        equal: Any = None,
    ) -> None:
        """Record a measured value and hold it against its bound.

        Parameters
        ----------
        name : str
            Name of the figure, without blanks.
        value : object
            What was measured. NaN keeps no bound.
        at_least, at_most : float, optional
            Bounds, themselves allowed.
        equal : object, optional
            The only allowed value.
        """
        bounds = []
        if at_least is not None and not value >= at_least:
            bounds.append(f"at least {at_least:.6g}")
        if at_most is not None and not value <= at_most:
            bounds.append(f"at most {at_most:.6g}")
        if equal is not None and value != equal:
            bounds.append(f"exactly {equal}")
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        entry = f"{name}={shown}" + (f" ({' and '.join(bounds)})" if bounds else "")
        self.figures.append(entry)
        self.broken += [name] if bounds else []
        self.say(f"  {entry}")

    def verdict(self, name: str) -> str:
        """Return the closing line; no figure at all is a failure."""
        passed = self.figures and not self.broken
        return f"{'PASS' if passed else 'FAIL'} {name}: {', '.join(self.figures) or 'nothing was measured'}"


@dataclass(frozen=True)
class Timings:
    """Seconds per round and contestant; the contestants of one round ran one after the other."""

    seconds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        """Return the median time of a contestant in seconds."""
        return statistics.median(self.seconds[name])

    def best(self, name: str) -> float:
        """Return the shortest time of a contestant in seconds."""
        return min(self.seconds[name])

    def ratio(self, name: str, base: str) -> float:
        """Return the median over rounds of time(name) / time(base); drift of the machine cancels."""
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        return statistics.median(a / b for a, b in pairs)


def interleave(contestants: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1) -> Timings:
    """Time contestants in turn, so that whatever slows the machine slows all of them.

    Parameters
    ----------
    contestants : mapping of str to callable
        What to time; results are dropped.
    rounds : int
        Number of timed rounds. Every other one runs in reverse order.
    warmup : int, optional
        Number of rounds before that are not timed.

    Returns
    -------
    Timings
        The wall times in seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(-warmup, rounds):
        order = list(contestants) if number % 2 == 0 else list(contestants)[::-1]
        for name in order:
            elapsed = _time(contestants[name])
            if number >= 0:
                seconds[name].append(elapsed)
    return Timings(seconds)


def _time(function: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main(name: str, measure: Callable[[Bench], None], doc: str | None) -> None:
    """Run a benchmark script and leave with its exit code.

    Parameters
    ----------
    name : str
        Name of the script, without ``.py``.
    measure : callable
        Takes the `Bench`, measures, and hands in figures.
    doc : str or None
        Docstring of the script, shown by ``--help``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="end within 60 s on two cores")
    bench = Bench(quick=parser.parse_args().quick)
    start, crashed = time.perf_counter(), False
    try:
        measure(bench)
    except Exception as error:
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        bench.figures.append(f"{type(error).__name__}: {first}")
        bench.broken.append("error")
        crashed = True
    bench.say(f"{time.perf_counter() - start:.1f} s")
    # The last line is what a caller reads, so nothing may follow it on either stream.
    sys.stderr.flush()
    verdict = bench.verdict(name)
    bench.say(verdict)
    sys.exit(2 if crashed else 0 if verdict.startswith("PASS") else 1)
