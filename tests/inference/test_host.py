"""What a host makes of stages that do not keep to themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.inference.host import Chunk, SessionSettings, StageHost
from dask_sdc.inference.stage import Stage

Array = np.ndarray[Any, Any]
CHUNKS = [np.full((2, 3, 4), float(k)) for k in range(1, 4)]


class AnyStage(Stage):
    """Adds nothing of its own to a function of a chunk and a dict."""

    digest, nbytes = "any", 0

    def __init__(self, function: Callable[[Array, dict[str, Any]], Any]) -> None:
        self.function = function

    def load(self) -> None:
        pass

    def init(self, *, batch: int = 1, capacity: int | None = None) -> dict[str, Any]:
        return {"position": 0}

    def forward(self, chunk: Array, state: dict[str, Any], *, rows: int | None = None) -> Any:
        state["position"] += chunk.shape[1]
        return self.function(chunk, state)

    def position(self, state: dict[str, Any]) -> int:
        return int(state["position"])

    def snapshot(self, state: dict[str, Any]) -> dict[str, Any]:
        return state


def host_of(function: Callable[[Array, dict[str, Any]], Any], *, tail: bool = False) -> StageHost:
    host = StageHost(AnyStage(function), 1, tail)
    host.open("s", SessionSettings(2, sampled=False))
    return host


def summed(chunk: Array, state: dict[str, Any]) -> Array:
    """Return the very buffer that is added to the next time."""
    total: Array = state.setdefault("sum", np.zeros_like(chunk))
    total += chunk
    return total


def doubled(chunk: Array, state: dict[str, Any]) -> Array:
    chunk *= 2
    return chunk


@pytest.mark.parametrize("tail", [False, True])
def test_outputs_outlive_the_buffers_of_a_stage(tail: bool) -> None:
    host = host_of(summed, tail=tail)
    outputs = [host.step(Chunk("s", k, 3 * k, array)) for k, array in enumerate(CHUNKS)]
    for output, expected in zip(outputs, (1.0, 3.0, 6.0), strict=True):
        np.testing.assert_array_equal(output.array, np.full((2, 3, 4), expected))


def test_a_stage_may_write_to_its_chunk_also_when_it_is_fed_again() -> None:
    """What is fed again comes out of messages that must not be written to."""
    first, again = host_of(doubled), host_of(doubled)
    expected = [first.step(Chunk("s", k, 3 * k, array)).record for k, array in enumerate(CHUNKS)]
    fixed = [array.copy() for array in CHUNKS]
    for array in fixed:
        array.flags.writeable = False
    made = again.replay([Chunk("s", k, 3 * k, array) for k, array in enumerate(fixed)], [3, 3, 3])
    assert made == expected
    np.testing.assert_array_equal(CHUNKS[0], np.full((2, 3, 4), 1.0))


def test_a_stage_sees_and_gives_one_memory_layout() -> None:
    seen = []

    def transposed(chunk: Array, state: dict[str, Any]) -> Array:
        seen.append(chunk.flags.c_contiguous)
        return np.asfortranarray(chunk)

    output = host_of(transposed).step(Chunk("s", 0, 0, np.asfortranarray(CHUNKS[0])))
    assert seen == [True]
    assert output.array is not None
    assert output.array.flags.c_contiguous


@pytest.mark.parametrize(
    ("made", "error", "match"),
    [
        (None, InputTypeError, "stage 1: expected an ndarray from forward, got NoneType"),
        ([[1.0]], InputTypeError, "got list"),
        (np.ma.masked_less(CHUNKS[0], 2), InputTypeError, "got MaskedArray"),
        (CHUNKS[0].astype(object), InputTypeError, "kind b, i, u, f or c.*got object"),
        (CHUNKS[0].astype(np.longdouble), InputTypeError, "64 bits per part at most"),
        (CHUNKS[0][:, :1], InputError, r"of shape \(2, 3, \.\.\.\), got \(2, 1, 4\)"),
        (CHUNKS[0][:1], InputError, r"got \(1, 3, 4\)"),
        (np.float64(1), InputTypeError, "got float64"),
        (CHUNKS[0][0, 0], InputError, r"got \(4,\)"),
    ],
)
def test_what_is_no_chunk_for_the_next_stage_is_refused(
    made: Any, error: type[Exception], match: str
) -> None:
    host = host_of(lambda chunk, state: made)
    with pytest.raises(error, match=match):
        host.step(Chunk("s", 0, 0, CHUNKS[0]))


def test_the_last_stage_may_give_other_positions() -> None:
    host = host_of(lambda chunk, state: chunk.mean(axis=1, keepdims=True), tail=True)
    output = host.step(Chunk("s", 0, 0, CHUNKS[1]))
    np.testing.assert_array_equal(output.array, np.full((2, 1, 4), 2.0))
    with pytest.raises(InputError, match=r"of shape \(2, positions, \.\.\.\), got \(1, 3, 4\)"):
        host_of(lambda chunk, state: chunk[:1], tail=True).step(Chunk("s", 0, 0, CHUNKS[0]))
