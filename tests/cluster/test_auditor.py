"""What users call: every kind of input, every kind of bad input, sync, async, shared and closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
import zarr
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

from dask_sdc.cluster.auditor import Auditor
from dask_sdc.cluster.worker_plugin import NAME
from dask_sdc.evidence.ledger import Ledger
from dask_sdc.exceptions import (
    AuditWarning,
    ClosedError,
    InputError,
    InputTypeError,
    NoDomainError,
    NonFiniteError,
    ShardError,
)
from dask_sdc.statistics.kmeans import KMeans
from dask_sdc.statistics.moments import Moments
from dask_sdc.statistics.regression import LinearRegression
from tests.cluster.oddities import (
    Exits,
    Fails,
    Nothing,
    Slow,
    Strange,
    Turns,
    Waits,
    from_within,
    tasks,
    topics,
)
from tests.cluster.sums import Sums, integer_blocks
from tests.cluster.waiting import until, until_async

FOUR = [("127.0.0.1", 1)] * 4
BLOCKS = integer_blocks(16)
X = np.concatenate(BLOCKS)
TOTAL = X.sum(axis=0)
#: The first value of shard 9.
POISON = float(BLOCKS[9][0, 0])


@pytest.fixture
def auditor(cluster4: Client) -> Iterator[Auditor]:
    with Auditor(cluster4, audit_rate=0.25, seed=1) as opened:
        yield opened


def check(state: dict[str, Any]) -> None:
    assert state["n"] == len(X)
    np.testing.assert_array_equal(state["sum"], TOTAL)


# -- kinds of input ----------------------------------------------------------------------------


def test_a_list_of_blocks(auditor: Auditor) -> None:
    check(auditor.accumulate(Sums(), BLOCKS))
    assert auditor.rounds[0].shards == 16


def test_one_array(auditor: Auditor) -> None:
    check(auditor.accumulate(Sums(), X))


def test_one_array_in_pieces(cluster4: Client) -> None:
    with Auditor(cluster4, audit_rate=0.25, seed=1, sub_chunks=3) as auditor:
        check(auditor.accumulate(Sums(), X))
        check(auditor.accumulate(Sums(), BLOCKS))
    assert [r.shards for r in auditor.rounds] == [12, 16]


def test_a_lazy_dask_array(auditor: Auditor) -> None:
    check(auditor.accumulate(Sums(), da.from_array(X, chunks=(100, -1)) + 0))
    assert auditor.rounds[0].shards == 8


def test_a_persisted_dask_array(auditor: Auditor, cluster4: Client) -> None:
    x = cluster4.persist(da.from_array(X, chunks=(100, -1)))
    check(auditor.accumulate(Sums(), x))


def test_a_dask_array_whose_shards_share_work_is_persisted(auditor: Auditor) -> None:
    x = da.from_array(X, chunks=(160, -1)).rechunk((70, -1))
    check(auditor.accumulate(Sums(), x))


@pytest.mark.filterwarnings("ignore:.*rechunked:UserWarning")
def test_a_dask_array_that_is_chunked_along_its_features(auditor: Auditor) -> None:
    check(auditor.accumulate(Sums(), da.from_array(X, chunks=(100, 1))))


def test_an_xarray(auditor: Auditor) -> None:
    data = xr.DataArray(X, dims=("time", "feature")).chunk({"time": 100})
    check(auditor.accumulate(Sums(), data, dim="time"))
    check(auditor.accumulate(Sums(), data.transpose("feature", "time"), dim="time"))


def test_a_zarr_path(auditor: Auditor, tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "x.zarr", data=X, chunks=(100, 3))
    check(auditor.accumulate(Sums(), str(tmp_path / "x.zarr")))


def test_weights_and_targets(auditor: Auditor) -> None:
    rng = np.random.default_rng(2)
    weights, target = rng.random(len(X)), X @ np.array([1.0, -2.0, 0.5]) + 3.0
    mean = auditor.accumulate(Moments(), X, weights=weights).mean
    np.testing.assert_allclose(mean, np.average(X, axis=0, weights=weights), rtol=1e-12)
    found = auditor.accumulate(LinearRegression(), X, weights=weights, target=target)
    np.testing.assert_allclose(np.ravel(found.coef), [1.0, -2.0, 0.5], rtol=1e-9)


def test_blocks_may_be_empty_and_ragged(auditor: Auditor) -> None:
    blocks = [X[:0], X[:7], X[7:7], X[7:], X[:0]]
    check(auditor.accumulate(Sums(), blocks))
    assert auditor.rounds[0].shards == 5


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_there_may_be_fewer_shards_than_domains(auditor: Auditor, shards: int) -> None:
    check(auditor.accumulate(Sums(), np.array_split(X, shards)))
    assert auditor.rounds[0].shards == shards


def test_a_rate_of_one_audits_every_shard_and_zero_none(cluster4: Client) -> None:
    for rate, audited in ((1.0, 16), (0.0, 0)):
        with Auditor(cluster4, audit_rate=rate, seed=1) as auditor:
            check(auditor.accumulate(Sums(), BLOCKS))
        assert (auditor.rounds[0].audited, auditor.rounds[0].agreed) == (audited, audited)


# -- bad arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"audit_rate": True}, "rate"),
        ({"audit_rate": float("nan")}, "rate"),
        ({"audit_rate": float("inf")}, "rate"),
        ({"audit_rate": -0.1}, "rate"),
        ({"audit_rate": 1.1}, "rate"),
        ({"audit_rate": "0.1"}, "rate"),
        ({"audit_rtol": True}, "audit_rtol"),
        ({"audit_rtol": float("nan")}, "audit_rtol"),
        ({"audit_rtol": -1e-9}, "audit_rtol"),
        ({"audit_atol": float("inf")}, "audit_atol"),
        ({"audit_atol": "0"}, "audit_atol"),
        ({"sub_chunks": 0}, "sub_chunks"),
        ({"sub_chunks": True}, "sub_chunks"),
        ({"sub_chunks": 1.0}, "sub_chunks"),
        ({"max_retries": 0}, "max_retries"),
        ({"max_retries": True}, "max_retries"),
        ({"worker_timeout_s": 0}, "worker_timeout_s"),
        ({"worker_timeout_s": -1}, "worker_timeout_s"),
        ({"worker_timeout_s": float("nan")}, "worker_timeout_s"),
        ({"worker_timeout_s": float("inf")}, "worker_timeout_s"),
        ({"worker_timeout_s": "soon"}, "worker_timeout_s"),
        ({"worker_timeout_s": True}, "worker_timeout_s"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"quarantine": "no"}, "quarantine: expected True or False, got 'no'"),
        ({"quarantine": 1}, "quarantine"),
        ({"pin_cores": "yes"}, "pin_cores"),
        ({"ledger": 3}, "ledger: expected a path or None, got 3"),
        ({"ledger": b"ledger"}, "ledger"),
        ({"domain": "rack"}, "domain"),
        ({"domain": 5}, "domain"),
        ({"domain": "custom"}, "domain"),
        ({"client": "tcp://"}, "Client"),
    ],
)
def test_bad_arguments_are_refused(cluster4: Client, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Auditor(**{"client": cluster4, **arguments})


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([], {}, "empty list"),
        (np.zeros((0, 3)), {}, "sample"),
        ([np.zeros((0, 3))], {}, "sample"),
        (np.array(3.0), {}, "sample axis"),
        ([X[:5], X[5:, :2]], {}, "block 1"),
        ([X[:5], X[5:].astype(str)], {}, "block 1|dtype|type"),
        (da.from_array(X, chunks=50)[da.from_array(X, chunks=50)[:, 0] > 0], {}, "unknown chunk sizes"),
        (xr.DataArray(X, dims=("a", "b")), {}, "dim is needed"),
        (xr.DataArray(X, dims=("a", "b")), {"dim": "c"}, "no dimension"),
        (X, {"weights": np.ones(3)}, "weights"),
        (X, {"weights": -np.ones(len(X))}, "weights"),
        ("/no/such/path.zarr", {}, "/no/such/path.zarr"),
        (5, {}, "int"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*rechunked:UserWarning")
def test_bad_data_are_refused_before_any_work(
    auditor: Auditor, data: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((InputError, ShardError), match=message):
        auditor.accumulate(Moments(), data, **options)
    assert not any(r.agreed for r in auditor.rounds)


def test_weights_for_a_statistic_without_any_are_refused(auditor: Auditor) -> None:
    with pytest.raises(InputError, match=r"Sums.update takes no weights"):
        auditor.accumulate(Sums(), X, weights=np.ones(len(X)))
    assert not auditor.rounds


def test_what_is_no_statistic_is_refused(auditor: Auditor) -> None:
    with pytest.raises(InputTypeError, match="expected a Statistic, got ABCMeta"):
        auditor.accumulate(Sums, X)  # type: ignore[arg-type]


def test_states_of_unknown_types_are_refused(auditor: Auditor) -> None:
    with pytest.raises(InputError, match=r"Strange.init returned a state that .*set"):
        auditor.accumulate(Strange(), BLOCKS)
    with pytest.raises(ShardError, match=r"shard \d+: Turns returned a state that cannot be sealed"):
        auditor.accumulate(Turns(), BLOCKS)


def test_an_update_that_raises_names_shard_worker_and_domains(auditor: Auditor) -> None:
    for _ in range(2):
        with pytest.raises(ShardError, match=r"shard 9: .*nothing to divide by") as caught:
            auditor.accumulate(Fails(POISON), BLOCKS)
        assert caught.value.shard_id == 9
        assert caught.value.domain and caught.value.worker
        assert caught.value.worker in str(caught.value)
    assert not auditor.quarantined and not auditor.receipts


def test_an_update_that_calls_for_an_exit_costs_no_worker(auditor: Auditor, cluster4: Client) -> None:
    before = set(cluster4.scheduler_info()["workers"])
    with pytest.raises(ShardError, match=r"shard 9: SystemExit: 3"):
        auditor.accumulate(Exits(POISON), BLOCKS)
    check(auditor.accumulate(Sums(), BLOCKS))
    assert set(cluster4.scheduler_info()["workers"]) == before


def test_a_statistic_that_cannot_be_pickled_is_refused(auditor: Auditor) -> None:
    statistic = Sums()
    vars(statistic)["lock"] = threading.Lock()
    with pytest.raises(InputError, match=r"expected a statistic that can be pickled, got Sums: .*lock"):
        auditor.accumulate(statistic, BLOCKS)


def test_what_is_no_domain_is_not_in_quarantine(auditor: Auditor) -> None:
    with pytest.raises(InputError, match=r"expected a domain in quarantine .* got \['0'\]"):
        auditor.release(["0"])  # type: ignore[arg-type]


def test_non_finite_data_are_an_error_that_names_the_shard(auditor: Auditor) -> None:
    blocks = [block.copy() for block in BLOCKS]
    blocks[11][4, 1] = np.nan
    with pytest.raises(NonFiniteError, match="shard 11: non-finite value at") as caught:
        auditor.accumulate(Sums(), blocks)
    assert caught.value.shard_id == 11
    assert not auditor.quarantined


# -- life --------------------------------------------------------------------------------------


def test_a_closed_auditor_and_a_closed_client_are_refused(shared_cluster4: str) -> None:
    client = Client(shared_cluster4, set_as_default=False)
    auditor = Auditor(client, seed=1)
    auditor.accumulate(Sums(), BLOCKS)
    auditor.close()
    auditor.close()
    with pytest.raises(ClosedError, match="auditor"):
        auditor.accumulate(Sums(), BLOCKS)

    other = Auditor(client, seed=1)
    client.close()
    with pytest.raises(ClosedError, match="client"):
        other.accumulate(Sums(), BLOCKS)
    other.close()
    with pytest.raises(ClosedError, match="client"):
        Auditor(client)


def test_nothing_is_left_on_the_scheduler(cluster4: Client) -> None:
    before = cluster4.run_on_scheduler(tasks)
    with Auditor(cluster4, audit_rate=0.5, seed=1) as auditor:
        check(auditor.accumulate(Sums(), BLOCKS))
        check(auditor.accumulate(Sums(), da.from_array(X, chunks=(100, -1))))
        until(lambda: cluster4.run_on_scheduler(tasks) == before)
        assert not [key for key in cluster4.futures if "sdc" in str(key)]
        assert len(cluster4.run_on_scheduler(topics)) == 1
    assert not cluster4.run_on_scheduler(topics)


def test_nothing_is_left_after_an_error(cluster4: Client) -> None:
    before = cluster4.run_on_scheduler(tasks)
    with Auditor(cluster4, audit_rate=0.5, seed=1) as auditor:
        with pytest.raises(ShardError):
            auditor.accumulate(Fails(POISON), BLOCKS)
        until(lambda: cluster4.run_on_scheduler(tasks) == before)


def test_an_interrupt_leaves_no_task_behind(
    cluster4: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cluster4.run_on_scheduler(tasks)
    auditor = Auditor(cluster4, audit_rate=0.5, seed=1)
    sync = cluster4.sync

    def interrupted(func: Any, *args: Any, **kwargs: Any) -> Any:
        """Do what `Client.sync` does when Ctrl-C arrives while it waits."""
        monkeypatch.setattr(cluster4, "sync", sync)
        future = sync(_started, func, asynchronous=False)
        until((tmp_path / "started").exists)
        assert not future.done()
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster4, "sync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        auditor.accumulate(Waits(tmp_path), BLOCKS)
    (tmp_path / "go").touch()

    until(lambda: cluster4.run_on_scheduler(tasks) == before)
    assert not [key for key in cluster4.futures if "sdc" in str(key)]
    check(auditor.accumulate(Sums(), BLOCKS))
    auditor.close()


async def _started(func: Any) -> Any:
    return asyncio.ensure_future(func())


def test_closing_ends_a_call_that_is_under_way(cluster4: Client, tmp_path: Path) -> None:
    before = cluster4.run_on_scheduler(tasks)
    ledger = tmp_path / "ledger"
    auditor = Auditor(cluster4, audit_rate=0.5, seed=1, ledger=ledger)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(auditor.accumulate, Waits(tmp_path), BLOCKS)
        until((tmp_path / "started").exists)
        second = pool.submit(auditor.accumulate, Sums(), BLOCKS)
        auditor.close()
        for call in (first, second):
            with pytest.raises(ClosedError, match="closed"):
                call.result(30)
        (tmp_path / "go").touch()
    until(lambda: cluster4.run_on_scheduler(tasks) == before)
    assert not cluster4.run_on_scheduler(topics)
    Ledger(ledger).close()  # nobody holds it


@gen_cluster(client=True, nthreads=FOUR)
async def test_closing_ends_the_call_of_another_task(
    c: Client, s: Scheduler, one: Worker, two: Worker, three: Worker, four: Worker, tmp_path: Path
) -> None:
    auditor = Auditor(c, audit_rate=0.5, seed=1)
    call = asyncio.ensure_future(auditor.accumulate(Slow(tmp_path, frozenset({0})), BLOCKS))
    await until_async(lambda: list(tmp_path.glob("started-0-*")))
    await auditor.close()
    with pytest.raises(ClosedError, match="it was closed meanwhile"):
        await call
    assert not call.cancelled()
    (tmp_path / "go").touch()  # whoever computes it still may end


@gen_cluster(client=True, nthreads=FOUR)
async def test_closing_while_a_call_attaches_leaves_nothing_behind(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    async with Auditor(c, audit_rate=0.5, seed=1) as first:
        check(await first.accumulate(Sums(), BLOCKS))
        attach = s.handlers["sdc_attach"]
        asked, go, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def late(**arguments: Any) -> Any:
            asked.set()
            await go.wait()
            try:
                return await attach(**arguments)
            finally:
                answered.set()

        s.handlers["sdc_attach"] = late
        auditor = Auditor(c, audit_rate=0.5, seed=1)
        call = asyncio.ensure_future(auditor.accumulate(Sums(), BLOCKS))
        await asked.wait()
        closing = asyncio.ensure_future(auditor.close())
        with pytest.raises(ClosedError, match="closed"):
            await call
        go.set()
        await asyncio.gather(closing, answered.wait())
        assert list(s.plugins["dask_sdc"].topics) == [first._session.topic]
        s.handlers["sdc_attach"] = attach


def test_a_client_that_closes_ends_a_call(shared_cluster4: str, tmp_path: Path) -> None:
    with Client(shared_cluster4, set_as_default=False) as client, ThreadPoolExecutor(1) as pool:
        auditor = Auditor(client, audit_rate=0.5, seed=1)
        call = pool.submit(auditor.accumulate, Waits(tmp_path), BLOCKS)
        until((tmp_path / "started").exists)
        client.close()
        with pytest.raises(ClosedError, match="expected a running client, got one that is"):
            call.result(30)
        auditor.close()
        (tmp_path / "go").touch()


# -- sharing -----------------------------------------------------------------------------------


def test_several_threads_may_use_one_auditor(auditor: Auditor) -> None:
    with ThreadPoolExecutor(4) as pool:
        for state in pool.map(lambda _: auditor.accumulate(Sums(), BLOCKS), range(4)):
            check(state)
    assert [r.round for r in auditor.rounds] == [0, 1, 2, 3]


def test_two_auditors_may_use_one_client_or_two(cluster4: Client, shared_cluster4: str) -> None:
    with (
        Client(shared_cluster4, set_as_default=False) as other,
        Auditor(cluster4, audit_rate=0.5, seed=1) as one,
        Auditor(cluster4, audit_rate=0.5, seed=1) as two,
        Auditor(other, audit_rate=0.5, seed=1) as three,
        ThreadPoolExecutor(3) as pool,
    ):
        for state in pool.map(lambda a: a.accumulate(Sums(), BLOCKS), (one, two, three)):
            check(state)
    assert [len(a.rounds) for a in (one, two, three)] == [1, 1, 1]
    assert not any(a.receipts for a in (one, two, three))


def test_an_auditor_may_be_used_within_a_task(cluster4: Client) -> None:
    check(cluster4.submit(from_within, BLOCKS, pure=False).result(60))


def test_domains_that_differ_from_those_in_use_are_refused(auditor: Auditor, cluster4: Client) -> None:
    check(auditor.accumulate(Sums(), BLOCKS))
    with (
        Auditor(cluster4, domain="host", seed=1) as other,
        pytest.raises(
            InputError, match="'worker', which this cluster already audits with, got domain='host'"
        ),
    ):
        other.accumulate(Sums(), BLOCKS)
    assert len(cluster4.run_on_scheduler(topics)) == 1


def test_an_asynchronous_client() -> None:
    @gen_cluster(client=True, nthreads=FOUR)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        async with Auditor(c, audit_rate=0.5, seed=1) as auditor:
            check(await auditor.accumulate(Sums(), BLOCKS))
            fitted = await auditor.fit(KMeans(2, seed=1), BLOCKS, max_iter=3, tol=0)
            assert fitted.n_iter == 3
            graph = await auditor.graph(Sums(), BLOCKS)
            check(await c.compute(graph))
            assert not (await auditor.screen(repeats=1)).outliers
            with pytest.raises(ShardError, match="shard 9"):
                await auditor.accumulate(Fails(POISON), BLOCKS)
            del graph
            await until_async(lambda: not s.tasks)
        await auditor.close()
        assert not s.plugins[NAME].topics

    run()


@gen_cluster(client=True, nthreads=FOUR)
async def test_an_array_in_pieces_counts_threads_with_an_asynchronous_client(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    async with Auditor(c, audit_rate=0.5, seed=1, sub_chunks=2) as auditor:
        check(await auditor.accumulate(Sums(), X))
    assert auditor.rounds[0].shards == 8


# -- domains -----------------------------------------------------------------------------------


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_one_domain_is_not_audited_and_says_so(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with Auditor(c, audit_rate=0.5, seed=1) as auditor:
        with pytest.warns(AuditWarning, match=r"no audit: 1 failure domain\(s\) live"):
            check(await auditor.accumulate(Sums(), BLOCKS))
    assert auditor.rounds[0].note.startswith("no audit: 1 failure domain")
    assert auditor.rounds[0].agreed == 0 and "no audit" in str(auditor.report())


@gen_cluster(client=True, nthreads=FOUR[:2])
async def test_two_domains_are_audited(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with Auditor(c, audit_rate=1.0, seed=1) as auditor:
        check(await auditor.accumulate(Sums(), BLOCKS))
    assert auditor.rounds[0].agreed == 16 and not auditor.rounds[0].note
    assert "domains are workers: no kind gives 3 domains" in auditor.report().domains


@gen_cluster(client=True, nthreads=FOUR)
async def test_workers_of_one_host_are_one_domain_if_asked_for(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    async with Auditor(c, audit_rate=1.0, seed=1, domain="host") as auditor:
        with pytest.warns(AuditWarning, match="no audit: 1"):
            check(await auditor.accumulate(Sums(), BLOCKS))


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_callable_names_the_domains(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with Auditor(c, audit_rate=1.0, seed=1, domain=lambda w: f"rack-{int(w.name) % 3}") as auditor:
        check(await auditor.accumulate(Sums(), BLOCKS))
        assert set(s.plugins[NAME].domains.domains) == {"rack-0", "rack-1", "rack-2"}
    assert auditor.rounds[0].domains == 3 and auditor.rounds[0].agreed == 16


@gen_cluster(client=True, nthreads=[])
async def test_a_cluster_without_workers_is_an_error(c: Client, s: Scheduler) -> None:
    async with Auditor(c, seed=1) as auditor:
        with pytest.raises(Exception, match="expected a cluster with workers"):
            await auditor.accumulate(Sums(), BLOCKS)


def test_without_workers_a_round_gives_up_after_the_timeout(tmp_path: Path) -> None:
    @gen_cluster(client=True, nthreads=FOUR[:2])
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        async with Auditor(c, audit_rate=0, seed=1, worker_timeout_s=1) as auditor:
            done = asyncio.ensure_future(auditor.accumulate(Slow(tmp_path, frozenset(range(1, 16))), BLOCKS))
            await until_async(lambda: len(list(tmp_path.glob("started-*"))) >= 1)
            for worker in workers:
                await s.remove_worker(worker.address, stimulus_id="test")
            (tmp_path / "go").touch()
            with pytest.raises(NoDomainError, match=r"remaining shards, got none for 1\.\d s"):
                await done

    run()


# -- accounts ----------------------------------------------------------------------------------


def test_rounds_and_report_say_what_was_done(auditor: Auditor) -> None:
    check(auditor.accumulate(Sums(), BLOCKS))
    check(auditor.accumulate(Sums(), BLOCKS))

    report = auditor.report()
    totals = report.totals()
    assert totals["shards"] == 32
    assert totals["audited"] == totals["agreed"] >= 8
    assert totals["evaluations"] == 32 + totals["audited"]
    assert totals["mismatches"] == totals["recomputed"] == 0
    assert [r.seconds > 0 for r in report.rounds] == [True, True]
    assert report.to_dict()["seed"] == 1 and report.to_dict()["rate"] == 0.25
    text = str(report)
    assert "2 rounds, 32 shards" in text and "at rate 0.25" in text
    assert report._repr_html_().startswith("<pre>")


def test_defaults_come_from_the_configuration(cluster4: Client, tmp_path: Path) -> None:
    wanted = {"sdc.audit-rate": 1.0, "sdc.quarantine": False, "sdc.ledger": str(tmp_path / "ledger")}
    with dask.config.set(wanted), Auditor(cluster4, seed=1) as auditor:
        check(auditor.accumulate(Sums(), BLOCKS))
    assert auditor.audit_rate == 1.0 and auditor.rounds[0].agreed == 16
    assert auditor.report().ledger == str(tmp_path / "ledger")


def test_a_bad_default_is_refused_like_a_bad_argument(cluster4: Client) -> None:
    with dask.config.set({"sdc.audit-rate": 2}), pytest.raises(InputError, match="rate"):
        Auditor(cluster4)


def test_a_state_may_be_none(auditor: Auditor) -> None:
    assert auditor.accumulate(Nothing(), BLOCKS) == "nothing"


@gen_cluster(client=True, nthreads=[("127.0.0.1", 2)] * 3)
async def test_workers_of_several_threads(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with Auditor(c, audit_rate=1.0, seed=1) as auditor:
        check(await auditor.accumulate(Sums(), BLOCKS))
    assert auditor.rounds[0].agreed == 16
