"""The daemon's process: socket, sessions, signals, start and shutdown.

The socket is bound under umask 0177 and serves processes of the daemon's own user (and root) only. Its directory is made with mode
0700, or is one that nobody else can write. Start: lock, store, socket, then one line `ready unix:///...` on stdout. End: no new
clients, sessions closed, transfers under way finished, volumes closed; clients are never waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from paramstore.config import Config
from paramstore.daemon.assembly import assemble, take_lock
from paramstore.daemon.garbage import ENDED_SESSIONS, ENDED_SESSIONS_MAX, look_at_everything, tables_spared
from paramstore.daemon.service import Service
from paramstore.daemon.session import Session
from paramstore.directories import check_parent, is_missing
from paramstore.errors import CapacityError, ConfigError, ParamStoreError, ProtocolError, StoreLocked
from paramstore.storage.lock import StoreLock
from paramstore.wire.codec import encode
from paramstore.wire.messages import Failed

logger = logging.getLogger(__name__)

SESSIONS_MAX = 256
HALF_OPEN_MAX = 64
"""Most connections without a hello. Beyond it the oldest is closed, so that a flood of them keeps out nobody who says hello."""
LINGERING_MAX = 4096
"""Most sessions, with those whose connection has ended while their process lives and may read what it leased."""
BACKLOG = 64
ACCEPT_PAUSE_S = 0.1
"""Pause after an accept that failed: the client still waits, so the loop would report it again without end."""
FIRST_SESSION_S = 10.0
"""Least time that a daemon which ends when it is unused waits for its first session."""
UNUSED_LOOKS = 4
"""Looks in a row at which nobody has a session, until a daemon is unused. A loop that was held up counts as one look: who waits to
be accepted meanwhile is seen before the next."""
LOCK_TRIES = 5
LOCK_PAUSE_S = 0.05
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
SWITCH_INTERVAL_S = 0.0005
"""Longest time a worker that runs Python may keep the loop waiting: Python's own 5 ms would be most of a lease's p99."""
SOCKET_PATH_BYTES_MAX = 107


def _refuse(sock: socket.socket, error: ParamStoreError) -> None:
    """Tells a client why it is not let in, as far as its socket takes that at once, and hangs up."""
    sock.setblocking(False)
    with contextlib.suppress(OSError):
        sock.send(encode(Failed(0, type(error).__name__, str(error))))
    sock.close()


class Server:
    """Accepts the clients of one service.

    on_unused: called once, `unused_s` after the last session's connection has ended; 0: never. What an ended session still has
    leased is no use: its process reads on without the daemon.
    """

    def __init__(
        self, service: Service, listener: socket.socket, *, unused_s: float = 0.0, on_unused: Callable[[], object] = bool
    ) -> None:
        self._service = service
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._sessions: set[Session] = set()
        self._ended_count = 0
        """Number of sessions that ended since everything was looked at for garbage."""
        self._half_open: list[Session] = []
        """Sessions that may not have said hello yet, oldest first."""
        self._loop.add_reader(listener.fileno(), self._accept)
        self._look_pause_s, self._on_unused = unused_s / UNUSED_LOOKS, on_unused
        self._unused_looks = 0
        self._look_timer = self._loop.call_later(max(unused_s, FIRST_SESSION_S), self._look) if unused_s else None

    def _look(self) -> None:
        """Looks whether anybody has a session, now and then again."""
        self._unused_looks = 0 if self._open_count() else self._unused_looks + 1
        if self._unused_looks == UNUSED_LOOKS:
            self._look_timer = None
            logger.info("nobody has a session")
            self._on_unused()
        else:
            self._look_again()

    def _look_again(self) -> None:
        self._look_timer = self._loop.call_later(self._look_pause_s, self._look)

    def _open_count(self) -> int:
        return sum(not session.is_ended for session in self._sessions)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # no descriptors left, or the client gave up: the daemon lives on
            logger.warning("accept failed: %s", error)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(ACCEPT_PAUSE_S, self._accept_again)
            return
        if self._open_count() >= SESSIONS_MAX or len(self._sessions) >= LINGERING_MAX:
            logger.warning("refused a client: %d sessions are open, %d in all", self._open_count(), len(self._sessions))
            _refuse(sock, CapacityError(f"the daemon serves {SESSIONS_MAX} sessions, which is its limit: close some"))
            return
        try:
            session = Session(self._service, sock, on_gone=self._gone)
        except OSError as error:  # no descriptor is left to watch the client's process with
            logger.warning("a client was not let in: %s", error)
            _refuse(sock, CapacityError(f"the daemon has no descriptor left for another client: {error}"))
            return
        if session.uid not in (os.getuid(), 0):
            logger.warning("refused pid %d of uid %d", session.pid, session.uid)
            session.close(None)
            return
        self._sessions.add(session)
        if self._look_timer is not None:  # the first session has come: from now on the time is counted from the last one's end
            self._look_timer.cancel()
            self._unused_looks = 0
            self._look_again()
        self._half_open = [other for other in self._half_open if not (other.is_known or other.is_ended)]
        self._half_open.append(session)
        if len(self._half_open) > HALF_OPEN_MAX:
            self._half_open.pop(0).close(ProtocolError(f"{HALF_OPEN_MAX} later connections wait for their hello, too"))

    def _gone(self, session: Session) -> None:
        self._sessions.discard(session)
        self._ended_count += 1
        if self._ended_count >= (ENDED_SESSIONS_MAX if self._sessions else ENDED_SESSIONS):
            self._ended_count = 0
            self._loop.call_soon(look_at_everything)  # not in the call of a session that is to be freed

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:  # not closed meanwhile
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Stops accepting clients and disconnects those there are."""
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        if self._look_timer is not None:
            self._look_timer.cancel()
        for session in list(self._sessions):
            session.close(None)


