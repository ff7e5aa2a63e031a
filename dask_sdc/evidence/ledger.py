"""The ledger: an append-only, hash-chained file of receipts and audit counts.

One JSON object per line::

    {"hash": ..., "kind": ..., "previous": ..., "record": {...}, "sequence": 0}

``hash`` is the SHA-256 of the previous line's hash, a newline and the canonical JSON (sorted keys, no spaces,
ASCII, no NaN) of kind, record and sequence. The first line follows a hash of zeros. Whoever changes, drops,
inserts or swaps a line breaks the chain from there on; only a tail that is cut off whole leaves a valid,
shorter chain, which is why `verify` reports the number of records and the last hash.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dask_sdc.exceptions import LedgerError

GENESIS = "0" * 64


@dataclass(frozen=True)
class LedgerEntry:
    """One line of a ledger.

    Parameters
    ----------
    sequence : int
        Position in the chain, from 0.
    kind : str
        What the record is, such as "receipt" or "round".
    record : dict
        JSON-compatible content.
    previous, hash : str
        SHA-256 of the line before and of this one, in hex.
    """

    sequence: int
    kind: str
    record: dict[str, Any]
    previous: str
    hash: str


@dataclass(frozen=True)
class LedgerCheck:
    """What `verify` found.

    Parameters
    ----------
    ok : bool
        Whether the chain holds to the last finished line.
    records : int
        Number of good lines before the first bad one.
    first_bad_line : int or None
        Its number, counted from 1.
    reason : str
        What was expected there and what came.
    last_hash : str
        Hash of the last good line; compare it with a copy kept elsewhere to see a cut-off tail.
    unfinished : bool
        Whether the file ends in a line that is still being written, or was torn by a crash.
    """

    ok: bool
    records: int
    first_bad_line: int | None = None
    reason: str = ""
    last_hash: str = GENESIS
    unfinished: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible fields."""
        return asdict(self)


class Ledger:
    """Writer of a ledger file; there is one at a time, and readers need no lock.

    An existing file is verified and continued. A last line without its newline is what a writer leaves that
    died in the middle of it: nobody was told that it was written, so it is cut off, and the cut is recorded
    as an entry of kind "torn" with the number and SHA-256 of the bytes.

    Parameters
    ----------
    path : str or os.PathLike
        The file; created if it is not there, its folder has to be.

    Raises
    ------
    LedgerError
        If another writer holds the file or its chain is broken.
    """

    sequence: int  #: Number of the next record.
    last_hash: str  #: Hash of the last record.

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():
            raise LedgerError(f"{self.path}: expected a regular file or none, got something else")
        self._guard = threading.Lock()  # threads of the one writer
        # Append mode: whatever happens, lines that are there are never overwritten.
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            self._lock()
            self._resume()
        except BaseException:
            self._file.close()
            raise

    def append(self, kind: str, record: Mapping[str, Any]) -> str:
        """Write one record and return its hash; it is on disk when this returns.

        Raises
        ------
        LedgerError
            If the ledger is closed or the record is not strict JSON (NaN and Inf are not).
        """
        if not isinstance(kind, str) or not isinstance(record, Mapping):
            raise LedgerError(f"{self.path}: expected a text and a mapping, got {kind!r} and {type(record)}")
        if self._file.closed:
            raise LedgerError(f"{self.path}: expected an open ledger, got a closed one")
        with self._guard:
            try:
                # Twice through JSON: what is hashed must be what a reader will parse (int keys become text).
                entry = json.loads(
                    _canonical({"kind": kind, "record": dict(record), "sequence": self.sequence})
                )
            except (TypeError, ValueError, RecursionError) as error:
                raise LedgerError(f"{self.path}: expected a JSON record for {kind!r}, got {error}") from error
            entry_hash = _chain(self.last_hash, _canonical(entry))
            line = _canonical({**entry, "previous": self.last_hash, "hash": entry_hash})
            self._write(line.encode("ascii") + b"\n")
            self.sequence += 1
            self.last_hash = entry_hash
            return entry_hash

    def close(self) -> None:
        """Release the file; may be called again."""
        self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LedgerError(f"{self.path}: expected to be the only writer, got a ledger in use") from None
        except OSError as error:
            raise LedgerError(f"{self.path}: expected a file system with locks, got {error}") from error

    def _resume(self) -> None:
        check = verify(self.path)
        if not check.ok:
            raise LedgerError(f"{self.path}: line {check.first_bad_line}: {check.reason}")
        self.sequence = check.records
        self.last_hash = check.last_hash
        if check.unfinished:
            self._cut_torn_line()
        elif not check.records:
            _sync_folder(self.path.parent)

    def _cut_torn_line(self) -> None:
        raw = self.path.read_bytes()
        end = raw.rfind(b"\n") + 1
        os.ftruncate(self._file.fileno(), end)
        torn = raw[end:]
        self.append("torn", {"bytes": len(torn), "sha256": hashlib.sha256(torn).hexdigest()})

    def _write(self, line: bytes) -> None:
        """Write a whole line or none: a half-written one would spoil the next."""
        descriptor = self._file.fileno()
        size = os.fstat(descriptor).st_size
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"expected to write {len(line)} bytes, wrote {written}")
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, size)
            raise LedgerError(f"{self.path}: record {self.sequence} could not be written: {error}") from error


