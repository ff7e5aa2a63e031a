"""Samples that could not be had, and their count: behaviours C.1 and C.2."""

from __future__ import annotations

import dataclasses
import pickle
from functools import reduce
from typing import Any

import dask.bag as db
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_sdc.exceptions import InputTypeError
from dask_sdc.recovery import RecoveryMetadata, SampleUnavailable

metadata = st.builds(
    RecoveryMetadata,
    st.integers(0, 2**40),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "a", "b", "ab"]),
)
unavailable = st.builds(
    SampleUnavailable, st.text(max_size=3), st.booleans(), st.integers(0, 9), st.booleans()
)


@pytest.mark.parametrize("record", [SampleUnavailable(), RecoveryMetadata()], ids=["sample", "metadata"])
def test_records_are_frozen_and_pickle(record: Any) -> None:
    assert pickle.loads(pickle.dumps(record)) == record
    for field in dataclasses.fields(record):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field.name, None)


def test_defaults_are_those_of_nothing_lost() -> None:
    assert dataclasses.astuple(SampleUnavailable()) == ("", False, 0, False)
    assert dataclasses.astuple(RecoveryMetadata()) == (0, False, False, "")


def test_only_failures_are_counted_and_the_first_fatal_sample_gives_the_error() -> None:
    lost = [
        SampleUnavailable("skipped"),
        SampleUnavailable("failed", counts_as_failure=True, consecutive_failures=1),
        SampleUnavailable("refused", fatal=True),
        SampleUnavailable("failed again", counts_as_failure=True, consecutive_failures=2, fatal=True),
    ]
    assert RecoveryMetadata.from_unavailable(lost, locally_empty=False) == RecoveryMetadata(
        2, False, True, "refused"
    )
    assert RecoveryMetadata.from_unavailable(iter(lost[:2]), locally_empty=True) == RecoveryMetadata(1, True)
    assert RecoveryMetadata.from_unavailable([], locally_empty=False) == RecoveryMetadata.identity()


def test_what_is_no_lost_sample_is_refused() -> None:
    with pytest.raises(InputTypeError, match="expected SampleUnavailable, got a str"):
        RecoveryMetadata.from_unavailable([SampleUnavailable(), "x"], locally_empty=False)  # type: ignore[list-item]


@given(metadata, metadata, metadata)
def test_metadata_are_a_commutative_monoid(
    a: RecoveryMetadata, b: RecoveryMetadata, c: RecoveryMetadata
) -> None:
    assert a.combine(b) == b.combine(a)
    assert a.combine(b).combine(c) == a.combine(b.combine(c))
    assert a.combine(RecoveryMetadata.identity()) == a


@given(st.lists(unavailable, max_size=8), st.integers(0, 8))
def test_the_count_of_all_is_that_of_the_parts(lost: list[SampleUnavailable], cut: int) -> None:
    whole = RecoveryMetadata.from_unavailable(lost, locally_empty=False)
    parts = [RecoveryMetadata.from_unavailable(p, locally_empty=False) for p in (lost[:cut], lost[cut:])]
    joined = reduce(RecoveryMetadata.combine, parts)
    assert dataclasses.replace(joined, error="") == dataclasses.replace(whole, error="")
    assert joined.error in {sample.reason for sample in lost if sample.fatal} | {""}


def test_metadata_reduce_in_a_dask_graph() -> None:
    parts = [RecoveryMetadata(i, i == 3, i > 7, f"rank {i}" if i > 7 else "") for i in range(10)]
    bag = db.from_sequence(parts, npartitions=4)
    total = bag.fold(RecoveryMetadata.combine, initial=RecoveryMetadata.identity())
    assert total.compute(scheduler="sync") == RecoveryMetadata(45, True, True, "rank 8")
