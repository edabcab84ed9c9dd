"""Starts a daemon where none runs. It is exec'd, never forked off, and outlives this process.

Ranks that start together get one daemon: each tries to connect, each may start one, the store's lock lets one of them
live, and the others end with StoreLocked while their ranks go on trying to connect. Where the one that held it was about to end,
another is started when it is gone.
"""

from __future__ import annotations

import atexit
import math
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paramstore.clock import Clock, MonotonicClock
from paramstore.config import ENVIRONMENT_PREFIX, load
from paramstore.core import arguments
from paramstore.directories import check_parent
from paramstore.errors import ConfigError, StoreLocked, StoreUnavailable
from paramstore.holder import is_held
from paramstore_client.connection.address import listener_of, try_connect, url

SERVE_COMMAND: tuple[str, ...] = (sys.executable, "-m", "paramstore", "serve")
LOG_NAME = "daemon.log"
RETRY_S = 0.02
"""Pause between two attempts to connect while a daemon starts, which takes about ten times as long."""
LOG_TAIL_LINES = 12
LEAST_FREE_BYTES = 1 << 20
"""A daemon that ends without a word, on a disk with less than this, could write none: it needs several times as much itself."""
ELSEWHERE_TIMEOUT_S = 1.0
"""Time that a daemon which listens at another socket has to accept a connection."""
HOLDER = re.compile(rf"{StoreLocked.__name__}.* is in use by process (\d+)")
"""The words in which a refused daemon names the process that holds the directory."""
LINE_BYTES_MAX = 4096

_started: list[subprocess.Popen[bytes]] = []
"""Daemons that this process started: kept so that those that end are reaped, and `Popen` does not warn when it is dropped."""


@atexit.register
def _let_them_live() -> None:
    """Runs when this process ends: its daemons live on by design, so `Popen` need not warn of them."""
    for process in _started:
        if process.poll() is None:
            process.returncode = 0


def started_in(directory: str | os.PathLike[str]) -> subprocess.Popen[bytes] | None:
    """The daemon that this process has started on `directory`, spelled as it was then; None if none of them still runs."""
    for process in _started:
        if process.poll() is None and isinstance(process.args, list) and os.fspath(directory) in process.args:
            return process
    return None


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options that `paramstore serve` is started with. Sizes are bytes or text like "64GiB"; None is the daemon's default.

    settings: any other setting by name, for example {"policy__name": "lru"}. add_volumes: directories that an existing store takes
    as new volumes, for ever. Raises ConfigError on what the daemon would refuse.
    """

    dir: str | os.PathLike[str] = "paramstore-data"
    host_budget: int | str | None = None
    volumes: Sequence[str | os.PathLike[str]] = ()
    volume_size: int | str | None = None
    gradient_budget: int | str | None = None
    socket: str | os.PathLike[str] | None = None
    config: str | os.PathLike[str] | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    add_volumes: Sequence[str | os.PathLike[str]] = ()

    def __post_init__(self) -> None:
        if self.config is not None:
            arguments.path("ServeOptions: config", self.config)
        values = self.settings.values() if isinstance(self.settings, Mapping) else (None,)
        if not all(isinstance(value, str | int | float) for value in values):  # only these fit in environment variables
            raise ConfigError(f"ServeOptions: settings={self.settings!r}: must be names with texts or numbers, as io_workers=4")
        load(self._flags(), environ={}, origin="ServeOptions")

    def socket_path(self) -> Path:
        """The path of the socket at which the daemon will listen. Raises ConfigError on options that it would refuse."""
        file = None if self.config is None else Path(self.config)
        return load(self._flags(), file=file, origin="ServeOptions").socket_path.absolute()

    def _flags(self) -> dict[str, object]:
        """The options that were given, as `config.load` takes them."""
        flags: dict[str, object] = {"dir": self.dir, **{str(name): value for name, value in self.settings.items()}}
        flags |= {name: value for name, value in (*self._sizes(), ("socket", self.socket)) if value is not None}
        return flags | {name: paths for name, paths in self._volumes() if not isinstance(paths, tuple) or paths}

    def arguments(self, socket_path: Path) -> list[str]:
        """The command line after `paramstore serve`."""
        words = ["--dir", os.fspath(self.dir), "--socket", str(socket_path)]
        for name, paths in self._volumes():
            for path in paths:
                words += [f"--{name.removesuffix('s').replace('_', '-')}", os.fspath(path)]
        for name, value in self._sizes():
            if value is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        if self.config is not None:
            words += ["--config", os.fspath(self.config)]
        return words

    def environment(self) -> dict[str, str]:
        """This process's environment, with `settings` added as variables."""
        return {**os.environ, **{ENVIRONMENT_PREFIX + name.upper(): str(value) for name, value in self.settings.items()}}

    def _volumes(self) -> tuple[tuple[str, Sequence[str | os.PathLike[str]]], ...]:
        return ("volumes", self.volumes), ("add_volumes", self.add_volumes)

    def _sizes(self) -> tuple[tuple[str, int | str | None], ...]:
        return (
            ("host_budget", self.host_budget),
            ("volume_size", self.volume_size),
            ("gradient_budget", self.gradient_budget),
        )


