"""The `paramstore` commands. Each imports what it needs when it runs, so that `--help` costs no torch.

Exit codes: 0 ok, 1 failed, 2 usage, 3 unreachable, 4 corrupt. Data on stdout, progress and messages on stderr.
"""

from __future__ import annotations

import logging
import sys
from io import TextIOWrapper

import typer

from paramstore import __version__
from paramstore.cli import bench, demo, export, fsck, import_, plan, run, serve, status, stop, trace, verify
from paramstore.cli.exits import SIGNALLED, exit_code
from paramstore.cli.signals import told
from paramstore.errors import ParamStoreError

HELP_COLUMNS = 120
"""Widest that help becomes on a wide terminal; typer's own limit of 80 cuts what commands do short."""

app = typer.Typer(
    name="paramstore", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich for a frame around it would be a third of what `serve --help` takes
    context_settings={"max_content_width": HELP_COLUMNS},
    help="A storage-tier parameter service for Mixture-of-Experts models.",
)  # fmt: skip
app.command("serve")(serve.serve)
app.command("stop")(stop.stop)
app.command("status")(status.status)
app.command("verify")(verify.verify)
app.command("fsck")(fsck.fsck)
app.command("plan")(plan.plan)
app.command("import")(import_.import_checkpoint)
app.command("export")(export.export)
app.command("run")(run.run)
app.command("serve-model")(run.serve_model)
app.command("demo")(demo.demo)
app.add_typer(bench.app, name="bench")
app.add_typer(trace.app, name="trace")


def _version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version and exit."),
) -> None:
    """A storage-tier parameter service for Mixture-of-Experts models."""


def main() -> None:
    """Runs a command. A typed or system error becomes one line on stderr and its exit code; after a signal, only its exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the locale may be unable to show a path
    try:
        app()
    except BaseException as error:
        if (number := told()) is not None:
            sys.exit(SIGNALLED + number)
        if not isinstance(error, ParamStoreError | OSError):
            raise
        logging.getLogger(__name__).debug("where it came from", exc_info=error)
        sys.stderr.write(f"paramstore: {type(error).__name__}: {' '.join(str(error).split())}\n")
        sys.exit(exit_code(error))
