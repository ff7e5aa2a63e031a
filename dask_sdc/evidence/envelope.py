"""Comparison of two states: bitwise first, then within a numeric envelope, over all leaves.

The envelope of a float or complex leaf is, element by element,

    atol + max(rtol * max(|a|, |b|),  LAMBDA * sqrt(n) * u * M)

where n is the number of terms that were added up, u the unit roundoff of the leaf's dtype and M = Σ|terms|.
The second term is the probabilistic bound of Higham and Mary, "A New Approach to Probabilistic Rounding
Error Analysis", SIAM J. Sci. Comput. 41(5), 2019, theorem 3.1: with independent rounding errors of mean
zero a sum of n terms is wrong by at most λ √n u Σ|terms| with probability at least
1 - 2 n exp(-λ² (1 - u)² / 2). Cancellation is covered because the bound speaks of M and not of the
result. Both sides may be wrong by as much, hence LAMBDA = 2 λ with λ = 8: for a million terms the
probability of a false alarm is below 5e-8 per element, and in practice far below.

Without a magnitude for a leaf, M is ``max(|a|, |b|)``, which no M can be smaller than.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dask_sdc.evidence.codec import DEFAULT_LIMITS, Limits, decode, digest, encode
from dask_sdc.evidence.display import bounded_repr
from dask_sdc.exceptions import DecodeError, InputError
from dask_sdc.statistics.base import Statistic

#: Twice the λ of Higham and Mary: once for each side of the comparison.
LAMBDA = 16.0

_LARGEST = float(np.finfo(np.float64).max)  # the modulus of a finite complex may overflow
_ROUNDOFF = {2: 2.0**-11, 4: 2.0**-24, 8: 2.0**-53}  # by bytes of the real type


@dataclass(frozen=True)
class LeafError:
    """How one leaf differs.

    Parameters
    ----------
    path : str
        Where the leaf is, such as ``['mean']`` or ``['parts'][2]``.
    abs_error : float
        Largest absolute error over the leaf's elements; inf where there is no such number
        (another type, shape or text, or a non-finite element).
    rel_error : float
        Largest error relative to ``max(|a|, |b|)``.
    allowed : float
        Envelope at the element that exceeds its own the most, or comes nearest to it; 0 for exact types.
    outside : int
        Number of elements outside of the envelope.
    elements : int
        Number of elements of the leaf.
    reason : str
        Why the leaf is a mismatch; empty inside of the envelope.
    """

    path: str
    abs_error: float
    rel_error: float
    allowed: float
    outside: int
    elements: int
    reason: str


@dataclass(frozen=True)
class Comparison:
    """What a comparison of two states found.

    Parameters
    ----------
    equal : bool
        Whether the two have the same canonical bytes, hence the same digest.
    within : bool
        Whether every leaf is inside of its envelope. Not implied by `equal`: a NaN on both sides
        alike is equal, and outside where the statistic does not allow it.
    mode : {"bitwise", "envelope", "undecodable"}
        What decided: identical bytes, the envelope, or digests of bytes that could not be decoded.
    reason : str
        The first reason for a mismatch; empty if within.
    max_abs_error, max_rel_error : float
        Largest errors over all leaves.
    rtol, atol : float
        The tolerances that were asked for.
    leaves : tuple of LeafError
        One for every leaf that differs by a bit or is not allowed, in canonical order.
    a_digest, b_digest : bytes
        xxh3_128 of the canonical bytes, or of the raw bytes where undecodable.
    """

    equal: bool
    within: bool
    mode: str
    reason: str
    max_abs_error: float
    max_rel_error: float
    rtol: float
    atol: float
    leaves: tuple[LeafError, ...] = ()
    a_digest: bytes = b""
    b_digest: bytes = b""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible fields (non-finite errors stay floats), digests in hex."""
        fields = asdict(self)
        fields["leaves"] = [asdict(leaf) for leaf in self.leaves]
        fields["a_digest"], fields["b_digest"] = self.a_digest.hex(), self.b_digest.hex()
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Comparison:
        """Rebuild a comparison from `to_dict`."""
        return cls(
            **{
                **fields,
                "leaves": tuple(LeafError(**leaf) for leaf in fields["leaves"]),
                "a_digest": bytes.fromhex(fields["a_digest"]),
                "b_digest": bytes.fromhex(fields["b_digest"]),
            }
        )


