"""The error tree is what its docstring draws, and every error crosses process borders whole."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest
from distributed.protocol.pickle import dumps, loads

import dask_sdc
from dask_sdc import exceptions

LINE = re.compile(r"^(?P<indent>[ │]*)(?:[├└]── )?(?P<name>[A-Z]\w*)(?: \((?P<builtin>\w+)\))?(?:\s{2,}|$)")

DEFINED = {
    name: cls
    for name, cls in inspect.getmembers(exceptions, inspect.isclass)
    if cls.__module__ == exceptions.__name__
}
ERRORS = [cls for cls in DEFINED.values() if issubclass(cls, exceptions.SDCError)]


def drawn_tree(docstring: str) -> dict[str, tuple[str, ...]]:
    """Read {name: names of its bases} off the tree in a docstring."""
    tree: dict[str, tuple[str, ...]] = {}
    above: dict[int, str] = {}
    for line in docstring.partition("::")[2].splitlines():
        match = LINE.match(line.removeprefix("    "))
        if match is None:
            continue
        name, builtin = match["name"], match["builtin"]
        level = line.find(name) // 4
        above[level] = name
        parent = above.get(level - 1) if "── " in line else None
        tree[name] = tuple(base for base in (parent, builtin) if base)
    return tree


def test_tree_is_the_one_drawn() -> None:
    drawn = drawn_tree(exceptions.__doc__ or "")
    real = {name: tuple(base.__name__ for base in cls.__bases__) for name, cls in DEFINED.items()}
    assert drawn.pop("SDCError") == ()
    assert real.pop("SDCError") == ("Exception",)
    assert drawn == real


def test_tree_reader_reads_levels_and_builtin_bases() -> None:
    text = (
        "T.\n\n::\n\n    A\n    ├── B (ValueError)   why\n    │   └── C\n    └── D\n\n    W (UserWarning)\n"
    )
    assert drawn_tree(text) == {
        "A": (),
        "B": ("A", "ValueError"),
        "C": ("B",),
        "D": ("A",),
        "W": ("UserWarning",),
    }


def make(cls: type[exceptions.SDCError]) -> exceptions.SDCError:
    if issubclass(cls, exceptions.ShardError):
        return cls("expected 3, got 4", shard_id=7, domain="host-a", worker="tcp://10.0.0.1:4000")
    return cls("expected 3, got 4", path="state.mean", committed=[1, 2])


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(
    "trip",
    [
        *(lambda error, p=p: pickle.loads(pickle.dumps(error, p)) for p in range(2, 6)),
        copy.deepcopy,
        lambda error: loads(dumps(error)),
    ],
    ids=["pickle2", "pickle3", "pickle4", "pickle5", "deepcopy", "distributed"],
)
def test_errors_keep_their_fields(cls: type[exceptions.SDCError], trip: object) -> None:
    error = make(cls)
    back = trip(error)  # type: ignore[operator]
    assert type(back) is cls
    assert back.args == error.args == ("expected 3, got 4",)
    assert vars(back) == vars(error)
    assert str(back) == "expected 3, got 4"


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_errors_keep_what_was_added_later(cls: type[exceptions.SDCError]) -> None:
    error = make(cls)
    error.add_note("round 4")
    error.receipt = {"round": 4}  # type: ignore[attr-defined]
    back = pickle.loads(pickle.dumps(error))
    assert back.__notes__ == ["round 4"]
    assert back.receipt == {"round": 4}


def test_shard_error_names_nobody_by_default() -> None:
    error = exceptions.ShardError("x")
    assert (error.shard_id, error.domain, error.worker) == (-1, "", "")


@pytest.mark.parametrize("name", sorted(DEFINED))
def test_every_error_is_public_and_documented(name: str) -> None:
    assert getattr(dask_sdc, name) is DEFINED[name]
    assert DEFINED[name].__doc__