def connect_or_start(
    path: Path, options: ServeOptions, *, timeout_s: float, clock: Clock | None = None
) -> socket.socket:
    """A connected socket to the daemon at `path`, started if there was none.

    Raises StoreUnavailable with the end of the daemon's log if it ends before it serves, or is not ready in time, and at once
    where another daemon holds the directory and listens elsewhere; ConfigError if there can be no such directory.
    """
    clock = clock or MonotonicClock()
    deadline_s = clock.now_s() + timeout_s
    sock = try_connect(path, timeout_s=timeout_s)
    if sock is not None:
        return sock
    with _Start(options, path) as start:
        while (remaining_s := deadline_s - clock.now_s()) > 0:
            # Connect to the daemon started here only after its whole `ready` line: closing the pipe earlier would kill it.
            if start.has_spoken and (sock := try_connect(path, timeout_s=remaining_s)) is not None:
                return sock
            start.pause(min(RETRY_S, remaining_s))
        raise start.not_ready(timeout_s)


class _Start:
    """One daemon on its way to `ready`."""

    def __init__(self, options: ServeOptions, path: Path) -> None:
        directory = Path(options.dir)
        self._path = path
        self._directory = directory
        self._log = directory / LOG_NAME
        self._options = options
        check_parent("ServeOptions: dir", directory)
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"ServeOptions: dir={str(directory)!r} cannot be made a directory: {error.strerror}") from error
        self._launch()

    def _launch(self) -> None:
        """Starts the process. Raises StoreUnavailable."""
        try:
            with open(self._log, "ab", opener=_open_private) as log:
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    [*SERVE_COMMAND, *self._options.arguments(self._path)],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=self._options.environment(),
                    start_new_session=True, close_fds=True,
                )  # fmt: skip
        except OSError as error:
            raise StoreUnavailable(f"the daemon could not be started in {self._directory}: {error}") from error
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        self._lines = select.poll()
        self._lines.register(self._stdout, select.POLLIN)
        self.has_spoken = False
        _started[:] = [process for process in _started if process.poll() is None]
        _started.append(self._process)

    def pause(self, pause_s: float) -> None:
        """Returns after `pause_s`, or as soon as the daemon has printed something. Raises StoreUnavailable if it failed."""
        if self.has_spoken:
            threading.Event().wait(pause_s)
        else:
            self._listen(pause_s)
        if self._process.poll() is None:
            return
        if not self._lost_the_race():
            raise StoreUnavailable(
                f"the daemon ended with exit code {self._process.returncode} before it served. {self._tail()}"
            )
        self._check_winner()
        if self._holder() is not None and not is_held(self._directory):  # the winner was about to end
            self._stdout.close()
            self._launch()

    def _check_winner(self) -> None:
        """Raises StoreUnavailable if the daemon that holds the directory already serves at another socket."""
        holder = self._holder()
        elsewhere = _listens_at(holder) if holder is not None else None
        if elsewhere is not None and os.path.realpath(elsewhere) != os.path.realpath(self._path):
            raise StoreUnavailable(
                f"process {holder} holds {self._directory} and listens at {url(elsewhere)}, not at {url(self._path)}: "
                "connect to that address, or give ServeOptions its socket"
            )

    def _holder(self) -> int | None:
        """The process that holds the directory, as the refused daemon named it."""
        found = HOLDER.search(self._log_text())
        return int(found[1]) if found else None

    def _listen(self, pause_s: float) -> None:
        """Waits for the whole line `ready`, or the end of a daemon that lost the race: then another one serves, or will soon."""
        if self._lines.poll(math.ceil(pause_s * 1000)):
            heard = os.read(self._stdout.fileno(), LINE_BYTES_MAX)
            self.has_spoken = heard == b"" or b"\n" in heard

    def not_ready(self, timeout_s: float) -> StoreUnavailable:
        holder = self._holder()
        if holder is None:
            return StoreUnavailable(f"the daemon was not ready within {timeout_s:g} s; raise timeout_s. {self._tail()}")
        return StoreUnavailable(
            f"process {holder} holds {self._directory}, and within {timeout_s:g} s nobody listened at {url(self._path)}: connect "
            f"to the address that it was started with, or raise timeout_s if it is starting. {self._tail()}"
        )

    def __enter__(self) -> _Start:
        return self

    def __exit__(self, *error: object) -> None:
        self._stdout.close()

    def _lost_the_race(self) -> bool:
        return StoreLocked.__name__ in self._log_text()

    def _log_text(self) -> str:
        try:
            with self._log.open("rb") as log:
                log.seek(self._log_start)
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def _tail(self) -> str:
        lines = self._log_text().splitlines()[-LOG_TAIL_LINES:]
        if lines:
            return f"The end of {self._log}:\n" + "\n".join(lines)
        try:
            left_bytes = shutil.disk_usage(self._directory).free
        except OSError:
            left_bytes = LEAST_FREE_BYTES
        full = f": its disk is full, with {left_bytes} bytes free; free some there, and try again"
        return f"{self._log} has nothing new{full if left_bytes < LEAST_FREE_BYTES else '.'}"


def _listens_at(process_id: int) -> Path | None:
    """The socket's path in that process's command line, if it listens there; None if it does not, or not yet.

    Only the command line can be read from outside: a daemon lets nobody look at its descriptors.
    """
    try:
        words = Path(f"/proc/{process_id}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    given = words[words.index(b"--socket") + 1 :] if b"--socket" in words else []
    if not given or not given[0]:
        return None
    path = Path(os.fsdecode(given[0]))
    with suppress(StoreUnavailable):
        if listener_of(path, timeout_s=ELSEWHERE_TIMEOUT_S) == process_id:
            return path
    return None


def _open_private(path: str, flags: int) -> int:
    """Opens a file for this user alone, as the log names keys and places; one that others could read is closed to them.

    A link in its place is not followed, a FIFO not waited for: both raise OSError.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor
