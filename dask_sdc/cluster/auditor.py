"""`Auditor`: what users call."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import dask
import numpy as np
from dask.delayed import Delayed
from dask.utils import parse_timedelta
from distributed import Client, Worker, default_client, futures_of, wait

from dask_sdc.cluster.checkpoint import CheckpointStore
from dask_sdc.cluster.driver import Memory, RoundDriver, RoundResult, Tolerances
from dask_sdc.cluster.fit import Books, Fit, FitResult, check_fit
from dask_sdc.cluster.scheduler_plugin import GRAPH_PREFIX
from dask_sdc.cluster.screen import probation, screen_cluster
from dask_sdc.cluster.session import Session, Work
from dask_sdc.cluster.worker_plugin import run_batch
from dask_sdc.evidence.ledger import Ledger
from dask_sdc.evidence.receipts import SDCAuditReceipt
from dask_sdc.exceptions import AuditWarning, ClosedError, InputError, InputTypeError, SDCError
from dask_sdc.graph.audited import audited_graph
from dask_sdc.graph.sources import Source, make_source
from dask_sdc.policy.domains import KINDS
from dask_sdc.policy.messages import RoundRecord, Settings
from dask_sdc.policy.report import Report
from dask_sdc.policy.sampling import CoverageSampler, check_rate
from dask_sdc.policy.screening import Screening
from dask_sdc.statistics.base import Estimator, Statistic

T = TypeVar("T")

_SHUT = "expected the auditor to stay open until this call was over, it was closed meanwhile"


class Auditor:
    """Accumulates statistics and fits models on a cluster, audited and healed.

    A fraction of the shards is computed twice, on hardware that shares no failure domain. A
    mismatch is settled by a third domain; the suspect is quarantined, all it may have spoiled is
    recomputed, and the result is that of a clean cluster, bit for bit.

    Parameters
    ----------
    client : distributed.Client, optional
        Synchronous or asynchronous; the current client by default. With an asynchronous client
        every method returns an awaitable.
    audit_rate : float, optional
        Audits per computed shard of every domain, in [0, 1].
    audit_rtol, audit_atol : float, optional
        Tolerances where the environments of two domains differ. In one environment results are
        compared bit for bit.
    seed : int, optional
        Seeds the choice of shards and the per-shard initialisation; drawn at random if None.
    domain : {"auto", "worker", "host", "gpu"} or callable, optional
        What fails together. A callable ``f(worker) -> str`` runs on each worker.
    quarantine : bool, optional
        Whether a named suspect is removed from the cluster.
    max_retries : int, optional
        How often a shard or a domain may fail before it is given up.
    worker_timeout_s : float, optional
        Seconds without a sign of life, beyond the expected time, after which a domain is silent.
    sub_chunks : int, optional
        Shards per thread into which a single NumPy array is cut.
    ledger : str or path, optional
        File for receipts and audit counts, hash-chained.
    pin_cores : bool, optional
        Pin the workers of each host to disjoint cores, so that worker domains mean hardware.

    Attributes
    ----------
    receipts : list of SDCAuditReceipt
        One per mismatch, in the order in which they were decided.
    rounds : list of RoundRecord
        Instrumentation.

    Raises
    ------
    InputError
        For bad arguments, before anything is sent to the cluster.

    Notes
    -----
    Defaults stand in ``dask.config`` under ``sdc``.

    Examples
    --------
    >>> with Auditor(client, audit_rate=0.1) as auditor:  # doctest: +SKIP
    ...     moments = auditor.accumulate(Moments(), x)
    ...     print(auditor.report())
    """

    def __init__(
        self,
        client: Client | None = None,
        audit_rate: float | None = None,
        audit_rtol: float | None = None,
        audit_atol: float | None = None,
        seed: int | None = None,
        *,
        domain: str | Callable[[Worker], str] | None = None,
        quarantine: bool | None = None,
        max_retries: int | None = None,
        worker_timeout_s: float | None = None,
        sub_chunks: int | None = None,
        ledger: str | Path | None = None,
        pin_cores: bool | None = None,
    ) -> None:
        self.audit_rate = check_rate(_default("audit-rate", audit_rate))
        self._ailing_rate = check_rate(_default("health.audit-rate", None), "sdc.health.audit-rate")
        self._tolerances = Tolerances(
            _tolerance("audit_rtol", _default("audit-rtol", audit_rtol)),
            _tolerance("audit_atol", _default("audit-atol", audit_atol)),
        )
        self.seed = _seed(seed)
        self._sub_chunks = None if sub_chunks is None else _positive("sub_chunks", sub_chunks)
        self._settings = Settings(
            max_retries=_positive("max_retries", _default("max-retries", max_retries)),
            timeout=_timeout(_default("worker-timeout", worker_timeout_s)),
            quarantine=_flag("quarantine", _default("quarantine", quarantine)),
            batch_min=_seconds("batch.min"),
            batch_max=_seconds("batch.max"),
        )
        kind, custom = _domain(_default("domain", domain))
        self.client = _client(client)
        self.receipts: list[SDCAuditReceipt] = []
        self.rounds: list[RoundRecord] = []
        self._books = Books(CoverageSampler(self.audit_rate, self.seed))
        self._session = Session(
            self.client,
            kind,
            custom,
            dask.config.get("sdc.lanes"),
            _flag("pin_cores", _default("pin-cores", pin_cores)),
            self._settings.timeout,
        )
        self._session.on_ailing = self._look_closer
        self._attached = False
        self._closed = False
        self._turn = asyncio.Lock()
        self._running: asyncio.Task[Any] | None = None
        ledger = _default("ledger", ledger)
        self._ledger = None if ledger is None else Ledger(_path("ledger", ledger))

    # -- work --------------------------------------------------------------------------

    def accumulate(
        self,
        statistic: Statistic,
        data: Any,
        *,
        weights: Any = None,
        target: Any = None,
        dim: Any = None,
    ) -> Any:
        """Accumulate a statistic over sharded data.

        Parameters
        ----------
        statistic : Statistic
        data, weights, target, dim
            See `dask_sdc.graph.sources.make_source`; ``dim`` names sample dimensions of xarray data.

        Returns
        -------
        object
            What the statistic's ``finalize`` returns.

        Raises
        ------
        InputError
            For bad input, before any work starts.
        ShardError
            At the shard that cannot be computed, which it names.
        ClusterError
            If nobody is left to compute.
        """
        if not isinstance(statistic, Statistic):
            raise InputTypeError(f"expected a Statistic, got {type(statistic).__name__}")
        source = self._source(data, weights, target, dim)
        return self._run(self._accumulate, statistic, source)

    def fit(
        self,
        estimator: Estimator,
        data: Any,
        *,
        weights: Any = None,
        target: Any = None,
        dim: Any = None,
        max_iter: int = 100,
        tol: float = 1e-3,
        checkpoint: Any = None,
    ) -> FitResult:
        """Fit a model by audited rounds.

        Parameters
        ----------
        estimator : Estimator
        data, weights, target, dim
            See `dask_sdc.graph.sources.make_source`.
        max_iter : int
            Most iterations.
        tol : float
            Change of the objective at which the fit has converged.
        checkpoint : path, mutable mapping or Zarr store, optional
            Where the fit is saved after every iteration. A later call with the same store,
            estimator, data and seed goes on from there with the same bits.

        Returns
        -------
        FitResult

        Raises
        ------
        CheckpointError
            If the store holds another fit.
        InputError, ShardError, ClusterError
            See `accumulate`.
        """
        check_fit(estimator, max_iter, tol)
        source = self._source(data, weights, target, dim)
        store = None if checkpoint is None else CheckpointStore(checkpoint)
        return self._run(self._fit, estimator, source, max_iter, float(tol), store)

    def graph(
        self,
        statistic: Statistic,
        data: Any,
        *,
        weights: Any = None,
        target: Any = None,
        dim: Any = None,
    ) -> Any:
        """Return an audited accumulation as one lazy graph.

        Parameters
        ----------
        statistic, data, weights, target, dim
            See `accumulate`.

        Returns
        -------
        dask.delayed.Delayed
            Computes, on this cluster, to what ``accumulate`` returns. A mismatch raises
            `CorruptionError`; there is no witness and no healing in a static graph.
        """
        if not isinstance(statistic, Statistic):
            raise InputTypeError(f"expected a Statistic, got {type(statistic).__name__}")
        return self._run(self._graph, statistic, self._source(data, weights, target, dim))

    def log_density(self, fitted: FitResult, data: Any, *, weights: Any = None, dim: Any = None) -> Any:
        """Return Σ log p(x) of a fitted model over data, audited like any other round.

        Parameters
        ----------
        fitted : FitResult
            What `fit` returned.
        data, weights, dim
            See `dask_sdc.graph.sources.make_source`.
        """
        if not isinstance(fitted, FitResult):
            raise InputTypeError(f"expected a FitResult, got {type(fitted).__name__}")
        statistic = fitted.estimator.log_density(fitted.model)
        return self.accumulate(statistic, data, weights=weights, dim=dim)

    def screen(self, repeats: int = 3) -> Screening:
        """Run known-answer kernels on every domain and compare all with all.

        Parameters
        ----------
        repeats : int
            How many different inputs each kernel gets.

        Returns
        -------
        Screening
            Outliers are quarantined (unless that is disabled) before this returns.
        """
        return self._run(self._screen, _positive("repeats", repeats))

    def release(self, domain: str, repeats: int = 3) -> bool:
        """Lift a quarantine after a clean probation.

        Parameters
        ----------
        domain : str
            A quarantined domain.
        repeats : int
            Screenings in a row that the domain has to pass.

        Returns
        -------
        bool
            False if a worker of the domain failed its probation; the quarantine stands then. A
            domain without a connected worker passes: start the worker first.

        Raises
        ------
        InputError
            If the domain is not in quarantine.
        """
        return self._run(self._release, domain, _positive("repeats", repeats))

    # -- what happened -----------------------------------------------------------------

    def report(self) -> Report:
        """Return an account of all rounds so far."""
        return Report(
            rate=self.audit_rate,
            seed=self.seed,
            domains=self._session.note,
            rounds=tuple(self.rounds),
            receipts=tuple(self.receipts),
            quarantined=dict(self._session.quarantined),
            ailing={domain: tuple(worse) for domain, worse in self._session.ailing.items()},
            devices={domain: tuple(devices) for domain, devices in self._session.health.items()},
            ledger=None if self._ledger is None else str(self._ledger.path),
        )

    @property
    def quarantined(self) -> Mapping[str, str]:
        """Domains in quarantine, with the reason."""
        return dict(self._session.quarantined)

    # -- life --------------------------------------------------------------------------

    def close(self) -> Any:
        """Stop listening and close the ledger; may be called again. The client stays open.

        A call that is under way in another thread or task ends with `ClosedError`.
        """
        first, self._closed = not self._closed, True
        if first and self.client.status == "running":
            return self.client.sync(self._shut)
        if self._ledger is not None:
            self._ledger.close()
        return self._nothing()

    async def _shut(self) -> None:
        if self._running is not None:
            self._running.cancel()
        await self._session.detach()
        if self._ledger is not None:
            self._ledger.close()

    def _nothing(self) -> Any:
        async def nothing() -> None:
            return None

        return nothing() if self.client.asynchronous else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _run(self, work: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run a coroutine on the client's loop; with a synchronous client, wait for it."""
        if self._closed:
            raise ClosedError("expected an open auditor, got one that was closed")
        if self.client.status != "running":
            raise ClosedError(f"expected a running client, got one that is {self.client.status}")
        running: list[asyncio.Task[T]] = []

        async def turn() -> T:
            running.append(asyncio.current_task())  # type: ignore[arg-type]
            async with self._turn:
                if self._closed:
                    raise ClosedError(_SHUT)
                task: asyncio.Task[T] = asyncio.ensure_future(self._attached_work(work, args))
                self._running = task
                try:
                    return await task
                except asyncio.CancelledError:
                    if running[0].cancelling():
                        raise
                    raise ClosedError(_SHUT) from None  # by `close`
                finally:
                    self._running = None

        try:
            return self.client.sync(turn)  # type: ignore[no-any-return]
        except BaseException as error:
            status = self.client.status
            ours = isinstance(error, SDCError) or not isinstance(error, Exception)
            if status in ("closing", "closed") and not ours:
                # The client took its loop away in the middle.
                raise ClosedError(f"expected a running client, got one that is {status}") from error
            # Whatever took the waiting thread away, Ctrl-C or a handler of another signal.
            loop = self.client.loop
            if running and loop is not None and not self.client.asynchronous:
                loop.add_callback(running[0].cancel)
            raise

    async def _attached_work(self, work: Callable[..., Coroutine[Any, Any, T]], args: tuple[Any, ...]) -> T:
        if not self._attached:
            await self._session.attach()
            self._attached = True
        return await work(*args)

    # -- the coroutines ----------------------------------------------------------------

    async def _accumulate(self, statistic: Statistic, source: Source) -> Any:
        source = await self._settle(source)
        memory = Memory(preferred=await self._homes(source))
        done = await self._round(statistic, source, memory)
        self._warn_of_exposure(done)
        return await asyncio.to_thread(statistic.finalize, done.state)

    async def _graph(self, statistic: Statistic, source: Source) -> Delayed:
        source = await self._settle(source)
        await self._session.refresh_members()
        work = Work.of(self._books.round, statistic, source, self.seed)
        return audited_graph(
            statistic,
            source,
            work.info,
            self._session.plan(source.n_shards, self._books.sampler),
            run_batch,
            name=f"{GRAPH_PREFIX}{secrets.token_hex(6)}",
            rtol=self._tolerances.rtol,
            atol=self._tolerances.atol,
        )

    async def _fit(
        self,
        estimator: Estimator,
        source: Source,
        max_iter: int,
        tol: float,
        store: CheckpointStore | None,
    ) -> FitResult:
        source = await self._settle(source)
        seed = int(getattr(estimator, "seed", self.seed))
        homes = await self._homes(source)

        async def run_round(statistic: Statistic, memory: Memory) -> RoundResult:
            for shard_id, home in homes.items():
                memory.preferred.setdefault(shard_id, home)
            return await self._round(statistic, source, memory, seed)

        return await Fit(estimator, source, run_round, self._books, seed, max_iter, tol, store).run()

    async def _round(
        self, statistic: Statistic, source: Source, memory: Memory, seed: int | None = None
    ) -> RoundResult:
        work = Work.of(self._books.round, statistic, source, self.seed if seed is None else seed)
        await self._session.refresh_members()
        await self._session.prepare(work)
        driver = RoundDriver(
            self._session,
            work,
            statistic,
            self._books.sampler,
            self._settings,
            self._tolerances,
            memory,
            self._receive,
        )
        self._books.round += 1
        done = await driver.run()
        for step in done.machine.log:
            if step.what == "computed":
                self._books.taint.computed(step.domain, work.round, [step.shard_id])
            else:
                self._books.taint.clean(step.domain, work.round, step.shard_id)
        self.rounds.append(done.record)
        self._write("round", done.record.to_dict())
        if done.record.note:
            warnings.warn(done.record.note, AuditWarning, stacklevel=2)
        return done

    def _receive(self, receipt: SDCAuditReceipt) -> None:
        self.receipts.append(receipt)
        self._write("receipt", receipt.to_dict())

    def _write(self, kind: str, record: Mapping[str, Any]) -> None:
        if self._ledger is not None:
            self._ledger.append(kind, record)

    def _look_closer(self, domain: str, worse: Sequence[str]) -> None:
        """Audit a domain more often whose GPU has become worse; where nothing is audited, nothing is."""
        sampler, rate = self._books.sampler, self._ailing_rate
        if 0 < sampler.rate(domain) < rate:
            sampler.set_rate(domain, rate)
        self._write("health", {"domain": domain, "worse": list(worse), "rate": sampler.rate(domain)})

    def _warn_of_exposure(self, done: RoundResult) -> None:
        """Results of earlier calls cannot be taken back: say which may be wrong."""
        suspects = done.record.suspects
        first = self._books.taint.rollback_round(suspects)
        self._books.taint.forget(suspects)
        if first is not None and first < done.record.round:
            last = done.record.round - 1
            rounds = f"round {last}" if first == last else f"rounds {first} to {last}"
            warnings.warn(
                f"{', '.join(suspects)} may have spoiled results of {rounds} that were returned before it "
                "was found out",
                AuditWarning,
                stacklevel=2,
            )

    async def _screen(self, repeats: int) -> Screening:
        found = await screen_cluster(self._session, self.seed, repeats)
        self._write("screening", found.to_dict())
        if self._settings.quarantine:
            for domain, kernels in found.outliers:
                await self._session.quarantine(domain, f"wrong known answers: {', '.join(kernels)}")
        return found

    async def _release(self, domain: str, repeats: int) -> bool:
        if domain not in list(self._session.quarantined):  # which compares, and does not hash
            raise InputError(
                f"expected a domain in quarantine ({sorted(self._session.quarantined)}), got {domain!r}"
            )
        clean = await probation(self._session, domain, self.seed, repeats)
        if clean:
            await self._session.release(domain)
        self._write("release", {"domain": domain, "clean": clean})
        return clean

    # -- data --------------------------------------------------------------------------

    def _source(self, data: Any, weights: Any, target: Any, dim: Any) -> Source:
        if self._sub_chunks is not None and isinstance(data, np.ndarray) and data.ndim:
            # With an asynchronous client this is what it last heard of the scheduler.
            threads = self.client.scheduler_info().get("total_threads", 1)
            pieces = max(1, min(len(data), self._sub_chunks * max(1, threads)))
            data = np.array_split(data, pieces)
        return make_source(data, weights=weights, target=target, dim=dim)

    async def _settle(self, source: Source) -> Source:
        """Persist data whose shards share much work, and wait for persisted ones."""
        collections = source.collections()
        if source.shared:
            collections = self.client.persist(collections)
            source = source.replace(collections)
        pending = [future for future in futures_of(collections) if future.status != "finished"]
        if pending:
            await wait(pending)
        return source

    async def _homes(self, source: Source) -> dict[int, str]:
        """Return the domain that holds each shard's persisted block."""
        keys = {shard_id: keys[0] for shard_id, keys in enumerate(source.locality) if keys}
        if not keys:
            return {}
        await self._session.refresh_members()
        held = await self._session.who_has(keys.values())
        homes = {}
        for shard_id, key in keys.items():
            domains = [d for address in held.get(key, ()) if (d := self._session.locate(address))]
            if domains:
                homes[shard_id] = domains[0]
        return homes


