"""Code of a user that runs on a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from dask_sdc.graph.execute import contained


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration(4)])
def test_what_would_end_more_than_a_call_is_an_error_of_that_call(error: BaseException) -> None:
    def quits() -> None:
        raise error

    async def check() -> None:
        # In a thread: no future takes a StopIteration, and the loop of a worker ends with a SystemExit.
        with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
            await asyncio.wait_for(asyncio.to_thread(contained, quits), 10)
        assert caught.value.__cause__ is error

    asyncio.run(check())


@pytest.mark.parametrize("work", [lambda: [][0], lambda: int("x"), lambda: b"\xff".decode()])
def test_any_other_error_comes_through(work: Callable[[], object]) -> None:
    with pytest.raises((IndexError, ValueError)):
        contained(work)


def test_results_come_through() -> None:
    assert contained(divmod, 7, 2) == (3, 1)
