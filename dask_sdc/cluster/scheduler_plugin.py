"""The scheduler's side: domains, labels, quarantine, and news of workers.

Every hook is constant-time and touches no user object. What takes longer (quarantine) is an
RPC that yields to the event loop as it goes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from time import time
from typing import Any

from distributed import Scheduler, SchedulerPlugin
from distributed.core import Status

from dask_sdc.cluster.worker_plugin import NAME
from dask_sdc.policy.domains import DomainMap, Identity, domain_label

logger = logging.getLogger("dask_sdc.scheduler")

#: Keys of embedded audited graphs start so; a domain that leaves gets them re-stamped.
GRAPH_PREFIX = "sdc-graph-"

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
        self.held: set[str] = set()
        self.topics: dict[str, str] = {}
        # Keys that a domain produced and that are still in memory, and the way back.
        self._produced: defaultdict[str, dict[Any, None]] = defaultdict(dict)
        self._producer: dict[Any, str] = {}
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
        )
        self._status_changed = scheduler.stream_handlers["worker-status-change"]
        scheduler.stream_handlers["worker-status-change"] = self.handle_status

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
        """Return kind, workers by domain, threads, fingerprints and quarantines."""
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
        }

    def _publish(self, **news: Any) -> None:
        if self.topics:
            self.scheduler.log_event(list(self.topics), news)

    # -- workers come ------------------------------------------------------------------

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Hold a newcomer at the door while a quarantine is in force: it may be the suspect."""
        if self.quarantined:
            self._hold(worker)

    async def register(self, identity: Mapping[str, Any], worker: str) -> dict[str, Any]:
        """Give a worker its domain, lane and labels (RPC of the worker plugin)."""
        domain = self.domains.add(Identity(**{**identity, "gpus": tuple(identity["gpus"])}))
        labels = self.domains.labels(worker)
        if domain in self.quarantined:
            self._hold(worker)
            self._publish(op="refused", domain=domain, worker=worker)
            labels = {}
        neighbours = self.scheduler.host_info[self.scheduler.workers[worker].host]["addresses"]
        return {"domain": domain, "labels": labels, "ordinal": sorted(neighbours).index(worker)}

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
        self._unhold(worker)
        self._publish(
            op="joined",
            domain=domain,
            lane=self.domains.lane(domain),
            worker=worker,
            nthreads=self.domains.identity(worker).nthreads,
            fingerprint=fingerprint,
        )

    def handle_status(self, status: str, worker: str, stimulus_id: str) -> None:
        """Pass a worker's status on, but never let a held one become running."""
        if worker in self.held and status == Status.running.name:
            status = Status.paused.name
        self._status_changed(status=status, worker=worker, stimulus_id=stimulus_id)

    def _hold(self, worker: str) -> None:
        self.held.add(worker)
        self.handle_status(Status.running.name, worker, f"sdc-hold-{time()}")

    def _unhold(self, worker: str) -> None:
        if worker in self.held:
            self.held.discard(worker)
            self.handle_status(Status.running.name, worker, f"sdc-unhold-{time()}")

    # -- workers go --------------------------------------------------------------------

    def remove_worker(
        self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any
    ) -> None:
        """Tell the drivers; re-stamp embedded tasks that nobody could run any more."""
        self.held.discard(worker)
        self.fingerprints.pop(worker, None)
        domain = self.domains.remove(worker)
        if domain is None:
            return
        gone = not self.domains.is_live(domain)
        self._publish(op="left", domain=domain, worker=worker, gone=gone)
        if gone:
            self._restamp(domain, stimulus_id)

    def _restamp(self, domain: str, stimulus_id: str) -> None:
        """Free embedded primaries of a lost domain to run wherever the rest allows."""
        label = domain_label(domain)
        freed: dict[Any, Any] = {}
        for ts in self.scheduler.unrunnable:
            wanted = ts.resource_restrictions
            if wanted and label in wanted and str(ts.key).startswith(GRAPH_PREFIX):
                ts.resource_restrictions = {k: v for k, v in wanted.items() if k != label}
                freed[ts.key] = "processing"
        if freed:
            self.scheduler.transitions(freed, stimulus_id=stimulus_id)

    def restart(self, scheduler: Scheduler) -> None:
        """All tasks are forgotten; domains and quarantines stay."""
        self._produced.clear()
        self._producer.clear()

    # -- who produced what -------------------------------------------------------------

    def transition(
        self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any
    ) -> None:
        """Remember which domain produced a result for as long as it is in memory."""
        if finish == "memory" and start == "processing":
            domain = self._domain(kwargs.get("worker", ""))
            if domain is not None:
                self._producer[key] = domain
                self._produced[domain][key] = None
        elif start == "memory":
            domain = self._producer.pop(key, None)
            if domain is not None:
                self._produced[domain].pop(key, None)

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
            if ts.key not in seen and ts.state == "memory":
                seen[ts.key] = None
                todo.extend(ts.dependents)
        return list(seen)

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
        logger.warning("Domain %r is quarantined: %s", domain, reason)
        self._publish(op="quarantined", domain=domain, reason=reason)
        return {"workers": workers, "dropped": len(tainted)}

    async def refresh(self, keys: Iterable[Any]) -> int:
        """Drop every replica of some results, so that Dask computes them again."""
        return await self._drop(list(keys))

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
        workers = [w for w in self.domains.addresses(domain) if w in self.held]
        for worker in workers:
            await self.scheduler.rpc(worker).sdc_label(labels=self.domains.labels(worker))
            await self.ready(worker, self.fingerprints.get(worker, ""))
        self._publish(op="released", domain=domain)
        return {"released": True, "workers": workers}

    async def held_workers(self, domain: str) -> list[str]:
        """Addresses of a quarantined domain that are connected and held."""
        return [w for w in self.domains.addresses(domain) if w in self.held]

    async def evict(self, domain: str, reason: str) -> list[str]:
        """Give up a silent domain: reschedule its work and restart it where a nanny can."""
        workers = list(self.domains.addresses(domain))
        for worker in workers:
            ws = self.scheduler.workers.get(worker)
            if ws is None:
                continue
            nanny = ws.nanny
            logger.warning("Worker %s of domain %r is given up: %s", worker, domain, reason)
            await self.scheduler.remove_worker(
                worker, stimulus_id=f"sdc-evict-{time()}", close=not nanny
            )
            if nanny:
                task = asyncio.create_task(self._restart(nanny))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return workers

    async def _restart(self, nanny: str) -> None:
        try:
            await self.scheduler.rpc(nanny).restart(timeout=30, reason="sdc-evict")
        except OSError:
            logger.warning("No nanny answers at %s; its worker stays out", nanny)
