"""Decode steps as CUDA graphs: all launches of a stage's layers at the price of one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from dask_sdc.exceptions import DeviceLost
from dask_sdc.inference.model.kernels.cuda.attention import SPLIT
from dask_sdc.inference.model.kernels.cuda.stack import CudaKernels
from dask_sdc.inference.model.kernels.layout import NO_TREE, Block, Geometry
from dask_sdc.statistics.kernels.cuda.device import Device, pointer
from dask_sdc.statistics.kernels.cuda.failures import device_failure

__all__ = ["CapturedKernels"]

Array = Any

logger = logging.getLogger(__name__)


class CapturedKernels(CudaKernels):
    """`CudaKernels`, row by row, which capture the step of one position per sequence and replay it.

    Bits are those of the plain step: the same kernels run, and beside them empty splits of the attention.
    What changes from step to step the kernels read on the device: rows, angles, the positions before them. A
    session has one graph at a time. It is captured anew when keys and values have moved, and when there are
    twice as many splits. Where a step cannot be captured, all steps are plain from then on.

    Parameters
    ----------
    blocks : sequence of Block
        The layers.
    geometry : Geometry
        What they share.
    device : Device
        Where they lie.
    """

    def __init__(self, blocks: Sequence[Block], geometry: Geometry, device: Device) -> None:
        super().__init__(blocks, geometry, device, by_row=True)
        self._able = True
        # By the first layer of a session's cache: a graph goes when its session does.
        self._graphs: WeakKeyDictionary[Any, _Graph] = WeakKeyDictionary()

    def run(
        self,
        x: Array,
        steps: int,
        cos: Array,
        sin: Array,
        cached: Sequence[Any],
        length: int,
        tree: Array = NO_TREE,
    ) -> Array:
        """Run rows (R, D) through all layers; see `RowKernels.run`."""
        graph = self._graph(x, cos, sin, cached, length) if self._able and cached and steps == 1 else None
        if graph is None:
            return super().run(x, steps, cos, sin, cached, length, tree)
        return graph.replayed(x, cos, sin, length)

    def _graph(self, x: Array, cos: Array, sin: Array, cached: Sequence[Any], length: int) -> _Graph | None:
        """Return the graph that serves this step, None if there can be none."""
        bound = _bound(length)
        key = (x.shape, bound, *((pointer(c.k), pointer(c.v), c.k.shape, c.base) for c in cached))
        found = self._graphs.get(cached[0])
        if found is not None and found.key == key:
            return found
        self._graphs.pop(cached[0], None)
        found = None  # its memory serves the next one
        try:
            found = self._captured(key, x, cos, sin, cached, length)
        except Exception as error:
            # Whatever it was, the plain step shows it too, unless it was the capture.
            if isinstance(device_failure(error), DeviceLost):
                raise
            logger.debug("decode steps are not captured: %s: %s", type(error).__name__, error)
            self._able = False
            return None
        self._graphs[cached[0]] = found
        return found

    def _captured(
        self, key: tuple[Any, ...], x: Array, cos: Array, sin: Array, cached: Sequence[Any], length: int
    ) -> _Graph:
        xp, bound = self._xp, _bound(length)
        x, cos, sin = (xp.array(array, copy=True) for array in (x, cos, sin))
        at = xp.full(1, length, dtype=np.int64)
        kernels = CudaKernels(self._blocks, self._geometry, self._device, by_row=True, at=at)
        replay = self._device.capture(lambda: kernels.run(x, 1, cos, sin, cached, bound))
        return _Graph(key, x, cos, sin, at, replay)


class _Graph(NamedTuple):
    """A captured step: what it was captured for, the buffers that it reads, and its launch."""

    key: tuple[Any, ...]
    x: Array
    cos: Array
    sin: Array
    at: Array
    replay: Callable[[], Array]

    def replayed(self, x: Array, cos: Array, sin: Array, length: int) -> Array:
        """Return the rows (B, D) after the last layer."""
        self.x[...], self.cos[...], self.sin[...] = x, cos, sin
        self.at.fill(length)
        return self.replay().copy()  # which the next replay writes to


def _bound(length: int) -> int:
    """Return the most positions before a row that a graph serves which is captured at ``length``."""
    splits = length // SPLIT + 1
    return int(SPLIT << (splits - 1).bit_length()) - 1
