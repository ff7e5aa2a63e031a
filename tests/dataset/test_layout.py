"""A dataset on disk: what was written comes back, and any byte that changes is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_sdc.dataset import batches, open_dataset, verify_dataset
from dask_sdc.dataset.layout import Layout
from dask_sdc.dataset.outputs import Output
from dask_sdc.dataset.reading import opened
from dask_sdc.exceptions import CheckpointError, CorruptionError, InputError
from dask_sdc.recovery import METADATA_KEY, BatchRecoveryCoordinator, RecoveryMetadata, SampleUnavailable

OUTPUTS = {
    "ids": Output("i8", (None,), 5),
    "hidden": Output("f4", (None, 3), 5, "ragged", like="ids"),
    "score": Output("f8", (2,)),
}
LOST = SampleUnavailable("why not", True)


def sample(k: int) -> dict[str, Any]:
    rng = np.random.default_rng(k)
    n = k % 6
    return {"ids": np.arange(n), "hidden": rng.normal(size=(n, 3)).astype("f4"), "score": rng.normal(size=2)}


def job(layout: Layout) -> dict[str, Any]:
    outputs = {name: output.to_dict() for name, output in layout.outputs.items()}
    return {"outputs": outputs, "samples": layout.samples, "batch_size": layout.batch, "version": ""}


def written(path: Path, samples: list[Any], batch: int) -> Layout:
    layout = Layout(OUTPUTS, len(samples), batch)
    arrays = layout.create(path, job(layout))
    for number in range(layout.batches):
        part = [samples[k] for k in layout.samples_of(number)]
        layout.write(arrays, number, layout.laid_out(number, part))
    return layout


@settings(max_examples=15, deadline=None)
@given(
    lost=st.lists(st.booleans(), min_size=1, max_size=12),
    batch=st.integers(1, 13),
    size=st.integers(1, 5),
)
def test_what_was_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory, lost: list[bool], batch: int, size: int
) -> None:
    path = tmp_path_factory.mktemp("data") / "a"
    samples = [LOST if gone else sample(k) for k, gone in enumerate(lost)]
    written(path, samples, batch)
    data = open_dataset(path).compute()
    assert data["valid"].values.tolist() == [not gone for gone in lost]
    assert data["failed"].values.tolist() == lost
    assert data["reason"].values.tolist() == ["why not" if gone else "" for gone in lost]
    for k, one in enumerate(samples):
        if isinstance(one, SampleUnavailable):
            continue
        n, begin = int(data["ids_length"][k]), int(data["hidden_begin"][k])
        np.testing.assert_array_equal(data["ids"].values[k, :n], one["ids"])
        np.testing.assert_array_equal(data["hidden"].values[begin : begin + n], one["hidden"])
        np.testing.assert_array_equal(data["score"].values[k], one["score"])
    coordinator, seen = BatchRecoveryCoordinator("test"), []
    for made in batches(path, size):
        assert isinstance(made[METADATA_KEY], RecoveryMetadata)
        if made[METADATA_KEY].locally_empty:
            assert made["sample"].tolist() == [-1] and made["ids"].shape == (1, 1) and not made["score"].any()
        else:
            seen += made["sample"].tolist()
        for row, k in enumerate(made["sample"][made["sample"] >= 0]):
            n = int(made["hidden_length"][row])
            np.testing.assert_array_equal(made["hidden"][row, :n], samples[k]["hidden"])
            assert not made["hidden"][row, n:].any()
        coordinator.consume(made)
    assert seen == [k for k, gone in enumerate(lost) if not gone]
    assert coordinator.local.failure_count == sum(lost)


def test_every_byte_counts(tmp_path: Path) -> None:
    """Flip a bit of every fifth byte of every chunk: reading the whole back names what is damaged."""
    layout = written(tmp_path / "a", [sample(1), LOST, sample(5)], 2)
    assert verify_dataset(tmp_path / "a") == 2
    names = {*layout.specs, "checksums"}
    files = sorted(path for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(files) > 2 * len(names)
    for path in files:
        whole = path.read_bytes()
        parts = path.relative_to(tmp_path / "a").parts
        step = 5 if path.name != "zarr.json" else 97
        for at in range(0, len(whole), step):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            try:
                verify_dataset(tmp_path / "a")
            except CorruptionError as error:
                assert len(parts) == 1 or parts[0] in str(error), (path, at, error)
            except CheckpointError:
                assert parts == ("zarr.json",)
            else:
                # White space and the like, which changes nothing that is read.
                assert path.name == "zarr.json", (path, at)
            path.write_bytes(whole)
    assert verify_dataset(tmp_path / "a") == 2


def test_a_damaged_chunk_is_named_when_it_is_read(tmp_path: Path) -> None:
    written(tmp_path / "a", [sample(k) for k in range(6)], 2)
    data = open_dataset(tmp_path / "a")
    path = tmp_path / "a" / "score" / "c" / "1" / "0"
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    assert data["score"][:2].compute().shape == (2, 2)
    with pytest.raises(CorruptionError, match="score: samples 2 to 3 are damaged"):
        data["score"].compute()


def test_what_nobody_vouches_for_is_not_there(tmp_path: Path) -> None:
    layout = written(tmp_path / "a", [sample(k) for k in range(6)], 2)
    _, _, arrays = opened(tmp_path / "a", "r+")
    assert [layout.vouched(arrays, batch) for batch in range(3)] == [True] * 3
    layout.disown(arrays, [1])
    assert [layout.vouched(arrays, batch) for batch in range(3)] == [True, False, True]
    data = open_dataset(tmp_path / "a").compute()
    assert data["valid"].values.tolist() == [True, True, False, False, True, True]
    assert not data["score"].values[2:4].any()
    assert verify_dataset(tmp_path / "a") == 2


def test_what_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="got nothing there"):
        open_dataset(tmp_path / "nowhere")
    zarr.open_group(tmp_path / "other", mode="w")
    with pytest.raises(CheckpointError, match="expected a dataset"):
        open_dataset(tmp_path / "other")
    with pytest.raises(InputError, match="memory of this process"):
        open_dataset(zarr.storage.MemoryStore())
    with pytest.raises(InputError, match="size: expected an int of at least 1"):
        next(batches(tmp_path / "other", 0))
