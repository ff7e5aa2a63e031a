"""Retries and the breaker: behaviour C.3, and what goes beyond it."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.recovery import Backoff, GenerationRecoveryGuard, SampleUnavailable


class Clock:
    """Seconds that only tests move on; sleeping moves them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


class Script:
    """An operation that raises or returns what it is told, call by call."""

    def __init__(self, outcomes: Iterable[Any]) -> None:
        self.outcomes = iter(outcomes)
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        outcome = next(self.outcomes)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def awaited(self) -> Any:
        await asyncio.sleep(0)
        return self()


def fail(guard: GenerationRecoveryGuard, times: int = 1) -> SampleUnavailable:
    """Have so many samples fail; return the last."""
    for _ in range(times):
        lost = guard.run(Script([ValueError("x")] * 9), description="sample")
    assert isinstance(lost, SampleUnavailable)
    return lost


def by_run(guard: GenerationRecoveryGuard, script: Script) -> Any:
    return guard.run(script, description="sample 7")


def by_run_async(guard: GenerationRecoveryGuard, script: Script) -> Any:
    return asyncio.run(guard.run_async(script.awaited, description="sample 7"))


both = pytest.mark.parametrize("run", [by_run, by_run_async])
Run = Callable[[GenerationRecoveryGuard, Script], Any]


# -- C.3 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("retries", "most"), [(-1, 1), (0, 0), (0, -1)])
def test_counts_out_of_range_are_value_errors(retries: int, most: int) -> None:
    with pytest.raises(InputError, match=r"expected (retries|max_consecutive_failures) to be \d or more"):
        GenerationRecoveryGuard(retries, most)
    assert issubclass(InputError, ValueError)


@pytest.mark.parametrize(("retries", "most"), [(True, 1), (0, True), (1.0, 1), (0, "2"), (None, 1)])
def test_counts_that_are_no_integers_are_refused(retries: Any, most: Any) -> None:
    with pytest.raises(InputTypeError, match="expected an integer"):
        GenerationRecoveryGuard(retries, most)


@both
@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_sample_gets_one_attempt_more_than_retries(run: Run, retries: int) -> None:
    script = Script([ValueError("broken")] * 9)
    lost = run(GenerationRecoveryGuard(retries, 5), script)
    assert script.calls == retries + 1
    assert lost == SampleUnavailable(lost.reason, True, 1, False)
    assert "sample 7" in lost.reason and "ValueError: broken" in lost.reason
    assert f"{retries + 1} attempt" in lost.reason


@both
def test_the_value_is_returned_as_soon_as_there_is_one(run: Run) -> None:
    script = Script([KeyError("a"), OSError("b"), "value", "too far"])
    assert run(GenerationRecoveryGuard(2, 1), script) == "value"
    assert script.calls == 3


@both
@pytest.mark.parametrize("value", [None, False, SampleUnavailable("stale cache")])
def test_any_value_is_a_success(run: Run, value: Any) -> None:
    guard = GenerationRecoveryGuard(0, 5)
    fail(guard, 2)
    assert run(guard, Script([value])) is value
    assert guard.consecutive_failures == 0


@both
def test_the_nth_failed_sample_in_a_row_is_fatal_and_so_are_later_ones(run: Run) -> None:
    guard = GenerationRecoveryGuard(1, 3)
    outcomes = [run(guard, Script([ValueError()] * 2)) for _ in range(5)]
    assert [lost.fatal for lost in outcomes] == [False, False, True, True, True]
    assert [lost.consecutive_failures for lost in outcomes] == [1, 2, 3, 4, 5]
    assert all(lost.counts_as_failure for lost in outcomes)
    # The breaker never opens by itself: the sixth is tried, and a success resets.
    assert run(guard, Script([ValueError(), "value"])) == "value"
    assert guard.consecutive_failures == 0
    assert not fail(guard).fatal


