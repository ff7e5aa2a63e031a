"""Workers that fell silent or failed: who may be innocent, when each is asked again, and for what."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dask_sdc.inference.ops import RecoveryReport
from dask_sdc.inference.pipeline import crew
from dask_sdc.inference.pipeline.crew import Crew, Rests, _silent
from dask_sdc.inference.pipeline.ops import Ring
from dask_sdc.inference.session import Loss, LossKind


def test_a_worker_that_stays_silent_is_asked_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(crew.time, "monotonic", lambda: now)
    rests, waited = Rests(), []
    for _ in range(10):
        rests.note("a")
        began = now
        while not rests.due:
            now += 1.0
        waited.append(now - began - 1.0)
    assert waited == [3, 6, 12, 24, 48, 96, 192, 384, 600, 600]
    rests.over("a")
    assert not rests.due
    rests.note("a")  # it answered in between, and is trusted no sooner for that
    now += 600.0
    assert not rests.due
    rests.forget("a")
    rests.note("a")
    now += 3.5
    assert rests.due == ["a"]


@pytest.mark.parametrize("kind", LossKind)
def test_only_who_did_not_answer_or_lost_a_message_may_be_innocent(kind: LossKind) -> None:
    innocent = kind in ("unreachable", "stale", "gap", "unreturned")
    first, spare = Loss(1, kind, 4), Loss(1, LossKind.UNREACHABLE, 9)
    report = RecoveryReport(
        3, 1, (first, spare, Loss(2, LossKind.EVICTED)), refused={"s": str(spare), "t": "load of stage 1: no"}
    )
    assert _silent(report, ["a", "b", "c"]) == ({"b", "s"} if innocent else {"s"})


class Cluster:
    """Session and routes of workers that answer or do not, and what they were asked."""

    def __init__(self, *there: str) -> None:
        self.there, self.frozen, self.asked = list(there), set[str](), list[tuple[str, str]]()

    def locate(self, address: str) -> str | None:
        return address if address in self.there else None

    def addresses(self) -> list[str]:
        return self.there

    async def alive(self, address: str, patience: float) -> bool:
        return address not in self.frozen

    async def call(self, address: str, method: str, **arguments: Any) -> None:
        if address in self.frozen:
            raise TimeoutError
        self.asked.append((address, method))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster("a", "b", "s", "t")


@pytest.fixture
def crew_of(cluster: Cluster) -> Crew:
    """Stages on a and b, a whole spare s, and t that has nothing."""
    routes: Any = cluster
    made = Crew(routes, routes, 1, "memory", lambda work: None, 1.0)
    made.ring = Ring("p", routes, [b"", b""], [SimpleNamespace()] * 2, "topic")  # type: ignore[list-item]
    made.ring.addresses = ["a", "b"]
    made._prepared = {"s": {0: "memory", 1: "memory"}}
    return made


def rested(made: Crew) -> None:
    """Let the time pass for which silent workers are left alone."""
    made._silent._due = dict.fromkeys(made._silent._due, time.monotonic() - 1.0)


def test_a_holder_that_misses_a_call_of_an_audit_keeps_its_stage(cluster: Cluster, crew_of: Crew) -> None:
    async def check() -> None:
        cluster.frozen = {"b"}
        assert not await crew_of.answers("b")
        cluster.frozen = set()
        rested(crew_of)
        await crew_of._ask_the_silent()
        assert cluster.asked == []
        assert crew_of.ring is not None and not crew_of.ring.shunned

    asyncio.run(check())


def test_a_spare_that_misses_a_call_is_missed_and_taken_back(cluster: Cluster, crew_of: Crew) -> None:
    async def check() -> None:
        ring = crew_of.ring
        assert ring is not None
        assert crew_of.spares == ("s",) and not crew_of._short()
        cluster.frozen = {"s"}
        assert not await crew_of.answers("s")
        assert crew_of.spares == () and crew_of._short()
        rested(crew_of)
        await crew_of._ask_the_silent()  # in vain
        assert ring.shunned == {"s"} and cluster.asked == []
        cluster.frozen = set()
        rested(crew_of)
        await crew_of._ask_the_silent()
        assert cluster.asked == [("s", "leave")] and not ring.shunned
        assert crew_of.spares == ("s",) and not crew_of._short()

    asyncio.run(check())


def test_whoever_was_condemned_is_not_taken_back(cluster: Cluster, crew_of: Crew) -> None:
    async def check() -> None:
        ring = crew_of.ring
        assert ring is not None
        # Stage 0 was evicted by an audit, and did not answer either; stage 1 failed after it lost a message.
        losses = (
            Loss(0, LossKind.UNREACHABLE),
            Loss(1, LossKind.GAP),
            Loss(1, LossKind.FAILED, detail="journal: damaged"),
        )
        ring.addresses = ["s", "t"]
        crew_of.note(RecoveryReport(2, 1, losses, {0: "s", 1: "t"}), ["a", "b"], {0})
        assert ring.shunned == ring.condemned == {"a", "b"}
        # A worker fell silent, and was named afterwards.
        cluster.there += ["u"]
        cluster.frozen = {"u"}
        assert not await crew_of.answers("u")
        cluster.frozen = set()
        ring.condemn("u")
        rested(crew_of)
        await crew_of._ask_the_silent()
        assert cluster.asked == [] and "u" in ring.shunned
        ring.pardon({"a"})
        assert ring.shunned == ring.condemned == {"b", "u"}

    asyncio.run(check())


def test_whoever_was_only_silent_is_taken_back_also_after_a_recovery_that_failed(
    cluster: Cluster, crew_of: Crew
) -> None:
    async def check() -> None:
        ring = crew_of.ring
        assert ring is not None
        ring.addresses = ["s", "b"]  # a was replaced; for b there was no spare
        ring.shunned = {"a"}
        losses = (Loss(0, LossKind.UNREACHABLE), Loss(1, LossKind.UNREACHABLE))
        crew_of.note(RecoveryReport(2, 1, losses, {0: "s"}), ["a", "b"], set())
        assert ring.shunned == {"a"} and not ring.condemned
        rested(crew_of)
        await crew_of._ask_the_silent()
        assert cluster.asked == [("a", "leave")] and not ring.shunned

    asyncio.run(check())
