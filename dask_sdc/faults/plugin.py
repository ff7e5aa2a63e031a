"""Delivers a `FaultPlan` on the workers of a Dask cluster.

`FaultInjector` is a worker plugin of its own. It replaces the executor of dask_sdc's worker
plugin by a `FaultyExecutor`, whichever of the two plugins is set up first, and puts the
original back on teardown; production code has no branch for faults. How often a fault was
delivered is counted on the scheduler, so that ``times`` holds for the whole cluster and
outlives a worker that the fault kills.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from distributed import Client, Scheduler, Worker, WorkerPlugin
from distributed.core import clean_exception
from distributed.protocol.pickle import dumps
from distributed.utils import sync

from dask_sdc.cluster.worker_plugin import NAME, WRAPPERS
from dask_sdc.evidence.codec import digest
from dask_sdc.evidence.seal import ROLES, SealedStatistic
from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.faults.plan import (
    ACTION_KINDS,
    BIT_KINDS,
    VALUE_KINDS,
    Delivery,
    Fault,
    FaultContext,
    FaultPlan,
    Tally,
    corrupt_bytes,
    corrupt_state,
)
from dask_sdc.graph.block import Block
from dask_sdc.graph.execute import Assignment, BatchContext, ShardContext, ShardExecutor
from dask_sdc.statistics.base import ShardInfo, State, Statistic

if TYPE_CHECKING:
    from dask_sdc.graph.sources import Reader

#: ``hook(worker, shard_id, role, payload) -> payload``, see `arm_corruption`.
CorruptionHook: TypeAlias = Callable[[str, int, str, bytes], bytes]

__all__ = [
    "CorruptionHook",
    "FaultInjector",
    "FaultyExecutor",
    "arm_corruption",
    "clear_corruption",
    "delivered",
]

Value = TypeVar("Value")

_HOOK_NAME = "dask_sdc_corruption"
_SIGNALS = {"killed": "SIGKILL", "frozen": "SIGSTOP"}

#: Says which process this is, also where process ids repeat (containers).
_PROCESS = uuid.uuid4().hex

_TALLIES: WeakKeyDictionary[Scheduler, dict[str, Tally]] = WeakKeyDictionary()


class FaultInjector(WorkerPlugin):
    """Worker plugin that delivers a plan; ``client.register_plugin(FaultInjector(plan))``.

    It stays until ``client.unregister_worker_plugin(injector.name)``, on workers that join
    later as well. Registering another one of the same name replaces it.

    Parameters
    ----------
    plan : FaultPlan
        What to deliver.
    hook : callable, optional
        Called with (worker address, shard id, role, payload) for every sealed payload;
        returns the payload to use, which is sealed anew.
    name : str
        Name of the plugin.

    Attributes
    ----------
    run : str
        Names the plan's count of deliveries on the scheduler.
    delivered : list of Delivery
        What hit the worker on which this copy of the plugin is set up, in order.

    Raises
    ------
    InputError
        On registration, if the plan kills or freezes workers and a worker shares its process
        with the scheduler or the client.
    """

    def __init__(
        self,
        plan: FaultPlan,
        hook: CorruptionHook | None = None,
        name: str = "dask_sdc_faults",
    ) -> None:
        if not isinstance(plan, FaultPlan):
            raise InputTypeError(f"expected a FaultPlan, got a {type(plan).__name__}")
        if hook is not None and not callable(hook):
            raise InputTypeError(f"expected a callable hook or None, got {hook!r}")
        self.plan = plan
        self.hook = hook
        self.name = name
        self.run = uuid.uuid4().hex
        self.delivered: list[Delivery] = []
        self._origin = (_PROCESS, os.getpid())
        self._worker: Worker | None = None

    def setup(self, worker: Worker) -> None:
        """Arm the plan on a worker, now or as soon as dask_sdc's plugin is there."""
        self._refuse_suicide(worker)
        self._worker = worker
        wrappers = vars(worker).setdefault(WRAPPERS, [])
        wrappers.append(self.wrap)
        self.install(worker)

    def install(self, worker: Worker) -> None:
        """Wrap the executor of dask_sdc's plugin, if it has one by now."""
        plugin = worker.plugins.get(NAME)
        executor = getattr(plugin, "executor", None)
        if executor is not None:
            vars(plugin)["executor"] = self.wrap(executor)

    def teardown(self, worker: Worker) -> None:
        """Disarm the plan; the last one to go puts the original executor back."""
        wrappers = vars(worker).get(WRAPPERS, [])
        if self.wrap in wrappers:
            wrappers.remove(self.wrap)
        plugin = worker.plugins.get(NAME)
        executor = getattr(plugin, "executor", None)
        if isinstance(executor, FaultyExecutor):
            executor.armed = [armed for armed in executor.armed if armed is not self]
            if not executor.armed:
                vars(plugin)["executor"] = executor.original

    def wrap(self, executor: ShardExecutor) -> ShardExecutor:
        """Return an executor that delivers this plan too."""
        if isinstance(executor, FaultyExecutor):
            others = [armed for armed in executor.armed if armed is not self]
            executor.armed = [*others, self]
            return executor
        return FaultyExecutor.around(executor, [self])

    def due(self, context: FaultContext, kinds: frozenset[str]) -> Iterator[tuple[int, Fault]]:
        """Yield the faults of these kinds that are meant for a step."""
        for index in self.plan.indices(context):
            if self.plan.faults[index].kind in kinds:
                yield index, self.plan.faults[index]

    def claim(self, index: int, kind: str, times: int | None, context: FaultContext) -> bool:
        """Count one delivery on the scheduler; False if the fault has had its times."""
        delivery = Delivery(index, kind, context)
        worker = self._worker
        if worker is None:
            raise InputError(f"expected {self.name!r} to be set up on a worker, it is not")
        granted: bool = sync(worker.loop, _claim_remotely, worker, self.run, delivery, times)
        if granted:
            self.delivered.append(delivery)
        return granted

    def name_of_worker(self) -> str:
        """Return the name that the worker was given."""
        return str(self._worker.name) if self._worker is not None else ""

    def _refuse_suicide(self, worker: Worker) -> None:
        deadly = sorted({fault.kind for fault in self.plan.faults} & _SIGNALS.keys())
        shared = self._origin == (_PROCESS, os.getpid()) or bool(Scheduler._instances)
        if deadly and shared:
            raise InputError(
                f"expected workers in processes of their own for faults of kind {deadly}, but "
                f"worker {worker.address} shares process {os.getpid()} with the scheduler or "
                f"the client, which would go down with it: use LocalCluster(processes=True)"
            )