def read(path: str | os.PathLike[str]) -> Iterator[LedgerEntry]:
    """Yield the finished entries of a ledger, also while it is written.

    Raises
    ------
    LedgerError
        At the first line that breaks the chain, after the good ones were yielded.
    """
    previous = GENESIS
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                entry = _parse(line, number - 1, previous)
            except ValueError as error:
                raise LedgerError(f"{path}: line {number}: {error}", line=number, reason=str(error)) from None
            previous = entry.hash
            yield entry


def verify(path: str | os.PathLike[str]) -> LedgerCheck:
    """Check the chain of a ledger and name the first bad line.

    Parameters
    ----------
    path : str or os.PathLike
        The file; an unfinished last line is not an error.

    Returns
    -------
    LedgerCheck
    """
    records, last_hash = 0, GENESIS
    try:
        for entry in read(path):
            records, last_hash = records + 1, entry.hash
    except LedgerError as error:
        fields = vars(error)
        return LedgerCheck(False, records, fields["line"], fields["reason"], last_hash)
    return LedgerCheck(True, records, last_hash=last_hash, unfinished=_ends_unfinished(path))


def _parse(line: bytes, sequence: int, previous: str) -> LedgerEntry:
    """Parse a line; ValueError says what is wrong with it."""
    try:
        fields = json.loads(line.decode("ascii"))
    except RecursionError:
        raise ValueError("expected a record, got nesting without end") from None
    if not isinstance(fields, dict) or fields.keys() != {"hash", "kind", "previous", "record", "sequence"}:
        raise ValueError("expected an object with hash, kind, previous, record and sequence")
    if not isinstance(fields["kind"], str) or not isinstance(fields["record"], dict):
        raise ValueError("expected kind and record to be a text and an object")
    if fields["sequence"] != sequence or type(fields["sequence"]) is not int:
        raise ValueError(f"expected sequence {sequence}, got {fields['sequence']!r:.40}")
    if fields["previous"] != previous:
        raise ValueError(f"expected previous {previous}, got {fields['previous']!r:.80}")
    body = _canonical({name: fields[name] for name in ("kind", "record", "sequence")})
    expected = _chain(previous, body)
    if fields["hash"] != expected:
        raise ValueError(f"expected hash {expected}, got {fields['hash']!r:.80}")
    if line != _canonical(fields).encode("ascii") + b"\n":
        raise ValueError("expected the line as it was written, got another spelling of the same record")
    return LedgerEntry(**fields)


def _chain(previous: str, body: str) -> str:
    return hashlib.sha256(f"{previous}\n{body}".encode("ascii")).hexdigest()


def _canonical(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _ends_unfinished(path: str | os.PathLike[str]) -> bool:
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _sync_folder(folder: Path) -> None:
    """Make the entry of a new file durable as well."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
