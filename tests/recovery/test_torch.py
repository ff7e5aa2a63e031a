"""Coordinators on ranks of torch.distributed, with gloo; skipped where torch is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,  # torch takes seconds to import, in every process
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
]

SIZE = 3
SCRIPT = Path(__file__).with_name("torch_ranks.py")


def run(case: str, folder: Path) -> list[dict[str, Any] | None]:
    """Return what every rank saw, None for one that died."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen([sys.executable, SCRIPT, str(rank), str(SIZE), case, folder], env=env)
        for rank in range(SIZE)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0] * SIZE
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    paths = [folder / f"{rank}.json" for rank in range(SIZE)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def test_failures_are_summed_over_ranks_of_torch(tmp_path: Path) -> None:
    assert run("sums", tmp_path) == [{"error": "", "totals": [6, 6, 6]}] * SIZE


def test_a_fatal_rank_of_torch_raises_on_every_rank(tmp_path: Path) -> None:
    seen = [s for s in run("fatal", tmp_path) if s is not None]
    assert [s["kind"] for s in seen] == ["GenerationFailed"] * SIZE
    assert all("train: 1 of 3 ranks cannot go on; 6 samples failed" in s["error"] for s in seen)
    assert [s["local"] for s in seen] == ["", "all samples failed", ""]


def test_a_rank_of_torch_that_dies_is_lost_on_the_others(tmp_path: Path) -> None:
    zero, one, two = run("dies", tmp_path)
    assert one is None
    for seen in (zero, two):
        assert seen is not None and seen["kind"] == "RankLost"
        assert "torch.distributed could not add up" in seen["error"]