def compare(
    a: Any,
    b: Any,
    *,
    rtol: float,
    atol: float,
    magnitudes: Mapping[Any, Any] | None = None,
    terms: float = 1.0,
    finite: bool = True,
) -> Comparison:
    """Compare two states over all of their leaves.

    Parameters
    ----------
    a, b : State
        Values of the closed set of types. None, bool, int, str, bytes and arrays of kinds b, i, u, S, U, M, m
        must be equal, types, dtypes and shapes included; floats and complexes may differ within the envelope.
        Lists, tuples and dicts need the same class and length, dicts the same keys in any order.
    rtol, atol : float
        Tolerances, real, finite, >= 0.
    magnitudes : mapping, optional
        M = Σ|terms| of the fields of a dict state, see `Statistic.magnitudes`; may nest as the state does.
    terms : float, optional
        n, the number of terms that were added up.
    finite : bool, optional
        Whether NaN and Inf are mismatches even where both sides agree.

    Returns
    -------
    Comparison

    Raises
    ------
    EncodeError
        If a state holds a type outside the closed set.
    InputError
        If a tolerance is not a finite number >= 0.
    """
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if not (math.isfinite(tolerance) and tolerance >= 0):
            raise InputError(f"expected a finite {name} >= 0, got {tolerance}")
    digests = digest(encode(a)), digest(encode(b))
    walk = _Walk(rtol, atol, _root_terms(terms), finite)
    with np.errstate(all="ignore"):  # differences and quotients of corrupt values
        walk.visit("", a, b, magnitudes)
    equal = digests[0] == digests[1]
    return _conclude(walk.leaves, "bitwise" if equal else "envelope", rtol, atol, digests)


