"""A small model that guesses for a large one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_sdc.exceptions import InputError
from dask_sdc.inference.stage import TransformerStage
from dask_sdc.inference.weights.store import WeightStore

__all__ = ["GreedyGuess"]

#: Positions of a chunk in which a text is read.
_CHUNK = 256


class GreedyGuess:
    """The greedy tokens of a model in this process; the ``guess`` of a `ModelDrafter`.

    Keeps keys and values of the text that it saw last, so that a text that went on costs what is new of it.
    A `ModelDrafter` with ``draft_ctx`` shows it another window each time, which is read as a whole.

    Parameters
    ----------
    store : WeightStore
        The model. Its ids have to mean what they mean to the large one.

    Raises
    ------
    CorruptionError
        If a tensor is damaged, naming it.
    """

    def __init__(self, store: WeightStore) -> None:
        self._stage = TransformerStage(store, range(store.config.n_layers))
        self._stage.load()
        self._seen: list[int] = []
        self._state = self._stage.init()

    def __call__(self, ids: Sequence[int], width: int) -> tuple[int, ...]:
        """Return ``width`` tokens after the last of the ids that fit into the model's context."""
        config = self._stage.config
        if not ids or not 0 < width < config.max_context or max(ids) >= config.vocab_size:
            raise InputError(
                f"expected ids in 0..{config.vocab_size - 1} and a width in 1..{config.max_context - 1}, got "
                f"{len(ids)} up to {max(ids, default=-1)} and {width}"
            )
        text = list(ids[width - config.max_context :])
        self._return_to(text)
        drafted = [self._next(text[len(self._seen) :])]
        while len(drafted) < width:
            drafted.append(self._next(drafted[-1:]))
        return tuple(drafted)

    def _return_to(self, text: list[int]) -> None:
        """Forget what is no longer part of the text, and at least its last token: its logits are wanted."""
        pairs = enumerate(zip(self._seen, text[:-1], strict=False))
        same = next((k for k, (a, b) in pairs if a != b), min(len(self._seen), len(text) - 1))
        try:
            self._stage.truncate(self._state, same)
        except InputError:  # a sliding window does not reach back so far
            self._state, same = self._stage.init(), 0
        del self._seen[same:]

    def _next(self, ids: list[int]) -> int:
        for begin in range(0, len(ids), _CHUNK):
            chunk: Any = np.asarray([ids[begin : begin + _CHUNK]], np.int64)
            logits = self._stage.forward(chunk, self._state, rows=1)
        self._seen += ids
        return int(np.argmax(logits[0, -1]))
