"""SIGTERM ends a long command as Ctrl-C does, so that its daemon and its files end with it."""

from __future__ import annotations

import signal
from types import FrameType


def end_as_interrupt() -> None:
    """From here on SIGTERM raises KeyboardInterrupt in the main thread: once, so that a second does not end the tidying up."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
