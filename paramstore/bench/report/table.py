"""Prints a report for people: one table, and below it the parts of the rows that fall short."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from rich.console import Console
from rich.table import Table

from paramstore.bench.report.rows import Report, Row, Verdict
from paramstore.sizes import format_size

STYLES = {Verdict.HOLDS: "green", Verdict.WITHIN_SPREAD: "yellow", Verdict.SHORT: "bold red", Verdict.NO_TARGET: "dim"}
SMALL_VALUE = 100.0


TABLE_WIDTH = 150
"""Columns of a terminal that the table needs; with fewer, each row is a paragraph."""


def render(report: Report, console: Console) -> None:
    """Prints the whole report to `console`."""
    if console.width >= TABLE_WIDTH:
        console.print(table_of(report))
    else:
        for row in report.rows:
            console.print(paragraph_of(row), highlight=False)
    for row in report.rows:
        if row.verdict in (Verdict.SHORT, Verdict.WITHIN_SPREAD):
            console.print(f"\n[{STYLES[row.verdict]}]{row.verdict}[/]: {title_of(row)}, made of", highlight=False)
            console.print(parts_of(row))
    console.print(f"\n{summary_of(report)}", highlight=False)
    console.print(f"{machine_line(report)}; {report.seconds:.0f} s", highlight=False, style="dim")


def table_of(report: Report) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False)
    for heading in ("work", "record", "by", "value", "limit", "which is", "ratio (spread)", "target", ""):
        is_words = heading in ("work", "by", "which is", "target")
        justify: Literal["left", "right"] = "right" if heading in ("value", "record", "limit") else "left"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=not is_words)
    for row in report.rows:
        verdict = "" if row.verdict is Verdict.NO_TARGET else f"[{STYLES[row.verdict]}]{row.verdict}[/]"
        table.add_row(
            ", ".join(filter(None, (row.name, row.case))),
            format_size(row.record_bytes) if row.record_bytes else "",
            row.subject,
            f"{number(row.value)} {row.unit}",
            number(row.limit) if row.limit is not None else "",
            row.against,
            ratio_of(row),
            f"{row.target.quantity} {row.target}" if row.target else "",
            verdict,
        )
    return table


def paragraph_of(row: Row) -> str:
    """Describes a row where a table has no room: what was measured and whose it is, then the figures."""
    limit = f"{row.against} {number(row.limit)}" if row.limit is not None else row.against
    target = f"target {row.target.quantity} {row.target}: [{STYLES[row.verdict]}]{row.verdict}[/]" if row.target else ""
    figures = ", ".join(filter(None, (f"{number(row.value)} {row.unit}", limit, target)))
    return f"{title_of(row)}\n    {row.subject}: {figures}"


def parts_of(row: Row) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in row.parts.items():
        table.add_row(f"  {name}", f"{value:.6g}")
    if row.note:
        table.add_row("  note", row.note)
    return table


def summary_of(report: Report) -> str:
    """Says how many of the targets hold."""
    counts = Counter(row.verdict for row in report.rows)
    targets = len(report.rows) - counts[Verdict.NO_TARGET]
    return (
        f"{targets} targets: {counts[Verdict.HOLDS]} hold, {counts[Verdict.WITHIN_SPREAD]} within spread, "
        f"{counts[Verdict.SHORT]} short"
    )


def title_of(row: Row) -> str:
    size = f" of {format_size(row.record_bytes)}" if row.record_bytes else ""
    headline = f"ratio {ratio_of(row)}" if row.ratio is not None else f"{number(row.value)} {row.unit}"
    return f"{', '.join(filter(None, (row.name, row.case)))}{size}: {headline}"


def ratio_of(row: Row) -> str:
    if row.ratio is None:
        return ""
    if row.ratio_min is None or row.ratio_max is None:
        return f"{row.ratio:.2f}"
    return f"{row.ratio:.2f} ({row.ratio_min:.2f} - {row.ratio_max:.2f})"


def number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < SMALL_VALUE else f"{value:,.0f}"


def short_commit(commit: str) -> str:
    """The commit's first digits, and whether the tree had changes."""
    digits, mark, _ = commit.partition("+")
    return digits[:12] + ("+changes" if mark else "")


def machine_line(report: Report) -> str:
    """Makes the line under tables and pictures that says where the figures come from."""
    facts = report.machine
    memory_bytes = facts.get("memory_bytes")
    memory = format_size(memory_bytes) if isinstance(memory_bytes, int) else "?"
    return (
        f"{facts.get('cpu')}, {facts.get('cores')} cores, {memory}, Linux {facts.get('kernel')}, {facts.get('file_system')}; "
        f"commit {short_commit(report.commit)}, {report.date}"
    )
