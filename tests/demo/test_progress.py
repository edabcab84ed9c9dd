"""Progress goes to its own console, in lines that can be read later."""

import io

from rich.console import Console

from paramstore.demo.progress import DemoProgress, figures
from paramstore.demo.trace import StepTrace
from paramstore.demo.traffic import Traffic

MOVED = Traffic(hits=3, misses=1, host_bytes=2_000_000, nvme_read_bytes=4_000_000, nvme_written_bytes=1_000_000)
TRACE = StepTrace(3, 2.5, 0.5, MOVED)


def shown(tell, *, is_terminal: bool = False) -> str:
    stream = io.StringIO()
    tell(DemoProgress(Console(file=stream, force_terminal=is_terminal, width=160, color_system=None)))
    return stream.getvalue()


def test_figures_name_loss_speed_and_every_tier():
    assert figures(TRACE, 2048) == "loss 2.500 · 4,096 tokens/s · host 75% 4 MB/s · nvme 25% 10 MB/s"


def test_figures_of_a_step_in_memory_name_no_tier():
    assert figures(StepTrace(1, 2.5, 1.0), 100) == "loss 2.500 · 100 tokens/s"


def test_chapters_and_facts_are_lines():
    def tell(progress: DemoProgress) -> None:
        progress.chapter(2, "Daemon")
        progress.fact("a path [like] /this")

    assert shown(tell) == "2 Daemon\n  a path [like] /this\n"


def test_long_facts_are_not_broken():
    assert shown(lambda progress: progress.fact("x" * 500)) == "  " + "x" * 500 + "\n"


def test_bar_shows_the_figures_on_a_terminal():
    def tell(progress: DemoProgress) -> None:
        with progress.training(first_step=0, last_step=10, tokens_per_step=2048) as show:
            show(TRACE)

    assert "loss 2.500 · 4,096 tokens/s · host 75%" in shown(tell, is_terminal=True)


def test_elsewhere_some_steps_have_a_line():
    def tell(progress: DemoProgress) -> None:
        with progress.training(first_step=0, last_step=30, tokens_per_step=100) as show:
            for step in range(1, 21):
                show(StepTrace(step, 2.5, 1.0))

    assert shown(tell) == "".join(f"  step {step} of 30: loss 2.500 · 100 tokens/s\n" for step in (10, 20))
    assert " of 30: " not in shown(tell, is_terminal=True)


def test_bars_are_silent_elsewhere():
    def tell(progress: DemoProgress) -> None:
        with progress.training(first_step=0, last_step=10, tokens_per_step=2048) as show:
            show(TRACE)
        with progress.counting("bytes", 10) as advance:
            advance(3)

    assert shown(tell).strip() == ""
