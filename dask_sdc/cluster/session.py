"""The driver's hands on a cluster: submits batches, hears news, gives orders to the plugins."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import cloudpickle
import dask
from dask.utils import parse_bytes
from distributed import Client, Future, Worker, WorkerPlugin
from distributed.comm.addressing import get_address_host
from distributed.worker import get_data_from_worker

from dask_sdc.cluster.scheduler_plugin import SDCSchedulerPlugin
from dask_sdc.cluster.worker_plugin import SDCWorkerPlugin, identify, run_batch
from dask_sdc.evidence.codec import Limits, encode
from dask_sdc.evidence.seal import SealedBatch, open_batch
from dask_sdc.exceptions import (
    ClosedError,
    CodecError,
    EncodeError,
    InputError,
    LimitExceeded,
    NoDomainError,
)
from dask_sdc.graph.audited import Planned
from dask_sdc.graph.execute import Assignment, BatchContext, Blob, ShardExecutor, accepted_columns
from dask_sdc.graph.layers import BatchTask, batch_graph
from dask_sdc.graph.sources import Source
from dask_sdc.policy.domains import Identity, choose_kind, restrictions
from dask_sdc.policy.health import DeviceHealth
from dask_sdc.policy.messages import (
    Dispatch,
    DomainJoined,
    DomainLost,
    Event,
    Failed,
    Landed,
    Place,
)
from dask_sdc.policy.sampling import CoverageSampler
from dask_sdc.statistics.base import ShardInfo, Statistic

T = TypeVar("T")

logger = logging.getLogger("dask_sdc.session")

#: Seconds between looks at a client that connects, or workers that register.
_LOOK = 0.1

#: Seconds that workers are waited for which the scheduler has, but which do not answer or are not set up yet.
_SETTLE = 30.0

#: Bytes of a frame that are decoded in less time than a hop to another thread and back takes.
_SMALL = 2**20


@dataclass(frozen=True)
class Work:
    """What the batches of one round have in common.

    Parameters
    ----------
    round : int
        Number of the round.
    statistic : Blob
        The pickled statistic with its model.
    source : Source
        Where shards come from.
    info : ShardInfo
        Sample shape, dtypes and seed.
    columns : frozenset of str
        Which of weights and target the data have.
    kind : bytes
        Same class, sample shape and dtypes: same compiled kernels, and much the same cost.
    """

    round: int
    statistic: Blob
    source: Source
    info: ShardInfo
    columns: frozenset[str]
    kind: bytes

    @classmethod
    def of(cls, number: int, statistic: Statistic, source: Source, seed: int) -> Work:
        """Check that a statistic takes what the data have, and pickle it once."""
        there = {"weights": source.weighted, "target": source.target_shape is not None}
        columns = frozenset(name for name, given in there.items() if given)
        refused = columns - accepted_columns(statistic)
        if refused:
            raise InputError(
                f"{type(statistic).__name__}.update takes no {' and no '.join(sorted(refused))}, "
                f"but the data come with {' and '.join(sorted(refused))}"
            )
        info = ShardInfo(source.shape, source.dtype, 0, seed, source.target_shape)
        try:
            # Shapes, dtypes and types that do not fit are refused before any work starts.
            encode(statistic.init(info))
        except EncodeError as error:
            raise InputError(f"{type(statistic).__name__}.init returned a state that {error}") from error
        try:
            blob = Blob.of(statistic)
        except Exception as error:
            raise InputError(
                f"expected a statistic that can be pickled, got {type(statistic).__name__}: {error}"
            ) from error
        kind = repr((type(statistic), info.shape, info.dtype, info.target_shape, sorted(columns)))
        return cls(number, blob, source, info, columns, kind.encode())


@dataclass
class _Member:
    domain: str
    lane: int
    nthreads: int
    fingerprint: str


class Session:
    """A client's connection to the plugins of one cluster.

    Parameters
    ----------
    client : Client
        The user's client.
    kind : str
        "auto", "worker", "host", "gpu" or "custom".
    custom : callable, optional
        ``f(worker) -> str`` for kind "custom".
    lanes : int
        Number of lanes.
    pin_cores : bool
        Pin the workers of a host to disjoint cores.
    timeout : float
        Seconds after which a worker that compiles is not waited for any longer.
    """

    def __init__(
        self,
        client: Client,
        kind: str,
        custom: Callable[[Worker], str] | None,
        lanes: int,
        pin_cores: bool,
        timeout: float,
    ) -> None:
        self.client = client
        self.kind = kind
        self.note = ""
        self.quarantined: dict[str, str] = {}
        # How GPUs are, by domain, and what has become worse of them; whoever wants is told of that.
        self.health: dict[str, list[DeviceHealth]] = {}
        self.ailing: dict[str, list[str]] = {}
        self.on_ailing: Callable[[str, Sequence[str]], None] | None = None
        self.limits = _limits()
        self._custom = None if custom is None else cloudpickle.dumps(custom)
        self._wanted_lanes = lanes
        self._pin_cores = pin_cores
        self._timeout = timeout
        self.topic = f"sdc-{uuid.uuid4().hex[:12]}"
        self._members: dict[str, _Member] = {}
        self._lanes: dict[str, int] = {}
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._waiting: dict[int, tuple[Future[bytes], asyncio.Task[None]]] = {}
        self._warmed: set[tuple[str, bytes]] = set()
        # Workers that this client has spoken to without the scheduler in between.
        self._reached: set[str] = set()
        # Seconds per row, by kind of work.
        self._costs: dict[bytes, float] = {}
        # Whether the scheduler knows this client, or was asked to; and whether it is to forget it for good.
        self._joined = self._left = False
        self._asking = asyncio.Lock()
        # The stream from the scheduler on which all news have come since it was last asked.
        self._stream: Any = None
        self._news: set[asyncio.Task[None]] = set()
        self._work: Work | None = None
        self._serial = 0
        # Workers that were waited for and did not register.
        self._missing = 0

    # -- attaching ---------------------------------------------------------------------

    @property
    def _scheduler(self) -> Any:
        """RPC to the scheduler; None in the client before it is connected."""
        return self.client.scheduler

    async def attach(self) -> None:
        """Register the plugins where they are missing and learn who is there.

        Raises
        ------
        ClosedError
            If the client is closed.
        NoDomainError
            If the cluster has no workers.
        InputError
            If the cluster already audits with another kind of failure domain.
        """
        await _connected(self.client)
        identities = await self._identities()
        chosen, note = choose_kind(identities) if self.kind == "auto" else (self.kind, "")
        await self.client.register_plugin(SDCSchedulerPlugin(chosen, self._wanted_lanes))
        self._expect_here()
        self.client.subscribe_topic(self.topic, self._hear)
        self._joined = True
        state = await self._state()
        if self.kind not in ("auto", state["kind"]):
            await self._leave()
            raise InputError(
                f"expected failure domains of kind {state['kind']!r}, which this cluster "
                f"already audits with, got domain={self.kind!r}"
            )
        self.note = note if state["kind"] == chosen else f"domains are {state['kind']}s, as set up before"
        await register(self.client, SDCWorkerPlugin(self._custom, self._pin_cores))
        self._learn(await self._state())

    async def _state(self) -> Mapping[str, Any]:
        """Return the state of the cluster, whose scheduler tells this client the news from then on.

        Raises
        ------
        ClosedError
            After `detach`: the scheduler would never hear of the end.
        """

        async def ask() -> Mapping[str, Any]:
            async with self._asking:
                self._expect_here()
                state: Mapping[str, Any] = await self._scheduler.sdc_attach(
                    topic=self.topic, client=self.client.id
                )
                return state

        # Whoever does not wait for the answer any more has asked all the same.
        asked = asyncio.ensure_future(ask())
        asked.add_done_callback(noticed)
        return await asyncio.shield(asked)

    def _expect_here(self) -> None:
        if self._left:
            raise ClosedError("expected an open session, it was closed meanwhile")

    async def _identities(self) -> list[Identity]:
        def ask(dask_worker: Worker, custom: bytes | None) -> Identity:
            return identify(dask_worker, custom)

        found = await _answers(self.client, ask, custom=self._custom)
        if not found:
            raise NoDomainError("expected a cluster with workers, got one without any")
        return found

    def _learn(self, state: Mapping[str, Any]) -> None:
        self.quarantined = dict(state["quarantined"])
        self._members = {
            w["address"]: _Member(w["domain"], w["lane"], w["nthreads"], w["fingerprint"])
            for w in state["workers"]
        }
        self._lanes.update({m.domain: m.lane for m in self._members.values()})
        for domain, devices in state["health"].items():
            self._note_health(domain, devices, state["ailing"].get(domain, ()))

    def _note_health(self, domain: str, devices: Iterable[Mapping[str, Any]], worse: Sequence[str]) -> None:
        self.health[domain] = [DeviceHealth.from_dict(device) for device in devices]
        known = self.ailing.get(domain, [])
        if new := [what for what in worse if what not in known]:
            self.ailing[domain] = [*known, *new]
            if self.on_ailing is not None:
                self.on_ailing(domain, new)

    async def refresh_members(self) -> None:
        """Know who is there; attaches anew after the scheduler lost its plugins."""
        stream = self.client.scheduler_comm
        if stream is not None and stream is self._stream and not stream.closed():
            return  # the same scheduler, and all that happened since was heard
        try:
            state = await self._settled()
        except Exception:
            await self._attach_anew()
        else:
            self._learn(state)
            self._missing = min(self._missing, state["coming"])
            self._stream = stream

    async def _settled(self) -> Mapping[str, Any]:
        """Return the state of the cluster; workers that have just come get a moment to register."""
        deadline = time.monotonic() + _SETTLE
        while True:
            state = await self._state()
            if state["workers"] and state["coming"] <= self._missing:
                return state
            if time.monotonic() > deadline:
                self._missing = state["coming"]  # and no later round waits for them
                return state
            await asyncio.sleep(_LOOK)

    async def _attach_anew(self) -> None:
        """Attach to a scheduler that knows nothing, and tell it who is in quarantine."""
        quarantined = self.quarantined
        self._warmed.clear()
        await self.attach()
        for domain, why in quarantined.items():
            if domain not in self.quarantined:
                await self.quarantine(domain, why)
        self._learn(await self._scheduler.sdc_snapshot())

    async def detach(self) -> None:
        """Cancel what is under way and stop listening, for good."""
        self.cancel_all()
        self._left = True
        await self._leave()

    async def _leave(self) -> None:
        async with self._asking:
            if self._joined and self.client.status == "running":
                self._joined = False
                with contextlib.suppress(OSError):
                    self.client.unsubscribe_topic(self.topic)
                    await self._scheduler.sdc_detach(topic=self.topic)

    def places(self) -> list[Place]:
        """Return the live domains."""
        return [self._place(name) for name in dict.fromkeys(m.domain for m in self._members.values())]

    def _place(self, domain: str) -> Place:
        members = [m for m in self._members.values() if m.domain == domain]
        prints = sorted({m.fingerprint for m in members})
        # Workers of one domain that differ from one another promise no equal bits.
        fingerprint = prints[0] if len(prints) == 1 else f"mixed:{domain}"
        return Place(domain, members[0].lane, sum(m.nthreads for m in members), fingerprint)

    def locate(self, address: str) -> str | None:
        """Return the domain of a worker."""
        member = self._members.get(address)
        return None if member is None else member.domain

    def fingerprint(self, address: str) -> str | None:
        """Return the digest of a worker's environment."""
        member = self._members.get(address)
        return None if member is None else member.fingerprint

    # -- news --------------------------------------------------------------------------

    def _hear(self, event: tuple[float, Mapping[str, Any]]) -> None:
        news = event[1]
        match news["op"]:
            case "coming":
                self._stream = None  # whoever starts a round asks again, and waits for it
            case "joined":
                self._members[news["worker"]] = _Member(
                    news["domain"], news["lane"], news["nthreads"], news["fingerprint"]
                )
                self._lanes[news["domain"]] = news["lane"]
                task = asyncio.ensure_future(self._welcome(news["worker"]))
                self._news.add(task)
                task.add_done_callback(self._news.discard)
            case "left":
                self._stream = None  # whoever takes its place is waited for
                self._members.pop(news["worker"], None)
                if news["gone"]:
                    now = asyncio.get_running_loop().time()
                    self._events.put_nowait(DomainLost(news["domain"], f"worker {news['worker']} left", now))
            case "quarantined":
                self.quarantined[news["domain"]] = news["reason"]
            case "released":
                self.quarantined.pop(news["domain"], None)
                self.ailing.pop(news["domain"], None)
            case "health":
                self._note_health(news["domain"], news["devices"], news["worse"])

    async def _welcome(self, address: str) -> None:
        """Let a newcomer compile before it is given shards."""
        if self._work is not None:
            await self._warm_worker(address, self._work)
        member = self._members.get(address)
        if member is not None:
            now = asyncio.get_running_loop().time()
            self._events.put_nowait(DomainJoined(self._place(member.domain), now))

    async def next_events(self, timeout: float) -> list[Event]:
        """Return what happened, waiting up to ``timeout`` seconds for the first."""
        events: list[Event | None] = []
        with contextlib.suppress(asyncio.TimeoutError):
            events.append(await asyncio.wait_for(self._events.get(), timeout))
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return [event for event in events if event is not None]

    def tell(self, event: Event) -> None:
        """Add an event of the driver's own."""
        self._events.put_nowait(event)

    # -- work --------------------------------------------------------------------------

    def expected_cost(self, work: Work) -> float | None:
        """Return the seconds that a shard of this kind took lately, None if there was none."""
        cost = self._costs.get(work.kind)
        return None if cost is None else cost * _mean_rows(work)

    def learn_cost(self, work: Work, seconds: float | None) -> None:
        """Note the seconds that a shard took."""
        if seconds is not None:
            self._costs[work.kind] = seconds / _mean_rows(work)

    async def prepare(self, work: Work) -> None:
        """Have every worker compile what this work needs; not counted against deadlines."""
        self._work = work
        while not self._events.empty():
            self._events.get_nowait()
        # One worker of each host compiles; the others find its result in the cache on disk.
        hosts = {get_address_host(address): address for address in self._members}
        for addresses in (hosts.values(), self.addresses()):
            await asyncio.gather(*(self._warm_worker(address, work) for address in addresses))
        # The driver combines.
        if ("driver", work.kind) not in self._warmed:
            local = ShardExecutor("driver", "", "")
            await asyncio.to_thread(local.warm, work.statistic, work.info, work.columns)
            self._warmed.add(("driver", work.kind))

    async def _warm_worker(self, address: str, work: Work) -> None:
        if (address, work.kind) in self._warmed:
            return
        try:
            comm = self.client.rpc(address)
            compiled = comm.sdc_warm(
                blob=work.statistic.data,
                digest=work.statistic.digest,
                info=cloudpickle.dumps(work.info),
                columns=sorted(work.columns),
            )
            await asyncio.wait_for(compiled, self._timeout)
        except OSError:
            # It left, and whoever takes its place is warmed in turn; or it is silent, as the round will find.
            return
        self._warmed.add((address, work.kind))
        self._reached.add(address)

    def dispatch(self, orders: Sequence[Dispatch], work: Work) -> None:
        """Submit batches as one graph and watch each of them."""
        expect_open(self.client)
        tasks = {order.batch_id: self._task(order, work) for order in orders}
        self._serial += 1
        graph = batch_graph(tasks.values(), run_batch, f"{self.topic}-{work.round}-{self._serial}")
        keys = [task.key for task in tasks.values()]
        futures = self.client.get(graph, keys, sync=False)
        for order, future in zip(orders, futures, strict=True):
            watcher = asyncio.ensure_future(self._collect(order, future, work))
            self._waiting[order.batch_id] = (future, watcher)

    def _task(self, order: Dispatch, work: Work) -> BatchTask:
        assignment = Assignment(
            BatchContext(work.round, order.role, order.attempt, order.shard_ids),
            order.domain,
            order.apart_from,
            work.source.batch(order.shard_ids),
            work.info,
        )
        return BatchTask(
            f"sdc-{order.role}-{self.topic[4:]}-{work.round}-{order.batch_id}-{order.attempt}",
            order.role,
            work.statistic,
            Blob.of(assignment),
            work.source.dependencies(order.shard_ids),
            restrictions(order.domain, [self._lanes[name] for name in order.apart_from]),
        )

    async def _collect(self, order: Dispatch, future: Future[bytes], work: Work) -> None:
        clock = asyncio.get_running_loop().time
        try:
            frame = await self.fetch(future, order.domain)
            opened = partial(open_batch, frame, self.limits)
            result = opened() if len(frame) <= _SMALL else await asyncio.to_thread(opened)
        except asyncio.CancelledError as error:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            self._events.put_nowait(Failed(order.batch_id, f"cancelled: {error}", clock()))
        except LimitExceeded as error:
            # Too large is not damaged: nobody is accused of it.
            self._events.put_nowait(Failed(order.batch_id, str(error), clock()))
        except CodecError:
            # Nothing of it can be believed, not even who sent it: no voice, as if garbled.
            unheard = SealedBatch(work.round, order.role, order.attempt, order.domain, "", "", b"", "garbled")
            self._events.put_nowait(Landed(order.batch_id, unheard, clock()))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self._events.put_nowait(Failed(order.batch_id, why, clock()))
        else:
            self._events.put_nowait(Landed(order.batch_id, result, clock()))
        finally:
            self._waiting.pop(order.batch_id, None)
            future.release()

    async def fetch(self, future: Future[bytes], domain: str) -> bytes:
        """Return a result, from its worker itself where that can be reached: half of the hops."""
        await future.exception()
        at = [a for a, member in self._members.items() if member.domain == domain and a in self._reached]
        if future.status == "finished" and len(at) == 1:
            with contextlib.suppress(OSError):
                # Shielded: given up in the middle, it would have the worker log a stack trace.
                answer: Any = await asyncio.shield(
                    get_data_from_worker(self.client.rpc, [future.key], at[0], who=self.client.id)
                )
                if future.key in answer.get("data", ()):
                    return cast(bytes, answer["data"][future.key])
        # Shielded: a client gathers results together, and one that is cancelled takes all along.
        gathered = asyncio.ensure_future(_result(future))
        gathered.add_done_callback(noticed)
        return await asyncio.shield(gathered)

    def cancel(self, batch_ids: Iterable[int]) -> None:
        """Forget batches, whatever they are doing."""
        for batch_id in list(batch_ids):
            future, watcher = self._waiting.pop(batch_id, (None, None))
            if watcher is not None and future is not None:
                watcher.cancel()
                future.release()

    def cancel_all(self) -> None:
        """Forget every batch."""
        self.cancel(list(self._waiting))

    def plan(self, shards: int, sampler: CoverageSampler) -> list[Planned]:
        """Deal shards out to domains, two batches a thread, with the audits that fall due."""
        places = self.places()
        shares = [place for place in places for _ in range(2 * place.slots)]
        planned = []
        for place, shard_ids in zip(shares, _deal(shards, len(shares)), strict=True):
            audited = sampler.draw(place.domain, shard_ids) if len(places) > 1 and shard_ids else ()
            if shard_ids:
                primary, audit = restrictions(place.domain), restrictions(None, [place.lane])
                planned.append(Planned(shard_ids, primary, audited, audit))
        return planned

    # -- orders to the plugins ---------------------------------------------------------

    async def evict(self, domain: str, why: str, worker: str = "") -> None:
        """Give a silent domain up, or one worker of it; what is busy or not meant joins again as it is."""
        if await self._scheduler.sdc_evict(domain=domain, reason=why, worker=worker) and not worker:
            return
        self._members.pop(worker, None)
        if any(member.domain == domain for member in self._members.values()):
            now = asyncio.get_running_loop().time()
            self._events.put_nowait(DomainJoined(self._place(domain), now))

    async def quarantine(self, domain: str, why: str) -> str:
        """Quarantine a domain; return why it failed, or an empty string."""
        try:
            await self._scheduler.sdc_quarantine(domain=domain, reason=why)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        self.quarantined[domain] = why
        return ""

    async def refresh(self, keys: Sequence[Any]) -> int:
        """Have Dask compute some results again; return of how many it can."""
        return int(await self._scheduler.sdc_refresh(keys=list(keys)))

    async def release(self, domain: str) -> None:
        """Lift a quarantine; held workers of the domain join again."""
        await self._scheduler.sdc_release(domain=domain)
        self.quarantined.pop(domain, None)

    async def held(self, domain: str) -> list[str]:
        """Return the connected workers of a quarantined domain."""
        return list(await self._scheduler.sdc_held(domain=domain))

    async def who_has(self, keys: Iterable[Any]) -> dict[Any, list[str]]:
        """Return the workers that hold some results."""
        held: dict[Any, list[str]] = await self._scheduler.who_has(keys=list(keys))
        return held

    def addresses(self) -> list[str]:
        """Return the workers that may be given shards."""
        return list(self._members)

    async def call(self, address: str, work: Work) -> SealedBatch | None:
        """Compute shard 0 of some work on one worker, past the scheduler; None if it cannot."""
        assignment = Assignment(
            BatchContext(work.round, "witness", 0, (0,)), None, (), work.source.batch((0,)), work.info
        )
        batch = Blob.of(assignment)
        try:
            frame = await self.client.rpc(address).sdc_run(
                statistic=work.statistic.data,
                statistic_digest=work.statistic.digest,
                batch=batch.data,
                batch_digest=batch.digest,
            )
            return open_batch(frame, self.limits)
        except (OSError, CodecError):
            return None


