"""Known-answer kernels: the same everywhere, never the same twice, and right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import scipy.fft
import xxhash
from threadpoolctl import threadpool_limits

from dask_sdc.exceptions import InputError
from dask_sdc.faults import flip_state_bit
from dask_sdc.statistics import known_answers as module
from dask_sdc.statistics.known_answers import (
    KERNELS,
    PORTABLE,
    SIZES,
    Size,
    answer_digest,
    known_answer,
    known_answers,
)

SMALL = Size(order=24, items=1 << 10, words=1 << 10)


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_digests_are_sixteen_bytes_and_all_different() -> None:
    answers = known_answers(3)
    assert list(answers) == list(KERNELS)
    assert {len(digest) for digest in answers.values()} == {16}
    assert len(set(answers.values())) == len(KERNELS)
    assert set(KERNELS) > PORTABLE


def test_repetition_agrees_whatever_the_memory_looks_like() -> None:
    expected = known_answers(11)
    rubbish: list[Any] = []
    for i in range(20):
        # Shifts where later arrays land, in small and in large allocations.
        rubbish.append([bytes(17 + 16 * i), np.empty(1000 + 8 * i), np.empty(1 + i)])
        assert known_answers(11) == expected


@pytest.mark.parametrize("threads", [1, 2])
def test_another_process_agrees(threads: int) -> None:
    code = (
        "import json; from dask_sdc.statistics.known_answers import known_answers as k;"
        "from threadpoolctl import threadpool_limits as limit;"
        f"limit({threads}); print(json.dumps({{n: d.hex() for n, d in k(11).items()}}))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    # The number of threads belongs to the environment that has to be equal.
    with threadpool_limits(threads):
        here = {name: digest.hex() for name, digest in known_answers(11).items()}
    assert json.loads(ran.stdout) == here


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_the_seed_changes_every_kernel(kernel: str) -> None:
    assert len({known_answer(kernel, seed) for seed in range(6)}) == 6
    assert known_answer(kernel, 4) == known_answers(4)[kernel]


def test_portable_kernels_agree_with_recorded_digests() -> None:
    """Recorded once; integers leave no room for another answer on any machine."""
    answers = known_answers(2026)
    assert {name: answers[name].hex() for name in sorted(PORTABLE)} == RECORDED


RECORDED = {
    "address_in_address": "334b2aa5dae83f7446bdae0d39c47243",
    "integer_arithmetic": "feede042989fa66e6d16edfb09d2de55",
    "sorting": "ed0ed8f588f15484ec49313c0cf0e0f0",
    "walking_ones": "0af51ce8edd6cbea23e1547bd5f85cb6",
    "walking_zeros": "f61da3c3aa9779210a8247baeabc247e",
}


def test_all_kernels_take_less_than_their_budget() -> None:
    known_answers(0)
    times = []
    for seed in range(5):
        # Time of this thread, so that a loaded machine does not count.
        start = time.thread_time()
        known_answers(seed)
        times.append(time.thread_time() - start)
    assert min(times) < 0.3


def test_a_wrong_kernel_shows_in_its_own_digest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = known_answers(5)

    def wrong(generator: np.random.Generator, size: Size) -> Any:
        return flip_state_bit(module.sorting(generator, size), 12345)

    monkeypatch.setattr(module, "KERNELS", {**KERNELS, "sorting": wrong})
    assert [name for name, digest in known_answers(5).items() if digest != clean[name]] == ["sorting"]


@pytest.mark.parametrize("kernel", [module.walking_ones, module.walking_zeros, module.address_in_address])
def test_one_wrong_bit_of_memory_shows(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = kernel(rng(), SMALL)
    summary = module._summary
    for bit in range(64):
        calls = iter(range(1000))

        def faulty(words: Any, bit: int = bit, calls: Any = calls) -> Any:
            return summary(flip_state_bit(words, 64 * 99 + bit) if next(calls) == 1 else words)

        monkeypatch.setattr(module, "_summary", faulty)
        assert (kernel(rng(), SMALL) != clean).any()


def test_products_are_right() -> None:
    for kernel, tolerance in ((module.matmul_f64, 1e-14), (module.matmul_f32, 1e-5)):
        a, b = (2 * rng().random(2 * SMALL.order**2) - 1).reshape(2, SMALL.order, SMALL.order)
        expected = np.einsum("ij,jk->ik", a.astype(np.longdouble), b.astype(np.longdouble))
        np.testing.assert_allclose(
            kernel(rng(), SMALL).astype(np.longdouble), expected, rtol=0, atol=tolerance * SMALL.order
        )


def test_reciprocals_are_right() -> None:
    y, product, quotient = module.fused_arithmetic(rng(), SMALL).reshape(3, -1)
    np.testing.assert_allclose(y, quotient, rtol=1e-15)
    np.testing.assert_allclose(product, 1.0, rtol=1e-15)


def test_integers_are_right() -> None:
    """Against Python's own unbounded integers."""
    generator = rng()
    x, y = (generator.integers(0, 1 << 64, SMALL.items // 4, np.uint64).tolist() for _ in range(2))
    mixed, quotient, remainder, counts = module.integer_arithmetic(rng(), SMALL).reshape(4, -1).tolist()
    for i, (a, b) in enumerate(zip(x, (odd | 1 for odd in y), strict=True)):
        m = a
        for _ in range(4):
            m = (m * b + a) % (1 << 64) ^ (m >> 29)
        assert (mixed[i], counts[i]) == (m, m.bit_count())
        assert (quotient[i], remainder[i]) == (a // b, a % (b >> 32 | 1))


def test_the_transform_is_right() -> None:
    n = SMALL.items // 4
    signal = 2 * rng().random(n) - 1
    answer = module.fft(rng(), SMALL)
    spectrum = scipy.fft.fft(signal.astype(np.longdouble))[: n // 2 + 1]
    np.testing.assert_allclose(answer[: n // 2 + 1], spectrum, rtol=0, atol=1e-12)


def test_sorting_is_right() -> None:
    generator = rng()
    words = generator.integers(0, 1 << 64, SMALL.items // 4, np.uint64).tolist()
    floats = (2 * generator.random(SMALL.items // 4) - 1).tolist()
    n = len(words)
    answer = module.sorting(rng(), SMALL)
    assert answer[:n].tolist() == sorted(words)
    assert answer[n : 2 * n].view(np.float64).tolist() == sorted(floats)
    assert answer[2 * n : 3 * n].tolist() == sorted(range(n), key=lambda i: words[i] >> 56)
    assert answer[3 * n :].tolist() == [sorted(words).index(word) for word in words[::7]]


def test_a_digest_covers_dtype_shape_and_value_but_not_byte_order() -> None:
    x = np.arange(6, dtype="<i4")
    digests = {answer_digest(y) for y in (x, x.reshape(2, 3), x.astype("<u4"), x + 1, x[::-1])}
    assert len(digests) == 5
    assert answer_digest(x.astype(">i4")) == answer_digest(x) == answer_digest(np.repeat(x, 2)[::2])
    assert answer_digest(x) == xxhash.xxh3_128_digest(b"<i4(6,)" + x.tobytes())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "seed of at least 0, got -1"),
        ((True,), "integer seed, got True"),
        ((1.0,), "integer seed, got 1.0"),
        ((0, "huge"), "size among"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        known_answers(*arguments)


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(InputError, match="kernel among"):
        known_answer("divination", 0)


@pytest.mark.slow
def test_long_answers_differ_from_short_ones() -> None:
    assert set(SIZES) == {"short", "long"}
    short, long = known_answers(1), known_answers(1, "long")
    assert not set(short.values()) & set(long.values())
