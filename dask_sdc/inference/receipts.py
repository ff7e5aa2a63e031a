"""Receipts of a run: which model gave which tokens, through which stages, and what was healed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from dask_sdc.evidence.codec import encode
from dask_sdc.evidence.display import bounded_repr
from dask_sdc.exceptions import InputError
from dask_sdc.inference.checkpoint import token_ids
from dask_sdc.inference.identity import NodeKey, verify_signature
from dask_sdc.inference.journal import ChunkRecord
from dask_sdc.inference.ops import RecoveryReport

_PURPOSE = b"dask_sdc run receipt 1\n"
_CHAIN = b"dask_sdc boundary chain 1\n"


def ids_digest(prompt: Sequence[int], committed: Sequence[int]) -> str:
    """Return the SHA-256 of prompt and generated ids, in hex."""
    return hashlib.sha256(encode([token_ids(prompt), token_ids(committed)])).hexdigest()


def boundary_chain(records: Iterable[ChunkRecord]) -> str:
    """Return the hash chain over the outputs of one stage, in hex.

    h₀ is the SHA-256 of a fixed text and hₖ that of hₖ₋₁ and the canonical encoding of position, width, kept
    and digest of chunk k. So it depends on every chunk, their order and how many there are, but not on what
    else the pipeline did, as the numbers of the chunks do.

    Parameters
    ----------
    records : iterable of ChunkRecord
        The outputs that count, in order.
    """
    link = hashlib.sha256(_CHAIN).digest()
    for record in records:
        link = hashlib.sha256(link + encode([*record.place[1:], record.digest])).digest()
    return link.hex()


@dataclass(frozen=True)
class RunReceipt:
    """The record of one generation.

    Parameters
    ----------
    session : str
        The session.
    model_digest : str
        Digest of the weights, in hex.
    ids_digest : str
        See the function of this name.
    n_prompt, n_committed : int
        Numbers of tokens.
    settings : mapping
        What else the tokens depend on; JSON-compatible.
    chains : tuple of str
        Per stage the `boundary_chain` of its outputs.
    blocks : tuple of str
        Per stage the digest of its weights.
    recoveries : tuple of mapping
        What was lost and healed, in order; see `RecoveryReport.to_dict`.
    signer, signature : str
        Public key and Ed25519 signature, in hex; empty without one.
    """

    session: str
    model_digest: str
    ids_digest: str
    n_prompt: int
    n_committed: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    chains: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    recoveries: tuple[Mapping[str, Any], ...] = ()
    signer: str = ""
    signature: str = ""

    @classmethod
    def of_run(
        cls,
        session: str,
        prompt: Sequence[int],
        committed: Sequence[int],
        *,
        model_digest: str,
        settings: Mapping[str, Any],
        boundaries: Sequence[Iterable[ChunkRecord]],
        blocks: Sequence[str] = (),
        recoveries: Sequence[RecoveryReport] = (),
    ) -> Self:
        """Build the receipt of a generation from what its coordinator knows.

        Parameters
        ----------
        session : str
            The session.
        prompt, committed : sequence of int
            Its ids.
        model_digest, settings
            See `RunReceipt`.
        boundaries : sequence of iterable of ChunkRecord
            Per stage the records of its outputs.
        blocks : sequence of str, optional
            See `RunReceipt`.
        recoveries : sequence of RecoveryReport
            What was healed.
        """
        return cls(
            session,
            model_digest,
            ids_digest(prompt, committed),
            len(prompt),
            len(committed),
            dict(settings),
            tuple(boundary_chain(records) for records in boundaries),
            tuple(blocks),
            tuple(report.to_dict() for report in recoveries),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible fields."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        lists = {name: list(values[name]) for name in ("chains", "blocks", "recoveries")}
        return values | lists | {"settings": dict(self.settings)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild a receipt from `to_dict`, also after a trip through JSON.

        Raises
        ------
        InputError
            If a field is unknown or missing.
        """
        known = {item.name for item in fields(cls)}
        if values.keys() != known:
            raise InputError(f"expected the fields of a run receipt, got {sorted(values.keys() ^ known)} off")
        lists = {name: tuple(values[name]) for name in ("chains", "blocks", "recoveries")}
        return cls(**{**values, **lists})

    @property
    def digest(self) -> str:
        """SHA-256 of everything but the signature, in hex."""
        return hashlib.sha256(self._signed()).hexdigest()

    def signed(self, key: NodeKey) -> Self:
        """Return the receipt with a signature."""
        named = replace(self, signer=key.public.hex(), signature="")
        return replace(named, signature=key.sign(named._signed()).hex())

    def _signed(self) -> bytes:
        values = self.to_dict()
        del values["signature"]
        return _PURPOSE + encode(values)


def verify(
    receipt: RunReceipt,
    prompt: Sequence[int],
    committed: Sequence[int],
    *,
    model_digest: str | None = None,
    boundaries: Sequence[Iterable[ChunkRecord]] | None = None,
    signer: bytes | None = None,
) -> list[str]:
    """Check a receipt against what is known of a run.

    Parameters
    ----------
    receipt : RunReceipt
        The receipt.
    prompt, committed : sequence of int
        The ids.
    model_digest : str, optional
        Digest of the model that should have given them.
    boundaries : sequence of iterable of ChunkRecord, optional
        Per stage the records of its outputs, such as those of a second run.
    signer : bytes, optional
        Public key (32 bytes) whose signature is wanted. A signature that is there is checked anyway.

    Returns
    -------
    list of str
        What does not fit: expected, and got. Empty if everything does.
    """
    checks = [
        ("ids", ids_digest(prompt, committed), receipt.ids_digest),
        ("number of prompt ids", len(prompt), receipt.n_prompt),
        ("number of generated ids", len(committed), receipt.n_committed),
    ]
    if model_digest is not None:
        checks.append(("model", model_digest, receipt.model_digest))
    if boundaries is not None:
        chains = [boundary_chain(records) for records in boundaries]
        checks.append(("number of stages", len(chains), len(receipt.chains)))
        pairs = zip(chains, receipt.chains, strict=False)
        checks += [(f"chain of stage {stage}", *pair) for stage, pair in enumerate(pairs)]
    wrong = [f"{what}: expected {due}, got {got}" for what, due, got in checks if due != got]
    return wrong + _signature_faults(receipt, signer)


def differences(a: RunReceipt, b: RunReceipt) -> list[str]:
    """Say in what two runs differ that should give the same tokens, such as plain and speculative ones.

    Chains belong to the shapes in which a run computed, and recoveries to its luck: neither counts.
    """
    names = ("model_digest", "settings", "n_prompt", "n_committed", "ids_digest")
    pairs = [(name, getattr(a, name), getattr(b, name)) for name in names]
    return [f"{name}: {bounded_repr(x, 80)} against {bounded_repr(y, 80)}" for name, x, y in pairs if x != y]


def _signature_faults(receipt: RunReceipt, signer: bytes | None) -> list[str]:
    if not receipt.signature:
        return [] if signer is None and not receipt.signer else ["signature: expected one, got none"]
    if signer is not None and receipt.signer != signer.hex():
        return [f"signer: expected {signer.hex()}, got {receipt.signer}"]
    try:
        public, signature = bytes.fromhex(receipt.signer), bytes.fromhex(receipt.signature)
    except ValueError:
        return ["signature: expected hex, got something else"]
    if verify_signature(public, receipt._signed(), signature):
        return []
    return [f"signature: expected one by {receipt.signer}, got another"]
