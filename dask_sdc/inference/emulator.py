"""A linear climate emulator as a pipeline of stages: what a model that is no language model looks like.

A field (time, lat, lon) is reduced to its leading empirical orthogonal functions, whose coefficients follow a
vector autoregression (a linear inverse model; Penland and Sardeshmukh 1995). The rollout goes step by step
through three stages: `EncodeStage` (field to coefficients), `StepStage` (coefficients to those of the next
time) and `DecodeStage` (coefficients to field).
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dask_sdc.evidence.codec import encode
from dask_sdc.exceptions import CorruptionError, InputError
from dask_sdc.inference.stage import Stage
from dask_sdc.statistics.base import ShardInfo
from dask_sdc.statistics.pca import PCA
from dask_sdc.statistics.regression import LinearRegression

__all__ = [
    "DecodeStage",
    "EncodeStage",
    "LinearEmulator",
    "LinearEmulatorStage",
    "StepStage",
    "fit_linear_emulator",
    "rollout",
]

Array = np.ndarray[Any, Any]

#: Positions that a state can take back.
ROLLBACK = 64


@dataclass(frozen=True)
class LinearEmulator:
    """A fitted emulator.

    Attributes
    ----------
    shape : tuple of int
        (lat, lon) of a field.
    climatology : ndarray of float64, shape (period, lat * lon)
        Mean field of every phase of the cycle; position 0 of a rollout has phase 0.
    scale : ndarray of float64, shape (lat * lon,)
        Weight of every cell in the reduction.
    components : ndarray of float64, shape (k, lat * lon)
        Empirical orthogonal functions of the weighted anomalies.
    intercept : ndarray of float64, shape (k,)
        Constant of the autoregression.
    coef : ndarray of float64, shape (k, order * k)
        Its coefficients; the latest time first.
    """

    shape: tuple[int, int]
    climatology: Array
    scale: Array
    components: Array
    intercept: Array
    coef: Array

    @property
    def order(self) -> int:
        """Times that the next one depends on."""
        return int(self.coef.shape[1] // self.coef.shape[0])

    def stages(self) -> list[Stage]:
        """Return the three stages, not loaded."""
        grid = {"shape": np.array(self.shape), "climatology": self.climatology, "scale": self.scale}
        return [
            EncodeStage({**grid, "components": self.components}),
            StepStage({"intercept": self.intercept, "coef": self.coef}),
            DecodeStage({**grid, "components": self.components}),
        ]


def fit_linear_emulator(
    values: Any, modes: int = 10, *, order: int = 1, period: int = 1, latitude: Any = None, l2: float = 0.0
) -> LinearEmulator:
    """Fit an emulator with this package's `PCA` and `LinearRegression`.

    Parameters
    ----------
    values : array_like, shape (time, lat, lon)
        A field without missing values; its first time has phase 0.
    modes : int
        Empirical orthogonal functions that are kept.
    order : int
        Times that the next one depends on.
    period : int
        Times per cycle, such as 12 for months; the mean of every phase is taken out.
    latitude : array_like or None, shape (lat,)
        Degrees; cells are weighted by the root of the cosine, and so variances by area. None weights none.
    l2 : float
        Ridge penalty of the autoregression.

    Raises
    ------
    InputError
        If the field is too short or has another shape.
    """
    x = np.asarray(values, np.float64)
    if x.ndim != 3 or min(order, period, modes) < 1 or len(x) <= max(period, order) + 1:
        raise InputError(
            f"expected a field (time, lat, lon) longer than order {order} and period {period}, "
            f"and modes of at least 1, got shape {x.shape} and {modes} modes"
        )
    flat = x.reshape(len(x), -1)  # (time, cells)
    climatology = np.stack([flat[phase::period].mean(axis=0) for phase in range(period)])
    scale = np.ones(flat.shape[1])
    if latitude is not None:
        degrees = np.repeat(np.asarray(latitude, np.float64), x.shape[2])
        scale = np.sqrt(np.clip(np.cos(np.deg2rad(degrees)), 1e-6, None))
    anomalies = (flat - climatology[np.arange(len(flat)) % period]) * scale
    reduction = PCA(modes)
    eof = reduction.finalize(
        reduction.update(reduction.init(ShardInfo(anomalies.shape[1:], anomalies.dtype)), anomalies)
    )
    c = anomalies @ eof.components.T  # (time, modes)
    past = np.concatenate([c[order - 1 - lag : len(c) - 1 - lag] for lag in range(order)], axis=1)
    future = c[order:]
    regression = LinearRegression(l2=l2)
    state = regression.init(ShardInfo(past.shape[1:], past.dtype, target_shape=future.shape[1:]))
    fit = regression.finalize(regression.update(state, past, target=future))
    return LinearEmulator(
        (x.shape[1], x.shape[2]),
        climatology,
        scale,
        eof.components,
        np.asarray(fit.intercept),
        np.asarray(fit.coef),
    )


def rollout(stages: Sequence[Stage], history: Array, steps: int) -> Array:
    """Run a field forward through loaded stages.

    Parameters
    ----------
    stages : sequence of Stage
        From `LinearEmulator.stages`, loaded.
    history : ndarray, shape (B, T, lat, lon)
        Fields that are known, T at least 1.
    steps : int
        Fields to make, at least 1.

    Returns
    -------
    ndarray of float64, shape (B, steps, lat, lon)
        The fields after the history.
    """
    states = [stage.init(batch=len(history)) for stage in stages]
    made: list[Array] = []
    chunk = np.asarray(history, np.float64)
    for _ in range(steps):
        for stage, state in zip(stages, states, strict=True):
            chunk = stage.forward(chunk, state, rows=1)
        chunk = chunk[:, -1:]
        made.append(chunk)
    return np.concatenate(made, axis=1)


@dataclass
class EmulatorState:
    """What a stage of the emulator remembers of a session.

    Attributes
    ----------
    position : int
        Times seen.
    recent : deque of ndarray
        The coefficients (B, k) of the latest times, oldest first; used by `StepStage` only.
    """

    position: int = 0
    recent: deque[Array] = field(default_factory=deque)


class LinearEmulatorStage(Stage):
    """A stage of the emulator, carried by its arrays.

    Every time of a chunk is computed by itself, so that its bits do not depend on the chunk.

    Parameters
    ----------
    arrays : mapping of str to ndarray
        What the stage computes with.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        # In one memory layout, on which the bits of products depend.
        self._arrays: dict[str, Array] = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        self._digest = self._computed()

    def _computed(self) -> str:
        return hashlib.sha256(encode({"stage": type(self).__name__, "arrays": self._arrays})).hexdigest()

    def load(self) -> None:
        """Prove the arrays, which came with the stage.

        Raises
        ------
        CorruptionError
            If they are not those that the stage was made from.
        """
        found = self._computed()
        if found != self._digest:
            raise CorruptionError(f"{type(self).__name__}: expected digest {self._digest}, got {found}")

    @property
    def digest(self) -> str:
        """sha256 in hexadecimal of the arrays."""
        return self._digest

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self._arrays.values())

    def init(self, *, batch: int = 1, capacity: int | None = None) -> EmulatorState:
        """Return the state before the first time; a rollout has no end, so any capacity will do."""
        return EmulatorState()

    def forward(self, chunk: Array, state: EmulatorState, *, rows: int | None = None) -> Array:
        """Take T times (B, T, ...) and return as many for the next stage."""
        out = [self._one(chunk[:, t], state, state.position + t) for t in range(chunk.shape[1])]
        state.position += chunk.shape[1]
        return np.stack(out, axis=1)

    @abstractmethod
    def _one(self, x: Array, state: EmulatorState, position: int) -> Array:
        """Compute one time."""

    def position(self, state: EmulatorState) -> int:
        """Return the times seen."""
        return state.position

    def truncate(self, state: EmulatorState, position: int) -> None:
        """Forget the times from ``position`` on."""
        if not state.position - ROLLBACK <= position <= state.position or position < 0:
            oldest = max(0, state.position - ROLLBACK)
            raise InputError(f"expected to truncate to {oldest}..{state.position}, got {position}")
        state.position = position

    def snapshot(self, state: EmulatorState) -> dict[str, Any]:
        """Return the position."""
        return {"position": state.position}

    def _phase(self, position: int) -> Array:
        climatology = self._arrays["climatology"]
        mean: Array = climatology[position % len(climatology)]
        return mean


