from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError, NoDomainError
from dask_sdc.policy.domains import (
    DomainMap,
    Identity,
    apart_labels,
    choose_kind,
    domain_label,
    restrictions,
)


def worker(
    i: int, *, host: str = "h", gpu: str | None = None, threads: int = 1, custom: str | None = None
) -> Identity:
    gpus = () if gpu is None else (gpu,)
    return Identity(
        f"tcp://{host}:{4000 + i}", f"w{i}", host, 100 + i, f"tcp://{host}:{5000 + i}", threads, gpus, custom
    )


def hosts(n: int, per_host: int = 1) -> list[Identity]:
    return [worker(i, host=f"h{i // per_host}") for i in range(n * per_host)]


# -- what a domain is


@pytest.mark.parametrize(
    ("workers", "kind"),
    [
        (hosts(3, per_host=2), "host"),
        (hosts(2, per_host=2), "worker"),
        ([worker(i, host="h0") for i in range(4)], "worker"),
        ([worker(i, host="h0", gpu=f"GPU-{i // 2}") for i in range(6)], "gpu"),
        ([worker(i, host="h0", gpu=f"GPU-{i // 3}") for i in range(6)], "worker"),
        ([worker(i, host=f"h{i}", gpu=f"GPU-{i}") for i in range(3)], "host"),
        # one worker without a GPU: GPUs do not tell all workers apart
        ([*(worker(i, host="h0", gpu=f"GPU-{i}") for i in range(3)), worker(9, host="h0")], "worker"),
        ([worker(0)], "worker"),
        ([], "worker"),
    ],
)
def test_auto_takes_the_coarsest_kind_that_gives_three(workers: list[Identity], kind: str) -> None:
    chosen, note = choose_kind(workers)
    assert chosen == kind == DomainMap(workers).kind
    assert kind in note and DomainMap(workers).note == note


@pytest.mark.parametrize(
    ("identity", "kind", "domain"),
    [
        (worker(3), "worker", "w3"),
        (Identity("tcp://a:1", "tcp://a:1", "a", 7, "tcp://a:2"), "worker", "tcp://a:2"),
        (Identity("tcp://a:1", "tcp://a:1", "a", 7), "worker", "tcp://a:1"),
        (Identity("tcp://a:1"), "worker", "tcp://a:1"),
        (worker(3, host="node7"), "host", "node7"),
        (worker(3, gpu="GPU-1"), "gpu", "GPU-1"),
        (worker(3), "gpu", "w3"),
        (worker(3, custom="rack 1"), "custom", "rack 1"),
    ],
)
def test_domain_ids(identity: Identity, kind: str, domain: str) -> None:
    assert DomainMap([identity], kind).domain(identity.address) == domain


def test_nanny_restart_keeps_domain_and_lane() -> None:
    domains = DomainMap(hosts(4), "worker")
    lane = domains.lane("w1")
    assert domains.remove("tcp://h1:4001") == "w1"
    assert not domains.is_live("w1") and domains.slots("w1") == 0 and domains.addresses("w1") == ()
    assert domains.lane("w1") == lane  # remembered: a task may still be in flight
    domains.add(Identity("tcp://h9:1", "w9", "h9"))
    back = Identity("tcp://h1:6666", "w1", "h1", 999, "tcp://h1:5001")
    assert domains.add(back) == "w1" and domains.lane("w1") == lane
    assert domains.identity("tcp://h1:6666") == back
    assert domains.lane("w9") != lane


def test_two_workers_of_one_domain() -> None:
    domains = DomainMap(
        [worker(0, host="a", threads=2), worker(1, host="a", threads=3), worker(2, host="b")], "host"
    )
    assert domains.domains == ("a", "b") and domains.slots("a") == 5
    assert domains.addresses("a") == ("tcp://a:4000", "tcp://a:4001")
    domains.remove("tcp://a:4000")
    assert domains.is_live("a") and domains.slots("a") == 3
    domains.add(worker(1, host="a", threads=8))  # the same worker says something new
    assert domains.slots("a") == 8 and len(domains.addresses("a")) == 1


def test_a_worker_that_says_something_new_moves() -> None:
    domains = DomainMap([worker(0, custom="x"), worker(1, custom="y")], "custom")
    assert domains.add(worker(0, custom="z")) == "z"
    assert domains.domains == ("y", "z") and domains.slots("x") == 0
    assert not domains.has_apart(["y", "z"])


# -- lanes


