"""How SIGINT (Ctrl-C), SIGTERM and SIGHUP end a command: no signal is lost, none shows a traceback, nothing is left behind.

- A command dies by the signal, as the kernel does it: shells show 130, 143 or 129. During its imports nothing else happens.
- A command with something to tidy up calls `end_as_interrupt` when its imports are over. From then on the first signal raises
  KeyboardInterrupt in the main thread, later ones do not disturb the tidying up, and `end_as_told` lets it die by that signal.
- The interrupt waits for the end of a function that would leave a thing without an owner, or swallow what is raised in it.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HALF_DONE = frozenset({"__init__", "__new__", "__enter__", "__exit__", "__del__", "_find_and_load", "_read_once", "_send_some"})
"""Names of functions whose end an interrupt awaits: those that make or end something; an import; and those of a connection,
which an interrupt there would end, while the command may still need it to save what it has done."""
PUT_OFF_S = 0.02
PUT_OFFS_MAX = 50
"""Most times that an interrupt waits for the end of such a function, PUT_OFF_S each; then it is raised there."""


class _Ending:
    """Owner of the first signal that came, and of the interrupt that it becomes."""

    def __init__(self) -> None:
        self.told: int | None = None
        self.stop: Callable[[], object] | None = None
        """What the next Ctrl-C stops in place of the command."""
        self._put_offs = 0
        self._report = sys.unraisablehook

    def take_over(self) -> None:
        """Takes over the signals. One that is ignored stays ignored, as under nohup."""
        for number in ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._hear)
        signal.signal(signal.SIGALRM, self._interrupt)
        sys.unraisablehook = self._raise_again

    def give_back(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in (*ENDING, signal.SIGALRM):
            if signal.getsignal(number) in (self._hear, self._interrupt):
                signal.signal(number, signal.SIG_DFL)
        sys.unraisablehook = self._report

    def _hear(self, number: int, frame: FrameType | None) -> None:
        stop, self.stop = self.stop, None
        if number == signal.SIGINT and stop is not None:
            stop()
        elif self.told is None:
            self.told = number
            self._interrupt(number, frame)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raises KeyboardInterrupt, or lets SIGALRM call this again in a moment."""
        while frame is not None and frame.f_code.co_name not in HALF_DONE:
            frame = frame.f_back
        if frame is None or self._put_offs == PUT_OFFS_MAX:
            raise KeyboardInterrupt
        self._put_offs += 1
        signal.setitimer(signal.ITIMER_REAL, PUT_OFF_S)

    def _raise_again(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Raises the interrupt once more: what is raised within a finalizer or a callback of C code ends there."""
        if unraisable.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, PUT_OFF_S)
        else:
            self._report(unraisable)


_ending = _Ending()


def end_as_interrupt() -> None:
    """Lets the first signal from here on raise KeyboardInterrupt in the main thread; later ones do nothing."""
    _ending.take_over()


@contextmanager
def stopping(stop: Callable[[], object]) -> Iterator[None]:
    """A block in which Ctrl-C calls `stop`, and the command goes on. The second in one block, and every other signal, ends it."""
    _ending.stop = stop
    try:
        yield
    finally:
        _ending.stop = None


def told() -> int | None:
    """The signal that ends this command, if one has come. Then an error that follows from its interrupt is no error of its own."""
    return _ending.told


def end_as_told() -> None:
    """Ends the process by the signal that came. Without one, it gives signals back to the kernel: Python handles none at exit."""
    _ending.give_back()
    if _ending.told is not None:
        signal.raise_signal(_ending.told)
