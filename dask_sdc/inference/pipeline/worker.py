"""The worker's side of a pipeline: stages that take chunks from each other, without the scheduler.

Messages go from stage to stage over the workers' own comms, in order; see `lines`. Everything that computes
runs in a thread of its own per stage; the event loop only moves messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
from distributed import Status, Worker, WorkerPlugin
from distributed.comm.core import Comm
from distributed.protocol.serialize import to_serialize

from dask_sdc.exceptions import InputError, StageError
from dask_sdc.graph.execute import contained
from dask_sdc.inference.host import Chunk, Output, SessionSettings, StageHost
from dask_sdc.inference.journal import ChunkRecord, FileSpill, boundary_digest, cut_records
from dask_sdc.inference.model.kernels import set_threads, threads
from dask_sdc.inference.pace import decoding_pace
from dask_sdc.inference.pipeline.copies import Copies
from dask_sdc.inference.pipeline.lines import Line, pack_chunk, received, unpack_chunk
from dask_sdc.inference.pipeline.routes import Routes, packed, piped, written
from dask_sdc.inference.pipeline.shadows import Shadows
from dask_sdc.inference.receipts import boundary_chain
from dask_sdc.inference.session import EpochFence, StageReport
from dask_sdc.inference.stage import Stage
from dask_sdc.statistics.kernels.cuda import free_memory

__all__ = ["NAME", "StageWorkerPlugin", "pack_record", "unpack_record"]

#: Name of the plugin.
NAME = "dask_sdc-stages"

#: Folder of local copies of weights, in the worker's own.
_FOLDER = "sdc-stages"

#: Chunks that wait at a stage, and outputs that wait to be sent on, before whoever sends has to wait.
_WAITING = 8

T = TypeVar("T")


def pack_record(record: ChunkRecord) -> list[Any]:
    """Return a record as it travels."""
    return [
        record.index,
        record.position,
        record.width,
        record.kept,
        record.digest,
        list(record.tokens),
        record.sketch,
    ]


def unpack_record(packed: Sequence[Any]) -> ChunkRecord:
    """Return a record that came."""
    index, position, width, kept, digest, tokens, sketch = packed
    return ChunkRecord(index, position, width, kept, digest, tuple(tokens), sketch)


@dataclass(frozen=True)
class Place:
    """Where a stage stands in its pipeline.

    Parameters
    ----------
    number, stages : int
        Its number and how many there are.
    journal_bytes : int
        See `StageHost`.
    spill : str or None
        See `StageHost`.
    """

    number: int
    stages: int
    journal_bytes: int
    spill: str | None


class Seat:
    """One stage of one pipeline on one worker.

    Parameters
    ----------
    host : StageHost
        The stage and its sessions.
    routes : Routes
        The ways to other workers.
    tell : callable
        Called with a text when the stage cannot go on: it has failed, or cannot reach the next one.
    epoch : int
        The epoch to begin with.
    """

    def __init__(
        self,
        pipeline: str,
        host: StageHost,
        routes: Routes,
        tell: Callable[[str], None],
        epoch: int,
    ) -> None:
        self.pipeline, self.host, self.routes, self._tell = pipeline, host, routes, tell
        self.fence = EpochFence(epoch, f"stage {host.number}")
        self.received = self.forwarded = -1
        self.detail = ""
        self._next: str | None = None
        self.relays: tuple[str, ...] = ()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"sdc-stage-{host.number}")
        self._loop = asyncio.get_running_loop()
        # Chunks that wait for the thread, and whether it works on one. Callbacks and no tasks hand them over,
        # as every token waits for each turn of the loop in between.
        self._inbox: deque[tuple[int, Chunk]] = deque()
        self._busy = False
        self._room = asyncio.Semaphore(_WAITING)
        self._outbox: deque[tuple[int, Output]] = deque()
        self._sending: asyncio.Future[bool] | None = None
        self._line = Line(routes, pipeline)
        # Where chunks come from, and whom the tail tells what it makes of them.
        self._sources: set[Comm] = set()
        self._hearer: Comm | None = None

    # -- chunks ----------------------------------------------------------------------------------

    async def take_from(self, comm: Comm) -> None:
        """Take the chunks that come over a connection, until it is closed."""
        self._sources.add(comm)
        try:
            await received(comm, self.deliver)
        finally:
            self._sources.discard(comm)

    async def deliver(self, epoch: int, chunk: Chunk) -> None:
        """Take a chunk; returns when there is room for it, which slows a sender down."""
        # Also of an epoch that is over: then it is known not to be on its way any more.
        if chunk.index == self.received + 1:
            self.received += 1  # and stays behind a chunk that never came, whatever comes after it
        if epoch == self.fence.epoch:
            await self._room.acquire()
            self._inbox.append((epoch, chunk))
            self._begin()

    async def tell_to(self, comm: Comm) -> None:
        """Send the tail's outputs to a connection, until it is closed."""
        self._hearer = comm
        try:
            await comm.read()  # where nothing comes
        except OSError:
            pass
        finally:
            if self._hearer is comm:
                self._hearer = None

    def _begin(self) -> None:
        """Have the thread compute the next chunk, if there is one and not too much is to be sent on."""
        while self._inbox and not self._busy and len(self._outbox) < _WAITING:
            epoch, chunk = self._inbox.popleft()
            self._room.release()
            if epoch == self.fence.epoch and not self.detail:
                self._busy = True
                self._pool.submit(self._step, epoch, chunk)

    def _step(self, epoch: int, chunk: Chunk) -> None:
        """Compute a chunk, in the thread."""
        made: Output | BaseException
        try:
            made = self.host.step(chunk)
        except BaseException as error:  # of SystemExit nobody would hear otherwise
            made = error
        self._loop.call_soon_threadsafe(self._made, epoch, chunk.index, made)

    def _made(self, epoch: int, chunk: int, made: Output | BaseException) -> None:
        self._busy = False
        if epoch == self.fence.epoch:
            if isinstance(made, Output):
                self._outbox.append((epoch, made))
                self._forward()
            elif not isinstance(made, StageError) or chunk <= self.received:
                self._failed(made)
            # Else it did not fit, as one before it never came: that one is missed by its number.
        self._begin()

    def _forward(self) -> None:
        """Send the next output on, unless one is being sent."""
        while self._outbox and self._sending is None:
            epoch, output = self._outbox.popleft()
            if epoch == self.fence.epoch and not self.detail:
                send = self._told if self.host.tail else self._sent
                self._sending = asyncio.ensure_future(send(epoch, output))
                self._sending.add_done_callback(partial(self._forwarded, epoch, output.record.index))

    def _forwarded(self, epoch: int, index: int, sending: asyncio.Future[bool]) -> None:
        self._sending = None
        if not sending.cancelled():
            if (error := sending.exception()) is not None:
                if epoch == self.fence.epoch:
                    self._failed(error)
            elif sending.result() and index == self.forwarded + 1:
                self.forwarded += 1
        self._forward()
        self._begin()

    async def _told(self, epoch: int, output: Output) -> bool:
        array = None if output.array is None else to_serialize(output.array)
        answer = {"epoch": epoch, "record": pack_record(output.record), "array": array}
        if self._hearer is not None:
            # Whoever hung up does not wait for it any more.
            with contextlib.suppress(OSError):
                await written(self._hearer, answer, small=array is None)
        return True

    async def _sent(self, epoch: int, output: Output) -> bool:
        assert self._next is not None
        try:
            await self.send(self._next, epoch, output.chunk)
        except (OSError, StageError) as error:
            self.detail = f"cannot reach the next stage: {type(error).__name__}: {error}"
            self._tell(self.detail)
            return False
        return True

    async def send(self, address: str, epoch: int, chunk: Chunk) -> None:
        """Send a chunk to a worker; where messages are dropped and bent."""
        await self._line.send(address, epoch, chunk)

    def _failed(self, error: BaseException) -> None:
        # A state that was half updated must not be used: the stage rests until it is replaced or reset.
        self.detail = f"{type(error).__name__}: {error}"
        self._tell(self.detail)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run something of the host in the stage's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(contained, work, *args))

    # -- epochs ----------------------------------------------------------------------------------

    def stop(self, epoch: int) -> None:
        """Enter an epoch and drop what waits.

        What is being computed is dropped when it is done; whatever is asked of the host next waits for that.
        """
        self.fence.rise(epoch)
        self._outbox.clear()
        if self._sending is not None:
            self._sending.cancel()  # the next stage may be frozen
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        while self._inbox:
            self._inbox.popleft()
            self._room.release()

    def report(self) -> StageReport:
        """Say how far the stage got."""
        return StageReport(
            self.host.number, True, self.received, self.forwarded, self.fence.epoch, self.detail
        )

    def wire(self, following: str | None, relays: Sequence[str]) -> None:
        """Send outputs to a worker from now on; others may pass messages on to whoever is out of reach."""
        self._next, self.relays = following, tuple(relays)

    def resume(self, epoch: int, chunk: int) -> None:
        """Work on after a recovery; chunks up to ``chunk`` are settled."""
        self.fence.check(epoch)
        self.received = self.forwarded = chunk
        self.detail = ""

    async def close(self) -> None:
        """Stop, and forget every session."""
        self.detail = "it was closed"  # nothing is begun any more
        sending = self._sending
        if sending is not None:
            sending.cancel()
        self._line.close()
        for comm in (*self._sources, *([self._hearer] if self._hearer else [])):
            comm.abort()
        if sending is not None:
            await asyncio.gather(sending, return_exceptions=True)
        self._drop_waiting()  # so that nobody waits for room
        await asyncio.get_running_loop().run_in_executor(None, self._pool.shutdown)
        self.host.close_all()


