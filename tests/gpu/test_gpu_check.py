"""The script that checks a GPU: its cases run on the emulation, its figures come from a fake timer."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.cuda.emulated import COMPILER, HostDevice

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return loaded("gpu_check", monkeypatch)


@pytest.fixture
def all_cases(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return list(loaded("_gpu_cases", monkeypatch).cases(HostDevice(), 1 << 16))


def fixed(seconds: dict[str, float]) -> Callable[..., dict[str, list[float]]]:
    """Return a timer that says the same of everything."""
    return lambda contestants, rounds: {name: [seconds[name]] * rounds for name in contestants}


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
def test_kernels_and_plain_expressions_compute_the_same(all_cases: list[Any]) -> None:
    same = 0
    for case in all_cases:
        got, plain = case.kernel(), case.plain()
        if case.group == "moments" and case.name.startswith("moments 64"):
            x_min, x_max = plain[1:]
            assert np.array_equal(got["min"], x_min) and np.array_equal(got["max"], x_max)
        elif case.group == "histogram":
            np.testing.assert_array_equal(got[0][1:-2], plain)
        elif case.group == "scatter":
            np.testing.assert_allclose(got[0], plain, rtol=1e-12, atol=1e-9)
        elif case.group == "k-means":
            np.testing.assert_allclose(got[0], plain[1], rtol=1e-12)
        elif case.group == "expectation":
            np.testing.assert_allclose(got[0], plain[1], rtol=1e-10)
        elif case.group == "step":
            assert np.all(np.isfinite(got)) and got.tobytes() == plain.tobytes()
        elif case.group in ("rows", "decode", "prefill", "products"):
            np.testing.assert_allclose(got, plain, rtol=1e-4, atol=1e-5)
        else:
            continue
        same += 1
    assert same >= len(all_cases) - 2


def test_bytes_are_those_of_the_arrays(all_cases: list[Any]) -> None:
    """About the size that was asked for, where it was asked for: rows are whole."""
    by_name = {case.name: case for case in all_cases}
    assert by_name["moments 1 float32"].nbytes == 1 << 16
    assert by_name["moments 64 float64"].nbytes == 1 << 16
    assert by_name["histogram 100 even"].nbytes == 1 << 16
    assert by_name["scatter 256"].nbytes == 1 << 14
    assert by_name["RMSNorm 4096"].nbytes == 2 * 4096 * 4
    [alone] = [case for case in all_cases if case.name.startswith("decode 1 of ")]
    assert alone.nbytes == 2 * 8 * 128 * 4 * int(alone.name.split()[-1])


def test_every_target_has_cases(script: ModuleType, all_cases: list[Any]) -> None:
    groups = {case.group for case in all_cases}
    assert {*script.OF_COPY, *script.OF_PLAIN} <= groups
    assert all(case.plain is not None for case in all_cases)


def test_a_row_is_what_the_timer_says(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    case_type = loaded("_gpu_cases", monkeypatch).Case
    case = case_type("a", "moments", 10**9, lambda: None, lambda: None)
    row = script.row_of(case, fixed({"kernel": 0.5, "plain": 2.0}), 4e9, 3)
    assert (row.seconds, row.plain, row.of_copy, row.speedup) == (0.5, 2.0, 0.5, 4.0)
    alone = script.row_of(case_type("b", "rows", 4, lambda: None), fixed({"kernel": 1.0}), 4.0, 3)
    assert alone.of_copy == 1.0 and np.isnan(alone.plain) and np.isnan(alone.speedup)


def rows_of(script: ModuleType, of_copy: float, speedup: float) -> list[Any]:
    groups = [*script.OF_COPY, *script.OF_PLAIN]
    return [script.Row(f"{g} case", g, 1e-3, speedup * 1e-3, 10**6, of_copy, speedup) for g in groups]


def test_the_worst_case_of_a_group_decides(script: ModuleType) -> None:
    from _bench import Bench

    good = rows_of(script, 0.9, 3.5)
    bench = Bench()
    script.judge(bench, good)
    assert bench.verdict("gpu_check").startswith("PASS gpu_check: moments_of_copy=0.9, histogram_of_copy=0.9")
    bench = Bench()
    script.judge(bench, [*good, script.Row("slow", "histogram", 1e-3, 1e-3, 1, 0.84, 1.0)])
    assert bench.broken == ["histogram_of_copy"]
    assert "histogram_of_copy=0.84 (at least 0.85)" in bench.verdict("gpu_check")
    bench = Bench()
    script.judge(bench, rows_of(script, 0.8, 2.9))
    assert bench.broken == ["moments_of_copy", "histogram_of_copy", "expectation_speedup"]


def test_a_step_is_told_in_tokens_a_second(script: ModuleType) -> None:
    from _bench import Bench

    bench = Bench()
    script.say_rates(
        bench, [*rows_of(script, 0.9, 3.5), script.Row("token", "step", 1e-3, 4e-3, 1, 0.5, 4.0)]
    )
    assert [figure.split()[0] for figure in bench.figures] == [
        "tokens_per_s_captured=1000",
        "tokens_per_s_plain=250",
    ]


def test_the_table_and_the_report_say_the_same(script: ModuleType, tmp_path: Path) -> None:
    rows = [*rows_of(script, 0.9, 3.5), script.Row("alone", "rows", 1e-3, float("nan"), 5, 0.1, float("nan"))]
    text = script.table(rows, 3e12)
    assert "3000 GB/s" in text.splitlines()[0] and len(text.splitlines()) == 2 + len(rows)
    assert text.splitlines()[2].split() == ["moments", "case", "1.000", "1.0", "0.90", "3.500", "3.50"]
    script.write_report(tmp_path / "r.json", {"device": "x"}, 3e12, rows)
    report = json.loads((tmp_path / "r.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert report["copy_bytes_per_second"] == 3e12 and report["cases"][-1]["plain"] is None
    assert report["cases"][0]["of_copy"] == 0.9


def test_copies_count_twice(script: ModuleType) -> None:
    assert script.copy_bandwidth(np, fixed({"copy": 0.5}), 1000, 3) == 4000.0


def test_tests_that_fail_or_hang_are_a_figure(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from _bench import Bench

    done = subprocess.CompletedProcess([], 1, "1 failed", "")
    monkeypatch.setattr(script.subprocess, "run", lambda *a, **k: done)
    bench = Bench()
    script.run_tests(bench)
    assert bench.broken == ["tests_exit_code"]

    def hangs(*args: Any, **options: Any) -> Any:
        raise subprocess.TimeoutExpired(args[0], options["timeout"])

    monkeypatch.setattr(script.subprocess, "run", hangs)
    script.run_tests(bench)
    assert "tests_exit_code=-1 (exactly 0)" in bench.figures


def test_without_a_device_it_says_so_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--quick"],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0 and done.stdout.count("\n") == 1
    assert done.stdout.startswith("SKIP gpu_check: expected ")
