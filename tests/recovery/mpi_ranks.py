"""One MPI rank: ``mpirun -n 3 python mpi_ranks.py CASE FOLDER`` writes what every rank saw to the folder."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from dask_sdc.exceptions import GenerationFailed
from dask_sdc.recovery import BatchRecoveryCoordinator, MPIAllReduce, RecoveryMetadata


def generate(all_reduce: MPIAllReduce, case: str) -> list[int]:
    coordinator = BatchRecoveryCoordinator("train", all_reduce=all_reduce)
    totals = []
    for step in range(3):
        fatal = case == "fatal" and step == 1 and all_reduce.rank == 1
        metadata = RecoveryMetadata(all_reduce.rank + 1, False, fatal, "all samples failed" if fatal else "")
        coordinator.consume({"__recovery__": metadata})
        if not (case == "missing" and step == 1 and all_reduce.rank == 2):
            totals.append(coordinator.synchronize())
    return totals


def main(case: str, folder: Path) -> None:
    all_reduce = MPIAllReduce(timeout=5.0 if case == "missing" else None)
    seen: dict[str, Any] = {"rank": all_reduce.rank, "size": all_reduce.size, "error": ""}
    try:
        seen["totals"] = generate(all_reduce, case)
    except GenerationFailed as error:
        seen |= {"error": str(error), "kind": type(error).__name__, "local": error.local_error}
    path = folder / f"{all_reduce.rank}.json"
    path.with_suffix(".part").write_text(json.dumps(seen))
    path.with_suffix(".part").rename(path)
    if case == "missing":
        # There is a sum under way that will never end, so MPI cannot be ended in order; and the launcher
        # ends the others as soon as one rank does that.
        deadline = time.monotonic() + 60
        while len(list(folder.glob("*.json"))) < all_reduce.size and time.monotonic() < deadline:
            time.sleep(0.05)
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
