"""Receipts of runs, signatures, and who a node is."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError, InputTypeError, StageError
from dask_sdc.inference.heal import RecoveryReport
from dask_sdc.inference.identity import Answer, Challenge, Challenger, NodeKey, answer, verify_signature
from dask_sdc.inference.journal import ChunkRecord
from dask_sdc.inference.receipts import RunReceipt, boundary_chain, differences, ids_digest, verify

pytest.importorskip("cryptography")

KEY, OTHER = NodeKey(b"k" * 32), NodeKey(b"o" * 32)
RECORDS = [ChunkRecord(k, 2 * k, 2, 2, bytes([k]) * 16) for k in range(4)]


def receipt(**change: Any) -> RunReceipt:
    fields: dict[str, Any] = {
        "model_digest": "ab",
        "settings": {"seed": 1, "temperature": 0.5},
        "boundaries": [RECORDS, RECORDS[:2]],
        "blocks": ["x", "y"],
        "recoveries": [RecoveryReport(3, 1, placed={1: "w3"})],
    }
    return RunReceipt.of_run("a", [1, 2], [3, 4, 5], **(fields | change))


def test_json_round_trip() -> None:
    signed = receipt().signed(KEY)
    back = RunReceipt.from_dict(json.loads(json.dumps(signed.to_dict())))
    assert back == signed
    assert back.digest == signed.digest
    assert verify(back, [1, 2], [3, 4, 5], model_digest="ab", boundaries=[RECORDS, RECORDS[:2]]) == []
    assert verify(back, [1, 2], [3, 4, 5], signer=KEY.public) == []
    with pytest.raises(InputError, match=r"got \['chains'\] off"):
        RunReceipt.from_dict({name: value for name, value in back.to_dict().items() if name != "chains"})


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (lambda r: verify(r, [1, 2], [3, 4, 6]), ["ids"]),
        (lambda r: verify(r, [1, 2, 3], [4, 5]), ["ids", "number of prompt ids", "number of generated ids"]),
        (lambda r: verify(r, [1, 2], [3, 4, 5], model_digest="cd"), ["model"]),
        (lambda r: verify(r, [1, 2], [3, 4, 5], boundaries=[RECORDS, RECORDS]), ["chain of stage 1"]),
        (lambda r: verify(r, [1, 2], [3, 4, 5], boundaries=[RECORDS]), ["number of stages"]),
        (lambda r: verify(r, [1, 2], [3, 4, 5], signer=OTHER.public), ["signer"]),
        (lambda r: verify(replace(r, n_prompt=2, session="b"), [1, 2], [3, 4, 5]), ["signature"]),
        (lambda r: verify(replace(r, signature="00" * 64), [1, 2], [3, 4, 5]), ["signature"]),
        (lambda r: verify(replace(r, signature="zz"), [1, 2], [3, 4, 5]), ["signature"]),
        (lambda r: verify(replace(r, signature=""), [1, 2], [3, 4, 5]), ["signature"]),
        (lambda r: verify(replace(r, signer=OTHER.public.hex()), [1, 2], [3, 4, 5]), ["signature"]),
    ],
)
def test_what_does_not_fit_is_named(call: Callable[[RunReceipt], list[str]], wrong: list[str]) -> None:
    found = call(receipt().signed(KEY))
    assert [line.partition(":")[0] for line in found] == wrong
    assert all("expected" in line and "got" in line for line in found)


def test_a_wanted_signature_that_is_not_there() -> None:
    assert verify(receipt(), [1, 2], [3, 4, 5]) == []
    assert verify(receipt(), [1, 2], [3, 4, 5], signer=KEY.public) == ["signature: expected one, got none"]


@given(st.integers(0, 3), st.sampled_from(["position", "width", "kept", "digest"]))
def test_chains_see_every_chunk(at: int, name: str) -> None:
    changed = list(RECORDS)
    value = b"z" * 16 if name == "digest" else getattr(RECORDS[at], name) + (-1 if name == "kept" else 1)
    changed[at] = replace(RECORDS[at], **{name: value})
    chains = [RECORDS, changed, RECORDS[::-1], RECORDS[:at], RECORDS[1:], [*RECORDS, RECORDS[at]]]
    distinct = {boundary_chain(records) for records in chains}
    assert len(distinct) == len({tuple(records) for records in chains})


def test_ids_are_bound_with_their_border() -> None:
    assert ids_digest([1], [2, 3]) != ids_digest([1, 2], [3]) != ids_digest([1, 2, 3], [])
    with pytest.raises(InputTypeError):
        ids_digest(["a"], [])


def test_plain_and_speculative_runs_match() -> None:
    assert differences(receipt(), receipt(boundaries=[RECORDS[:1]], recoveries=[])) == []
    (line,) = differences(receipt(), receipt(settings={"seed": 2}))
    assert line == "settings: {'seed': 1, 'temperature': 0.5} against {'seed': 2}"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def challenger() -> Challenger:
    return Challenger({"node": KEY.public, "other": OTHER.public}, 10.0, Clock())


def test_a_node_proves_who_it_is_once(challenger: Challenger) -> None:
    given_answer = answer(challenger.ask("node"), "node", KEY)
    assert challenger.check(given_answer) == "node"
    with pytest.raises(StageError, match="node node: expected the answer to an open challenge"):
        challenger.check(given_answer)


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        # another node's key, under the name of the first
        (lambda c: answer(c, "node", OTHER), "expected key"),
        (
            lambda c: Answer(c, KEY.public, OTHER.sign(c.message(KEY.public))),
            "expected a signature by its key",
        ),
        (lambda c: Answer(c, KEY.public, b"short"), "expected a signature by its key"),
        # a tampered nonce, freshly signed
        (lambda c: answer(Challenge("node", c.nonce[:-1] + b"!"), "node", KEY), "another nonce"),
        # the nonce of one node in the name of another
        (lambda c: answer(Challenge("other", c.nonce), "other", OTHER), "another nonce"),
        # a signature of another challenge
        (
            lambda c: Answer(c, KEY.public, KEY.sign(Challenge("node", b"x" * 32).message(KEY.public))),
            "signature",
        ),
    ],
)
def test_impersonation_and_tampering_fail(
    challenger: Challenger, forge: Callable[[Challenge], Answer], message: str
) -> None:
    with pytest.raises(StageError, match=message):
        challenger.check(forge(challenger.ask("node")))


def test_late_answers_and_strangers_fail() -> None:
    clock = Clock()
    challenger = Challenger({"node": KEY.public}, 10.0, clock)
    late = answer(challenger.ask("node"), "node", KEY)
    clock.now = 10.5
    with pytest.raises(StageError, match="expected the answer to an open challenge"):
        challenger.check(late)
    challenger.ask("node")
    clock.now = 30.0
    challenger.ask("node")
    assert len(challenger._open) == 1
    with pytest.raises(InputError, match="expected a node whose key is known, got stranger"):
        challenger.ask("stranger")
    with pytest.raises(InputError, match="expected one for node node, got one for other"):
        answer(Challenge("other", b"n" * 32), "node", KEY)


def test_keys() -> None:
    key = NodeKey.generate()
    assert len(key.public) == 32 and key.public != NodeKey.generate().public
    assert verify_signature(key.public, b"m", key.sign(b"m"))
    assert not verify_signature(b"short", b"m", key.sign(b"m"))
    assert repr(key) == f"NodeKey(public={key.public.hex()})"
    with pytest.raises(TypeError, match="does not travel"):
        pickle.dumps(key)
    for seed in (b"", b"x" * 31, "x" * 32):
        with pytest.raises(InputError, match="expected 32 bytes"):
            NodeKey(seed)  # type: ignore[arg-type]


def test_without_the_library_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.asymmetric", None)
    with pytest.raises(InputError, match="expected the library `cryptography`"):
        NodeKey(b"k" * 32)
