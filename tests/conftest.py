"""Fixtures and profiles that all tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import dask
import pytest
from distributed import Client, LocalCluster
from distributed.client import _get_global_client
from hypothesis import HealthCheck, settings

# A shared machine makes single examples slow at random, hence no deadline; the test's own timeout
# still holds. Examples are derandomised: a red run is red again.
settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=60,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci" if os.environ.get("CI") else "default")

ROOT = Path(__file__).parent.parent

# Compiled kernels are kept between runs; worker processes inherit the variable.
os.environ.setdefault("NUMBA_CACHE_DIR", str(ROOT / ".pytest_cache" / "numba"))

SERVE_FOUR = """
import sys
from distributed import LocalCluster

with LocalCluster(n_workers=4, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster:
    print(cluster.scheduler_address, flush=True)
    sys.stdin.read()
"""


def gpu_missing() -> str | None:
    """Say why tests of the GPU cannot run here, or None if they can."""
    from dask_sdc.exceptions import DeviceError
    from dask_sdc.statistics.kernels.cuda import cupy_device

    try:
        cupy_device()
    except DeviceError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := gpu_missing()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def dask_default_left_alone() -> Iterator[None]:
    """Let no test leave Dask's default scheduler behind, which breaks what others compute without a client.

    A default client that is closed twice, or not in reverse order of opening, does.
    """
    yield
    left = dask.config.get("scheduler", None) if _get_global_client() is None else None
    if left is not None:
        dask.config.config.pop("scheduler")
        pytest.fail(f"expected no default scheduler of Dask after the test, got {left}")


@pytest.fixture(scope="session")
def shared_cluster4() -> Iterator[str]:
    """Address of four worker processes for the whole session; ask for `cluster4` instead.

    They descend from a process of their own, since `distributed.utils_test.gen_cluster` kills
    whatever was started through multiprocessing. That process ends when its input does, and so
    with the session, however the session ends.
    """
    command = [sys.executable, "-c", SERVE_FOUR]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        yield server.stdout.readline().strip()
        server.stdin.close()


@pytest.fixture
def cluster4(shared_cluster4: str) -> Iterator[Client]:
    """Client of four worker processes, of one thread each, that the session shares.

    A test that kills, freezes, restarts or quarantines a worker takes `fresh_cluster`.
    """
    with Client(shared_cluster4) as client:
        client.wait_for_workers(4, timeout=30)
        yield client


@pytest.fixture
def fresh_cluster() -> Iterator[Callable[[int], Client]]:
    """Return a factory: ``fresh_cluster(n)`` is a client of ``n`` new worker processes."""
    opened: list[Client | LocalCluster] = []

    def make(n: int) -> Client:
        cluster = LocalCluster(n_workers=n, threads_per_worker=1, processes=True, dashboard_address=":0")
        opened.append(cluster)
        client = Client(cluster)
        opened.append(client)
        client.wait_for_workers(n, timeout=30)
        return client

    yield make
    for thing in reversed(opened):
        thing.close()
