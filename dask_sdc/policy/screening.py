"""Known-answer screening: compare what every domain made of the same short kernels.

All with all, kernel by kernel, among the domains of one environment: an outlier is named only
against a strict majority of at least two, among at least three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dask_sdc.exceptions import InputError
from dask_sdc.policy.verdict import INSUFFICIENT_WITNESSES, THREE_WAY_DISAGREEMENT

_LEAST = 3


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A kernel on which the domains of one environment disagree and nobody can be named."""

    fingerprint: str
    kernel: str
    domains: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Screening:
    """What a screening found.

    Attributes
    ----------
    outliers : tuple of (str, tuple of str)
        Every domain that is contradicted by a majority, with the kernels on which it is.
    unresolved : tuple of Unresolved
        Disagreements without a majority.
    unchecked : tuple of str
        Domains of which some kernel was compared with nobody.
    ailments : tuple of (str, tuple of str)
        Domains whose GPUs say of themselves that something is wrong with them. Nobody is a suspect for that.
    """

    outliers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    unresolved: tuple[Unresolved, ...] = ()
    unchecked: tuple[str, ...] = ()
    ailments: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def suspects(self) -> tuple[str, ...]:
        """The domains that are named."""
        return tuple(domain for domain, _ in self.outliers)

    def to_dict(self) -> dict[str, Any]:
        """Return the result in closed types."""
        return {
            "outliers": {domain: list(kernels) for domain, kernels in self.outliers},
            "unresolved": [{**asdict(one), "domains": list(one.domains)} for one in self.unresolved],
            "unchecked": list(self.unchecked),
            "ailments": {domain: list(found) for domain, found in self.ailments},
        }


def screen(results: Mapping[str, Mapping[str, bytes]], fingerprints: Mapping[str, str]) -> Screening:
    """Compare the digests of known-answer kernels of all domains.

    Parameters
    ----------
    results : mapping of str to (mapping of str to bytes)
        By domain, the digest of each kernel; a kernel that gave none is left out.
    fingerprints : mapping of str to str
        Environment of each domain; digests are comparable only within one.

    Returns
    -------
    Screening

    Raises
    ------
    InputError
        If the environment of a domain is not given.
    """
    if strangers := sorted(results.keys() - fingerprints.keys()):
        raise InputError(f"expected a fingerprint of every domain, got none of {', '.join(strangers)}")
    outliers: dict[str, list[str]] = {}
    unresolved: list[Unresolved] = []
    alone: set[str] = set()
    for (fingerprint, kernel), digests in sorted(_groups(results, fingerprints).items()):
        if len(digests) == 1:
            alone.update(digests)
        odd, reason = _odd(digests)
        for domain in odd:
            outliers.setdefault(domain, []).append(kernel)
        if reason:
            unresolved.append(Unresolved(fingerprint, kernel, tuple(sorted(digests)), reason))
    named = tuple((domain, tuple(kernels)) for domain, kernels in sorted(outliers.items()))
    return Screening(named, tuple(unresolved), tuple(sorted(alone)))


def _groups(
    results: Mapping[str, Mapping[str, bytes]], fingerprints: Mapping[str, str]
) -> dict[tuple[str, str], dict[str, bytes]]:
    """Group digests by environment and kernel, then by domain."""
    groups: dict[tuple[str, str], dict[str, bytes]] = {}
    for domain, digests in results.items():
        for kernel, digest in digests.items():
            groups.setdefault((fingerprints[domain], kernel), {})[domain] = digest
    return groups


def _odd(digests: Mapping[str, bytes]) -> tuple[Iterable[str], str]:
    """Return the domains outside of a majority, or the reason why there is none."""
    (digest, count), *others = Counter(digests.values()).most_common()
    if not others:
        return (), ""
    if len(digests) < _LEAST:
        return (), INSUFFICIENT_WITNESSES
    if 2 * count <= len(digests):
        return (), THREE_WAY_DISAGREEMENT
    return [domain for domain, other in digests.items() if other != digest], ""
