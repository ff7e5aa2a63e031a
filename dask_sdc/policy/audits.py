"""Audits that fall due together share batches, since each batch costs its own milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

from dask_sdc.policy.cases import CaseBook
from dask_sdc.policy.roster import Domain, Roster

#: Batches that are kept open at a time: with two domains, one for each.
_OPEN = 2


class AuditBatches:
    """Collects the audits of one moment into batches, each for a domain apart from all its primaries.

    Parameters
    ----------
    roster : Roster
        Picks who audits.
    batch_min : float
        Expected seconds beyond which a batch takes no more audits.
    """

    def __init__(self, roster: Roster, batch_min: float) -> None:
        self._roster = roster
        self._batch_min = batch_min
        self._open: dict[str, dict[int, str]] = {}

    def add(self, shard_ids: Sequence[int], primary: Domain, cases: CaseBook) -> bool:
        """Take the audits of one primary batch; say whether there is anybody to do them."""
        partner = self._sharing(primary, len(shard_ids))
        if partner is None:
            partner = self._roster.partner([primary.place])
            if partner is None:
                return False
            if partner.name in self._open or len(self._open) == _OPEN:
                self.flush(cases)
                # Others may be idler now that what these do is counted.
                partner = self._roster.partner([primary.place]) or partner
        wanted = self._open.setdefault(partner.name, {})
        wanted.update(dict.fromkeys(shard_ids, primary.name))
        return True

    def _sharing(self, primary: Domain, more: int) -> Domain | None:
        """Return the auditor of an open batch that may take ``more`` audits of a primary's shards."""
        for name, wanted in self._open.items():
            auditor = self._roster[name]
            apart = auditor.place.lane != primary.place.lane
            alike = auditor.place.fingerprint == primary.place.fingerprint
            cost = (len(wanted) + more) * (self._roster.cost or self._batch_min) * auditor.pace
            if apart and alike and cost <= self._batch_min:
                return auditor
        return None

    def flush(self, cases: CaseBook) -> None:
        """Send the open batches."""
        for name, wanted in self._open.items():
            batch_id = self._roster.send(
                "audit",
                list(wanted),
                self._roster[name],
                self._roster.now,
                apart_from=wanted.values(),
                parts=dict.fromkeys(wanted, "audit"),
            )
            for shard_id, primary in wanted.items():
                cases.expect_audit(shard_id, batch_id, primary)
        self._open.clear()
