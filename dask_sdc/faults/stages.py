"""Faults of the stages of a pipeline: deaths, frozen stages, lost messages, and wrong bits.

A fault is armed on the worker that holds a stage and strikes once, at a given call. Production code has no
branch for it: the methods of the one seat are replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_sdc.exceptions import InputError, StageError
from dask_sdc.faults.flips import flip_state_bit, inject_bit_flip

__all__ = [
    "KINDS",
    "StageFault",
    "arm_link_delay",
    "arm_replay_fault",
    "arm_shadow_fault",
    "arm_spare_fault",
    "arm_stage_fault",
]

#: What can happen to a stage.
KINDS = ("kill", "freeze", "raise", "drop", "activation", "state", "weights")


@dataclass(frozen=True)
class StageFault:
    """One fault of one stage.

    Parameters
    ----------
    kind : str
        "kill" and "freeze" send the worker's process SIGKILL and SIGSTOP; "raise" makes the step fail;
        "drop" loses the message to the next stage; "activation", "state" and "weights" flip one bit of an
        output before it is recorded, of the state (KV cache) of the session, or of the weights, for good.
    stage : int
        Number of the stage.
    step : int
        Which of its chunks, counted from when the fault is armed.
    bit : int
        Which bit is flipped, counted over the array and modulo its bits.
    """

    kind: str
    stage: int
    step: int = 0
    bit: int = 30

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"kind: expected one of {list(KINDS)}, got {self.kind!r}")
        for name in ("stage", "step", "bit"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(f"{name}: expected an int >= 0, got {value!r}")


def arm_stage_fault(pipeline: Any, fault: StageFault) -> Any:
    """Arm a fault on the worker that holds a stage now.

    Parameters
    ----------
    pipeline : Pipeline
        A running pipeline.
    fault : StageFault
        What is to happen; it strikes once.

    Returns
    -------
    object
        What ``client.run`` returns; to be awaited if the client is asynchronous.
    """
    if fault.stage >= len(pipeline.workers):
        raise InputError(f"stage: expected one of {len(pipeline.workers)}, got {fault.stage}")
    return pipeline.client.run(_arm, pipeline.name, fault, workers=[pipeline.workers[fault.stage]])


def arm_replay_fault(pipeline: Any, worker: str, kind: str, call: int = 0) -> Any:
    """Kill or freeze a worker in the middle of a replay.

    Parameters
    ----------
    pipeline : Pipeline
        A running pipeline.
    worker : str
        Address of the worker: a spare, or a survivor that feeds it.
    kind : {"kill", "freeze"}
        What happens.
    call : int
        At which call that feeds or replays chunks there, counted from now.
    """
    if kind not in ("kill", "freeze"):
        raise InputError(f"kind: expected 'kill' or 'freeze', got {kind!r}")
    return pipeline.client.run(_arm_replay, kind, call, workers=[worker])


def arm_shadow_fault(pipeline: Any, worker: str, bit: int = 30) -> Any:
    """Have a worker compute wrongly whatever it computes for audits, from now on.

    Parameters
    ----------
    pipeline : Pipeline
        A running pipeline.
    worker : str
        Address of the worker.
    bit : int
        Which bit of the digest of every output is flipped, as a flipped output would.
    """
    return pipeline.client.run(_arm_shadow, bit, workers=[worker])


def arm_spare_fault(pipeline: Any, worker: str, stage: int, bit: int = 30) -> Any:
    """Flip one bit in the weights of a stage that a spare holds ready.

    Parameters
    ----------
    pipeline : Pipeline
        A running pipeline.
    worker : str
        Address of the spare.
    stage : int
        Number of the stage.
    bit : int
        Which bit is flipped, as of `StageFault`.
    """
    if worker not in pipeline.spares or not 0 <= stage < len(pipeline.workers):
        raise InputError(f"expected one of the spares {pipeline.spares} and a stage, got {worker}, {stage}")
    return pipeline.client.run(_arm_spare, pipeline.name, stage, bit, workers=[worker])


def _arm_spare(name: str, stage: int, bit: int, dask_worker: Any) -> None:
    ready = dask_worker.plugins["dask_sdc-stages"].spares[name][stage]
    _flip_in_place(_weights_of(ready), bit)


def _arm_shadow(bit: int, dask_worker: Any) -> None:
    shadow = dask_worker.handlers["sdc_stage_shadow"]

    async def bent(**arguments: Any) -> list[list[Any]]:
        records = await shadow(**arguments)
        return [[*record[:4], inject_bit_flip(record[4], bit), *record[5:]] for record in records]

    dask_worker.handlers["sdc_stage_shadow"] = bent


def arm_link_delay(pipeline: Any, stage: int, seconds: float) -> Any:
    """Let all that a stage sends to the next one arrive later, as over a long link.

    The stage does not wait: messages are on their way side by side, and arrive in order.

    Parameters
    ----------
    pipeline : Pipeline
        A running pipeline.
    stage : int
        Number of the stage, not the tail.
    seconds : float
        How much later.
    """
    if not 0 <= stage < len(pipeline.workers) - 1:
        raise InputError(f"stage: expected one that sends to a next one, got {stage}")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise InputError(f"seconds: expected a finite number >= 0, got {seconds!r}")
    return pipeline.client.run(_arm_delay, pipeline.name, seconds, workers=[pipeline.workers[stage]])


def _arm(name: str, fault: StageFault, dask_worker: Any) -> None:
    seat = dask_worker.plugins["dask_sdc-stages"].seats[name]
    if fault.kind == "drop":
        seat.send = _dropping(seat.send, fault.step)
    else:
        seat.host.step = _striking(seat.host, seat.host.step, fault)


def _arm_replay(kind: str, call: int, dask_worker: Any) -> None:
    left = [call]
    for name in ("replay", "refeed", "replay_joined", "refeed_joined"):
        name = f"sdc_stage_{name}"
        dask_worker.handlers[name] = _dying(dask_worker.handlers[name], kind, left)


def _arm_delay(name: str, seconds: float, dask_worker: Any) -> None:
    seat = dask_worker.plugins["dask_sdc-stages"].seats[name]
    seat.send = _LongLink(seat.send, seconds).send


class _LongLink:
    """Takes messages at once and delivers each some time later; one that cannot be delivered is lost."""

    def __init__(self, send: Callable[..., Awaitable[None]], seconds: float) -> None:
        self._send, self._seconds = send, seconds
        self._under_way: deque[tuple[float, tuple[Any, ...]]] = deque()
        self._delivery: asyncio.Task[None] | None = None

    async def send(self, *message: Any) -> None:
        self._under_way.append((asyncio.get_running_loop().time() + self._seconds, message))
        if self._delivery is None or self._delivery.done():
            self._delivery = asyncio.create_task(self._deliver())

    async def _deliver(self) -> None:
        while self._under_way:
            due, message = self._under_way.popleft()
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            with contextlib.suppress(OSError, StageError):
                await self._send(*message)


def _dying(handler: Callable[..., Any], kind: str, left: list[int]) -> Callable[..., Any]:
    async def handle(**arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            _signal(kind)
        return await handler(**arguments)

    return handle


def _dropping(send: Callable[..., Any], step: int) -> Callable[..., Any]:
    left = [step]

    async def drop(address: str, epoch: int, chunk: Any) -> None:
        left[0] -= 1
        if left[0] != -1:
            await send(address, epoch, chunk)

    return drop


def _striking(host: Any, step: Callable[..., Any], fault: StageFault) -> Callable[..., Any]:
    left = [fault.step]

    def strike(chunk: Any) -> Any:
        left[0] -= 1
        if left[0] != -1:
            return step(chunk)
        match fault.kind:
            case "kill" | "freeze":
                _signal(fault.kind)
            case "raise":
                raise RuntimeError("injected fault")
            case "activation":
                compute = host.compute
                host.compute = lambda *given, **named: flip_state_bit(compute(*given, **named), fault.bit)
                try:
                    return step(chunk)
                finally:
                    host.compute = compute
            case "state":
                _flip_in_place(_arrays_of(host._held[chunk.session].state), fault.bit)
            case "weights":
                _flip_in_place(_weights_of(host.stage), fault.bit)
        return step(chunk)

    return strike


def _signal(kind: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def _arrays_of(state: Any) -> list[np.ndarray[Any, Any]]:
    """Return what a KV cache holds of the last position."""
    return [layer.v[:, :, state.length - 1 : state.length] for layer in state.cached]


def _weights_of(stage: Any) -> list[np.ndarray[Any, Any]]:
    return [array for array in stage.model.weights.values() if array.ndim == 2 and array.dtype == np.float32]


def _flip_in_place(arrays: list[np.ndarray[Any, Any]], bit: int) -> None:
    """Flip one bit of the largest element, which is no padding, of the last array that has one."""
    array = [array for array in arrays if array.size][-1]
    at = np.unravel_index(np.abs(array).argmax(), array.shape)
    flipped = np.array(array[at], np.float32).view(np.uint32) ^ np.uint32(1 << bit % 32)
    array[at] = flipped.view(np.float32)