def check_socket_path(path: Path) -> None:
    """Checks that a socket can have that path. Raises ConfigError."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(f"socket path {path} is longer than {SOCKET_PATH_BYTES_MAX} bytes: give a shorter --socket")


def listen(path: Path) -> socket.socket:
    """Listens on a socket at `path` that only this user may connect to; a stale socket is replaced. A missing directory is made
    for this user alone, but not its parent; an existing one keeps its mode. Raises ConfigError if others can write there, or if
    something other than a stale socket lies there."""
    check_socket_path(path)
    try:
        if is_missing(path.parent):
            path.parent.mkdir(exist_ok=True, mode=0o700)
            logger.info("made the directory %s for the socket", path.parent.absolute())
        status = path.parent.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"socket directory {path.parent} is a link: give the place it leads to as --socket")
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(f"socket directory {path.parent} can be written by others: chmod 0700, or give another --socket")
        _remove_stale(path)
        return _bound(path)
    except OSError as error:
        raise ConfigError(f"socket {path}: {error}") from error


def _remove_stale(path: Path) -> None:
    """Removes a stale socket; on return nothing is at `path`. Raises ConfigError if it is no socket, or if somebody listens."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"socket {path}: there is a file of that name that is no socket: give another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # somebody listens, with a full backlog
    raise ConfigError(f"socket {path}: another process listens there: stop it, or give another --socket")


def _bound(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def harden() -> None:
    """Forbids core dumps of other people's weights, /proc/PID/mem for processes of the same user, and rights gained by an exec."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None)
    for name, option, value in (("DUMPABLE", PR_SET_DUMPABLE, 0), ("NO_NEW_PRIVS", PR_SET_NO_NEW_PRIVS, 1)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            logger.warning("prctl(PR_SET_%s) refused", name)


async def lock_with_retry(config: Config) -> StoreLock:
    """Takes the store's lock; tries again, since a daemon that was just killed may hold it a moment longer. Raises StoreLocked."""
    for _ in range(LOCK_TRIES - 1):
        try:
            return take_lock(config)
        except StoreLocked:
            await asyncio.sleep(LOCK_PAUSE_S)
    return take_lock(config)


async def serve(config: Config) -> None:
    """Runs a daemon until SIGTERM, SIGINT or SIGHUP, or until it is unused where its settings say so. Raises whatever keeps it
    from starting."""
    check_socket_path(config.socket_path)  # before anything is touched on disk
    if not config.socket_path.absolute().is_relative_to(config.dir.absolute()):  # the store's directory is made first
        check_parent("socket directory", config.socket_path.parent)
    stop = asyncio.Event()
    _heed_signals(stop)
    harden()
    lock = await lock_with_retry(config)
    try:
        service = await assemble(config)
        try:
            await _serve_until(stop, service, config)
        finally:
            await service.close()
        logger.info("stopped")
    finally:
        lock.release()


def _heed_signals(stop: asyncio.Event) -> None:
    """Lets each signal set `stop`, for the rest of the process: asyncio's own handlers end with the loop, before the process."""
    loop = asyncio.get_running_loop()

    def heed(number: int, frame: FrameType | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored: started by nohup
            signal.signal(number, heed)


async def _serve_until(stop: asyncio.Event, service: Service, config: Config) -> None:
    server = Server(service, listen(config.socket_path), unused_s=config.ends_when_unused_s, on_unused=stop.set)
    try:
        sys.stdout.write(f"ready unix://{config.socket_path.absolute()}\n")
        sys.stdout.flush()
        logger.info("serving unix://%s", config.socket_path.absolute())
        await stop.wait()
        logger.info("stopping")
    finally:
        with contextlib.suppress(OSError):
            config.socket_path.unlink()  # first: whoever is cut off and looks again finds no daemon
        server.close()


def run(config: Config) -> None:
    """Runs `serve` on uvloop where it is installed, else on asyncio's own loop."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    with tables_spared(), asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(config))
