"""Every hook and handler of the scheduler plugin, on in-process clusters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import Event
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client, Nanny, Scheduler, Worker, wait
from distributed.core import Status
from distributed.utils_test import gen_cluster

from dask_sdc.cluster.scheduler_plugin import GRAPH_PREFIX, SDCSchedulerPlugin
from dask_sdc.cluster.worker_plugin import NAME, SDCWorkerPlugin
from dask_sdc.policy.domains import apart_labels, domain_label
from tests.cluster.waiting import until_async

FOUR = [("127.0.0.1", 1)] * 4
LANES = 8


async def install(client: Client, kind: str = "worker") -> SDCSchedulerPlugin:
    await client.register_plugin(SDCSchedulerPlugin(kind, LANES))
    await client.register_plugin(SDCWorkerPlugin())
    return installed()


def installed() -> SDCSchedulerPlugin:
    (scheduler,) = Scheduler._instances
    plugin: SDCSchedulerPlugin = scheduler.plugins[NAME]
    return plugin


async def listen(client: Client) -> list[dict[str, Any]]:
    """Subscribe to the plugin's news; return the list that they arrive in."""
    heard: list[dict[str, Any]] = []
    client.subscribe_topic("news", lambda event: heard.append(event[1]))
    await client.scheduler.sdc_attach(topic="news", client=client.id)
    return heard


@asynccontextmanager
async def another_worker(scheduler: Scheduler, name: str) -> AsyncIterator[Worker]:
    worker = await Worker(scheduler.address, name=name, nthreads=1)
    try:
        yield worker
    finally:
        await worker.close()


@gen_cluster(client=True, nthreads=FOUR)
async def test_labels_are_advertised_on_both_sides(c: Client, s: Scheduler, *workers: Worker) -> None:
    plugin = await install(c)

    for worker in workers:
        domain = plugin.domains.domain(worker.address)
        lane = plugin.domains.lane(domain)
        wanted = dict.fromkeys((domain_label(domain), *apart_labels(lane, LANES)), 0.0)
        assert worker.state.total_resources == wanted
        assert s.workers[worker.address].resources == wanted
    assert len({plugin.domains.lane(d) for d in plugin.domains.domains}) == 4


