"""An account of what was audited, caught and done about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from dask_sdc.evidence.receipts import SDCAuditReceipt
from dask_sdc.policy.health import DeviceHealth
from dask_sdc.policy.messages import RoundRecord


@dataclass(frozen=True)
class Report:
    """All rounds of an auditor.

    Attributes
    ----------
    rate : float
        Audits per shard.
    seed : int
        Seed of the auditor.
    domains : str
        What counts as a failure domain, and why.
    rounds : tuple of RoundRecord
    receipts : tuple of SDCAuditReceipt
    quarantined : mapping of str to str
        Domains in quarantine, with the reason.
    ailing : mapping of str to tuple of str
        Domains that are audited more often, with what has become worse of their GPUs.
    devices : mapping of str to tuple of DeviceHealth
        By domain the GPUs, as they last were.
    ledger : str or None
        Path of the ledger.
    """

    rate: float
    seed: int
    domains: str
    rounds: tuple[RoundRecord, ...]
    receipts: tuple[SDCAuditReceipt, ...]
    quarantined: Mapping[str, str] = field(default_factory=dict)
    ailing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    devices: Mapping[str, tuple[DeviceHealth, ...]] = field(default_factory=dict)
    ledger: str | None = None

    def totals(self) -> dict[str, int]:
        """Return the counts of all rounds."""
        names = ("shards", "audited", "agreed", "mismatches", "evaluations", "reused", "recomputed")
        return {name: sum(getattr(record, name) for record in self.rounds) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "rate": self.rate,
            "seed": self.seed,
            "domains": self.domains,
            "totals": self.totals(),
            "rounds": [record.to_dict() for record in self.rounds],
            "receipts": [receipt.to_dict() for receipt in self.receipts],
            "quarantined": dict(self.quarantined),
            "ailing": {domain: list(worse) for domain, worse in self.ailing.items()},
            "devices": {domain: [one.to_dict() for one in found] for domain, found in self.devices.items()},
            "ledger": self.ledger,
        }

    def __str__(self) -> str:
        totals = self.totals()
        skipped = sum((Counter(record.skipped) for record in self.rounds), Counter[str]())
        lines = [
            f"{len(self.rounds)} rounds, {totals['shards']} shards, {self.domains or 'not attached'}",
            f"audited {totals['audited']} at rate {self.rate:g}: {totals['agreed']} agreed, "
            f"{totals['mismatches']} mismatched, {sum(skipped.values())} skipped",
        ]
        lines += [f"  skipped {count}: {reason}" for reason, count in skipped.items()]
        lines += [f"  {receipt.summary()}" for receipt in self.receipts]
        if totals["recomputed"]:
            lines.append(f"recomputed {totals['recomputed']} shards on other domains")
        lines += [f"in quarantine: {name} ({why})" for name, why in self.quarantined.items()]
        lines += [f"audited more often: {name} ({'; '.join(worse)})" for name, worse in self.ailing.items()]
        lines += [f"note: {note}" for note in dict.fromkeys(r.note for r in self.rounds if r.note)]
        if self.ledger is not None:
            lines.append(f"receipts are in {self.ledger}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"
