"""Time that a new process needs before the package can be used."""

from __future__ import annotations


def timeraw_import() -> str:
    """Import the package in a new interpreter."""
    return "import dask_sdc"


def timeraw_command_line() -> str:
    """Import the command group, as every ``dask`` command does."""
    return "import dask_sdc.cli"