@gen_cluster(client=True, nthreads=FOUR)
async def test_the_snapshot_names_every_worker_with_its_place(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    plugin = await install(c)

    state = await c.scheduler.sdc_snapshot()

    assert (state["kind"], state["lanes"], state["quarantined"]) == ("worker", LANES, {})
    assert {w["address"] for w in state["workers"]} == {w.address for w in workers}
    assert {w["domain"] for w in state["workers"]} == {str(w.name) for w in workers}
    assert {w["nthreads"] for w in state["workers"]} == {1}
    assert {w["fingerprint"] for w in state["workers"]} == set(plugin.fingerprints.values())


@gen_cluster(client=True, nthreads=FOUR)
async def test_joins_and_departures_are_news(c: Client, s: Scheduler, *workers: Worker) -> None:
    plugin = await install(c)
    news = await listen(c)

    async with another_worker(s, "new") as worker:
        await until_async(lambda: len(news) == 2)
        coming, joined = news
        assert coming == {"op": "coming", "worker": worker.address}
        assert (joined["op"], joined["domain"], joined["worker"]) == ("joined", "new", worker.address)
        assert joined["lane"] == plugin.domains.lane("new") and joined["nthreads"] == 1
        assert joined["fingerprint"] == plugin.fingerprints[worker.address]
        address = worker.address
    await until_async(lambda: len(news) == 3)

    assert news[2:] == [{"op": "left", "domain": "new", "worker": address, "gone": True}]
    assert address not in plugin.fingerprints and address not in plugin.domains


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_detached_topic_hears_nothing(c: Client, s: Scheduler, *workers: Worker) -> None:
    plugin = await install(c)
    news = await listen(c)
    await c.scheduler.sdc_attach(topic="other", client=c.id)

    await c.scheduler.sdc_detach(topic="news")

    assert plugin.topics == {"other": c.id}
    await s.remove_worker(workers[0].address, stimulus_id="test")
    assert not news


@gen_cluster(client=True, nthreads=FOUR)
async def test_the_topics_of_a_client_go_with_it(c: Client, s: Scheduler, *workers: Worker) -> None:
    plugin = await install(c)
    await c.scheduler.sdc_attach(topic="mine", client=c.id)
    async with Client(s.address, asynchronous=True) as other:
        await other.scheduler.sdc_attach(topic="theirs", client=other.id)
        assert set(plugin.topics) == {"mine", "theirs"}

    await until_async(lambda: set(plugin.topics) == {"mine"})


@gen_cluster(client=True, nthreads=FOUR)
async def test_workers_of_a_host_are_numbered_and_numbers_are_used_again(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    plugin = await install(c)
    seats = {w.address: plugin._seat(w.address) for w in workers}
    assert sorted(seats.values()) == [0, 1, 2, 3]

    await s.remove_worker(workers[1].address, stimulus_id="test")
    async with another_worker(s, "new") as one, another_worker(s, "newer") as two:
        await until_async(lambda: {one.address, two.address} <= plugin.fingerprints.keys())
        assert {plugin._seat(one.address), plugin._seat(two.address)} == {seats[workers[1].address], 4}


# -- quarantine ------------------------------------------------------------------------------


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_quarantined_domain_that_rejoins_is_held_at_the_door(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    plugin = await install(c)
    news = await listen(c)
    answer = await c.scheduler.sdc_quarantine(domain="2", reason="wrong")
    assert answer["workers"] == (workers[2].address,)
    assert workers[2].address not in s.workers

    async with another_worker(s, "2") as back:
        await until_async(lambda: back.address in plugin.fingerprints)

        assert s.workers[back.address].status == Status.paused
        assert s.workers[back.address] not in s.running
        assert await c.scheduler.sdc_held(domain="2") == (back.address,)
        assert back.address not in {w["address"] for w in (await c.scheduler.sdc_snapshot())["workers"]}
        assert not back.state.total_resources
        # Dask may believe that the worker runs: the worker says so whenever its memory clears.
        back.batched_send({"op": "worker-status-change", "status": "running", "stimulus_id": "test"})
        futures = c.map(lambda x: x + 1, range(40), key="spread")
        await wait(futures)
        assert s.workers[back.address].status == Status.paused
        assert not s.workers[back.address].has_what
        only_there = c.submit(lambda: 1, workers=[back.address], key="only-there")
        await c.submit(lambda: 2, key="another")
        assert s.tasks[only_there.key].state == "no-worker"
    told = ["left", "quarantined", "refused", "left"]
    await until_async(lambda: [n["op"] for n in news if n.get("domain") == "2"] == told)
    assert not plugin.held


@gen_cluster(client=True, nthreads=FOUR)
async def test_newcomers_of_other_domains_are_let_in_during_a_quarantine(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    plugin = await install(c)
    await c.scheduler.sdc_quarantine(domain="2", reason="wrong")

    async with another_worker(s, "new") as worker:
        await until_async(lambda: worker.address in plugin.fingerprints)
        assert s.workers[worker.address].status == Status.running
        assert not plugin.held
        assert await c.submit(lambda: 5, workers=[worker.address]) == 5


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_worker_that_pauses_while_it_is_held_stays_paused_when_let_in(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    plugin = await install(c)
    await c.scheduler.sdc_quarantine(domain="2", reason="wrong")

    async with another_worker(s, "2") as back:
        await until_async(lambda: back.address in plugin.fingerprints)
        # No memory: it pauses by itself, and says so.
        plugin.handle_status("paused", back.address, "test")
        await c.scheduler.sdc_release(domain="2")
        assert s.workers[back.address].status == Status.paused
        plugin.handle_status("running", back.address, "test")
        assert s.workers[back.address].status == Status.running


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_released_domain_works_again(c: Client, s: Scheduler, *workers: Worker) -> None:
    plugin = await install(c)
    news = await listen(c)
    await c.scheduler.sdc_quarantine(domain="2", reason="wrong")

    async with another_worker(s, "2") as back:
        await until_async(lambda: back.address in plugin.fingerprints)
        answer = await c.scheduler.sdc_release(domain="2")
        assert answer == {"released": True, "workers": (back.address,)}
        assert s.workers[back.address].status == Status.running
        assert domain_label("2") in s.workers[back.address].resources
        assert await c.submit(lambda: 7, resources={domain_label("2"): 0}) == 7
        await until_async(lambda: news and news[-1]["op"] == "released")
        assert {n["op"] for n in news} >= {"joined"}
        assert await c.scheduler.sdc_release(domain="2") == {"released": False, "workers": ()}


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_worker_that_registers_after_it_was_removed_leaves_no_ghost(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    plugin = await install(c)
    identity = {"address": "tcp://127.0.0.1:1", "name": "ghost", "gpus": []}

    with pytest.raises(Exception, match=r"ghost|127.0.0.1:1"):
        await plugin.register(identity, "tcp://127.0.0.1:1")
    await plugin.ready("tcp://127.0.0.1:1", "fp")

    assert "tcp://127.0.0.1:1" not in plugin.domains and "tcp://127.0.0.1:1" not in plugin.fingerprints


@gen_cluster(client=True, nthreads=FOUR)
async def test_quarantine_drops_what_was_made_from_a_domains_results(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    await install(c)
    suspect, other, third = (w.address for w in workers[:3])
    raw = c.submit(np.arange, 6.0, workers=[suspect], allow_other_workers=True, key="raw")
    made = c.submit(np.add, raw, 1, workers=[other], key="made")
    apart = c.submit(np.ones, 3, workers=[other], key="apart")
    scattered = await c.scatter(np.zeros(2), workers=[third], direct=False)
    await wait([raw, made, apart])
    before = {key: s.tasks[key].run_id for key in ("made", "apart")}

    answer = await c.scheduler.sdc_quarantine(domain=str(workers[0].name), reason="wrong")

    assert answer["dropped"] == 2
    np.testing.assert_array_equal(await made, np.arange(6.0) + 1)
    np.testing.assert_array_equal(await raw, np.arange(6.0))
    assert s.tasks["made"].run_id != before["made"]
    assert s.tasks["apart"].run_id == before["apart"]
    np.testing.assert_array_equal(await scattered, np.zeros(2))


@gen_cluster(client=True, nthreads=FOUR)
async def test_quarantine_drops_what_was_made_from_results_that_are_long_gone(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    await install(c)
    raw = c.submit(np.arange, 6.0, workers=[workers[0].address], allow_other_workers=True, key="raw")
    middle = c.submit(np.add, raw, 1, workers=[workers[1].address], key="middle")
    last = c.submit(np.add, middle, 1, workers=[workers[2].address], key="last")
    await wait(last)
    raw.release()
    middle.release()
    await until_async(lambda: s.tasks["middle"].state == s.tasks["raw"].state == "released")
    before = s.tasks["last"].run_id

    await c.scheduler.sdc_quarantine(domain=str(workers[0].name), reason="wrong")

    np.testing.assert_array_equal(await last, np.arange(6.0) + 2)
    assert s.tasks["last"].run_id != before


@gen_cluster(client=True, nthreads=FOUR)
async def test_replicas_of_a_suspect_elsewhere_are_dropped(c: Client, s: Scheduler, *workers: Worker) -> None:
    await install(c)
    held = c.submit(np.arange, 4.0, workers=[workers[0].address], allow_other_workers=True, key="held")
    await c.replicate(held, n=3)
    assert len(s.tasks["held"].who_has) == 3
    before = s.tasks["held"].run_id

    await c.scheduler.sdc_quarantine(domain=str(workers[0].name), reason="wrong")

    np.testing.assert_array_equal(await held, np.arange(4.0))
    assert s.tasks["held"].run_id != before


@gen_cluster(client=True, nthreads=FOUR)
async def test_persisted_collections_survive_a_quarantine(c: Client, s: Scheduler, *workers: Worker) -> None:
    await install(c)
    x = c.persist(da.arange(4000, chunks=100) * 2)
    y = c.persist(x.reshape(40, 100).sum(axis=1))
    await wait([x, y])

    await c.scheduler.sdc_quarantine(domain=str(workers[1].name), reason="wrong")

    expected = (np.arange(4000) * 2).reshape(40, 100).sum(axis=1)
    np.testing.assert_array_equal(await c.compute(y), expected)
    np.testing.assert_array_equal(await c.compute(x), np.arange(4000) * 2)


@gen_cluster(client=True, nthreads=FOUR)
async def test_refresh_computes_again_what_can_be_computed_again(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    await install(c)
    future = c.submit(np.arange, 4.0, key="again")
    scattered = await c.scatter(np.zeros(2))
    await wait(future)
    before = s.tasks["again"].run_id

    dropped = await c.scheduler.sdc_refresh(keys=["again", scattered.key, "unknown"])

    assert dropped == 1
    np.testing.assert_array_equal(await future, np.arange(4.0))
    assert s.tasks["again"].run_id != before
    np.testing.assert_array_equal(await scattered, np.zeros(2))


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, Worker=Nanny, timeout=120)
async def test_an_evicted_domain_is_restarted_by_its_nanny(c: Client, s: Scheduler, *nannies: Nanny) -> None:
    plugin = await install(c)
    victim = nannies[0]
    address, name = victim.worker_address, str(victim.name)

    assert await c.scheduler.sdc_evict(domain=name, reason="silent") == (address,)

    assert address not in s.workers
    await until_async(lambda: any(w in plugin.fingerprints for w in plugin.domains.addresses(name)), 60)
    (back,) = plugin.domains.addresses(name)
    assert back != address
    assert await c.submit(lambda: 3, resources={domain_label(name): 0}) == 3


@gen_cluster(client=True, nthreads=FOUR)
async def test_an_evicted_domain_without_a_nanny_is_gone(c: Client, s: Scheduler, *workers: Worker) -> None:
    plugin = await install(c)
    name = str(workers[0].name)

    assert await c.scheduler.sdc_evict(domain=name, reason="silent") == (workers[0].address,)
    assert await c.scheduler.sdc_evict(domain=name, reason="silent") == ()

    assert len(s.workers) == 3 and not plugin.domains.is_live(name)


GATE = Event()


def hold() -> bool:
    return GATE.wait(60)


async def occupy(client: Client, worker: Worker, key: str) -> Any:
    """Have a worker run a task until the gate opens; the scheduler knows of it when this returns."""
    GATE.clear()
    future = client.submit(hold, key=key, workers=[worker.address])
    await until_async(lambda: worker.state.executing_count)
    await worker.heartbeat()
    return future


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_worker_that_serves_others_is_not_evicted(c: Client, s: Scheduler, *workers: Worker) -> None:
    plugin = await install(c)
    address, name = workers[0].address, str(workers[0].name)
    theirs = await occupy(c, workers[0], "theirs")

    assert await c.scheduler.sdc_evict(domain=name, reason="silent") == ()
    assert plugin.domains.is_live(name) and s.tasks["theirs"].state == "processing"

    # Nobody has heard of it for long: whatever it was doing, it is gone.
    s.workers[address].last_seen -= 60
    assert await c.scheduler.sdc_evict(domain=name, reason="silent") == (address,)
    GATE.set()
    del theirs


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_worker_that_serves_us_is_evicted(c: Client, s: Scheduler, *workers: Worker) -> None:
    await install(c)
    ours = await occupy(c, workers[0], "sdc-primary-1")

    evicted = await c.scheduler.sdc_evict(domain=str(workers[0].name), reason="silent")

    assert evicted == (workers[0].address,)
    GATE.set()
    del ours


# -- embedded graphs -------------------------------------------------------------------------


async def unrunnable(c: Client, s: Scheduler, key: str, label: str) -> Any:
    future = c.submit(lambda: 11, key=key, resources={label: 0})
    await until_async(lambda: key in s.tasks)
    return future


@gen_cluster(client=True, nthreads=FOUR)
async def test_embedded_tasks_of_a_domain_that_left_run_elsewhere(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    await install(c)
    name, label = str(workers[0].name), domain_label(str(workers[0].name))
    plugin = installed()
    plugin.handle_status("paused", workers[0].address, "test")
    mine = await unrunnable(c, s, f"{GRAPH_PREFIX}x-primary-0", label)
    theirs = await unrunnable(c, s, "somebody-elses", label)

    await s.remove_worker(workers[0].address, stimulus_id="test")

    assert await mine == 11
    assert s.tasks[theirs.key].state == "no-worker"
    assert not plugin.domains.is_live(name)


@gen_cluster(client=True, nthreads=FOUR)
async def test_embedded_tasks_that_are_submitted_after_their_domain_left_run_elsewhere(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    await install(c)
    label = domain_label(str(workers[0].name))
    await s.remove_worker(workers[0].address, stimulus_id="test")

    assert await (await unrunnable(c, s, f"{GRAPH_PREFIX}x-primary-0", label)) == 11


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_embedded_audits_that_nobody_is_apart_for_run_all_the_same(
    c: Client, s: Scheduler, worker: Worker
) -> None:
    plugin = await install(c)
    lane = plugin.domains.lane(str(worker.name))

    assert await (await unrunnable(c, s, f"{GRAPH_PREFIX}x-audit-0", f"sdc-apart-{lane}")) == 11


# -- bookkeeping -----------------------------------------------------------------------------


@gen_cluster(client=True, nthreads=FOUR)
async def test_what_is_remembered_of_results_goes_with_them(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    plugin = await install(c)
    futures = c.map(lambda x: x, range(20))
    await wait(futures)
    assert len(plugin._producers) == 20 == sum(map(len, plugin._produced.values()))

    del futures
    await until_async(lambda: not s.tasks)

    assert not plugin._producers and not any(plugin._produced.values())


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, Worker=Nanny, timeout=120)
async def test_a_restart_forgets_results_and_keeps_domains_and_quarantines(
    c: Client, s: Scheduler, *nannies: Nanny
) -> None:
    plugin = await install(c)
    futures = c.map(lambda x: x, range(8))
    await wait(futures)
    await c.scheduler.sdc_quarantine(domain="elsewhere", reason="wrong")
    names = {str(n.name) for n in nannies}

    await c.restart()

    assert not plugin._producers and not plugin._produced
    await until_async(lambda: len(plugin.fingerprints) == 2)
    assert set(plugin.domains.domains) == names
    assert plugin.quarantined == {"elsewhere": "wrong"} and not plugin.held


class Counted(dict[Any, Any]):
    """A mapping that counts how often it is walked."""

    walks = 0

    def __iter__(self) -> Any:
        type(self).walks += 1
        return super().__iter__()

    def items(self) -> Any:
        type(self).walks += 1
        return super().items()

    def values(self) -> Any:
        type(self).walks += 1
        return super().values()


@gen_cluster(client=True, nthreads=FOUR)
async def test_hooks_walk_over_no_tasks(c: Client, s: Scheduler, *workers: Worker) -> None:
    plugin = await install(c)
    futures = c.map(lambda x: x, range(50))
    await wait(futures)
    plugin._producers = Counted(plugin._producers)
    for domain, keys in list(plugin._produced.items()):
        plugin._produced[domain] = Counted(keys)
    Counted.walks = 0

    key = next(iter(s.tasks))
    plugin.transition(key, "memory", "released", stimulus_id="test")
    plugin.transition(key, "processing", "memory", stimulus_id="test", worker=workers[0].address)
    plugin.remove_client(s, "nobody")
    plugin.add_worker(s, workers[0].address)
    plugin.handle_status("running", workers[0].address, "test")
    plugin.remove_worker(s, workers[0].address, stimulus_id="test")

    assert Counted.walks == 0
