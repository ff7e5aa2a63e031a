"""The ``dask sdc`` command group.

Registered through the entry-point group ``dask_cli``. Whatever a command needs is imported when
the command runs, so that ``dask --help`` stays quick.
"""

from __future__ import annotations

from pathlib import Path

import click

from dask_sdc.exceptions import SDCError


@click.group()
def sdc() -> None:
    """Audit, attribute and heal silent data corruption."""


@sdc.command()
@click.argument("ledger", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def verify(ledger: Path) -> None:
    """Check the hash chain of LEDGER and name the first bad line."""
    from dask_sdc.evidence.ledger import verify as check_chain

    try:
        check = check_chain(ledger)
    except (SDCError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if not check.ok:
        raise click.ClickException(f"{ledger}: line {check.first_bad_line}: {check.reason}")
    click.echo(f"{ledger}: ok, {check.records} records")


@sdc.command()
def demo() -> None:
    """Run an audited analysis of real data, clean and with one faulty worker."""
    try:
        from dask_sdc.demo import main

        status = main()
    except ImportError as error:
        raise click.ClickException(
            f"{error}; install the demo extra: pip install 'dask-sdc[demo]'"
        ) from error
    raise SystemExit(status)
