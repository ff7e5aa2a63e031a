"""What a sample has to be: everything else is refused, with a text that says what was expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dask_sdc.dataset.outputs import Output, check_outputs, checked_sample
from dask_sdc.exceptions import InputError, InputTypeError, InvalidSample

OUTPUTS = {
    "ids": Output("i8", (None,), 6, exact=True),
    "hidden": Output("f4", (None, 3), 6, "ragged", like="ids"),
    "score": Output("f8"),
}


def sample(n: int = 2) -> dict[str, Any]:
    return {"ids": np.arange(n), "hidden": np.ones((n, 3), "f4"), "score": np.float64(1)}


def test_a_good_sample_comes_back_as_it_is() -> None:
    found = checked_sample(OUTPUTS, sample(), np.arange(2))
    assert {name: (one.dtype.str, one.shape) for name, one in found.items()} == {
        "ids": ("<i8", (2,)),
        "hidden": ("<f4", (2, 3)),
        "score": ("<f8", ()),
    }
    asked = {"ids": np.arange(2), "text": "ab"}
    assert checked_sample(OUTPUTS, sample(), asked)["ids"].tolist() == [0, 1]
    assert checked_sample({"score": Output("f8")}, 2.5, None)["score"] == 2.5
    big = checked_sample({"x": Output(">f4", (2,))}, np.array([1, 2], ">f4"), None)["x"]
    assert (big.dtype.str, big.tolist()) == ("<f4", [1.0, 2.0])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"more": 1},
            r"expected the arrays \['hidden', 'ids', 'score'\], got \['hidden', 'ids', 'more', 'score'\]",
        ),
        ({"score": np.float32(1)}, "score: expected float64, got float32"),
        ({"score": np.ones(1)}, r"score: expected shape \(\), got \(1,\)"),
        ({"score": np.nan}, "score: expected finite values, got 1 others"),
        ({"hidden": np.ones((2, 4), "f4")}, r"hidden: expected shape \(None, 3\), got \(2, 4\)"),
        ({"hidden": np.ones((1, 3), "f4")}, "hidden: expected 2 positions, as ids has, got 1"),
        ({"ids": np.arange(7)}, "ids: expected at most 6 positions, got 7"),
        (
            {"ids": np.array([0, 2])},
            r"ids: expected the values that were asked for, got another value at \(1,\)",
        ),
        ({"ids": np.arange(3), "hidden": np.ones((3, 3), "f4")}, "asked for, got another shape"),
    ],
)
def test_anything_else_is_invalid(change: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidSample, match=match):
        checked_sample(OUTPUTS, sample() | change, np.arange(2))


def test_what_is_missing_or_no_mapping() -> None:
    with pytest.raises(InvalidSample, match=r"got \['ids'\]"):
        checked_sample(OUTPUTS, {"ids": np.arange(2)}, np.arange(2))
    with pytest.raises(InvalidSample, match="got float"):
        checked_sample(OUTPUTS, 3.0, None)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Output("U3"), InputTypeError, "expected numbers"),
        (lambda: Output("f8", (3, None)), InputError, "the first perhaps None"),
        (lambda: Output("f8", (0,)), InputError, "at least 1"),
        (lambda: Output("f8", (None,)), InputError, "max_length"),
        (lambda: Output("f8", (3,), 4), InputError, "max_length"),
        (lambda: Output("f8", (None,), 0), InputError, "max_length"),
        (lambda: Output("f8", (3,), layout="ragged"), InputError, "layout"),
        (lambda: Output("f8", (3,), like="x"), InputError, "like"),
        (lambda: check_outputs({}), InputError, "one at least"),
        (lambda: check_outputs([Output("f8")]), InputTypeError, "mapping of names"),
        (lambda: check_outputs({"valid": Output("f8")}), InputError, "none of"),
        (
            lambda: check_outputs({"a": Output("f8", (None,), 3), "a_length": Output("i8")}),
            InputError,
            "those of the index of another one, got .'a_length'",
        ),
        (lambda: check_outputs({"a b": Output("f8")}), InputError, "identifiers"),
        (lambda: check_outputs({"a": Output("f8", (None,), 3, like="b")}), InputError, "like"),
    ],
)
def test_declarations_that_make_no_sense(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()