@both
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
def test_what_is_no_exception_passes_and_does_not_count(run: Run, error: type[BaseException]) -> None:
    guard = GenerationRecoveryGuard(3, 5)
    fail(guard, 2)
    script = Script([ValueError(), error()])
    with pytest.raises(error):
        run(guard, script)
    assert (script.calls, guard.consecutive_failures) == (2, 2)


def test_an_error_whose_text_cannot_be_had_is_still_caught() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    lost = GenerationRecoveryGuard(0, 1).run(Script([Mute()]), description="sample")
    assert isinstance(lost, SampleUnavailable) and "Mute" in lost.reason


def test_a_coroutine_function_is_refused_where_nobody_would_await_it() -> None:
    async def produce() -> int:
        return 1

    with pytest.raises(InputTypeError, match="run_async"):
        GenerationRecoveryGuard(0, 1).run(produce, description="sample")


# -- which exceptions, and how long between them ----------------------------------------------


@both
def test_what_is_not_worth_a_retry_is_not_tried_again(run: Run) -> None:
    guard = GenerationRecoveryGuard(5, 9, retry_on=lambda error: not isinstance(error, TypeError))
    script = Script([ValueError(), TypeError("wrong shape"), "value"])
    lost = run(guard, script)
    assert script.calls == 2
    assert "2 attempts failed" in lost.reason and "TypeError: wrong shape" in lost.reason
    assert lost.counts_as_failure and guard.consecutive_failures == 1


@both
def test_waits_grow_up_to_the_longest_and_there_is_none_after_the_last_attempt(run: Run) -> None:
    clock = Clock()
    guard = GenerationRecoveryGuard(
        4,
        9,
        backoff=Backoff(1.0, 3.0, 10.0, jitter=0.0),
        sleep=clock.sleep,
        sleep_async=clock.sleep_async,
    )
    run(guard, Script([ValueError()] * 5))
    assert clock.slept == [1.0, 3.0, 9.0, 10.0]


def test_without_backoff_nobody_sleeps() -> None:
    clock = Clock()
    fail(GenerationRecoveryGuard(4, 9, sleep=clock.sleep))
    assert clock.slept == []


@given(st.integers(1, 5000), st.floats(0, 1, exclude_max=True), st.floats(0, 1))
def test_jitter_only_shortens_waits(failed: int, draw: float, jitter: float) -> None:
    backoff = Backoff(0.1, 2.0, 30.0, jitter)
    planned = 0.1 * 2.0 ** min(failed - 1, 20)
    pause = backoff.pause(failed, draw)
    assert (1 - jitter) * min(30.0, planned) <= pause + 1e-12
    assert pause <= min(30.0, planned) * (1 + 1e-12)


def test_jitter_is_drawn_from_the_seed_and_differs_without_one() -> None:
    def waits(seed: int | None) -> list[float]:
        clock = Clock()
        fail(GenerationRecoveryGuard(5, 9, backoff=Backoff(seed=seed), sleep=clock.sleep))
        return clock.slept

    assert waits(3) == waits(3) != waits(4)
    assert waits(None) != waits(None)


@pytest.mark.parametrize(
    "wrong",
    [{"first": -1}, {"factor": 0.5}, {"longest": float("nan")}, {"jitter": 1.5}, {"first": float("inf")}],
)
def test_backoff_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(InputError, match=f"expected {name} within"):
        Backoff(**wrong)  # type: ignore[arg-type]


# -- the breaker -------------------------------------------------------------------------------


def breaker(clock: Clock, retries: int = 0) -> GenerationRecoveryGuard:
    return GenerationRecoveryGuard(retries, 2, cooldown=10.0, clock=clock)


@both
def test_an_open_breaker_refuses_without_a_trial(run: Run) -> None:
    clock = Clock()
    guard = breaker(clock)
    assert fail(guard, 2).fatal
    clock.now = 9.9
    script = Script(["value"])
    refused = run(guard, script)
    assert script.calls == 0
    assert refused == SampleUnavailable(refused.reason, False, 2, True)
    assert "sample 7: not tried" in refused.reason
    assert guard.consecutive_failures == 2