# -- arguments -------------------------------------------------------------------------


def _default(name: str, value: Any) -> Any:
    return dask.config.get(f"sdc.{name}") if value is None else value


def _client(client: Client | None) -> Client:
    if client is None:
        client = default_client()
    if not isinstance(client, Client):
        raise InputTypeError(f"expected a distributed.Client, got {type(client).__name__}")
    if client.status in ("closed", "closing"):
        raise ClosedError(f"expected a running client, got one that is {client.status}")
    return client


def _tolerance(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        raise InputTypeError(f"{name}: expected a real number, got {value!r}")
    if not math.isfinite(value) or value < 0:
        raise InputError(f"{name}: expected a finite number >= 0, got {value!r}")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise InputTypeError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def _path(name: str, value: Any) -> str | os.PathLike[str]:
    if not isinstance(value, str | os.PathLike):
        raise InputTypeError(f"{name}: expected a path or None, got {value!r}")
    return value


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InputTypeError(f"{name}: expected an int, got {value!r}")
    if value < 1:
        raise InputError(f"{name}: expected at least 1, got {value!r}")
    return int(value)


def _timeout(value: Any) -> float:
    if isinstance(value, str):
        try:
            value = parse_timedelta(value)
        except (KeyError, ValueError) as error:
            raise InputError(
                f"worker_timeout_s: expected seconds or a time as 5min, got {value!r}"
            ) from error
    seconds = _tolerance("worker_timeout_s", value)
    if seconds == 0:
        raise InputError("worker_timeout_s: expected a positive number of seconds, got 0")
    return seconds


def _seconds(name: str) -> float:
    value = dask.config.get(f"sdc.{name}")
    try:
        seconds = float(parse_timedelta(value))
    except (KeyError, TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InputError(f"sdc.{name}: expected a time such as '30ms' or 0.03 seconds, got {value!r}")
    return seconds


def _seed(value: Any) -> int:
    if value is None:
        return secrets.randbits(62)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise InputTypeError(f"seed: expected an int >= 0 or None, got {value!r}")
    return int(value)


def _domain(value: Any) -> tuple[str, Callable[[Worker], str] | None]:
    if callable(value):
        return "custom", value
    kinds = tuple(kind for kind in KINDS if kind != "custom")
    if value not in kinds:
        raise InputError(f"domain: expected one of {', '.join(kinds)} or a callable, got {value!r}")
    return value, None
