"""Weight formats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError
from dask_sdc.inference.weights import narrow, widen
from dask_sdc.inference.weights.source import check_dtype, is_finite

BFLOAT16_MAX = 3.3895313892515355e38


def nearest_bfloat16(value: float) -> float:
    """Round in exact float64 arithmetic: 8 significant bits, never below 2**-133, ties to even."""
    if value == 0:
        return value
    step = 2.0 ** (max(np.frexp(value)[1], -125) - 8)
    return float(np.rint(value / step) * step)


@given(st.floats(width=32, min_value=-BFLOAT16_MAX, max_value=BFLOAT16_MAX))
def test_bfloat16_is_rounded_to_nearest_even(value: float) -> None:
    found = widen(narrow(np.array([value], np.float32), "bfloat16"), "bfloat16")
    assert found.dtype == np.float32
    assert found.tobytes() == np.array([nearest_bfloat16(value)], np.float32).tobytes()


def test_every_finite_bfloat16_survives() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    finite = bits[(bits & 0x7F80) != 0x7F80].reshape(-1, 2)
    assert np.array_equal(narrow(widen(finite, "bfloat16"), "bfloat16"), finite)
    assert is_finite(finite, "bfloat16")


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0x7F81])
def test_nan_and_infinity_of_bfloat16_are_seen(bits: int) -> None:
    assert not is_finite(np.array([0, bits], np.uint16), "bfloat16")


@pytest.mark.parametrize(("dtype", "value"), [("bfloat16", 3.4e38), ("float16", 65520.0), ("float16", -1e9)])
def test_beyond_the_range_is_infinite(dtype: str, value: float) -> None:
    assert not is_finite(narrow(np.array([value], np.float32), dtype), dtype)


@given(st.floats(width=16, allow_nan=False, allow_infinity=False))
def test_float16_survives(value: float) -> None:
    half = np.array([value], np.float16)
    assert narrow(widen(half, "float16"), "float16").tobytes() == half.tobytes()


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(InputError, match="float32, float16, bfloat16, got 'int8'"):
        check_dtype("int8")
