"""The driver of a dataset: who makes which batch, what is made twice, and what becomes of differences."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from distributed import Client
from distributed.scheduler import KilledWorker

from dask_sdc.cluster.session import Session, expect_open
from dask_sdc.dataset.evidence import digest_of, receipt_of
from dask_sdc.dataset.inputs import Inputs
from dask_sdc.dataset.layout import Arrays, Layout
from dask_sdc.dataset.report import DatasetReport, Progress, counted
from dask_sdc.dataset.work import Made, fence, lose_batch, make_batch
from dask_sdc.evidence.ledger import Ledger
from dask_sdc.exceptions import GenerationFailed, InputTypeError, NoDomainError
from dask_sdc.graph.execute import Blob
from dask_sdc.policy.domains import restrictions
from dask_sdc.policy.messages import DomainLost, Place
from dask_sdc.policy.sampling import CoverageSampler
from dask_sdc.policy.verdict import Closeness, Decision, Outcome, Status, Voice, decide

__all__ = ["UNTIL", "DatasetJob", "Rules"]

logger = logging.getLogger("dask_sdc.dataset")

#: How long a client has to be there.
UNTIL = " until the dataset is there"

#: Seconds without any worker after which a job gives up.
_PATIENCE = 60.0

#: Seconds in which a suspect has to say that it writes nothing more.
_FENCE_S = 10.0

#: Batches that wait at a worker beyond those that it computes.
_AHEAD = 1


@dataclass(eq=False)
class _Case:
    """What is heard of one batch that is audited."""

    batch: int
    primary: Made
    heard: dict[str, Made | None] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Order:
    """One batch to be made in some role, anywhere or in one domain."""

    batch: int
    role: str = "primary"
    domain: str | None = None
    case: _Case | None = None
    lost: str = ""  # why nobody is to try it any more
    forsaken: bool = False  # its maker is a suspect: whatever comes of it is not to be believed


@dataclass(frozen=True)
class Rules:
    """How many batches are audited and tried again.

    Parameters
    ----------
    sampler : CoverageSampler
        Draws the batches that are made twice.
    quarantine : bool
        Whether domains that were named are taken out of service.
    max_retries : int
        How often a batch may be lost or fail.
    timeout : float or None
        Seconds that a batch may take; None is any.
    """

    sampler: CoverageSampler
    quarantine: bool
    max_retries: int
    timeout: float | None


class DatasetJob:
    """Makes the batches of a dataset on a cluster.

    Parameters
    ----------
    client : Client
        The cluster.
    session : Session
        Attached to it; knows the failure domains.
    job : Blob
        The pickled `Job`.
    layout : Layout
        Of the dataset.
    arrays : dict
        Its opened arrays.
    inputs : Inputs
        What samples are made from.
    report : DatasetReport
        Filled in.
    progress : Progress
        Told of every batch.
    rules : Rules
        How many are audited and tried again.
    ledger : Ledger or None
        Where receipts go.
    """

    def __init__(
        self,
        client: Client,
        session: Session,
        job: Blob,
        layout: Layout,
        arrays: Arrays,
        inputs: Inputs,
        report: DatasetReport,
        progress: Progress,
        rules: Rules,
        ledger: Ledger | None,
    ) -> None:
        self._client, self._session, self._job = client, session, job
        self._layout, self._arrays, self._inputs = layout, arrays, inputs
        self._report, self._progress = report, progress
        self._rules, self._ledger = rules, ledger
        self._queue: deque[_Order] = deque()
        self._running: dict[asyncio.Task[Made], _Order] = {}
        self._load: Counter[str] = Counter()
        self._made: dict[int, Made] = {}
        self._clean: set[int] = set()
        self._cases: dict[int, _Case] = {}
        self._attempts: Counter[int] = Counter()
        self._written: Counter[int] = Counter()  # how often each batch was ordered to be
        self._avoid: dict[int, set[str]] = {}
        # Batches that went down with a worker: they are made alone, as any of them may have been the reason.
        self._alone: set[int] = set()
        self._serial = 0

    # -- the loop --------------------------------------------------------------------------------

    async def run(self, batches: Iterable[int]) -> None:
        """Make some batches.

        Raises
        ------
        GenerationFailed
            If a rank had too many failures in a row, or a batch fails for a reason of its own.
        NoDomainError
            If no worker is left.
        ClosedError
            If the client is closed in the middle.
        """
        self._queue.extend(_Order(batch) for batch in batches)
        # A task, that Dask repeats if its result is lost: every worker fetches the job once.
        self._blob = self._client.submit(bytes, self._job.data, key=f"sdc-dataset-job-{self._session.topic}")
        news = asyncio.ensure_future(self._session.next_events(1.0))
        alone_since: float | None = None
        clock = asyncio.get_running_loop().time
        try:
            while self._queue or self._running or await self._overwritten():
                expect_open(self._client, until=UNTIL)
                await self._give_up_unreachable()
                self._fill()
                if self._running:
                    alone_since = None
                elif alone_since is None:
                    alone_since = clock()
                elif clock() - alone_since > _PATIENCE:
                    raise NoDomainError(f"expected workers to make {len(self._queue)} batches, got none")
                either: list[asyncio.Future[Any]] = [news, *self._running]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if news.done():
                    for event in news.result():
                        if isinstance(event, DomainLost):
                            self._forsake(event.domain)
                    news = asyncio.ensure_future(self._session.next_events(1.0))
                for task in [task for task in self._running if task.done()]:
                    await self._landed(task, self._running.pop(task))
        finally:
            news.cancel()
            for task in self._running:
                task.cancel()
            await asyncio.gather(news, *self._running, return_exceptions=True)
            self._blob.release()

    def _places(self) -> list[Place]:
        return [place for place in self._session.places() if place.domain not in self._session.quarantined]

    async def _give_up_unreachable(self) -> None:
        """Hear nothing from a domain that has left, or was quarantined, before it was asked."""
        reachable = {place.domain for place in self._places()}
        for order in [one for one in self._queue if one.case is not None and one.domain not in reachable]:
            self._queue.remove(order)
            assert order.case is not None
            await self._hear(order.case, order.role, None)

    def _fill(self) -> None:
        """Give every domain work, as long as it has room for it."""
        places = {place.domain: place for place in self._places()}
        for domain, place in places.items():
            while self._load[domain] < place.slots + _AHEAD and not self._left_alone(domain):
                order = self._next_for(domain, places.keys())
                if order is None:
                    break
                self._submit(order, domain)

    def _left_alone(self, domain: str) -> bool:
        running = self._running.values()
        return any(order.domain == domain and order.batch in self._alone for order in running)

    def _next_for(self, domain: str, there: Iterable[str]) -> _Order | None:
        for order in self._queue:
            if order.domain is not None and order.domain != domain:
                continue
            if order.batch in self._alone and self._load[domain]:
                continue
            avoid = self._avoid.get(order.batch, set())
            if domain in avoid and order.domain is None and not avoid.issuperset(there):
                continue
            self._queue.remove(order)
            return order
        return None

    def _submit(self, order: _Order, domain: str) -> None:
        self._serial += 1
        key = f"sdc-dataset-{order.role}-{order.batch}-{self._serial}-{self._session.topic}"
        options = {"key": key, "resources": restrictions(domain), "pure": False, "retries": 0}
        job = (self._blob, self._job.digest, order.batch, self._serial)
        writes = order.role == "primary"
        self._written[order.batch] += writes
        if order.lost:
            future = self._client.submit(lose_batch, *job, order.lost, **options)
        else:
            given = self._inputs.batch(self._client, self._layout.samples_of(order.batch))
            try:
                future = self._client.submit(make_batch, *job, given, writes, **options)
            except TypeError as error:
                raise InputTypeError(
                    f"inputs: expected what can be sent to workers, got {error} for batch {order.batch}"
                ) from error
        self._load[domain] += 1
        task = asyncio.ensure_future(self._collect(future, domain))
        self._running[task] = replace(order, domain=domain)

    async def _collect(self, future: Any, domain: str) -> Made:
        try:
            frame = await asyncio.wait_for(self._session.fetch(future, domain), self._rules.timeout)
        except TimeoutError:
            await self._session.evict(domain, f"no batch within {self._rules.timeout:g} s")
            raise
        finally:
            self._load[domain] -= 1
            future.release()
        return Made.from_bytes(frame)

    def _forsake(self, domain: str, suspect: bool = False) -> None:
        """Expect nothing more of a domain that has left or is a suspect; of that not even what is there."""
        for task, order in self._running.items():
            if order.domain == domain:
                self._running[task] = replace(order, forsaken=suspect)
                task.cancel()

    async def _landed(self, task: asyncio.Task[Made], order: _Order) -> None:
        error = None if task.cancelled() else task.exception()
        if not (task.cancelled() or order.forsaken) and error is None:
            made = task.result()
            await (self._take(made) if order.case is None else self._hear(order.case, order.role, made))
        elif order.case is not None:
            await self._hear(order.case, order.role, None)
        elif order.forsaken:
            self._avoid.setdefault(order.batch, set()).add(order.domain or "")
            self._again([order.batch])
        elif error is None:
            self._failed(order, f"the worker of domain {order.domain} left", None)
        else:
            lost = isinstance(error, KilledWorker | TimeoutError)
            self._failed(order, f"{type(error).__name__}: {error}", None if lost else error)

    def _failed(self, order: _Order, why: str, error: BaseException | None) -> None:
        """Have a batch made elsewhere; give it up if it takes its worker along every time."""
        expect_open(self._client, until=UNTIL)
        batch = order.batch
        if error is None and batch not in self._alone:
            self._alone.add(batch)
        else:
            self._attempts[batch] += 1
        self._avoid.setdefault(batch, set()).add(order.domain or "")
        logger.warning("Batch %d was lost: %s", batch, why)
        if self._attempts[batch] <= self._rules.max_retries:
            self._again([batch])
        elif error is None and not order.lost:
            message = f"its batch was lost {self._attempts[batch]} times, the last time as {why}"
            self._queue.appendleft(_Order(batch, lost=message))
        else:
            attempts = self._attempts[batch]
            raise GenerationFailed(
                f"batch {batch}: expected it to be made in {attempts} attempts, got {why} in the last"
            ) from error

    def _again(self, batches: Iterable[int]) -> None:
        for batch in batches:
            self._report.redone += 1
            self._made.pop(batch, None)
            self._clean.discard(batch)
            self._cases.pop(batch, None)
            self._queue.appendleft(_Order(batch))

    async def _take(self, made: Made) -> None:
        """Note a batch that was written, and have it made once more elsewhere if that is drawn."""
        if made.fatal:
            raise GenerationFailed(
                f"rank {made.domain} ({made.worker}) cannot go on, and so no rank does: {made.fatal}",
                local_error=made.fatal,
                rank=made.domain,
            )
        self._made[made.batch] = made
        counted(self._report.ranks, made.domain, made.failures, made.seconds)
        self._report.retried += made.retries
        self._tell()
        if self._rules.sampler.draw(made.domain, (made.batch,)):
            case = self._cases[made.batch] = _Case(made.batch, made)
            await self._ask(case, "audit", self._other(made.domain, {made.domain}))

    def _tell(self) -> None:
        there = self._report.kept + sum(len(made.digests) for made in self._made.values())
        failures = sum(made.failures for made in self._made.values())
        missing = sum(1 for made in self._made.values() for reason in made.reasons if reason)
        self._progress.show(there, failures, missing)

    # -- audits ----------------------------------------------------------------------------------

    def _other(self, like: str, apart: set[str]) -> str | None:
        """Return a domain apart from some with the environment of one, which promises equal bits."""
        places = self._places()
        wanted = next((place.fingerprint for place in places if place.domain == like), None)
        free = [p.domain for p in places if p.domain not in apart and p.fingerprint == wanted]
        return min(free, key=lambda domain: self._load[domain], default=None)

    async def _ask(self, case: _Case, role: str, domain: str | None) -> None:
        case.waiting.add(role)
        if domain is None or domain not in {place.domain for place in self._places()}:
            await self._hear(case, role, None)
        else:
            self._queue.appendleft(_Order(case.batch, role, domain, case))

    async def _hear(self, case: _Case, role: str, made: Made | None) -> None:
        if self._cases.get(case.batch) is not case:
            return  # its batch is made anew
        case.heard[role] = made
        case.waiting.discard(role)
        if not case.waiting:
            await self._judge(case)

    async def _judge(self, case: _Case) -> None:
        voices = self._voices(case)
        decision = decide(**voices, compare=_compare)
        if decision.outcome is Outcome.MISMATCH_PENDING:
            sides = {case.primary.domain, voices["audit"].domain}
            case.waiting.update(decision.needs)  # so that none of them is judged alone
            for role in decision.needs:
                at = voices[role.removeprefix("rerun_")].domain if role != "witness" else None
                await self._ask(case, role, at or self._other(case.primary.domain, sides))
            return
        del self._cases[case.batch]
        if decision.outcome is Outcome.AGREE:
            self._clean.add(case.batch)
            self._report.audited += sum(1 for digest in case.primary.digests if digest)
        elif decision.outcome is Outcome.SKIPPED:
            self._rules.sampler.refund(case.primary.domain)
            skipped = self._report.skipped_audits
            skipped[decision.reason] = skipped.get(decision.reason, 0) + 1
        else:
            await self._conclude(case, decision, voices)

    def _voices(self, case: _Case) -> dict[str, Voice]:
        """Return what is heard; samples that one side could not have say nothing."""
        heard: dict[str, Made | None] = {"primary": case.primary, **case.heard}
        digests = digest_of([made for made in heard.values() if made is not None])
        prints = {place.domain: place.fingerprint for place in self._places()}
        return {
            role: Voice(role, "", None, "", Status.MISSING)
            if made is None
            else Voice(role, made.domain, digests[id(made)], prints.get(made.domain, ""), Status.VALUE, made)
            for role, made in heard.items()
        }

    async def _conclude(self, case: _Case, decision: Decision, voices: dict[str, Voice]) -> None:
        """Act on what was decided, and write it down."""
        status = "not_requested"
        for domain in decision.suspects:
            why = f"batch {case.batch} of a dataset: wrong samples"
            status = "disabled"
            await self._fence_off(domain)
            if self._rules.quarantine:
                failure = await self._session.quarantine(domain, why)
                status = "deferred:refused" if failure else "committed"
                if not failure:
                    self._report.quarantined[domain] = why
            await self._redo_of(domain)
        trusted = voices.get(decision.value or "")
        if trusted is not None and trusted.digest != voices["primary"].digest:
            await self._redo({case.batch} & self._made.keys())
        receipt = receipt_of(case.batch, decision, voices, status)
        self._report.receipts.append(receipt)
        logger.warning("%s", receipt.summary())
        if self._ledger is not None:
            self._ledger.append("receipt", receipt.to_dict())

    async def _fence_off(self, domain: str) -> None:
        """Have a suspect write nothing more of what it was given: it is made elsewhere, maybe before."""
        at = [one for one in self._session.addresses() if self._session.locate(one) == domain]
        order = self._client.run(fence, self._job.digest, self._serial, workers=at, on_error="ignore")
        try:
            told = await asyncio.wait_for(order, _FENCE_S)
        except Exception:  # of a worker that does not answer, or a client that is closed
            expect_open(self._client, until=UNTIL)
            told = {}
        if silent := {*at} - {*told}:
            logger.warning("Workers %s do not say that they write nothing more", sorted(silent))

    async def _overwritten(self) -> bool:
        """Have batches made again that somebody wrote over who was thought to be gone."""
        # Dask itself gives what one worker of a domain had to another.
        several = len(self._session.addresses()) > len(self._session.places())
        twice = [batch for batch in self._made if several or self._written[batch] > 1]
        right = await asyncio.gather(*(asyncio.to_thread(self._is_as_heard, batch) for batch in twice))
        late = [batch for batch, one in zip(twice, right, strict=True) if not one]
        if late:
            logger.warning("Batches %s were written over by workers that were thought to be gone", late)
            await self._redo(late)
        return bool(late)

    def _is_as_heard(self, batch: int) -> bool:
        """Say whether a batch is what its maker said; all of it if others may have written a part of it."""
        if self._layout.row_digest(self._arrays, batch) != self._made[batch].row:
            return False
        return self._written[batch] == 1 or self._layout.vouched(self._arrays, batch)

    async def _redo_of(self, domain: str) -> None:
        """Make again what a suspect has made, unless an audit confirmed it, and what it is making."""
        self._forsake(domain, suspect=True)
        # What it has written of those may be there and vouched for.
        written = [order.batch for order in self._running.values() if order.forsaken and order.case is None]
        await asyncio.to_thread(self._layout.disown, self._arrays, written)
        await self._redo(
            batch for batch, made in self._made.items() if made.domain == domain and batch not in self._clean
        )

    async def _redo(self, batches: Iterable[int]) -> None:
        doubtful = sorted(batches)
        # Before anything else: what is on disk may look right, and is not to be believed after a crash.
        await asyncio.to_thread(self._layout.disown, self._arrays, doubtful)
        for batch in doubtful:
            self._avoid.setdefault(batch, set()).add(self._made[batch].domain)
        self._again(doubtful)

    # -- the end ---------------------------------------------------------------------------------

    def summarise(self) -> None:
        """Fill in what the report says of samples."""
        for batch, made in self._made.items():
            first = self._layout.samples_of(batch).start
            self._report.failures += made.failures
            self._report.reasons |= {first + k: why for k, why in enumerate(made.reasons) if why}


def _compare(a: Voice, b: Voice) -> Closeness:
    # Between equal environments every bit counts.
    return Closeness.OUTSIDE
