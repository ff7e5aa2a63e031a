"""Speculation keeps exactly the tokens of plain decoding, whatever is drafted."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.inference.speculative import (
    DraftStatistics,
    DraftTree,
    ModelDrafter,
    NGramDrafter,
    SpeculationWindow,
    accept,
    accept_tree,
)

IDS = st.lists(st.integers(0, 4), max_size=40)


def next_token(ids: Sequence[int]) -> int:
    """The plain model: any function of all tokens so far."""
    x = 1
    for token in ids:
        x = (x * 31 + token + 7) % 10007
    return x // 7 % 5


def plain(prompt: Sequence[int], n: int) -> list[int]:
    ids = list(prompt)
    for _ in range(n):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


@given(IDS, st.lists(st.integers(0, 4), max_size=6))
def test_accept_keeps_the_plain_tokens(ids: list[int], drafted: list[int]) -> None:
    driver = [*ids, 0]
    sampled = [next_token(driver + drafted[:r]) for r in range(len(drafted) + 1)]
    n, token = accept(drafted, sampled)
    assert [*drafted[:n], token] == plain(driver, n + 1)
    assert n == len(drafted) or drafted[n] != plain(driver, n + 1)[n]


@given(IDS, st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=5))
def test_accept_tree_keeps_the_plain_tokens(ids: list[int], drafts: list[list[int]]) -> None:
    driver = [*ids, 0]
    tree = DraftTree.from_drafts(drafts)
    branches = [branch(tree, node) for node in range(len(tree))]
    sampled = [next_token(driver), *(next_token(driver + tokens) for tokens in branches)]
    path, token = accept_tree(tree, sampled)
    found = [*(tree.tokens[node] for node in path), token]
    assert found == plain(driver, len(path) + 1)
    longest = max((accept(draft, plain(driver, len(draft) + 1))[0] for draft in drafts), default=0)
    assert len(path) == longest


def branch(tree: DraftTree, node: int) -> list[int]:
    tokens: list[int] = []
    while node >= 0:
        tokens.append(tree.tokens[node])
        node = tree.parents[node]
    return tokens[::-1]


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=5))
def test_trees_hold_every_draft_and_nothing_else(drafts: list[list[int]]) -> None:
    tree = DraftTree.from_drafts(drafts)
    prefixes = {tuple(draft[:k]) for draft in drafts for k in range(1, len(draft) + 1)}
    assert {tuple(branch(tree, node)) for node in range(len(tree))} == prefixes
    assert len(tree) == len(prefixes)
    mask, depths = tree.ancestor_mask, tree.depths
    assert mask.shape == (len(tree) + 1,) * 2
    assert mask[0].sum() == 1
    for node in range(len(tree)):
        assert mask[node + 1].sum() == depths[node] + 1 == len(branch(tree, node)) + 1
        assert mask[node + 1, 0] and mask[node + 1, node + 1]
        parent = tree.parents[node]
        np.testing.assert_array_equal(np.flatnonzero(mask[node + 1])[:-1], np.flatnonzero(mask[parent + 1]))


@given(IDS, st.integers(1, 4), st.integers(1, 6), st.one_of(st.none(), st.integers(2, 20)))
def test_ngrams_are_those_of_a_plain_search(ids: list[int], n: int, width: int, context: int | None) -> None:
    drafted = NGramDrafter(n, width, context).draft(ids)
    window = ids[-context:] if context else ids
    for size in range(min(n, len(window) - 1), 0, -1):
        starts = [k for k in range(len(window) - size) if window[k : k + size] == window[-size:]]
        if starts:
            period = len(window) - size - starts[-1]
            tail = window[starts[-1] + size :]
            assert drafted == tuple(tail[k % period] for k in range(width))
            return
    assert drafted == ()


@given(IDS, st.integers(1, 3), st.integers(1, 4), st.integers(2, 4))
def test_several_drafts_are_the_latest_different_ones(ids: list[int], n: int, width: int, most: int) -> None:
    found = NGramDrafter(n, width, branches=most).draft(ids)
    drafts, looks = [], 0
    for size in range(min(n, len(ids) - 1), 0, -1):
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == ids[-size:] and looks < 8 * most and len(drafts) < most:
                looks += 1
                tail, period = ids[start + size :], len(ids) - size - start
                draft = tuple(tail[k % period] for k in range(width))
                drafts += [draft] if draft not in drafts else []
    assert found == DraftTree.from_drafts(drafts)
    if drafts:
        assert found.first == drafts[0] == NGramDrafter(n, width).draft(ids)


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=5), st.lists(st.integers(0, 2), max_size=5))
def test_following_tokens_down_a_tree(drafts: list[list[int]], tokens: list[int]) -> None:
    tree = DraftTree.from_drafts(drafts)
    path = tree.follow(tokens)
    assert [tree.tokens[node] for node in path] == tokens[: len(path)]
    known = {tuple(draft[:k]) for draft in drafts for k in range(len(draft) + 1)} | {()}
    assert len(path) == max(k for k in range(len(tokens) + 1) if tuple(tokens[:k]) in known)
    if path:
        assert branch(tree, path[-1]) == tokens[: len(path)]


def test_ngrams_see_numpy_ids_and_big_ids() -> None:
    ids = np.array([70000, 256, 1, 9, 70000, 256])
    assert NGramDrafter(2, 3).draft(ids) == (1, 9, 70000)


def test_windows_are_respected() -> None:
    seen: list[tuple[int, ...]] = []

    def guess(ids: tuple[int, ...], width: int) -> list[np.int64]:
        seen.append(ids)
        return [np.int64(7)] * (width + 2)

    assert ModelDrafter(guess, 3, 2).draft([1, 2, 3, 4]) == (7, 7, 7)
    assert ModelDrafter(guess, 3).draft([1, 2, 3, 4]) == (7, 7, 7)
    assert seen == [(3, 4), (1, 2, 3, 4)]
    assert NGramDrafter(1, 2, 3).draft([5, 6, 1, 2, 5]) == ()


class Random:
    """Guesses right with some probability, and sometimes not at all."""

    def __init__(self, seed: int, skill: float) -> None:
        self.random, self.skill = random.Random(seed), skill

    def draft(self, ids: Sequence[int]) -> tuple[int, ...]:
        out = list(ids)
        for _ in range(self.random.randrange(5)):
            right = self.random.random() < self.skill
            out.append(next_token(out) if right else self.random.randrange(5))
        return tuple(out[len(ids) :])


class Stages:
    """Answers chunks with a state that is cut where a chunk starts earlier."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.fed = list(prompt)

    def verify(self, position: int, tokens: Sequence[int]) -> list[int]:
        assert position <= len(self.fed)
        del self.fed[position:]
        sampled = []
        for token in tokens:
            self.fed.append(token)
            sampled.append(next_token(self.fed))
        return sampled


