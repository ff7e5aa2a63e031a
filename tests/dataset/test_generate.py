"""Datasets made on real workers: samples that fail, workers that die or lie, drivers that come back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask.array as da
import dask.bag as db
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from distributed import Client, LocalCluster

from dask_sdc.dataset import Output, generate_dataset, open_dataset, verify_dataset, work
from dask_sdc.dataset.job import DatasetJob, Rules, _Case, _Order
from dask_sdc.dataset.report import DatasetReport
from dask_sdc.dataset.work import Made
from dask_sdc.evidence.ledger import verify
from dask_sdc.exceptions import (
    CheckpointError,
    ClosedError,
    GenerationFailed,
    InputError,
    InputTypeError,
    MissingSamples,
)
from dask_sdc.policy.sampling import CoverageSampler
from dask_sdc.recovery import Backoff
from tests.dataset.producers import (
    ODD,
    OUTPUTS,
    Broken,
    Killer,
    Large,
    LateLiar,
    Liar,
    Odd,
    Once,
    Overwriter,
    at_row,
    expected,
    made,
    some_fail,
)

N = 120


def contents(path: Path) -> dict[str, bytes]:
    """Return every file of a dataset."""
    return {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()}


@pytest.fixture(scope="module")
def clean(shared_cluster4: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed run of `some_fail` writes."""
    path = tmp_path_factory.mktemp("clean") / "data"
    with Client(shared_cluster4) as client:
        generate_dataset(client, range(N), some_fail, path, outputs=OUTPUTS, batch_size=8)
    return contents(path)


def test_every_sample_is_there_or_accounted_for(
    cluster4: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, report = generate_dataset(
        cluster4, range(N), some_fail, tmp_path / "a", outputs=OUTPUTS, batch_size=8, progress=True
    )
    failed, left_out = expected(N)
    assert sorted(report.reasons) == sorted([*failed, *left_out])
    assert (report.samples, report.valid, report.missing) == (
        N,
        N - len(failed + left_out),
        len(failed + left_out),
    )
    assert (report.failures, report.retried, report.kept, report.redone) == (
        len(failed),
        2 * len(failed),
        0,
        0,
    )
    assert report.reasons[failed[0]].endswith("ValueError: bad input 7")
    assert sum(rank["batches"] for rank in report.ranks.values()) == N / 8
    whole = data.compute()
    assert np.flatnonzero(whole["failed"]).tolist() == failed
    for k in set(range(N)) - {*failed, *left_out}:
        sample, n, begin = made(k), int(whole["ids_length"][k]), int(whole["hidden_begin"][k])
        np.testing.assert_array_equal(whole["ids"].values[k, :n], sample["ids"])
        np.testing.assert_array_equal(whole["hidden"].values[begin : begin + n], sample["hidden"])
        assert whole["score"][k] == sample["score"]
    assert verify_dataset(tmp_path / "a") == N / 8
    assert f"{N}/{N} samples" in capsys.readouterr().err


@pytest.mark.parametrize("what", ODD)
def test_one_odd_sample_is_missing_and_no_other(cluster4: Client, tmp_path: Path, what: str) -> None:
    data, report = generate_dataset(
        cluster4,
        np.arange(12.0)[:, None],
        Odd(what),
        tmp_path / "a",
        outputs={"x": Output("f8")},
        batch_size=4,
    )
    assert list(report.reasons) == [5] and ODD[what] in report.reasons[5]
    assert (report.missing, report.redone) == (1, 0)
    assert data["reason"].values[5] == report.reasons[5]
    assert data["x"].values.tolist() == [0.0 if k == 5 else k + 1 for k in range(12)]
    assert verify_dataset(tmp_path / "a") == 3


def test_inputs_that_cannot_be_sent_are_named(cluster4: Client, tmp_path: Path) -> None:
    with pytest.raises(InputTypeError, match="inputs: expected what can be sent to workers"):
        generate_dataset(cluster4, [threading.Lock()], made, tmp_path / "a", outputs=OUTPUTS)


def inputs_of(kind: str, folder: Path) -> Any:
    numbers = np.arange(30)
    match kind:
        case "list":
            return list(range(30))
        case "generator":
            return (k for k in range(30))
        case "ndarray":
            return numbers[:, None]
        case "bag":
            return db.from_sequence(range(30), npartitions=4)
        case "empty partitions":
            return db.from_sequence(range(60), npartitions=6).filter(lambda k: k < 30)
        case "dask array":
            return da.from_array(numbers[:, None], chunks=(7, 1))
        case "DataArray":
            return xr.DataArray(numbers[None], dims=("x", "member"))
        case "dask DataArray":
            return xr.DataArray(da.from_array(numbers[None], chunks=(1, 11)), dims=("x", "member"))
        case "Zarr path":
            zarr.save_array(folder / "in.zarr", numbers[:, None])
            return folder / "in.zarr"
        case "Zarr array":
            zarr.save_array(folder / "in.zarr", numbers[:, None])
            return zarr.open_array(folder / "in.zarr", mode="r")
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "list",
        "generator",
        "ndarray",
        "bag",
        "empty partitions",
        "dask array",
        "DataArray",
        "dask DataArray",
        "Zarr path",
        "Zarr array",
    ],
)
def test_inputs_of_every_kind(cluster4: Client, tmp_path: Path, kind: str) -> None:
    dim = "member" if "Data" in kind else None
    data, report = generate_dataset(
        cluster4,
        inputs_of(kind, tmp_path),
        at_row,
        tmp_path / "out",
        outputs=OUTPUTS,
        batch_size=7,
        sample_dim=dim,
    )
    assert (report.samples, report.missing) == (30, 0)
    assert data["score"].values.tolist() == list(range(30))


