"""Speculative decoding that changes no token: drafters, acceptance, token trees.

The stages verify drafted tokens in one traversal: row r of a chunk is fed token r, and the token that is
sampled after it is what plain decoding would sample there as long as all tokens fed before were right.
So keeping drafted tokens only while each equals the one sampled before it keeps exactly the plain
tokens, for sampled decoding too, because sampling is keyed by seed and position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from dask_sdc.exceptions import InputError
from dask_sdc.inference.checkpoint import token_ids

#: Places that are looked at per draft.
_LOOKS = 8


class Drafter(Protocol):
    """Guesses how a text goes on."""

    def draft(self, ids: Sequence[int]) -> tuple[int, ...] | DraftTree:
        """Return guesses for the tokens after ``ids``, perhaps none; a tree of them is verified at once.

        Guesses are a tuple, list or array of ids of the model's vocabulary.
        """


def _check_at_least(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name}: expected an int >= {least}, got {value!r}")
    return value


@dataclass(frozen=True)
class NGramDrafter:
    """Drafts what followed the last time that the text ended like this (prompt lookup, Saxena 2023).

    Parameters
    ----------
    n : int
        Longest ending that is looked for; shorter ones are tried after it.
    width : int
        Tokens per draft, at most.
    draft_ctx : int, optional
        Tokens at the end of the text that are looked at; all without it.
    branches : int
        Drafts at most. With more than one, what followed earlier times is drafted as well, as a tree.
    """

    n: int = 3
    width: int = 8
    draft_ctx: int | None = None
    branches: int = 1

    def __post_init__(self) -> None:
        _check_at_least("n", self.n, 1)
        _check_at_least("width", self.width, 1)
        _check_at_least("branches", self.branches, 1)
        if self.draft_ctx is not None:
            _check_at_least("draft_ctx", self.draft_ctx, 2)

    def draft(self, ids: Sequence[int]) -> tuple[int, ...] | DraftTree:
        """Return at most `width` tokens, or a tree of such drafts; none if the ending is new.

        A match that lies near the end goes on into its own draft, so a text that repeats itself with a
        short period is drafted to the full width.
        """
        window = [int(token) for token in (ids[-self.draft_ctx :] if self.draft_ctx is not None else ids)]
        drafts: list[tuple[int, ...]] = []
        # A text of one token has a match everywhere, and one draft.
        for start in islice(_matches(window, self.n), _LOOKS * self.branches):
            draft = self._following(window, start)
            if draft not in drafts:
                drafts.append(draft)
            if len(drafts) == self.branches:
                break
        if self.branches > 1:
            return DraftTree.from_drafts(drafts)
        return drafts[0] if drafts else ()

    def _following(self, window: list[int], start: int) -> tuple[int, ...]:
        drafted: list[int] = []
        for k in range(start, start + self.width):
            drafted.append(window[k] if k < len(window) else drafted[k - len(window)])
        return tuple(drafted)


def _matches(window: list[int], n: int) -> Iterator[int]:
    """Yield what comes after each place where the text ended as it does now, the longest endings first.

    Of places with the same ending the last one comes first.
    """
    raw = np.asarray(window, np.int64).tobytes()
    for size in range(min(n, len(window) - 1), 0, -1):
        ending, end = raw[-8 * size :], len(raw) - 8
        while (at := raw.rfind(ending, 0, end)) >= 0:
            end = at + 8 * size - 1
            if at % 8 == 0:  # else bytes that match across the border of two tokens
                yield at // 8 + size


@dataclass(frozen=True)
class ModelDrafter:
    """Drafts with any callable, such as a small model.

    Parameters
    ----------
    guess : callable
        Takes a tuple of ids and a number of tokens; returns the ids that it guesses. A pipeline calls it in a
        thread, one call at a time. See `GreedyGuess` for one.
    width : int
        Tokens per draft, at most.
    draft_ctx : int, optional
        Tokens at the end of the text that the callable sees; all without it.
    """

    guess: Callable[[tuple[int, ...], int], Iterable[int]]
    width: int = 4
    draft_ctx: int | None = None

    def __post_init__(self) -> None:
        _check_at_least("width", self.width, 1)
        if self.draft_ctx is not None:
            _check_at_least("draft_ctx", self.draft_ctx, 1)

    def draft(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return at most `width` tokens."""
        window = ids[-self.draft_ctx :] if self.draft_ctx is not None else ids
        return token_ids(list(self.guess(tuple(window), self.width))[: self.width], "draft")


class Acceptance(NamedTuple):
    """What a verification keeps.

    Attributes
    ----------
    n : int
        Drafted tokens that were right; n + 1 positions of the chunk count.
    token : int
        The token sampled after them: the new driver token.
    """

    n: int
    token: int


