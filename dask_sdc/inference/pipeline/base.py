"""What every kind of pipeline is: stages on workers of a cluster, spares, audits, and a coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import dask
import numpy as np
from distributed import Client

from dask_sdc.cluster.session import Session, register
from dask_sdc.evidence.ledger import Ledger
from dask_sdc.evidence.receipts import SDCAuditReceipt
from dask_sdc.exceptions import ClosedError, InputError, InputTypeError
from dask_sdc.inference.heal import RecoveryReport
from dask_sdc.inference.pipeline.audits import Mismatch
from dask_sdc.inference.pipeline.clients import ended, while_open
from dask_sdc.inference.pipeline.coordinator import Coordinator
from dask_sdc.inference.pipeline.crew import Crew, loading
from dask_sdc.inference.pipeline.evidence import receipt_of
from dask_sdc.inference.pipeline.ops import Ring
from dask_sdc.inference.pipeline.owners import disown, own
from dask_sdc.inference.pipeline.placement import Candidate
from dask_sdc.inference.pipeline.routes import Routes
from dask_sdc.inference.pipeline.worker import Place, StageWorkerPlugin, describe
from dask_sdc.inference.shadow import ShadowAudit
from dask_sdc.inference.stage import Stage

__all__ = ["StagedPipeline", "check_int", "check_number", "pipeline_name"]

#: Positions of sessions whose stages keep nothing per position.
_UNBOUNDED = 2**62


class StagedPipeline(ABC):
    """Stages on the workers of a cluster, which survive the loss of a stage; see the classes made from it.

    Parameters
    ----------
    client : Client
        The cluster.
    name : str or None
        What the pipeline's name on the cluster begins with; no other has the whole of it.
    spares, spare_weights, timeout, replay, kv_bytes, journal_bytes, spill, audit_rate, ledger
        See `Pipeline`.
    """

    #: The stages, from the head to the tail; described, not loaded.
    _parts: list[Stage]

    def __init__(
        self,
        client: Client,
        *,
        name: str | None,
        spares: int,
        spare_weights: str,
        timeout: float,
        replay: str,
        kv_bytes: int | None,
        journal_bytes: int,
        spill: str | os.PathLike[str] | None,
        audit_rate: float,
        ledger: str | os.PathLike[str] | None,
    ) -> None:
        if not isinstance(client, Client):
            raise InputTypeError(f"client: expected a distributed.Client, got {type(client).__name__}")
        spares = check_int("spares", spares, 0)
        journal_bytes = check_int("journal_bytes", journal_bytes, 0)
        if check_number("timeout", timeout) == 0:
            raise InputError(f"timeout: expected seconds > 0, got {timeout!r}")
        _check_choice("replay", replay, "exact", "fast")
        _check_choice("spare_weights", spare_weights, "memory", "disk")
        if kv_bytes is not None:
            kv_bytes = check_int("kv_bytes", kv_bytes, 1)
        for key, path in (("spill", spill), ("ledger", ledger)):
            if path is not None and not isinstance(path, str | os.PathLike):
                raise InputTypeError(f"{key}: expected a path, got {type(path).__name__}")
        self._audit = ShadowAudit(audit_rate) if check_number("audit_rate", audit_rate) > 0 else None
        if self._audit is not None and replay == "fast":
            raise InputError("expected replay='exact' with audits, which compare bits, got 'fast'")
        self.client = client
        self._spares, self._timeout, self._kv_bytes = spares, float(timeout), kv_bytes
        self._exact = replay == "exact"
        self._journal_bytes, self._spill = journal_bytes, None if spill is None else os.fspath(spill)
        self.name = self._named(name)
        self._session = Session(client, "auto", None, dask.config.get("sdc.lanes"), False, self._timeout)
        self._coordinator: Coordinator | None = None
        self._ledger: Ledger | None = None
        self._ledger_path = ledger
        self.receipts: list[SDCAuditReceipt] = []
        self.quarantined: dict[str, str] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._routes = Routes(client.rpc, self._timeout)
        patience = 0.7 * self._timeout
        self._crew = Crew(self._session, self._routes, spares, spare_weights, self._watch, patience)
        self._closed = False

    def _named(self, name: str | None) -> str:
        return pipeline_name(name)

    def __repr__(self) -> str:
        stages = len(self._ring.addresses) if self._coordinator is not None else "not started"
        return f"<{type(self).__name__} {self.name}: {'closed' if self._closed else f'stages: {stages}'}>"

    # -- starting --------------------------------------------------------------------------------

    async def _start(self) -> None:
        try:
            await self._seat_all()
        except BaseException:
            # Nobody could close what never was: no stage stays behind.
            self._closed = True
            await self._stop()
            raise

    async def _seat_all(self) -> None:
        if self._ledger_path is not None:
            self._ledger = Ledger(self._ledger_path)
        await self._session.attach()
        self.client.subscribe_topic(self.name, self._hear)
        await register(self.client, StageWorkerPlugin())
        await own(self.client, self.name, "leave", pipeline=self.name, forget=True)
        chosen, self._parts = await self._placed(await self._crew.measured())
        places = [
            Place(number, len(self._parts), self._journal_bytes, self._spill)
            for number in range(len(self._parts))
        ]
        ring = Ring(self.name, self._routes, [describe(part) for part in self._parts], places, self.name)
        ring.sizes = tuple(part.nbytes for part in self._parts)
        ring.relays = tuple(self._session.addresses())
        self._crew.ring = ring
        ring.addresses = [one.address for one in chosen]
        seats = [loading(ring.seat(k, address, 0), k, address) for k, address in enumerate(ring.addresses)]
        digests = _all_or_first_error(await asyncio.gather(*seats, return_exceptions=True))
        await asyncio.gather(*(ring.wire(k) for k in range(len(ring))))
        for k, (part, digest) in enumerate(zip(self._parts, digests, strict=True)):
            if digest != part.digest:
                raise InputError(f"stage {k}: expected digest {part.digest} once it is loaded, got {digest}")
        self._coordinator = Coordinator(
            ring,
            digests,
            self._crew,
            self._timeout,
            self._budget(chosen),
            self._exact,
            self._differs,
            self._audit,
        )
        await self._crew.keep_spares()
        self._watch(self._hear_of_workers())

    @abstractmethod
    async def _placed(self, candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Stage]]:
        """Return the stages, and who takes each."""

    def _budget(self, chosen: Sequence[Candidate]) -> int:
        """Return the positions that the fullest stage has memory for; an auditor may follow all of them."""
        sizes = [part.bytes_per_position for part in self._parts]
        if self._audit is not None:
            sizes = [sum(sizes)] * len(sizes)
        memories = [self._kv_bytes or (one.memory or 2**32) // 4 for one in chosen]
        limits = [memory // size for memory, size in zip(memories, sizes, strict=True) if size]
        return min(limits, default=_UNBOUNDED)

    def _watch(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- news ------------------------------------------------------------------------------------

    def _hear(self, event: tuple[float, Mapping[str, Any]]) -> None:
        """Take what a stage says of itself."""
        news = event[1]
        if self._coordinator is not None:
            self._coordinator.stage_failed(news["stage"], news["why"])

    async def _hear_of_workers(self) -> None:
        """Sound the alarm as soon as a worker that holds a stage is gone; make spares of those that come."""
        while True:
            await self._session.next_events(1.0)
            lost = [address for address in self._ring.addresses if self._crew.gone(address)]
            if lost and self._coordinator is not None:
                self._coordinator.alarm(f"workers left: {lost}")
            self._crew.tend()

    # -- evidence --------------------------------------------------------------------------------

    async def _differs(self, mismatch: Mismatch) -> None:
        """Take whoever an audit named out of service, and write it down."""
        status = "not_requested"
        for domain in mismatch.finding.decision.suspects:
            why = f"stage {mismatch.finding.stage} of {self.name}, chunk {mismatch.finding.chunk}: wrong"
            failure = await self._session.quarantine(domain, why)
            status = "deferred:refused" if failure else "committed"
            if not failure:
                self.quarantined[domain] = why
        receipt = receipt_of(mismatch, status)
        self.receipts.append(receipt)
        self._write("receipt", receipt.to_dict())

    def _write(self, kind: str, record: Mapping[str, Any]) -> None:
        if self._ledger is not None:
            self._ledger.append(kind, record)

    # -- what happened ---------------------------------------------------------------------------

    @property
    def recoveries(self) -> list[RecoveryReport]:
        """Reports of what was healed, in order."""
        return list(self._running.recoveries)

    @property
    def workers(self) -> tuple[str, ...]:
        """Addresses of the stages, from the head to the tail."""
        return tuple(self._ring.addresses)

    @property
    def spares(self) -> tuple[str, ...]:
        """Addresses of the workers that are ready to take the place of a stage."""
        return self._crew.spares

    @property
    def _running(self) -> Coordinator:
        if self._coordinator is None or self._closed:
            raise ClosedError("expected a pipeline that was started and not closed")
        return self._coordinator

    @property
    def _ring(self) -> Ring:
        assert self._coordinator is not None
        return self._coordinator.ring

    # -- life ------------------------------------------------------------------------------------

    def close(self) -> Any:
        """Give up the stages; may be called again. The client stays open."""
        return ended(self.client, self._close)

    async def _close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._stop()

    async def _stop(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._coordinator is not None:
            await self._coordinator.close()
        if (ring := self._crew.ring) is not None:
            there = [address for address in ring.asked if not self._crew.gone(address)]
            calls = [
                asyncio.wait_for(ring.call_at(address, "leave", forget=True), self._timeout)
                for address in there
            ]
            left = await asyncio.gather(*calls, return_exceptions=True)
            silent = [one for one, how in zip(there, left, strict=True) if isinstance(how, BaseException)]
            await disown(self.client, self.name, silent)
        if self._ledger is not None:
            self._ledger.close()
        with contextlib.suppress(ValueError):  # that failed before it listened
            self.client.unsubscribe_topic(self.name)
        await self._session.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __await__(self) -> Any:
        return self._opened().__await__()

    async def _opened(self) -> Self:
        if self._coordinator is None:
            with while_open(self.client):
                await self._start()
        return self

    async def __aenter__(self) -> Self:
        return await self._opened()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


def _all_or_first_error(results: Sequence[str | BaseException]) -> list[str]:
    """Return what came, unless something failed; by now nothing of it is under way any more."""
    found: list[str] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found


def pipeline_name(name: Any = None) -> str:
    """Return a name that no other pipeline has, whatever users call theirs.

    Raises
    ------
    InputError
        If it is no text that a folder can be called by.
    """
    if name is None:
        name = "sdc-pipeline"
    if not isinstance(name, str) or Path(name).name != name:
        raise InputError(f"name: expected text that a folder can be called by, got {name!r}")
    return f"{name}-{uuid.uuid4().hex[:12]}"


def _check_choice(name: str, value: Any, *choices: str) -> None:
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{name}: expected {' or '.join(map(repr, choices))}, got {value!r}")


def check_int(name: str, value: Any, least: int) -> int:
    """Return an int of at least ``least`` that a message can hold, and refuse anything else."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InputError(f"{name}: expected an int of at least {least}, got {value!r}")
    if value >= 2**64:
        raise InputError(f"{name}: expected an int below 2**64, got {value}")
    return int(value)


def check_number(name: str, value: Any) -> float:
    """Return a finite number of at least 0, and refuse anything else."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | np.integer | np.floating)
        or not 0 <= value < float("inf")
    ):
        raise InputError(f"{name}: expected a finite number >= 0, got {value!r}")
    return float(value)
