"""Finds where a daemon listens, and connects a socket to it.

A socket is handed out only if the process behind it has this user's id or is root's: another user's daemon would see
gradients and could feed weights.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

from paramstore.config import Config
from paramstore.core import arguments
from paramstore.errors import ConfigError, StoreUnavailable
from paramstore.holder import daemon_of

ADDRESS_VARIABLE = "PARAMSTORE_ADDRESS"
SCHEME = "unix://"
PATH_BYTES_MAX = 107
"""Longest path in bytes: sockaddr_un holds 108, one of them the terminating zero."""
PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
TIME_VALUE = struct.Struct("ll")  # seconds, microseconds

Address = str | os.PathLike[str]


def parse_address(address: Address) -> Path:
    """The socket's path in `unix:///path`, or in a plain path; a store's directory stands for the socket that
    `paramstore serve --dir` has there. Raises ConfigError."""
    text = arguments.path("address", address)
    path = text.removeprefix(SCHEME)
    if not path or "://" in path:
        raise ConfigError(f"address {text!r}: write unix:///path/to/paramstore.sock, or the path alone")
    if os.path.isdir(path):
        path = str(Config(dir=Path(path)).socket_path)
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise ConfigError(f"{text!r}: a socket's path has {PATH_BYTES_MAX} bytes at most; serve with a shorter --socket")
    return Path(path)


def url(path: Path) -> str:
    """`path` as people are shown it: absolute, whatever their directory. (It is dialled as given: absolute it may be too long.)"""
    return f"{SCHEME}{path.absolute()}"


def store_of(path: Path) -> Path | None:
    """The directory of the store whose daemon listens at `path` by default; None if `path` is no store's default."""
    directory = path.parent.parent
    return directory if Config(dir=directory).socket_path == path else None


def default_path() -> Path:
    """The socket's path for `address=None` without autostart: PARAMSTORE_ADDRESS, else the default of `paramstore serve`."""
    variable = os.environ.get(ADDRESS_VARIABLE)
    return parse_address(variable) if variable else Config().socket_path


def try_connect(path: Path, *, timeout_s: float) -> socket.socket | None:
    """A connected socket; None if nobody listens at `path`. Raises StoreUnavailable if whoever listens there cannot be used."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _connect(sock, path, timeout_s)
        _check_peer(sock, path)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        sock.close()
        return None
    except TimeoutError as error:
        sock.close()
        raise StoreUnavailable(f"{url(path)}: the daemon accepted no connection within {timeout_s:g} s") from error
    except OSError as error:
        sock.close()
        raise unreachable(path, error) from error
    except BaseException:
        sock.close()
        raise
    return sock


def listener_of(path: Path, *, timeout_s: float) -> int | None:
    """The id of the process that listens at `path`, None if none does. Raises StoreUnavailable if it cannot be used."""
    sock = try_connect(path, timeout_s=timeout_s)
    if sock is None:
        return None
    with sock:
        return peer(sock)[0]


def unreachable(path: Path, error: OSError) -> StoreUnavailable:
    """The error for a path where a daemon may listen that this process cannot reach."""
    if not isinstance(error, PermissionError):
        return StoreUnavailable(f"{url(path)}: {error}")
    place = path.absolute()
    while not os.access(place, os.F_OK):
        place = place.parent
    return StoreUnavailable(
        f"{url(path)}: {error.strerror}: {place} belongs to user {place.stat().st_uid}, and a daemon serves its own user alone: "
        "run this as that user, or as root"
    )


def absence(path: Path) -> str:
    """Says that no daemon listens at `path`, and that nothing is there, or a file, which means that the path is misspelt."""
    directory, why = store_of(path), ""
    if directory is not None and not directory.is_dir():
        shown = directory.absolute()
        why = f", as {shown} is a file" if directory.exists() else f", as there is no directory {shown}"
    elif directory is None and not path.is_socket():
        what = "a file, and neither" if path.exists() else "neither"
        why = f", where there is {what} a store's directory nor a socket"
    return f"no daemon listens at {url(path)}{why}"


def nobody_listens(path: Path) -> StoreUnavailable:
    """The error for a path at which nobody listens; it says so if a daemon holds the store all the same."""
    directory = store_of(path)
    with suppress(OSError):
        if directory is not None and (daemon := daemon_of(directory)) is not None:
            return StoreUnavailable(
                f"daemon {daemon} holds {directory}, and nobody listens at {url(path)}: wait while it starts, or give the "
                f"--socket that it was started with; where its socket was removed, `paramstore stop {directory}`, then serve again"
            )
    is_there = directory is not None and directory.is_dir()
    shown, given = (directory, repr(str(directory))) if is_there else ("DIR", "...")
    return StoreUnavailable(
        f"{absence(path)}: start one with `paramstore serve --dir {shown}`, or connect with autostart=ServeOptions(dir={given})"
    )


def _connect(sock: socket.socket, path: Path, timeout_s: float) -> None:
    """Connects; waits while the daemon's queue is full, as when many connect at once. Raises TimeoutError, OSError.

    The kernel's send timeout is set, as Python's own makes the socket non-blocking, and the kernel refuses such a one at once.
    """
    seconds, microseconds = divmod(max(1, round(timeout_s * 1e6)), 1_000_000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIME_VALUE.pack(seconds, microseconds))
    try:
        sock.connect(str(path))
    except BlockingIOError as error:
        raise TimeoutError from error
    sock.settimeout(timeout_s)


def _check_peer(sock: socket.socket, path: Path) -> None:
    process_id, user_id = peer(sock)
    if user_id not in (os.geteuid(), 0):
        raise StoreUnavailable(
            f"{url(path)}: process {process_id} behind it belongs to user {user_id}, not to {os.geteuid()} or root"
        )


def peer(sock: socket.socket) -> tuple[int, int]:
    """(process id, user id) of the other end."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    process_id, user_id, _ = PEER_CREDENTIALS.unpack(credentials)
    return process_id, user_id
