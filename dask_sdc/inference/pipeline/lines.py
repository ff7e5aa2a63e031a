"""Connections on which the messages of a pipeline go one way, one behind the other.

A call would cost a message back for every chunk. Here the receiver only says now and then how many it has
taken, so that a sender that is too fast waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from distributed.comm.core import Comm
from distributed.protocol.serialize import to_serialize

from dask_sdc.inference.host import Chunk
from dask_sdc.inference.pipeline.routes import Connection, Routes

__all__ = ["Answers", "Line", "pack_chunk", "received", "unpack_chunk"]

#: Bytes up to which an array is a part of its message: a frame of its own costs more than copying it.
_ALONG = 2**16

#: Chunks that may be on their way before the sender has to wait, and after how many they are counted back.
_WINDOW, _COUNTED = 8, 4


def pack_chunk(chunk: Chunk) -> dict[str, Any]:
    """Return a chunk as it travels: its array out of band, unless it is quicker to send it along."""
    array = chunk.array
    return {**vars(chunk), "array": _small(array) or to_serialize(array)}


def _small(array: Any) -> list[Any] | None:
    """Return an array as closed types, if it is small and its dtype is one that has a name."""
    if not isinstance(array, np.ndarray) or array.nbytes > _ALONG or array.dtype.hasobject:
        return None
    name = array.dtype.str
    return [name, array.shape, array.tobytes()] if np.dtype(name) == array.dtype else None


def unpack_chunk(packed: Mapping[str, Any]) -> Chunk:
    """Return a chunk that came."""
    sent = packed["array"]
    if not isinstance(sent, np.ndarray):
        dtype, shape, data = sent
        sent = np.ndarray(tuple(shape), dtype, data).copy()  # which may be written to
    return Chunk(**{**packed, "array": sent})


class _Lasting:
    """A connection to one worker at a time that is kept, and opened anew to another one."""

    def __init__(self, routes: Routes, method: str, pipeline: str) -> None:
        self._routes, self._method, self._pipeline = routes, method, pipeline
        self._address = ""
        self._connection: Connection | None = None
        self._listening: asyncio.Task[None] | None = None

    async def open(self, address: str) -> Connection:
        """Return the connection to a worker.

        Raises
        ------
        OSError
            If it cannot be reached.
        StageError
            If it does not hold a stage of the pipeline.
        """
        if self._connection is None or self._connection.closed or address != self._address:
            self.close()
            self._connection = await self._routes.connect(address, self._method, pipeline=self._pipeline)
            self._address = address
            self._listening = asyncio.ensure_future(self._listen(self._connection))
        return self._connection

    async def _listen(self, connection: Connection) -> None:
        try:
            while True:
                self.heard(await connection.read())
        except OSError as error:
            connection.close()
            self.lost(error)

    def heard(self, message: Any) -> None:
        """Take a message from the other end."""
        raise NotImplementedError

    def lost(self, error: OSError) -> None:
        """Note that the connection broke."""
        raise NotImplementedError

    def close(self) -> None:
        """Hang up."""
        if self._listening is not None:
            self._listening.cancel()
        if self._connection is not None:
            self._connection.close()
        self._connection = self._listening = None


class Line(_Lasting):
    """Sends chunks to the holder of a stage; one sender at a time.

    Parameters
    ----------
    routes : Routes
        The ways to workers.
    pipeline : str
        Name of the pipeline.
    """

    def __init__(self, routes: Routes, pipeline: str) -> None:
        super().__init__(routes, "take", pipeline)
        self._under_way = 0
        self._counted = asyncio.Event()

    async def send(self, address: str, epoch: int, chunk: Chunk) -> None:
        """Send a chunk once the holder has taken most of those before it.

        Raises
        ------
        OSError, StageError
            See `open`.
        """
        connection = await self.open(address)
        while self._under_way >= _WINDOW and not connection.closed:
            self._counted.clear()
            await self._counted.wait()
        self._under_way += 1
        packed = pack_chunk(chunk)
        try:
            await connection.write({"epoch": epoch, "chunk": packed}, small=isinstance(packed["array"], list))
        except BaseException:
            self.close()  # nobody knows whether it was sent, so it cannot be counted
            raise

    def heard(self, message: int) -> None:
        """Note how many chunks were taken."""
        self._under_way -= message
        self._counted.set()

    def lost(self, error: OSError) -> None:
        """Let a sender that waits find out."""
        self._counted.set()

    def close(self) -> None:
        """Hang up."""
        super().close()
        self._under_way = 0


async def received(comm: Comm, deliver: Callable[[int, Chunk], Any]) -> None:
    """Hand on what comes from a `Line`, until the sender hangs up.

    Parameters
    ----------
    comm : Comm
        The other end of the line.
    deliver : callable
        ``await deliver(epoch, chunk)`` returns when there is room for the next one.
    """
    taken = 0
    try:
        while True:
            message: Mapping[str, Any] = await comm.read()
            await deliver(message["epoch"], unpack_chunk(message["chunk"]))
            taken += 1
            if taken == _COUNTED:
                await comm.write(taken)
                taken = 0
    except OSError:
        return  # it sends elsewhere now, or is gone


class Answers(_Lasting):
    """Hears the answers of a tail.

    Parameters
    ----------
    routes, pipeline
        See `Line`.
    heard : callable
        Called with every answer.
    lost : callable
        Called with the error if the connection breaks.
    """

    def __init__(
        self,
        routes: Routes,
        pipeline: str,
        heard: Callable[[Mapping[str, Any]], None],
        lost: Callable[[OSError], None],
    ) -> None:
        super().__init__(routes, "tell", pipeline)
        self._heard, self._lost = heard, lost

    def heard(self, message: Mapping[str, Any]) -> None:
        """Take an answer."""
        self._heard(message)

    def lost(self, error: OSError) -> None:
        """Note that no more answers come."""
        self._lost(error)