@both
def test_a_trial_that_succeeds_closes_the_breaker(run: Run) -> None:
    clock = Clock()
    guard = breaker(clock)
    fail(guard, 2)
    clock.now = 10.0
    assert run(guard, Script(["value"])) == "value"
    assert guard.consecutive_failures == 0
    assert run(guard, Script(["next"])) == "next"
    assert not fail(guard).fatal


def test_a_trial_that_fails_opens_the_breaker_again() -> None:
    clock = Clock()
    guard = breaker(clock, retries=1)
    fail(guard, 2)
    clock.now = 10.0
    script = Script([ValueError(), ValueError()])
    trial = guard.run(script, description="trial")
    assert script.calls == 2
    assert trial == SampleUnavailable(trial.reason, True, 3, True)  # type: ignore[union-attr]
    clock.now = 19.9
    assert "not tried" in fail(guard).reason
    clock.now = 20.0
    assert guard.run(lambda: "value", description="trial") == "value"


def test_exactly_one_trial_goes_through() -> None:
    clock = Clock()
    guard = breaker(clock)
    fail(guard, 2)
    clock.now = 10.0
    begun, go_on, tried = threading.Event(), threading.Event(), []

    def trial() -> str:
        tried.append(threading.get_ident())
        begun.set()
        assert go_on.wait(30)
        return "value"

    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(guard.run, trial, description="trial")
        assert begun.wait(30)
        others = [threads.submit(guard.run, trial, description="other") for _ in range(20)]
        refused = [other.result(30) for other in others]
        go_on.set()
        assert first.result(30) == "value"
    assert len(tried) == 1
    assert all(isinstance(lost, SampleUnavailable) and lost.fatal for lost in refused)


@both
def test_a_trial_that_is_interrupted_leaves_room_for_the_next(run: Run) -> None:
    clock = Clock()
    guard = breaker(clock)
    fail(guard, 2)
    clock.now = 10.0
    with pytest.raises(KeyboardInterrupt):
        run(guard, Script([KeyboardInterrupt()]))
    assert run(guard, Script(["value"])) == "value"


@pytest.mark.parametrize("cooldown", [-1.0, float("nan")])
def test_a_cooldown_out_of_range_is_refused(cooldown: float) -> None:
    with pytest.raises(InputError, match="cooldown"):
        GenerationRecoveryGuard(0, 1, cooldown=cooldown)


# -- threads and copies ------------------------------------------------------------------------


def test_no_failure_is_lost_or_counted_twice_between_threads() -> None:
    guard = GenerationRecoveryGuard(2, 50)
    with ThreadPoolExecutor(8) as threads:
        lost = list(threads.map(lambda _: fail(guard), range(400)))
    assert guard.consecutive_failures == 400
    assert sorted(sample.consecutive_failures for sample in lost) == list(range(1, 401))
    assert sum(sample.fatal for sample in lost) == 351


def test_a_copy_goes_on_counting_by_itself() -> None:
    guard = GenerationRecoveryGuard(1, 3, backoff=Backoff(first=0.0, seed=1))
    fail(guard, 2)
    copy = pickle.loads(pickle.dumps(guard))
    assert copy.consecutive_failures == 2
    assert fail(copy).fatal
    assert guard.consecutive_failures == 2
    assert copy.run(lambda: 1, description="x") == 1


class OtherClock(Clock):
    """A clock that knows nothing of that of the process which pickled it."""

    def __reduce__(self) -> Any:
        return OtherClock.started, ()

    @classmethod
    def started(cls) -> OtherClock:
        clock = cls()
        clock.now = -5000.0
        return clock


def test_a_copy_of_an_open_breaker_has_as_long_to_cool_down() -> None:
    clock = OtherClock()
    guard = GenerationRecoveryGuard(0, 1, cooldown=10.0, clock=clock)
    fail(guard)
    clock.now = 4.0
    copy = pickle.loads(pickle.dumps(guard))
    copy._clock.now += 5.9
    assert "not tried" in fail(copy).reason
    copy._clock.now += 0.2
    assert copy.run(lambda: "value", description="trial") == "value"
