"""Whose reading of an input is believed, voice by voice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.cluster.inputs import InputBook, Judgement, Reading

GOOD, BAD = b"good", b"bad"


def read(book: InputBook, domain: str, digest: bytes, **how: Any) -> Reading:
    return judge(book, domain, digest, **how).reading


def judge(book: InputBook, domain: str, digest: bytes, **how: Any) -> Judgement:
    usual = {"role": "primary", "audited": False, "persisted": False, "number": 0}
    return book.judge(0, digest, domain, **{**usual, **how})


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.sampled_from(["primary", "audit"]))))
def test_who_all_read_the_same_are_sound(readings: list[tuple[str, bool, str]]) -> None:
    book = InputBook()
    for number, (domain, persisted, role) in enumerate(readings):
        assert read(book, domain, GOOD, role=role, persisted=persisted, number=number) is Reading.SOUND
    assert book.spoiled is None


@given(st.permutations("abcd"), st.integers(0, 3), st.booleans(), st.sampled_from(["primary", "audit"]))
def test_one_liar_among_four_makes_nobody_else_wrong(
    order: list[str], liar: int, persisted: bool, role: str
) -> None:
    book = InputBook()
    for number in range(4):
        for domain in order:
            digest = BAD if domain == order[liar] else GOOD
            reading = read(book, domain, digest, role=role, persisted=persisted, number=number)
            if reading is Reading.VOID:
                reading = read(book, domain, digest, role=role, persisted=persisted, number=number)
            assert reading is not Reading.WRONG or domain == order[liar]
            assert reading is not Reading.VOID


def test_a_reader_that_contradicts_itself_is_wrong_and_may_have_spoiled_the_earlier_round() -> None:
    book = InputBook()
    assert read(book, "a", BAD, number=1) is Reading.SOUND
    assert read(book, "a", GOOD, number=2) is Reading.WRONG
    assert book.spoiled == 1


def test_a_reader_that_two_others_contradict_is_wrong() -> None:
    book = InputBook()
    read(book, "a", GOOD)
    read(book, "b", GOOD, role="audit")
    assert read(book, "c", BAD, number=1) is Reading.WRONG
    assert book.spoiled is None


def test_the_first_reader_is_exposed_by_two_others() -> None:
    book = InputBook()
    read(book, "a", BAD, number=1)
    assert read(book, "b", GOOD, number=2) is Reading.VOID
    judgement = judge(book, "c", GOOD, number=2)
    assert judgement == (Reading.SOUND, frozenset("a"))
    assert book.spoiled == 1
    assert book.seen[0].keys() == {GOOD}


@pytest.mark.parametrize("role", ["audit", "witness", "rerun", "heal"])
def test_what_is_compared_anyway_is_left_to_the_comparison(role: str) -> None:
    book = InputBook()
    read(book, "a", BAD)
    assert read(book, "b", GOOD, role=role) is Reading.SOUND
    assert read(book, "a", GOOD, role=role) is Reading.SOUND


def test_an_audited_primary_is_left_to_the_comparison_too() -> None:
    book = InputBook()
    read(book, "a", GOOD, role="audit")
    assert read(book, "b", BAD, audited=True) is Reading.SOUND
    assert read(book, "c", BAD, audited=False) is Reading.SOUND  # b and c against a
    assert read(book, "d", b"worse") is Reading.WRONG


def test_a_block_that_changed_in_memory_is_read_again_and_nothing_else_comes_of_it() -> None:
    book = InputBook()
    for number in range(3):
        assert read(book, "a", GOOD, persisted=True, number=number) is Reading.SOUND
    assert read(book, "a", BAD, persisted=True, number=3) is Reading.VOID
    for number in range(3, 6):
        assert read(book, "a", GOOD, persisted=True, number=number) is Reading.SOUND
        assert book.spoiled is None


def test_a_block_that_changed_before_two_read_it_is_void_for_both() -> None:
    book = InputBook()
    read(book, "a", GOOD, persisted=True)
    assert read(book, "a", BAD, persisted=True) is Reading.VOID
    assert read(book, "b", BAD, role="audit", persisted=True) is Reading.VOID


def test_a_fresh_block_that_confirms_the_later_reading_spoils_the_earlier_round() -> None:
    book = InputBook()
    read(book, "a", BAD, persisted=True, number=1)
    assert read(book, "a", GOOD, persisted=True, number=2) is Reading.VOID
    assert read(book, "a", GOOD, persisted=True, number=2) is Reading.SOUND
    assert book.spoiled == 1


def test_a_domain_that_alone_sees_two_persisted_blocks_differ_is_exposed() -> None:
    book = InputBook()
    exposed = []
    for shard_id in (0, 0, 1):
        book.seen.pop(shard_id, None)
        how = {"audited": True, "persisted": True, "number": 0}
        assert book.judge(shard_id, GOOD, "a", role="primary", **how).reading is Reading.SOUND
        assert book.judge(shard_id, BAD, "b", role="audit", **how) == Judgement(Reading.VOID)
        exposed.append(book.judge(shard_id, GOOD, "c", role="audit", **how))
    nobody = Judgement(Reading.SOUND)
    assert exposed == [nobody, nobody, Judgement(Reading.SOUND, frozenset("b"))]
