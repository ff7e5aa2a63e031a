"""The commands ``dask sdc weights``."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dask_sdc.cli import sdc
from dask_sdc.inference.weights import WeightStore
from tests.inference.weights.tiny import huggingface_llama, write_huggingface


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(sdc, ["weights", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_huggingface(tmp_path / "model", huggingface_llama())


def test_convert_and_verify(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "store"
    done = run("convert", folder, place, "--dtype", "bfloat16")
    store = WeightStore.open(place)
    assert done.exit_code == 0
    assert done.output == f"{place}: 20 tensors, {store.nbytes()} bytes, sha256 {store.digest}\n"
    assert store.dtype_of("embed.weight") == "bfloat16"
    checked = run("verify", place)
    assert checked.exit_code == 0
    assert checked.output == f"{place}: ok, 20 tensors, {store.nbytes()} bytes, sha256 {store.digest}\n"


def test_convert_again(folder: Path, tmp_path: Path) -> None:
    assert run("convert", folder, tmp_path / "store").exit_code == 0
    taken = run("convert", folder, tmp_path / "store")
    assert taken.exit_code == 1 and "overwrite" in taken.output
    assert run("convert", folder, tmp_path / "store", "--overwrite").exit_code == 0
    # A store is a source as well.
    assert run("convert", tmp_path / "store", tmp_path / "half", "--dtype", "float16").exit_code == 0


def test_every_damaged_tensor_is_named(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "store"
    run("convert", folder, place)
    for name in ("norm.weight/c/0", "layers.1.mlp.up.weight/c/0/0"):
        raw = bytearray((place / name).read_bytes())
        raw[9] ^= 2
        (place / name).write_bytes(raw)
    checked = run("verify", place)
    assert checked.exit_code == 1
    assert "norm.weight is damaged" in checked.output
    assert "layers.1.mlp.up.weight is damaged" in checked.output


def test_errors_are_one_line(folder: Path, tmp_path: Path) -> None:
    for result in (run("verify", tmp_path), run("convert", tmp_path / "none", tmp_path / "store")):
        assert result.exit_code == 1
        assert result.output.startswith("Error: expected a weight store in")
        assert result.output.count("\n") == 1
    assert run("convert", folder, tmp_path / "store", "--dtype", "int8").exit_code == 2


def test_missing_library_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "gguf":
            raise ImportError("No module named 'gguf'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    result = run("convert", tmp_path / "model.gguf", tmp_path / "store")
    assert result.exit_code == 1
    assert "pip install 'dask-sdc[models]'" in result.output