async def _result(future: Future[bytes]) -> bytes:
    return cast(bytes, await future)


def noticed(work: asyncio.Future[Any]) -> None:
    """Look at the exception of what perhaps nobody waits for any more, so that it is not logged."""
    if not work.cancelled():
        work.exception()


def expect_open(client: Client, cause: BaseException | None = None, until: str = "") -> None:
    """Refuse a client that is closed, or is being closed."""
    if client.status in ("closing", "closed"):
        raise ClosedError(f"expected a running client{until}, got one that is {client.status}") from cause


async def _connected(client: Client) -> None:
    """Wait for a client that has lost its scheduler: it finds it again, or gives up by itself."""
    while client.status == "connecting":
        await asyncio.sleep(_LOOK)
    if client.status != "running":
        raise ClosedError(f"expected a running client, got one that is {client.status}")


async def _answers(client: Client, ask: Callable[..., T], **arguments: Any) -> list[T]:
    """Return what a function returns on all workers that answer; some may be leaving, others frozen."""
    try:
        answers = await asyncio.wait_for(client.run(ask, on_error="return", **arguments), _SETTLE)
    except TimeoutError:
        # Each for itself, as one that is silent takes the answers of all along.
        scheduler: Any = client.scheduler
        workers = (await scheduler.identity(n_workers=-1))["workers"]
        asked = [
            asyncio.wait_for(client.run(ask, workers=[one], on_error="return", **arguments), _SETTLE)
            for one in workers
        ]
        parts = await asyncio.gather(*asked, return_exceptions=True)
        answers = {k: v for part in parts if isinstance(part, dict) for k, v in part.items()}
    raised = [one for one in answers.values() if isinstance(one, Exception) and not isinstance(one, OSError)]
    if raised:
        raise raised[0]
    return [answer for answer in answers.values() if not isinstance(answer, OSError)]


