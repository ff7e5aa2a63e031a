"""Staged inference: a model cut into stages that can be lost and healed."""

from __future__ import annotations

from dask_sdc.inference.checkpoint import Checkpoint
from dask_sdc.inference.heal import for_session, run_recovery
from dask_sdc.inference.identity import Answer, Challenge, Challenger, NodeKey, answer, verify_signature
from dask_sdc.inference.journal import ChunkRecord, DigestLog, Journal, boundary_digest, boundary_sketch
from dask_sdc.inference.ops import RecoveryOps, RecoveryReport, Replay, Step
from dask_sdc.inference.receipts import RunReceipt, boundary_chain, ids_digest
from dask_sdc.inference.session import (
    EpochFence,
    Failure,
    Loss,
    LossKind,
    ReplayPlan,
    SessionState,
    StageReport,
    locate_failure,
    plan_replay,
)
from dask_sdc.inference.shadow import ShadowAction, ShadowAudit, ShadowFinding, judge_shadow
from dask_sdc.inference.speculative import (
    DraftStatistics,
    DraftTree,
    ModelDrafter,
    NGramDrafter,
    SpeculationWindow,
    accept,
    accept_tree,
)

__all__ = [
    "Answer",
    "Challenge",
    "Challenger",
    "Checkpoint",
    "ChunkRecord",
    "DigestLog",
    "DraftStatistics",
    "DraftTree",
    "EpochFence",
    "Failure",
    "Journal",
    "Loss",
    "LossKind",
    "ModelDrafter",
    "NGramDrafter",
    "NodeKey",
    "RecoveryOps",
    "RecoveryReport",
    "Replay",
    "ReplayPlan",
    "RunReceipt",
    "SessionState",
    "ShadowAction",
    "ShadowAudit",
    "ShadowFinding",
    "SpeculationWindow",
    "StageReport",
    "Step",
    "accept",
    "accept_tree",
    "answer",
    "boundary_chain",
    "boundary_digest",
    "boundary_sketch",
    "for_session",
    "ids_digest",
    "judge_shadow",
    "locate_failure",
    "plan_replay",
    "run_recovery",
    "verify_signature",
]