def test_no_inputs(cluster4: Client, tmp_path: Path) -> None:
    data, report = generate_dataset(cluster4, [], made, tmp_path / "a", outputs=OUTPUTS)
    assert report.samples == report.valid == data.sizes["sample"] == 0


def test_killed_workers_and_passing_faults_change_no_byte(
    fresh_cluster: Callable[[int], Client], tmp_path: Path, clean: dict[str, bytes]
) -> None:
    at = {13: "kill", 77: "kill", 100: "while it writes", 20: "raise", 50: "raise", 51: "nan"}
    _, report = generate_dataset(
        fresh_cluster(3),
        range(N),
        Once(tmp_path, at),
        tmp_path / "data",
        outputs=OUTPUTS,
        batch_size=8,
        backoff=Backoff(first=0.01, seed=1),
    )
    assert contents(tmp_path / "data") == clean
    assert report.redone >= 2
    assert report.retried >= 3


@pytest.mark.slow
@pytest.mark.parametrize("what", ["freeze", "hang"])
def test_a_silent_worker_costs_its_batches_a_second_attempt(
    fresh_cluster: Callable[[int], Client], tmp_path: Path, clean: dict[str, bytes], what: str
) -> None:
    client = fresh_cluster(3)
    pids = client.run(os.getpid)
    try:
        _, report = generate_dataset(
            client,
            range(N),
            Once(tmp_path, {30: what}),
            tmp_path / "data",
            outputs=OUTPUTS,
            batch_size=8,
            timeout=15.0,
        )
    finally:
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert contents(tmp_path / "data") == clean
    assert report.redone >= 1


@pytest.mark.slow
def test_a_batch_that_kills_every_worker_is_missing_and_no_other(
    fresh_cluster: Callable[[int], Client], tmp_path: Path
) -> None:
    _, report = generate_dataset(
        fresh_cluster(2), range(12), Killer(5), tmp_path / "a", outputs=OUTPUTS, batch_size=3, max_retries=1
    )
    assert sorted(report.reasons) == [3, 4, 5]
    assert "its batch was lost 2 times" in report.reasons[5]
    assert (report.valid, report.missing) == (9, 3)


