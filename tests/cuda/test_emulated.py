"""The emulation of CUDA finds what would be silent damage on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dask_sdc.statistics.kernels.cuda import source
from dask_sdc.statistics.kernels.cuda.device import FOLDER
from tests.cuda.emulated import COMPILER, LaunchError, Program, variants

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")

SOURCE = """
__global__ void ranks(int* order, int* count) { order[threadIdx.x] = (*count)++; }

template <bool BARRIER>
__global__ void reverse(const double* x, double* y) {
    SDC_SHARED(double, shared);
    shared[threadIdx.x] = x[threadIdx.x];
    if (BARRIER) __syncthreads();
    y[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

__global__ void divergent() { if (threadIdx.x > 3) __syncthreads(); }

__global__ void half_a_warp(int* x) {
    if (threadIdx.x < 16) x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, x[threadIdx.x], 1);
}

__global__ void behind(int n) {
    SDC_SHARED(char, shared);
    shared[n] = 1;
}

__global__ void unwritten(double* y) {
    SDC_SHARED(double, shared);
    y[blockIdx.x] = shared[0];
    shared[0] = 1.0;
}

__global__ void lanes(float* x) {
    for (int apart = 16; apart > 0; apart /= 2) {
        x[threadIdx.x] += __shfl_xor_sync(0xffffffffu, x[threadIdx.x], apart);
    }
}

__global__ void where(int* x) {
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    x[block * blockDim.x * blockDim.y * blockDim.z + thread] += block * 100 + thread;
}
"""

KERNELS = (
    "ranks",
    "reverse<true>",
    "reverse<false>",
    "divergent",
    "half_a_warp",
    "behind",
    "unwritten",
    "lanes",
    "where",
)


@pytest.fixture(scope="module")
def probe() -> Program:
    return Program("probe.cu", SOURCE.replace("blockIdx.x +", "(int)blockIdx.x +"), KERNELS)


def test_every_thread_runs_once(probe: Program) -> None:
    x = np.zeros(2 * 3 * 2 * 4 * 2 * 3, np.int32)
    probe.launch("where", (2, 3, 2), (4, 2, 3), (x,))
    assert x.reshape(12, 24).tolist() == [[100 * b + t for t in range(24)] for b in range(12)]


def test_schedules_differ(probe: Program) -> None:
    orders = []
    for schedule in (0, 1, 2, 3):
        order = np.empty(40, np.int32)
        probe.launch("ranks", (1,), (40,), (order, np.zeros(1, np.int32)), 0, schedule)
        assert sorted(order) == list(range(40))
        orders.append(order.tolist())
    assert orders[0] == list(range(40)) and orders[1] == list(range(40))[::-1]
    assert len({tuple(order) for order in orders}) == 4


def test_a_missing_barrier_shows_in_some_schedule(probe: Program) -> None:
    x = np.arange(64.0)
    for kernel, right in (("reverse<true>", True), ("reverse<false>", False)):
        found = []
        for schedule in (0, 1, 2):
            y = np.empty(64)
            probe.launch(kernel, (1,), (64,), (x, y), 512, schedule)
            found.append(np.array_equal(y, x[::-1]))
        assert all(found) == right


@pytest.mark.parametrize(("kernel", "args"), [("divergent", ()), ("half_a_warp", (np.zeros(32, np.int32),))])
def test_threads_that_miss_a_barrier_are_an_error(probe: Program, kernel: str, args: tuple[Any, ...]) -> None:
    with pytest.raises(LaunchError, match="not all threads come to a barrier or shuffle"):
        probe.launch(kernel, (1,), (32,), args)


def test_a_write_behind_shared_memory_is_an_error(probe: Program) -> None:
    probe.launch("behind", (1,), (1,), (np.int32(99),), 100)
    with pytest.raises(LaunchError, match="a write behind the shared memory"):
        probe.launch("behind", (1,), (1,), (np.int32(100),), 100)


def test_shared_memory_is_nan_in_every_block(probe: Program) -> None:
    y = np.zeros(3)
    probe.launch("unwritten", (3,), (1,), (y,), 8)
    assert np.isnan(y).all()


def test_a_warp_exchanges(probe: Program) -> None:
    x = np.arange(64, dtype=np.float32)
    probe.launch("lanes", (1,), (64,), (x,), 0, 5)
    assert x.tolist() == [496.0] * 32 + [1520.0] * 32


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((np.zeros(4),), "expected 2 arguments, got 1"),
        ((np.zeros(4, np.float32), np.zeros(4)), r"expected an array of 'd' at 0, got ndarray of 'f'"),
        ((np.zeros(4), 3.0), "expected an array of 'd' at 1, got float"),
        ((np.zeros((4, 2))[:, 0], np.zeros(4)), "expected a C-contiguous array at 0"),
    ],
)
def test_wrong_arguments_are_an_error(probe: Program, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        probe.launch("reverse<true>", (1,), (4,), args, 32)


def test_wrong_launches_are_an_error(probe: Program) -> None:
    with pytest.raises(LaunchError, match="expected a scalar 'i' at 0, got int64 of 'l'"):
        probe.launch("behind", (1,), (1,), (np.int64(0),), 100)
    with pytest.raises(LaunchError, match=r"no such launch: 1\.\.1024 threads"):
        probe.launch("divergent", (1,), (2048,), ())
    with pytest.raises(LaunchError, match="nowhere is not among"):
        probe.launch("nowhere", (1,), (1,), ())
    with pytest.raises(LaunchError, match=r"wrong\.cu does not compile for the host"):
        Program("wrong.cu", "__global__ void wrong(int unused) {}", ("wrong",))


def test_atomic_additions_of_floats_do_not_compile() -> None:
    with pytest.raises(LaunchError, match="sums of floats depend on the order"):
        Program("atomic.cu", "__global__ void f(float* x) { atomicAdd(x, 1.0f); }", ("f",))


def test_sources_hold_their_headers_and_keep_their_lines() -> None:
    text = source(FOLDER / "moments.cu")
    assert "#include" not in text and text.count("#ifndef DASK_SDC_BLOCK_CUH") == 1
    plain = (FOLDER / "moments.cu").read_text("utf-8").splitlines()
    line = next(i for i, line in enumerate(plain) if '#include "block.cuh"' in line)
    directive = f'#line {line + 2} "moments.cu"\n'
    assert text.partition(directive)[2].splitlines() == plain[line + 1 :]
    assert len(variants(FOLDER / "moments.cu")) == 22