@given(
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    depth=st.integers(1, 5),
    seed=st.integers(0, 99),
    skill=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    plainly=st.booleans(),
)
def test_pipelined_speculation_gives_the_plain_tokens(
    prompt: list[int], depth: int, seed: int, skill: float, plainly: bool
) -> None:
    n, rng = 25, random.Random(seed)
    drafter = None if plainly else Random(seed, skill)
    window = SpeculationWindow(tuple(prompt), [next_token(prompt)], drafter, depth)
    stages, answers = Stages(prompt), []
    while len(window.committed) < n:
        chunk = window.feed(room=n + 3)
        if chunk is not None:
            answers.append((chunk.index, stages.verify(chunk.position, chunk.tokens)))
        if answers and (chunk is None or rng.random() < 0.4):
            before = len(window.committed)
            fresh = window.returned(*answers.pop(0))
            assert window.committed[before:] == list(fresh or ())
        assert len(window.in_flight) <= depth
        if rng.random() < 0.03:  # a recovery: what is in flight never comes back
            window.restart()
            answers.clear()
            del stages.fed[window.position :]
    assert window.committed == plain(prompt, len(window.committed))
    counts = window.statistics
    assert counts.committed == len(window.committed) - 1
    assert counts.accepted <= counts.drafted
    if plainly:
        assert counts.tokens_per_traversal == 1.0
    if skill == 1.0 and depth == 1 and not plainly:
        assert counts.acceptance == 1.0


