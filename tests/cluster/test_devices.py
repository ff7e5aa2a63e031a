"""What GPUs say of their health reaches the auditor, which looks closer; NVML is a stand-in."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster, Worker

from dask_sdc import Auditor, Moments
from dask_sdc.cluster.devices import DeviceWatch, visible_gpus
from dask_sdc.evidence.ledger import read
from tests.cluster import fake_nvml
from tests.cluster.waiting import until


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "devices.json"
    monkeypatch.setenv(fake_nvml.VARIABLE, str(path))
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(fake_nvml, "_heard", {})
    fake_nvml.write(path, [sound(k) for k in range(3)])
    yield path
    until(lambda: "sdc-xids" not in [thread.name for thread in threading.enumerate()])


def sound(number: int) -> dict[str, Any]:
    return {"uuid": f"GPU-{number}", "corrected": 5, "uncorrected": 2, "remapped": 0}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ("GPU-0", "GPU-1", "GPU-2")),
        ("2,0", ("GPU-2", "GPU-0")),
        ("GPU-1", ("GPU-1",)),
        ("", ()),
        ("7", ("7",)),
    ],
)
def test_visible_gpus_are_in_the_order_of_cuda(
    devices: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: tuple[str, ...]
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == expected


def test_without_a_driver_there_is_no_gpu(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fake_nvml.VARIABLE)
    assert visible_gpus() == ()
    watch = DeviceWatch(["GPU-0"])
    watch.listen()
    assert watch.read() == ([], [])


def test_only_what_has_risen_is_worse(devices: Path) -> None:
    watch = DeviceWatch(["GPU-0", "GPU-1", "GPU-9"])
    found, worse = watch.read()
    assert [(one.uuid, one.uncorrected, one.remapped, one.model) for one in found] == [
        ("GPU-0", 2, 0, "Fake H100"),
        ("GPU-1", 2, 0, "Fake H100"),
    ]
    assert worse == []
    fake_nvml.write(devices, [sound(0) | {"corrected": 50}, {**sound(1), "uncorrected": 3, "pending": 1}])
    assert watch.read()[1] == [
        "GPU-1: uncorrected ECC errors rose from 2 to 3",
        "GPU-1: a row of memory waits for being remapped",
    ]
    assert watch.read()[1] == []


def test_a_gpu_without_ecc_has_gaps_in_its_record(devices: Path) -> None:
    fake_nvml.write(devices, [{"uuid": "GPU-0"}])
    [found], worse = DeviceWatch(["GPU-0"]).read()
    assert (found.corrected, found.uncorrected, found.remapped, worse) == (None, None, None, [])
    assert found.ailments() == []


def test_critical_errors_are_heard_and_those_of_programs_are_no_reason(devices: Path) -> None:
    watch = DeviceWatch(["GPU-0", "GPU-1"])
    watch.read()
    watch.listen()
    try:
        fake_nvml.write(devices, [{**sound(0), "xids": [31, 79]}, sound(1)])
        seen: list[str] = []

        def both() -> bool:
            found, worse = watch.read()
            seen.extend(worse)
            return found[0].xids == (31, 79)

        until(both)
        assert seen == ["GPU-0: Xid 79"]
    finally:
        watch.close()


async def look(dask_worker: Worker) -> None:
    """Have a worker look at its GPUs now, instead of in half a minute."""
    plugin: Any = dask_worker.plugins["dask_sdc"]
    await plugin.tell_health()


def test_a_gpu_whose_errors_rise_is_audited_more_often(devices: Path, tmp_path: Path) -> None:
    blocks = [np.full((4, 2), float(k)) for k in range(60)]
    ledger = tmp_path / "ledger.jsonl"
    with (
        LocalCluster(
            n_workers=3, threads_per_worker=1, dashboard_address=":0", preload=fake_nvml.__file__
        ) as c,
        Client(c) as client,
        Auditor(client, audit_rate=0.05, seed=1, ledger=ledger) as auditor,
    ):
        auditor.accumulate(Moments(), blocks)
        report = auditor.report()
        assert report.domains.startswith("domains are gpus")
        assert {name: [one.uuid for one in found] for name, found in report.devices.items()} == {
            f"GPU-{k}": [f"GPU-{k}"] for k in range(3)
        }
        assert report.ailing == {} and auditor.rounds[0].audited <= 6
        assert auditor.screen().ailments == tuple(
            (f"GPU-{k}", (f"GPU-{k}: uncorrected ECC errors rose from 0 to 2",)) for k in range(3)
        )
        fake_nvml.write(devices, [sound(0), sound(1) | {"uncorrected": 4}, sound(2)])
        client.run(look)
        until(lambda: bool(auditor.report().ailing))
        report = auditor.report()
        why = "GPU-1: uncorrected ECC errors rose from 2 to 4"
        assert report.ailing == {"GPU-1": (why,)} and f"audited more often: GPU-1 ({why})" in str(report)
        assert report.devices["GPU-1"][0].uncorrected == 4
        # However the shards are dealt, it is half of them when it is so with all.
        fake_nvml.write(devices, [sound(k) | {"uncorrected": 4} for k in range(3)])
        client.run(look)
        until(lambda: len(auditor.report().ailing) == 3)
        auditor.accumulate(Moments(), blocks)
        assert 24 <= auditor.rounds[1].audited <= 36
        with Auditor(client, audit_rate=0.05, seed=1) as later:  # they were worse before this one came
            later.accumulate(Moments(), blocks)
            assert len(later.report().ailing) == 3 and 24 <= later.rounds[0].audited <= 36
        with Auditor(client, audit_rate=0.0) as none:
            none.accumulate(Moments(), blocks)
            assert none.rounds[0].audited == 0
    told = [entry.record for entry in read(ledger) if entry.kind == "health"]
    assert told[0] == {"domain": "GPU-1", "worse": [why], "rate": 0.5} and len(told) == 3
