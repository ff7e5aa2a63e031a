"""One rank of torch.distributed: ``python torch_ranks.py RANK SIZE CASE FOLDER`` writes what it saw."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed

from dask_sdc.exceptions import GenerationFailed
from dask_sdc.recovery import BatchRecoveryCoordinator, RecoveryMetadata


def generate(rank: int, case: str) -> list[int]:
    # Nothing is injected: the program has initialised torch.distributed.
    coordinator = BatchRecoveryCoordinator("train", device="cpu")
    totals = []
    for step in range(3):
        if case == "dies" and step == 1 and rank == 1:
            os._exit(0)
        fatal = case == "fatal" and step == 1 and rank == 1
        metadata = RecoveryMetadata(rank + 1, False, fatal, "all samples failed" if fatal else "")
        coordinator.consume({"__recovery__": metadata})
        totals.append(coordinator.synchronize())
    return totals


def main(rank: int, size: int, case: str, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    seen: dict[str, Any] = {"error": ""}
    try:
        seen["totals"] = generate(rank, case)
    except GenerationFailed as error:
        seen |= {"error": str(error), "kind": type(error).__name__, "local": error.local_error}
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    os._exit(0)  # without waiting for ranks that are gone


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
