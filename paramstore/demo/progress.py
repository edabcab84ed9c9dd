"""Shows how far the demo is: on stderr, so that stdout carries data alone.

Chapters and facts are plain lines; a bar lasts as long as something is counted. Where stderr is no terminal the bars are
silent, the lines remain, and some steps of training have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paramstore.demo.trace import StepTrace

LINE_EVERY = 10
"""Steps of training from one line to the next, where no bar shows them."""


class DemoProgress:
    """Owner of the console that a demo talks to."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = Console(stderr=True) if console is None else console

    def chapter(self, number: int, title: str) -> None:
        """Announces one of the seven steps."""
        self.console.print(f"[bold]{number}[/bold] {title}", highlight=False, soft_wrap=True)

    def fact(self, text: str) -> None:
        self.console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def counting(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Shows a bar up to `total`; the function given moves it on by a count."""
        with self._bar("", "{task.description}") as bar:
            task = bar.add_task(title, total=total)
            yield lambda count: bar.advance(task, count)

    @contextmanager
    def training(self, *, first_step: int, last_step: int, tokens_per_step: int) -> Iterator[Callable[[StepTrace], None]]:
        """Shows a bar of steps; the function given adds one step and its figures."""
        with self._bar("step", "{task.fields[figures]}") as bar:
            task = bar.add_task("", total=last_step, completed=first_step, figures="")

            def show(trace: StepTrace) -> None:
                told = figures(trace, tokens_per_step)
                bar.update(task, completed=trace.step, figures=told)
                if bar.disable and trace.step % LINE_EVERY == 0:
                    self.fact(f"step {trace.step} of {last_step}: {told}")

            yield show

    def _bar(self, before: str, after: str) -> Progress:
        """Makes a bar. before, after: the text around the count, as in "step 3/60 loss 2.1"."""
        columns = (BarColumn(bar_width=24), TextColumn(before), MofNCompleteColumn(), TextColumn(after), TimeElapsedColumn())
        return Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)


def figures(trace: StepTrace, tokens_per_step: int) -> str:
    """One line of figures: loss, speed, and for each tier its rate and the share of lookups that it answered."""
    traffic = trace.traffic
    text = f"loss {trace.loss:.3f} · {tokens_per_step / trace.seconds:,.0f} tokens/s"
    if traffic.hits + traffic.misses:
        text += f" · host {traffic.host_hit_rate:.0%} {_rate(traffic.host_bytes, trace.seconds)}"
        text += f" · nvme {traffic.nvme_rate:.0%} {_rate(traffic.nvme_bytes, trace.seconds)}"
    return text


def _rate(size_bytes: int, seconds: float) -> str:
    return f"{size_bytes / seconds / 1e6:,.0f} MB/s"
