"""Interrupts a call at any line of some modules, or at any point where Python runs handlers of signals, as Ctrl-C would."""

from __future__ import annotations

import dis
import linecache
import opcode
import sys
from collections.abc import Callable
from types import CodeType, FrameType
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
        if event == "line" and not self.is_raised and not here.startswith(("with ", "try:", "self._end.used = {}")):
            self._left -= 1
            if self._left == 0:
                self.is_raised = True
                raise KeyboardInterrupt
        return self._trace


class InterruptAtPoint:
    """Raises KeyboardInterrupt at the n-th point of a call in `modules`, named by the ends of their paths, at which CPython runs
    handlers of signals: where a function begins, after a call of anything, and where a loop goes on. Calls of C are points at their
    ends alone: what one does is done whole. In finalizers there are none, as errors are lost there. Left out are the ends of calls
    that are the last of a block that catches: an error of the next instruction is caught elsewhere. spared: names of functions in
    which there are none.
    """

    def __init__(self, point: int, modules: tuple[str, ...], *, spared: tuple[str, ...] = ()) -> None:
        self._modules = modules
        self._spared = spared
        self._left = point
        self._last: dict[FrameType, tuple[str, int]] = {}
        """The instruction that each frame has carried out last, and its place."""
        self._handlers: dict[CodeType, list[tuple[int, int, int]]] = {}
        """(start, end, target) of what catches the errors of some code."""
        self.is_raised = False
        self.place = ""
        """Where the interrupt came."""

    def __enter__(self) -> InterruptAtPoint:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> bool:
        sys.settrace(None)
        self._last.clear()
        return isinstance(error[1], KeyboardInterrupt)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if event == "call":
            code = frame.f_code
            is_here = code.co_filename.endswith(self._modules) and code.co_name not in self._spared
            if self.is_raised or not is_here or is_finalizing(frame):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            self._last[frame] = "", 0
            self._pass_point(frame)
        elif event == "opcode":
            now, (last, place) = opcode.opname[frame.f_code.co_code[frame.f_lasti]], self._last[frame]
            self._last[frame] = now, frame.f_lasti
            is_after_call = last.startswith(("CALL", "PRECALL")) and now != "CALL"  # 3.11 has both, one after the other
            is_after_call = is_after_call and self._handler(frame.f_code, place) == self._handler(frame.f_code, frame.f_lasti)
            if is_after_call or (now.startswith(("JUMP_BACKWARD", "POP_JUMP_BACKWARD")) and not now.endswith("NO_INTERRUPT")):
                self._pass_point(frame)
        elif event == "exception":
            self._last[frame] = "", 0  # no call has ended
        else:
            self._last.pop(frame, None)
        return self._trace

    def _handler(self, code: CodeType, place: int) -> int | None:
        """Where an error of the instruction at `place` is caught."""
        if code not in self._handlers:
            entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
            self._handlers[code] = [(entry.start, entry.end, entry.target) for entry in entries]
        return next((target for start, end, target in self._handlers[code] if start <= place < end), None)

    def _pass_point(self, frame: FrameType) -> None:
        self._left -= 1
        if self._left == 0 and not self.is_raised:
            self.is_raised = True
            self.place = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            raise KeyboardInterrupt


def is_finalizing(frame: FrameType | None) -> bool:
    """Whether a finalizer, or a callback of a weak reference, is under way: there Python loses what a signal's handler raises."""
    caller = frame
    while caller is not None:
        if caller.f_code.co_name in ("__del__", "_remove") or caller.f_code.co_filename.endswith("/weakref.py"):
            return True
        caller = caller.f_back
    return False
