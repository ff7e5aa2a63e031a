"""What a recovery does to a pipeline on a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, TypeVar

from dask_sdc.exceptions import StageError
from dask_sdc.inference.host import Chunk, SessionSettings, joined_chunk
from dask_sdc.inference.journal import ChunkRecord, join_chunks
from dask_sdc.inference.ops import RecoveryOps
from dask_sdc.inference.pipeline.lines import pack_chunk
from dask_sdc.inference.pipeline.routes import RELAYS, Routes
from dask_sdc.inference.pipeline.worker import Place, unpack_record
from dask_sdc.inference.session import SessionState, StageReport

__all__ = ["POSITIONS", "ClusterOps", "Ring", "fed_joined", "parts"]

#: Chunks and positions that are replayed in one call at most, which has one deadline.
_CHUNKS, POSITIONS = 64, 1024
#: Positions that a fast replay joins to one chunk: enough for BLAS, with activations that stay small.
_WIDE = 256
#: By how much a fast replay is faster, at least.
_FASTER = 5

#: Seconds before stages are asked again.
_AGAIN = 0.01

T = TypeVar("T")


class Ring:
    """Who holds which stage of a pipeline, and how to speak to them.

    Parameters
    ----------
    name : str
        Name of the pipeline.
    routes : Routes
        The ways to workers.
    blobs : sequence of bytes
        Per stage what a worker loads it from.
    places : sequence of Place
        Per stage where it stands.
    topic : str
        Where stages tell of their failures.
    """

    def __init__(
        self,
        name: str,
        routes: Routes,
        blobs: Sequence[bytes],
        places: Sequence[Place],
        topic: str,
    ) -> None:
        self.name, self.topic = name, topic
        self.blobs, self.places = tuple(blobs), tuple(places)
        #: Who, beside the stages, may pass messages on between two that cannot reach each other.
        self.relays: tuple[str, ...] = ()
        #: Bytes that each stage brings into memory.
        self.sizes: tuple[int, ...] = (0,) * len(self.blobs)
        self.addresses: list[str] = [""] * len(self.blobs)
        #: Workers that lost a stage or were refused; not used, as they may be frozen or worse.
        self.shunned: set[str] = set()
        #: Those of them that computed wrongly, failed or hung: they are not taken back once they answer.
        self.condemned: set[str] = set()
        #: Workers that were ever asked anything, which may hold something of the pipeline.
        self.asked: set[str] = set()
        self.routes = routes

    def __len__(self) -> int:
        return len(self.blobs)

    def call(self, stage: int, method: str, **arguments: Any) -> Awaitable[Any]:
        """Call a method of the plugin where a stage lives."""
        return self.call_at(self.addresses[stage], method, **arguments)

    def call_at(self, address: str, method: str, **arguments: Any) -> Awaitable[Any]:
        """Call a method of the plugin on a worker."""
        self.asked.add(address)
        return self.routes.call(address, method, pipeline=self.name, **arguments)

    async def seat(self, stage: int, address: str, epoch: int) -> str:
        """Give a stage to a worker, tell its neighbours, and return the digest of its weights."""
        digest: str = await self.call_at(
            address,
            "load",
            place=asdict(self.places[stage]),
            stage=self.blobs[stage],
            epoch=epoch,
            topic=self.topic,
        )
        self.addresses[stage] = address
        return digest

    def condemn(self, address: str) -> None:
        """Use a worker no more, whatever it answers."""
        self.shunned.add(address)
        self.condemned.add(address)

    def pardon(self, addresses: Collection[str]) -> None:
        """Use workers again: it was not their fault."""
        self.shunned.difference_update(addresses)
        self.condemned.difference_update(addresses)

    async def wire(self, stage: int) -> None:
        """Tell a stage who comes after it, and who may pass messages on should it not reach that one."""
        following = self.addresses[stage + 1] if stage + 1 < len(self) else None
        ends = {self.addresses[stage], following, *self.shunned}
        others = dict.fromkeys((*self.addresses, *self.relays))
        relays = [address for address in others if address and address not in ends][:RELAYS]
        await self.call(stage, "wire", following=following, relays=relays)


class ClusterOps(RecoveryOps):
    """`RecoveryOps` by RPC to the workers' plugins.

    Parameters
    ----------
    ring : Ring
        The pipeline.
    settings : callable
        Returns the settings of a session.
    fed : callable
        ``fed(session, indices)`` returns chunks that were fed to the head.
    branch : callable
        ``branch(session)`` returns the rows that count of the last chunk, if that was a tree of drafts.
    spare : callable
        ``spare(stage, refused)`` returns the address of a worker that can take a stage, or None.
    gone : callable
        Says whether a worker is known to have left, so that nobody waits for it.
    settled : callable
        Returns the number of the last chunk that was fed: none up to it comes back any more.
    patience : float
        Seconds after which a stage that does not answer counts as not reachable.
    positions : int
        Positions that a stage computes well within the deadline of a call.
    """

    def __init__(
        self,
        ring: Ring,
        settings: Callable[[str], SessionSettings],
        fed: Callable[[str, Sequence[int]], list[Chunk]],
        branch: Callable[[str], Sequence[int]],
        spare: Callable[[int, Collection[str]], Awaitable[str | None]],
        gone: Callable[[str], bool],
        settled: Callable[[], int],
        patience: float,
        positions: int,
    ) -> None:
        self._ring, self._settings, self._fed, self._branch = ring, settings, fed, branch
        self._spare, self._gone, self._settled, self._patience = spare, gone, settled, patience
        self._positions = positions
        self._epoch = 0
        # Who did not answer when the present epoch began.
        self._silent: dict[str, BaseException] = {}
        self._farewells: set[asyncio.Future[Any]] = set()

    async def _ask_all(self, method: str, **arguments: Any) -> list[Any]:
        """Call all stages side by side; an exception stands for whoever does not answer."""
        calls = [self._ask(stage, method, arguments) for stage in range(len(self._ring))]
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _ask(self, stage: int, method: str, arguments: dict[str, Any]) -> Any:
        if self._gone(address := self._ring.addresses[stage]):
            raise OSError(f"worker {address} left")
        if address in self._silent:
            raise self._silent[address]  # nobody waits for it twice
        return await self._patiently(self._ring.call(stage, method, **arguments))

    async def stop(self, epoch: int) -> None:
        """Let every stage that answers enter an epoch."""
        self._epoch = epoch
        self._silent.clear()
        answers = await self._ask_all("stop", epoch=epoch)
        for address, answer in zip(self._ring.addresses, answers, strict=True):
            if isinstance(answer, BaseException):
                self._silent[address] = answer

    async def reports(self, epoch: int) -> Sequence[StageReport]:
        """Ask every stage, again while something may be on its way between two of them."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._patience
        while True:
            reports = [
                StageReport(**answer)
                if isinstance(answer, dict)
                else StageReport(stage, False, detail=self._why(answer))
                for stage, answer in enumerate(await self._ask_all("report"))
            ]
            if not _on_its_way(reports, self._settled()) or clock() > deadline:
                return reports
            await asyncio.sleep(_AGAIN)

    def _why(self, error: BaseException | None) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self._patience:.2g} s"
        if error is None:  # what Dask answers where a plugin was taken off, as by a worker that closes
            return "it is leaving"
        return f"{type(error).__name__}: {error}"

    async def choose_spare(self, stage: int, refused: Collection[str]) -> str | None:
        """Return a worker that can take a stage."""
        return await self._spare(stage, refused)

    async def load(self, stage: int, spare: str) -> str:
        """Seat a spare and wire it to its neighbours."""
        former = self._ring.addresses[stage]
        if former != spare:
            self._ring.shunned.add(former)
        digest = await self._ring.seat(stage, spare, self._epoch)
        await self._wire(stage)
        if stage > 0:
            await asyncio.gather(self._wire(stage - 1), return_exceptions=True)
        if former != spare and not self._gone(former):
            self._dismiss(former)
        return digest

    async def _wire(self, stage: int) -> None:
        """Wire a stage, unless it or the next one is lost as well: then it is wired when that is replaced."""
        pair = self._ring.addresses[stage : stage + 2]
        if not any(address in self._silent or self._gone(address) for address in pair):
            await self._ring.wire(stage)

    def _dismiss(self, address: str) -> None:
        """Tell a worker to leave its seat, without waiting for one that may be frozen."""
        farewell = asyncio.ensure_future(
            asyncio.gather(self._patiently(self._ring.call_at(address, "leave")), return_exceptions=True)
        )
        self._farewells.add(farewell)
        farewell.add_done_callback(self._farewells.discard)

    async def _patiently(self, call: Awaitable[T]) -> T:
        return await asyncio.wait_for(call, self._patience)

    async def open(self, stage: int, session: SessionState) -> None:
        """Open a session anew on a stage."""
        settings = asdict(self._settings(session.session))
        await self._ring.call(stage, "open", session=session.session, settings=settings)

    async def truncate(self, stage: int, session: str, position: int) -> bool:
        """Cut a session on a stage."""
        settled = self._branch(session)
        call = self._ring.call(stage, "truncate", session=session, position=position, settled=settled)
        return bool(await call)

    async def digests(self, stage: int, session: str) -> Sequence[ChunkRecord]:
        """Return what a stage logged of its inputs."""
        return [unpack_record(packed) for packed in await self._ring.call(stage, "digests", session=session)]

    def replay(self, stage: int, session: SessionState, exact: bool) -> AsyncIterator[ChunkRecord]:
        """Feed a session to a stage again."""
        return self._exactly(stage, session) if exact else self._in_long_chunks(stage, session)

    async def _exactly(self, stage: int, session: SessionState) -> AsyncIterator[ChunkRecord]:
        for part in parts(session.chunks, self._positions):
            indices, kept = [chunk.index for chunk in part], [chunk.kept for chunk in part]
            if stage == 0:
                chunks = [pack_chunk(chunk) for chunk in self._fed(session.session, indices)]
                packed = await self._ring.call(0, "replay", chunks=chunks, kept=kept)
            else:
                packed = await self._ring.call(
                    stage - 1,
                    "refeed",
                    session=session.session,
                    indices=indices,
                    kept=kept,
                    to=self._ring.addresses[stage],
                )
            for record in packed:
                yield unpack_record(record)

    async def _in_long_chunks(self, stage: int, session: SessionState) -> AsyncIterator[ChunkRecord]:
        name, position, sampled_from = session.session, 0, session.sampled_from
        wide = min(_WIDE, _FASTER * self._positions)
        while position < session.position:
            if stage == 0:
                chunk = fed_joined(session, position, wide, self._fed)
                packed = await self._ring.call(0, "replay_joined", chunk=pack_chunk(chunk))
            else:
                packed = await self._ring.call(
                    stage - 1,
                    "refeed_joined",
                    session=name,
                    position=position,
                    width=wide,
                    sampled_from=sampled_from,
                    to=self._ring.addresses[stage],
                )
            record = unpack_record(packed)
            yield record
            position = record.end

    async def resume(self, epoch: int) -> None:
        """Let all stages work."""
        chunk = self._settled()
        answers = await self._ask_all("resume", epoch=epoch, chunk=chunk)
        for stage, answer in enumerate(answers):
            if isinstance(answer, BaseException):
                raise StageError(
                    f"stage {stage}: expected it to resume, got {answer!r}", stage=stage
                ) from answer


