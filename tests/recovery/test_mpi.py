"""Coordinators on real MPI ranks; skipped where there is no MPI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

MISSING = [
    name
    for name, there in {"mpirun": shutil.which("mpirun"), "mpi4py": find_spec("mpi4py")}.items()
    if there is None
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

SIZE = 3
SCRIPT = Path(__file__).with_name("mpi_ranks.py")

# Open MPI, of either generation, by default refuses to run as root and to start more ranks than cores.
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def run(case: str, folder: Path) -> list[dict[str, Any]]:
    """Return what every rank saw."""
    subprocess.run(
        ["mpirun", "-n", str(SIZE), sys.executable, SCRIPT, case, folder],
        env=os.environ | SETTINGS | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=120,
        check=case != "missing",
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]


def test_failures_are_summed_over_mpi_ranks(tmp_path: Path) -> None:
    seen = run("sums", tmp_path)
    assert [(s["rank"], s["size"]) for s in seen] == [(rank, SIZE) for rank in range(SIZE)]
    assert [s["totals"] for s in seen] == [[6, 6, 6]] * SIZE


def test_a_fatal_mpi_rank_raises_on_every_rank(tmp_path: Path) -> None:
    seen = run("fatal", tmp_path)
    assert [s["kind"] for s in seen] == ["GenerationFailed"] * SIZE
    assert all("train: 1 of 3 ranks cannot go on; 6 samples failed" in s["error"] for s in seen)
    assert [s["local"] for s in seen] == ["", "all samples failed", ""]


def test_an_mpi_rank_that_does_not_come_is_not_waited_for_beyond_the_timeout(tmp_path: Path) -> None:
    # Rank 2 leaves out its second synchronisation, so the others miss it at their third.
    seen = run("missing", tmp_path)
    assert [s.get("totals") for s in seen[2:]] == [[6, 9]]
    for s in seen[:2]:
        assert s["kind"] == "RankLost"
        assert "expected 3 ranks of MPI within 5.0 s, some did not come" in s["error"]
