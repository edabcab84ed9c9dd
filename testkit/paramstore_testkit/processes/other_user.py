"""`python -m paramstore_testkit.processes.other_user UID serve|try`: a daemon, or attempts on one, as a process of another user.

Imports come before the change of user, who may not be able to read this installation. `serve` runs a daemon with
umask 0, the least that it may rely on; with `--soft` without its hardening. `try` takes a list of [act, argument] as
JSON on stdin and writes one outcome for each: "done", or the name of the error. An act that succeeds changes nothing, and
a process that is attached to is let go. `DaemonProcess` runs the one, `outcomes` the other.
"""

from __future__ import annotations

import argparse
import codecs
import ctypes
import errno
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import uvloop  # noqa: F401 - for `server.run`

from paramstore.config import load
from paramstore.daemon import server
from paramstore.errors import ParamStoreError
from paramstore.wire import messages as m
from paramstore.wire.codec import FrameDecoder, decode_answer, encode

MODULE = "paramstore_testkit.processes.other_user"
LIMIT_S = 30.0
READ_BYTES = 1 << 16
PTRACE_DETACH = 17
PTRACE_SEIZE = 0x4206
SYS_PIDFD_GETFD = 438
FDS_TRIED = 32
CODECS = ("unicode_escape", "latin-1", "ascii")
"""Codecs that the daemon looks up when it meets them."""
SOMEWHERE = 4096
"""An address at which nothing is mapped: only who may read the memory is told so."""

Act = tuple[str, str | int]


def command(uid: int, *words: str) -> tuple[str, ...]:
    """Command with which `DaemonProcess` runs a daemon of user `uid`."""
    return (sys.executable, "-m", MODULE, str(uid), "serve", *words)


def outcomes(uid: int, acts: Sequence[Act]) -> list[str]:
    """Tries each act in a process of user `uid`; gives the outcomes. Only root may act as another user."""
    done = subprocess.run(
        [sys.executable, "-m", MODULE, str(uid), "try"], input=json.dumps(acts).encode(), capture_output=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    found: list[str] = json.loads(done.stdout)
    return found


# --- in the process of its own


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("uid", type=int)
    parser.add_argument("mode", choices=("serve", "try"))
    parser.add_argument("--soft", action="store_true")
    parser.add_argument("--dir")
    known = parser.parse_args()
    become(known.uid)
    if known.mode == "serve":
        os.umask(0)
        if known.soft:
            vars(server).update(harden=lambda: None)
        _serve(known.dir)
    else:
        json.dump([_outcome(ACTS[act], argument) for act, argument in json.load(sys.stdin)], sys.stdout)


def _serve(directory: str) -> None:
    """Serves as `paramstore serve` does, whose reader of the command line imports too much too late; an error ends it with 1."""
    logging.basicConfig(level=logging.INFO)
    try:
        server.run(load({"dir": directory}))
    except ParamStoreError as error:
        sys.exit(f"paramstore: {type(error).__name__}: {error}")


def become(uid: int) -> None:
    """Makes this process one that user `uid` started: for the kernel a process that gave up rights is not."""
    load({})  # so that it imports now what it would import later
    for name in CODECS:
        codecs.lookup(name)
    if os.getuid() != uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        os.environ["HOME"] = "/"
        _prctl(server.PR_SET_DUMPABLE, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise _error()


def _error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _outcome(act: Callable[[str | int], None], argument: str | int) -> str:
    try:
        act(argument)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, repr(error))
    return "done"


def _read(path: object) -> None:
    os.close(os.open(str(path), os.O_RDONLY))


def _write(path: object) -> None:
    os.close(os.open(str(path), os.O_WRONLY))


def _list(path: object) -> None:
    os.listdir(str(path))


def _make(path: object) -> None:
    place = Path(str(path)) / "made"
    place.touch()
    place.unlink()


def _talk(path: object) -> None:
    """Says hello and is welcomed. Raises ConnectionResetError if the answer is anything else."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LIMIT_S)
        sock.connect(str(path))
        sock.sendall(encode(m.Hello(1, m.MAGIC, m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, os.getpid())))
        answers = [decode_answer(body) for body in FrameDecoder().feed(sock.recv(READ_BYTES))]
        if not answers or not isinstance(answers[0], m.Done):
            raise ConnectionResetError(errno.ECONNRESET, f"answered {answers}")


def _open_memory(pid: object) -> None:
    os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))


def _read_memory(pid: object) -> None:
    """Calls process_vm_readv, which checks the right to read before it looks at the address."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(8)
    ours = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    theirs = (ctypes.c_size_t * 2)(SOMEWHERE, 8)
    found = libc.process_vm_readv(int(str(pid)), ours, ctypes.c_ulong(1), theirs, ctypes.c_ulong(1), ctypes.c_ulong(0))
    if found < 0 and ctypes.get_errno() != errno.EFAULT:
        raise _error()


def _attach(pid: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.restype = ctypes.c_long
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    if libc.ptrace(PTRACE_SEIZE, int(str(pid)), None, None) != 0:
        raise _error()
    libc.ptrace(PTRACE_DETACH, int(str(pid)), None, None)


def _take_descriptor(pid: object) -> None:
    """Takes any of its descriptors. Raises the last error if there is none to be had."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(int(str(pid)))
    try:
        for number in range(FDS_TRIED):
            taken = libc.syscall(ctypes.c_long(SYS_PIDFD_GETFD), process, number, 0)
            if taken >= 0:
                os.close(taken)
                return
            if ctypes.get_errno() != errno.EBADF:
                raise _error()
        raise _error()
    finally:
        os.close(process)


ACTS: Mapping[str, Callable[[str | int], None]] = {
    "read": _read, "write": _write, "list": _list, "make": _make, "talk": _talk, "open_memory": _open_memory,
    "read_memory": _read_memory, "attach": _attach, "take_descriptor": _take_descriptor,
    "map": lambda pid: _read(f"/proc/{pid}/maps"), "descriptors": lambda pid: _list(f"/proc/{pid}/fd"),
    "environment": lambda pid: _read(f"/proc/{pid}/environ"),
}  # fmt: skip


if __name__ == "__main__":
    main()
