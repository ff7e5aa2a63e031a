"""Retries of one sample, and a breaker that stops a rank whose samples all fail."""

from __future__ import annotations

import asyncio
import inspect
import logging
import operator
import random
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeVar

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.recovery.outcome import SampleUnavailable

logger = logging.getLogger("dask_sdc.recovery")

T = TypeVar("T")


@dataclass(frozen=True)
class Backoff:
    """How long to wait between two attempts.

    Parameters
    ----------
    first : float
        Seconds before the second attempt.
    factor : float
        By how much every further wait is longer, at least 1.
    longest : float
        Seconds that no wait exceeds.
    jitter : float
        Share of a wait, 0 to 1, that is drawn at random, so that ranks which failed together do not come
        back together.
    seed : int, optional
        Of that draw; copies of a guard with one seed draw alike. Fresh in every process without one.

    Raises
    ------
    InputError
        For a value out of its range.
    """

    first: float = 0.1
    factor: float = 2.0
    longest: float = 30.0
    jitter: float = 0.5
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, lowest, highest in (
            ("first", 0.0, float("inf")),
            ("factor", 1.0, float("inf")),
            ("longest", 0.0, float("inf")),
            ("jitter", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if not (isfinite(value) and lowest <= value <= highest):
                raise InputError(f"expected {name} within [{lowest}, {highest}], got {value!r}")

    def pause(self, failed: int, draw: float) -> float:
        """Return the seconds to wait.

        Parameters
        ----------
        failed : int
            Attempts at the sample so far, 1 or more.
        draw : float
            Uniform in [0, 1).

        Returns
        -------
        float
            Between ``1 - jitter`` and 1 times the planned wait.
        """
        try:
            planned = min(self.longest, self.first * self.factor ** (failed - 1))
        except OverflowError:
            planned = self.longest
        return planned * (1 - self.jitter * draw)


class GenerationRecoveryGuard:
    """Tries a sample several times, and says so where it cannot be had, instead of raising.

    One guard serves one rank, from any number of threads. A copy that was pickled goes on counting from
    where the original stood, on its own.

    Parameters
    ----------
    retries : int
        Attempts after the first one, 0 or more.
    max_consecutive_failures : int
        From this many failed samples in a row on, a failed sample is fatal; at least 1.
    retry_on : callable, optional
        ``f(exception) -> bool``: whether another attempt is worth it. Everything is without it.
    backoff : Backoff, optional
        Waits between attempts; none without it.
    cooldown : float, optional
        Seconds that the breaker stays open. A fatal sample opens it: calls return a fatal
        `SampleUnavailable` at once. After the cool-down one call goes through as a trial while others are
        still refused; its success closes the breaker, its failure opens it anew. Without it the breaker never
        opens, and every call is tried.
    clock : callable
        Seconds that only grow.
    sleep, sleep_async : callable
        What waits between attempts.

    Raises
    ------
    InputError
        For numbers out of their range, which is a ValueError.
    InputTypeError
        For a count that is no integer; bool is none.

    Examples
    --------
    >>> guard = GenerationRecoveryGuard(retries=2, max_consecutive_failures=20)
    >>> guard.run(lambda: 1 / 0, description="sample 7").reason
    'sample 7: 3 attempts failed, the last with ZeroDivisionError: division by zero'
    """

    def __init__(
        self,
        retries: int,
        max_consecutive_failures: int,
        *,
        retry_on: Callable[[Exception], bool] | None = None,
        backoff: Backoff | None = None,
        cooldown: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        sleep_async: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.retries = _at_least(0, "retries", retries)
        self.max_consecutive_failures = _at_least(1, "max_consecutive_failures", max_consecutive_failures)
        if cooldown is not None and not cooldown >= 0:
            raise InputError(f"expected a cooldown of 0 seconds or more, got {cooldown!r}")
        self._retry_on = retry_on
        self._backoff = backoff
        self._cooldown = cooldown
        self._clock = clock
        self._sleep = sleep
        self._sleep_async = sleep_async
        self._failures = 0
        # When the breaker opened, None while it is closed.
        self._opened: float | None = None
        self._make_local()

    def _make_local(self) -> None:
        """Make what belongs to this process alone."""
        self._lock = threading.Lock()
        self._trial = False
        self._draws = random.Random(None if self._backoff is None else self._backoff.seed)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = {k: v for k, v in vars(self).items() if k not in ("_lock", "_trial", "_draws")}
        if self._opened is not None:
            # Clocks of two processes have nothing in common; how long ago it was has.
            state["_opened"] = self._clock() - self._opened
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._opened is not None:
            self._opened = self._clock() - self._opened
        self._make_local()

    @property
    def consecutive_failures(self) -> int:
        """Samples in a row that could not be had."""
        with self._lock:
            return self._failures

    def run(self, operation: Callable[[], T], *, description: str) -> T | SampleUnavailable:
        """Make up to ``retries + 1`` attempts at a sample.

        Parameters
        ----------
        operation : callable
            Makes the sample, and checks it: the whole trip is tried again.
        description : str
            Names the sample in messages.

        Returns
        -------
        object or SampleUnavailable
            What the operation returned, or why there is nothing.

        Raises
        ------
        InputTypeError
            If the operation is a coroutine function; `run_async` takes those.
        BaseException
            What is no `Exception` passes and does not count: KeyboardInterrupt, SystemExit and
            asyncio.CancelledError among them.
        """
        if inspect.iscoroutinefunction(operation):
            raise InputTypeError(
                f"expected a plain function for {description}, got a coroutine: use run_async"
            )
        with _Attempts(self, description) as attempts:
            while attempts.unavailable is None:
                try:
                    return attempts.succeeded(operation())
                except Exception as error:
                    pause = attempts.failed(error)
                if pause:
                    self._sleep(pause)
        return attempts.unavailable

    async def run_async(
        self, operation: Callable[[], Awaitable[T]], *, description: str
    ) -> T | SampleUnavailable:
        """Do the same with an operation that is awaited.

        Parameters
        ----------
        operation : callable
            Returns an awaitable, a new one at every attempt.
        description : str
            Names the sample in messages.

        Returns
        -------
        object or SampleUnavailable
            What the operation returned, or why there is nothing.
        """
        with _Attempts(self, description) as attempts:
            while attempts.unavailable is None:
                try:
                    return attempts.succeeded(await operation())
                except Exception as error:
                    pause = attempts.failed(error)
                if pause:
                    await self._sleep_async(pause)
        return attempts.unavailable

    # -- the breaker -----------------------------------------------------------------------

    def _enter(self) -> bool | None:
        """Return whether a call is a trial of an open breaker, None if the breaker refuses it."""
        with self._lock:
            if self._opened is None or self._cooldown is None:
                return False
            if self._trial or self._clock() - self._opened < self._cooldown:
                return None
            self._trial = True
            return True

    def _leave(self) -> None:
        with self._lock:
            self._trial = False

    def _succeeded(self) -> None:
        with self._lock:
            self._failures = 0
            self._opened = None

    def _exhausted(self) -> tuple[int, bool]:
        """Count a sample that could not be had; return how many in a row, and whether that is fatal."""
        with self._lock:
            self._failures += 1
            fatal = self._failures >= self.max_consecutive_failures
            if fatal and self._cooldown is not None:
                self._opened = self._clock()
            return self._failures, fatal

    def _pause(self, failed: int, error: Exception) -> float | None:
        """Return the seconds before the next attempt, None if there is none."""
        if failed > self.retries or (self._retry_on is not None and not self._retry_on(error)):
            return None
        if self._backoff is None:
            return 0.0
        with self._lock:
            draw = self._draws.random()
        return self._backoff.pause(failed, draw)


class _Attempts:
    """The attempts at one sample, whether they are awaited or not.

    Attributes
    ----------
    unavailable : SampleUnavailable or None
        Set once there is no attempt left.
    """

    def __init__(self, guard: GenerationRecoveryGuard, description: str) -> None:
        self.unavailable: SampleUnavailable | None = None
        self._guard = guard
        self._description = description
        self._failed = 0

    def __enter__(self) -> _Attempts:
        self._trial = self._guard._enter()
        if self._trial is None:
            self.unavailable = SampleUnavailable(
                reason=f"{self._description}: not tried, too many samples in a row had failed",
                consecutive_failures=self._guard.consecutive_failures,
                fatal=True,
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Also when a KeyboardInterrupt passes: the next call is the trial then.
        if self._trial:
            self._guard._leave()

    def succeeded(self, value: T) -> T:
        self._guard._succeeded()
        return value

    def failed(self, error: Exception) -> float:
        """Note a failed attempt; return the seconds to wait before the next one, if there is one."""
        self._failed += 1
        text = "".join(traceback.format_exception_only(error)).strip()
        logger.info("%s: attempt %d failed: %s", self._description, self._failed, text)
        pause = self._guard._pause(self._failed, error)
        if pause is None:
            in_a_row, fatal = self._guard._exhausted()
            attempts = f"{self._failed} attempt{'s' if self._failed > 1 else ''} failed"
            reason = f"{self._description}: {attempts}, the last with {text}"
            self.unavailable = SampleUnavailable(reason, True, in_a_row, fatal)
            logger.warning("%s (%d samples in a row)", reason, in_a_row)
        return pause or 0.0


def _at_least(lowest: int, name: str, value: int) -> int:
    if isinstance(value, bool):
        raise InputTypeError(f"expected an integer for {name}, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError as error:
        raise InputTypeError(f"expected an integer for {name}, got {value!r}") from error
    if number < lowest:
        raise InputError(f"expected {name} to be {lowest} or more, got {number}")
    return number