class StageWorkerPlugin(WorkerPlugin):
    """Holds the stages of pipelines on a worker and answers their RPC."""

    name = NAME
    # Several pipelines share it.
    idempotent = True

    async def setup(self, worker: Worker) -> None:
        """Add the RPC handlers."""
        self.worker = worker
        self.routes = Routes(worker.rpc)
        self._paces: dict[str, asyncio.Future[float]] = {}
        self.seats: dict[str, Seat] = {}
        # Stages that are loaded and wait for a seat, by pipeline and number.
        self.spares: dict[str, dict[int, Stage]] = {}
        self.shadows: dict[str, Shadows] = {}
        self.copies = Copies(Path(worker.local_directory) / _FOLDER)
        self._loading: dict[tuple[str, int], asyncio.Future[Stage]] = {}
        worker.handlers.update(self._handlers())
        _use_threads(worker.state.nthreads)

    async def teardown(self, worker: Worker) -> None:
        """Leave nothing behind."""
        for name in self._handlers():
            worker.handlers.pop(name, None)
        for pipeline in {*self.seats, *self.shadows, *self.spares, *self.copies.pipelines}:
            await self.leave(pipeline, forget=True)
        set_threads(None)

    def _handlers(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        return {
            f"sdc_stage_{method.__name__}": method
            for method in (
                self.hello,
                self.dial,
                self.relay,
                self.pipe,
                self.pace,
                self.room,
                self.prepare,
                self.load,
                self.wire,
                self.leave,
                self.open,
                self.close,
                self.take,
                self.tell,
                self.stop,
                self.report,
                self.resume,
                self.truncate,
                self.digests,
                self.refeed,
                self.replay,
                self.shadow,
                self.unshadow,
                self.chain,
                self.tapped,
                self.refeed_joined,
                self.replay_joined,
            )
        }

    def _seat(self, pipeline: str) -> Seat:
        seat = self.seats.get(pipeline)
        if seat is None:
            raise StageError(
                f"worker {self.worker.address}: expected a stage of pipeline {pipeline}, got none"
            )
        return seat

    # -- reach and speed -------------------------------------------------------------------------

    async def hello(self) -> bool:
        """Answer (RPC handler)."""
        return True

    async def dial(self, to: str) -> bool:
        """Say whether another worker answers this one (RPC handler)."""
        return await Routes(self.worker.rpc).find(to)

    async def relay(self, to: str, method: str, arguments: Mapping[str, Any]) -> Any:
        """Call a method on another worker, dialled directly, for somebody who cannot (RPC handler)."""
        return packed(await Routes(self.worker.rpc).call(to, method, **packed(arguments)))

    async def pipe(self, comm: Comm, to: str, method: str, arguments: Mapping[str, Any]) -> Status:
        """Connect somebody to a method on another worker that cannot be dialled from there (RPC handler)."""
        onward = await Routes(self.worker.rpc).connect(to, method, **packed(arguments))
        await comm.write("OK")
        return await piped(comm, onward)

    async def pace(self, device: str = "cpu") -> float:
        """Return `decoding_pace`; whoever asks meanwhile waits for the same measurement (RPC handler)."""
        running = self._paces.get(device)
        if running is None or running.done():
            running = self._paces[device] = asyncio.ensure_future(asyncio.to_thread(decoding_pace, device))
        return await asyncio.shield(running)

    async def room(self) -> int:
        """Return the bytes that are free on the device (RPC handler)."""
        return await asyncio.to_thread(free_memory)

    # -- stages ----------------------------------------------------------------------------------

    async def prepare(self, pipeline: str, number: int, stage: bytes, keep: str = "memory") -> None:
        """Have a stage that may be needed here in memory, or on the local disk (RPC handler)."""
        if keep == "memory":
            await self._loaded(pipeline, number, stage)
        else:
            await self.copies.keep(pipeline, number, stage)
            self._release(pipeline)

    def _release(self, pipeline: str) -> None:
        """Let go of loaded stages that are on the local disk too, unless an audit follows a session."""
        shadows, ready = self.shadows.get(pipeline), self.spares.get(pipeline, {})
        for number in [number for number in ready if self.copies.holds(pipeline, number)]:
            if shadows is None or shadows.release(number):
                del ready[number]

    async def _loaded(self, pipeline: str, number: int, blob: bytes) -> Stage:
        ready = self.spares.setdefault(pipeline, {})
        if number in ready:
            return ready[number]
        # Whoever asks meanwhile waits for the same.
        key = (pipeline, number)
        if key not in self._loading:
            self._loading[key] = asyncio.ensure_future(
                asyncio.to_thread(self.copies.load, pipeline, number, blob)
            )
        try:
            loaded = await asyncio.shield(self._loading[key])
        finally:
            self._loading.pop(key, None)
        if self.spares.get(pipeline) is ready:  # else the pipeline was closed meanwhile
            ready[number] = loaded
        return loaded

    async def load(
        self, pipeline: str, place: Mapping[str, Any], stage: bytes, epoch: int, topic: str
    ) -> str:
        """Give a stage of a pipeline a seat here and return its digest (RPC handler)."""
        where = Place(**place)
        if where.spill is not None:
            await asyncio.to_thread(_expect_writable, where.spill, self.worker.address)
        await self.leave(pipeline)
        loaded = await self._loaded(pipeline, where.number, stage)
        digest: str = await asyncio.to_thread(contained, getattr, loaded, "digest")
        if pipeline not in self.spares:
            raise StageError(f"stage {where.number}: pipeline {pipeline} was closed while it was loaded")
        if pipeline in self.shadows:
            await self.shadows[pipeline].drop(where.number)
        self.spares.get(pipeline, {}).pop(where.number, None)
        self._release(pipeline)
        host = StageHost(
            loaded,
            where.number,
            where.number == where.stages - 1,
            journal_bytes=where.journal_bytes,
            spill=where.spill,
        )

        def tell(why: str) -> None:
            self.worker.log_event(topic, {"op": "stage", "stage": where.number, "why": why})

        self.seats[pipeline] = Seat(pipeline, host, self.routes, tell, epoch)
        return digest

    async def wire(self, pipeline: str, following: str | None, relays: Sequence[str]) -> None:
        """Tell a stage who comes after it, and who may pass messages on to there (RPC handler)."""
        seat = self._seat(pipeline)
        if following is not None:
            await self.routes.find(following, relays)
        seat.wire(following, relays)

    async def leave(self, pipeline: str, forget: bool = False) -> None:
        """Give up the seat in a pipeline, if there is one, perhaps its loaded stages too (RPC handler)."""
        seat = self.seats.pop(pipeline, None)
        shadows = self.shadows.get(pipeline)
        if seat is not None and shadows is not None:
            await shadows.drop(seat.host.number)
        if forget:
            self.spares.pop(pipeline, None)
            self.shadows.pop(pipeline, None)
            if shadows is not None:
                await shadows.end()
            await self.copies.forget(pipeline)
        if seat is not None:
            await seat.close()

    # -- sessions --------------------------------------------------------------------------------

    async def open(self, pipeline: str, session: str, settings: Mapping[str, Any]) -> None:
        """Open a session (RPC handler)."""
        seat = self._seat(pipeline)
        await seat.run(seat.host.open, session, SessionSettings(**settings))

    async def close(self, pipeline: str, session: str) -> None:
        """Close a session (RPC handler)."""
        seat = self._seat(pipeline)
        await seat.run(seat.host.close, session)

    async def take(self, comm: Comm, pipeline: str) -> Status:
        """Take the chunks that come over a connection (RPC handler)."""
        seat = self._seat(pipeline)
        await comm.write("OK")
        await seat.take_from(comm)
        return Status.dont_reply

    async def tell(self, comm: Comm, pipeline: str) -> Status:
        """Send the outputs of a tail over a connection (RPC handler)."""
        seat = self._seat(pipeline)
        await comm.write("OK")
        await seat.tell_to(comm)
        return Status.dont_reply

    # -- healing ---------------------------------------------------------------------------------

    async def stop(self, pipeline: str, epoch: int) -> None:
        """Enter an epoch and rest (RPC handler)."""
        self._seat(pipeline).stop(epoch)

    async def report(self, pipeline: str) -> dict[str, Any]:
        """Return the stage's report (RPC handler)."""
        return asdict(self._seat(pipeline).report())

    async def resume(self, pipeline: str, epoch: int, chunk: int) -> None:
        """Work on (RPC handler)."""
        self._seat(pipeline).resume(epoch, chunk)

    async def truncate(self, pipeline: str, session: str, position: int, settled: Sequence[int]) -> bool:
        """Forget a session from a position on; see `StageHost.truncate` (RPC handler)."""
        seat = self._seat(pipeline)
        return await seat.run(seat.host.truncate, session, position, settled)

    async def digests(self, pipeline: str, session: str, after: int = -1) -> list[list[Any]]:
        """Return the records of a session's inputs behind a chunk (RPC handler)."""
        records = self._seat(pipeline).host.digests(session)
        return [pack_record(record) for record in records if record.index > after]

    async def chain(self, pipeline: str, session: str, position: int, settled: Sequence[int]) -> str:
        """Return the hash chain over a session's inputs up to a position (RPC handler)."""
        seat = self._seat(pipeline)
        await seat.run(seat.host.settle, session, position, settled)
        return boundary_chain(cut_records(seat.host.digests(session), position))

    async def tapped(self, pipeline: str, session: str) -> list[list[Any]]:
        """Return what layers put out that are wanted: layer, array and digest of each (RPC handler)."""
        seat = self._seat(pipeline)
        found: dict[int, Any] = await seat.run(seat.host.tapped, session)
        return [[layer, to_serialize(array), boundary_digest(array)] for layer, array in found.items()]

    async def refeed(
        self,
        pipeline: str,
        session: str,
        indices: Sequence[int],
        kept: Sequence[int],
        to: str,
        shadow: Mapping[str, Any] | None = None,
    ) -> list[list[Any]]:
        """Feed recorded outputs to a stage that replays, or to a shadow; return its records (RPC handler)."""
        seat = self._seat(pipeline)
        chunks = await seat.run(seat.host.recorded, session, indices)
        fed = {"pipeline": pipeline, "chunks": [pack_chunk(chunk) for chunk in chunks], "kept": kept}
        await self.routes.find_once(to, seat.relays)
        records: list[list[Any]]
        if shadow is None:
            records = await self.routes.call(to, "replay", **fed)
        else:
            records = await self.routes.call(to, "shadow", session=session, **fed, **shadow)
        return records

    async def replay(
        self, pipeline: str, chunks: Sequence[Mapping[str, Any]], kept: Sequence[int]
    ) -> list[list[Any]]:
        """Take chunks again and return the records of the outputs (RPC handler)."""
        seat = self._seat(pipeline)
        records = await seat.run(seat.host.replay, [unpack_chunk(chunk) for chunk in chunks], kept)
        return [pack_record(record) for record in records]

    # -- audits ----------------------------------------------------------------------------------

    async def shadow(
        self,
        pipeline: str,
        number: int,
        stages: int,
        stage: bytes,
        session: str,
        settings: Mapping[str, Any],
        begin: int,
        chunks: Sequence[Mapping[str, Any]],
        kept: Sequence[int],
    ) -> list[list[Any]]:
        """Compute chunks once more, apart from the session, and return the records (RPC handler)."""
        shadows = self.shadows.setdefault(pipeline, Shadows())
        seat = self.seats.get(pipeline)
        if seat is not None and seat.host.number == number:
            # Asked to repeat itself: with the weights that it has in memory.
            run, loaded = seat.run, seat.host.stage
        else:
            run, loaded = shadows.run, await self._loaded(pipeline, number, stage)
        records = await shadows.replay(
            loaded,
            number,
            number == stages - 1,
            run,
            session,
            SessionSettings(**settings),
            begin,
            [unpack_chunk(chunk) for chunk in chunks],
            kept,
        )
        return [pack_record(record) for record in records]

    async def unshadow(self, pipeline: str, session: str) -> None:
        """Forget what was computed of a session for audits (RPC handler)."""
        if pipeline in self.shadows:
            await self.shadows[pipeline].close(session)
            self._release(pipeline)

    async def refeed_joined(
        self, pipeline: str, session: str, position: int, width: int, sampled_from: int, to: str
    ) -> list[Any]:
        """Feed recorded outputs as one long chunk to a stage that replays (RPC handler)."""
        seat = self._seat(pipeline)
        chunk = await seat.run(seat.host.joined, session, position, width, sampled_from)
        await self.routes.find_once(to, seat.relays)
        record: list[Any] = await self.routes.call(
            to, "replay_joined", pipeline=pipeline, chunk=pack_chunk(chunk)
        )
        return record

    async def replay_joined(self, pipeline: str, chunk: Mapping[str, Any]) -> list[Any]:
        """Take one long chunk again and return the record of the output (RPC handler)."""
        seat = self._seat(pipeline)
        return pack_record(await seat.run(seat.host.replay_joined, unpack_chunk(chunk)))


def _expect_writable(folder: str, address: str) -> None:
    """Refuse a folder for journals in which a file cannot be made."""
    try:
        FileSpill(Path(folder) / uuid.uuid4().hex).close()
    except OSError as error:
        got = f"{type(error).__name__}: {error}"
        raise InputError(f"spill: expected a folder that worker {address} can write to, got {got}") from error


def _use_threads(count: int) -> None:
    """Let a forward pass use as many threads as the user gave the worker."""
    set_threads(None)
    set_threads(min(count, threads()))


def describe(stage: Stage) -> bytes:
    """Return a stage as it travels to a worker."""
    blob: bytes = cloudpickle.dumps(stage)
    return blob
