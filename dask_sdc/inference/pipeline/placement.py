"""Which layers make a stage, and which workers take the stages."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dask_sdc.exceptions import InputError, NoDomainError

__all__ = [
    "LABEL",
    "Candidate",
    "boundaries_of",
    "choose_workers",
    "next_hot",
    "permitted",
    "place",
    "split_evenly",
]

#: Dask resource by which users say which workers may hold stages, as in ``--resources "SDC-STAGE=1"``.
LABEL = "SDC-STAGE"

#: Share of a worker's memory for weights; a quarter more is for KV caches.
_FOR_WEIGHTS = 0.5


@dataclass(frozen=True)
class Candidate:
    """A worker that may take a stage.

    Parameters
    ----------
    address : str
        Where it is.
    domain : str
        What it fails together with.
    memory : int
        Bytes that it may use; 0 where that is not limited.
    speed : float
        How fast it is, relative to the others.
    """

    address: str
    domain: str
    memory: int = 0
    speed: float = 1.0


def permitted(resources: Mapping[str, Mapping[str, float]]) -> set[str]:
    """Return the workers that may hold stages: those with some of `LABEL`, or all if nobody declares it.

    Parameters
    ----------
    resources : mapping of str to mapping of str to float
        Per address the resources that a worker declares.
    """
    if not any(LABEL in held for held in resources.values()):
        return set(resources)
    return {address for address, held in resources.items() if held.get(LABEL, 0) > 0}


def boundaries_of(given: Sequence[int], n_layers: int) -> tuple[int, ...]:
    """Return the first layer of every stage but the head, checked.

    Raises
    ------
    InputError
        If they do not rise, or leave a stage without a layer.
    """
    cuts = tuple(given) if isinstance(given, Iterable) else (given,)
    whole = all(isinstance(cut, int) and not isinstance(cut, bool) for cut in cuts)
    if not whole or any(b <= a for a, b in pairwise((0, *cuts, n_layers))):
        raise InputError(f"boundaries: expected rising layers between 0 and {n_layers}, got {given!r}")
    return cuts


def split_evenly(
    costs: Sequence[float], speeds: Sequence[float], sizes: Sequence[int], memories: Sequence[int]
) -> tuple[int, ...]:
    """Cut layers into one contiguous stage per worker, so that the slowest stage is as fast as can be.

    A search over all cuts (dynamic programming over stages and layers), exact.

    Parameters
    ----------
    costs : sequence of float
        Work per layer; what comes before the first and after the last one is in theirs.
    speeds : sequence of float
        Work per second of each stage's worker, in order.
    sizes : sequence of int
        Bytes per layer.
    memories : sequence of int
        Bytes that each worker may use; 0 is unlimited.

    Returns
    -------
    tuple of int
        First layer of every stage but the head.

    Raises
    ------
    InputError
        If there are fewer layers than stages, or the memory does not suffice.
    """
    n, stages = len(costs), len(speeds)
    if stages > n:
        raise InputError(f"stages: expected at most {n}, one per layer, got {stages}")
    work, size = [0.0], [0]
    for cost, nbytes in zip(costs, sizes, strict=True):
        work.append(work[-1] + cost)
        size.append(size[-1] + nbytes)
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ())] + [None] * n
    for speed, memory in zip(speeds, memories, strict=True):
        following: list[tuple[float, tuple[int, ...]] | None] = [None] * (n + 1)
        for end in range(1, n + 1):
            for begin in range(end):
                before = best[begin]
                if before is None or (memory and size[end] - size[begin] > memory):
                    continue
                slowest = max(before[0], (work[end] - work[begin]) / speed)
                so_far = following[end]
                if so_far is None or slowest < so_far[0]:
                    following[end] = (slowest, (*before[1], begin))
        best = following
    found = best[n]
    if found is None:
        raise InputError(
            f"expected workers with memory for {size[-1]} bytes of weights in {stages} stages, "
            f"got {[memory or 'unlimited' for memory in memories]}"
        )
    return found[1][1:]


def place(
    candidates: Sequence[Candidate],
    stages: int | None,
    spares: int,
    costs: Sequence[float],
    sizes: Sequence[int],
) -> tuple[list[Candidate], tuple[int, ...]]:
    """Choose workers for stages and cut the layers by their speed and memory.

    Parameters
    ----------
    candidates : sequence of Candidate
        All that are there.
    stages : int or None
        How many stages; None makes as few as there is memory for, two at least where there are two workers.
    spares : int
        Workers that are to be left over, if the number of stages is not given.
    costs, sizes
        See `split_evenly`.

    Returns
    -------
    chosen : list of Candidate
        Who takes each stage.
    boundaries : tuple of int
        First layer of every stage but the head.

    Raises
    ------
    NoDomainError
        If there are fewer workers than stages.
    InputError
        If the layers are too few, or the memory does not suffice.
    """
    fewest = stages or max(1, min(2, len(candidates), len(costs)))
    most = stages or max(fewest, min(len(costs), len(candidates) - spares))
    for count in range(fewest, most):
        with contextlib.suppress(InputError):
            return _placed(candidates, count, costs, sizes)
    return _placed(candidates, most, costs, sizes)


def _placed(
    candidates: Sequence[Candidate], stages: int, costs: Sequence[float], sizes: Sequence[int]
) -> tuple[list[Candidate], tuple[int, ...]]:
    chosen = choose_workers(candidates, stages)
    expect_workers(chosen, stages)
    speeds, memories = [one.speed for one in chosen], [int(one.memory * _FOR_WEIGHTS) for one in chosen]
    return chosen, split_evenly(costs, speeds, sizes, memories)


def choose_workers(
    candidates: Sequence[Candidate],
    count: int,
    taken: Mapping[str, str] | None = None,
    refused: Collection[str] = (),
) -> list[Candidate]:
    """Pick workers for stages, in failure domains of their own as far as there are enough.

    Parameters
    ----------
    candidates : sequence of Candidate
        All that are there.
    count : int
        How many are wanted.
    taken : mapping of str to str, optional
        Domain by address of the workers that hold a stage.
    refused : collection of str, optional
        Addresses that are not to be used.

    Returns
    -------
    list of Candidate
        The fastest first; fewer than wanted where there are no more.
    """
    taken = dict(taken or {})
    free = [one for one in candidates if one.address not in taken and one.address not in refused]
    used, chosen = set(taken.values()), list[Candidate]()
    for alone in (True, False):
        for one in sorted(free, key=lambda one: -one.speed):
            if len(chosen) < count and one not in chosen and (not alone or one.domain not in used):
                chosen.append(one)
                used.add(one.domain)
    return chosen


def next_hot(sizes: Sequence[int], held: Collection[int | None]) -> int:
    """Return the stage that one more spare should have in memory, if each has one.

    Spares so have the stages round robin, the largest first, as that takes longest to load.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of each stage.
    held : collection of int or None
        The stage that each spare has in memory already.
    """
    held = list(held)
    return min(range(len(sizes)), key=lambda stage: (held.count(stage), -sizes[stage], stage))


def expect_workers(chosen: Sequence[Candidate], stages: int) -> None:
    """Refuse to begin with fewer workers than stages.

    Raises
    ------
    NoDomainError
        If there are fewer.
    """
    if len(chosen) < stages:
        raise NoDomainError(
            f"expected {stages} workers for as many stages, got {len(chosen)}; Client.wait_for_workers waits "
            "for those that are still starting"
        )
