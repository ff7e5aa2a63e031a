"""Audits of blocks on devices, and devices that are lost, on real worker processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client

import dask_sdc.inference.pipeline.pipeline as pipeline_module
from dask_sdc import Auditor, Histogram, Moments
from dask_sdc.exceptions import DeviceMemoryError, InputTypeError
from dask_sdc.inference.pipeline import Pipeline
from tests.cluster.sums import Sums, integer_blocks
from tests.cluster.waiting import until
from tests.gpu import fakes
from tests.inference.pipeline.models import PROMPT, generated, write_store

BLOCKS = integer_blocks()
TOTAL = np.concatenate(BLOCKS).sum(axis=0)

NAMESPACES = ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)]


def blocks_on(xp: Any, x: np.ndarray[Any, Any]) -> da.Array:
    """Return an array whose blocks workers put where they are to be computed on."""
    return da.from_array(x, chunks=(250, 3)).map_blocks(xp.asarray, dtype=x.dtype, meta=xp.asarray(x[:0]))


# -- audits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_audits_of_blocks_agree(cluster4: Client, namespace: str) -> None:
    xp = pytest.importorskip(namespace)
    x = np.random.default_rng(1).normal(size=(4000, 3)).astype("f4")
    with Auditor(cluster4, audit_rate=0.5, domain="worker", seed=1) as auditor:
        moments = auditor.accumulate(Moments(), blocks_on(xp, x))
        counts = auditor.accumulate(Histogram(np.linspace(-3, 3, 61)), blocks_on(xp, x))
        assert sum(r.agreed for r in auditor.rounds) >= 10 and not auditor.receipts
    np.testing.assert_allclose(moments.mean, x.astype(float).mean(axis=0), atol=1e-12)
    assert counts.counts.sum() == np.histogram(x, np.linspace(-3, 3, 61))[0].sum()


@pytest.mark.gpu
def test_a_cluster_of_dask_cuda(tmp_path: Path) -> None:
    dask_cuda = pytest.importorskip("dask_cuda", reason="dask-cuda is not installed")
    cupy = pytest.importorskip("cupy")
    x = np.random.default_rng(1).normal(size=(4000, 3)).astype("f4")
    with dask_cuda.LocalCUDACluster(local_directory=str(tmp_path)) as cluster, Client(cluster) as client:
        workers = len(client.scheduler_info()["workers"])
        options = {} if workers > 1 else {"audit_rate": 0.0}
        with Auditor(client, domain="gpu", **options) as auditor:
            moments = auditor.accumulate(Moments(), blocks_on(cupy, x))
            domains = {place.domain for place in auditor._session.places()}
    assert len(domains) == workers and all(name.startswith(("GPU-", "MIG-")) for name in domains)
    np.testing.assert_allclose(moments.mean, x.astype(float).mean(axis=0), atol=1e-12)


# -- trouble; with devices that only seem to be -----------------------------------------------------


def test_columns_in_two_places_are_one_error(cluster4: Client) -> None:
    """The array says NumPy of its blocks, so that workers find out."""
    x = da.from_array(np.ones((8, 3)), chunks=(2, 3)).map_blocks(fakes.on_device, meta=np.ones((0, 3)))
    with Auditor(cluster4, domain="worker") as auditor:
        with pytest.raises(InputTypeError, match="x on the device, weights on the host") as caught:
            auditor.accumulate(Moments(), x, weights=np.ones(8))
        assert not auditor.quarantined
    assert "shard " in str(caught.value)


@pytest.mark.filterwarnings("ignore::dask_sdc.exceptions.AuditWarning")
def test_a_device_without_memory_is_named(cluster4: Client) -> None:
    with Auditor(cluster4, domain="worker") as auditor:
        with pytest.raises(DeviceMemoryError, match=r"asked for 1,073,741,824 bytes, in use"):
            auditor.accumulate(fakes.Hungry(always=True), BLOCKS)
        state = auditor.accumulate(Sums(), BLOCKS)
    np.testing.assert_array_equal(state["sum"], TOTAL)


def test_a_worker_that_lost_its_device_is_replaced(
    fresh_cluster: Callable[[int], Client], tmp_path: Path
) -> None:
    client = fresh_cluster(3)
    before = set(client.scheduler_info()["workers"])
    with Auditor(client, audit_rate=0.25, domain="worker", seed=1) as auditor:
        state = auditor.accumulate(fakes.LosesDevice(tmp_path / "lost"), BLOCKS)
        [round_] = auditor.rounds
        assert len(round_.failed) == 1 and round_.recomputed >= 1
        assert not auditor.quarantined and not auditor.receipts
    np.testing.assert_array_equal(state["sum"], TOTAL)
    # Its process is gone, and the nanny has started another.
    until(lambda: len(client.scheduler_info()["workers"]) == 3)
    assert len(before - set(client.scheduler_info()["workers"])) == 1


def lost_at(flag: Path, position: int, *args: Any, **options: Any) -> fakes.LostStage:
    stage = fakes.LostStage(*args, **options)
    stage.flag, stage.at = flag, position
    return stage


@pytest.mark.slow
def test_a_stage_that_lost_its_device_is_replaced(
    fresh_cluster: Callable[[int], Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, store = fresh_cluster(4), write_store(tmp_path / "weights")
    expected = generated(store, PROMPT, 20)
    made = functools.partial(lost_at, tmp_path / "lost", len(PROMPT) + 5)
    monkeypatch.setattr(pipeline_module, "TransformerStage", made)
    with Pipeline(client, tmp_path / "weights", stages=2, spares=1, timeout=5.0) as pipeline:
        before = pipeline.workers
        assert pipeline.generate(PROMPT, 20).ids == expected
        [report] = pipeline.recoveries
        [loss] = report.losses
        assert "DeviceLost: device lost: cudaErrorECCUncorrectable" in loss.detail
        after = pipeline.workers
        assert [k for k in range(2) if before[k] != after[k]] == [loss.stage]
        until(lambda: before[loss.stage] not in client.scheduler_info()["workers"])
        until(lambda: len(client.scheduler_info()["workers"]) == 4)
