"""Frames of sealed statistics: which damage spoils one shard, which the frame, and none goes unseen."""

from __future__ import annotations

import dataclasses
import json
import pickle
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.evidence.codec import Limits, decode, digest, encode
from dask_sdc.evidence.seal import (
    SealedBatch,
    SealedStatistic,
    failed_statistic,
    open_batch,
    seal_batch,
    seal_statistic,
)
from dask_sdc.exceptions import DecodeError, EncodeError, InputError, LimitExceeded

PREFIX = 28  # magic, length of the head, digest of the head

records = st.builds(
    seal_statistic,
    st.integers(0, 2**62),
    st.one_of(st.none(), st.floats(), st.lists(st.integers(), max_size=3)),
    rows=st.integers(0, 2**40),
    status=st.sampled_from(["ok", "violation"]),
    input_digest=st.sampled_from([b"", b"0123456789abcdef"]),
    elapsed=st.floats(0, 1e6),
    notes=st.lists(st.text(max_size=5), max_size=2),
)
batches = st.builds(
    SealedBatch,
    round=st.integers(-1, 10**6),
    role=st.sampled_from(["primary", "audit", "witness", "rerun", "heal"]),
    attempt=st.integers(0, 9),
    domain=st.text(max_size=5),
    worker=st.text(max_size=5),
    fingerprint=st.text(max_size=5),
    model_digest=st.binary(min_size=16, max_size=16),
    status=st.sampled_from(["ok", "garbled", "misplaced"]),
    records=st.lists(records, max_size=4).map(tuple),
)


def batch(*sealed: SealedStatistic, **fields: Any) -> SealedBatch:
    defaults: dict[str, Any] = {
        "round": 3,
        "role": "primary",
        "attempt": 0,
        "domain": "host-1",
        "worker": "tcp://10.0.0.1:4000",
        "fingerprint": "abcd",
        "model_digest": bytes(16),
    }
    return SealedBatch(**(defaults | fields), records=sealed)


def sample() -> SealedBatch:
    return batch(
        seal_statistic(4, {"n": 2, "sum": np.arange(3.0)}, rows=2, elapsed=0.5, input_digest=b"x" * 16),
        seal_statistic(5, [1], rows=1, status="violation", notes=["n < 0"]),
        failed_statistic(6, ["ValueError", "no such chunk"]),
    )


@given(batches)
def test_frame_round_trip(sealed: SealedBatch) -> None:
    opened = open_batch(seal_batch(sealed))
    assert opened == sealed
    assert all(record.intact for record in opened.records)


@given(batches)
def test_json_and_pickle_round_trip(sealed: SealedBatch) -> None:
    assert SealedBatch.from_dict(json.loads(json.dumps(sealed.to_dict()))) == sealed
    assert pickle.loads(pickle.dumps(sealed)) == sealed


def test_payload_is_the_canonical_encoding() -> None:
    record = sample().records[0]
    assert record.payload == encode({"n": 2, "sum": np.arange(3.0)})
    assert record.digest == digest(record.payload)
    with pytest.raises(EncodeError):
        seal_statistic(0, object(), rows=0)


def test_failed_statistic_has_no_payload_and_is_intact() -> None:
    record = failed_statistic(6, ["ValueError", "no such chunk"], elapsed=0.1)
    assert (record.status, record.payload, record.intact) == ("error", b"", True)
    assert record.notes == ("ValueError", "no such chunk")


def test_every_flipped_bit_spoils_its_shard_alone_or_the_frame() -> None:
    sealed = sample()
    frame = seal_batch(sealed)
    payloads = sum(len(record.payload) for record in sealed.records)
    spoiled = 0
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            opened = open_batch(bytes(damaged))
        except DecodeError:
            assert bit // 8 < len(frame) - payloads, "a payload's bit must not spoil the other shards"
            continue
        spoiled += 1
        states = [record.intact for record in opened.records]
        assert states.count(False) == 1
        index = states.index(False)
        others = [record for k, record in enumerate(opened.records) if k != index]
        assert others == [record for k, record in enumerate(sealed.records) if k != index]
        assert (
            dataclasses.replace(opened.records[index], payload=sealed.records[index].payload)
            == (sealed.records[index])
        )
    assert spoiled == 8 * payloads


def test_truncated_and_extended_frames_are_refused() -> None:
    frame = seal_batch(sample())
    for size in range(len(frame)):
        with pytest.raises(DecodeError):
            open_batch(frame[:size])
    with pytest.raises(DecodeError, match=f"expected a frame of {len(frame)} bytes, got {len(frame) + 1}"):
        open_batch(frame + b"\0")


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(DecodeError):
        open_batch(raw)
    with pytest.raises(DecodeError):
        open_batch(struct.pack(">4sQ16s", b"SDC\x01", len(raw), digest(raw)) + raw)


def forged(change: Any) -> bytes:
    """A frame with a head that carries its own digest but that nobody here would write."""
    frame = seal_batch(sample())
    (size,) = struct.unpack_from(">Q", frame, 4)
    columns = list(decode(frame[PREFIX : PREFIX + size]))
    change(columns)
    head = encode(tuple(columns))
    return struct.pack(">4sQ16s", frame[:4], len(head), digest(head)) + head + frame[PREFIX + size :]


def put(index: int, value: Any) -> Any:
    return lambda columns: columns.__setitem__(index, value)


HEADER = (3, "primary", 0, "host-1", "tcp://10.0.0.1:4000", "abcd", bytes(16), "ok")


@pytest.mark.parametrize(
    "change",
    [
        list.pop,
        put(0, None),
        put(0, HEADER[:-1]),
        put(0, (3.0, *HEADER[1:])),
        put(0, (3, "boss", *HEADER[2:])),
        put(0, (*HEADER[:-1], "fine")),
        put(1, np.arange(3.0)),
        put(1, np.arange(2)),
        put(1, 7),
        put(2, ["ok", "ok", "great"]),
        put(2, [[], [], []]),
        put(3, np.zeros((3, 1), "i8")),
        put(4, np.array([-1, 100, 0])),
        put(4, np.array([2**62, 2**62, 2**62])),
        put(5, bytes(47)),
        put(6, ["", "", ""]),
        put(6, 5),
        put(7, [0.0, 0.0, 0.0]),
        put(8, {0: 5}),
        put(8, {0: (5,)}),
        put(8, [("a",)]),
    ],
)
def test_forged_heads_are_refused(change: Any) -> None:
    assert open_batch(forged(lambda columns: None)) == sample()
    with pytest.raises(DecodeError, match="expected"):
        open_batch(forged(change))


def test_limits_hold_for_the_frame() -> None:
    frame = seal_batch(sample())
    with pytest.raises(LimitExceeded, match="at most 100 bytes"):
        open_batch(frame, Limits(max_bytes=100))
    with pytest.raises(LimitExceeded, match="items"):
        open_batch(frame, Limits(max_items=10))


@pytest.mark.parametrize(
    ("fields", "message"), [({"role": "boss"}, "role among .*'boss'"), ({"status": "fine"}, "batch status")]
)
def test_bad_batches_are_refused(fields: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        batch(**fields)


@pytest.mark.parametrize("fields", [{"status": "great"}, {"digest": b"short"}])
def test_bad_records_are_refused(fields: dict[str, Any]) -> None:
    record = dataclasses.replace(seal_statistic(9, 1, rows=1), **fields)
    with pytest.raises(InputError, match="shard 9: expected a status"):
        seal_batch(batch(record))


def test_an_empty_batch_passes() -> None:
    sealed = batch(status="garbled")
    assert open_batch(seal_batch(sealed)) == sealed
