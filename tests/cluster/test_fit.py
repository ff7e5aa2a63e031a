"""Fits on a cluster: healed to the bit, resumed to the bit, and refused where they do not belong."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import zarr
from distributed import Client

from dask_sdc.cluster.auditor import Auditor
from dask_sdc.cluster.fit import FitResult
from dask_sdc.evidence.codec import encode
from dask_sdc.exceptions import CheckpointError, InputError, InputTypeError
from dask_sdc.faults.plan import Fault, FaultPlan
from dask_sdc.faults.plugin import FaultInjector
from dask_sdc.statistics.base import Estimator, State, Statistic
from dask_sdc.statistics.kmeans import KMeans
from dask_sdc.statistics.mixture import GaussianMixture
from tests.cluster.oddities import Gated, flip
from tests.cluster.sums import Sums
from tests.cluster.waiting import until

Make = Callable[[int], Client]

MIXTURE = GaussianMixture(2, covariance_type="diag", seed=3)


def two_clouds(shards: int = 16, rows: int = 60) -> list[Any]:
    rng = np.random.default_rng(5)
    centres = np.array([[-3.0, 0.0], [3.0, 1.0]])
    return [centres[rng.integers(2, size=rows)] + rng.normal(size=(rows, 2)) for _ in range(shards)]


BLOCKS = two_clouds()


def fingerprint(fitted: FitResult) -> bytes:
    """Every bit of what a fit ended with."""
    return encode({"model": fitted.model, "history": list(fitted.history), "converged": fitted.converged})


@pytest.fixture(scope="module")
def clean(shared_cluster4: str) -> dict[str, FitResult]:
    """What fits end with when nothing goes wrong."""
    with Client(shared_cluster4) as client, Auditor(client, audit_rate=0.1, seed=1) as auditor:
        return {
            "mixture": auditor.fit(MIXTURE, BLOCKS, max_iter=8, tol=0),
            "kmeans": auditor.fit(KMeans(2, seed=3), BLOCKS, max_iter=6, tol=0),
        }


# -- healing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "estimator", "max_iter"),
    [("mixture", MIXTURE, 8), pytest.param("kmeans", KMeans(2, seed=3), 6, marks=pytest.mark.slow)],
)
def test_a_healed_fit_is_that_of_a_clean_cluster(
    fresh_cluster: Make, clean: dict[str, FitResult], name: str, estimator: Estimator, max_iter: int
) -> None:
    client = fresh_cluster(4)
    with Auditor(client, audit_rate=0.1, seed=1) as auditor:
        client.register_plugin(
            FaultInjector(FaultPlan([Fault("value", "compute", domain="2", round=range(2, 99))]))
        )
        fitted = auditor.fit(estimator, BLOCKS, max_iter=max_iter, tol=0)

    assert {d for r in auditor.receipts for d in r.suspected_domains} == {"2"}
    assert fingerprint(fitted) == fingerprint(clean[name])
    assert set(auditor.quarantined) == {"2"}


def test_rounds_that_a_suspect_may_have_spoiled_are_done_again(
    fresh_cluster: Make, clean: dict[str, FitResult]
) -> None:
    client = fresh_cluster(4)
    # Four shards a domain and one audit in twenty: what goes wrong is found rounds later.
    with Auditor(client, audit_rate=0.05, seed=1) as auditor:
        client.register_plugin(
            FaultInjector(FaultPlan([Fault("value", "compute", domain="2", round=range(1, 99))]))
        )
        fitted = auditor.fit(MIXTURE, BLOCKS, max_iter=8, tol=0)

    assert fitted.rollbacks >= 1
    assert len(auditor.rounds) > 1 + fitted.n_iter
    assert fingerprint(fitted) == fingerprint(clean["mixture"])


def test_the_seed_of_the_estimator_decides_not_that_of_the_auditor(
    cluster4: Client, clean: dict[str, FitResult]
) -> None:
    with Auditor(cluster4, audit_rate=0.5, seed=77) as auditor:
        fitted = auditor.fit(MIXTURE, BLOCKS, max_iter=8, tol=0)
    assert fingerprint(fitted) == fingerprint(clean["mixture"])


def test_a_block_that_changes_in_memory_between_rounds_is_computed_again(
    cluster4: Client, clean: dict[str, FitResult], tmp_path: Path
) -> None:
    data = persisted(cluster4)
    key = data.__dask_keys__()[5][0]
    estimator = Pausing(2, covariance_type="diag", seed=3, folder=tmp_path)

    with Auditor(cluster4, audit_rate=0.1, seed=1) as auditor, ThreadPoolExecutor(1) as pool:
        done = pool.submit(auditor.fit, estimator, data, max_iter=8, tol=0)
        try:
            until(lambda: (tmp_path / "started").exists() or done.done())
            assert any(cluster4.run(flip, key=key).values())
        finally:
            (tmp_path / "go").touch()
        fitted = done.result(60)

    assert fingerprint(fitted) == fingerprint(clean["mixture"])
    reasons = {r.mismatch_reason for r in auditor.receipts}
    assert reasons == {"the persisted input block changed in memory"}
    assert {r.shard_id for r in auditor.receipts} == {5}
    assert not auditor.quarantined
    np.testing.assert_array_equal(data.blocks[5].compute(), BLOCKS[5])


def persisted(client: Client) -> Any:
    """The clouds as a dask array in the memory of the workers."""
    data = da.concatenate([da.from_array(block, chunks=block.shape) for block in BLOCKS])
    return client.persist(data)


@dataclass(frozen=True)
class Pausing(GaussianMixture):
    """A mixture whose fourth round waits until a file appears."""

    folder: Path = Path()
    rounds: list[int] = field(default_factory=list)

    def statistic(self, model: State) -> Statistic:
        self.rounds.append(1)
        statistic = super().statistic(model)
        return Gated(statistic, self.folder) if len(self.rounds) == 4 else statistic


@dataclass(frozen=True)
class Halting(GaussianMixture):
    """A mixture whose driver stops between two rounds until a file appears."""

    folder: Path = Path()
    rounds: list[int] = field(default_factory=list)

    def maximise(self, model: State, result: Any) -> State:
        self.rounds.append(1)
        if len(self.rounds) == 3:
            (self.folder / "halted").touch()
            until((self.folder / "go").exists, 110)
        else:
            time.sleep(0.05)  # what takes longer than this is called in a thread, beside the event loop
        return super().maximise(model, result)


class Outside:
    """A scheduler and three workers in processes of their own."""

    def __init__(self, port: int) -> None:
        self.address = f"tcp://127.0.0.1:{port}"
        self.processes = [
            _dask("scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"),
            *(
                _dask(
                    "worker",
                    self.address,
                    "--name",
                    str(i),
                    "--nthreads",
                    "1",
                    "--no-dashboard",
                    "--no-nanny",
                )
                for i in range(3)
            ),
        ]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def _dask(*arguments: str) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[2])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    return subprocess.Popen([sys.executable, "-m", "dask", *arguments], env=env)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_fit_outlives_the_scheduler(clean: dict[str, FitResult], tmp_path: Path) -> None:
    port = free_port()
    outside = Outside(port)
    estimator = Halting(2, covariance_type="diag", seed=3, folder=tmp_path)
    try:
        with (
            Client(outside.address, timeout=60, set_as_default=False) as client,
            Auditor(client, audit_rate=0.1, seed=1) as auditor,
            ThreadPoolExecutor(1) as pool,
        ):
            client.wait_for_workers(3, timeout=60)
            done = pool.submit(auditor.fit, estimator, BLOCKS, max_iter=8, tol=0)
            try:
                until(lambda: (tmp_path / "halted").exists() or done.done())
                outside.kill()
                outside = Outside(port)
                client.wait_for_workers(3, timeout=60)
            finally:
                (tmp_path / "go").touch()
            fitted = done.result(60)
    finally:
        outside.kill()

    assert fingerprint(fitted) == fingerprint(clean["mixture"])
    assert len(auditor.rounds) == 9


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


# -- checkpoints -------------------------------------------------------------------------------


def stores(tmp_path: Path) -> dict[str, Any]:
    return {"path": tmp_path / "fit", "mapping": {}, "zarr": zarr.storage.MemoryStore()}


@pytest.mark.parametrize("kind", ["path", "mapping", "zarr"])
def test_a_fit_goes_on_from_where_it_was_left(
    cluster4: Client, clean: dict[str, FitResult], tmp_path: Path, kind: str
) -> None:
    store = stores(tmp_path)[kind]
    with Auditor(cluster4, audit_rate=0.1, seed=1) as auditor:
        auditor.fit(MIXTURE, BLOCKS, max_iter=3, tol=0, checkpoint=store)
    with Auditor(cluster4, audit_rate=0.1, seed=1) as auditor:
        fitted = auditor.fit(MIXTURE, BLOCKS, max_iter=8, tol=0, checkpoint=store)

    assert len(auditor.rounds) == 5
    assert fingerprint(fitted) == fingerprint(clean["mixture"])


DRIVER = """
import sys
from distributed import Client
from dask_sdc.cluster.auditor import Auditor
from tests.cluster.test_fit import BLOCKS, MIXTURE

