"""How ranks add up their counts: one process alone, MPI, or torch.distributed.

Any other way is a class with `rank`, `size` and `sum`. Libraries are imported when they are used.
"""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from dask_sdc.exceptions import InputError, InputTypeError, RankLost

#: What is added up is below this in size, so that sums over 2**16 ranks fit into 64 bits.
COUNT_LIMIT = 2**47

#: Seconds between two looks at a sum of MPI that is under way.
_LOOK = 0.001


@runtime_checkable
class AllReduce(Protocol):
    """Adds up integers over ranks.

    Attributes
    ----------
    rank : int
        Of the caller, from 0 on.
    size : int
        How many ranks there are.
    """

    @property
    def rank(self) -> int:
        """Rank of the caller, from 0 on."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def sum(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return the sums over all ranks, when every rank has called it.

        Parameters
        ----------
        values : sequence of int
            Equally many on every rank.

        Returns
        -------
        tuple of int
            The same on every rank.

        Raises
        ------
        RankLost
            If a rank can or does not come.
        """


class SingleProcess:
    """Sums over one rank."""

    rank = 0
    size = 1

    def sum(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return the values."""
        return counts(values)

    async def sum_async(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return the values."""
        return counts(values)


class MPIAllReduce:
    """Sums over the ranks of an MPI communicator; needs mpi4py.

    A process that dies takes all of an MPI job with it, as the launcher sees to; ``timeout`` is for one that
    hangs. After a `RankLost` the communicator has a sum under way that will never end: end the job with
    ``comm.Abort()``.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        COMM_WORLD by default.
    timeout : float, optional
        Seconds after which a sum is given up; waits for ever without it.

    Raises
    ------
    ModuleNotFoundError
        If mpi4py is missing.
    """

    def __init__(self, comm: Any = None, *, timeout: float | None = None) -> None:
        self._mpi = _needed("mpi4py.MPI", "MPIAllReduce", "pip install 'dask-sdc[mpi]'")
        self._comm = self._mpi.COMM_WORLD if comm is None else comm
        if timeout is not None and not timeout > 0:
            raise InputError(f"expected a timeout of more than 0 seconds, got {timeout!r}")
        self._timeout = timeout

    @property
    def rank(self) -> int:
        """Rank of this process in the communicator."""
        return int(self._comm.Get_rank())

    @property
    def size(self) -> int:
        """Ranks of the communicator."""
        return int(self._comm.Get_size())

    def sum(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return the sums over all ranks.

        Parameters
        ----------
        values : sequence of int
            Equally many on every rank.

        Returns
        -------
        tuple of int
            The same on every rank.

        Raises
        ------
        RankLost
            If not all ranks came within the timeout. MPI cannot tell which ones.
        """
        import numpy as np

        mine = np.array(counts(values), np.int64)
        total = np.empty_like(mine)
        request = self._comm.Iallreduce(mine, total, op=self._mpi.SUM)
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while not request.Test():
            if deadline is not None and time.monotonic() > deadline:
                raise RankLost(
                    f"rank {self.rank}: expected {self.size} ranks of MPI within {self._timeout} s, "
                    f"some did not come"
                )
            time.sleep(_LOOK)
        return tuple(total.tolist())


class TorchAllReduce:
    """Sums over the ranks of torch.distributed, which the program has initialised.

    How long it waits for a rank was said when the process group was made.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        All ranks by default.
    device : str or torch.device, optional
        Where the sums are made; the current GPU by default for NCCL, and the CPU for all else.

    Raises
    ------
    ModuleNotFoundError
        If torch is missing.
    """

    def __init__(self, group: Any = None, *, device: Any = None) -> None:
        self._torch = _needed("torch", "TorchAllReduce", "pip install torch")
        self._distributed = _needed("torch.distributed", "TorchAllReduce", "pip install torch")
        self._group = group
        self._device = device

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return int(self._distributed.get_rank(self._group))

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return int(self._distributed.get_world_size(self._group))

    def sum(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return the sums over all ranks.

        Parameters
        ----------
        values : sequence of int
            Equally many on every rank.

        Returns
        -------
        tuple of int
            The same on every rank.

        Raises
        ------
        RankLost
            If torch.distributed gives up, with what it says.
        """
        tensor = self._torch.tensor(counts(values), dtype=self._torch.int64, device=self._place())
        try:
            self._distributed.all_reduce(tensor, group=self._group)
            return tuple(int(value) for value in tensor.tolist())
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank}: torch.distributed could not add up: {error}") from error

    def _place(self) -> Any:
        if self._device is None and self._distributed.get_backend(self._group) == "nccl":
            return self._torch.device("cuda", self._torch.cuda.current_device())
        return self._device


def prevailing(device: Any = None) -> AllReduce:
    """Return the all-reduce of the program: torch.distributed if it is initialised, else one rank alone."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return TorchAllReduce(device=device)
    return SingleProcess()


def counts(values: Sequence[int]) -> tuple[int, ...]:
    """Check what is to be added up; True counts as 1.

    Raises
    ------
    InputTypeError
        If something is no integer.
    InputError
        If something is beyond `COUNT_LIMIT`.
    """
    try:
        checked = tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise InputTypeError(f"expected integers to add up, got {values!r}") from error
    if any(abs(value) >= COUNT_LIMIT for value in checked):
        raise InputError(f"expected integers below {COUNT_LIMIT} in size, got {checked}")
    return checked


def _needed(module: str, who: str, how: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{who} needs {module.split('.')[0]}: {how}", name=error.name) from error
