"""Known-answer screening, and the probation that lifts a quarantine.

Kernels with known inputs run on every worker at once, beside the scheduler's queues, so that a
worker that is held at the door can be examined too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dask_sdc.cluster.session import Session, Work
from dask_sdc.evidence.codec import decode
from dask_sdc.evidence.seal import SealedBatch
from dask_sdc.exceptions import CodecError
from dask_sdc.graph.sources import make_source
from dask_sdc.policy.screening import Screening, screen
from dask_sdc.statistics.base import ShardInfo, Statistic
from dask_sdc.statistics.known_answers import known_answers

#: What a worker counts as having answered when its frame is damaged or does not come.
_UNHEARD = b"unheard"


@dataclass(frozen=True)
class KnownAnswers(Statistic):
    """Digests of the known-answer kernels, as a statistic of a block that does not matter.

    Parameters
    ----------
    kernels_seed : int
        Seed of the kernels' inputs.
    """

    kernels_seed: int

    def init(self, info: ShardInfo) -> dict[str, bytes]:
        """Return no answers."""
        return {}

    def update(self, state: dict[str, bytes], x: Any) -> dict[str, bytes]:
        """Compute every kernel."""
        return known_answers(self.kernels_seed)

    def combine(self, a: dict[str, bytes], b: dict[str, bytes]) -> dict[str, bytes]:
        """Keep the answers that there are."""
        return {**a, **b}

    def finalize(self, state: dict[str, bytes]) -> dict[str, bytes]:
        """Return the digest of each kernel."""
        return state


async def screen_cluster(session: Session, seed: int, repeats: int) -> Screening:
    """Run the kernels ``repeats`` times on every worker and compare domains with one another."""
    await session.refresh_members()
    addresses = session.addresses()
    answers, fingerprints = await _ask(session, addresses, seed, repeats)
    ailments = {
        domain: tuple(f"{one.uuid}: {what}" for one in devices for what in one.ailments())
        for domain, devices in session.health.items()
    }
    found = tuple(sorted((domain, told) for domain, told in ailments.items() if told))
    return replace(screen(answers, fingerprints), ailments=found)


async def probation(session: Session, domain: str, seed: int, repeats: int) -> bool:
    """Say whether every held worker of a domain answers as a majority of the cluster does.

    A domain without a connected worker passes: there is nobody to examine yet, and whoever
    comes is examined like any newcomer.
    """
    held = await session.held(domain)
    healthy = session.addresses()
    answers, fingerprints = await _ask(session, [*healthy, *held], seed, repeats, dict.fromkeys(held, domain))
    found = screen(answers, fingerprints)
    return domain not in found.suspects and domain not in {
        name for one in found.unresolved for name in one.domains
    }


async def _ask(
    session: Session,
    addresses: Iterable[str],
    seed: int,
    repeats: int,
    named: Mapping[str, str] | None = None,
) -> tuple[dict[str, dict[str, bytes]], dict[str, str]]:
    """Return, by domain, the digest of every kernel, repeat and worker, and the fingerprint."""
    answers: dict[str, dict[str, bytes]] = {}
    fingerprints: dict[str, str] = {}
    source = make_source([np.zeros(1)])
    for repeat in range(repeats):
        work = Work.of(repeat, KnownAnswers(seed + repeat), source, seed)
        frames = await asyncio.gather(*(session.call(a, work) for a in addresses))
        for address, frame in zip(addresses, frames, strict=True):
            domain = (named or {}).get(address) or session.locate(address) or address
            found = answers.setdefault(domain, {})
            for kernel, digest in _open(frame).items():
                name = f"{kernel}/{repeat}"
                # Workers of one domain that differ among themselves contradict everybody.
                found[name] = digest if found.get(name, digest) == digest else _UNHEARD
            if frame is not None:
                fingerprints[domain] = frame.fingerprint
    return answers, {domain: fingerprints.get(domain, "") for domain in answers}


def _open(frame: SealedBatch | None) -> dict[str, bytes]:
    if frame is None or not frame.records or not frame.records[0].intact:
        return dict.fromkeys(("frame",), _UNHEARD)
    try:
        state = decode(frame.records[0].payload)
    except CodecError:
        return dict.fromkeys(("frame",), _UNHEARD)
    return {**{k: v for k, v in state.items() if isinstance(v, bytes)}, "frame": b"heard"}
