"""Who a node is: Ed25519 keys (RFC 8032) and challenges that only the owner of a key can answer.

Needs the optional library ``cryptography``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from dask_sdc.evidence.codec import encode
from dask_sdc.exceptions import InputError, StageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_PURPOSE = b"dask_sdc node challenge 1\n"


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise InputError("signatures: expected the library `cryptography`, got none installed") from None
    return ed25519


class NodeKey:
    """The private key of a node.

    Parameters
    ----------
    seed : bytes
        32 secret bytes.

    Raises
    ------
    InputError
        If they are not 32, or the library ``cryptography`` is not installed.
    """

    public: bytes  #: The public key, 32 bytes.

    def __init__(self, seed: bytes) -> None:
        if not isinstance(seed, bytes) or len(seed) != 32:
            raise InputError("seed of a key: expected 32 bytes, got something else")
        self._key: Ed25519PrivateKey = _ed25519().Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Self:
        """Return a new key."""
        return cls(secrets.token_bytes(32))

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message, 64 bytes."""
        return self._key.sign(message)

    def __repr__(self) -> str:
        return f"NodeKey(public={self.public.hex()})"

    def __reduce__(self) -> Any:
        raise TypeError("a private key does not travel")


def verify_signature(public: bytes, message: bytes, signature: bytes) -> bool:
    """Say whether a signature of a message is that of the owner of a public key.

    Parameters
    ----------
    public : bytes
        The key, 32 bytes.
    message, signature : bytes
        What was signed, and the signature.
    """
    ed25519 = _ed25519()
    from cryptography.exceptions import InvalidSignature

    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True)
class Challenge:
    """A question that a node answers by signing it.

    Parameters
    ----------
    node : str
        Name of the node that is asked.
    nonce : bytes
        32 random bytes, used once.
    """

    node: str
    nonce: bytes

    def message(self, public: bytes) -> bytes:
        """Return what is signed: purpose, name, nonce and the key that signs."""
        return _PURPOSE + encode([self.node, self.nonce, public])


@dataclass(frozen=True)
class Answer:
    """The answer to a challenge.

    Parameters
    ----------
    challenge : Challenge
        The question as the node got it.
    public, signature : bytes
        The node's key (32 bytes) and its signature (64 bytes).
    """

    challenge: Challenge
    public: bytes
    signature: bytes


def answer(challenge: Challenge, node: str, key: NodeKey) -> Answer:
    """Answer a challenge.

    Parameters
    ----------
    challenge : Challenge
        The question.
    node : str
        Name of the node that answers.
    key : NodeKey
        Its key.

    Raises
    ------
    InputError
        If the question is for another node: a signature could be passed on as that node's.
    """
    if challenge.node != node:
        raise InputError(f"challenge: expected one for node {node}, got one for {challenge.node}")
    return Answer(challenge, key.public, key.sign(challenge.message(key.public)))


class Challenger:
    """Asks nodes who they are; every nonce counts once and for a limited time.

    Parameters
    ----------
    trusted : mapping of str to bytes
        Per node its public key.
    lifetime_s : float, optional
        Time to answer, in seconds.
    clock : callable, optional
        Seconds that never go back.
    """

    def __init__(
        self,
        trusted: Mapping[str, bytes],
        lifetime_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trusted = dict(trusted)
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._open: dict[bytes, tuple[str, float]] = {}

    def ask(self, node: str) -> Challenge:
        """Return a new challenge for a node.

        Raises
        ------
        InputError
            If its key is not known.
        """
        if node not in self._trusted:
            raise InputError(f"challenge: expected a node whose key is known, got {node}")
        now = self._clock()
        self._open = {nonce: kept for nonce, kept in self._open.items() if kept[1] > now}
        challenge = Challenge(node, secrets.token_bytes(32))
        self._open[challenge.nonce] = (node, now + self._lifetime_s)
        return challenge

    def check(self, given: Answer) -> str:
        """Return the name of the node that answered.

        Raises
        ------
        StageError
            If the nonce was never asked of that node, was answered before or is too old, or the signature
            is not by the key of that node.
        """
        node, nonce = given.challenge.node, given.challenge.nonce
        asked, until = self._open.pop(nonce, ("", 0.0))
        if asked != node or self._clock() > until:
            raise StageError(f"node {node}: expected the answer to an open challenge, got another nonce")
        if given.public != self._trusted[node]:
            raise StageError(
                f"node {node}: expected key {self._trusted[node].hex()}, got {given.public.hex()}"
            )
        if not verify_signature(given.public, given.challenge.message(given.public), given.signature):
            raise StageError(f"node {node}: expected a signature by its key, got another")
        return node
