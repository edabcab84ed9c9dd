"""The number of this process, without a call to the system each time: 0.1 us of the 4 that a visit of standing experts takes."""

from __future__ import annotations

import os

pid = os.getpid()


def _look_again() -> None:
    global pid  # noqa: PLW0603 - a name of a module is read faster than any attribute
    pid = os.getpid()


os.register_at_fork(after_in_child=_look_again)
