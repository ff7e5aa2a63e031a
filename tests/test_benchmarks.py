"""The frame of the benchmark scripts: bounds, closing line, exit code, interleaving."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def frame(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import _bench

    return _bench


def run(tmp_path: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script whose ``measure`` has this body."""
    script = tmp_path / "probe.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\nfrom _bench import main\n"
        f"def measure(bench):\n    {body}\n"
        "if __name__ == '__main__':\n    main('probe', measure, 'What it shows.')\n"
    )
    return subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("body", "last", "code"),
    [
        ("bench.figure('ratio', 1.0625, at_most=1.13)", "PASS probe: ratio=1.062", 0),
        ("bench.figure('ratio', 1.25, at_most=1.13)", "FAIL probe: ratio=1.25 (at most 1.13)", 1),
        ("bench.figure('speed', 3.0, at_least=4)", "FAIL probe: speed=3 (at least 4)", 1),
        ("bench.figure('alarms', 0, equal=0)", "PASS probe: alarms=0", 0),
        ("bench.figure('alarms', 2, equal=0)", "FAIL probe: alarms=2 (exactly 0)", 1),
        ("bench.figure('x', float('nan'), at_most=1)", "FAIL probe: x=nan (at most 1)", 1),
        ("bench.figure('a', 1); bench.figure('b', 2, at_most=2)", "PASS probe: a=1, b=2", 0),
        ("bench.figure('a', 3, at_most=2); bench.figure('b', 2)", "FAIL probe: a=3 (at most 2), b=2", 1),
        ("pass", "FAIL probe: nothing was measured", 1),
        ("raise OSError('disk full')", "FAIL probe: OSError: disk full", 2),
        ("bench.figure('a', 1); raise OSError('full')", "FAIL probe: a=1, OSError: full", 2),
        ("bench.figure('quick', bench.quick)", "PASS probe: quick=False", 0),
    ],
)
def test_last_line_and_exit_code_agree(tmp_path: Path, body: str, last: str, code: int) -> None:
    done = run(tmp_path, body)
    assert (done.stdout.splitlines()[-1], done.returncode) == (last, code)


def test_quick_reaches_the_script(tmp_path: Path) -> None:
    done = run(tmp_path, "bench.figure('quick', bench.quick)", "--quick")
    assert done.stdout.splitlines()[-1] == "PASS probe: quick=True"


def test_help_shows_what_the_script_shows(tmp_path: Path) -> None:
    assert "What it shows." in run(tmp_path, "pass", "--help").stdout


def test_contestants_alternate(frame: ModuleType) -> None:
    calls: list[str] = []
    times = frame.interleave(
        {name: lambda name=name: calls.append(name) for name in "ab"}, rounds=3, warmup=1
    )
    assert "".join(calls) == "ba" + "ab" + "ba" + "ab"
    assert {name: len(seconds) for name, seconds in times.seconds.items()} == {"a": 3, "b": 3}


def test_ratio_is_the_median_of_the_rounds(frame: ModuleType) -> None:
    times = frame.Timings({"a": [2.0, 30.0, 4.0], "b": [1.0, 10.0, 4.0]})
    assert times.ratio("a", "b") == 2.0
    assert (times.median("a"), times.best("a")) == (4.0, 2.0)


@pytest.mark.parametrize("script", sorted(FOLDER.glob("[!_]*.py")), ids=lambda path: path.stem)
def test_every_script_ends_in_the_frame(script: Path) -> None:
    """Only reads the scripts: .ci/run runs them."""
    tree = ast.parse(script.read_text("utf-8"))
    last = ast.unparse(tree.body[-1])
    assert last.startswith("if __name__ == '__main__':")
    assert f"main({script.stem!r}, " in last
    assert ast.get_docstring(tree)
