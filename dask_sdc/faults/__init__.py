"""Faults on purpose: bit flips and plans of faults; pure, without a cluster.

What delivers a plan on a cluster is `dask_sdc.faults.plugin.FaultInjector`.
"""

from __future__ import annotations

from dask_sdc.faults.flips import (
    count_bits,
    flip_bits,
    flip_state_bit,
    flip_state_bits,
    inject_bit_flip,
    poison_state,
    scale_state_value,
    stick_bits,
    stick_state_bit,
)
from dask_sdc.faults.plan import (
    Delivery,
    Fault,
    FaultContext,
    FaultPlan,
    Tally,
    corrupt_bytes,
    corrupt_state,
)

__all__ = [
    "Delivery",
    "Fault",
    "FaultContext",
    "FaultPlan",
    "Tally",
    "corrupt_bytes",
    "corrupt_state",
    "count_bits",
    "flip_bits",
    "flip_state_bit",
    "flip_state_bits",
    "inject_bit_flip",
    "poison_state",
    "scale_state_value",
    "stick_bits",
    "stick_state_bit",
]
