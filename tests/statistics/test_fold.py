from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError
from dask_sdc.statistics.fold import TreeFold, tree_fold


def join(a: str, b: str) -> str:
    """Not associative: the brackets show the shape of the tree."""
    return f"({a}{b})"


def recursive(leaves: list[str]) -> str:
    """Independent reference: split below the largest power of two."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return join(recursive(leaves[:half]), recursive(leaves[half:]))


@given(st.integers(1, 70).flatmap(lambda n: st.permutations(range(n))))
def test_any_arrival_order_gives_the_same_tree(order: list[int]) -> None:
    leaves = [f"{k}," for k in range(len(order))]
    fold: TreeFold[str] = TreeFold(join, len(order))
    for i, k in enumerate(order):
        assert fold.missing() == sorted(order[i:])
        fold.add(k, leaves[k])
    assert fold.missing() == []
    assert fold.result() == recursive(leaves) == tree_fold(leaves, join)


@given(st.integers(1, 300))
def test_canonical_order_holds_one_node_per_level(n: int) -> None:
    fold: TreeFold[int] = TreeFold(int.__add__, n)
    for k in range(n):
        fold.add(k, k)
        assert fold.held <= n.bit_length()
    assert fold.held == 1
    assert fold.result() == n * (n - 1) // 2


def test_combine_that_reuses_its_first_argument() -> None:
    def into(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a += b
        return a

    states = [np.random.default_rng(k).normal(size=3) for k in range(11)]
    expected = tree_fold([s.copy() for s in states], np.add)
    fold: TreeFold[np.ndarray] = TreeFold(into, 11)
    for k in (3, 2, 10, 0, 1, 9, 4, 7, 8, 6, 5):
        fold.add(k, states[k])
    assert fold.result().tobytes() == expected.tobytes()


def test_none_is_a_state() -> None:
    fold: TreeFold[None] = TreeFold(lambda a, b: None, 2)
    fold.add(1, None)
    fold.add(0, None)
    assert fold.result() is None


@pytest.mark.parametrize("n", [0, -1, True, 1.0])
def test_refuses_sizes(n: object) -> None:
    with pytest.raises(InputError, match="n >= 1"):
        TreeFold(join, n)  # type: ignore[arg-type]


def test_refuses_wrong_leaves() -> None:
    fold: TreeFold[str] = TreeFold(join, 3)
    fold.add(2, "c")
    for k, why in ((2, "already"), (3, "outside"), (-1, "outside"), (True, "outside")):
        with pytest.raises(InputError, match=why):
            fold.add(k, "x")
    with pytest.raises(InputError, match=r"2 of 3 states are missing, first \[0, 1\]"):
        fold.result()
    with pytest.raises(InputError, match="at least one state"):
        tree_fold([], join)
