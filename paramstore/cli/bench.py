"""`paramstore bench`: the service beside the limits of this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paramstore.cli.signals import end_as_interrupt

app = typer.Typer(
    name="bench", help="Measure the service beside the limits of this machine.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def bench() -> None:
    """Measure the service beside the limits of this machine."""


@app.command()
def tiers(
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the ratios into this file (.png, .svg).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sets, about a minute: a check, not figures to quote.")] = False,
    directory: Annotated[Path, typer.Option("--dir", help="Where to measure: a directory on the disk in question.")] = Path(),
) -> None:
    """Loads, write-backs, leases and updates through a real daemon, each beside its limit in the same run."""
    # Torch, matplotlib and rich are loaded only here, so that the other commands stay quick.
    from rich.console import Console

    from paramstore.bench.plan import Plan
    from paramstore.bench.report.plot import check_target, draw
    from paramstore.bench.report.rows import encode
    from paramstore.bench.report.table import render
    from paramstore.bench.tiers import run

    if plot is not None:
        check_target(plot)
    end_as_interrupt()
    progress = Console(stderr=True)
    command = "paramstore bench tiers" + (" --quick" if quick else "")
    with progress.status("bench tiers") as status:
        plan = Plan.quick() if quick else Plan()
        report = run(plan, directory, command=command, tell=status.update)
    if plot is not None:
        draw(report, plot)
    if json:
        sys.stdout.write(encode(report).decode())
    else:
        render(report, Console())
