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


@sdc.group()
def weights() -> None:
    """Convert and check the weights of staged models."""


@weights.command()
@click.argument("source", type=click.Path(path_type=str))
@click.argument("destination", type=click.Path(path_type=str))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Format of all weights; by default each keeps its own, and quantised ones become float32.",
)
@click.option("--overwrite", is_flag=True, help="Replace a weight store that is there already.")
def convert(source: str, destination: str, dtype: str | None, overwrite: bool) -> None:
    """Write SOURCE, a Hugging Face folder or GGUF file, as the weight store DESTINATION.

    DESTINATION is a folder or an fsspec URL.
    """
    from dask_sdc.inference.weights import convert as write
    from dask_sdc.inference.weights import open_source

    try:
        store = write(open_source(source), destination, dtype=dtype, overwrite=overwrite)
    except (SDCError, OSError) as error:
        raise click.ClickException(str(error)) from error
    except ImportError as error:
        raise click.ClickException(
            f"{error}; install the models extra: pip install 'dask-sdc[models]'"
        ) from error
    click.echo(f"{destination}: {len(store.names)} tensors, {store.nbytes()} bytes, sha256 {store.digest}")


@weights.command("verify")
@click.argument("store", type=click.Path(path_type=str))
def verify_weights(store: str) -> None:
    """Read the whole weight store STORE and name every tensor that is damaged."""
    from dask_sdc.inference.weights import WeightStore

    try:
        opened = WeightStore.open(store)
        faults = opened.check()
    except (SDCError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if faults:
        raise click.ClickException("\n".join(faults.values()))
    click.echo(f"{store}: ok, {len(opened.names)} tensors, {opened.nbytes()} bytes, sha256 {opened.digest}")


@sdc.command()
@click.argument("store", type=click.Path(path_type=str))
@click.argument("scheduler", required=False)
@click.option("--nthreads", type=click.IntRange(1), help="Threads; all processors by default.")
@click.option("--timeout", type=float, default=30.0, show_default=True, help="Seconds to reach SCHEDULER.")
def stage(store: str, scheduler: str | None, nthreads: int | None, timeout: float) -> None:
    """Check that this machine can hold a stage of STORE, then be a worker for stages of SCHEDULER.

    For supervisors: prints CHECKED, then READY with the worker's address once it is registered, and ends with
    code 0 when it is told to stop; or prints FATAL and why, and ends with code 1. Without SCHEDULER it only
    checks. Certificates and keys are taken from Dask's configuration, which the environment can set.
    """
    import asyncio

    from dask_sdc.inference.pipeline.supervised import preflight, serve

    try:
        found = preflight(store)
        click.echo(
            f"CHECKED sha256 {found.digest}, room for {found.layers} layers, "
            f"{found.bytes_per_second / 1e9:.2f} GB/s of weights"
        )
        if scheduler is not None:
            asyncio.run(
                serve(scheduler, lambda at: click.echo(f"READY {at}"), nthreads=nthreads, timeout=timeout)
            )
    except (SDCError, OSError) as error:
        click.echo(f"FATAL {error}")
        raise SystemExit(1) from None
