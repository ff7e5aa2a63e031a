"""Failure domains, their lanes, and the resource labels that carry placement.

A *domain* is what fails together: a host, a GPU or a worker process. Domains are dealt into a
small fixed number of *lanes*, so that "apart from" needs one label per lane and not one per pair
of domains. Two domains count as apart when their lanes differ; with no more domains than lanes
every domain has a lane of its own.

Labels are resources of quantity zero: a task that requires zero of a label may run only where
the label is advertised, and consumes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dask_sdc.exceptions import InputError, NoDomainError

#: Kinds of failure domain, from the coarsest to the finest, that "auto" chooses from.
AUTO_KINDS = ("host", "gpu", "worker")
KINDS = ("auto", *AUTO_KINDS, "custom")
#: Three voices are needed before anybody is accused, hence three domains and three lanes.
MIN_DOMAINS = 3
DEFAULT_LANES = 16


@dataclass(frozen=True, slots=True)
class Identity:
    """Where a worker runs, as it reports itself.

    Parameters
    ----------
    address : str
        Worker address; changes when a nanny restarts the worker.
    name : str
        Worker name on the scheduler; equal to the address where the user gave none.
    host : str
        Host name or IP address.
    pid : int
        Process id of the worker.
    nanny : str or None
        Address of its nanny.
    nthreads : int
        Threads, that is tasks at a time.
    gpus : tuple of str
        UUIDs of the visible GPUs; the first is the one that the worker computes on.
    custom : str or None
        Domain given by the user's callable, for kind "custom".
    """

    address: str
    name: str = ""
    host: str = ""
    pid: int = 0
    nanny: str | None = None
    nthreads: int = 1
    gpus: tuple[str, ...] = ()
    custom: str | None = None


def _worker_id(identity: Identity) -> str:
    """Name, nanny or address: the most lasting of them, so that a restart keeps the id."""
    if identity.name and identity.name != identity.address:
        return identity.name
    return identity.nanny or identity.address


def _host_id(identity: Identity) -> str:
    if not identity.host:
        raise InputError(f"worker {identity.address}: expected a host for domain kind 'host', got none")
    return identity.host


def _gpu_id(identity: Identity) -> str:
    # A worker without a GPU shares none, so it is a domain of its own.
    return identity.gpus[0] if identity.gpus else _worker_id(identity)


def _custom_id(identity: Identity) -> str:
    if not identity.custom:
        raise InputError(
            f"worker {identity.address}: expected a non-empty str for domain kind 'custom',"
            f" got {identity.custom!r}"
        )
    return identity.custom


_IDS: dict[str, Callable[[Identity], str]] = {
    "worker": _worker_id,
    "host": _host_id,
    "gpu": _gpu_id,
    "custom": _custom_id,
}


def choose_kind(identities: Iterable[Identity]) -> tuple[str, str]:
    """Choose the coarsest kind of domain that still gives three domains.

    Parameters
    ----------
    identities : iterable of Identity
        The live workers.

    Returns
    -------
    kind : str
        "host", "gpu" or "worker". GPUs are considered only if every worker has one.
    note : str
        One line that says what was chosen and why.
    """
    workers = list(identities)
    counts = {"worker": len({_worker_id(w) for w in workers})}
    if workers and all(w.gpus for w in workers):
        counts["gpu"] = len({_gpu_id(w) for w in workers})
    if workers and all(w.host for w in workers):
        counts["host"] = len({w.host for w in workers})
    seen = ", ".join(f"{counts[kind]} {kind}(s)" for kind in AUTO_KINDS if kind in counts)
    for kind in AUTO_KINDS:
        if counts.get(kind, 0) >= MIN_DOMAINS:
            return kind, f"domains are {kind}s: the coarsest kind that gives {MIN_DOMAINS} domains of {seen}"
    return "worker", (
        f"domains are workers: no kind gives {MIN_DOMAINS} domains of {seen}, "
        f"and with fewer nobody is accused; start {MIN_DOMAINS} workers or more"
    )


def domain_label(domain: str) -> str:
    """Return the label that every worker of ``domain`` advertises."""
    return f"sdc-domain-{domain}"


def apart_label(lane: int) -> str:
    """Return the label that every worker outside of ``lane`` advertises."""
    return f"sdc-apart-{lane}"


def apart_labels(lane: int, lanes: int) -> tuple[str, ...]:
    """Return the labels that a worker in ``lane`` advertises: one for every other lane."""
    return tuple(apart_label(other) for other in range(lanes) if other != lane)


def restrictions(domain: str | None = None, apart_from: Iterable[int] = ()) -> dict[str, float]:
    """Build the resource restrictions of one task.

    Parameters
    ----------
    domain : str, optional
        Domain in which the task must run: a sampled primary, a rerun, a pinned audit.
    apart_from : iterable of int
        Lanes from which it must be apart: the primary's for an audit, both for a witness.

    Returns
    -------
    dict of str to float
        Labels with quantity zero.
    """
    wanted = {apart_label(lane): 0.0 for lane in sorted(set(apart_from))}
    if domain is not None:
        wanted[domain_label(domain)] = 0.0
    return wanted


class DomainMap:
    """Which worker belongs to which failure domain, and which domains are apart.

    Parameters
    ----------
    identities : iterable of Identity
        The live workers; the order in which domains first appear deals the lanes.
    kind : {"auto", "host", "gpu", "worker", "custom"}
        What a domain is. "auto" is settled here, once, by `choose_kind`: later joins and
        departures never change the meaning of an id.
    lanes : int
        Number of lanes, at least 3.

    Attributes
    ----------
    kind : str
        The settled kind, never "auto".
    lanes : int
        Number of lanes.
    note : str
        What was chosen and why.

    Raises
    ------
    InputError
        For an unknown kind, too few lanes, or a worker that lacks what the kind needs.
    """

    def __init__(
        self, identities: Iterable[Identity] = (), kind: str = "auto", lanes: int = DEFAULT_LANES
    ) -> None:
        if kind not in KINDS:
            raise InputError(f"domain kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        if isinstance(lanes, bool) or not isinstance(lanes, int) or lanes < MIN_DOMAINS:
            raise InputError(f"lanes: expected an int of at least {MIN_DOMAINS}, got {lanes!r}")
        workers = list(identities)
        asked = (kind, f"domains are of kind {kind}, as asked")
        self.kind, self.note = choose_kind(workers) if kind == "auto" else asked
        self.lanes = lanes
        self._identities: dict[str, Identity] = {}
        self._domain: dict[str, str] = {}
        self._members: dict[str, dict[str, int]] = {}
        self._lane: dict[str, int] = {}
        self._live = [0] * lanes
        self._dealt = [0] * lanes
        for identity in workers:
            self.add(identity)

    # -- workers ----------------------------------------------------------------------------

    def add(self, identity: Identity) -> str:
        """Add a worker, or replace what is known of it, and return its domain."""
        domain = _IDS[self.kind](identity)
        self.remove(identity.address)
        if domain not in self._lane:
            self._lane[domain] = self._next_lane()
            self._dealt[self._lane[domain]] += 1
        if domain not in self._members:
            self._members[domain] = {}
            self._live[self._lane[domain]] += 1
        self._identities[identity.address] = identity
        self._domain[identity.address] = domain
        self._members[domain][identity.address] = identity.nthreads
        return domain

    def _next_lane(self) -> int:
        # Emptiest first; among equals the one dealt least often, so that the lane of a domain
        # that left is kept free for its return as long as there are others.
        return min(range(self.lanes), key=lambda lane: (self._live[lane], self._dealt[lane], lane))

    def remove(self, address: str) -> str | None:
        """Remove a worker; return its domain, or None if it was not there.

        The domain keeps its lane for the day on which it comes back.
        """
        domain = self._domain.pop(address, None)
        if domain is None:
            return None
        del self._identities[address]
        members = self._members[domain]
        del members[address]
        if not members:
            del self._members[domain]
            self._live[self._lane[domain]] -= 1
        return domain

    def __contains__(self, address: str) -> bool:
        return address in self._domain

    def identity(self, address: str) -> Identity:
        """Return what the live worker at ``address`` said of itself."""
        self.domain(address)
        return self._identities[address]

    def domain(self, address: str) -> str:
        """Return the domain of a live worker.

        Raises
        ------
        NoDomainError
            If no live worker has this address.
        """
        try:
            return self._domain[address]
        except KeyError:
            raise NoDomainError(
                f"worker {address}: expected one of {len(self._domain)} live workers, it is not among them"
            ) from None

    # -- domains ----------------------------------------------------------------------------

    @property
    def domains(self) -> tuple[str, ...]:
        """Live domains, in the order in which they came to life."""
        return tuple(self._members)

    def is_live(self, domain: str) -> bool:
        """Say whether the domain has a live worker."""
        return domain in self._members

    def addresses(self, domain: str) -> tuple[str, ...]:
        """Return the live workers of a domain; none if it has left."""
        return tuple(self._members.get(domain, ()))

    def slots(self, domain: str) -> int:
        """Return the threads of a domain; 0 if it has left."""
        return sum(self._members.get(domain, {}).values())

    def lane(self, domain: str) -> int:
        """Return the lane of a domain that is or was there.

        Raises
        ------
        NoDomainError
            If the domain was never seen.
        """
        try:
            return self._lane[domain]
        except KeyError:
            raise NoDomainError(f"domain {domain!r}: expected one that has been seen, it has not") from None

    def live_lanes(self) -> dict[str, int]:
        """Return the lane of every live domain."""
        return {domain: self._lane[domain] for domain in self._members}

    def apart(self, one: str, other: str) -> bool:
        """Say whether two domains may check each other, that is whether their lanes differ."""
        return self.lane(one) != self.lane(other)

    def apart_from(self, domains: Iterable[str]) -> tuple[str, ...]:
        """Return the live domains that are apart from all of ``domains``; O(live domains)."""
        barred = {self.lane(domain) for domain in domains}
        return tuple(domain for domain in self._members if self._lane[domain] not in barred)

    def has_apart(self, domains: Iterable[str]) -> bool:
        """Say whether any live domain is apart from all of ``domains``; O(lanes)."""
        barred = {self.lane(domain) for domain in domains}
        return any(count and lane not in barred for lane, count in enumerate(self._live))

    # -- labels -----------------------------------------------------------------------------

    def labels(self, address: str) -> dict[str, float]:
        """Return the labels, of quantity zero, that a live worker advertises."""
        domain = self.domain(address)
        return dict.fromkeys((domain_label(domain), *apart_labels(self._lane[domain], self.lanes)), 0.0)

    def restrictions(self, domain: str | None = None, apart_from: Iterable[str] = ()) -> dict[str, float]:
        """Build the restrictions of a task in ``domain`` and apart from other domains.

        Parameters
        ----------
        domain : str, optional
            Domain in which the task must run.
        apart_from : iterable of str
            Domains from which it must be apart: the primary's for an audit, the primary's and
            the audit's for a witness.

        Returns
        -------
        dict of str to float
            Labels with quantity zero.

        Raises
        ------
        NoDomainError
            If no live worker advertises all of these labels: the task would wait for ever.
        """
        lanes = {self.lane(other) for other in apart_from}
        if domain is None:
            possible = any(count and lane not in lanes for lane, count in enumerate(self._live))
        else:
            possible = domain in self._members and self._lane[domain] not in lanes
        if not possible:
            raise NoDomainError(
                f"expected a live domain{'' if domain is None else f' {domain!r}'} apart from lanes"
                f" {sorted(lanes)}, got none among {len(self._members)} live domains"
            )
        return restrictions(domain, lanes)
