"""Runs one round on a cluster: feeds events to the state machine and does what it says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

from dask_sdc.cluster.inputs import InputBook, Judgement, Reading
from dask_sdc.cluster.session import Session, Work
from dask_sdc.evidence.envelope import Comparison, compare_payloads
from dask_sdc.evidence.fold import SealedFold
from dask_sdc.evidence.receipts import SDCAuditReceipt, make_receipt
from dask_sdc.evidence.seal import SealedBatch, SealedStatistic, failed_statistic
from dask_sdc.exceptions import CorruptionError
from dask_sdc.policy.messages import (
    Abort,
    Cancel,
    Case,
    Close,
    Dispatch,
    Event,
    Evict,
    Exposed,
    Heard,
    Instruction,
    Landed,
    Quarantine,
    Quarantined,
    RoundRecord,
    Settings,
    Tick,
)
from dask_sdc.policy.round import Round
from dask_sdc.policy.sampling import CoverageSampler
from dask_sdc.policy.verdict import Closeness, Decision, Outcome, Voice
from dask_sdc.statistics.base import State, Statistic

T = TypeVar("T")

#: Seconds between looks at deadlines while nothing else happens.
_TICK = 0.1

#: Seconds that work may hold up the event loop: a hop to another thread costs as much on a busy machine.
_SHORT = 5e-3


@dataclass(frozen=True)
class Tolerances:
    """Envelope of a comparison: relative and absolute tolerance."""

    rtol: float
    atol: float


@dataclass
class Pace:
    """Calls a function in a thread, or in place while it is known to be quick.

    Attributes
    ----------
    seconds : float
        What one unit of the function's work took last.
    """

    seconds: float = float("inf")

    async def run(self, function: Callable[..., T], *args: Any, units: int = 1) -> T:
        """Return what the function returns; ``units`` says how much work that is."""
        if self.seconds * units <= _SHORT:
            return self._timed(function, args, units)
        return await asyncio.to_thread(self._timed, function, args, units)

    def _timed(self, function: Callable[..., T], args: tuple[Any, ...], units: int) -> T:
        start = time.perf_counter()
        result = function(*args)
        self.seconds = (time.perf_counter() - start) / units
        return result


@dataclass
class Memory:
    """What one round leaves behind for the next of the same call.

    Attributes
    ----------
    preferred : dict of int to str
        Which domain computed a shard.
    barred : dict of str to str
        Domains that this call uses no more.
    inputs : InputBook
        Digests of the shards' input blocks.
    fold : Pace
        Of folding one shard.
    """

    preferred: dict[int, str] = field(default_factory=dict)
    barred: dict[str, str] = field(default_factory=dict)
    inputs: InputBook = field(default_factory=InputBook)
    fold: Pace = field(default_factory=Pace)


@dataclass(frozen=True)
class RoundResult:
    """What a round ends with.

    Attributes
    ----------
    state : State
        The folded state.
    record : RoundRecord
    machine : Round
    spoiled : int or None
        The first earlier round of the call in which an input was read wrongly, as is known now.
    """

    state: State
    record: RoundRecord
    machine: Round
    spoiled: int | None = None


class RoundDriver:
    """Executes one round.

    Parameters
    ----------
    session : Session
    work : Work
    statistic : Statistic
        The same that ``work`` holds pickled.
    sampler : CoverageSampler
    settings : Settings
    tolerances : Tolerances
    memory : Memory
        Read at the start, written at the end.
    receive : callable
        Called with every receipt as soon as its case is closed.
    """

    def __init__(
        self,
        session: Session,
        work: Work,
        statistic: Statistic,
        sampler: CoverageSampler,
        settings: Settings,
        tolerances: Tolerances,
        memory: Memory,
        receive: Callable[[SDCAuditReceipt], None],
    ) -> None:
        self._session = session
        self._work = work
        self._statistic = statistic
        self._tolerances = tolerances
        self._memory = memory
        self._receive = receive
        self._fold: SealedFold | None = SealedFold(statistic, work.source.n_shards, session.limits)
        self._folded = 0
        self._errands: set[asyncio.Task[None]] = set()
        self._machine = Round(
            work.round,
            range(work.source.n_shards),
            session.places(),
            sampler,
            self._compare,
            settings,
            preferred=memory.preferred,
            cost=session.expected_cost(work),
            barred={**memory.barred, **session.quarantined},
        )

    async def run(self) -> RoundResult:
        """Run the round to its end.

        Raises
        ------
        ShardError, ClusterError
            What makes the round impossible to complete.
        """
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        try:
            self._execute(self._machine.start(loop.time()))
            while not self._machine.done:
                events = await self._session.next_events(_TICK)
                instructions: list[Instruction] = []
                for event in events or [Tick(loop.time())]:
                    checked = await self._check_inputs(event) if isinstance(event, Landed) else [event]
                    for one in checked:
                        instructions += self._machine.handle(one)
                self._execute(instructions)
                await self._fold_along()
            state = await self._folded_state()
        finally:
            self._session.cancel_all()
            self._machine.record.seconds = time.perf_counter() - started
        self._remember()
        spoiled, self._memory.inputs.spoiled = self._memory.inputs.spoiled, None
        return RoundResult(state, self._machine.record, self._machine, spoiled)

    def _execute(self, instructions: list[Instruction]) -> None:
        orders = [i for i in instructions if isinstance(i, Dispatch)]
        cancelled = {i.batch_id for i in instructions if isinstance(i, Cancel)}
        self._session.cancel(cancelled)
        orders = [order for order in orders if order.batch_id not in cancelled]
        if orders:
            self._session.dispatch(orders, self._work)
        for instruction in instructions:
            match instruction:
                case Close():
                    self._receive(self._receipt(instruction))
                case Quarantine():
                    self._background(self._quarantine(instruction))
                case Evict():
                    self._background(
                        self._session.evict(instruction.domain, instruction.why, instruction.worker)
                    )
                case Abort():
                    raise instruction.error

    def _background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    async def _quarantine(self, order: Quarantine) -> None:
        failure = await self._session.quarantine(order.domain, order.why)
        now = asyncio.get_running_loop().time()
        self._session.tell(Quarantined(order.domain, failure, now))

    # -- inputs ------------------------------------------------------------------------

    async def _check_inputs(self, event: Landed) -> list[Event]:
        """Compare each shard's input with what others saw of it.

        A persisted block that may have changed in memory is dropped, so that Dask computes it again,
        and its shard is tried anew. Who read its source wrongly shows a violation.
        """
        records, void, exposures = [], set(), []
        for record in event.result.records:
            reading, exposed = self._judge_input(record, event.result)
            exposures += [self._exposure(name, record, event) for name in exposed]
            if reading is Reading.SOUND:
                records.append(record)
            elif reading is Reading.WRONG:
                known = self._memory.inputs.other(record.shard_id, record.input_digest)
                note = f"input digest {record.input_digest.hex()}, expected {known.hex()} as others read it"
                records.append(replace(record, status="violation", notes=(note,)))
            else:
                void.add(record.shard_id)
                await self._read_again(record, event.result)
        event = replace(event, result=replace(event.result, records=tuple(records)), void=frozenset(void))
        return [event, *exposures]

    def _judge_input(self, record: SealedStatistic, batch: SealedBatch) -> Judgement:
        if not record.input_digest:
            return Judgement(Reading.SOUND)
        return self._memory.inputs.judge(
            record.shard_id,
            record.input_digest,
            batch.domain,
            role=batch.role,
            audited=self._machine.audits(record.shard_id),
            persisted=bool(self._work.source.locality[record.shard_id]),
            number=self._work.round,
        )

    def _exposure(self, name: str, record: SealedStatistic, event: Landed) -> Exposed:
        batch = event.result
        by = Heard(record, batch.domain, batch.worker, batch.fingerprint, batch.role, batch.attempt)
        why = f"read another input of shard {record.shard_id}; others saw {record.input_digest.hex()}"
        return Exposed(name, record.shard_id, why, by, event.now)

    async def _read_again(self, record: SealedStatistic, batch: SealedBatch) -> None:
        """Have a shard's input read once more, from a fresh block if it is a persisted one."""
        keys = self._work.source.locality[record.shard_id]
        if not keys:
            return
        # Before the round hears of it, so that no shard is tried with the old block again.
        if not await self._session.refresh(keys):
            raise CorruptionError(
                f"shard {record.shard_id}: its block changed in memory and cannot be computed again, "
                f"since it was scattered (read by domain {batch.domain}, worker {batch.worker})",
                shard_id=record.shard_id,
                domain=batch.domain,
                worker=batch.worker,
            )
        self._machine.record.mismatches += 1
        other = self._memory.inputs.other(record.shard_id, record.input_digest)
        self._receive(
            make_receipt(
                record,
                record,
                self._comparison(record.payload, record.payload),
                primary_batch=batch,
                audit_batch=batch,
                verdict="mismatch",
                mismatch_reason="the persisted input block changed in memory",
                decided={
                    "input_digest": record.input_digest.hex(),
                    "other_input_digest": other.hex(),
                    "healed": "every replica of the block was dropped and computed again",
                },
                decided_at=time.time(),
            )
        )

    # -- folding -----------------------------------------------------------------------

    async def _fold_along(self) -> None:
        """Fold what has settled since the last time, while workers go on."""
        if self._machine.replaced:
            self._fold = None  # a folded result was replaced: all is folded anew at the end
        # Shards settle at the end of the mapping and none ever leaves it.
        fresh = len(self._machine.settled) - self._folded
        if self._fold is not None and fresh:
            await self._add(self._fold, fresh)
            self._folded += fresh

    async def _folded_state(self) -> State:
        await self._fold_along()
        fold = self._fold
        if fold is None:
            fold = SealedFold(self._statistic, self._work.source.n_shards, self._session.limits)
            await self._add(fold, len(self._machine.settled))
        return fold.result()

    async def _add(self, fold: SealedFold, last: int) -> None:
        """Add the results that settled last."""
        settled = self._machine.settled
        records = [settled[shard_id].record for shard_id in islice(reversed(settled), last)]
        await self._memory.fold.run(_add_records, fold, records, units=last)

    def _remember(self) -> None:
        machine = self._machine
        self._memory.preferred.update(machine.owners())
        self._session.learn_cost(self._work, machine.cost)
        for name in machine.record.barred:
            self._memory.barred[name] = f"barred in round {machine.record.round}"

    # -- comparing ---------------------------------------------------------------------

    def _compare(self, a: Voice, b: Voice) -> Closeness:
        comparison = self._comparison(a.ref.record.payload, b.ref.record.payload)
        if comparison.equal:
            return Closeness.IDENTICAL
        return Closeness.WITHIN if comparison.within else Closeness.OUTSIDE

    def _comparison(self, a: bytes, b: bytes) -> Comparison:
        return compare_payloads(
            a,
            b,
            rtol=self._tolerances.rtol,
            atol=self._tolerances.atol,
            statistic=self._statistic,
            limits=self._session.limits,
        )

    def _receipt(self, close: Close) -> SDCAuditReceipt:
        case, decision = close.case, close.decision
        primary, audit = (self._side(case, part) for part in ("primary", "audit"))
        comparison = self._comparison(primary[0].payload, audit[0].payload)
        witness = case.voices.get("witness")
        heard = witness.ref if witness is not None and isinstance(witness.ref, Heard) else None
        suspects = decision.suspects
        return make_receipt(
            primary[0],
            audit[0],
            comparison,
            primary_batch=primary[1],
            audit_batch=audit[1],
            witness_worker=heard.worker if heard else None,
            witness_domain=heard.domain if heard else None,
            witness_fingerprint=heard.fingerprint if heard else "",
            verdict="mismatch" if decision.outcome is Outcome.SUSPECT else "inconclusive",
            suspected_workers=tuple(_workers(case, suspects)),
            suspected_domains=suspects,
            persistence=decision.persistence and str(decision.persistence),
            quarantine_status=close.status,
            mismatch_reason=_reason(case, comparison),
            decided=_decided(case, decision),
            decided_at=time.time(),
        )

    def _side(self, case: Case, part: str) -> tuple[SealedStatistic, SealedBatch]:
        voice = case.voices[part]
        heard = voice.ref if isinstance(voice.ref, Heard) else None
        record = heard.record if heard else failed_statistic(case.shard_id, (str(voice.status),))
        return record, SealedBatch(
            self._work.round,
            heard.role if heard else part,
            heard.attempt if heard else 0,
            voice.domain,
            heard.worker if heard else "",
            voice.fingerprint,
            self._work.statistic.digest,
        )