def accept(drafted: Sequence[int], sampled: Sequence[int]) -> Acceptance:
    """Keep drafted tokens while they are those of plain decoding.

    Parameters
    ----------
    drafted : sequence of int
        K tokens, fed behind the driver token.
    sampled : sequence of int
        K + 1 tokens, sampled after the driver token and after each drafted one.

    Returns
    -------
    Acceptance
        The tokens ``(*drafted[:n], token)`` are committed.

    Raises
    ------
    InputError
        If the lengths do not fit.
    """
    if len(sampled) != len(drafted) + 1:
        raise InputError(f"expected {len(drafted) + 1} sampled tokens, got {len(sampled)}")
    n = 0
    while n < len(drafted) and drafted[n] == sampled[n]:
        n += 1
    return Acceptance(n, int(sampled[n]))


@dataclass(frozen=True)
class DraftTree:
    """Several drafts in one traversal, with what they begin alike stored once.

    Parameters
    ----------
    tokens : tuple of int
        Token of every node.
    parents : tuple of int
        Node that each node follows; -1 for the driver token. Parents come before their children.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", token_ids(self.tokens, "tokens"))
        if len(self.parents) != len(self.tokens):
            raise InputError(f"expected {len(self.tokens)} parents, got {len(self.parents)}")
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise InputError(f"node {node}: expected a parent from -1 to {node - 1}, got {parent}")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def from_drafts(cls, drafts: Iterable[Sequence[int]]) -> Self:
        """Merge drafts; nodes are numbered in the order in which they first come."""
        tokens: list[int] = []
        parents: list[int] = []
        known: dict[tuple[int, int], int] = {}
        for draft in drafts:
            node = -1
            for token in draft:
                child = known.setdefault((node, token), len(tokens))
                if child == len(tokens):
                    tokens.append(token)
                    parents.append(node)
                node = child
        return cls(tuple(tokens), tuple(parents))

    @property
    def first(self) -> tuple[int, ...]:
        """Tokens of the first branch: from node 0 on, every time to the first child."""
        tokens: list[int] = []
        node = -1
        while node in self.parents[node + 1 :]:
            node = self.parents.index(node, node + 1)
            tokens.append(self.tokens[node])
        return tuple(tokens)

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """The node that follows a node, or -1, with a token; the first one if there are several."""
        found: dict[tuple[int, int], int] = {}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            found.setdefault((parent, token), node)
        return found

    def follow(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the nodes along some tokens, as far as the tree has them."""
        path: list[int] = []
        for token in tokens:
            following = self.children.get((path[-1] if path else -1, int(token)))
            if following is None:
                break
            path.append(following)
        return tuple(path)

    @property
    def depths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Positions behind the driver token, (N,): 1 for its children."""
        depths = np.zeros(len(self), np.int64)
        for node, parent in enumerate(self.parents):
            depths[node] = 1 if parent < 0 else depths[parent] + 1
        return depths

    @property
    def ancestor_mask(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which row may attend to which, (N + 1, N + 1): row 0 is the driver token, row i + 1 node i."""
        mask = np.eye(len(self) + 1, dtype=bool)
        mask[0, 0] = True
        for node, parent in enumerate(self.parents):
            mask[node + 1] |= mask[parent + 1]
        return mask


class TreeAcceptance(NamedTuple):
    """What the verification of a tree keeps.

    Attributes
    ----------
    path : tuple of int
        Nodes that were right, from the driver token on; their rows count.
    token : int
        The token sampled after the last of them: the new driver token.
    """

    path: tuple[int, ...]
    token: int


def accept_tree(tree: DraftTree, sampled: Sequence[int]) -> TreeAcceptance:
    """Walk down a tree along the tokens of plain decoding.

    Parameters
    ----------
    tree : DraftTree
        N nodes.
    sampled : sequence of int
        N + 1 tokens, sampled after the driver token and after each node.

    Returns
    -------
    TreeAcceptance
        The tokens of the path, and the next one, are committed.

    Raises
    ------
    InputError
        If the lengths do not fit.
    """
    if len(sampled) != len(tree) + 1:
        raise InputError(f"expected {len(tree) + 1} sampled tokens, got {len(sampled)}")
    path: list[int] = []
    node = -1
    while (following := tree.children.get((node, int(sampled[node + 1])))) is not None:
        path.append(following)
        node = following
    return TreeAcceptance(tuple(path), int(sampled[node + 1]))


@dataclass
class DraftStatistics:
    """Counts of a speculative generation.

    Attributes
    ----------
    traversals : int
        Chunks that came back, useless ones included.
    drafted, accepted : int
        Drafted tokens that were sent, and those that were right.
    committed : int
        Tokens that were committed.
    """

    traversals: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0

    def record(self, drafted: int, accepted: int, committed: int) -> None:
        """Count one traversal."""
        self.traversals += 1
        self.drafted += drafted
        self.accepted += accepted
        self.committed += committed

    @property
    def tokens_per_traversal(self) -> float:
        """Committed tokens per chunk that came back; 1 without speculation."""
        return self.committed / self.traversals if self.traversals else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were right."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class Verify:
    """A chunk to feed: the token at ``position`` and drafted ones behind it.

    Parameters
    ----------
    index : int
        Number of the chunk.
    position : int
        Position of the first token. Where it lies before the end of what a stage holds, the stage
        first forgets everything from there on.
    tokens : tuple of int
        What is fed.
    tree : DraftTree or None
        What the tokens behind the first are, if they are no line.
    """

    index: int
    position: int
    tokens: tuple[int, ...]
    tree: DraftTree | None = None