async def register(client: Client, plugin: WorkerPlugin) -> None:
    """Register a plugin on all workers that answer; some may be leaving, others frozen.

    Raises
    ------
    ClosedError
        If the client is closed.
    """
    deadline = time.monotonic() + _SETTLE
    while time.monotonic() < deadline:
        try:
            # The scheduler keeps it for whoever comes, and hands it to all others at once.
            return await asyncio.wait_for(client.register_plugin(plugin), _SETTLE)
        except OSError as error:  # a TimeoutError is one
            await _connected(client)
            logger.warning("Not every worker has taken %s: %s", type(plugin).__name__, error)
            await asyncio.sleep(_LOOK)  # until the scheduler has noticed that one has left


def _mean_rows(work: Work) -> float:
    return max(1.0, sum(work.source.rows) / work.source.n_shards)


def _limits() -> Limits:
    """Return the decoder's bounds from ``sdc.codec.limits``."""
    configured = dask.config.get("sdc.codec.limits")
    return Limits(
        max_bytes=parse_bytes(configured["total"]),
        max_depth=configured["depth"],
        max_items=configured["items"],
        max_array_bytes=parse_bytes(configured["array"]),
    )


def _deal(shards: int, shares: int) -> list[tuple[int, ...]]:
    """Cut 0..shards-1 into contiguous runs that differ by one at most."""
    ends = [shards * i // shares for i in range(shares + 1)]
    return [tuple(range(a, b)) for a, b in itertools.pairwise(ends)]
