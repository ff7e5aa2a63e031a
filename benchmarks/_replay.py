"""Stages in this process under `run_recovery`: what a replay costs, and what it proves, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from dask_sdc.inference.heal import RecoveryReport, run_recovery
from dask_sdc.inference.host import StageHost
from dask_sdc.inference.journal import ChunkRecord
from dask_sdc.inference.model import ModelConfig
from dask_sdc.inference.ops import RecoveryOps
from dask_sdc.inference.pipeline.fed import Returned
from dask_sdc.inference.pipeline.ops import fed_joined
from dask_sdc.inference.pipeline.session import Request, TokenSession
from dask_sdc.inference.session import SessionState, StageReport
from dask_sdc.inference.stage import TransformerStage

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, Array]

#: Positions of a long chunk of a fast replay, as on a cluster.
WIDE = 256


@dataclass
class Tensor:
    """What stands for a `WeightStore`: tensors in memory, whose digests say that they are right."""

    config: ModelConfig
    tensors: Callable[[str], Array]

    def load(self, names: Sequence[str], progress: object = None) -> dict[str, Array]:
        """Return tensors by name."""
        return {name: self.tensors(name) for name in names}

    def block_digest(self, block: str) -> str:
        """Return the same for right and wrong weights."""
        return block


def loaded(config: ModelConfig, tensors: Callable[[str], Array], layers: range) -> TransformerStage:
    """Return a stage of these tensors."""
    stage = TransformerStage(Tensor(config, tensors), layers)  # type: ignore[arg-type]
    stage.load()
    return stage


class Local(RecoveryOps):
    """Stages of a model in this process, and a coordinator that loses them.

    Parameters
    ----------
    config : ModelConfig
        The model.
    tensors : mapping of str to ndarray
        Its weights.
    cuts : sequence of int
        First layer of every stage but the head.
    """

    def __init__(self, config: ModelConfig, tensors: Tensors, cuts: Sequence[int]) -> None:
        self.config, self.tensors = config, tensors
        self.layers = [range(a, b) for a, b in pairwise((0, *cuts, config.n_layers))]
        self.stages = [loaded(config, tensors.__getitem__, layers) for layers in self.layers]
        self.hosts = [self.host(k, stage) for k, stage in enumerate(self.stages)]
        self.sessions: dict[str, TokenSession] = {}
        self.spare: TransformerStage | None = None
        self.lost = -1
        self._index = -1

    def host(self, number: int, stage: TransformerStage) -> StageHost:
        """Return a host of a stage."""
        return StageHost(stage, number, number == len(self.layers) - 1)

    def run(self, name: str, request: Request, chunk: int) -> TokenSession:
        """Generate a text and keep the session."""
        facts = {
            "tail": len(self.layers) - 1,
            "model_digest": "",
            "tokenizer_digest": "",
            "stage_boundaries": (),
        }
        session = self.sessions[name] = TokenSession(name, request, chunk, None, 1, facts)
        for host in self.hosts:
            host.open(name, self._settings(name))
        while not session.done:
            self._traverse(session)
        return session

    def _settings(self, name: str) -> Any:
        return replace(self.sessions[name].settings(self.config.max_context), sketched=True)

    def _traverse(self, session: TokenSession) -> None:
        self._index += 1
        feed = session.next_feed()
        assert feed is not None
        chunk = session.sent(self._index, feed)
        for host in self.hosts:
            output = host.step(chunk)
            if output.array is not None:
                chunk = replace(chunk, array=output.array, digest=output.record.digest)
        session.returned(Returned(output.record, None))

    def forget(self, name: str) -> None:
        """Close a session."""
        for host in self.hosts:
            host.close(name)
        del self.sessions[name]

    def heal(
        self, state: SessionState, stage: int, spare: TransformerStage | None = None, *, exact: bool
    ) -> tuple[RecoveryReport, StageHost]:
        """Lose a stage, heal, put the lost one back; return the report and who had taken its place."""
        self.lost, self.spare = stage, spare or self.stages[stage]
        before = self.hosts[stage]
        try:
            report = asyncio.run(
                run_recovery(
                    self, [state], blocks=[s.digest for s in self.stages], exact=exact, timeout_s=600
                )
            )
            return report, self.hosts[stage]
        finally:
            self.hosts[stage] = before
            before.truncate(state.session, state.position)

    # -- the ops ---------------------------------------------------------------------------------

    async def stop(self, epoch: int) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    async def reports(self, epoch: int) -> Sequence[StageReport]:
        """Report the lost stage."""
        return [StageReport(k, k != self.lost, epoch=epoch) for k in range(len(self.hosts))]

    async def choose_spare(self, stage: int, refused: Collection[str]) -> str | None:
        """Return the only spare."""
        return None if refused else "spare"

    async def load(self, stage: int, spare: str) -> str:
        """Put the spare in."""
        assert self.spare is not None
        self.hosts[stage] = self.host(stage, self.spare)
        self.lost = -1
        return self.spare.digest

    async def open(self, stage: int, session: SessionState) -> None:
        """Open a session anew."""
        self.hosts[stage].open(session.session, self._settings(session.session))

    async def truncate(self, stage: int, session: str, position: int) -> bool:
        """Cut a session."""
        return self.hosts[stage].truncate(session, position)

    async def digests(self, stage: int, session: str) -> Sequence[ChunkRecord]:
        """Return the log of a stage."""
        return self.hosts[stage].digests(session)

    async def replay(self, stage: int, session: SessionState, exact: bool) -> AsyncIterator[ChunkRecord]:
        """Feed a session again."""
        for record in self.fed_again(stage, session, "joined" if exact else "fast"):
            yield record

    async def resume(self, epoch: int) -> None:
        """Do nothing: nobody rests."""

    def fed_again(self, stage: int, session: SessionState, how: str) -> Iterator[ChunkRecord]:
        """Feed a session to a stage: "single" chunks, chunks "joined" with equal bits, or "fast"."""
        name, target = session.session, self.hosts[stage]
        if how == "fast":
            position = 0
            while position < session.position:
                if stage == 0:
                    chunk = fed_joined(session, position, WIDE, lambda name, at: self.sessions[name].fed(at))
                else:
                    chunk = self.hosts[stage - 1].joined(name, position, WIDE, session.sampled_from)
                record = target.replay_joined(chunk)
                yield record
                position = record.end
            return
        indices = [chunk.index for chunk in session.chunks]
        chunks = self.hosts[stage - 1].recorded(name, indices) if stage else self.sessions[name].fed(indices)
        kept = [chunk.kept for chunk in session.chunks]
        if how == "joined":
            yield from target.replay(chunks, kept)
            return
        for chunk, count in zip(chunks, kept, strict=True):
            yield from target.replay([chunk], [count])