def compare_payloads(
    a: bytes,
    b: bytes,
    *,
    rtol: float,
    atol: float,
    statistic: Statistic | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Comparison:
    """Compare two sealed payloads; bytes that cannot be decoded are a mismatch, never an error.

    Parameters
    ----------
    a, b : bytes
        Canonical encodings, possibly damaged.
    rtol, atol : float
        Tolerances, see `compare`.
    statistic : Statistic, optional
        Says magnitudes, terms and whether non-finite values are legal. Both sides are asked and the smaller
        answer counts, so that a corrupt magnitude cannot widen its own envelope. Without a statistic
        non-finite values are mismatches.
    limits : Limits, optional
        Bounds of the decoder.

    Returns
    -------
    Comparison
    """
    values = []
    for name, payload in (("a", a), ("b", b)):
        try:
            values.append(decode(payload, limits))
        except DecodeError as error:
            leaf = LeafError("", math.inf, math.inf, 0.0, 1, 1, f"payload {name} cannot be decoded: {error}")
            return _conclude([leaf], "undecodable", rtol, atol, (digest(a), digest(b)))
    magnitudes, terms = (None, 1.0) if statistic is None else _smaller_scale(statistic, *values)
    finite = True if statistic is None else statistic.finite
    return compare(*values, rtol=rtol, atol=atol, magnitudes=magnitudes, terms=terms, finite=finite)


def _conclude(
    leaves: list[LeafError], mode: str, rtol: float, atol: float, digests: tuple[bytes, bytes]
) -> Comparison:
    reasons = [f"{leaf.path or 'state'}: {leaf.reason}" for leaf in leaves if leaf.reason]
    return Comparison(
        equal=digests[0] == digests[1],
        within=not reasons,
        mode=mode,
        reason=reasons[0] if reasons else "",
        max_abs_error=max((leaf.abs_error for leaf in leaves), default=0.0),
        max_rel_error=max((leaf.rel_error for leaf in leaves), default=0.0),
        rtol=float(rtol),
        atol=float(atol),
        leaves=tuple(leaves),
        a_digest=digests[0],
        b_digest=digests[1],
    )


# -- magnitudes ----------------------------------------------------------------------------------


def _smaller_scale(statistic: Statistic, a: Any, b: Any) -> tuple[Any, float]:
    """Ask the statistic about both sides; it may raise anything on a state that is corrupt."""
    try:
        with np.errstate(all="ignore"):
            magnitudes = _smaller(statistic.magnitudes(a), statistic.magnitudes(b))
            return magnitudes, min(float(statistic.terms(a)), float(statistic.terms(b)))
    except Exception:
        return None, 1.0


def _smaller(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return None
    if isinstance(a, Mapping):
        return {key: _smaller(a[key], b[key]) for key in a if key in b}
    return np.fmin(np.asarray(a, np.float64), np.asarray(b, np.float64))


def _root_terms(terms: float) -> float:
    """√n, or 1 where a corrupt state claims no usable number of terms."""
    return math.sqrt(terms) if math.isfinite(terms) and terms > 1 else 1.0


# -- the walk ------------------------------------------------------------------------------------


class _Walk:
    """Visits both states side by side and collects the leaves that differ."""

    def __init__(self, rtol: float, atol: float, root_terms: float, finite: bool) -> None:
        self.rtol = rtol
        self.atol = atol
        self.root_terms = root_terms
        self.finite = finite
        self.leaves: list[LeafError] = []

    def visit(self, path: str, a: Any, b: Any, magnitude: Any) -> None:
        a, b = _pythonic(a), _pythonic(b)
        if type(a) is not type(b):
            self.differs(path, f"expected the same type, got {type(a).__name__} and {type(b).__name__}")
        elif isinstance(a, dict):
            self.visit_dict(path, a, b, magnitude)
        elif isinstance(a, (list, tuple)):
            self.visit_sequence(path, a, b)
        elif isinstance(a, (float, complex, np.ndarray, np.generic)):
            self.visit_array(path, np.asarray(a), np.asarray(b), magnitude)
        elif a != b:
            self.exact(path, a, b)

    def visit_dict(self, path: str, a: dict[Any, Any], b: dict[Any, Any], magnitudes: Any) -> None:
        if a.keys() != b.keys():
            odd = sorted(a.keys() ^ b.keys(), key=encode)[:4]
            self.differs(path, f"expected the same keys, got some on one side only: {bounded_repr(odd, 200)}")
        scales = magnitudes if isinstance(magnitudes, Mapping) else {}
        for key in sorted(a.keys() & b.keys(), key=encode):
            self.visit(f"{path}[{bounded_repr(key, 60)}]", a[key], b[key], scales.get(key))

    def visit_sequence(self, path: str, a: Any, b: Any) -> None:
        if len(a) != len(b):
            self.differs(path, f"expected the same length, got {len(a)} and {len(b)}")
        for index, (x, y) in enumerate(zip(a, b, strict=False)):
            self.visit(f"{path}[{index}]", x, y, None)

    def visit_array(
        self, path: str, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], magnitude: Any
    ) -> None:
        a, b = (side.astype(side.dtype.newbyteorder("="), order="C", copy=False) for side in (a, b))
        if a.dtype != b.dtype:
            self.differs(path, f"expected the same dtype, got {a.dtype} and {b.dtype}", a.size)
        elif a.shape != b.shape:
            self.differs(path, f"expected the same shape, got {a.shape} and {b.shape}", a.size)
        elif a.dtype.kind in "fc":
            self.numeric(path, a, b, magnitude)
        elif a.tobytes() != b.tobytes():
            self.exact_array(path, a, b)

    def differs(self, path: str, reason: str, elements: int = 1) -> None:
        self.leaves.append(LeafError(path, math.inf, math.inf, 0.0, elements, elements, reason))

    def exact(self, path: str, a: Any, b: Any) -> None:
        if type(a) is not int:
            self.differs(path, f"expected equal {type(a).__name__} values, got two that differ")
            return
        error = abs(a - b)  # integers of any size
        rel_error = error / max(abs(a), abs(b))
        abs_error = float(error) if error.bit_length() <= 1023 else math.inf
        self.leaves.append(LeafError(path, abs_error, rel_error, 0.0, 1, 1, "expected equal int values"))

    def exact_array(self, path: str, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> None:
        outside = int((_element_bytes(a) != _element_bytes(b)).any(axis=1).sum())
        abs_error = rel_error = math.inf
        if a.dtype.kind in "iu":
            x, y = a.astype(np.float64), b.astype(np.float64)
            abs_error = float(np.max(np.abs(x - y)))
            rel_error = float(np.max(_relative(np.abs(x - y), np.maximum(np.abs(x), np.abs(y)))))
        reason = f"expected equal elements of dtype {a.dtype}, got {outside} of {a.size} that differ"
        self.leaves.append(LeafError(path, abs_error, rel_error, 0.0, outside, a.size, reason))

    def numeric(self, path: str, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], magnitude: Any) -> None:
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        x, y = a.astype(wide), b.astype(wide)
        odd = ~(np.isfinite(x) & np.isfinite(y))
        any_odd = bool(odd.any())
        if a.tobytes() == b.tobytes() and not (self.finite and any_odd):
            return
        error = np.abs(x - y)
        size = np.minimum(np.maximum(np.abs(x), np.abs(y)), _LARGEST)
        if any_odd:
            tolerated = odd & _same_nonfinite(x, y) & (not self.finite)
            error = np.where(odd, np.where(tolerated, 0.0, np.inf), error)
            size = np.where(odd, 0.0, size)
            odd &= ~tolerated
        roundoff = _ROUNDOFF[a.dtype.itemsize // (2 if a.dtype.kind == "c" else 1)]
        rounding = LAMBDA * self.root_terms * roundoff * _scale(magnitude, size)
        allowed = np.minimum(self.atol + np.maximum(self.rtol * size, rounding), _LARGEST)
        self.record(path, error, size, allowed, int(odd.sum()) if any_odd else 0)

    def record(
        self,
        path: str,
        error: np.ndarray[Any, Any],
        size: np.ndarray[Any, Any],
        allowed: np.ndarray[Any, Any],
        illegal: int,
    ) -> None:
        outside = int((error > allowed).sum())
        reason = ""
        if illegal:
            reason = f"non-finite values, which are not legal here or differ, in {illegal} elements"
        elif outside:
            reason = f"outside of the envelope in {outside} of {error.size} elements"
        abs_error, rel_error = float(error.max()), float(_relative(error, size).max())
        envelope = float(allowed.reshape(-1)[_relative(error, allowed).argmax()])
        self.leaves.append(LeafError(path, abs_error, rel_error, envelope, outside, error.size, reason))


def _pythonic(value: Any) -> Any:
    """The same normalisation as the codec: NumPy scalars as the Python value that they equal."""
    if isinstance(value, (np.bool_, np.integer, np.float64, np.complex128, np.str_, np.bytes_)):
        return value.item()
    return value


def _element_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Elements as rows of raw bytes: text with trailing NULs, NaT and bent booleans compare bit by bit."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, -1)


def _same_nonfinite(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    same = np.ones(x.shape, bool)
    for part in (np.real, np.imag) if x.dtype.kind == "c" else (np.real,):
        p, q = part(x), part(y)
        # The finite half of a complex with one non-finite half has to be equal.
        same &= (p == q) | (np.isnan(p) & np.isnan(q))
    return same


def _scale(magnitude: Any, size: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """M for every element, never below max(|a|, |b|); a corrupt or ill-shaped M is not used."""
    if magnitude is None:
        return size
    try:
        scale = np.abs(np.asarray(magnitude, np.float64))
        wider = np.maximum(size, np.where(np.isfinite(scale), scale, 0.0))
    except (TypeError, ValueError):
        return size
    return np.asarray(wider) if wider.shape == size.shape else size


def _relative(error: np.ndarray[Any, Any], size: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """error / size, 0 where both are 0 and inf where only the size is."""
    ratio: np.ndarray[Any, Any] = np.divide(error, size)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    return np.where(error == 0, 0.0, ratio)
