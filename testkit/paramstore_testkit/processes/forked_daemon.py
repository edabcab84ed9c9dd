"""`paramstore serve` in a process of its own, up in milliseconds: forked off one that has imported torch and all of the daemon.

`ForkedDaemon` is `DaemonProcess` for tests that ask what a daemon does, not how its process starts: it runs the same command line
with its own arguments, variables, files and exit code, and spares two seconds of imports. `_Forker` owns the process that forks,
one for this process's whole life; it ends when its socket does. Between it and a daemon stands a keeper, which waits for the
daemon and tells its status: a daemon's parent is never the test.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess

MODULE = "paramstore_testkit.processes.forked_daemon"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Of who forks, so that libraries start no threads before; a daemon sets the first one itself."""
ALIGNMENT = "SEGMENT_ALIGNMENT_BYTES"
REQUEST_BYTES_MAX = 1 << 17
FORK_S = 60.0
"""The first fork waits for the imports."""


class ForkedDaemon(DaemonProcess):
    """One `paramstore serve` over `directory`, forked. See `DaemonProcess`. segment_bytes: whole pages, the size and alignment of
    its arenas' segments: a small arena has several then, where it has one otherwise."""

    def __init__(
        self, directory: Path, *arguments: str, environment: Mapping[str, str] = QUIET, segment_bytes: int | None = None
    ) -> None:
        super().__init__(directory, *arguments, environment=environment, command=("serve",))
        self._segment_bytes = segment_bytes

    def spawn(self, log: IO[bytes]) -> Forked:
        return _forker().fork(self._command, self._environment, log, segment_bytes=self._segment_bytes)


class Forked:
    """A daemon's process. See `Process`."""

    def __init__(self, pid: int, stdout: IO[bytes], status: IO[bytes]) -> None:
        self.pid = pid
        self.stdout: IO[bytes] | None = stdout
        self.returncode: int | None = None
        self._status = status

    def send_signal(self, number: int) -> None:
        if self.returncode is None and not self._has_ended(0.0):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; gives its exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not self._has_ended(timeout):
                assert timeout is not None
                raise subprocess.TimeoutExpired(["paramstore", "serve"], timeout)
            with self._status:
                self.returncode = int(self._status.readline())
        return self.returncode

    def _has_ended(self, timeout_s: float | None) -> bool:
        return bool(select.select([self._status], [], [], timeout_s)[0])


class _Forker:
    """Owner of the process that forks daemons."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno())], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                env={**os.environ, **ENVIRONMENT},
            )  # fmt: skip
        atexit.register(self.close)

    def fork(self, words: Sequence[str], environment: Mapping[str, str], log: IO[bytes], *, segment_bytes: int | None) -> Forked:
        """Starts a daemon whose stderr is `log`."""
        request = {
            "words": list(words), "environment": dict(environment), "directory": os.getcwd(), "segment_bytes": segment_bytes,
        }  # fmt: skip
        (stdout, their_stdout), (status, their_status) = os.pipe(), os.pipe()
        descriptors = [their_stdout, log.fileno(), their_status]
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        finally:
            os.close(their_stdout)
            os.close(their_status)
        told = os.fdopen(status, "rb", buffering=0)  # a buffer would hide what select waits for
        assert select.select([told], [], [], FORK_S)[0], "no daemon was forked"
        return Forked(int(told.readline()), os.fdopen(stdout, "rb"), told)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def _forker() -> _Forker:
    return _Forker()


# --- the process that forks


def main() -> None:
    import paramstore.cli.serve
    import paramstore.daemon.server
    import paramstore.optim.update  # noqa: F401 - loads torch for every daemon at once

    gc.collect()
    gc.freeze()  # what the imports made is never garbage: no daemon looks at it again
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        while True:
            data, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 3)
            if not data:
                return
            if os.fork() == 0:
                requests.close()
                _keep(json.loads(data), *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            while _reaped():
                pass


def _reaped() -> bool:
    """Whether a keeper was there that had ended."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _keep(request: dict[str, Any], stdout: int, log: int, status: int) -> NoReturn:
    """Starts the daemon; tells its process and then its status, as lines on `status`."""
    daemon = os.fork()
    if daemon == 0:
        os.close(status)
        _serve(request, stdout, log)
    os.close(stdout)
    os.close(log)
    os.write(status, b"%d\n" % daemon)
    _, how = os.waitpid(daemon, 0)
    os.write(status, b"%d\n" % os.waitstatus_to_exitcode(how))
    os._exit(0)


def _serve(request: dict[str, Any], stdout: int, log: int) -> NoReturn:
    """Lives a daemon's whole life, as `python -m paramstore serve` does."""
    code: object = 1
    try:
        for descriptor, standard in ((stdout, 1), (log, 2)):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        sys.stdout = os.fdopen(1, "w", closefd=False)  # the former ones know what those of who forks were
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        from paramstore import __main__ as paramstore_main

        if (segment_bytes := request["segment_bytes"]) is not None:
            from paramstore.engine.tables import arena
            from paramstore.memory import arena as memory

            for module, name in ((arena, "SEGMENT_BYTES"), (arena, ALIGNMENT), (memory, ALIGNMENT)):
                assert hasattr(module, name), f"{module} has no {name}"
                setattr(module, name, segment_bytes)
        sys.modules["__main__"] = paramstore_main
        sys.argv = [paramstore_main.__file__, *request["words"]]
        paramstore_main.main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001 - it never returns to the loop of who forked it
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined] # as the interpreter does at its end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