class FaultyExecutor(ShardExecutor):
    """An executor that goes wrong as armed plans say; made by `around`.

    Attributes
    ----------
    original : ShardExecutor
        The executor that it stands for.
    armed : list of FaultInjector
        Plans, delivered in this order.
    """

    original: ShardExecutor
    armed: list[FaultInjector]

    @classmethod
    def around(cls, original: ShardExecutor, armed: Sequence[FaultInjector]) -> FaultyExecutor:
        """Return an executor of the original's class and state that is faulty besides."""
        kind = type(f"Faulty{type(original).__name__}", (cls, type(original)), {})
        faulty: FaultyExecutor = object.__new__(kind)
        vars(faulty).update(vars(original))
        faulty.original = original
        faulty.armed = list(armed)
        return faulty

    def receive(self, blob: bytes, context: BatchContext) -> bytes:
        """Deliver faults of the received model."""
        step = self._step("model", context, context.shard_ids)
        self._act(step)
        return self._corrupt(super().receive(blob, context), corrupt_bytes, step)

    def load(self, reader: Reader, context: ShardContext) -> Block:
        """Deliver faults of the samples, as of a block that went bad in memory."""
        step = self._step("input", context, (context.shard_id,))
        self._act(step)
        block = super().load(reader, context)
        return block._replace(x=self._corrupt(block.x, corrupt_state, step))

    def update(self, statistic: Statistic, info: ShardInfo, block: Block, context: ShardContext) -> State:
        """Deliver faults of the computation: before it is sealed nobody can tell."""
        step = self._step("compute", context, (context.shard_id,))
        self._act(step)
        return self._corrupt(super().update(statistic, info, block, context), corrupt_state, step)

    def seal(
        self,
        statistic: Statistic,
        state: State,
        block: Block,
        context: ShardContext,
        start: float,
    ) -> SealedStatistic:
        """Deliver hooks, which leave a seal that fits, and faults, which do not."""
        step = self._step("sealed", context, (context.shard_id,))
        record = self._hooked(super().seal(statistic, state, block, context, start), step)
        self._act(step)
        payload = self._corrupt(record.payload, corrupt_bytes, step)
        return record if payload is record.payload else replace(record, payload=payload)

    def records(
        self, statistic: Statistic, assignment: Assignment, dependencies: Sequence[Any]
    ) -> list[SealedStatistic]:
        """Leave out the records that are dropped."""
        context = assignment.context
        return [
            record
            for record in super().records(statistic, assignment, dependencies)
            if not self._dropped(self._step("frame", context, (record.shard_id,)))
        ]

    def finish(self, frame: bytes, context: BatchContext) -> bytes:
        """Deliver faults of the frame."""
        step = self._step("frame", context, context.shard_ids)
        self._act(step)
        return self._corrupt(super().finish(frame, context), corrupt_bytes, step)

    # -- delivery --------------------------------------------------------------------------

    def _step(
        self, where: str, context: BatchContext | ShardContext, shards: tuple[int, ...]
    ) -> FaultContext:
        return FaultContext(
            where=where,
            domain=self.domain,
            worker=self.worker,
            name=self.armed[0].name_of_worker() if self.armed else "",
            role=context.role,
            round=context.round,
            attempt=context.attempt,
            shards=shards,
        )

    def _plans(self, step: FaultContext) -> list[FaultInjector]:
        # Warming up is not one of the roles: nothing of it is ever used.
        return self.armed if step.role in ROLES else []

    def _act(self, step: FaultContext) -> None:
        for injector in self._plans(step):
            for index, fault in injector.due(step, ACTION_KINDS):
                if injector.claim(index, fault.kind, fault.times, step):
                    _perform(fault)

    def _corrupt(
        self,
        value: Value,
        corrupt: Callable[[Fault, Value, FaultContext], Value],
        step: FaultContext,
    ) -> Value:
        for injector in self._plans(step):
            for index, fault in injector.due(step, BIT_KINDS | VALUE_KINDS):
                try:
                    changed = corrupt(fault, value, step)
                except InputTypeError:
                    raise
                except InputError:
                    # Masked, as a stuck bit is by a value that has it so: not delivered.
                    continue
                if injector.claim(index, fault.kind, fault.times, step):
                    value = changed
        return value

    def _dropped(self, step: FaultContext) -> bool:
        return any(
            injector.claim(index, fault.kind, fault.times, step)
            for injector in self._plans(step)
            for index, fault in injector.due(step, frozenset({"dropped"}))
        )

    def _hooked(self, record: SealedStatistic, step: FaultContext) -> SealedStatistic:
        for injector in self._plans(step):
            if injector.hook is None:
                continue
            payload = injector.hook(step.worker, record.shard_id, step.role, record.payload)
            if not isinstance(payload, bytes):
                raise InputTypeError(
                    f"expected the corruption hook to return bytes, got {type(payload).__name__}"
                )
            if payload != record.payload and injector.claim(-1, "hook", None, step):
                record = replace(record, payload=payload, digest=digest(payload))
        return record


