"""`python -m paramstore_testkit.processes.audited_serve --dir DIR`: a daemon under an audit hook, from before its first import.

Whatever could run code that came as data is written to stderr, in a line that starts with `audit: `: unpickling, marshal outside
an import, other programs and, once it listens, compiling or executing code outside an import. The hook cannot be taken off.
"""

from __future__ import annotations

import ast
import os
import sys
import traceback
from types import FrameType

MARK = "audit: "
MODULE = "paramstore_testkit.processes.audited_serve"
ALWAYS = frozenset({
    "pickle.find_class", "os.exec", "os.system", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen",
    "pty.spawn",
})  # fmt: skip
OUTSIDE_IMPORTS = frozenset({"marshal.loads", "marshal.load", "code.__new__"})
ONCE_IT_LISTENS = frozenset({"compile", "exec"})
IMPORT_MACHINERY = "<frozen importlib"
LIST_LIBRARIES = ["/sbin/ldconfig", "-p"]
"""What `ctypes.util.find_library` runs, with which a package that CUDA's build of torch imports looks for libdl."""
FRAMES_MAX = 12


class Auditor:
    """The audit hook. is_listening: whether the daemon has its socket."""

    def __init__(self) -> None:
        self.is_listening = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "socket.bind":
            self.is_listening = True
        elif self._is_always(event, arguments) or (self._is_late(event) and not (_is_importing() or _is_underlining())):
            os.write(2, f"{MARK}{event} {_short(arguments)} from {' < '.join(_callers())}\n".encode(errors="replace"))

    def _is_always(self, event: str, arguments: tuple[object, ...]) -> bool:
        return event in ALWAYS and not _is_listing_libraries(arguments)

    def _is_late(self, event: str) -> bool:
        return event in OUTSIDE_IMPORTS or (self.is_listening and event in ONCE_IT_LISTENS)


def _short(arguments: tuple[object, ...]) -> str:
    return repr(arguments)[:200].replace("\n", " ")


def _callers() -> list[str]:
    """Names where an event comes from, innermost first."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(found) < FRAMES_MAX:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return found


def _is_importing() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORT_MACHINERY):
            return True
        frame = frame.f_back
    return False


def _is_listing_libraries(arguments: tuple[object, ...]) -> bool:
    """Whether an import runs the program that lists the system's libraries, which gets nothing that came as data."""
    return len(arguments) > 1 and arguments[1] == LIST_LIBRARIES and _is_importing()


def _is_underlining() -> bool:
    """Whether a traceback for the log parses a line of our own source, to mark the place in it: then nothing is executed."""
    frame = sys._getframe(2)
    caller = frame.f_back
    return frame.f_code.co_filename == ast.__file__ and caller is not None and caller.f_code.co_filename == traceback.__file__


if __name__ == "__main__":
    sys.addaudithook(Auditor())
    import logging

    from paramstore.config import load
    from paramstore.daemon.server import run

    logging.basicConfig(level=logging.INFO)
    run(load({"dir": sys.argv[sys.argv.index("--dir") + 1]}))
