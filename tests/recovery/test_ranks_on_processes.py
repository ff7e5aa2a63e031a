"""Ranks on real processes, of which some die or freeze."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from distributed import Client, Future, Scheduler, wait

from dask_sdc.exceptions import GenerationFailed, RankLost
from dask_sdc.recovery.cluster import RankGroup
from tests.cluster.waiting import until
from tests.recovery.ranks import generate

SIZE = 3


def rounds_done(dask_scheduler: Scheduler) -> int:
    plugin: Any = dask_scheduler.plugins["dask_sdc_recovery"]
    return max((group.rounds.number for group in plugin.groups.values()), default=0)


def on_own_workers(client: Client, group: RankGroup, hangs: int) -> tuple[list[Future[Any]], list[str]]:
    """Start every rank on a worker of its own; return when all have synchronised once."""
    workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
    futures = [
        client.submit(generate, rank, hangs, workers=[worker])
        for rank, worker in zip(group.ranks, workers, strict=True)
    ]
    until(lambda: client.run_on_scheduler(rounds_done) == 1)
    return futures, workers


@contextlib.contextmanager
def signalled(pid: int, number: int) -> Iterator[None]:
    """Send a signal to a process, which is killed at the end."""
    os.kill(pid, number)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_ranks_on_processes(cluster4: Client) -> None:
    with RankGroup(cluster4, 4, timeout=100) as group:
        futures = cluster4.map(generate, group.ranks, hangs=-1)
        assert cluster4.gather(futures) == [[6, 6]] * 4


@pytest.mark.parametrize(
    ("number", "timeout", "said"),
    [
        (signal.SIGKILL, 250.0, "was lost with its worker"),
        pytest.param(signal.SIGSTOP, 3.0, "did not come within 3 s", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_or_freezes_is_named_on_all_others(
    fresh_cluster: Callable[[int], Client], number: int, timeout: float, said: str
) -> None:
    client = fresh_cluster(SIZE)
    with RankGroup(client, SIZE, name="train", timeout=timeout) as group:
        futures, workers = on_own_workers(client, group, hangs=1)
        pid = client.run(os.getpid, workers=[workers[1]])[workers[1]]
        with signalled(pid, number):
            others = [futures[0], futures[2]]
            wait(others, timeout=60)
            errors = [future.exception() for future in others]
        assert [type(error) for error in errors] == [RankLost] * 2
        for error in errors:
            assert error.ranks == (1,)
            assert f"round 1: rank 1 ({workers[1]}" in str(error) and said in str(error)


FOREIGN = """
import pickle, sys
from distributed import Client
with Client(sys.argv[1]):
    rank = pickle.load(sys.stdin.buffer)
    print(rank.sum([1])[0], flush=True)
    rank.sum([1])
"""


def test_a_rank_in_a_program_of_its_own_is_lost_with_it(cluster4: Client) -> None:
    """Ranks of several clients: one is a process that has nothing but a client."""
    with RankGroup(cluster4, 2, timeout=250) as group:
        command = [sys.executable, "-c", FOREIGN, cluster4.scheduler.address]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        ) as program:
            assert program.stdin is not None and program.stdout is not None
            program.stdin.write(pickle.dumps(group.ranks[1]))
            program.stdin.close()
            assert group.ranks[0].sum([1]) == (2,)
            assert program.stdout.readline() == b"2\n"
            program.kill()
        with pytest.raises(GenerationFailed, match=r"rank 1 \(Client-.* was lost with its client"):
            group.ranks[0].sum([1])
