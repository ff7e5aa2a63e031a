"""Folds of fixed shape: the answer never depends on which state arrived first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from dask_sdc.exceptions import InputError

T = TypeVar("T")


class TreeFold(Generic[T]):
    """Incremental fold of ``n`` states through a binary tree of fixed shape.

    Leaf ``k`` is node ``(0, k)``; node ``(l + 1, i)`` is ``combine(node(l, 2i), node(l, 2i + 1))``,
    and the last node of an odd level moves up as it is. Two siblings are combined as soon as both
    are there, so that only unpaired nodes are held: at most one per level while states arrive in
    canonical order, never more than the number of states that were added.

    Parameters
    ----------
    combine : callable
        ``combine(a, b)`` with ``a`` the state of the lower shards. It may reuse the memory of
        ``a`` and return it; states that were added are therefore consumed, and a caller who needs
        one later adds a copy.
    n : int
        Number of leaves, at least 1.

    Raises
    ------
    InputError
        If ``n`` is not an int of at least 1.
    """

    def __init__(self, combine: Callable[[T, T], T], n: int) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InputError(f"a fold needs an int n >= 1, got {n!r}")
        self.n = n
        self._combine = combine
        self._nodes: dict[tuple[int, int], tuple[T]] = {}  # boxed: None is a state too
        self._seen = bytearray(n)
        self._left = n

    def add(self, k: int, state: T) -> None:
        """Add the state of leaf ``k``, in any order.

        Raises
        ------
        InputError
            If ``k`` is outside 0..n-1 or was added before.
        """
        if isinstance(k, bool) or not 0 <= k < self.n:
            raise InputError(f"leaf {k!r} is outside 0..{self.n - 1}")
        if self._seen[k]:
            raise InputError(f"leaf {k} was already added")
        self._seen[k] = 1
        self._left -= 1
        level, width = 0, self.n
        while width > 1:
            if k ^ 1 < width:
                sibling = self._nodes.pop((level, k ^ 1), None)
                if sibling is None:
                    break
                state = self._combine(state, sibling[0]) if k % 2 == 0 else self._combine(sibling[0], state)
            level, k, width = level + 1, k // 2, (width + 1) // 2
        self._nodes[level, k] = (state,)

    def missing(self) -> list[int]:
        """Return the leaves that were not added yet, ascending."""
        return [k for k, seen in enumerate(self._seen) if not seen]

    @property
    def held(self) -> int:
        """Number of states held now."""
        return len(self._nodes)

    def result(self) -> T:
        """Return the fold of all leaves.

        Raises
        ------
        InputError
            If leaves are missing; the message names the first of them.
        """
        if self._left:
            missing = self.missing()
            raise InputError(f"{self._left} of {self.n} states are missing, first {missing[:5]}")
        ((state,),) = self._nodes.values()
        return state


def tree_fold(states: Iterable[T], combine: Callable[[T, T], T]) -> T:
    """Fold states, given in canonical order, through the tree of `TreeFold`.

    Parameters
    ----------
    states : iterable
        At least one state; consumed, as ``combine`` may reuse the memory of its first argument.
    combine : callable
        ``combine(a, b)`` with ``a`` the state of the lower shards.

    Raises
    ------
    InputError
        If there is no state.
    """
    level = list(states)
    if not level:
        raise InputError("a fold needs at least one state, got none")
    while len(level) > 1:
        pairs = [combine(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    return level[0]
