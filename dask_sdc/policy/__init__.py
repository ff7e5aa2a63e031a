"""Pure decisions: domains, coverage of audits, verdicts, quarantine, screening."""

from __future__ import annotations

from dask_sdc.policy.domains import (
    DomainMap,
    Identity,
    apart_label,
    apart_labels,
    choose_kind,
    domain_label,
    restrictions,
)
from dask_sdc.policy.quarantine import (
    CleanRecord,
    Detention,
    QuarantineList,
    QuarantineStatus,
    Staged,
    StagingPlan,
    TaintHistory,
    check_staging,
    plan,
)
from dask_sdc.policy.sampling import CoverageSampler, check_rate, longest_run
from dask_sdc.policy.screening import Screening, Unresolved, screen
from dask_sdc.policy.verdict import (
    Closeness,
    Decision,
    Outcome,
    Persistence,
    Status,
    Voice,
    decide,
)

__all__ = [
    "CleanRecord",
    "Closeness",
    "CoverageSampler",
    "Decision",
    "Detention",
    "DomainMap",
    "Identity",
    "Outcome",
    "Persistence",
    "QuarantineList",
    "QuarantineStatus",
    "Screening",
    "Staged",
    "StagingPlan",
    "Status",
    "TaintHistory",
    "Unresolved",
    "Voice",
    "apart_label",
    "apart_labels",
    "check_rate",
    "check_staging",
    "choose_kind",
    "decide",
    "domain_label",
    "longest_run",
    "plan",
    "restrictions",
    "screen",
]