with Client(sys.argv[1]) as client, Auditor(client, audit_rate=0.1, seed=1) as auditor:
    auditor.fit(MIXTURE, BLOCKS, max_iter=100_000, tol=0, checkpoint=sys.argv[2])
"""


def test_a_driver_that_is_killed_is_taken_over_to_the_bit(
    cluster4: Client, shared_cluster4: str, clean: dict[str, FitResult], tmp_path: Path
) -> None:
    store = tmp_path / "fit"
    command = [sys.executable, "-c", DRIVER, shared_cluster4, str(store)]
    root = str(Path(__file__).parents[2])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    with subprocess.Popen(command, env=env) as driver:
        until(lambda: (store / "sdc-fit-1").exists() or driver.poll() is not None)
        assert driver.poll() is None
        driver.send_signal(signal.SIGKILL)

    with Auditor(cluster4, audit_rate=0.1, seed=1) as auditor:
        fitted = auditor.fit(MIXTURE, BLOCKS, max_iter=8, tol=0, checkpoint=store)

    assert len(auditor.rounds) < 9
    expected = clean["mixture"]
    done = fitted.n_iter
    assert fitted.history[:8] == expected.history[: min(8, done)]
    if done == 8:
        assert fingerprint(fitted) == fingerprint(expected)


def checkpointed(client: Client, store: MutableMapping[str, bytes]) -> FitResult:
    with Auditor(client, audit_rate=0.1, seed=1) as auditor:
        return auditor.fit(MIXTURE, BLOCKS, max_iter=3, tol=0, checkpoint=store)


@pytest.mark.parametrize(
    ("estimator", "data", "differing"),
    [
        (GaussianMixture(3, covariance_type="diag", seed=3), BLOCKS, "settings"),
        (GaussianMixture(2, covariance_type="diag", seed=4), BLOCKS, "seed"),
        (KMeans(2, seed=3), BLOCKS, "estimator"),
        (MIXTURE, BLOCKS[::-1], "data"),
        (MIXTURE, BLOCKS[:5], "shards"),
    ],
)
def test_a_checkpoint_of_another_fit_is_refused(
    cluster4: Client, estimator: Estimator, data: Any, differing: str
) -> None:
    store: dict[str, bytes] = {}
    checkpointed(cluster4, store)
    with Auditor(cluster4, audit_rate=0.1, seed=1) as auditor:
        with pytest.raises(CheckpointError, match=f"got one with another .*{differing}"):
            auditor.fit(estimator, data, max_iter=3, tol=0, checkpoint=store)
        assert not auditor.rounds


def test_a_damaged_slot_falls_back_to_the_one_before(cluster4: Client, clean: dict[str, FitResult]) -> None:
    store: dict[str, bytes] = {}
    checkpointed(cluster4, store)
    latest = max(store, key=lambda slot: len(store[slot]))
    for slot in store:
        with Auditor(cluster4, audit_rate=0.1, seed=1) as auditor:
            damaged = {**store, slot: store[slot][:40] + b"\x00" + store[slot][41:]}
            fitted = auditor.fit(MIXTURE, BLOCKS, max_iter=8, tol=0, checkpoint=damaged)
        assert fingerprint(fitted) == fingerprint(clean["mixture"])
    assert latest in store


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: b"", lambda raw: b"nonsense" + raw])
def test_only_damaged_slots_are_an_error(cluster4: Client, damage: Callable[[bytes], bytes]) -> None:
    store: dict[str, bytes] = {}
    checkpointed(cluster4, store)
    damaged = {slot: damage(raw) for slot, raw in store.items()}
    with (
        Auditor(cluster4, audit_rate=0.1, seed=1) as auditor,
        pytest.raises(CheckpointError, match="got 2 damaged ones"),
    ):
        auditor.fit(MIXTURE, BLOCKS, max_iter=3, tol=0, checkpoint=damaged)


def test_a_converged_fit_is_returned_at_once(cluster4: Client) -> None:
    store: dict[str, bytes] = {}
    with Auditor(cluster4, audit_rate=0.1, seed=1) as auditor:
        first = auditor.fit(MIXTURE, BLOCKS, max_iter=100, tol=1e-3, checkpoint=store)
    with Auditor(cluster4, audit_rate=0.1, seed=1) as auditor:
        again = auditor.fit(MIXTURE, BLOCKS, max_iter=100, tol=1e-3, checkpoint=store)

    assert first.converged and again.converged
    assert not auditor.rounds
    assert fingerprint(again) == fingerprint(first)


# -- the model ---------------------------------------------------------------------------------


def test_log_density_is_that_of_scikit_learn(cluster4: Client, clean: dict[str, FitResult]) -> None:
    from sklearn.mixture import GaussianMixture as Reference

    model = clean["mixture"].result
    reference = Reference(2, covariance_type="diag")
    reference.weights_, reference.means_ = model.weights, model.means
    reference.covariances_ = model.covariances
    reference.precisions_cholesky_ = 1 / np.sqrt(model.covariances)
    x = np.concatenate(BLOCKS)

    with Auditor(cluster4, audit_rate=0.5, seed=1) as auditor:
        found = auditor.log_density(clean["mixture"], BLOCKS)

    assert found.total == pytest.approx(reference.score_samples(x).sum(), rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_iter": 0}, "max_iter"),
        ({"max_iter": True}, "max_iter"),
        ({"max_iter": 2.0}, "max_iter"),
        ({"tol": -1.0}, "tol"),
        ({"tol": float("nan")}, "tol"),
        ({"tol": float("inf")}, "tol"),
        ({"tol": "0"}, "tol"),
        ({"checkpoint": 5}, "checkpoint"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(
    cluster4: Client, arguments: dict[str, Any], message: str
) -> None:
    with Auditor(cluster4, seed=1) as auditor, pytest.raises(InputError, match=message):
        auditor.fit(MIXTURE, BLOCKS, **arguments)
    assert not auditor.rounds


def test_numbers_of_numpy_are_numbers(cluster4: Client) -> None:
    with Auditor(cluster4, seed=1) as auditor:
        assert auditor.fit(MIXTURE, BLOCKS, max_iter=np.int64(2), tol=np.float32(0)).n_iter == 2


def test_what_is_no_estimator_or_no_fit_is_refused(cluster4: Client) -> None:
    with Auditor(cluster4, seed=1) as auditor:
        with pytest.raises(InputError, match="expected an Estimator, got Sums"):
            auditor.fit(Sums(), BLOCKS)  # type: ignore[arg-type]
        with pytest.raises(InputTypeError, match="expected a FitResult, got dict"):
            auditor.log_density({}, BLOCKS)  # type: ignore[arg-type]
