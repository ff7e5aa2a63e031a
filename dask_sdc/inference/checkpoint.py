"""Checkpoints of a generation: what a later call needs to go on where another one ended."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from dask_sdc.evidence.codec import Limits, decode, encode
from dask_sdc.evidence.display import bounded_repr
from dask_sdc.exceptions import CheckpointError, CodecError, InputError, InputTypeError

_MAGIC = b"SDCG\x01"
_LIMITS = Limits(max_bytes=1 << 28, max_items=1 << 24)


def token_ids(ids: Any, name: str = "ids") -> tuple[int, ...]:
    """Return token ids as a tuple of int.

    Parameters
    ----------
    ids : sequence of int, or ndarray of integers of one dimension
        The ids.
    name : str, optional
        What they are called in messages.

    Raises
    ------
    InputTypeError
        If they are something else.
    InputError
        If one is negative.
    """
    try:
        found = tuple(ids.tolist() if hasattr(ids, "tolist") else ids)
    except TypeError:
        found = (None,)
    if isinstance(ids, bytes | bytearray):  # a text that was not decoded
        found = (None,)
    found = tuple(item.item() if hasattr(item, "item") else item for item in found)
    if any(type(item) is not int for item in found):
        raise InputTypeError(f"{name}: expected a sequence of int, got {bounded_repr(ids, 80)}")
    if any(item < 0 for item in found):
        raise InputError(f"{name}: expected token ids >= 0, got {min(found)}")
    return found


@dataclass(frozen=True)
class Checkpoint:
    """A generation up to some token, bound to all that its tokens depend on.

    Parameters
    ----------
    prompt, committed : tuple of int
        The ids of the prompt and those that were generated.
    settings : mapping
        Whatever else the tokens depend on, such as temperature, top_p, seed and stop: values of the
        closed set of types (see `dask_sdc.evidence.encode`).
    model_digest, tokenizer_digest : str
        Digests of the weights and of the tokenizer, in hex; empty where there is none.
    boundaries : tuple of int
        First layer of every stage but the head. Another partition may resume.
    chunks : tuple of tuple of (int, str, str)
        For a model that is not fed tokens: per chunk its positions, and the digests of what was fed and of
        what came of it, in hex.
    """

    prompt: tuple[int, ...]
    committed: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    model_digest: str = ""
    tokenizer_digest: str = ""
    boundaries: tuple[int, ...] = ()
    chunks: tuple[tuple[int, str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt", "committed", "boundaries"):
            object.__setattr__(self, name, token_ids(getattr(self, name), name))
        object.__setattr__(self, "settings", dict(self.settings))
        object.__setattr__(self, "chunks", tuple(tuple(chunk) for chunk in self.chunks))

    def _payload(self) -> bytes:
        return encode({item.name: getattr(self, item.name) for item in fields(self)})

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical bytes, in hex."""
        return hashlib.sha256(self._payload()).hexdigest()

    def to_bytes(self) -> bytes:
        """Return the checkpoint with its SHA-256."""
        payload = self._payload()
        return _MAGIC + hashlib.sha256(payload).digest() + payload

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Read a checkpoint back.

        Raises
        ------
        CheckpointError
            If a byte of it is wrong.
        """
        head = len(_MAGIC)
        payload = raw[head + 32 :]
        if raw[:head] != _MAGIC or hashlib.sha256(payload).digest() != raw[head : head + 32]:
            raise CheckpointError(f"expected a checkpoint with its SHA-256, got {len(raw)} other bytes")
        try:
            found = cls(**decode(payload, _LIMITS))
            if found._payload() != payload:
                raise InputError("not as they are written")
        except (CodecError, InputError, TypeError) as error:
            raise CheckpointError(f"expected the fields of a checkpoint, got others: {error}") from None
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file, whole or not at all; it is on disk when this returns.

        Parameters
        ----------
        path : str or os.PathLike
            The file; its folder is created.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own, so that two writers never write into one part.
        descriptor, part = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(self.to_bytes())
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read from a file.

        Raises
        ------
        CheckpointError
            If there is none or it is damaged; the message names the file.
        """
        try:
            return cls.from_bytes(Path(path).read_bytes())
        except OSError as error:
            raise CheckpointError(f"{path}: expected a checkpoint, got {error}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None

    def check(
        self,
        prompt: Sequence[int],
        model_digest: str,
        settings: Mapping[str, Any],
        tokenizer_digest: str | None = None,
    ) -> None:
        """Make sure that a call would go on with the same tokens.

        Parameters
        ----------
        prompt, model_digest, settings, tokenizer_digest
            Those of the call; without a tokenizer digest the tokenizer is not checked.

        Raises
        ------
        CheckpointError
            If any of them is another; the message names each one.
        """
        wrong = [*_prompt_difference(self.prompt, token_ids(prompt, "prompt"))]
        if model_digest != self.model_digest:
            wrong.append(f"model digest: expected {self.model_digest}, got {model_digest}")
        if tokenizer_digest is not None and tokenizer_digest != self.tokenizer_digest:
            wrong.append(f"tokenizer digest: expected {self.tokenizer_digest}, got {tokenizer_digest}")
        for name in sorted({*self.settings, *settings}):
            ours, theirs = (_shown(side, name) for side in (self.settings, settings))
            if ours != theirs:
                wrong.append(f"setting {name}: expected {ours[0]}, got {theirs[0]}")
        if wrong:
            raise CheckpointError("; ".join(wrong))


def _prompt_difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> list[str]:
    if ours == theirs:
        return []
    if len(ours) != len(theirs):
        return [f"prompt: expected {len(ours)} tokens, got {len(theirs)}"]
    at = next(k for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return [f"prompt: expected token {ours[at]} at {at}, got {theirs[at]}"]


def _shown(settings: Mapping[str, Any], name: str) -> tuple[str, bytes]:
    """A setting as text and as canonical bytes: 3 is not 3.0, and arrays compare as well."""
    if name not in settings:
        return "nothing", b""
    return bounded_repr(settings[name], 60), encode(settings[name])


def _sync_folder(folder: Path) -> None:
    """Make the new name durable as well."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
