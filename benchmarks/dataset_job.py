"""A dataset of 5,000 samples, of which some fail, on a cluster that loses workers and its driver.

Ends complete after a resumption, equal to the clean run, every missing sample accounted for. A broken
producer stops on every rank; guard and metadata cost next to nothing; a flipped byte in the store is named.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _bench import Bench, main
from distributed import Client, LocalCluster, get_worker

from dask_sdc.dataset import Output, batches, generate_dataset, verify_dataset
from dask_sdc.exceptions import CheckpointError, CorruptionError, GenerationFailed
from dask_sdc.recovery import BatchRecoveryCoordinator, GenerationRecoveryGuard

OUTPUTS = {
    "ids": Output("i8", (None,), 16),
    "hidden": Output("f4", (None, 32), 16, "ragged", like="ids"),
    "score": Output("f8"),
}
SECONDS, FAILING, BATCH, WORKERS = 0.005, 33, 50, 3


def sample(k: int) -> dict[str, Any]:
    """Return the sample of a number, at once."""
    rng = np.random.default_rng(k)
    n = int(rng.integers(1, 17))
    return {"ids": np.arange(n), "hidden": rng.normal(size=(n, 32)).astype("f4"), "score": np.float64(k)}


def produce(k: int) -> dict[str, Any]:
    """Make a sample in five milliseconds, or fail for three in a hundred of them."""
    time.sleep(SECONDS)
    if k % FAILING == 7:
        raise ValueError(f"input {k} cannot be used")
    return sample(k)


class Harm:
    """Fails once for a burst of samples of one rank, and kills its worker at some others, once each."""

    def __init__(self, folder: str, burst: range, kills: tuple[int, ...]) -> None:
        self.folder, self.burst, self.kills = folder, burst, kills

    def __call__(self, k: int) -> dict[str, Any]:
        """Make a sample."""
        if (k in self.burst or k in self.kills) and self._first(k):
            if k in self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("a burst of failures")
        return produce(k)

    def _first(self, k: int) -> bool:
        try:
            (Path(self.folder) / str(k)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Broken:
    """Fails for every sample, and says on which rank."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, k: int) -> Any:
        """Fail."""
        with open(Path(self.folder) / get_worker().address.replace("/", "_"), "a") as file:
            file.write(f"{k}\n")
        raise RuntimeError("the simulator is gone")


def contents(path: str) -> dict[str, bytes]:
    """Return every file of a dataset."""
    root = Path(path)
    return {str(one.relative_to(root)): one.read_bytes() for one in root.rglob("*") if one.is_file()}


def driver(address: str, count: int, path: str, folder: str) -> None:
    """Make a dataset with harm; the process that is killed."""
    with Client(address) as client:
        generate_dataset(client, range(count), harm(count, folder), path, outputs=OUTPUTS, batch_size=BATCH)


