"""What a GPU says of its own health, and what of it is a reason to look closer.

Counters that only ever rise are compared with what they were: errors of long ago are on record and no
reason. Numbers of Xid errors are those of "XID Errors" of NVIDIA's GPU deployment documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

#: Xid errors that the hardware causes: double bit error, failed and done row remapping, NVLink, fallen off
#: the bus, contained and uncontained memory errors. Others may be faults of a program.
HARDWARE_XIDS = frozenset({48, 63, 64, 74, 79, 92, 94, 95})


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """One GPU; None is what it does not tell.

    Parameters
    ----------
    uuid : str
        Its UUID.
    model : str
        Its name.
    corrected, uncorrected : int or None
        ECC errors of its memory since it was made.
    remapped : int or None
        Memory rows replaced because of uncorrectable errors.
    remap_pending : bool
        Whether a row is to be replaced at the next reset.
    remap_failed : bool
        Whether one could not be replaced.
    xids : tuple of int
        Critical errors that its driver has reported to this worker, in order.
    """

    uuid: str
    model: str = ""
    corrected: int | None = None
    uncorrected: int | None = None
    remapped: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    xids: tuple[int, ...] = ()

    def worse_than(self, before: DeviceHealth) -> list[str]:
        """Say what has become worse than it was before, and is a reason to look closer."""
        found = [
            f"{name} rose from {was} to {now}"
            for name, was, now in (
                ("uncorrected ECC errors", before.uncorrected, self.uncorrected),
                ("rows remapped for uncorrectable errors", before.remapped, self.remapped),
            )
            if was is not None and now is not None and now > was
        ]
        found += ["a row of memory waits for being remapped"] * (
            self.remap_pending and not before.remap_pending
        )
        found += ["a row of memory could not be remapped"] * (self.remap_failed and not before.remap_failed)
        new = self.xids[len(before.xids) :]
        return found + [f"Xid {xid}" for xid in new if xid in HARDWARE_XIDS]

    def ailments(self) -> list[str]:
        """Say what is wrong with it, whenever that came about."""
        return self.worse_than(replace(DeviceHealth(self.uuid), uncorrected=0, remapped=0))

    def to_dict(self) -> dict[str, Any]:
        """Return it in closed types."""
        return {**asdict(self), "xids": list(self.xids)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """Read it back."""
        return cls(**{**found, "xids": tuple(found["xids"])})