@given(n=st.integers(1, 40), lanes=st.integers(3, 20))
def test_few_domains_never_share_a_lane_and_many_share_evenly(n: int, lanes: int) -> None:
    domains = DomainMap(hosts(n), "host", lanes)
    dealt = [domains.lane(d) for d in domains.domains]
    if n <= lanes:
        assert len(set(dealt)) == n
    counts = [dealt.count(lane) for lane in range(lanes)]
    assert max(counts) - min(counts) <= 1


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=120),
    st.integers(3, 8),
)
def test_joins_and_departures_keep_every_invariant(events: list[tuple[bool, int]], lanes: int) -> None:
    domains = DomainMap([], "host", lanes)
    present: dict[str, str] = {}
    known: dict[str, int] = {}
    for joins, i in events:
        identity = worker(i, host=f"h{i % 10}")
        if joins:
            present[identity.address] = domains.add(identity)
        else:
            assert domains.remove(identity.address) == present.pop(identity.address, None)
        live = set(present.values())
        assert set(domains.domains) == live == set(domains.live_lanes())
        for domain in live:
            assert known.setdefault(domain, domains.lane(domain)) == domains.lane(domain)
            assert domains.slots(domain) == list(present.values()).count(domain)
        for domain in known:
            apart = set(domains.apart_from([domain]))
            assert apart == {d for d in live if known[d] != known[domain]}
            assert domains.has_apart([domain]) == bool(apart)
            assert all(domains.apart(domain, d) for d in apart)


# -- labels


def matches(wanted: dict[str, float], advertised: dict[str, float]) -> bool:
    return all(label in advertised and advertised[label] >= wanted[label] for label in wanted)


@given(n=st.integers(3, 24), lanes=st.integers(3, 8), data=st.data())
def test_restrictions_admit_exactly_the_right_workers(n: int, lanes: int, data: st.DataObject) -> None:
    domains = DomainMap(hosts(n, per_host=2), "host", lanes)
    first, second = data.draw(st.permutations(domains.domains))[:2]

    def admitted(wanted: dict[str, float]) -> set[str]:
        assert set(wanted.values()) <= {0.0}
        addresses = [a for d in domains.domains for a in domains.addresses(d)]
        return {domains.domain(a) for a in addresses if matches(wanted, domains.labels(a))}

    assert admitted(domains.restrictions(first)) == {first}
    assert admitted(domains.restrictions()) == set(domains.domains)
    audits = set(domains.apart_from([first]))
    assert admitted(domains.restrictions(apart_from=[first])) == audits
    witnesses = set(domains.apart_from([first, second]))
    if witnesses:
        assert admitted(domains.restrictions(apart_from=[first, second])) == witnesses
        pinned = min(witnesses)
        assert admitted(domains.restrictions(pinned, [first, second])) == {pinned}
    assert witnesses == {d for d in domains.domains if domains.apart(d, first) and domains.apart(d, second)}


def test_labels_have_their_documented_names() -> None:
    assert domain_label("h0") == "sdc-domain-h0"
    assert apart_labels(1, 4) == ("sdc-apart-0", "sdc-apart-2", "sdc-apart-3")
    assert restrictions("h0", [2, 0, 2]) == {"sdc-apart-0": 0.0, "sdc-apart-2": 0.0, "sdc-domain-h0": 0.0}
    domains = DomainMap(hosts(3), "host", 3)
    assert domains.labels("tcp://h1:4001") == {"sdc-domain-h1": 0, "sdc-apart-0": 0, "sdc-apart-2": 0}


def test_restrictions_that_nobody_meets_are_refused() -> None:
    domains = DomainMap(hosts(3), "host")
    with pytest.raises(NoDomainError, match="apart from lanes"):
        domains.restrictions(apart_from=["h0", "h1", "h2"])
    with pytest.raises(NoDomainError, match="'h1' apart from lanes"):
        domains.restrictions("h1", ["h1"])
    domains.remove("tcp://h2:4002")
    with pytest.raises(NoDomainError, match="'h2'"):
        domains.restrictions("h2")


# -- refusals


def test_bad_input_is_refused() -> None:
    with pytest.raises(InputError, match=r"expected one of auto.*got 'rack'"):
        DomainMap([], "rack")
    for lanes in (2, 0, True, 4.0):
        with pytest.raises(InputError, match="lanes: expected an int of at least 3"):
            DomainMap([], lanes=lanes)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"tcp://h:4000: expected a non-empty str .* got None"):
        DomainMap([worker(0)], "custom")
    with pytest.raises(InputError, match="expected a host"):
        DomainMap([Identity("tcp://a:1")], "host")


def test_strangers_are_named() -> None:
    domains = DomainMap(hosts(3))
    assert "tcp://h0:4000" in domains and "tcp://x:1" not in domains
    with pytest.raises(NoDomainError, match="tcp://x:1: expected one of 3 live workers"):
        domains.domain("tcp://x:1")
    with pytest.raises(NoDomainError, match="tcp://x:1"):
        domains.labels("tcp://x:1")
    with pytest.raises(NoDomainError, match="'nobody'"):
        domains.lane("nobody")