class EncodeStage(LinearEmulatorStage):
    """Fields (B, T, lat, lon) to coefficients (B, T, k)."""

    def _one(self, x: Array, state: EmulatorState, position: int) -> Array:
        anomaly = (x.reshape(len(x), -1) - self._phase(position)) * self._arrays["scale"]
        coefficients: Array = anomaly @ self._arrays["components"].T
        return coefficients


class StepStage(LinearEmulatorStage):
    """Coefficients (B, T, k) to those of the following times, of which the missing past counts as zero."""

    @property
    def _order(self) -> int:
        return int(self._arrays["coef"].shape[1] // self._arrays["coef"].shape[0])

    @property
    def bytes_per_position(self) -> int:
        """0: the state holds the latest times only."""
        return 0

    def _one(self, x: Array, state: EmulatorState, position: int) -> Array:
        state.recent.append(x.copy())
        if len(state.recent) > self._order + ROLLBACK:
            state.recent.popleft()
        past = self._past(state)
        following: Array = past @ self._arrays["coef"].T + self._arrays["intercept"]
        return following

    def _past(self, state: EmulatorState) -> Array:
        """Return the latest times, the newest first: (B, order * k)."""
        known = list(state.recent)[-self._order :][::-1]
        known += [np.zeros_like(known[0])] * (self._order - len(known))
        return np.concatenate(known, axis=1)

    def truncate(self, state: EmulatorState, position: int) -> None:
        """Forget the times from ``position`` on."""
        extra = state.position - position
        super().truncate(state, position)
        for _ in range(extra):
            state.recent.pop()

    def snapshot(self, state: EmulatorState) -> dict[str, Any]:
        """Return the position and the times that the next one depends on."""
        return {"position": state.position, "recent": list(state.recent)[-self._order :]}


class DecodeStage(LinearEmulatorStage):
    """Coefficients of the following times (B, T, k) to their fields (B, T, lat, lon)."""

    def _one(self, x: Array, state: EmulatorState, position: int) -> Array:
        anomaly = x @ self._arrays["components"] / self._arrays["scale"]
        lat, lon = (int(size) for size in self._arrays["shape"])
        fields: Array = (anomaly + self._phase(position + 1)).reshape(len(x), lat, lon)
        return fields
