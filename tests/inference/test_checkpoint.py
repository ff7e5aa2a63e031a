"""Checkpoints of a generation: whole or refused, and bound to what the tokens depend on."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.evidence.codec import encode
from dask_sdc.exceptions import CheckpointError, InputError, InputTypeError
from dask_sdc.inference.checkpoint import Checkpoint, token_ids

SETTINGS = {"temperature": 0.7, "top_p": 1.0, "seed": 3, "stop": [2, 5]}
CHECKPOINT = Checkpoint((1, 2, 3), (4, 5), SETTINGS, "ab" * 32, "cd" * 32, (10, 20))

IDS = st.lists(st.integers(0, 1 << 40), max_size=8).map(tuple)
CHECKPOINTS = st.builds(
    Checkpoint,
    IDS,
    IDS,
    st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.floats(), st.text(), st.none())),
    st.text(),
    st.text(),
    IDS,
)


@given(CHECKPOINTS)
def test_round_trips(checkpoint: Checkpoint) -> None:
    raw = checkpoint.to_bytes()
    back = Checkpoint.from_bytes(raw)
    assert back.to_bytes() == raw
    assert back.digest == checkpoint.digest == hashlib.sha256(raw[37:]).hexdigest()
    assert pickle.loads(pickle.dumps(checkpoint)).to_bytes() == raw


@given(st.data())
def test_no_damaged_byte_passes(data: st.DataObject) -> None:
    raw = bytearray(CHECKPOINT.to_bytes())
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CheckpointError, match="expected a checkpoint with its SHA-256"):
        Checkpoint.from_bytes(bytes(raw))


@pytest.mark.parametrize("cut", [0, 3, 40, -1])
def test_no_torn_file_passes(tmp_path: Path, cut: int) -> None:
    (tmp_path / "c").write_bytes(CHECKPOINT.to_bytes()[:cut])
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/c: expected a checkpoint with"):
        Checkpoint.load(tmp_path / "c")


def sealed(value: Any) -> bytes:
    payload = encode(value)
    return b"SDCG\x01" + hashlib.sha256(payload).digest() + payload


@pytest.mark.parametrize(
    "value", [None, {}, {"prompt": [1]}, {"prompt": (1,), "other": 2}, {"prompt": ("a",)}]
)
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="expected the fields of a checkpoint"):
        Checkpoint.from_bytes(sealed(value if value is not None else 3))


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.sdc"
    CHECKPOINT.save(path)
    CHECKPOINT.save(path)
    assert Checkpoint.load(path) == CHECKPOINT
    assert os.listdir(path.parent) == ["run.sdc"]


def test_a_failed_save_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.sdc"
    CHECKPOINT.save(path)

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        Checkpoint((9,)).save(path)
    assert Checkpoint.load(path) == CHECKPOINT
    assert os.listdir(tmp_path) == ["run.sdc"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path}/none: expected a checkpoint, got"):
        Checkpoint.load(tmp_path / "none")


def test_what_fits_passes() -> None:
    CHECKPOINT.check([1, 2, 3], "ab" * 32, dict(reversed(SETTINGS.items())))
    CHECKPOINT.check(np.array([1, 2, 3]), "ab" * 32, SETTINGS, "cd" * 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": [1, 2]}, "^prompt: expected 3 tokens, got 2$"),
        ({"prompt": [1, 9, 3]}, "^prompt: expected token 2 at 1, got 9$"),
        ({"model_digest": "ee"}, "^model digest: expected abab.*, got ee$"),
        ({"tokenizer_digest": "ee"}, "^tokenizer digest: expected cdcd.*, got ee$"),
        ({"settings": SETTINGS | {"seed": 4}}, "^setting seed: expected 3, got 4$"),
        ({"settings": SETTINGS | {"seed": 3.0}}, r"^setting seed: expected 3, got 3\.0$"),
        ({"settings": SETTINGS | {"top_k": 4}}, "^setting top_k: expected nothing, got 4$"),
        ({"settings": {"seed": 3}}, "^setting stop: .*; setting temperature: .*; setting top_p: .*$"),
        ({"prompt": [1], "model_digest": ""}, "^prompt: .*; model digest: .*$"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"prompt": [1, 2, 3], "model_digest": "ab" * 32, "settings": SETTINGS} | change
    with pytest.raises(CheckpointError, match=message):
        CHECKPOINT.check(**call)


def test_ids() -> None:
    assert token_ids(np.array([1, 2], np.uint16)) == (1, 2)
    assert token_ids([np.int64(3)]) == (3,)
    for bad in (["a"], [1.0], [True], 3, None, np.zeros((1, 2), int)):
        with pytest.raises(InputTypeError, match="x: expected a sequence of int"):
            token_ids(bad, "x")
    with pytest.raises(InputError, match="expected token ids >= 0, got -2"):
        token_ids([1, -2])