@pytest.mark.slow
def test_a_broken_producer_stops_the_job_on_every_rank(
    fresh_cluster: Callable[[int], Client], tmp_path: Path
) -> None:
    counts = tmp_path / "counts"
    counts.mkdir()
    client = fresh_cluster(3)
    with pytest.raises(GenerationFailed, match=r"rank .* cannot go on.*the simulator is gone") as caught:
        generate_dataset(
            client,
            range(400),
            Broken(counts, 40),
            tmp_path / "a",
            outputs=OUTPUTS,
            batch_size=4,
            retries=1,
            max_consecutive_failures=6,
        )
    assert caught.value.local_error
    # The client that was interrupted in the middle goes on to gather results.
    assert client.submit(int, "7").result() == 7
    tried = [len(set(file.read_text().split())) for file in counts.iterdir()]
    assert tried and max(tried) <= 6
    data, report = generate_dataset(
        client, range(400), made, tmp_path / "a", outputs=OUTPUTS, batch_size=4, resume=True
    )
    assert report.kept >= 36 - 36 % 4 and report.missing == int((~data["valid"].values).sum())
    assert data["score"].values[data["valid"].values].tolist() == np.flatnonzero(data["valid"]).tolist()


def test_a_worker_that_lies_is_named_and_what_it_made_is_made_again(
    fresh_cluster: Callable[[int], Client], tmp_path: Path
) -> None:
    client = fresh_cluster(4)
    liar = sorted(client.scheduler_info(n_workers=-1)["workers"])[0]
    data, report = generate_dataset(
        client,
        range(160),
        Liar(liar, 3),
        tmp_path / "a",
        outputs=OUTPUTS,
        batch_size=5,
        audit_rate=0.5,
        ledger=tmp_path / "ledger.jsonl",
    )
    assert data["score"].values.tolist() == list(range(160))
    assert report.receipts and all(one.suspected_workers == (liar,) for one in report.receipts)
    assert len(report.quarantined) == 1 and report.redone
    assert report.audited >= 40
    assert verify(tmp_path / "ledger.jsonl").ok
    assert verify_dataset(tmp_path / "a") == 32


@pytest.fixture
def two_threads() -> Iterator[Client]:
    """A client of four workers with two threads each: one that waits leaves room for what it waits for."""
    processes = LocalCluster(n_workers=4, threads_per_worker=2, dashboard_address=":0")
    with processes as cluster, Client(cluster) as client:
        yield client


