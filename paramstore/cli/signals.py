"""SIGTERM ends a long command as Ctrl-C does, so that its daemon and its files end with it; and neither ends half a call."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def end_as_interrupt() -> None:
    """From here on SIGTERM raises KeyboardInterrupt in the main thread: once, so that a second does not end the tidying up."""
    signal.signal(signal.SIGTERM, _interrupt)


@contextmanager
def held_back() -> Iterator[None]:
    """Within the block Ctrl-C raises nothing; KeyboardInterrupt comes at its end, when what the block made has a name."""
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
