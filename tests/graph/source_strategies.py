"""Strategies for cutting a sample axis."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st


def cuts(n: int) -> st.SearchStrategy[list[int]]:
    """Sizes of blocks, zeros among them, that add up to ``n``."""
    points = st.lists(st.integers(0, n), max_size=6).map(sorted)
    return points.map(lambda p: [int(size) for size in np.diff([0, *p, n])])
