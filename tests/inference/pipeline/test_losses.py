"""Stages that die or freeze on real processes: the tokens are those of an unfailed run."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from distributed import Client

from dask_sdc.exceptions import NoSpareError
from dask_sdc.inference.pipeline import Pipeline
from dask_sdc.inference.session import LossKind
from dask_sdc.inference.speculative import NGramDrafter
from dask_sdc.inference.weights.store import WeightStore
from tests.cluster.waiting import until
from tests.inference.pipeline.models import PROMPT, generated

STAGES, TOKENS = 3, 24


@pytest.fixture
def client(fresh_cluster: Callable[[int], Client]) -> Client:
    return fresh_cluster(5)


@contextlib.contextmanager
def signalled(client: Client, address: str, number: int) -> Iterator[None]:
    """Send a signal to a worker's process, which is killed at the end."""
    pid = client.run(os.getpid, workers=[address])[address]
    os.kill(pid, number)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_lost_stage_changes_no_token(
    client: Client, folder: Path, store: WeightStore, stage: int, number: int
) -> None:
    expected = generated(store, PROMPT, TOKENS)
    with contextlib.ExitStack() as stack:
        pipeline = stack.enter_context(Pipeline(client, folder, stages=STAGES, spares=1, timeout=3.0))
        before = pipeline.workers
        tokens = []
        for token in pipeline.stream(PROMPT, TOKENS):
            tokens.append(token)
            if len(tokens) == 9:
                stack.enter_context(signalled(client, before[stage], number))
        assert tuple(tokens) == expected
        [report] = pipeline.recoveries
        assert [(loss.stage, loss.kind) for loss in report.losses] == [(stage, LossKind.UNREACHABLE)]
        after = pipeline.workers
        assert [k for k in range(STAGES) if before[k] != after[k]] == [stage]
        assert report.replays[0].exact


def test_a_worker_that_thaws_is_a_spare_again(
    fresh_cluster: Callable[[int], Client], folder: Path, store: WeightStore
) -> None:
    client, expected = fresh_cluster(STAGES + 1), generated(store, PROMPT, TOKENS)
    with Pipeline(client, folder, stages=STAGES, spares=1, timeout=3.0) as pipeline:
        frozen, other = pipeline.workers[1:]
        pid = client.run(os.getpid, workers=[frozen])[frozen]
        tokens = []
        for token in pipeline.stream(PROMPT, TOKENS):
            tokens.append(token)
            if len(tokens) == 9:
                os.kill(pid, signal.SIGSTOP)
        assert tuple(tokens) == expected
        assert frozen not in (*pipeline.workers, *pipeline.spares)
        os.kill(pid, signal.SIGCONT)
        until(lambda: frozen in pipeline.spares)
        with signalled(client, other, signal.SIGSTOP):
            assert pipeline.generate(PROMPT, TOKENS).ids == expected
        assert pipeline.workers[1:] == (pipeline.workers[1], frozen)


def test_two_stages_lost_at_once_and_a_drafter(client: Client, folder: Path, store: WeightStore) -> None:
    prompt = (5, 6, 7, 8) * 5
    expected = generated(store, prompt, TOKENS, temperature=0.6, seed=5)
    with contextlib.ExitStack() as stack:
        pipeline = stack.enter_context(
            Pipeline(
                client, folder, stages=STAGES, spares=2, timeout=5.0, drafter=NGramDrafter(width=4), depth=2
            )
        )
        before = pipeline.workers
        tokens = []
        for token in pipeline.stream(prompt, TOKENS, temperature=0.6, seed=5):
            tokens.append(token)
            if len(tokens) == 7:
                for stage in (1, 2):
                    stack.enter_context(signalled(client, before[stage], signal.SIGKILL))
        assert tuple(tokens) == expected
        assert {loss.stage for report in pipeline.recoveries for loss in report.losses} == {1, 2}
        assert pipeline.workers[0] == before[0]


def test_without_a_spare_the_error_carries_what_a_later_call_goes_on_from(
    client: Client, folder: Path, store: WeightStore
) -> None:
    expected = generated(store, PROMPT, TOKENS)
    with contextlib.ExitStack() as stack:
        pipeline = stack.enter_context(Pipeline(client, folder, stages=5, spares=0, timeout=5.0))
        tokens = []
        with pytest.raises(NoSpareError) as caught:
            for token in pipeline.stream(PROMPT, TOKENS):
                tokens.append(token)
                if len(tokens) == 9:
                    stack.enter_context(signalled(client, pipeline.workers[2], signal.SIGKILL))
        assert caught.value.stage == 2
        committed = tuple(caught.value.committed)
        assert committed == expected[: len(committed)]
        assert len(committed) >= 9
        checkpoint = caught.value.checkpoint
    with Pipeline(client, folder, stages=2, spares=0) as pipeline:
        rest = pipeline.generate(PROMPT, TOKENS - len(committed), resume=checkpoint)
        assert committed + rest.ids == expected
