"""Configuration that the clusters of these tests see, and the small model in a store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import dask_sdc.config  # noqa: F401  # before distributed.utils_test, which copies what is there
from dask_sdc.inference.weights.store import WeightStore
from tests.inference.pipeline.models import write_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights") / "tiny.zarr"


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    """A copy of the model with one bit of one tensor flipped."""
    copy = tmp_path / "damaged"
    shutil.copytree(folder, copy)
    target = next(path for path in (copy / "layers.1.mlp.up.weight" / "c").rglob("*") if path.is_file())
    content = bytearray(target.read_bytes())
    content[100] ^= 1
    target.write_bytes(content)
    return copy


@pytest.fixture(scope="module")
def store(folder: Path) -> WeightStore:
    return write_store(folder)
