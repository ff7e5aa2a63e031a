"""What became of a dataset, and how it goes while it is made."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from dask_sdc.evidence.receipts import SDCAuditReceipt

__all__ = ["DatasetReport", "Progress"]

#: Seconds between two updates of a progress bar.
_EVERY = 0.2


@dataclass
class DatasetReport:
    """What became of the samples of a dataset.

    Attributes
    ----------
    samples : int
        How many were asked for.
    valid, missing : int
        How many are there, and how many are not.
    failures : int
        Of the missing ones, those that were tried in vain in this call; others were skipped.
    reasons : dict of int to str
        Per missing sample of this call why.
    kept : int
        Samples that an earlier call had written, and that were not made again.
    retried : int
        Attempts of this call that failed and were made again.
    redone : int
        Batches that were made again: their worker was lost, or was found to compute wrongly.
    audited : int
        Samples that were made twice, on different failure domains, with the same result.
    receipts : list of SDCAuditReceipt
        Of every two results that differed.
    quarantined : dict of str to str
        Domains that were named, and why.
    skipped_audits : dict of str to int
        Audits that were due and could not be done, by reason.
    ranks : dict of str to dict
        Per failure domain its batches, failures and seconds.
    seconds : float
        Time that this call took.
    """

    samples: int
    valid: int = 0
    missing: int = 0
    failures: int = 0
    reasons: dict[int, str] = field(default_factory=dict)
    kept: int = 0
    retried: int = 0
    redone: int = 0
    audited: int = 0
    receipts: list[SDCAuditReceipt] = field(default_factory=list)
    quarantined: dict[str, str] = field(default_factory=dict)
    skipped_audits: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.valid} of {self.samples} samples, {self.missing} missing; {self.failures} failed now",
            f"{self.kept} kept from before, {self.retried} attempts repeated, {self.redone} batches redone",
            f"{self.audited} samples audited, {len(self.receipts)} differences, {self.seconds:.1f} s",
        ]
        lines += [f"quarantined {domain}: {why}" for domain, why in self.quarantined.items()]
        return "\n".join(lines)


class Progress:
    """A bar on a terminal or in a log: samples, rate, failures and what is missing.

    Parameters
    ----------
    total : int
        Samples.
    shown : bool
        Whether anything is written.
    stream : file, optional
        Where to; standard error by default.
    """

    def __init__(self, total: int, shown: bool, stream: TextIO | None = None) -> None:
        self._total, self._shown, self._stream = total, shown, stream or sys.stderr
        self._began = self._last = time.monotonic()
        self._first = 0
        self._state = (0, 0, 0)

    def begin(self, done: int) -> None:
        """Note how many samples are there already; they say nothing of the rate."""
        self._first = done
        self._state = (done, 0, 0)

    def show(self, done: int, failures: int, missing: int) -> None:
        """Write the bar anew, now and then."""
        self._state = (done, failures, missing)
        now = time.monotonic()
        if now - self._last >= _EVERY:
            self._last = now
            self._write(now, "")

    def end(self) -> None:
        """Write the bar for the last time."""
        self._write(time.monotonic(), "\n")

    def _write(self, now: float, end: str) -> None:
        if not self._shown:
            return
        done, failures, missing = self._state
        share = done / self._total if self._total else 1.0
        rate = (done - self._first) / max(now - self._began, 1e-9)
        bar = "#" * int(30 * share)
        self._stream.write(
            f"\r[{bar:<30}] {share:4.0%} | {done}/{self._total} samples | {rate:.1f}/s | "
            f"failed {failures} | missing {missing}{end}"
        )
        self._stream.flush()


def counted(ranks: dict[str, dict[str, float]], domain: str, failures: int, seconds: float) -> None:
    """Add a batch to what is known of its rank."""
    rank = ranks.setdefault(domain, {"batches": 0, "failures": 0, "seconds": 0.0})
    rank["batches"] += 1
    rank["failures"] += failures
    rank["seconds"] += seconds


def to_json(report: DatasetReport) -> Mapping[str, Any]:
    """Return a report with JSON-compatible values, for a ledger."""
    plain = {name: value for name, value in vars(report).items() if name != "receipts"}
    return plain | {
        "receipts": len(report.receipts),
        "reasons": {str(k): v for k, v in report.reasons.items()},
    }
