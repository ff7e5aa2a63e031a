"""Ranks of a Dask cluster in one process: every hook and handler of the plugin, every refusal."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
from distributed import Client, Event, LocalCluster, Nanny, Scheduler, Worker, wait, worker_client
from distributed.utils_test import gen_cluster

from dask_sdc.exceptions import ClosedError, GenerationFailed, InputError, RankLost, StaleRound
from dask_sdc.recovery import AllReduce, BatchRecoveryCoordinator, RecoveryMetadata
from dask_sdc.recovery.cluster import DaskAllReduce, RankGroup, RecoverySchedulerPlugin
from tests.cluster.waiting import until_async
from tests.recovery.ranks import expected, lone_thread, sums, sums_async

THREE = [("127.0.0.1", 1)] * 3


def plugin_of(scheduler: Scheduler) -> RecoverySchedulerPlugin:
    plugin: RecoverySchedulerPlugin = scheduler.plugins[RecoverySchedulerPlugin.name]
    return plugin


def nothing_is_kept(scheduler: Scheduler) -> bool:
    """Whether the plugin is as it was when it was made."""
    kept = {k: v for k, v in vars(plugin_of(scheduler)).items() if k != "scheduler"}
    return kept == vars(RecoverySchedulerPlugin())


def waiting_ranks(scheduler: Scheduler) -> int:
    """How many contributions wait for an answer."""
    return sum(len(group.rounds._given) for group in plugin_of(scheduler).groups.values())


async def settled(futures: list[Any]) -> list[Any]:
    """Return results and errors of tasks."""
    await wait(futures)
    return [await future.exception() or await future for future in futures]


# -- sums --------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [sums, sums_async])
def test_ranks_are_tasks(function: Any) -> None:
    @gen_cluster(client=True, nthreads=THREE)
    async def check(c: Client, s: Scheduler, *workers: Worker) -> None:
        async with RankGroup(c, 3) as group:
            assert all(isinstance(rank, AllReduce) for rank in group.ranks)
            results = await c.gather(c.map(function, group.ranks, rounds=5))
            assert results == [expected(3, 5)] * 3
        assert nothing_is_kept(s)

    check()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_one_thread_serves_many_ranks_that_wait_for_each_other(
    c: Client, s: Scheduler, a: Worker
) -> None:
    async with RankGroup(c, 6, timeout=20) as group:
        results = await c.gather(c.map(sums, group.ranks, rounds=4))
        assert results == [expected(6, 4)] * 6


def hangs_on_the_same_thread(rank: DaskAllReduce) -> Any:
    if rank.rank == 1:
        Event("go on").wait()
        return None
    return sums(rank)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_rank_raises_although_another_has_taken_its_thread(
    c: Client, s: Scheduler, a: Worker
) -> None:
    async with RankGroup(c, 2, timeout=1) as group:
        zero, one = (c.submit(hangs_on_the_same_thread, rank) for rank in group.ranks)
        with pytest.raises(RankLost, match="rank 1"):
            await zero
        await Event("go on").set()
        await one


def in_worker_client(rank: DaskAllReduce) -> list[tuple[int, ...]]:
    with worker_client():
        return sums(rank, 2)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_task_that_has_left_the_pool_already_can_sum(c: Client, s: Scheduler, a: Worker) -> None:
    async with RankGroup(c, 2, timeout=20) as group:
        results = await c.gather(c.map(in_worker_client, group.ranks))
        assert results == [expected(2, 2)] * 2


def in_threads(ranks: list[DaskAllReduce]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(sums, ranks))


@gen_cluster(client=True, nthreads=THREE)
async def test_ranks_are_tasks_threads_and_clients_at_once(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with RankGroup(c, 5, timeout=20) as group, Client(s.address, asynchronous=True) as other:
        tasks = c.map(sums, group.ranks[:2])
        threads = asyncio.to_thread(in_threads, [pickle.loads(pickle.dumps(group.ranks[2]))])
        foreign = pickle.loads(pickle.dumps(group.ranks[3]))
        foreign._client = other
        mine, theirs, thread = await asyncio.gather(
            group.ranks[4].sum_async([4, 0]), foreign.sum_async([3, 0]), threads
        )
        assert mine == theirs == thread[0][0] == (10, 0)
        assert await c.gather(tasks) == [expected(5)] * 2


@gen_cluster(client=True, nthreads=THREE)
async def test_groups_of_one_name_have_nothing_to_do_with_each_other(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    async with RankGroup(c, 2, name="train") as one, RankGroup(c, 3, name="train") as two:
        first, second = c.map(sums, one.ranks), c.map(sums, two.ranks)
        assert await c.gather(first) == [expected(2)] * 2
        assert await c.gather(second) == [expected(3)] * 3


@gen_cluster(client=True, nthreads=[("127.0.0.1", 8)])
async def test_two_hundred_ranks(c: Client, s: Scheduler, a: Worker) -> None:
    async with RankGroup(c, 200) as group:
        results = await asyncio.gather(*(sums_async(rank, 3) for rank in group.ranks))
        assert results == [expected(200, 3)] * 200
    assert nothing_is_kept(s)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_sums_of_the_largest_counts_fit(c: Client, s: Scheduler, a: Worker) -> None:
    async with RankGroup(c, 2) as group:
        most = 2**47 - 1
        results = await asyncio.gather(*(rank.sum_async([most, -most]) for rank in group.ranks))
        assert results == [(2 * most, -2 * most)] * 2


@pytest.mark.parametrize("function", [sums, sums_async])
def test_a_group_starts_its_ranks(function: Any) -> None:
    @gen_cluster(client=True, nthreads=THREE)
    async def check(c: Client, s: Scheduler, *workers: Worker) -> None:
        async with RankGroup(c, 3) as group:
            futures = await group.map(function, [1, 2, 2], workers=[w.address for w in workers])
            errors = await settled(futures)
            assert errors[0] == expected(3, 1)  # which goes one round less than the others
            assert all(type(error) is RankLost and error.ranks == (0,) for error in errors[1:])
            assert all("has ended" in str(error) for error in errors[1:])
        del futures
        assert nothing_is_kept(s)
        async with RankGroup(c, 2) as group:
            with pytest.raises(InputError, match="expected 2 arguments, one for each rank, got 3"):
                group.map(function, [1, 2, 3])

    check()


# -- coordinators ------------------------------------------------------------------------------


def coordinate(rank: DaskAllReduce, fatal: int) -> int:
    coordinator = BatchRecoveryCoordinator("train", all_reduce=rank)
    error = f"rank {rank.rank}: all failed" if rank.rank == fatal else ""
    coordinator.consume({"__recovery__": RecoveryMetadata(1, False, rank.rank == fatal, error)})
    return coordinator.synchronize()


@gen_cluster(client=True, nthreads=THREE)
async def test_a_fatal_rank_raises_on_every_rank(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with RankGroup(c, 3) as group:
        errors = await settled(c.map(coordinate, group.ranks, fatal=1))
        assert [type(error) for error in errors] == [GenerationFailed] * 3
        assert all("1 of 3 ranks cannot go on; 3 samples failed" in str(error) for error in errors)
        assert [error.local_error for error in errors] == ["", "rank 1: all failed", ""]
    async with RankGroup(c, 3) as group:
        assert await c.gather(c.map(coordinate, group.ranks, fatal=-1)) == [3, 3, 3]


# -- ranks that are lost -----------------------------------------------------------------------


def in_turn(rank: DaskAllReduce, ending: str) -> list[tuple[int, ...]]:
    """Sum once; then rank 1 ends in some way while the others go on."""
    done = sums(rank)
    if rank.rank != 1:
        return done + sums(rank)
    if ending == "fails":
        raise ArithmeticError("rank 1 has had enough")
    if ending == "hangs":
        Event("go on").wait()
    return done


@pytest.mark.parametrize(
    ("ending", "said"), [("fails", "has failed"), ("ends", "has ended"), ("hangs", "cancelled")]
)
def test_a_rank_whose_task_is_over_is_lost_at_once(ending: str, said: str) -> None:
    @gen_cluster(client=True, nthreads=THREE)
    async def check(c: Client, s: Scheduler, *workers: Worker) -> None:
        async with RankGroup(c, 3, name="train", timeout=250) as group:
            futures = c.map(in_turn, group.ranks, ending=ending)
            if ending == "hangs":
                (found,) = plugin_of(s).groups.values()
                await until_async(lambda: found.rounds.number == 1 and waiting_ranks(s) == 2)
                await c.cancel([futures[1]])
            zero, two = await settled([futures[0], futures[2]])
            assert type(zero) is type(two) is RankLost
            assert zero.ranks == two.ranks == (1,)
            for error in (zero, two):
                assert "train, round 1: rank 1 (tcp://" in str(error) and said in str(error)
            await Event("go on").set()

    check()


def dies_early(rank: DaskAllReduce) -> Any:
    if rank.rank == 1:
        raise ArithmeticError("before the first sum")
    return sums(rank)


async def dies_early_async(rank: DaskAllReduce) -> Any:
    return dies_early(rank) if rank.rank == 1 else await sums_async(rank)


@pytest.mark.parametrize("function", [dies_early, dies_early_async])
@pytest.mark.parametrize("retries", [0, 2])
def test_a_rank_that_fails_before_its_first_sum_is_lost_at_once(function: Any, retries: int) -> None:
    @gen_cluster(client=True, nthreads=THREE)
    async def check(c: Client, s: Scheduler, *workers: Worker) -> None:
        async with RankGroup(c, 3, timeout=250) as group:
            zero, one, two = await settled(await group.map(function, retries=retries))
            assert type(one) is ArithmeticError
            assert type(zero) is type(two) is RankLost
            assert zero.ranks == two.ranks == (1,)
            assert "rank 1 (not heard of yet, task 'ranks-" in str(zero) and "has failed" in str(zero)

    check()


async def hangs_async(rank: DaskAllReduce) -> Any:
    if rank.rank == 1:
        await asyncio.sleep(300)
    return await sums_async(rank)


@gen_cluster(client=True, nthreads=THREE)
async def test_a_coroutine_that_is_cancelled_is_lost_at_once(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    async with RankGroup(c, 3, timeout=250) as group:
        zero, one, two = await group.map(hangs_async)
        await until_async(lambda: waiting_ranks(s) == 2)
        await one.cancel()
        for error in await settled([zero, two]):
            assert type(error) is RankLost and error.ranks == (1,)
            assert "was cancelled" in str(error)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_rank_is_lost_with_its_worker(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    async with RankGroup(c, 2, timeout=250) as group:
        future = c.submit(sums, group.ranks[1], workers=[b.address])
        mine = asyncio.create_task(sums_async(group.ranks[0], 2))
        assert await future == expected(2)
        await b.close()
        with pytest.raises(RankLost, match=f"rank 1 \\({b.address}.*") as caught:
            await mine
        assert caught.value.ranks == (1,)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_worker_that_leaves_while_its_rank_waits_fails_the_round(
    c: Client, s: Scheduler, a: Worker, b: Worker
) -> None:
    async with RankGroup(c, 3, timeout=250) as group:
        mine = asyncio.create_task(group.ranks[0].sum_async([1, 0]))
        theirs = c.submit(sums_async, group.ranks[2], workers=[b.address])
        await until_async(lambda: waiting_ranks(s) == 2)
        await b.close()
        with pytest.raises(RankLost, match=rf"rank 2 \({b.address}\) was lost with its worker"):
            await mine
        await theirs.cancel()


@gen_cluster(client=True, nthreads=THREE)
async def test_a_rank_of_a_client_is_lost_with_it(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with RankGroup(c, 3, timeout=250) as group:
        other = await Client(s.address, asynchronous=True)
        foreign = pickle.loads(pickle.dumps(group.ranks[2]))
        foreign._client = other
        mine = asyncio.create_task(group.ranks[0].sum_async([1]))
        theirs = asyncio.create_task(foreign.sum_async([1]))
        await until_async(lambda: waiting_ranks(s) == 2)
        await other.close()
        with pytest.raises(RankLost, match=f"rank 2 \\({other.id}\\) was lost with its client"):
            await mine
        with pytest.raises(GenerationFailed):
            await theirs


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_who_does_not_come_is_named_at_the_deadline_and_is_too_late(
    c: Client, s: Scheduler, a: Worker
) -> None:
    async with RankGroup(c, 4, name="train", timeout="200ms") as group:
        early = await asyncio.gather(
            *(rank.sum_async([1]) for rank in group.ranks[:2]), return_exceptions=True
        )
        assert [type(error) for error in early] == [RankLost] * 2
        assert early[0].ranks == early[1].ranks == (2, 3)  # type: ignore[union-attr]
        assert "rank 2 (not heard of yet) did not come within 0.2 s" in str(early[0])
        with pytest.raises(RankLost, match=r"rank 3 .* comes after that") as caught:
            await group.ranks[3].sum_async([1])
        assert caught.value.ranks == (2, 3)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_the_deadline_begins_anew_with_every_round(c: Client, s: Scheduler, a: Worker) -> None:
    async with RankGroup(c, 2, timeout=200) as group:
        plugin = plugin_of(s)
        await asyncio.gather(*(rank.sum_async([1]) for rank in group.ranks))
        (found,) = plugin.groups.values()
        assert found.deadline is None
        waiting = asyncio.create_task(group.ranks[0].sum_async([1]))
        await until_async(lambda: found.deadline is not None)
        assert found.deadline is not None
        left = found.deadline.when() - asyncio.get_running_loop().time()
        assert 100 < left <= 200
        await group.ranks[1].sum_async([1])
        assert await waiting == (2,)


# -- who is refused ----------------------------------------------------------------------------


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_second_one_of_a_rank_is_refused_and_disturbs_nobody(
    c: Client, s: Scheduler, a: Worker
) -> None:
    async with RankGroup(c, 2, timeout=20) as group:
        twin = pickle.loads(pickle.dumps(group.ranks[0]))
        first = asyncio.create_task(group.ranks[0].sum_async([1]))
        await until_async(lambda: waiting_ranks(s) == 1)
        with pytest.raises(StaleRound, match="expected one of each rank"):
            await twin.sum_async([7])
        assert await group.ranks[1].sum_async([2]) == await first == (3,)
        with pytest.raises(StaleRound, match="expected round 1, got round 0"):
            await twin.sum_async([7])


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_rank_sums_one_thing_at_a_time(c: Client, s: Scheduler, a: Worker) -> None:
    async with RankGroup(c, 2, timeout=20) as group:
        first = asyncio.create_task(group.ranks[0].sum_async([1]))
        await until_async(lambda: waiting_ranks(s) == 1)
        with pytest.raises(InputError, match="one sum at a time"):
            await group.ranks[0].sum_async([1])
        assert await group.ranks[1].sum_async([2]) == await first == (3,)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_other_values_than_those_of_the_others_are_refused(c: Client, s: Scheduler, a: Worker) -> None:
    async with RankGroup(c, 2, timeout=20) as group:
        first = asyncio.create_task(group.ranks[0].sum_async([1, 2]))
        await until_async(lambda: waiting_ranks(s) == 1)
        with pytest.raises(InputError, match="expected 2 values as of rank 0, got 1"):
            await group.ranks[1].sum_async([1])
        assert await group.ranks[1].sum_async([3, 4]) == await first == (4, 6)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_wait_that_is_cancelled_can_be_taken_up_again(c: Client, s: Scheduler, a: Worker) -> None:
    async with RankGroup(c, 2, timeout=20) as group:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(group.ranks[0].sum_async([5]), 0.1)
        (found,) = plugin_of(s).groups.values()
        first = asyncio.create_task(group.ranks[0].sum_async([1]))
        await until_async(lambda: found.rounds._given == {0: (1,)})
        assert await group.ranks[1].sum_async([2]) == await first == (3,)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_wait_that_is_cancelled_may_have_counted(c: Client, s: Scheduler, a: Worker) -> None:
    async with RankGroup(c, 2, timeout=20) as group:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(group.ranks[0].sum_async([5]), 0.1)
        assert await group.ranks[1].sum_async([2]) == (7,)
        with pytest.raises(StaleRound, match="expected round 1, got round 0"):
            await group.ranks[0].sum_async([5])


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_an_event_loop_is_not_blocked(c: Client, s: Scheduler, a: Worker) -> None:
    async with RankGroup(c, 1) as group:
        with pytest.raises(InputError, match="sum_async"):
            group.ranks[0].sum([1])

        async def blocks(rank: DaskAllReduce) -> None:
            rank.sum([1])

        with pytest.raises(InputError, match="sum_async"):
            await c.submit(blocks, group.ranks[0])


def test_without_worker_or_client_there_is_nowhere_to_sum() -> None:
    rank = DaskAllReduce("id", "name", 0, 1, 1.0)
    with pytest.raises(InputError, match="expected to be on a worker or to have a client, got neither"):
        rank.sum([1])


@pytest.mark.parametrize(
    ("size", "timeout", "said"),
    [
        (0, 1, "expected 1 to"),
        (2**17, 1, "expected 1 to"),
        (True, 1, "an integer"),
        (1.0, 1, "an integer"),
        (1, 0, "timeout of more than 0"),
        (1, "x", "expected a timeout such as"),
        (1, None, "timeout"),
        (1, float("nan"), "timeout"),
    ],
)
def test_bad_arguments_are_refused(size: Any, timeout: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        RankGroup(None, size, timeout=timeout)  # type: ignore[arg-type]


# -- tasks that are tried again ----------------------------------------------------------------


def hold() -> None:
    Event("held").set()
    Event("go on").wait()


class FailsOnce:
    """Fails at its first attempt, before or after its first sum."""

    attempts: dict[str, int] = {}  # noqa: RUF012  # of the process

    def __init__(self, name: str, after: bool) -> None:
        self.name = name
        self.after = after

    def __call__(self, rank: DaskAllReduce) -> Any:
        first = rank.rank == 0 and self.attempts.setdefault(self.name, 0) == 0
        done = sums(rank) if self.after or not first else []
        if first:
            self.attempts[self.name] = 1
            raise ArithmeticError("once")
        return done + sums(rank)


@gen_cluster(client=True, nthreads=THREE)
async def test_a_task_that_is_tried_again_before_its_first_sum_is_one_rank(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    async with RankGroup(c, 2, timeout=60) as group:
        futures = c.map(FailsOnce("before", False), group.ranks, retries=2)
        assert await c.gather(futures) == [[(1, 0), (1, 0)]] * 2


@gen_cluster(client=True, nthreads=THREE)
async def test_a_task_that_is_tried_again_later_ends_the_group(
    c: Client, s: Scheduler, *workers: Worker
) -> None:
    async with RankGroup(c, 2, timeout=250) as group:
        futures = c.map(FailsOnce("after", True), group.ranks, retries=2)
        again, other = await settled(futures)
        assert type(other) is RankLost and other.ranks == (0,)
        assert "begins anew" in str(other)
        assert isinstance(again, GenerationFailed)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_rank_that_begins_anew_in_the_open_round_counts_once(
    c: Client, s: Scheduler, a: Worker, b: Worker
) -> None:
    async with RankGroup(c, 2, timeout=60) as group:
        task = c.submit(hold, key="rank-0", workers=[a.address])
        await Event("held").wait()
        message = {"group": group._id, "rank": 0, "number": 0, "place": a.address, "key": "rank-0"}
        first = asyncio.create_task(a.scheduler.sdc_ranks_sum(**message, token="1", values=(5,)))
        await until_async(lambda: waiting_ranks(s) == 1)
        # As when its connection to the scheduler broke: the task is run again while the sum is open.
        s.transitions({"rank-0": "released"}, stimulus_id="test")
        second = asyncio.create_task(a.scheduler.sdc_ranks_sum(**message, token="2", values=(7,)))
        (found,) = plugin_of(s).groups.values()
        await until_async(lambda: found.rounds._given == {0: (7,)})
        assert await group.ranks[1].sum_async([1]) == (8,)
        assert (await first)["values"] == (await second)["values"] == (8,)
        await Event("go on").set()
        await task


# -- groups that end ---------------------------------------------------------------------------


@gen_cluster(client=True, nthreads=THREE)
async def test_a_group_ends_with_its_client(c: Client, s: Scheduler, *workers: Worker) -> None:
    owner = await Client(s.address, asynchronous=True)
    group = await RankGroup(owner, 2, name="train", timeout=250)
    foreign = pickle.loads(pickle.dumps(group.ranks[0]))
    foreign._client = c
    waiting = asyncio.create_task(foreign.sum_async([1]))
    await until_async(lambda: waiting_ranks(s) == 1)
    await owner.close()
    with pytest.raises(ClosedError, match="train: expected an open group, its client has left"):
        await waiting
    with pytest.raises(ClosedError, match="it was closed"):
        await foreign.sum_async([1])
    with pytest.raises(ClosedError, match="expected a running client"):
        await group.ranks[1].sum_async([1])
    assert nothing_is_kept(s)
    await group.close()


@gen_cluster(client=True, nthreads=THREE)
async def test_a_group_that_is_closed_tells_who_waits(c: Client, s: Scheduler, *workers: Worker) -> None:
    group = await RankGroup(c, 2, timeout=250)
    waiting = c.submit(sums, group.ranks[0])
    await until_async(lambda: waiting_ranks(s) == 1)
    await group.close()
    await group.close()
    with pytest.raises(ClosedError, match="its client closed it"):
        await waiting
    assert nothing_is_kept(s)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_restart_tells_who_waits(c: Client, s: Scheduler, a: Worker) -> None:
    group = await RankGroup(c, 2, timeout=250)
    mine = asyncio.create_task(group.ranks[0].sum_async([1]))
    await until_async(lambda: waiting_ranks(s) == 1)
    plugin_of(s).restart(s)  # what the scheduler calls
    with pytest.raises(ClosedError, match="the cluster was restarted"):
        await mine
    assert nothing_is_kept(s)


@pytest.mark.slow
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, Worker=Nanny, timeout=120)
async def test_no_group_outlives_a_restart(c: Client, s: Scheduler, a: Nanny, b: Nanny) -> None:
    group = await RankGroup(c, 3, timeout=250)
    theirs = c.submit(sums, group.ranks[0])
    mine = asyncio.create_task(group.ranks[1].sum_async([1, 0]))
    await until_async(lambda: waiting_ranks(s) == 2)
    await c.restart()
    with pytest.raises((ClosedError, RankLost)):
        await mine
    assert theirs.cancelled()
    assert nothing_is_kept(s)
    async with RankGroup(c, 2) as again:
        assert await c.gather(c.map(sums, again.ranks)) == [expected(2)] * 2


@gen_cluster(client=True, nthreads=[])
async def test_a_closed_scheduler_keeps_nobody_waiting(c: Client, s: Scheduler) -> None:
    group = await RankGroup(c, 2, timeout=250)
    mine = asyncio.create_task(group.ranks[0].sum_async([1]))
    await until_async(lambda: waiting_ranks(s) == 1)
    await s.close()
    with pytest.raises((ClosedError, RankLost)):
        await mine


@gen_cluster(client=True, nthreads=[])
async def test_a_scheduler_without_the_plugin_says_so(c: Client, s: Scheduler) -> None:
    group = await RankGroup(c, 1)
    del s.handlers["sdc_ranks_sum"]
    with pytest.raises(ClosedError, match="the scheduler has none"):
        await group.ranks[0].sum_async([1])


@gen_cluster(client=True, nthreads=[])
async def test_a_silent_scheduler_is_given_up(c: Client, s: Scheduler) -> None:
    async def say_nothing(**message: Any) -> None:
        await asyncio.get_running_loop().create_future()

    group = await RankGroup(c, 2, name="train", timeout=0.1)
    s.handlers["sdc_ranks_sum"] = say_nothing
    with (
        mock.patch("dask_sdc.recovery.cluster.group._GRACE", 0.1),
        pytest.raises(RankLost, match=r"train, round 0: rank 0 \(Client-.*not reach the scheduler") as caught,
    ):
        await group.ranks[0].sum_async([1])
    assert caught.value.ranks == (0,)


# -- synchronous clients -----------------------------------------------------------------------


def test_a_synchronous_client_and_its_threads(cluster4: Client) -> None:
    with RankGroup(cluster4, 4, timeout=60) as group:
        futures = cluster4.map(sums, group.ranks[:2], rounds=2)
        with ThreadPoolExecutor(2) as threads:
            mine = threads.submit(sums, group.ranks[2], 2)
            other = threads.submit(asyncio.run, sums_async(group.ranks[3], 2))
            assert mine.result() == other.result() == expected(4, 2)
        assert cluster4.gather(futures) == [expected(4, 2)] * 2
    with pytest.raises(ClosedError):
        group.ranks[0].sum([1])


def test_threads_of_tasks_sum_too(cluster4: Client) -> None:
    with RankGroup(cluster4, 3, timeout=60) as group:
        futures = cluster4.map(lone_thread, group.ranks)
        assert cluster4.gather(futures) == [expected(3)] * 3


def test_workers_in_the_clients_process() -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        RankGroup(client, 4, timeout=60) as group,
    ):
        assert client.gather(client.map(sums, group.ranks, rounds=3)) == [expected(4, 3)] * 4


def test_a_closed_client_opens_no_group(shared_cluster4: str) -> None:
    client = Client(shared_cluster4, set_as_default=False)
    client.close()
    with pytest.raises((ClosedError, RuntimeError)):
        RankGroup(client, 2)
