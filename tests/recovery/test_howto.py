"""The programs in the how-to do what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HOWTO = Path(__file__).parents[2] / "docs" / "howto" / "generation_failures.rst"

BLOCK = re.compile(r"^\.\. code-block:: python\n\n((?:    .*\n|\n)+)", re.MULTILINE)

PROGRAMS = [
    text for text in map(textwrap.dedent, BLOCK.findall(HOWTO.read_text("utf-8"))) if "__main__" in text
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "lines"),
    [
        (PROGRAMS[0], [r"10"]),
        (
            PROGRAMS[1],
            [rf"rank {n} stopped at step 149: train: 1 of 3 ranks cannot go on; .*" for n in range(3)],
        ),
    ],
    ids=["guards", "ranks"],
)
def test_program(tmp_path: Path, program: str, lines: list[str]) -> None:
    path = tmp_path / "program.py"
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert len(printed) == len(lines)
    assert all(re.fullmatch(wanted, line) for wanted, line in zip(lines, printed, strict=True)), printed
