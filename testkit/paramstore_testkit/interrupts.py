"""Interrupts a call at any line of some modules, as Ctrl-C would."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that a call runs in `modules`, named by the ends of their paths.

    Not where a `with` begins or ends, nor at a `try:`: there Python takes no signal, or every lock could stay locked. Nor in a
    finalizer, where it is lost, nor before the release of a lease has begun: whether its tensors are used on then nobody can say.
    """

    def __init__(self, line: int, modules: tuple[str, ...]) -> None:
        self._modules = modules
        self._left = line
        self.is_raised = False

    def __enter__(self) -> Interrupt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> bool:
        sys.settrace(None)
        return isinstance(error[1], KeyboardInterrupt)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        caller = "" if frame.f_back is None else frame.f_back.f_code.co_name
        if not frame.f_code.co_filename.endswith(self._modules) or "__del__" in (frame.f_code.co_name, caller):
            return None
        if frame.f_code.co_name == "__exit__":
            return None
        here = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not self.is_raised and not here.startswith(("with ", "try:", "self._has_views = False")):
            self._left -= 1
            if self._left == 0:
                self.is_raised = True
                raise KeyboardInterrupt
        return self._trace
