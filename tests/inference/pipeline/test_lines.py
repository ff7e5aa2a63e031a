"""Chunks come out of a message as they went in."""

from __future__ import annotations

import asyncio

import ml_dtypes
import numpy as np
import pytest
from distributed.comm import connect, listen
from distributed.comm.core import Comm

from dask_sdc.inference.host import Chunk
from dask_sdc.inference.pipeline.lines import pack_chunk, unpack_chunk

ARRAYS = {
    "ids": np.array([[5]]),
    "hidden": np.random.default_rng(0).normal(size=(1, 1, 576)).astype("f4"),
    "long": np.random.default_rng(1).normal(size=(2, 300, 64)),
    "empty": np.zeros((1, 0, 4), "f4"),
    "scalar": np.array(3.5),
    "big-endian": np.arange(6, dtype=">i4").reshape(1, 6),
    "strided": np.arange(24.0).reshape(2, 3, 4)[:, ::-2, 1:],
    "Fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "bfloat16": np.arange(8).astype(ml_dtypes.bfloat16),
    "complex": np.array([[1 + 2j]]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_chunk_comes_as_it_went(name: str) -> None:
    sent = Chunk("s", 3, 7, ARRAYS[name], 1, b"digest", (1, 2), (0, 1), (4,))

    async def there_and_back() -> Chunk:
        async def echo(comm: Comm) -> None:
            await comm.write(pack_chunk(unpack_chunk(await comm.read())))

        async with await listen("tcp://127.0.0.1:0", echo) as listener:
            comm = await connect(listener.contact_address)
            try:
                await comm.write(pack_chunk(sent))
                return unpack_chunk(await comm.read())
            finally:
                await comm.close()

    came = asyncio.run(there_and_back())
    assert came.array.dtype == sent.array.dtype and came.array.shape == sent.array.shape
    assert came.array.tobytes() == sent.array.tobytes()
    assert {**vars(came), "array": 0} == {**vars(sent), "array": 0}
    if came.array.size and name != "long":
        came.array.flat[0] = 0  # a stage may write to what it was given
