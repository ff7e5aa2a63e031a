"""What a proof lets pass: only a replay that gives everything that is on record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from dask_sdc.exceptions import ReplayMismatch
from dask_sdc.inference.journal import ChunkRecord, boundary_sketch
from dask_sdc.inference.proof import Proof
from dask_sdc.inference.session import SessionState


def sketch(first: int, rows: int) -> bytes:
    values = np.random.default_rng(5).normal(size=(1, 40, 7))
    return boundary_sketch(values[:, first : first + rows])


# A prompt of four, then one token, then two of three drafted ones: 5, 6, 7, 8 were committed.
OUTPUTS = (
    ChunkRecord(0, 0, 4, 4, b"a", (5,), sketch(3, 1)),
    ChunkRecord(1, 4, 1, 1, b"b", (6,), sketch(4, 1)),
    ChunkRecord(4, 5, 4, 2, b"c", (7, 8, 0, 1), sketch(5, 4)),
)
SESSION = SessionState("s", (1, 2, 3, 4), (5, 6, 7, 8), OUTPUTS, {2: OUTPUTS})


def prove(
    outputs: Sequence[ChunkRecord], *, tail: bool = True, exact: bool = True, recorded: bool = True
) -> Proof:
    evidence = {"the coordinator": OUTPUTS} if recorded else {}
    proof = Proof(2, SESSION, evidence, tail=tail, exact=exact)
    for output in outputs:
        proof.check(output)
    proof.finish()
    return proof


def test_a_true_replay_passes() -> None:
    for exact in (True, False):
        proof = prove(OUTPUTS, exact=exact)
        assert (proof.chunks, proof.positions, proof.tokens, proof.error) == (3, 7, 4, 0.0)
    assert prove(OUTPUTS, tail=False).tokens == 0


def test_joined_chunks_pass_by_sketch() -> None:
    joined = ChunkRecord(4, 0, 7, 7, b"?", (5, 6, 7, 8), sketch(3, 4))
    assert prove([joined], exact=False).tokens == 4


CHANGES: list[tuple[Callable[[list[ChunkRecord]], list[ChunkRecord]], str, int]] = [
    (lambda r: [r[0], replace(r[1], digest=b"x"), r[2]], "digest", 4),
    (lambda r: [r[0], r[1], replace(r[2], tokens=(7, 8, 0, 2))], "token", 5),
    (lambda r: r[:2], "chunk", 5),
    (lambda r: [r[0], r[2]], "chunk", 4),
    (lambda r: [*r, ChunkRecord(5, 7, 1, 1, b"d")], "chunk", 7),
    (lambda r: [r[0], r[1], replace(r[2], kept=3)], "chunk", 5),
    (lambda r: [replace(r[0], index=9), *r[1:]], "chunk", 0),
    (lambda r: [], "chunk", 0),
]


@pytest.mark.parametrize(("change", "what", "position"), CHANGES)
def test_an_exact_replay_that_differs_is_refused(
    change: Callable[[list[ChunkRecord]], list[ChunkRecord]], what: str, position: int
) -> None:
    with pytest.raises(ReplayMismatch, match=rf"^stage 2, session s, position {position}: expected") as info:
        prove(change(list(OUTPUTS)))
    assert (info.value.what, info.value.position, info.value.stage) == (what, position, 2)


@pytest.mark.parametrize(
    ("tokens", "position", "message"),
    [
        (((5,), (6,), (7, 9, 0, 1)), 6, "expected the driver token 8, got 9"),
        (((9,), (6,), (7, 8, 0, 1)), 3, "expected the committed token 5, got 9"),
        (((5,), (6,), (0, 1)), 5, "expected 4 committed tokens, got 2"),
        (((), (), ()), 3, "expected 4 committed tokens, got 0"),
    ],
)
def test_every_committed_token_is_wanted(
    tokens: tuple[tuple[int, ...], ...], position: int, message: str
) -> None:
    outputs = [replace(record, tokens=given) for record, given in zip(OUTPUTS, tokens, strict=True)]
    with pytest.raises(ReplayMismatch, match=message) as info:
        prove(outputs, recorded=False)
    assert (info.value.what, info.value.position) == ("token", position)


@pytest.mark.parametrize("at", range(3))
def test_a_sketch_outside_of_the_envelope_or_missing_is_refused(at: int) -> None:
    for raw in (b"", np.full((1, 8), np.nan, "<f8").tobytes(), sketch(20, 1)):
        outputs = list(OUTPUTS)
        outputs[at] = replace(outputs[at], sketch=raw, width=OUTPUTS[at].kept, tokens=OUTPUTS[at].tokens[:2])
        with pytest.raises(ReplayMismatch) as info:
            prove(outputs, exact=False)
        assert info.value.what == "sketch"
        assert info.value.position == (3, 4, 5)[at]


def test_rows_that_were_rejected_do_not_count() -> None:
    values = np.frombuffer(OUTPUTS[2].sketch, "<f8").copy()
    values[16:] = 9.0
    outputs = [*OUTPUTS[:2], replace(OUTPUTS[2], sketch=values.tobytes(), tokens=(7, 8, 22, 22))]
    assert prove(outputs, exact=False).tokens == 4


def test_a_chunk_that_does_not_follow_is_refused_in_a_fast_replay_too() -> None:
    for outputs in (OUTPUTS[1:], [replace(OUTPUTS[0], width=9, kept=9)]):
        with pytest.raises(ReplayMismatch) as info:
            prove(outputs, exact=False)
        assert (info.value.what, info.value.position) == ("chunk", 0)
