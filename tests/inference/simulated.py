"""A pipeline without a cluster: workers are objects, stages are cheap, and anything may fail at any tick.

Stages are deterministic functions of all that they were fed, so a wrong replay shows. Their outputs also
depend on the width of the chunk, as those of matrix products do: a replay in other shapes gives other bits.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dask_sdc.exceptions import StageError
from dask_sdc.inference.heal import RecoveryOps, RecoveryReport, SessionState, StageReport, run_recovery
from dask_sdc.inference.journal import ChunkRecord, DigestLog, Journal, boundary_digest
from dask_sdc.inference.session import EpochFence
from dask_sdc.inference.speculative import accept

VOCABULARY = 23
_MASK = (1 << 40) - 1


def mix(*values: int) -> int:
    x = 0x9E3779B97F4A7C15
    for value in values:
        x = (x ^ value) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        x ^= x >> 29
    return x & _MASK


class Unreachable(OSError):
    """The worker does not answer."""


@dataclass
class Held:
    """What a worker holds of one session."""

    states: list[int] = field(default_factory=list)  # one per position, the KV cache
    journal: Journal = field(default_factory=lambda: Journal(1 << 20))
    inputs: DigestLog = field(default_factory=DigestLog)

    def truncate(self, position: int) -> None:
        if position > len(self.states):
            raise StageError(f"expected at most {len(self.states)}, got {position}")
        del self.states[position:]
        self.journal.truncate(position)
        self.inputs.truncate(position)


@dataclass
class Worker:
    name: str
    stage: int = -1
    weight: int = 0
    alive: bool = True
    frozen: bool = False
    fence: EpochFence = field(default_factory=EpochFence)
    sessions: dict[str, Held] = field(default_factory=dict)
    received: int = -1
    forwarded: int = -1
    loads: int = 0
    bent: int = 0  # added to what it computes

    def answer(self) -> None:
        if not self.alive:
            raise Unreachable(self.name)

    def compute(self, session: str, record: ChunkRecord, x: np.ndarray) -> tuple[ChunkRecord, np.ndarray]:
        """Forward one chunk (1, T) and note it on both sides."""
        self.answer()
        held = self.sessions.setdefault(session, Held())
        if record.position < len(held.states):
            held.truncate(record.position)
        width = x.shape[1]
        held.inputs.append(ChunkRecord(record.index, record.position, width, width, boundary_digest(x)))
        out, scale = np.empty_like(x), 16 if self.stage else 1
        for t in range(width):
            before = held.states[-1] if held.states else 0
            held.states.append(mix(self.weight + self.bent, before, int(x[0, t]) // scale))
            # The lowest bits are the rounding of this shape: digests see them, the next stage does not.
            out[0, t] = held.states[-1] // 16 * 16 + width % 16
        digest = held.journal.append(record.index, record.position, out)
        return ChunkRecord(record.index, record.position, width, width, digest), out


@dataclass(frozen=True)
class Fault:
    tick: int
    kind: str  # kill, freeze, drop, forget, rot, raise
    target: int  # number of a worker


class Simulation:
    """Workers in their places, a clock of events, and the faults that strike at its ticks."""

    def __init__(
        self, stages: int, spares: int, faults: Sequence[Fault] = (), *, all_boundaries: bool = False
    ) -> None:
        self.n = stages
        self.weights = [mix(7, stage) for stage in range(stages)]
        self.workers = [Worker(f"w{k}") for k in range(stages + spares)]
        self.place = list(range(stages))
        for stage in range(stages):
            self.workers[stage].stage, self.workers[stage].weight = stage, self.weights[stage]
        self.faults = sorted(faults, key=lambda fault: fault.tick)
        self.tick = 0
        self.dropping = False
        self.raising = False
        self.all_boundaries = all_boundaries
        self.forgetful = False  # stages cannot take back positions
        self.weight_of_spare: dict[int, int] = {}

    @property
    def blocks(self) -> list[str]:
        return [f"{weight:x}" for weight in self.weights]

    def worker(self, stage: int) -> Worker:
        return self.workers[self.place[stage]]

    def advance(self) -> None:
        """Let time pass: faults that are due strike."""
        self.tick += 1
        while self.faults and self.faults[0].tick <= self.tick:
            fault = self.faults.pop(0)
            worker = self.workers[fault.target % len(self.workers)]
            if fault.kind == "kill":
                worker.alive = False
            elif fault.kind == "freeze":
                worker.frozen = True
            elif fault.kind == "drop":
                self.dropping = True
            elif fault.kind == "raise":
                self.raising = True
            elif fault.kind == "forget":
                worker.sessions.clear()
            elif fault.kind == "rot":
                for held in worker.sessions.values():
                    for kept in held.journal._held.values():
                        kept.array[...] += 1
                        break

    def strike(self) -> None:
        """An op begins: time passes, and it may fail by itself."""
        self.advance()
        if self.raising:
            self.raising = False
            raise OSError("expected an answer, got a broken pipe")

    # -- the normal path ------------------------------------------------------------------------

    def traverse(
        self, epoch: int, session: str, record: ChunkRecord, ids: np.ndarray
    ) -> tuple[list[ChunkRecord], np.ndarray]:
        """Send a chunk through all stages; TimeoutError where it gets stuck."""
        records, x = [], ids
        for stage in range(self.n):
            self.advance()
            worker = self.worker(stage)
            if self.dropping:
                self.dropping = False
                raise TimeoutError("the message was lost")
            if not worker.alive:
                raise TimeoutError("no answer")
            worker.fence.check(epoch)
            worker.received = record.index
            if worker.frozen:
                raise TimeoutError("no answer")
            output, x = worker.compute(session, record, x)
            worker.forwarded = record.index
            records.append(output)
        self.advance()
        if self.dropping:
            self.dropping = False
            raise TimeoutError("the answer was lost")
        return records, x


class Ops(RecoveryOps):
    def __init__(self, simulation: Simulation, coordinator: Coordinator) -> None:
        self.s = simulation
        self.coordinator = coordinator
        self.calls: list[str] = []
        self.epoch = 0

    def begin(self, name: str) -> None:
        self.calls.append(name)
        self.s.strike()

    async def stop(self, epoch: int) -> None:
        self.begin("stop")
        self.epoch = epoch
        for stage in range(self.s.n):
            worker = self.s.worker(stage)
            if worker.alive:
                worker.fence.rise(epoch)

    async def reports(self, epoch: int) -> list[StageReport]:
        self.begin("reports")
        found = []
        for stage in range(self.s.n):
            w = self.s.worker(stage)
            detail = "" if w.alive else f"{w.name} does not answer"
            found.append(StageReport(stage, w.alive, w.received, w.forwarded, w.fence.epoch, detail))
        return found

    async def choose_spare(self, stage: int, refused: Collection[str]) -> str | None:
        self.begin("choose_spare")
        for number, worker in enumerate(self.s.workers):
            if (
                worker.alive
                and number not in self.s.place
                and worker.name not in refused
                and worker.stage < 0
            ):
                return worker.name
        return None

    async def load(self, stage: int, spare: str) -> str:
        self.begin("load")
        number = int(spare[1:])
        worker = self.s.workers[number]
        worker.answer()
        worker.stage, worker.loads = stage, worker.loads + 1
        worker.weight = self.s.weight_of_spare.get(number, self.s.weights[stage])
        worker.fence.rise(self.epoch)
        self.s.place[stage] = number
        return self.s.blocks[stage]

    async def open(self, stage: int, session: SessionState) -> None:
        self.begin("open")
        self.s.worker(stage).answer()
        if self.s.worker(stage).frozen:
            raise TimeoutError("frozen")
        self.s.worker(stage).sessions[session.session] = Held()

    async def truncate(self, stage: int, session: str, position: int) -> bool:
        self.begin("truncate")
        worker = self.s.worker(stage)
        worker.answer()
        if worker.frozen:
            raise TimeoutError("frozen")
        held = worker.sessions.setdefault(session, Held())
        if self.s.forgetful and held.inputs.position > position:
            worker.sessions[session] = Held()
            return False
        held.truncate(position)
        return True

    async def digests(self, stage: int, session: str) -> Sequence[ChunkRecord]:
        self.begin("digests")
        self.s.worker(stage).answer()
        return self.s.worker(stage).sessions[session].inputs.records

    async def replay(self, stage: int, session: SessionState, exact: bool) -> AsyncIterator[ChunkRecord]:
        for chunk in session.chunks:
            self.begin("replay")
            if stage:
                source = self.s.worker(stage - 1)
                source.answer()
                x = source.sessions[session.session].journal.read(chunk.index)
            else:
                x = self.coordinator.fed[session.session].read(chunk.index)
            worker = self.s.worker(stage)
            if worker.frozen:
                raise TimeoutError("frozen")
            output, y = worker.compute(session.session, chunk, x)
            if chunk.kept < chunk.width:
                worker.sessions[session.session].truncate(chunk.end)
            tokens = sampled(y) if stage == self.s.n - 1 else ()
            wanted = self.coordinator.wanted(session, chunk)
            tokens = tokens[len(tokens) - wanted :] if wanted else ()
            yield ChunkRecord(chunk.index, chunk.position, chunk.width, chunk.kept, output.digest, tokens)

    async def resume(self, epoch: int) -> None:
        self.begin("resume")
        for stage in range(self.s.n):
            self.s.worker(stage).answer()
            self.s.worker(stage).received = self.s.worker(stage).forwarded = self.coordinator.index


def sampled(y: np.ndarray) -> tuple[int, ...]:
    return tuple(int(value) // 16 % VOCABULARY for value in y[0])


class Coordinator:
    """Feeds sessions and keeps what came back; speculates with drafts that are now right, now wrong."""

    def __init__(self, simulation: Simulation, seed: int = 0, width: int = 3, prefill: int = 4) -> None:
        self.s = simulation
        self.random = random.Random(seed)
        self.width, self.prefill = width, prefill
        self.epoch = 0
        self.index = -1
        self.fed: dict[str, Journal] = {}
        self.prompt: dict[str, tuple[int, ...]] = {}
        self.committed: dict[str, list[int]] = {}
        self.boundaries: dict[str, list[DigestLog]] = {}
        self.resumed: dict[str, int] = {}
        self.returned = -1
        self.distrusted: set[int] = set()
        self.reports: list[RecoveryReport] = []

    def admit(self, session: str, prompt: Sequence[int], committed: Sequence[int] = ()) -> None:
        self.prompt[session], self.committed[session] = tuple(prompt), list(committed)
        self.resumed[session] = len(committed)
        self.fed[session] = Journal(1 << 20)
        self.boundaries[session] = [DigestLog() for _ in range(self.s.n)]

    async def generate(self, n: int) -> dict[str, list[int]]:
        """Bring every session to n committed tokens, healing whatever happens on the way."""
        while waiting := [name for name, tokens in self.committed.items() if len(tokens) < n]:
            for session in waiting:
                try:
                    self.step(session)
                except (TimeoutError, StageError):
                    await self.heal()
        return {name: tokens[:n] for name, tokens in self.committed.items()}

    async def heal(self, **options: Any) -> RecoveryReport:
        options = {"attempts": 8, "distrusted": self.distrusted} | options
        report = await run_recovery(
            Ops(self.s, self),
            [self.state(session) for session in self.committed],
            blocks=self.s.blocks,
            epoch=self.epoch,
            fed=self.index,
            returned=self.returned,
            **options,
        )
        self.reports.append(report)
        for error in report.abandoned.values():
            raise error
        for session, position in report.rolled_back.items():
            self.roll_back(session, position)
        self.epoch, self.returned = report.epoch, self.index
        self.distrusted |= set(report.resent)
        return report

    def roll_back(self, session: str, position: int) -> None:
        """Believe nothing from a position on."""
        self.committed[session] = list(self.state(session).rolled_back(position).committed)
        self.fed[session].truncate(position)
        for log in self.boundaries[session]:
            log.truncate(position)

    def text(self, session: str) -> list[int]:
        return [*self.prompt[session], *self.committed[session]]

    def wanted(self, session: SessionState, chunk: ChunkRecord) -> int:
        """Rows at the end of a chunk whose tokens are sampled: none before the prompt ends."""
        fed = len(session.prompt) + session.resumed
        return min(chunk.width, max(0, chunk.position + chunk.width - fed + 1))

    def step(self, session: str) -> None:
        """Feed one chunk and take what comes back."""
        text, position = self.text(session), self.fed[session].position
        prefill = position < len(text) - 1 or len(self.committed[session]) == self.resumed[session]
        tokens = text[position : position + self.prefill] if prefill else [text[-1]]
        if not prefill:
            tokens += [self.random.randrange(VOCABULARY) for _ in range(self.random.randrange(self.width))]
        self.index += 1
        ids = np.array([tokens], np.int64)
        record = ChunkRecord(self.index, position, len(tokens), len(tokens))
        self.fed[session].append(self.index, position, ids)
        records, y = self.s.traverse(self.epoch, session, record, ids)
        self.returned = self.index
        self.take(session, records, tokens, sampled(y))

    def take(
        self, session: str, records: list[ChunkRecord], tokens: list[int], samples: tuple[int, ...]
    ) -> None:
        position, end = records[0].position, records[0].position + len(tokens)
        for log, record in zip(self.boundaries[session], records, strict=True):
            log.append(record)
        known = len(self.text(session))
        if end < known:
            return
        row = known - 1 - position  # the row of the last known token
        n, token = accept(tokens[row + 1 :], samples[row:])
        self.committed[session] += [*tokens[row + 1 : row + 1 + n], token]
        kept = position + row + 1 + n
        if kept < end:
            self.fed[session].truncate(kept)
            for log in self.boundaries[session]:
                log.truncate(kept)

    def state(self, session: str) -> SessionState:
        settled = self.boundaries[session][0].position
        self.fed[session].truncate(settled)
        stages = range(self.s.n) if self.s.all_boundaries else [self.s.n - 1]
        return SessionState(
            session,
            self.prompt[session],
            tuple(self.committed[session]),
            self.fed[session].records,
            {stage: self.boundaries[session][stage].records for stage in stages},
            {"seed": 3},
            "model",
            "tokenizer",
            resumed=self.resumed[session],
        )
