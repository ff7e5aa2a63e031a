"""Say whether this environment has exactly the versions that a constraints file names."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

pins = [
    line.split("==") for line in Path(sys.argv[1]).read_text("utf-8").splitlines() if line and line[0] != "#"
]
wrong = [f"{name}: expected {pin}, got {version(name)}" for name, pin in pins if version(name) != pin]
sys.exit("\n".join(wrong) or None)
