"""`paramstore verify`: lets a running daemon check its records where they lie; names what is damaged, and disturbs nobody.

Findings on stdout, a bar on stderr where that is a terminal. The scrub in the daemon ends with this command's session.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from paramstore.cli.address import ADDRESS_HELP
from paramstore.cli.exits import CORRUPT
from paramstore.cli.signals import end_as_interrupt
from paramstore.sizes import format_size, parse_size

if TYPE_CHECKING:
    from rich.progress import Progress

    from paramstore_client import Store, Ticket

POLL_S = 0.2
"""Seconds between two looks at the daemon's progress."""
REPEATED = re.compile(r"^record \(\d+, \d+\) of namespace '[^']*', (version \d+ of epoch \d+), at volume \d+, offset \d+: ")
"""Beginning of a finding's reason, with key, namespace and place, which the finding's line has already."""


def verify(
    address: str = typer.Argument(None, help=ADDRESS_HELP),
    namespace: str = typer.Option(None, "--namespace", help="This one only; default all."),
    rate: str = typer.Option(None, "--rate", help="Read at most this many bytes a second, as in 100MiB; default no limit."),
    as_json: bool = typer.Option(False, "--json", help="The whole result, as JSON."),
) -> None:
    """Check every record, superblock and commit note of a running daemon. Exit code 4 if some are damaged or cannot be read."""
    import paramstore_client as client

    bar, bytes_per_s = _bar(), None if rate is None else parse_size(rate)
    end_as_interrupt()
    with client.connect(address) as store:
        ticket = store.verify(namespace, bytes_per_s=bytes_per_s)
        _watch(store, ticket, bar)
        result = ticket.wait()
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        _print(result)
    if result["found"]:
        raise typer.Exit(CORRUPT)


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("verify"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[found]} found"),
    )  # fmt: skip
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _watch(store: Store, ticket: Ticket[dict[str, Any]], bar: Progress) -> None:
    """Shows how far the scrub is, until it is over."""
    with bar:
        task = bar.add_task("", total=None, found=0)
        while not ticket.settled_within(POLL_S):
            running = store.stats()["verify"]["running"]
            if running is not None:
                bar.update(task, completed=running["bytes_read"], total=running["bytes_total"], found=running["found"])


def _print(result: dict[str, Any]) -> None:
    for line in finding_lines(result):
        sys.stdout.write(f"{line}\n")
    copies = f", {result['copies']} copies of superblocks and commit notes" if result.get("copies") else ""
    sys.stdout.write(
        f"{result['records']} records{copies}, {format_size(result['bytes_read'])} read in {result['seconds']:.1f} s: "
        f"{result['found'] or 'none'} damaged\n"
    )


def finding_lines(result: dict[str, Any]) -> Iterator[str]:
    """One line for each thing that a scrub found damaged, and one for those that it only counted."""
    lines = list(described_lines(result))
    yield from lines
    beyond = result["found"] - len(lines)
    if beyond:
        yield f"and {beyond} more"


def described_lines(result: dict[str, Any]) -> Iterator[str]:
    """One line for each finding that `result` describes. A daemon of an older version does not report damaged copies of superblocks
    and notes."""
    for finding in result.get("copy_findings", []):
        what = finding["kind"] if finding["step"] is None else f"{finding['namespace']} commit note of step {finding['step']}"
        yield f"{what}, copy {finding['copy']}, {_place(finding)}: {finding['reason']}"
    for finding in result["findings"]:
        layer, expert = finding["key"]
        needed = ", ".join(f"step {step}" for step in finding["steps"]) or "uncommitted"
        reason = REPEATED.sub(r"\1: ", finding["reason"])
        yield f"{finding['namespace']} ({layer}, {expert}), {needed}, {_place(finding)}: {reason}"


def _place(finding: dict[str, Any]) -> str:
    return f"volume {finding['volume']}, offset {finding['offset_bytes']}"
