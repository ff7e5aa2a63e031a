"""What a kernel computes does not depend on whether it was compiled here or came from the disk."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dask_sdc

PACKAGE = Path(dask_sdc.__file__).parent

DIGEST = """
import numpy as np
from dask_sdc.evidence.codec import digest, encode
from dask_sdc.statistics import GaussianMixture, Moments, ShardInfo

x = np.random.default_rng(3).normal(size=(4000, 4))
model = {"weights": np.full(3, 1 / 3), "means": x[:3], "covariances": np.stack([np.eye(4)] * 3)}
for statistic in (Moments(), GaussianMixture(3, init=model).statistic(GaussianMixture(3, init=model).init)):
    for rows in np.array_split(x, 40):
        print(digest(encode(statistic.update(statistic.init(ShardInfo((4,), x.dtype)), rows))).hex())
"""


@pytest.mark.slow
def test_compiled_here_and_loaded_from_disk_give_the_same_bits(tmp_path: Path) -> None:
    answers = []
    for caching in ({}, {}, {"NUMBA_DISABLE_CACHING": "1"}):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), **caching}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True
        )
        answers.append(done.stdout.split())
    assert len(answers[0]) == 80
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]


def compiled(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yield the functions that Numba compiles, with the text of their decorators."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            text = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
            if "jit(" in text or "inner(" in text:
                yield node, text


@pytest.mark.parametrize("folder", ["statistics/kernels"])
def test_kernels_call_what_is_compiled_into_them_only(folder: str) -> None:
    functions = {
        function.name: (function, text)
        for path in (PACKAGE / folder).glob("*.py")
        for function, text in compiled(ast.parse(path.read_text("utf-8")))
    }
    entries = {name for name, (_, text) in functions.items() if "jit(" in text and "inline=" not in text}
    assert len(entries) > 8
    called = {
        call.func.id
        for function, _ in functions.values()
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    assert entries & called == set()
