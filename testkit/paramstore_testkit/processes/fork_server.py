"""Processes that are up in milliseconds: forked, one after the other, off a process that has imported all they need.

`serve_forks` is that process's main loop, `ForkServer` the other end of its pipes. Every wait is bounded. Children write stderr
to a log, which is part of the error if a child does what it should not.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_S = 60.0
LINE_S = 30.0
LOG_TAIL_BYTES = 4000
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Settings by which libraries start no threads before a fork."""
PID = "pid "
ENDED = "ended "


def serve_forks(live: Callable[[dict[str, Any]], None]) -> None:
    """Runs `live(request)` in a child for each line of JSON on stdin. stdout gets `pid N`, what the child says, `ended STATUS`.

    The child is reaped only after a further line came in: until then its number is not given to another process.
    """
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _live(live, request)
        say(f"{PID}{child}")
        sys.stdin.readline()
        _, status = os.waitpid(child, 0)
        say(f"{ENDED}{os.waitstatus_to_exitcode(status)}")


def say(line: str) -> None:
    """Writes one line to stdout, whole or not at all."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def _live(live: Callable[[dict[str, Any]], None], request: dict[str, Any]) -> None:
    """Lives the child's whole life."""
    code = 1
    try:
        live(request)
        code = 0
    except BaseException:  # noqa: BLE001 - a child never returns to its parent's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class ForkServer:
    """Owner of the process that runs `module`, and of its one child. A context manager."""

    statuses: tuple[int, ...] = (-signal.SIGKILL,)
    """Statuses with which a child may end."""

    def __init__(self, module: str, *arguments: str, log: Path) -> None:
        self._log = log
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                env={**os.environ, **ENVIRONMENT},
            )  # fmt: skip
        self._unread = b""
        self._pid = 0
        self._pidfd = -1
        self._is_warm = False
        self.status: int | None = None
        """How the last child ended; None while it lives."""

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def is_running(self) -> bool:
        """Whether the child was not seen to end."""
        return self._pidfd >= 0

    def fork(self, request: Mapping[str, Any]) -> None:
        """Makes a new child and gives it its request; waits for nothing that it does."""
        assert not self.is_running, "the child before lives"
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        early = []
        while not (said := self._line()).startswith(PID):  # the child may speak before its parent does
            early.append(said)
        self._unread = "".join(f"{line}\n" for line in early).encode() + self._unread
        self._pid, self.status = int(said.removeprefix(PID)), None
        self._pidfd = os.pidfd_open(self._pid)
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def heard(self) -> str | None:
        """The child's next line; None once it has ended. Raises AssertionError if it ended otherwise than `statuses` allow."""
        said = self._line()
        if not said.startswith(ENDED):
            return said
        self._ended(said)
        return None

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the child, which lives."""
        signal.pidfd_send_signal(self._pidfd, number)

    def kill_within(self, delay_s: float) -> None:
        """Kills the child after `delay_s`, unless it ends before. May be called from another thread than the rest."""
        pidfd = os.dup(self._pidfd)
        try:
            if not select.select([pidfd], [], [], delay_s)[0]:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the child ended just now
        finally:
            os.close(pidfd)

    def wait_ended(self) -> list[str]:
        """Waits until the child is gone; gives what it had said and nobody heard."""
        lines: list[str] = []
        while self.is_running and (said := self.heard()) is not None:
            lines.append(said)
        return lines

    def kill(self) -> list[str]:
        """Kills the child, and does `wait_ended`."""
        if self.is_running:
            self.kill_within(0.0)
        return self.wait_ended()

    def close(self) -> None:
        self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(LINE_S)
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ended(self, said: str) -> None:
        os.close(self._pidfd)
        self._pidfd = -1
        self.status = int(said.removeprefix(ENDED))
        assert self.status in self.statuses, f"{said}\n{self._log_tail()}"

    def _line(self) -> str:
        """Waits for the next line; the first one takes as long as the imports do."""
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], LINE_S if self._is_warm else START_S)
            data = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            assert data, f"nothing said\n{self._log_tail()}"
            self._unread += data
        self._is_warm = True
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def _log_tail(self) -> str:
        return self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
