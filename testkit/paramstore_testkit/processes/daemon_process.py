"""A daemon in a process of its own, for tests: started, waited for, signalled, and never left behind.

Every wait is bounded; the daemon's output goes to files, so that nothing it writes can block it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0
SERVE: tuple[str, ...] = (sys.executable, "-m", "paramstore", "serve")
QUIET = {"PARAMSTORE_PREFILL": "0", "PARAMSTORE_UPDATE_WORKERS": "2", "PARAMSTORE_IO_WORKERS": "2"}
"""Settings for small tests: few threads, and no zero-fill beside them."""


class Process(Protocol):
    """What this module needs of a `subprocess.Popen`."""

    pid: int
    stdout: IO[bytes] | None

    @property
    def returncode(self) -> int | None: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class DaemonProcess:
    """One `paramstore serve` over `directory`. A context manager: on leaving it the process is gone.

    arguments: further flags. environment: variables beside this process's own. command: run instead of the CLI.
    """

    def __init__(
        self, directory: Path, *arguments: str, environment: Mapping[str, str] = QUIET, command: Sequence[str] = SERVE
    ) -> None:
        self.directory = directory
        self.socket = directory / "run" / "paramstore.sock"
        self.log = directory.with_name(f"{directory.name}.log")
        self.stdout = ""
        """Everything that it has written to stdout so far; whole after `wait`."""
        self._command = [*command, "--dir", str(directory), *arguments]
        self._environment = {**os.environ, **environment}
        self._process: Process | None = None
        self._descriptor = -1

    @property
    def address(self) -> str:
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def stderr(self) -> str:
        """Everything that the processes started by this object have logged so far."""
        return self.log.read_text(errors="replace")

    def start(self) -> DaemonProcess:
        """Starts it; returns when it serves. Raises AssertionError with its log if it ends first, or is not ready in time."""
        self.launch()
        while "\n" not in self.stdout:
            if not self._read_stdout(START_TIMEOUT_S):
                code = self.wait()
                raise AssertionError(f"the daemon ended with {code} before it served:\n{self.stderr}")
        return self

    def launch(self) -> None:
        """Starts the process, and waits for nothing."""
        self.stdout = ""
        with self.log.open("ab") as log:
            self._process = self.spawn(log)
        assert self._process.stdout is not None
        self._descriptor = self._process.stdout.fileno()

    def spawn(self, log: IO[bytes]) -> Process:
        """Makes the process, whose stderr is `log`."""
        return subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=self._environment
        )

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Waits for its end; gives its exit code (negative: the signal that ended it). Raises subprocess.TimeoutExpired."""
        assert self._process is not None
        code = self._process.wait(timeout_s)
        assert self._process.stdout is not None
        if not self._process.stdout.closed:
            while self._read_stdout(END_TIMEOUT_S):
                pass  # until the pipe's end
            self._process.stdout.close()
        return code

    def run(self) -> int:
        """Runs a daemon that is expected to refuse to start; gives its exit code."""
        self.launch()
        try:
            return self.wait()
        finally:
            self.stop()

    def kill(self) -> None:
        """Kills it with SIGKILL; returns when it is gone."""
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        """Ends it with SIGTERM, and with SIGKILL where that does not help. Idempotent."""
        if self._process is None or self._process.returncode is not None:
            return
        self.signal(signal.SIGTERM)
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def __enter__(self) -> DaemonProcess:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _read_stdout(self, timeout_s: float) -> bool:
        """Takes what it wrote next; False at the pipe's end. Raises AssertionError if nothing comes in time."""
        ready, _, _ = select.select([self._descriptor], [], [], timeout_s)
        if not ready:
            self.kill_silently()
            raise AssertionError(f"the daemon said nothing for {timeout_s:g} s:\n{self.stderr}")
        data = os.read(self._descriptor, 4096)
        self.stdout += data.decode()
        return bool(data)

    def kill_silently(self) -> None:
        """Kills it with SIGKILL, without waiting for what it still says."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(END_TIMEOUT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
