from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.evidence.codec import decode, encode
from dask_sdc.exceptions import InputError
from dask_sdc.policy.screening import screen


def one_kernel(digests: str, fingerprints: str = "") -> tuple[dict[str, dict[str, bytes]], dict[str, str]]:
    """Domains d0, d1, ... with one letter each as the digest of kernel "k"."""
    results = {f"d{i}": {"k": letter.encode()} for i, letter in enumerate(digests)}
    return results, dict(zip(results, fingerprints or "F" * len(digests), strict=True))


@pytest.mark.parametrize(
    ("digests", "fingerprints", "suspects", "reasons"),
    [
        ("xxx", "FFF", (), []),
        ("xxy", "FFF", ("d2",), []),
        ("yxx", "FFF", ("d0",), []),
        ("xxxyz", "FFFFF", ("d3", "d4"), []),
        ("xx", "FF", (), []),
        ("xy", "FF", (), ["deferred:insufficient_witnesses"]),
        ("xyz", "FFF", (), ["deferred:three_way_disagreement"]),
        ("xxyy", "FFFF", (), ["deferred:three_way_disagreement"]),
        ("xxyz", "FFFF", (), ["deferred:three_way_disagreement"]),
        # another environment is another question
        ("xxy", "FFG", (), []),
        ("xyxy", "FGFG", (), []),
        ("xxyyyx", "FFFGGG", ("d2", "d5"), []),
    ],
)
def test_majority(digests: str, fingerprints: str, suspects: tuple[str, ...], reasons: list[str]) -> None:
    found = screen(*one_kernel(digests, fingerprints))
    assert found.suspects == suspects
    assert [one.reason for one in found.unresolved] == reasons


def test_each_kernel_is_judged_on_its_own() -> None:
    results = {
        "a": {"gemm": b"1", "fft": b"2", "sort": b"3"},
        "b": {"gemm": b"1", "fft": b"9", "sort": b"3"},
        "c": {"gemm": b"8", "fft": b"2"},
        "d": {"gemm": b"1", "fft": b"2", "sort": b"7"},
        "e": {"gemm": b"1", "odd": b"0"},
    }
    found = screen(results, dict.fromkeys(results, "F"))
    assert found.outliers == (("b", ("fft",)), ("c", ("gemm",)), ("d", ("sort",)))
    assert found.unchecked == ("e",)  # kernel "odd" was compared with nobody
    assert found.unresolved == ()
    assert decode(encode(found.to_dict())) == json.loads(json.dumps(found.to_dict())) == found.to_dict()


@given(st.lists(st.sampled_from("xyz"), max_size=9), st.data())
def test_against_counting(letters: list[str], data: st.DataObject) -> None:
    environments = data.draw(st.lists(st.sampled_from("FG"), min_size=len(letters), max_size=len(letters)))
    results, fingerprints = one_kernel("".join(letters), "".join(environments))
    expected = []
    for domain in results:
        group = [results[d]["k"] for d in results if fingerprints[d] == fingerprints[domain]]
        value, count = Counter(group).most_common(1)[0]
        strict = count >= 2 and count > len(group) - count and len(group) >= 3
        if strict and results[domain]["k"] != value:
            expected.append(domain)
    found = screen(results, fingerprints)
    assert list(found.suspects) == sorted(expected)
    for one in found.unresolved:
        assert not set(one.domains) & set(found.suspects)


def test_minority_of_faults_is_named_and_nobody_healthy() -> None:
    for n in range(3, 9):
        for faulty in range((n - 1) // 2 + 1):
            digests = "x" * (n - faulty) + "abcdefgh"[:faulty]
            found = screen(*one_kernel(digests))
            assert set(found.suspects) == {f"d{i}" for i in range(n - faulty, n)}


def test_domains_without_an_environment_are_refused() -> None:
    results, _ = one_kernel("xyz")
    with pytest.raises(InputError, match="expected a fingerprint of every domain, got none of d1, d2"):
        screen(results, {"d0": "F"})
    assert screen({}, {}).suspects == ()