def harm(count: int, folder: str) -> Harm:
    """Return what goes wrong with a dataset of this size."""
    burst = range(count // 4, count // 4 + 15)
    return Harm(folder, burst, (count // 3, count // 2))


def measure(bench: Bench) -> None:
    """Run the job clean and with harm, and compare."""
    count = 1000 if bench.quick else 5000
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            n_workers=WORKERS, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=60
        ) as cluster,
        Client(cluster) as client,
    ):
        clean, harmed = f"{folder}/clean", f"{folder}/harmed"
        began = time.perf_counter()
        report = generate_dataset(
            client, range(count), produce, clean, outputs=OUTPUTS, batch_size=BATCH
        ).report
        bench.say(f"clean run: {time.perf_counter() - began:.1f} s\n{report}")
        failing = [k for k in range(count) if k % FAILING == 7]
        bench.figure("missing", report.missing, equal=len(failing))
        bench.figure("accounted_for", sorted(report.reasons) == failing, equal=True)
        _harmed(bench, client, count, harmed, folder)
        bench.figure("equal_to_clean", contents(harmed) == contents(clean), equal=True)
        coordinator = BatchRecoveryCoordinator("read back")
        for batch in batches(harmed, 64):
            coordinator.consume(batch)
        bench.figure("failures_read_back", coordinator.local.failure_count, equal=len(failing))
        _broken(bench, client, folder)
        _flips(bench, client, folder)
    _overhead(bench)


def _harmed(bench: Bench, client: Client, count: int, path: str, folder: str) -> None:
    marks = Path(folder) / "marks"
    marks.mkdir()
    address = client.scheduler.address
    command = [sys.executable, __file__, "--driver", address, str(count), path, str(marks)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    sums, half = Path(path) / "checksums", count // BATCH // 2
    while len(list(sums.glob("c/*"))) < half and process.poll() is None:
        time.sleep(0.02)
    bench.figure("driver_was_running", process.poll() is None, equal=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    report = generate_dataset(
        client, range(count), harm(count, str(marks)), path, outputs=OUTPUTS, batch_size=BATCH, resume=True
    ).report
    bench.say(f"resumed:\n{report}")
    bench.figure("kept_by_resumption", report.kept, at_least=half * BATCH // 2)
    struck = {int(mark.name) for mark in marks.iterdir()}
    wanted = harm(count, "")
    bench.figure("workers_killed", len(struck & set(wanted.kills)), equal=2)
    bench.figure("samples_of_the_burst", len(struck & set(wanted.burst)), equal=15)
    bench.figure(
        "missing_after_harm", report.missing, equal=len([k for k in range(count) if k % FAILING == 7])
    )


def _broken(bench: Bench, client: Client, folder: str) -> None:
    marks = Path(folder) / "broken"
    marks.mkdir()
    try:
        generate_dataset(
            client,
            range(2000),
            Broken(str(marks)),
            f"{folder}/never",
            outputs=OUTPUTS,
            batch_size=BATCH,
            max_consecutive_failures=20,
        )
    except GenerationFailed as error:
        bench.say(f"broken producer: {error}")
        stopped = True
    else:
        stopped = False
    tried = [len(set(mark.read_text().split())) for mark in marks.iterdir()]
    bench.figure("breaker_stopped", stopped, equal=True)
    bench.figure("most_samples_of_a_rank", max(tried), at_most=20)


def _flips(bench: Bench, client: Client, folder: str) -> None:
    """Flip a bit of some bytes of every file of a small store."""
    path = f"{folder}/small"
    generate_dataset(client, range(6), sample, path, outputs=OUTPUTS, batch_size=3)
    rng, flips, unnamed, silent = random.Random(5), 0, 0, 0
    for file in sorted(one for one in Path(path).rglob("*") if one.is_file()):
        whole, parts = file.read_bytes(), file.relative_to(path).parts
        few = 4 if bench.quick else 12
        for at in sorted(rng.sample(range(len(whole)), min(few, len(whole)))):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
            flips += 1
            try:
                verify_dataset(path)
            except CorruptionError as error:
                unnamed += len(parts) > 1 and parts[0] not in str(error)
            except CheckpointError:
                unnamed += len(parts) > 1
            else:
                silent += file.name != "zarr.json"  # white space, which says nothing
            file.write_bytes(whole)
    bench.figure("flipped_bytes", flips)
    bench.figure("not_found", silent, equal=0)
    bench.figure("not_named", unnamed, equal=0)


def _overhead(bench: Bench) -> None:
    """Time a guard and the metadata of a batch against a sample of five milliseconds."""
    guard = GenerationRecoveryGuard(2, 20)
    coordinator = BatchRecoveryCoordinator("overhead")
    count = 20_000
    made = sample(1)
    best = {"bare": float("inf"), "guarded": float("inf")}
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(count):
            (lambda: made)()
        best["bare"] = min(best["bare"], time.perf_counter() - began)
        began = time.perf_counter()
        for k in range(count):
            guard.run(lambda: made, description=f"sample {k}")
            if k % BATCH == 0:
                coordinator.consume({"x": 1})
        best["guarded"] = min(best["guarded"], time.perf_counter() - began)
    share = (best["guarded"] - best["bare"]) / count / SECONDS
    bench.figure("guard_and_metadata_share", share, at_most=0.01)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--driver"]:
        driver(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
    else:
        main("dataset_job", measure, __doc__)
