"""The progress of a long import or export, for a bar on the terminal or for whoever asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is. records: done, by earlier attempts too. bytes_done: read by an import, written by an export."""

    records: int
    records_total: int
    bytes_done: int


Report = Callable[[Progress], object]
"""Called after each record; it must be quick, and may raise to stop."""


@contextmanager
def reported(title: str, progress: Report | bool | None) -> Iterator[Report]:
    """The function to call after each record: `progress` itself, for True a bar, else one that does nothing."""
    if progress is True:
        with bar(title) as report:
            yield report
    else:
        yield progress or (lambda _: None)


@contextmanager
def bar(title: str) -> Iterator[Report]:
    """A progress bar on stderr, silent where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    done = TextColumn("experts, {task.fields[done]}")
    columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), done, TimeRemainingColumn()
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=None, done="0 MB")

        def report(progress: Progress) -> None:
            text = f"{progress.bytes_done / 1e6:.0f} MB"
            bars.update(task, completed=progress.records, total=progress.records_total, done=text)

        yield report
