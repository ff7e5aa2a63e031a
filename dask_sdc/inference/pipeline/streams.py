"""What both kinds of pipelines make of a generation on its way: tokens one by one, or the whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dask_sdc.exceptions import InputError
from dask_sdc.inference.checkpoint import Checkpoint
from dask_sdc.inference.receipts import RunReceipt
from dask_sdc.inference.speculative import DraftStatistics

__all__ = ["Generation", "News", "States", "check_settings", "last_of", "tokens_of"]

Array = np.ndarray[Any, Any]

#: Settings of a generation.
_SETTINGS = ("temperature", "top_p", "seed", "stop", "resume")


@dataclass(frozen=True)
class Generation:
    """What a generation gave.

    Parameters
    ----------
    prompt, ids : tuple of int
        Ids of the prompt, and the generated ones. After a call with ``resume`` the latter are those that came
        after the checkpoint.
    text : str or None
        The text of ``ids``, if there is a tokenizer.
    stopped : bool
        Whether a stop token, the last of ``ids``, ended it.
    statistics : DraftStatistics
        Of the speculation.
    checkpoint : Checkpoint
        From which a later call can go on.
    receipt : RunReceipt
        Which model gave these tokens, through which stages, and what was healed; see
        `dask_sdc.inference.receipts.verify`.
    audited : tuple of int
        Per stage the position up to which its work was computed once more, and agreed; empty without audits.
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    text: str | None
    stopped: bool
    statistics: DraftStatistics
    # Left out of the repr, which would be screens of digests in a notebook.
    checkpoint: Checkpoint = field(repr=False)
    receipt: RunReceipt = field(repr=False)
    audited: tuple[int, ...]


@dataclass(frozen=True)
class States:
    """What a model makes of a text.

    Parameters
    ----------
    ids : tuple of int
        The text.
    hidden : dict of int to ndarray of float32, shape (positions, hidden size)
        What the layers put out that were asked for.
    logits : ndarray of float32, shape (positions, vocabulary), or None
        If they were asked for.
    """

    ids: tuple[int, ...]
    hidden: dict[int, Array]
    logits: Array | None


@dataclass(frozen=True)
class News:
    """What a traversal brought.

    Parameters
    ----------
    kept : int
        How many of the fresh tokens that were told before still count.
    tokens : tuple of int
        Those behind them.
    checkpoint : Checkpoint, optional
        At the beginning: what a later call can go on from.
    generation : Generation, optional
        At the end: the result.
    """

    kept: int
    tokens: tuple[int, ...]
    checkpoint: Checkpoint | None = None
    generation: Generation | None = None


def check_settings(settings: Collection[str]) -> None:
    """Refuse names that are no settings of a generation."""
    if unknown := set(settings) - set(_SETTINGS):
        raise InputError(f"expected settings among {list(_SETTINGS)}, got {sorted(unknown)}")


async def tokens_of(run: AsyncGenerator[News, None]) -> AsyncGenerator[int, None]:
    """Yield the tokens of a generation as they come."""
    try:
        async for news in run:
            for token in news.tokens:
                yield token
    finally:
        await run.aclose()


async def last_of(run: AsyncGenerator[News, None]) -> Generation:
    """Return what a generation ends with."""
    async for news in run:
        last = news
    assert last.generation is not None
    return last.generation