def arm_corruption(client: Client, hook: CorruptionHook) -> Any:
    """Call a hook on every payload, in every role, until `clear_corruption`.

    What the hook returns is sealed in place of the payload, as if the worker had computed it:
    its digest fits, and the free checks saw the state before it.

    Parameters
    ----------
    client : distributed.Client
        Synchronous or asynchronous.
    hook : callable
        ``hook(worker, shard_id, role, payload) -> bytes``: address of the worker, shard, one of
        "primary", "audit", "witness", "rerun", "heal", canonical bytes. It travels by
        cloudpickle. Arming another hook replaces it.

    Returns
    -------
    None or awaitable
        To be awaited if the client is asynchronous.
    """
    return client.register_plugin(FaultInjector(FaultPlan(), hook=hook, name=_HOOK_NAME))


def clear_corruption(client: Client) -> Any:
    """Disarm the hook of `arm_corruption`, if one is armed.

    Parameters
    ----------
    client : distributed.Client
        Synchronous or asynchronous.

    Returns
    -------
    dict or awaitable
        To be awaited if the client is asynchronous.
    """

    async def clear() -> Any:
        try:
            return await client.unregister_worker_plugin(_HOOK_NAME)
        except ValueError:  # none is
            return {}

    return client.sync(clear)


def delivered(dask_worker: Worker | Scheduler, run: str | None = None) -> list[Delivery]:
    """Return what was delivered; ``client.run(delivered)``, ``client.run_on_scheduler(delivered)``.

    Parameters
    ----------
    dask_worker : Worker or Scheduler
        Filled in by Dask. On a worker: what hit it since the plan was registered. On the
        scheduler: what hit any worker, those included that are dead.
    run : str, optional
        Of one `FaultInjector` only, by its ``run``.

    Returns
    -------
    list of Delivery
        In order of delivery.
    """
    if isinstance(dask_worker, Scheduler):
        by_run = {name: t.deliveries for name, t in _TALLIES.get(dask_worker, {}).items()}
    else:
        plugins = dask_worker.plugins.values()
        by_run = {p.run: p.delivered for p in plugins if isinstance(p, FaultInjector)}
    wanted = by_run if run is None else {run} & by_run.keys()
    return [delivery for name in wanted for delivery in by_run[name]]


def _perform(fault: Fault) -> None:
    if fault.kind == "delayed":
        time.sleep(fault.delay)
    else:
        os.kill(os.getpid(), getattr(signal, _SIGNALS[fault.kind]))


def _claim(run: str, delivery: Delivery, times: int | None, dask_scheduler: Scheduler) -> bool:
    """Count a delivery; runs on the scheduler's event loop and hence one at a time."""
    tally = _TALLIES.setdefault(dask_scheduler, {}).setdefault(run, Tally())
    return tally.claim(delivery, times)


async def _claim_remotely(worker: Worker, run: str, delivery: Delivery, times: int | None) -> bool:
    response = await worker.scheduler.run_function(
        function=dumps(_claim),
        args=dumps((run, delivery, times)),
        wait=True,
    )
    if response["status"] != "OK":
        _, exception, traceback = clean_exception(**response)
        raise exception.with_traceback(traceback) if exception else RuntimeError(str(response))
    return bool(response["result"])
