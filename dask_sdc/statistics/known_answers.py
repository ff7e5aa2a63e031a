"""Short deterministic kernels whose answers healthy hardware agrees on.

Each kernel stresses one part of a machine: multipliers and vector units, reductions, the
transcendental functions, integer units, memory cells and lines, comparisons and moves. All
inputs come from the seed alone, so that two machines with equal environments must return equal
digests, whatever the number of threads that the BLAS may use. Another seed tries other operands:
silicon that fails does so for few of them
(P. H. Hochschild et al., "Cores that don't count", HotOS 2021). Kernels run on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from dask_sdc.exceptions import InputError, InputTypeError

Answer: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Size:
    """How much one kernel does.

    Parameters
    ----------
    order : int
        Order of the matrices that are multiplied.
    items : int
        Items of the vectors.
    words : int
        64-bit words of the memory patterns; beyond the last-level cache they reach the DIMMs.
    """

    order: int
    items: int
    words: int


#: Order of the tiles of matrix products: the work of one is what OpenBLAS leaves to one thread.
_TILE = 64

#: "short" takes a few tens of milliseconds for all kernels together, "long" a few seconds.
SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "short": Size(order=256, items=1 << 16, words=1 << 16),
        "long": Size(order=1024, items=1 << 20, words=1 << 22),
    }
)


def matmul_f64(rng: np.random.Generator, size: Size) -> Answer:
    """Product of two square matrices in float64."""
    return _product(_uniform(rng, 2 * size.order**2), size.order)


def matmul_f32(rng: np.random.Generator, size: Size) -> Answer:
    """Product of two square matrices in float32."""
    return _product(_uniform(rng, 2 * size.order**2).astype(np.float32), size.order)


def reductions(rng: np.random.Generator, size: Size) -> Answer:
    """Sums, running sums, products, extremes and moments, along both axes."""
    x = _uniform(rng, size.items).reshape(-1, 64)
    per_axis = [f(x, axis=axis) for axis in (0, 1) for f in (np.sum, np.var, np.min, np.max)]
    return np.concatenate([*per_axis, np.prod(1 + x / 256, axis=0), np.cumsum(x)])


def transcendental_f64(rng: np.random.Generator, size: Size) -> Answer:
    """Exponential, logarithm, trigonometric functions, powers and roots in float64."""
    return _transcendental(_uniform(rng, size.items // 4))


def transcendental_f32(rng: np.random.Generator, size: Size) -> Answer:
    """The same in float32, which other vector code computes."""
    return _transcendental(_uniform(rng, size.items // 4).astype(np.float32))


def fused_arithmetic(rng: np.random.Generator, size: Size) -> Answer:
    """Chains of dependent multiplications, additions and divisions (Newton's reciprocal)."""
    x = 1.5 + 0.5 * _uniform(rng, size.items // 4)
    y = np.full_like(x, 0.5)
    for _ in range(6):
        y = y * (2.0 - x * y)
    return np.concatenate([y, x * y, 1.0 / x])


def integer_arithmetic(rng: np.random.Generator, size: Size) -> Answer:
    """Products modulo 2**64, divisions, remainders, shifts, logic and bit counts."""
    x = _words(rng, size.items // 4)
    y = _words(rng, size.items // 4) | np.uint64(1)
    mixed = x
    for _ in range(4):
        mixed = (mixed * y + x) ^ (mixed >> np.uint64(29))
    counts = np.bitwise_count(mixed).astype(np.uint64)
    return np.concatenate([mixed, x // y, x % (y >> np.uint64(32) | np.uint64(1)), counts])


def walking_ones(rng: np.random.Generator, size: Size) -> Answer:
    """Write one set bit, at each of the 64 positions in drawn order, all over a buffer; read."""
    return _walk(rng, size, np.uint64(0))


def walking_zeros(rng: np.random.Generator, size: Size) -> Answer:
    """Write one clear bit, at each of the 64 positions in drawn order, all over a buffer; read."""
    return _walk(rng, size, ~np.uint64(0))


def address_in_address(rng: np.random.Generator, size: Size) -> Answer:
    """Write its own index into every word, then the complement; read back in drawn order.

    Shows address lines that are stuck or coupled, which patterns that are alike all over a
    buffer cannot (A. J. van de Goor, "Testing Semiconductor Memories", 1991).
    """
    index = np.arange(size.words, dtype=np.uint64)
    key = _words(rng, 1)
    order = rng.permutation(size.words)
    buffer = np.empty_like(index)
    read = []
    for flip in (np.uint64(0), ~np.uint64(0)):
        np.bitwise_xor(index, key ^ flip, out=buffer)
        read.append(_summary(buffer[order] * (index | np.uint64(1))))
    return np.stack(read)


def sorting(rng: np.random.Generator, size: Size) -> Answer:
    """Sort integers and floats, stable order of many equal keys, and search."""
    words = _words(rng, size.items // 4)
    sorted_words = np.sort(words)
    floats = np.sort(_uniform(rng, size.items // 4)).view(np.uint64)
    stable = np.argsort(words >> np.uint64(56), kind="stable").astype(np.uint64)
    found = np.searchsorted(sorted_words, words[::7]).astype(np.uint64)
    return np.concatenate([sorted_words, floats, stable, found])


def fft(rng: np.random.Generator, size: Size) -> Answer:
    """Forward transform of a real signal, and back."""
    spectrum = np.fft.rfft(_uniform(rng, size.items // 4))
    return np.concatenate([spectrum, np.fft.ifft(spectrum)])


Kernel: TypeAlias = Callable[[np.random.Generator, Size], Answer]

#: Every kernel by name, in the order in which they run.
KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        kernel.__name__: kernel
        for kernel in (
            matmul_f64,
            matmul_f32,
            reductions,
            transcendental_f64,
            transcendental_f32,
            fused_arithmetic,
            integer_arithmetic,
            walking_ones,
            walking_zeros,
            address_in_address,
            sorting,
            fft,
        )
    }
)

#: Kernels of integers and moves alone: their digests are equal on healthy hardware even where
#: environment fingerprints differ.
PORTABLE = frozenset({"integer_arithmetic", "walking_ones", "walking_zeros", "address_in_address", "sorting"})


def known_answer(kernel: str, seed: int, size: str = "short") -> bytes:
    """Run one kernel and return the digest of its answer.

    Parameters
    ----------
    kernel : str
        One of `KERNELS`.
    seed : int
        Non-negative; draws the operands.
    size : {"short", "long"}
        How much to do, see `SIZES`.

    Returns
    -------
    bytes
        xxh3_128 of dtype, shape and little-endian values, 16 bytes.

    Raises
    ------
    InputError
        If there is no such kernel or size, or the seed is negative or no integer.
    """
    if kernel not in KERNELS:
        raise InputError(f"expected a kernel among {list(KERNELS)}, got {kernel!r}")
    if size not in SIZES:
        raise InputError(f"expected a size among {list(SIZES)}, got {size!r}")
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool):
        raise InputTypeError(f"expected an integer seed, got {seed!r}")
    if seed < 0:
        raise InputError(f"expected a seed of at least 0, got {seed!r}")
    # Keyed by name, so that a new kernel leaves the operands of the others alone.
    rng = np.random.default_rng([seed, xxhash.xxh3_64_intdigest(kernel.encode())])
    return answer_digest(KERNELS[kernel](rng, SIZES[size]))


def known_answers(seed: int, size: str = "short") -> dict[str, bytes]:
    """Run every kernel and return the digests of the answers.

    Parameters
    ----------
    seed : int
        Non-negative; draws the operands. Screening again with another seed explores more.
    size : {"short", "long"}
        How much to do: "short" takes less than 0.3 s in all, "long" a few seconds.

    Returns
    -------
    dict of str to bytes
        Digest of 16 bytes for every name in `KERNELS`. Equal on machines whose environment
        fingerprints are equal, and those of `PORTABLE` on all.

    Raises
    ------
    InputError
        If there is no such size, or the seed is negative or no integer.
    """
    return {kernel: known_answer(kernel, seed, size) for kernel in KERNELS}


def answer_digest(answer: Answer) -> bytes:
    """Return the xxh3_128 digest of an answer: dtype, shape and little-endian values."""
    canonical = np.ascontiguousarray(answer, answer.dtype.newbyteorder("<"))
    hasher = xxhash.xxh3_128(f"{canonical.dtype.str}{answer.shape}".encode())
    hasher.update(canonical.tobytes())
    return bytes(hasher.digest())


def _uniform(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    """Return n numbers in [-1, 1); exact on any machine, unlike normal deviates."""
    return 2.0 * rng.random(n) - 1.0


def _words(rng: np.random.Generator, n: int) -> NDArray[np.uint64]:
    return rng.integers(0, 1 << 64, n, np.uint64)


def _product(x: Answer, order: int) -> Answer:
    """Multiply two square matrices in tiles, which are too small for the BLAS to use several threads.

    How it splits larger products between threads may change from call to call.
    """
    tile = min(_TILE, order)
    a, b = x.reshape(2, order // tile, tile, order // tile, tile).swapaxes(2, 3)
    product = sum(a[:, k, None] @ b[None, k] for k in range(order // tile))
    return np.asarray(product).swapaxes(1, 2).reshape(order, order)


def _transcendental(x: Answer) -> Answer:
    positive = np.abs(x) + x.dtype.type(0.5)
    return np.stack(
        [
            np.exp(8 * x),
            np.log(positive),
            np.log1p(positive),
            np.sin(32 * x),
            np.cos(32 * x),
            np.tanh(4 * x),
            np.arctan2(x, positive),
            np.power(positive, x),
            np.sqrt(positive),
            np.cbrt(x),
        ]
    )


def _walk(rng: np.random.Generator, size: Size, background: np.uint64) -> Answer:
    """Fill, read back and summarise a buffer for each position of the walking bit."""
    buffer = np.empty(size.words, np.uint64)
    answer = []
    # The order matters: what a cell held before decides whether it takes the next value.
    for position in rng.permutation(64).tolist():
        buffer.fill(background ^ np.uint64(1 << position))
        answer.append(_summary(buffer))
    return np.stack(answer)


def _summary(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return what every single wrong bit changes: exclusive or, sum, least and greatest."""
    return np.array([np.bitwise_xor.reduce(words), words.sum(dtype=np.uint64), words.min(), words.max()])
