"""Defaults, schema and documentation of the configuration agree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

import dask.config
import jsonschema
import pytest
import yaml
from dask.utils import parse_bytes, parse_timedelta

from dask_sdc import config

FILES = resources.files("dask_sdc")
SCHEMA = yaml.safe_load(FILES.joinpath("sdc-schema.yaml").read_text("utf-8"))


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def schema_leaves(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key, entry in schema["properties"].items():
        if "properties" in entry:
            yield from schema_leaves(entry, f"{path}{key}.")
        else:
            yield f"{path}{key}", entry


DEFAULTS = dict(leaves(config.defaults))


def changed(key: str, value: Any) -> dict[str, Any]:
    """Return the defaults with one leaf replaced."""
    tree: dict[str, Any] = json.loads(json.dumps(config.defaults))
    *parents, last = key.split(".")
    node = tree
    for name in parents:
        node = node[name]
    node[last] = value
    return tree


def run(code: str, **environ: str) -> str:
    """Return what a new interpreter prints for ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environ, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_defaults_obey_the_schema() -> None:
    jsonschema.validate(config.defaults, SCHEMA)


def test_schema_is_complete() -> None:
    assert [key for key, _ in schema_leaves(SCHEMA)] == list(DEFAULTS)


def test_every_key_is_described() -> None:
    undescribed = [key for key, entry in schema_leaves(SCHEMA) if not entry.get("description", "").strip()]
    assert undescribed == []


def test_every_default_is_commented() -> None:
    lines = FILES.joinpath("sdc.yaml").read_text("utf-8").splitlines()
    bare = [line for line in lines if re.search(r":\s+\S", line) and "# " not in line]
    assert bare == []


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("sdc.audit-rate", 1.5),
        ("sdc.audit-rate", True),
        ("sdc.audit-rtol", -1e-12),
        ("sdc.domain", "rack"),
        ("sdc.lanes", 2),
        ("sdc.max-retries", 0),
        ("sdc.quarantine", "yes"),
        ("sdc.worker-timeout", 300),
        ("sdc.ledger", 3),
        ("sdc.codec.limits.items", "1e6"),
        ("sdc.codec.limits.deep", 3),
        ("sdc.audit_rate", 0.1),
        ("sdc.device.workspace", 64),
    ],
)
def test_schema_refuses(key: str, bad: object) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed(key, bad), SCHEMA)


@pytest.mark.parametrize("key", ["sdc.worker-timeout", "sdc.batch.min", "sdc.batch.max"])
def test_times_are_times(key: str) -> None:
    assert parse_timedelta(DEFAULTS[key]) > 0


@pytest.mark.parametrize("key", ["sdc.codec.limits.total", "sdc.codec.limits.array"])
def test_sizes_are_sizes(key: str) -> None:
    assert parse_bytes(DEFAULTS[key]) == 2**30


def test_the_workspace_of_devices_is_as_the_documentation_says() -> None:
    assert parse_bytes(DEFAULTS["sdc.device.workspace"]) == 64 << 20


def test_import_registers_the_defaults() -> None:
    code = "import json, dask_sdc, dask; print(json.dumps(dask.config.get('sdc')))"
    assert json.loads(run(code, DASK_CONFIG=os.devnull)) == config.defaults["sdc"]


def test_environment_overrides() -> None:
    code = "import dask_sdc, dask; print(dask.config.get('sdc.audit-rate'))"
    assert run(code, DASK_SDC__AUDIT_RATE="0.25") == "0.25"


def test_set_overrides_and_gives_back() -> None:
    before = dask.config.get("sdc.audit-rate")
    with dask.config.set({"sdc.audit_rate": 0.5}):
        assert dask.config.get("sdc.audit-rate") == 0.5
    assert dask.config.get("sdc.audit-rate") == before
