"""Workers that fell silent: who may be innocent, and when each is asked again."""

from __future__ import annotations

import pytest

from dask_sdc.inference.ops import RecoveryReport
from dask_sdc.inference.pipeline import crew
from dask_sdc.inference.pipeline.crew import Rests, _silent
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