def test_a_deep_window_on_a_text_that_repeats_itself() -> None:
    window = SpeculationWindow((1, 2, 3, 1, 2), [3], NGramDrafter(2, 4), depth=3)
    chunks = [window.feed() for _ in range(4)]
    assert [(c.position, c.tokens) for c in chunks[:3] if c] == [
        (5, (3, 1, 2, 3, 1)),
        (10, (2, 3, 1, 2)),
        (14, (3, 1, 2, 3)),
    ]
    assert chunks[3] is None
    assert window.returned(0, (1, 2, 3, 1, 2)) == (1, 2, 3, 1, 2)
    with pytest.raises(InputError, match="expected the answer to chunk 1, got that to 2"):
        window.returned(2, (1, 2, 3, 1))
    assert window.returned(1, (3, 9, 9, 9)) == (3, 9)  # wrong from here on: chunk 2 is useless
    assert window.in_flight == ()
    assert window.returned(2, (1, 2, 3, 1)) is None
    assert window.statistics == DraftStatistics(3, 7, 5, 7)


class Trees:
    """Drafts trees, some of whose branches are right for a while."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def draft(self, ids: Sequence[int]) -> DraftTree:
        drafts = []
        for _ in range(self.random.randrange(4)):
            right = plain(ids, self.random.randrange(4))
            drafts.append([*right, *(self.random.randrange(5) for _ in range(self.random.randrange(3)))])
        return DraftTree.from_drafts(drafts)


@given(
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    depth=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_trees_give_the_plain_tokens(prompt: list[int], depth: int, seed: int) -> None:
    n, accepted = 25, 0
    window = SpeculationWindow(tuple(prompt), [next_token(prompt)], Trees(seed), depth)
    while len(window.committed) < n:
        room = n - len(window.committed)
        chunk = window.feed(room)
        if chunk is None:
            chunk = window._flight[window.in_flight[0]]
        elif depth > 1:
            assert chunk.tree is None
            continue
        text = [*prompt, *window.committed[:-1]]
        assert (chunk.position, len(chunk.tokens) <= room) == (len(text), True)
        if (tree := chunk.tree) is not None:
            assert tree.tokens == chunk.tokens[1:]
            rows = [
                next_token([*text, chunk.tokens[0], *branch(tree, node)]) for node in range(-1, len(tree))
            ]
            path, token = accept_tree(tree, rows)
            sampled = [*(tree.tokens[node] for node in path), token]
            accepted += len(path)
        else:
            sampled = [next_token([*text, *chunk.tokens[: k + 1]]) for k in range(len(chunk.tokens))]
        window.returned(chunk.index, sampled)
    assert window.committed == plain(prompt, len(window.committed))
    assert window.statistics.accepted >= accepted


def test_room_ends_what_is_fed() -> None:
    window = SpeculationWindow((1, 2, 1, 2), [1], NGramDrafter(2, 8), depth=2)
    chunk = window.feed(room=3)
    assert chunk is not None and chunk.tokens == (1, 2, 1)
    assert window.feed(room=3) is None


def test_statistics_of_nothing() -> None:
    assert (DraftStatistics().tokens_per_traversal, DraftStatistics().acceptance) == (0.0, 0.0)


def test_bad_arguments() -> None:
    with pytest.raises(InputError, match="expected 2 sampled tokens, got 1"):
        accept([1], [1])
    with pytest.raises(InputError, match="expected 1 sampled tokens, got 2"):
        accept_tree(DraftTree((), ()), [1, 2])
    with pytest.raises(InputError, match="node 0: expected a parent from -1 to -1, got 0"):
        DraftTree((1,), (0,))
    with pytest.raises(InputError, match="expected 1 parents, got 0"):
        DraftTree((1,), ())
    for n in (0, True, 1.5):
        with pytest.raises(InputError, match="n: expected an int >= 1"):
            NGramDrafter(n)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="draft_ctx: expected an int >= 2"):
        NGramDrafter(draft_ctx=1)
    with pytest.raises(InputTypeError, match="draft: expected a sequence of int"):
        ModelDrafter(lambda ids, width: ["a"]).draft([1])  # type: ignore[list-item]
    with pytest.raises(InputError, match="depth: expected an int >= 1"):
        SpeculationWindow((1,), [1], depth=0)
    with pytest.raises(InputError, match="expected a prompt and a committed token"):
        SpeculationWindow((1,), [])


@pytest.mark.parametrize("draft", ["x", [1.5], 7])
def test_drafts_that_are_no_ids_are_refused(draft: object) -> None:
    class Odd:
        def draft(self, ids: Sequence[int]) -> object:
            return draft

    with pytest.raises(InputTypeError, match="draft: expected a sequence of int"):
        SpeculationWindow((1,), [1], Odd()).feed()  # type: ignore[arg-type]
