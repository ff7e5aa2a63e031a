"""The environment fingerprint: stable, cached, and different where bits may differ."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import threadpoolctl

from dask_sdc.evidence.fingerprint import BlasBuild, EnvironmentFingerprint, environment_fingerprint


@pytest.fixture
def fresh() -> Iterator[None]:
    environment_fingerprint.cache_clear()
    yield
    environment_fingerprint.cache_clear()


def test_it_says_what_runs_here() -> None:
    found = environment_fingerprint()
    assert dict(found.packages)["numpy"] == np.__version__
    assert found.machine and found.cpu_model and found.python.startswith("CPython 3.")
    assert found.blas and all(build.threads >= 1 for build in found.blas)
    assert re.fullmatch(r"[0-9a-f]{16}", found.digest())
    assert environment_fingerprint() is found


def test_another_process_of_this_environment_agrees_whatever_it_has_imported() -> None:
    script = (
        "import scipy.linalg, sklearn.cluster\n"
        "from dask_sdc.evidence.fingerprint import environment_fingerprint\n"
        "print(environment_fingerprint().digest())\n"
    )
    environment_fingerprint.cache_clear()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == environment_fingerprint().digest()


@pytest.mark.usefixtures("fresh")
def test_threads_settings_and_device_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = environment_fingerprint()
    assert environment_fingerprint("NVIDIA H200").digest() != plain.digest()
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    environment_fingerprint.cache_clear()
    assert environment_fingerprint().settings == (("NUMBA_CPU_NAME", "generic"),)
    assert environment_fingerprint().digest() != plain.digest()
    monkeypatch.undo()
    more = max(build.threads for build in plain.blas) + 1
    monkeypatch.setattr(threadpoolctl, "threadpool_info", lambda: [library(num_threads=more)])
    environment_fingerprint.cache_clear()
    assert environment_fingerprint().digest() != plain.digest()


def library(**fields: Any) -> dict[str, Any]:
    found = {"user_api": "blas", "internal_api": "mkl", "filepath": "/lib/libmkl.so", "num_threads": 1}
    return found | fields


@pytest.mark.usefixtures("fresh")
def test_a_blas_that_tells_little_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [library(), library(user_api="openmp")]
    monkeypatch.setattr(threadpoolctl, "threadpool_info", lambda: others)
    assert environment_fingerprint().blas == (BlasBuild("mkl", "", "", 1),)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(EnvironmentFingerprint)])
def test_every_field_counts(field: str) -> None:
    found = environment_fingerprint()
    other = {"isa": ("x",), "packages": (("x", "1"),), "settings": (("X", "1"),), "blas": ()}.get(field, "x")
    assert dataclasses.replace(found, **{field: other}).digest() != found.digest()


def test_json_and_pickle_round_trip() -> None:
    found = environment_fingerprint("some device")
    back = EnvironmentFingerprint.from_dict(json.loads(json.dumps(found.to_dict())))
    assert back == found and back.digest() == found.digest()
    assert pickle.loads(pickle.dumps(found)) == found
