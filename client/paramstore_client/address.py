"""Where a daemon listens, and the connected socket to it.

A socket is handed out only if the process behind it has this user's id or is root's: another user's daemon would see
gradients and could feed weights.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from paramstore.config import Config
from paramstore.core import arguments
from paramstore.errors import ConfigError, StoreUnavailable

ADDRESS_VARIABLE = "PARAMSTORE_ADDRESS"
SCHEME = "unix://"
PATH_BYTES_MAX = 107
"""sockaddr_un holds 108 bytes, one of them the end."""
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
    """A socket's path as people are shown it: complete, wherever they stand. (Dialled as given: absolute it may be too long.)"""
    return f"{SCHEME}{path.absolute()}"


def default_path() -> Path:
    """What `address=None` means without autostart: PARAMSTORE_ADDRESS, else where `paramstore serve` listens by default."""
    variable = os.environ.get(ADDRESS_VARIABLE)
    return parse_address(variable) if variable else Config().socket_path


def try_connect(path: Path, *, timeout_s: float) -> socket.socket | None:
    """A connected socket; None if nobody listens at `path`. Raises StoreUnavailable if somebody does who cannot be used."""
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
        raise StoreUnavailable(f"{url(path)}: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def nobody_listens(path: Path) -> StoreUnavailable:
    """The error for a path without a daemon."""
    return StoreUnavailable(
        f"no daemon listens at {url(path)}: start one with `paramstore serve --dir DIR`, or connect with"
        " autostart=ServeOptions(dir=...)"
    )


def _connect(sock: socket.socket, path: Path, timeout_s: float) -> None:
    """Waits while the daemon's queue is full: where many connect at once. Raises TimeoutError, OSError.

    Python's own timeout makes the socket non-blocking, and the kernel refuses such a one at once.
    """
    seconds, microseconds = divmod(max(1, round(timeout_s * 1e6)), 1_000_000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIME_VALUE.pack(seconds, microseconds))
    try:
        sock.connect(str(path))
    except BlockingIOError as error:
        raise TimeoutError from error
    sock.settimeout(timeout_s)


def _check_peer(sock: socket.socket, path: Path) -> None:
    process_id, user_id, _ = PEER_CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    )
    if user_id not in (os.geteuid(), 0):
        raise StoreUnavailable(
            f"{url(path)}: process {process_id} behind it belongs to user {user_id}, not to {os.geteuid()} or root"
        )
