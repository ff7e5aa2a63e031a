"""The ledger: chain, torn tails, one writer, many readers."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dask_sdc.evidence.ledger import GENESIS, Ledger, LedgerCheck, LedgerEntry, read, verify
from dask_sdc.exceptions import LedgerError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def write(path: Path, n: int = 4) -> list[str]:
    with Ledger(path) as ledger:
        return [ledger.append("round", {"audited": k, "rate": 0.1}) for k in range(n)]


def test_chain_is_the_one_of_the_docstring(path: Path) -> None:
    hashes = write(path)
    previous = GENESIS
    for k, line in enumerate(path.read_text("ascii").splitlines()):
        fields = json.loads(line)
        body = f'{{"kind":"round","record":{{"audited":{k},"rate":0.1}},"sequence":{k}}}'
        expected = hashlib.sha256(f"{previous}\n{body}".encode()).hexdigest()
        assert (fields["previous"], fields["hash"], hashes[k]) == (previous, expected, expected)
        previous = expected
    assert verify(path) == LedgerCheck(True, 4, last_hash=previous)
    assert [entry.record["audited"] for entry in read(path)] == [0, 1, 2, 3]


def test_a_new_writer_goes_on(path: Path) -> None:
    first = write(path, 2)
    with Ledger(path) as ledger:
        assert (ledger.sequence, ledger.last_hash) == (2, first[-1])
        last = ledger.append("receipt", {"shard_id": 3})
    assert verify(path) == LedgerCheck(True, 3, last_hash=last)


def test_an_empty_ledger_is_whole(path: Path) -> None:
    Ledger(path).close()
    assert verify(path) == LedgerCheck(True, 0)
    assert list(read(path)) == []


def test_every_flipped_bit_breaks_the_chain_at_its_line(path: Path) -> None:
    write(path, 2)
    raw = path.read_bytes()
    starts = [0, *(k + 1 for k, byte in enumerate(raw) if byte == 0x0A)]
    file = path.open("r+b", buffering=0)
    for bit in range(8 * len(raw)):
        put(file, bit // 8, raw[bit // 8] ^ 1 << bit % 8)
        check = verify(path)
        put(file, bit // 8, raw[bit // 8])
        line = sum(start <= bit // 8 for start in starts[:2])
        if bit // 8 == len(raw) - 1:
            assert check.unfinished and check.records == 1  # no newline: the line is not finished
        else:
            assert (check.ok, check.first_bad_line, check.records) == (False, line, line - 1), bit
    file.close()


def put(file: Any, offset: int, byte: int) -> None:
    file.seek(offset)
    file.write(bytes([byte]))


@pytest.mark.parametrize(
    ("edit", "bad", "reason"),
    [
        (lambda lines: [lines[0], *lines[2:]], 2, "sequence 1, got 2"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], 1, "sequence 0, got 1"),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], 3, "sequence 2, got 1"),
        (lambda lines: [lines[0].replace(b'"rate":0.1', b'"rate":0.2'), *lines[1:]], 1, "expected hash"),
        (lambda lines: [lines[0].replace(b'"rate":0.1', b'"rate": 0.1'), *lines[1:]], 1, "another spelling"),
        (
            lambda lines: [lines[0].replace(b'"sequence":0', b'"sequence":0.0'), *lines[1:]],
            1,
            "sequence 0, got 0.0",
        ),
        (lambda lines: [b"\n", *lines], 1, "Expecting value"),
        (lambda lines: [b"[" * 100_000 + b"\n", *lines], 1, "nesting"),
        (lambda lines: [b"[1]\n", *lines], 1, "an object with"),
        (
            lambda lines: [lines[0].replace(b'"kind":"round"', b'"kind":1'), *lines[1:]],
            1,
            "a text and an object",
        ),
        (lambda lines: [lines[0].replace(b'"rate":0.1', b'"rate":NaN'), *lines[1:]], 1, "JSON compliant"),
    ],
)
def test_edits_are_named_by_line_and_reason(path: Path, edit: Any, bad: int, reason: str) -> None:
    write(path)
    path.write_bytes(b"".join(edit(path.read_bytes().splitlines(keepends=True))))
    check = verify(path)
    assert (check.ok, check.first_bad_line) == (False, bad) and reason in check.reason
    with pytest.raises(LedgerError, match=f"line {bad}: "):
        Ledger(path)
    entries = read(path)
    assert [next(entries).sequence for _ in range(bad - 1)] == list(range(bad - 1))
    with pytest.raises(LedgerError, match=f"line {bad}: "):
        next(entries)


def test_a_rewritten_line_breaks_the_chain_after_it(path: Path) -> None:
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    other = path.with_name("other.jsonl")
    with Ledger(other) as ledger:
        ledger.append("round", {"audited": 99})
    path.write_bytes(b"".join([other.read_bytes(), *lines[1:]]))
    check = verify(path)
    assert check.first_bad_line == 2 and "expected previous" in check.reason


def test_a_cut_tail_shows_in_count_and_hash(path: Path) -> None:
    hashes = write(path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert verify(path) == LedgerCheck(True, 3, last_hash=hashes[2])


def test_a_torn_line_is_cut_off_and_recorded(path: Path) -> None:
    hashes = write(path, 3)
    whole = path.read_bytes()
    torn = whole.splitlines(keepends=True)[2][:-1]
    path.write_bytes(whole[: -len(torn) - 1] + torn)
    assert verify(path) == LedgerCheck(True, 2, last_hash=hashes[1], unfinished=True)
    assert len(list(read(path))) == 2
    with Ledger(path) as ledger:
        ledger.append("round", {"audited": 2})
    entries = list(read(path))
    assert [entry.kind for entry in entries] == ["round", "round", "torn", "round"]
    assert entries[2].record == {"bytes": len(torn), "sha256": hashlib.sha256(torn).hexdigest()}
    assert verify(path).ok


def test_a_writer_that_is_killed_leaves_a_ledger_that_goes_on(path: Path) -> None:
    script = (
        "import os, sys\n"
        "from dask_sdc.evidence.ledger import Ledger\n"
        "ledger = Ledger(sys.argv[1])\n"
        "ledger.append('round', {'k': 0})\n"
        "ledger._file.write(b'{\"hash\":')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert done.returncode == -9
    assert write(path, 1)
    assert [entry.kind for entry in read(path)] == ["round", "torn", "round"]


def test_there_is_one_writer(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.append("round", {})
        with pytest.raises(LedgerError, match="only writer"):
            Ledger(path)
        attempt = "import sys; from dask_sdc.evidence.ledger import Ledger; Ledger(sys.argv[1])"
        done = subprocess.run([sys.executable, "-c", attempt, str(path)], capture_output=True, text=True)
        assert done.returncode == 1 and "only writer" in done.stderr
    Ledger(path).close()


def test_readers_see_finished_lines_while_it_is_written(path: Path) -> None:
    with Ledger(path) as ledger:
        for k in range(3):
            ledger.append("round", {"k": k})
            assert [entry.record["k"] for entry in read(path)] == list(range(k + 1))
        ledger._file.write(b'{"half')
        assert len(list(read(path))) == 3
        assert verify(path) == LedgerCheck(True, 3, last_hash=ledger.last_hash, unfinished=True)


def test_each_record_is_synced_before_append_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    with Ledger(path) as ledger:
        folder = len(synced)
        assert folder == 1  # the entry of the new file
        ledger.append("round", {})
        ledger.append("round", {})
    assert synced[-1] == path.stat().st_size and len(synced) == 3


def test_a_full_disk_leaves_no_half_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger(path) as ledger:
        ledger.append("round", {"k": 0})

        def fail(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(LedgerError, match=r"record 1 could not be written: .*No space"):
                ledger.append("round", {"k": 1})
        ledger.append("round", {"k": 2})
    assert [entry.record["k"] for entry in read(path)] == [0, 2]
    assert verify(path).ok


def test_threads_of_one_writer_do_not_mix_lines(path: Path) -> None:
    with Ledger(path) as ledger:
        threads = [
            threading.Thread(target=lambda k=k: [ledger.append("round", {"k": k}) for _ in range(10)])
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert verify(path).records == 40


@pytest.mark.parametrize(
    "record", [{"x": float("nan")}, {"x": float("inf")}, {"x": object()}, {"x": b""}, {1: 0, "a": 1}, [1]]
)
def test_records_that_are_not_json_are_refused_and_leave_no_trace(path: Path, record: Any) -> None:
    with Ledger(path) as ledger:
        with pytest.raises(LedgerError, match="expected a"):
            ledger.append("round", record)
        with pytest.raises(LedgerError, match="expected a"):
            ledger.append(3, {})  # type: ignore[arg-type]
    assert path.stat().st_size == 0


def test_integer_keys_become_text_and_still_verify(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.append("round", {"counts": {2: "a", 10: "b"}})
    assert verify(path).ok
    assert next(read(path)).record == {"counts": {"2": "a", "10": "b"}}


def test_a_closed_ledger_refuses(path: Path) -> None:
    ledger = Ledger(path)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="open ledger, got a closed one"):
        ledger.append("round", {})


def test_a_missing_folder_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Ledger(tmp_path / "missing" / "ledger.jsonl")


def test_records_round_trip(path: Path) -> None:
    write(path, 1)
    entry, check = next(read(path)), verify(path)
    for thing in (entry, check):
        assert pickle.loads(pickle.dumps(thing)) == thing
    assert LedgerCheck(**json.loads(json.dumps(check.to_dict()))) == check
    assert isinstance(entry, LedgerEntry)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    for path in (Path("/dev/full"), tmp_path):
        with pytest.raises(LedgerError, match="expected a regular file"):
            Ledger(path)
