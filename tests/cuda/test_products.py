"""Products of few rows on a device, run on the host, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dask_sdc.inference.model.kernels import widen
from dask_sdc.inference.model.kernels.cuda.products import multiply
from tests.cuda.emulated import COMPILER, HostDevice

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")

Array = np.ndarray[Any, Any]

TYPES = ("float32", "float16", "bfloat16")


def stored(w: Array, kind: str) -> Array:
    """Return weights as they are stored: float16 as int16, bfloat16 as uint16."""
    if kind == "float16":
        return w.astype(np.float16).view(np.int16)
    return (w.view(np.uint32) >> 16).astype(np.uint16) if kind == "bfloat16" else w


def case(rows: int, size: int, outputs: int, kind: str) -> tuple[Array, Array]:
    rng = np.random.default_rng(size)
    w = np.zeros((outputs, -(-size // 16) * 16), np.float32)
    w[:, :size] = rng.normal(size=(outputs, size))
    return rng.normal(size=(rows, size)).astype(np.float32), stored(w, kind)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("rows", "size", "outputs"), [(1, 1, 1), (2, 40, 9), (9, 300, 5), (8, 129, 17)])
def test_products_are_those_of_float64(rows: int, size: int, outputs: int, kind: str) -> None:
    x, w = case(rows, size, outputs, kind)
    rng = np.random.default_rng(1)
    bias, add = (rng.normal(size=s).astype(np.float32) for s in (outputs, (rows, outputs)))
    wide = x.astype(np.float64), widen(w)[:, :size].astype(np.float64)
    size_of_sum = np.abs(wide[0]) @ np.abs(wide[1]).T + 2
    got = [multiply(device, x, w) for device in (HostDevice(), HostDevice(1), HostDevice(7, 1))]
    assert np.max(np.abs(got[0] - wide[0] @ wide[1].T) / size_of_sum) < 1e-6
    assert got[0].tobytes() == got[1].tobytes() == got[2].tobytes()
    more = multiply(HostDevice(), x, w, bias, add)
    assert more.tobytes() == (got[0] + bias + add).tobytes()


@pytest.mark.parametrize("size", [37, 64])
def test_a_row_has_the_same_bits_whatever_comes_with_it(size: int) -> None:
    x, w = case(19, size, 6, "bfloat16")
    together = multiply(HostDevice(), x, w)
    for begin, end in ((0, 1), (1, 2), (2, 10), (10, 19)):
        part = np.ascontiguousarray(x[begin:end])
        assert multiply(HostDevice(), part, w).tobytes() == together[begin:end].tobytes()


def test_every_number_of_two_bytes_is_widened_exactly() -> None:
    """Times one, so that the sum is the weight; infinite ones and NaN among them."""
    for kind in (np.uint16, np.int16):
        w = np.zeros((1 << 11, 16), kind)
        w[:, 0] = np.arange(0, 1 << 16, 32).astype(np.uint16).view(kind)
        w[-1, 0], w[-2, 0] = np.array([0x7C01, 0xFC00], np.uint16).view(kind)
        got = multiply(HostDevice(), np.ones((1, 1), np.float32), w)[0]
        expected = widen(np.ascontiguousarray(w[:, 0]))
        assert np.array_equal(got, expected, equal_nan=True)
        known = ~np.isnan(expected) & (expected != 0)
        assert np.array_equal(np.signbit(got[known]), np.signbit(expected[known]))
