"""Sampling: greedy ties, the nucleus, frequencies, and independence of everything but seed and position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError, NonFiniteError
from dask_sdc.inference.model import sample
from dask_sdc.inference.model.sampling import _nucleus

Array = np.ndarray[Any, Any]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert sample(np.array([0.0, 3.0, 3.0, -np.inf], np.float32), 5) == 1


def test_frequencies_are_those_of_the_softmax() -> None:
    logits = np.array([0.0, 1.0, 2.0, -np.inf], np.float32)
    drawn = np.bincount([sample(logits, p, seed=3, temperature=0.7) for p in range(20_000)], minlength=4)
    p = np.exp(logits.astype(float) / 0.7)
    expected = 20_000 * p / p.sum()
    chi2 = ((drawn[:3] - expected[:3]) ** 2 / expected[:3]).sum()
    assert chi2 < 13.8  # 0.1 % of chi-squared with 2 degrees of freedom
    assert drawn[3] == 0


def naive_nucleus(weights: Array, top_p: float) -> list[int]:
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += weights[i]
        if mass >= top_p * np.cumsum(weights)[-1]:
            break
    return kept


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.floats(0.01, 0.999))
def test_nucleus_is_the_smallest_set_that_reaches_its_mass(exponents: list[int], top_p: float) -> None:
    weights = np.array([2.0**-e for e in exponents])
    assert _nucleus(weights, top_p).tolist() == naive_nucleus(weights, top_p)


def test_only_the_nucleus_is_drawn() -> None:
    logits = np.log(np.array([0.05, 0.5, 0.15, 0.3])).astype(np.float32)
    drawn = {sample(logits, p, temperature=1.0, top_p=0.75) for p in range(2000)}
    assert drawn == {1, 3}


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_a_draw_depends_on_seed_and_position_alone(seed: int, position: int) -> None:
    logits = np.random.default_rng(0).normal(size=300).astype(np.float32)
    once = sample(logits, position, seed, 1.3, 0.95)
    sample(logits, position + 1, seed, 1.3)
    np.random.default_rng(1).random()
    assert sample(logits.copy(), position, seed, 1.3, 0.95) == once


def test_positions_and_seeds_draw_differently() -> None:
    logits = np.zeros(1 << 20, np.float32)
    assert len({sample(logits, p, s, 1.0) for p in range(4) for s in range(4)}) == 16


@pytest.mark.parametrize(
    ("logits", "options", "message"),
    [
        (np.zeros(3), {"temperature": -1.0}, "temperature"),
        (np.zeros(3), {"temperature": np.nan}, "temperature"),
        (np.zeros(3), {"top_p": 0.0}, "top_p"),
        (np.zeros(3), {"top_p": 1.1}, "top_p"),
        (np.zeros((1, 3)), {}, r"expected logits \(V,\)"),
        (np.zeros(0), {}, r"expected logits \(V,\)"),
    ],
)
def test_bad_settings_are_refused(logits: Array, options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sample(logits, 0, **options)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_damaged_logits_draw_nothing(bad: float, temperature: float) -> None:
    with pytest.raises(NonFiniteError, match="position 9"):
        sample(np.array([0.0, bad, 1.0]), 9, temperature=temperature)