@pytest.mark.timeout(120)
def test_what_a_suspect_has_in_hand_never_reaches_the_store(
    two_threads: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    liar = sorted(two_threads.scheduler_info(n_workers=-1)["workers"])[0]
    data, report = generate_dataset(
        two_threads,
        range(40),
        LateLiar(tmp_path, tmp_path / "a", liar, 39),
        tmp_path / "a",
        outputs=OUTPUTS,
        batch_size=1,
        audit_rate=1.0,
        quarantine=False,  # its process stays, and goes on
    )
    assert data["score"].values.tolist() == list(range(40))
    late = int((tmp_path / "late").read_text())
    assert {one.suspected_workers for one in report.receipts} == {(liar,)}
    assert report.receipts[0].shard_id == int((tmp_path / "wrong").read_text()) != late
    assert "written over" not in caplog.text  # it was held back, and not found afterwards


@pytest.mark.timeout(120)
def test_a_batch_that_was_written_over_is_made_again(
    two_threads: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    produce = Overwriter(tmp_path, tmp_path / "a")
    data, _ = generate_dataset(two_threads, range(6), produce, tmp_path / "a", outputs=OUTPUTS, batch_size=1)
    assert (tmp_path / "overwritten").exists()
    assert data["score"].values.tolist() == list(range(6))
    assert "Batches [0] were written over" in caplog.text
    assert verify_dataset(tmp_path / "a") == 6


def test_a_result_that_came_with_the_news_of_its_maker_is_not_believed() -> None:
    async def check() -> None:
        job = DatasetJob(*[None] * 10)  # type: ignore[arg-type]
        landed = asyncio.ensure_future(asyncio.sleep(0, Made(7, "w", "bad", (b"x",), ("",), 0, 0, "", 0.0)))
        await landed
        job._running[landed] = _Order(7, domain="bad")
        job._report = DatasetReport(10)
        job._client = SimpleNamespace(status="running")  # type: ignore[assignment]
        job._rules = Rules(CoverageSampler(0.0, 0), True, 3, None)
        job._forsake("bad", suspect=True)
        await job._landed(landed, job._running.pop(landed))
        assert not job._made
        assert [(one.batch, one.domain, one.forsaken) for one in job._queue] == [(7, None, False)]

    asyncio.run(check())


def test_what_a_suspect_had_just_written_is_vouched_for_no_more() -> None:
    async def check() -> None:
        disowned: list[int] = []
        job = DatasetJob(*[None] * 10)  # type: ignore[arg-type]
        job._layout = SimpleNamespace(disown=lambda arrays, batches: disowned.extend(batches))  # type: ignore[assignment]
        job._report = DatasetReport(10)
        never = [asyncio.ensure_future(asyncio.Event().wait()) for _ in range(3)]
        job._running = {  # type: ignore[assignment]
            never[0]: _Order(3, domain="bad"),
            never[1]: _Order(4, "audit", "bad", case=_Case(4, None)),  # type: ignore[arg-type]
            never[2]: _Order(5, domain="good"),
        }
        for batch, domain in ((0, "bad"), (1, "good"), (2, "bad")):
            job._made[batch] = Made(batch, "w", domain, (), (), 0, 0, "", 0.0)
        job._clean = {2}  # an audit confirmed it
        await job._redo_of("bad")
        assert sorted(disowned) == [0, 3]
        assert [order.batch for order in job._queue] == [0] and job._made.keys() == {1, 2}
        assert [order.forsaken for order in job._running.values()] == [True, True, False]
        for one in never:
            one.cancel()

    asyncio.run(check())


def test_a_fence_holds_what_is_late_and_waits_for_what_is_being_written() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def write(serial: int) -> None:
        with work._writing(b"job", serial):
            inside.set()
            assert go_on.wait(30)

    async def check() -> None:
        writer = asyncio.ensure_future(asyncio.to_thread(write, 4))
        assert await asyncio.to_thread(inside.wait, 30)
        fenced = asyncio.ensure_future(work.fence(b"job", 4))
        while work._FENCED.get(b"job") != 4:
            await asyncio.sleep(0)
        assert not fenced.done()
        go_on.set()
        await asyncio.gather(writer, fenced)
        with pytest.raises(RuntimeError, match="made elsewhere"):
            write(4)
        write(5)

    asyncio.run(asyncio.wait_for(check(), 60))


@pytest.mark.slow
def test_two_workers_cannot_accuse_each_other(fresh_cluster: Callable[[int], Client], tmp_path: Path) -> None:
    client = fresh_cluster(2)
    liar = sorted(client.scheduler_info(n_workers=-1)["workers"])[0]
    _, report = generate_dataset(
        client, range(20), Liar(liar, 1), tmp_path / "a", outputs=OUTPUTS, batch_size=5, audit_rate=1.0
    )
    assert report.receipts and not report.quarantined
    assert {one.verdict for one in report.receipts} == {"inconclusive"}


DRIVER = """
import sys
from distributed import Client
from dask_sdc.dataset import generate_dataset
from tests.dataset.producers import OUTPUTS, some_fail
if __name__ == "__main__":
    with Client(sys.argv[1]) as client:
        generate_dataset(client, range(120), some_fail, sys.argv[2], outputs=OUTPUTS, batch_size=8)
"""


def test_a_killed_driver_is_resumed_to_the_same_bytes(
    cluster4: Client, tmp_path: Path, clean: dict[str, bytes]
) -> None:
    path = tmp_path / "data"
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", DRIVER, cluster4.scheduler.address, str(path)]
    driver = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL)
    while len(list((path / "checksums").rglob("c/*"))) < 3:
        assert driver.poll() is None
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    _, report = generate_dataset(
        cluster4, range(N), some_fail, path, outputs=OUTPUTS, batch_size=8, resume=True
    )
    assert report.kept >= 16 and contents(path) == clean
    for damaged in ("score/c/3", "checksums/c/4/0/0", "hidden/c/5/0"):
        (path / damaged).write_bytes(b"nonsense")
    _, report = generate_dataset(
        cluster4, range(N), some_fail, path, outputs=OUTPUTS, batch_size=8, resume=True
    )
    assert report.kept == N - 24 and contents(path) == clean


def test_a_client_that_is_closed_in_the_middle_says_so(shared_cluster4: str, tmp_path: Path) -> None:
    client, path = Client(shared_cluster4, set_as_default=False), tmp_path / "data"

    def close() -> None:
        while not list((path / "checksums").rglob("c/*")):
            pass
        client.close()

    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(close)
        with pytest.raises(ClosedError, match="expected a running client until the dataset is there"):
            generate_dataset(client, range(4000), made, path, outputs=OUTPUTS, batch_size=2)
        closing.result()


def test_a_large_producer_travels_once(cluster4: Client, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Sending large graph") as caught:
        data, _ = generate_dataset(
            cluster4, range(40), Large(12_000_000), tmp_path / "a", outputs=OUTPUTS, batch_size=np.int64(4)
        )
    assert len(caught) == 1
    assert data["score"].values.tolist() == list(range(40))


def test_a_job_that_begins_while_a_worker_dies(
    fresh_cluster: Callable[[int], Client], tmp_path: Path
) -> None:
    client = fresh_cluster(3)
    for k, pid in enumerate(list(client.run(os.getpid).values())[:2]):
        os.kill(pid, signal.SIGKILL)
        data, _ = generate_dataset(client, range(9), made, tmp_path / f"{k}", outputs=OUTPUTS, batch_size=3)
        assert data["score"].values.tolist() == list(range(9))


def test_what_is_not_there_may_be_left_out(
    cluster4: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a"
    options: dict[str, Any] = {"outputs": OUTPUTS, "batch_size": 8}
    with pytest.raises(MissingSamples, match=r"expected 20 samples, got 0; missing \[0, 1.* and more"):
        generate_dataset(cluster4, range(20), made, path, on_missing="raise", **options)
    data, report = generate_dataset(
        cluster4, range(20), made, path, resume=True, on_missing="skip", **options
    )
    assert (report.valid, report.missing, report.failures) == (0, 20, 0) and not data["valid"].values.any()
    generate_dataset(cluster4, range(20), made, path, resume=True, on_missing="warn", **options)
    assert "expected 20 samples, got 0" in caplog.text
    _, report = generate_dataset(cluster4, range(20), made, path, resume=True, **options)
    assert report.valid == 20


def test_another_job_is_refused(cluster4: Client, tmp_path: Path) -> None:
    path = tmp_path / "a"
    generate_dataset(cluster4, range(8), made, path, outputs=OUTPUTS, version="1")
    before = contents(path)
    with pytest.raises(InputError, match=r"expected nothing at .* without resume or overwrite"):
        generate_dataset(cluster4, range(8), made, path, outputs=OUTPUTS)
    zarr.save_array(tmp_path / "other" / "array", np.arange(3))
    zarr.open_group(tmp_path / "other", mode="a")
    ways: list[dict[str, Any]] = [{}, {"resume": True}, {"overwrite": True}]
    for way in ways:
        with pytest.raises(InputError, match=r"nothing or a dataset at .*, got another group"):
            generate_dataset(cluster4, range(8), made, tmp_path / "other", outputs=OUTPUTS, **way)
    assert zarr.open_array(tmp_path / "other" / "array")[:].tolist() == [0, 1, 2]
    for change in ({"version": "2"}, {"batch_size": 4}, {"outputs": {**OUTPUTS, "more": OUTPUTS["score"]}}):
        settings = {"outputs": OUTPUTS, "version": "1", **change}
        with pytest.raises(CheckpointError, match=f"another job: {next(iter(change))}"):
            generate_dataset(cluster4, range(8), made, path, resume=True, **settings)
    with pytest.raises(CheckpointError, match="samples: expected 8, got 9"):
        generate_dataset(cluster4, range(9), made, path, outputs=OUTPUTS, version="1", resume=True)
    assert contents(path) == before
    _, report = generate_dataset(cluster4, range(9), made, path, outputs=OUTPUTS, overwrite=True)
    assert report.valid == 9 == int(open_dataset(path)["valid"].sum())


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"client_or_pipeline": "tcp://x"}, InputTypeError, "expected a Client or a Pipeline"),
        ({"produce": 3}, InputTypeError, "produce: expected a callable"),
        ({"outputs": None}, InputTypeError, "outputs: expected a mapping"),
        ({"inputs": 3}, InputTypeError, "inputs: expected"),
        ({"sample_dim": "x"}, InputError, "sample_dim"),
        ({"batch_size": 0}, InputError, "batch_size: expected an int of at least 1"),
        ({"retries": -1}, InputError, "retries"),
        ({"max_consecutive_failures": 0}, InputError, "max_consecutive_failures"),
        ({"on_missing": "cry"}, InputError, "on_missing: expected one of"),
        ({"audit_rate": 1.5}, InputError, "audit_rate"),
        ({"timeout": 0}, InputError, "timeout"),
        ({"timeout": "5 s"}, InputError, "timeout: expected a finite number"),
        ({"produce": partial(made, threading.Lock())}, InputTypeError, "produce: expected what can be sent"),
        ({"inputs": pd.DataFrame({"a": [1]})}, InputTypeError, "inputs: expected rows"),
        ({"store": 3}, InputTypeError, "store: expected a path"),
        ({"store": __file__}, InputError, "store: expected a place to write to"),
        ({"store": Path(__file__).parent}, InputError, "store: expected a place to write to"),
        ({"store": zarr.storage.MemoryStore()}, InputError, "memory of this process"),
        ({"store": "memory://a"}, InputError, "memory of this process"),
        ({"store": "nowhere://a"}, InputError, "expected a URL of a known protocol, got nowhere://a"),
        ({"store": zarr.storage.ZipStore(Path("a.zip"), mode="w")}, InputError, "got a ZipStore"),
        ({"store": zarr.storage.LocalStore(".", read_only=True)}, InputError, "a read-only LocalStore"),
        ({"resume": True, "overwrite": True}, InputError, "resume or overwrite"),
    ],
)
def test_bad_arguments_are_named_before_any_work(
    cluster4: Client, tmp_path: Path, change: dict[str, Any], error: type[Exception], match: str
) -> None:
    arguments = {
        "client_or_pipeline": cluster4,
        "inputs": range(3),
        "produce": made,
        "store": tmp_path / "a",
        "outputs": OUTPUTS,
        **change,
    }
    with pytest.raises(error, match=match):
        generate_dataset(**arguments)
    assert not (tmp_path / "a").exists()


def test_with_an_asynchronous_client(shared_cluster4: str, tmp_path: Path) -> None:
    async def body() -> None:
        async with Client(shared_cluster4, asynchronous=True) as client:
            data, report = await generate_dataset(client, range(20), made, tmp_path / "a", outputs=OUTPUTS)
            whole = data.compute(scheduler="synchronous")
            assert report.valid == 20 and whole["score"].values.tolist() == list(range(20))

    asyncio.run(body())