def _on_its_way(reports: Sequence[StageReport], fed: int) -> bool:
    """Say whether all stages answer and one has not received what was sent to it."""
    sent = [fed, *(report.forwarded for report in reports)]
    return all(report.reachable for report in reports) and any(
        report.received < last for report, last in zip(reports, sent, strict=False)
    )


def fed_joined(
    session: SessionState, position: int, width: int, fed: Callable[[str, Sequence[int]], list[Chunk]]
) -> Chunk:
    """Return what the head was fed and counts as one long chunk; see `StageHost.joined`."""
    records: list[ChunkRecord] = []
    for record in session.chunks:
        if record.position >= position and (not records or record.end - position <= width):
            records.append(record)
    chunks = fed(session.session, [record.index for record in records])
    joined = [(record, chunk.array) for record, chunk in zip(records, chunks, strict=True)]
    return joined_chunk(session.session, *join_chunks(joined), session.sampled_from)


def parts(chunks: Sequence[ChunkRecord], positions: int) -> Iterator[list[ChunkRecord]]:
    """Cut a session into parts of some positions, or a chunk, that are replayed in one call each."""
    left = iter(chunks)
    while part := list(islice(left, 1)):
        width = part[0].width
        while width < positions and len(part) < _CHUNKS and (chunk := next(left, None)) is not None:
            part.append(chunk)
            width += chunk.width
        yield part
