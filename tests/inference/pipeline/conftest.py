"""Configuration that the clusters of these tests see, and the small model in a store."""

from __future__ import annotations

from pathlib import Path

import pytest

import dask_sdc.config  # noqa: F401  # before distributed.utils_test, which copies what is there
from dask_sdc.inference.weights.store import WeightStore
from tests.inference.pipeline.models import write_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights") / "tiny.zarr"


@pytest.fixture(scope="module")
def store(folder: Path) -> WeightStore:
    return write_store(folder)