@dataclass
class SpeculationWindow:
    """The decoding side of a session: what to feed next, and what comes back means.

    Keeps up to ``depth`` chunks in flight. A later chunk assumes that the drafts of all chunks before it
    are right and that its own first token is what is sampled after them; where that turns out wrong, it is
    useless and its answer is ignored.

    Parameters
    ----------
    prompt, committed : sequence of int
        Ids so far; at least one is committed (the prefill gave it).
    drafter : Drafter or None
        Guesses; None is plain decoding. Of a tree the first branch is fed only, where more than one chunk may
        be in flight: a later one could not follow all of them.
    depth : int, optional
        Chunks in flight at most.
    next_index : int, optional
        Number of the next chunk.
    trees : bool, optional
        Whether trees are fed at all.
    """

    prompt: tuple[int, ...]
    committed: list[int]
    drafter: Drafter | None = None
    depth: int = 1
    next_index: int = 0
    statistics: DraftStatistics = field(default_factory=DraftStatistics)
    trees: bool = True
    _flight: dict[int, Verify] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.prompt, self.committed = tuple(self.prompt), list(self.committed)
        _check_at_least("depth", self.depth, 1)
        if not self.prompt or not self.committed:
            raise InputError("expected a prompt and a committed token, got none")

    @property
    def position(self) -> int:
        """Positions that were fed and count: the driver token is fed at this one."""
        return len(self.prompt) + len(self.committed) - 1

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Numbers of the chunks whose answers are awaited, useless ones left out."""
        return tuple(self._flight)

    def feed(self, room: int | None = None) -> Verify | None:
        """Return the next chunk to feed, None if nothing can be fed now.

        Parameters
        ----------
        room : int, optional
            Positions after `position` that may be fed, by the context or the number of tokens wanted.
        """
        if len(self._flight) >= self.depth:
            return None
        ahead = [token for chunk in self._flight.values() for token in chunk.tokens][1:]
        text = [*self.prompt, *self.committed, *ahead]
        drafts = self.drafter.draft(text) if self.drafter is not None else ()
        if isinstance(drafts, DraftTree) and drafts.first != drafts.tokens and self.trees and self.depth == 1:
            return self._grow(drafts, room)
        drafted = list(drafts.first if isinstance(drafts, DraftTree) else token_ids(drafts, "draft"))
        # Behind a chunk in flight the first drafted token takes the place of the one it will sample.
        tokens = drafted if self._flight else [self.committed[-1], *drafted]
        position = self.position + sum(len(chunk.tokens) for chunk in self._flight.values())
        if room is not None:
            tokens = tokens[: max(0, self.position + room - position)]
        if not tokens:
            return None
        return self._sent(Verify(self.next_index, position, tuple(tokens)))

    def _grow(self, tree: DraftTree, room: int | None) -> Verify | None:
        """Feed a tree, as much of it as there is room for: each node takes a position in the caches."""
        if room is not None and room < 1:
            return None
        if room is not None:
            tree = DraftTree(tree.tokens[: room - 1], tree.parents[: room - 1])
        tokens = (self.committed[-1], *tree.tokens)
        return self._sent(Verify(self.next_index, self.position, tokens, tree if len(tree) else None))

    def _sent(self, chunk: Verify) -> Verify:
        self.next_index += 1
        self._flight[chunk.index] = chunk
        return chunk

    def returned(self, index: int, sampled: Sequence[int]) -> tuple[int, ...] | None:
        """Take an answer, in whatever order of chunks it comes as long as it is the oldest's or useless.

        Parameters
        ----------
        index : int
            Number of the chunk.
        sampled : sequence of int
            The token sampled after each fed one; of a tree after each one of the branch that was right.

        Returns
        -------
        tuple of int or None
            The tokens that are now committed, at least one; None for a useless chunk. As many positions
            of the chunk count as there are tokens.

        Raises
        ------
        InputError
            If the lengths do not fit, or an older chunk is still in flight.
        """
        if index not in self._flight:
            self.statistics.record(0, 0, 0)
            return None
        if index != next(iter(self._flight)):
            raise InputError(f"expected the answer to chunk {next(iter(self._flight))}, got that to {index}")
        chunk = self._flight.pop(index)
        drafted = sampled[:-1] if chunk.tree is not None else chunk.tokens[1:]
        n, token = accept(drafted, sampled)
        fresh = (*drafted[:n], token)
        self.committed.extend(fresh)
        self.statistics.record(len(chunk.tokens) - 1, n, len(fresh))
        following = next(iter(self._flight.values()), None)
        if n < len(chunk.tokens) - 1 or (following is not None and following.tokens[0] != token):
            self._flight.clear()
        return fresh

    def restart(self) -> None:
        """Forget what is in flight: after a recovery it never comes back."""
        self._flight.clear()
