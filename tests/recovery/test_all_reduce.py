"""What adds up without a cluster; the MPI and torch ranks are real processes, elsewhere."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from dask_sdc.exceptions import InputError, InputTypeError
from dask_sdc.recovery import AllReduce, MPIAllReduce, SingleProcess, TorchAllReduce
from dask_sdc.recovery.all_reduce import COUNT_LIMIT


def test_one_process_sums_over_itself() -> None:
    alone = SingleProcess()
    assert isinstance(alone, AllReduce)
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.sum([True, 3, np.int64(-2)]) == (1, 3, -2)


@pytest.mark.parametrize("wrong", [[1.0], ["1"], [None], 3])
def test_what_is_no_integer_is_refused(wrong: Any) -> None:
    with pytest.raises(InputTypeError, match="expected integers"):
        SingleProcess().sum(wrong)


@pytest.mark.parametrize("wrong", [COUNT_LIMIT, -COUNT_LIMIT])
def test_what_could_overflow_is_refused(wrong: int) -> None:
    with pytest.raises(InputError, match="below"):
        SingleProcess().sum([0, wrong])
    assert (COUNT_LIMIT - 1) * 2**16 < 2**63


@pytest.mark.parametrize(
    ("kind", "module", "how"),
    [
        (MPIAllReduce, "mpi4py.MPI", "pip install 'dask-sdc\\[mpi\\]'"),
        (TorchAllReduce, "torch", "install torch"),
    ],
)
def test_a_missing_library_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch, kind: Any, module: str, how: str
) -> None:
    # Python's way to say that a module is not there.
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=f"{kind.__name__} needs {module.split('.')[0]}: .*{how}"):
        kind()
