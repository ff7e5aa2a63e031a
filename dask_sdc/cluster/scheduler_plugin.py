"""The scheduler's side: domains, labels, quarantine, and news of workers.

Every hook is constant-time and touches no user object. What takes longer (quarantine) is an
RPC that yields to the event loop as it goes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import count
from time import time
from typing import Any

from distributed import Scheduler, SchedulerPlugin
from distributed.core import Status

from dask_sdc.cluster.worker_plugin import NAME
from dask_sdc.exceptions import ClusterError
from dask_sdc.policy.domains import DomainMap, Identity, domain_label

logger = logging.getLogger("dask_sdc.scheduler")

#: All keys of audited work start so.
KEY_PREFIX = "sdc-"

#: Keys of embedded audited graphs start so; a domain that leaves gets them re-stamped.
GRAPH_PREFIX = f"{KEY_PREFIX}graph-"

#: Seconds since its last heartbeat for which a worker counts as alive.
_ALIVE = 30.0

#: How many keys are dropped between two turns of the event loop.
_DROP_CHUNK = 500


class SDCSchedulerPlugin(SchedulerPlugin):
    """Knows which worker is which failure domain and keeps quarantined ones out.

    Parameters
    ----------
    kind : str
        What a failure domain is: "worker", "host", "gpu" or "custom".
    lanes : int
        Number of lanes.
    """

    name = NAME
    # One plugin a cluster: another auditor shares it.
    idempotent = True

    def __init__(self, kind: str, lanes: int) -> None:
        self.domains = DomainMap(kind=kind, lanes=lanes)
        self.fingerprints: dict[str, str] = {}
        self.quarantined: dict[str, str] = {}
        # By domain the GPUs, by UUID, as they last were, and what has become worse.
        self.health: dict[str, dict[str, Mapping[str, Any]]] = {}
        self.ailing: dict[str, list[str]] = {}
        # Workers at the door, with the status that they last reported.
        self.held: dict[str, str] = {}
        self.topics: dict[str, str] = {}
        # Keys that a domain produced and that the scheduler still knows, and the way back. A key
        # outlives its result here, since others may have been made from it.
        self._produced: defaultdict[str, dict[Any, None]] = defaultdict(dict)
        self._producers: defaultdict[Any, set[str]] = defaultdict(set)
        # Numbers of the workers of each host, for disjoint cores.
        self._seats: defaultdict[str, set[int]] = defaultdict(set)
        self._seated: dict[str, tuple[str, int]] = {}
        # Embedded tasks that wait for a worker with their labels.
        self._unplaced: dict[Any, None] = {}
        self._placing = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, scheduler: Scheduler) -> None:
        """Add the RPC handlers; watch status changes so that a held worker stays held."""
        self.scheduler = scheduler
        scheduler.handlers.update(
            sdc_attach=self.attach,
            sdc_detach=self.detach,
            sdc_register=self.register,
            sdc_ready=self.ready,
            sdc_snapshot=self.snapshot,
            sdc_quarantine=self.quarantine,
            sdc_release=self.release,
            sdc_held=self.held_workers,
            sdc_evict=self.evict,
            sdc_refresh=self.refresh,
            sdc_health=self.note_health,
        )
        self._status_changed = scheduler.stream_handlers["worker-status-change"]
        scheduler.stream_handlers["worker-status-change"] = self.handle_status

    async def close(self) -> None:
        """Stop waiting for nannies."""
        for task in self._tasks:
            task.cancel()

    # -- attaching drivers -------------------------------------------------------------

    async def attach(self, topic: str, client: str) -> dict[str, Any]:
        """Send news to one more topic; return the state of the cluster."""
        self.topics[topic] = client
        return await self.snapshot()

    async def detach(self, topic: str) -> None:
        """Stop sending news to a topic."""
        self.topics.pop(topic, None)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Forget the topics of a driver that is gone."""
        for topic in [topic for topic, owner in self.topics.items() if owner == client]:
            del self.topics[topic]

    async def snapshot(self) -> dict[str, Any]:
        """Return kind, workers by domain, threads, fingerprints, quarantines, and how many are coming."""
        return {
            "kind": self.domains.kind,
            "lanes": self.domains.lanes,
            "workers": [
                {
                    "address": address,
                    "domain": self.domains.domain(address),
                    "lane": self.domains.lane(self.domains.domain(address)),
                    "nthreads": self.domains.identity(address).nthreads,
                    "fingerprint": fingerprint,
                }
                for address, fingerprint in self.fingerprints.items()
                if address in self.domains and address not in self.held
            ],
            "quarantined": dict(self.quarantined),
            "health": {domain: list(devices.values()) for domain, devices in self.health.items()},
            "ailing": self.ailing,
            "coming": len(self.scheduler.workers) - len(self.fingerprints),
        }

    def _publish(self, **news: Any) -> None:
        if self.topics:
            self.scheduler.log_event(list(self.topics), news)

    # -- workers come ------------------------------------------------------------------

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Hold a newcomer at the door while a quarantine is in force: it may be the suspect."""
        if self.quarantined:
            self._hold(worker)
        self._publish(op="coming", worker=worker)

    async def register(self, identity: Mapping[str, Any], worker: str) -> dict[str, Any]:
        """Give a worker its domain, lane and labels (RPC of the worker plugin).

        Raises
        ------
        ClusterError
            If the scheduler has removed the worker meanwhile.
        """
        if worker not in self.scheduler.workers:
            raise ClusterError(f"expected worker {worker} to be on the scheduler, it is not")
        domain = self.domains.add(Identity(**{**identity, "gpus": tuple(identity["gpus"])}))
        labels = self.domains.labels(worker)
        if domain in self.quarantined:
            self._hold(worker)
            self._publish(op="refused", domain=domain, worker=worker)
            labels = {}
        return {"domain": domain, "labels": labels, "ordinal": self._seat(worker)}

    def _seat(self, worker: str) -> int:
        """Give a worker a number that no other one of its host has."""
        host = self.scheduler.workers[worker].host
        taken = self._seats[host]
        if worker not in self._seated:
            seat = next(i for i in count() if i not in taken)
            taken.add(seat)
            self._seated[worker] = (host, seat)
        return self._seated[worker][1]

    def _domain(self, worker: str) -> str | None:
        return self.domains.domain(worker) if worker in self.domains else None

    async def ready(self, worker: str, fingerprint: str) -> None:
        """Note that a worker has its labels and may be given shards."""
        domain = self._domain(worker)
        if worker not in self.scheduler.workers or domain is None:
            return
        self.fingerprints[worker] = fingerprint
        if domain in self.quarantined:
            return
        if domain_label(domain) not in self.scheduler.workers[worker].resources:
            # It was released after it had been refused its labels.
            await self.scheduler.rpc(worker).sdc_label(labels=self.domains.labels(worker))
        self._unhold(worker)
        self._publish(
            op="joined",
            domain=domain,
            lane=self.domains.lane(domain),
            worker=worker,
            nthreads=self.domains.identity(worker).nthreads,
            fingerprint=fingerprint,
        )

    async def note_health(
        self, worker: str, devices: Iterable[Mapping[str, Any]], worse: Iterable[str]
    ) -> None:
        """Note how the GPUs of a worker are, and tell the drivers (RPC of the worker plugin)."""
        domain = self._domain(worker)
        if domain is None:
            return
        self.health.setdefault(domain, {}).update((device["uuid"], device) for device in devices)
        known = self.ailing.get(domain, [])
        new = [what for what in worse if what not in known]  # workers may share a GPU
        if new:
            self.ailing[domain] = [*known, *new]
            logger.warning("Domain %r: %s", domain, "; ".join(new))
        self._publish(op="health", domain=domain, devices=list(self.health[domain].values()), worse=new)

    def handle_status(self, status: str, worker: str, stimulus_id: str) -> None:
        """Pass a worker's status on, but never let a held one become running."""
        if worker in self.held:
            self.held[worker] = status
            if status == Status.running.name:
                status = Status.paused.name
        self._status_changed(status=status, worker=worker, stimulus_id=stimulus_id)

    def _hold(self, worker: str) -> None:
        reported = self.held.get(worker, self.scheduler.workers[worker].status.name)
        self.held[worker] = reported
        self.handle_status(reported, worker, f"sdc-hold-{time()}")

    def _unhold(self, worker: str) -> None:
        if (reported := self.held.pop(worker, None)) is not None:
            self.handle_status(reported, worker, f"sdc-unhold-{time()}")

    # -- workers go --------------------------------------------------------------------

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
        """Tell the drivers."""
        self.held.pop(worker, None)
        if (place := self._seated.pop(worker, None)) is not None:
            self._seats[place[0]].discard(place[1])
        self.fingerprints.pop(worker, None)
        domain = self.domains.remove(worker)
        if domain is None:
            return
        gone = not self.domains.is_live(domain)
        self._publish(op="left", domain=domain, worker=worker, gone=gone)
        self._place_soon()

    def _place_soon(self) -> None:
        # Not from within a hook, where the state of the scheduler is between two others.
        if self._unplaced and not self._placing:
            self._placing = True
            asyncio.get_running_loop().call_soon(self._place)

    def _place(self) -> None:
        """Free embedded tasks from labels that nobody has, to run wherever the rest allows."""
        self._placing = False
        freed: dict[Any, Any] = {}
        for key in self._unplaced if self.scheduler.running else ():
            ts = self.scheduler.tasks[key]
            wanted = ts.resource_restrictions or {}
            ts.resource_restrictions = {k: v for k, v in wanted.items() if self.scheduler.resources.get(k)}
            if ts.resource_restrictions != wanted:
                freed[key] = "processing"
        self.scheduler.transitions(freed, stimulus_id=f"sdc-place-{time()}")

    def restart(self, scheduler: Scheduler) -> None:
        """All tasks are forgotten; domains and quarantines stay."""
        self._produced.clear()
        self._producers.clear()
        self._unplaced.clear()

    # -- who produced what -------------------------------------------------------------

    def transition(
        self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any
    ) -> None:
        """Remember which domain produced a result; place embedded tasks that nobody may run."""
        if finish == "memory" and start == "processing":
            domain = self._domain(kwargs.get("worker", ""))
            if domain is not None:
                self._producers[key].add(domain)
                self._produced[domain][key] = None
        elif finish == "forgotten":
            for domain in self._producers.pop(key, ()):
                self._produced[domain].pop(key, None)
        elif finish == "no-worker" and str(key).startswith(GRAPH_PREFIX):
            self._unplaced[key] = None
            self._place_soon()
        if start == "no-worker":
            self._unplaced.pop(key, None)

    def _tainted(self, domain: str) -> list[Any]:
        """Keys in memory that a domain produced or holds, and all that was made from them."""
        tasks = self.scheduler.tasks
        todo = [tasks[key] for key in self._produced.get(domain, ()) if key in tasks]
        for address in self.domains.addresses(domain):
            if ws := self.scheduler.workers.get(address):
                todo.extend(ts for ts in ws.has_what if ts.run_spec)
        seen: dict[Any, None] = {}
        while todo:
            ts = todo.pop()
            if ts.key not in seen:
                seen[ts.key] = None
                todo.extend(ts.dependents)
        return [key for key in seen if tasks[key].state == "memory"]

    # -- quarantine --------------------------------------------------------------------

    async def quarantine(self, domain: str, reason: str) -> dict[str, Any]:
        """Remove a domain with its data, drop every tainted replica, refuse its return."""
        workers = list(self.domains.addresses(domain))
        tainted = self._tainted(domain)
        # First, so that nothing lands on a worker of the domain that joins meanwhile.
        self.quarantined[domain] = reason
        for worker in workers:
            await self.scheduler.remove_worker(
                worker, stimulus_id=f"sdc-quarantine-{time()}", expected=True, close=True
            )
        await self._drop(tainted)
        for key in self._produced.pop(domain, ()):
            self._producers[key].discard(domain)
        logger.warning("Domain %r is quarantined: %s", domain, reason)
        self._publish(op="quarantined", domain=domain, reason=reason)
        return {"workers": workers, "dropped": len(tainted)}

    async def refresh(self, keys: Iterable[Any]) -> int:
        """Drop every replica of some results, so that Dask computes them again; return of how many it can."""
        known = [key for key in keys if (ts := self.scheduler.tasks.get(key)) and ts.run_spec]
        await self._drop(known)
        return len(known)

    async def _drop(self, keys: list[Any]) -> int:
        dropped = 0
        for start in range(0, len(keys), _DROP_CHUNK):
            released: dict[Any, Any] = {
                key: "released"
                for key in keys[start : start + _DROP_CHUNK]
                if (ts := self.scheduler.tasks.get(key)) and ts.state == "memory" and ts.run_spec
            }
            self.scheduler.transitions(released, stimulus_id=f"sdc-drop-{time()}")
            dropped += len(released)
            await asyncio.sleep(0)
        return dropped

    async def release(self, domain: str) -> dict[str, Any]:
        """Lift a quarantine; held workers of the domain are let in with their labels."""
        if self.quarantined.pop(domain, None) is None:
            return {"released": False, "workers": []}
        self.ailing.pop(domain, None)
        workers = [w for w in await self.held_workers(domain) if w in self.fingerprints]
        for worker in workers:
            with suppress(OSError):  # it left
                await self.ready(worker, self.fingerprints[worker])
        self._publish(op="released", domain=domain)
        return {"released": True, "workers": workers}

    async def held_workers(self, domain: str) -> list[str]:
        """Addresses of a quarantined domain that are connected and held."""
        return [w for w in self.domains.addresses(domain) if w in self.held]

    async def evict(self, domain: str, reason: str, worker: str = "") -> list[str]:
        """Give up a silent domain: reschedule its work and restart it where a nanny can.

        A worker that is alive and busy with tasks of others stays as it is; the rest is returned. One that is
        named is given up whatever it does, and no other: it has lost its device.
        """
        there = self.domains.addresses(domain)
        workers = [w for w in there if (w == worker if worker else not self._serves_others(w))]
        for address in workers:
            ws = self.scheduler.workers.get(address)
            if ws is None:
                continue
            nanny = ws.nanny
            logger.warning("Worker %s of domain %r is given up: %s", address, domain, reason)
            await self.scheduler.remove_worker(address, stimulus_id=f"sdc-evict-{time()}", close=not nanny)
            if nanny:
                task = asyncio.create_task(self._restart(nanny))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return workers

    def _serves_others(self, worker: str) -> bool:
        ws = self.scheduler.workers.get(worker)
        if ws is None or not ws.executing or time() - ws.last_seen > _ALIVE:
            return False
        return not any(str(ts.key).startswith(KEY_PREFIX) for ts in ws.executing)

    async def _restart(self, nanny: str) -> None:
        try:
            await self.scheduler.rpc(nanny).restart(timeout=30, reason="sdc-evict")
        except Exception as error:
            logger.warning("The nanny at %s restarts no worker: %s", nanny, error)
