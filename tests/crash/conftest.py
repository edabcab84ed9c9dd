"""Real daemons over real files, killed at a point of their work."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

START_S = 60.0
LINE_S = 30.0
MIB = 1 << 20


class Daemons:
    """Owner of the process that forks them; at most one of them lives at a time."""

    def __init__(self, log: Path) -> None:
        self._log = log
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paramstore.testing.killable_serve"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment,
            )  # fmt: skip
        self._unread = b""
        self._pid = 0
        self._is_running = False
        self._is_warm = False

    def start(self, directory: Path, *, kill_at: int = 0) -> str | None:
        """The address of a daemon that serves; None if it died before. Raises AssertionError if it refused."""
        flags: dict[str, Any] = {
            "dir": str(directory), "volumes": [str(directory / name) for name in ("a", "b")], "host_budget": 16 * MIB,
            "prefill": False, "update_workers": 2, "io_workers": 2,
        }  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"kill_at": kill_at, "flags": flags}).encode() + b"\n")
        self._process.stdin.flush()
        self._pid = int(self._line().removeprefix("pid "))
        self._is_running = True
        said = self._line()
        if said.startswith("ready "):
            return said.removeprefix("ready ")
        self._ended(said)
        return None

    def wait_killed(self) -> None:
        """Returns when the daemon is gone, which is to say killed at its point."""
        if self._is_running:
            self._ended(self._line())

    def kill(self) -> None:
        """Ends a daemon that no point ended."""
        if self._is_running:
            os.kill(self._pid, signal.SIGKILL)
            self.wait_killed()

    def close(self) -> None:
        self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(LINE_S)
        self._process.stdout.close()

    def _ended(self, said: str) -> None:
        self._is_running = False
        assert said == f"ended {-signal.SIGKILL}", f"{said}\n{self._log.read_text()[-3000:]}"

    def _line(self) -> str:
        """What is said next; the first time it takes as long as importing torch does."""
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], LINE_S if self._is_warm else START_S)
            data = os.read(self._process.stdout.fileno(), 4096) if ready else b""
            assert data, f"nothing said\n{self._log.read_text()[-3000:]}"
            self._unread += data
        self._is_warm = True
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    daemons = Daemons(tmp_path_factory.mktemp("daemons") / "log")
    yield daemons
    daemons.close()