def _add_records(fold: SealedFold, records: Iterable[SealedStatistic]) -> None:
    for record in records:
        fold.add_record(record)


def _workers(case: Case, suspects: tuple[str, ...]) -> dict[str, None]:
    return {
        voice.ref.worker: None
        for voice in case.voices.values()
        if voice.domain in suspects and isinstance(voice.ref, Heard)
    }


def _reason(case: Case, comparison: Comparison) -> str:
    """What was wrong with a voice says more than that the bytes differ."""
    texts = {
        "damaged": "payload does not have the digest that it was sealed with",
        "garbled": "statistic or model arrived garbled",
    }
    for part in ("primary", "audit"):
        voice = case.voices[part]
        if voice.status in texts:
            return f"{part}: {texts[voice.status]}"
        if voice.status == "violation" and isinstance(voice.ref, Heard):
            return f"{part}: {'; '.join(voice.ref.record.notes)}"
    return comparison.reason or "bits differ inside of the envelope in one environment"


def _decided(case: Case, decision: Decision) -> Mapping[str, Any]:
    return {
        "outcome": str(decision.outcome),
        "reason": decision.reason,
        "trusted": decision.value,
        "voices": {
            part: {"domain": voice.domain, "status": str(voice.status), "digest": (voice.digest or b"").hex()}
            for part, voice in case.voices.items()
        },
    }
