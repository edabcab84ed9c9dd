"""`paramstore demo`: train, kill, resume and generate out of a store that is an eighth of the model's state."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from paramstore.cli.exits import FAILED
from paramstore.cli.signals import end_as_interrupt
from paramstore.demo import settings

STEPS_HELP = f"Training steps; {settings.FULL_STEPS} by default, {settings.QUICK_STEPS} with --quick, and no fewer."


def demo(
    quick: bool = typer.Option(False, "--quick", help="A smaller model, in under a minute."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON instead of a table."),
    directory: Path = typer.Option(Path("demo-run"), "--dir", help="Where everything is kept; made if missing."),
    steps: int = typer.Option(None, "--steps", min=settings.QUICK_STEPS, help=STEPS_HELP),
    seed: int = typer.Option(0, "--seed", min=0, help="Of the model, the batches and the text."),
    keep_daemon: bool = typer.Option(False, "--keep-daemon", help="Leave the daemon running at the end."),
) -> None:
    """Train an MoE transformer out of the store, prove it bitwise, kill the daemon, resume, generate."""
    from paramstore.demo.acts import tell
    from paramstore.demo.progress import DemoProgress

    end_as_interrupt()
    make = settings.quick if quick else settings.full
    chosen = make(seed=seed) if steps is None else make(steps=steps, seed=seed)
    report = tell(chosen, directory, progress=DemoProgress(), keeps_daemon=keep_daemon)
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict()) + "\n")
    else:
        _print(report)
    if not report.is_ok:
        raise typer.Exit(FAILED)


def _print(report: object) -> None:
    from rich.console import Console
    from rich.text import Text

    from paramstore.demo.report import DemoReport

    assert isinstance(report, DemoReport)
    console = Console()
    console.print(report.table())
    for sample in report.generation.samples:
        console.print(Text.assemble((f"\n[{sample.domain}] ", "bold"), (sample.prompt, "dim"), sample.continuation))
