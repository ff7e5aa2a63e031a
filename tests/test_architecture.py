"""Imports point one way, and a few habits are kept out of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dask_sdc"

# A module may import its own part and what stands before that part. A part is the longest of
# these names that a module's name begins with; `dask_sdc` is the package's face, imported by none.
ORDER = [
    "exceptions",
    "config",
    "statistics",
    "evidence",
    "policy",
    "recovery",
    "inference",
    "faults",
    "graph",
    "integrations",
    "cluster",
    "inference.pipeline",
    "dataset",
    "recovery.cluster",
    "faults.plugin",
    "testing",
    "report",
    "dashboard",
    "demo",
    "cli",
]

# Parts that make sense without a cluster, and so never import the library that runs one.
PURE = {
    "exceptions",
    "config",
    "statistics",
    "evidence",
    "policy",
    "recovery",
    "inference",
    "faults",
    "graph",
}

MAX_LINES = 700


def module_name(path: Path) -> str:
    """Return the dotted name below the package: ``policy/round.py`` is ``policy.round``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def part_of(module: str) -> str | None:
    """Return the part that a module belongs to, None for one that ORDER does not know."""
    fits = [part for part in ORDER if f"{module}.".startswith(f"{part}.")]
    return max(fits, key=len, default=None)


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the absolute name of everything that is imported, at whatever depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: expected an absolute import, got a relative one"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def breaches(module: str, source: str) -> list[str]:
    """Return what a module of this name and source does against the house rules."""
    tree = ast.parse(source)
    part = part_of(module)
    found = []
    if source.count("\n") > MAX_LINES:
        found.append(f"has {source.count(chr(10))} lines")
    for name in imports(tree):
        top, _, below = name.partition(".")
        if top == "dask_sdc" and module:
            target = part_of(below)
            if target is None:
                found.append(f"imports {name}, which ORDER does not know")
            elif part is not None and ORDER.index(target) > ORDER.index(part):
                found.append(f"imports upward: {name}")
        elif top == "distributed" and part in PURE:
            found.append("imports distributed")
        elif top == "cupy" and "kernels" not in module.split("."):
            found.append("imports cupy outside of a kernels folder")
        elif top == "bokeh" and part != "dashboard":
            found.append("imports bokeh outside of the dashboard")
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"has a bare except in line {node.lineno}")
        elif isinstance(node, ast.Name) and node.id == "print" and part in PURE:
            found.append(f"prints in line {node.lineno}")
    return found


SOURCES = {module_name(path): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("module", SOURCES)
def test_module_keeps_the_rules(module: str) -> None:
    assert breaches(module, SOURCES[module]) == []


@pytest.mark.parametrize("module", [name for name in SOURCES if name])
def test_module_belongs_to_a_part(module: str) -> None:
    assert part_of(module) is not None


@pytest.mark.parametrize(
    "folder", sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("kernels")), ids=str
)
def test_cupy_is_imported_in_one_place_per_folder(folder: Path) -> None:
    users = [
        path.name
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if any(name.split(".")[0] == "cupy" for name in imports(ast.parse(path.read_text("utf-8"))))
    ]
    assert len(users) <= 1, users


@pytest.mark.parametrize("banned", ["utils.py", "helpers.py", "common.py"])
def test_no_catch_all_modules(banned: str) -> None:
    assert list(PACKAGE.rglob(banned)) == []


@pytest.mark.parametrize(
    ("module", "source", "breach"),
    [
        ("evidence.codec", "from dask_sdc.policy import verdict", "imports upward: dask_sdc.policy.verdict"),
        ("evidence.codec", "def f():\n    import dask_sdc.cli", "imports upward: dask_sdc.cli"),
        ("policy", "from dask_sdc import graph", "imports upward: dask_sdc.graph"),
        ("faults.flips", "from dask_sdc.graph import x", "imports upward: dask_sdc.graph.x"),
        ("cluster.auditor", "import dask_sdc.faults.plugin", "imports upward: dask_sdc.faults.plugin"),
        (
            "graph.rounds",
            "from dask_sdc import Auditor",
            "imports dask_sdc.Auditor, which ORDER does not know",
        ),
        ("graph.rounds", "from distributed import Client", "imports distributed"),
        ("recovery.batch", "import dask_sdc.recovery.cluster", "imports upward: dask_sdc.recovery.cluster"),
        ("evidence.codec", "import cupy", "imports cupy outside of a kernels folder"),
        ("cluster.metrics", "from bokeh.models import X", "imports bokeh outside of the dashboard"),
        ("cluster.scrub", "try:\n    pass\nexcept:\n    pass", "has a bare except in line 3"),
        ("policy.round", "print(1)", "prints in line 1"),
        ("policy.round", "x = 1\n" * (MAX_LINES + 1), f"has {MAX_LINES + 1} lines"),
    ],
)
def test_breach_is_found(module: str, source: str, breach: str) -> None:
    assert breaches(module, source) == [breach]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("policy.round", "from dask_sdc.evidence.codec import encode\nfrom dask_sdc.policy import domains"),
        ("faults.plugin", "import dask_sdc.cluster\nfrom distributed import WorkerPlugin"),
        ("inference.pipeline", "from dask_sdc.inference import stage\nimport distributed"),
        ("recovery.cluster.group", "from dask_sdc.recovery import rounds\nimport distributed"),
        ("statistics.kernels.device", "import cupy"),
        ("demo", "from dask_sdc.cluster.auditor import Auditor\nprint(1)"),
        ("", "from dask_sdc.cluster.auditor import Auditor"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert breaches(module, source) == []
