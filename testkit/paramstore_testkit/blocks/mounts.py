"""Makes mounts, loop devices and file systems that belong to one process and end with it, however it ends.

- Mounts are made in a mount namespace of the process (`enter_namespaces`), so they go with it; its children, in a process
  namespace of their own, are killed with it.
- A loop device is told to detach itself with its last user.
- Anything that another run left nevertheless is found by its name, which has the number of a process that is gone (`sweep`).

Raises OSError that names the call, wherever the kernel refuses.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PREFIX = "paramstore-block-"
"""Start of the names of directories and images; the number of the owning process follows."""
OWNER = re.compile(PREFIX + r"(\d+)")
MKFS_S = 20.0
BUSY_S = 5.0
"""Longest wait of an unmount for those who still hold a file."""
ATTEMPTS = 20
"""Most attempts to get a free loop device, since another process may take it first."""

CLONE_NEWNS, CLONE_NEWPID = 0x20000, 0x20000000
MS_NOATIME, MS_REC, MS_SILENT, MS_PRIVATE = 0x400, 0x4000, 0x8000, 0x40000
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
LOOP_CLR_FD, LOOP_CONFIGURE, LOOP_CTL_GET_FREE = 0x4C01, 0x4C0A, 0x4C82
LO_FLAGS_AUTOCLEAR = 4
LO_FLAGS_OFFSET, LOOP_CONFIG_BYTES = 60, 304
BLKFLSBUF = 0x1261
EXT4_IOC_SHUTDOWN, NOLOGFLUSH = 0x8004587D, 2
MKFS_OPTIONS = {
    "ext4": (
        "-q", "-F", "-b", "4096", "-O", "^resize_inode", "-J", "size=4", "-N", "64", "-m", "0",
        "-E", "lazy_itable_init=0,lazy_journal_init=1,nodiscard",
    ),
    "xfs": ("-q", "-f", "-K"),
}  # fmt: skip
DISK_BYTES = {"ext4": 24 << 20, "xfs": 320 << 20}
"""Size of a disk: room for the file system's journal, and for a volume whose commit notes take 11 MiB."""

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def enter_namespaces() -> int:
    """Makes a child with mounts and processes of its own, which the kernel kills when this process ends. Returns 0 in the child;
    here it returns the child's exit status plus 1, when that has ended."""
    _end_with_parent()
    _checked(_libc.unshare(CLONE_NEWNS | CLONE_NEWPID), "unshare(CLONE_NEWNS | CLONE_NEWPID)")
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return abs(os.waitstatus_to_exitcode(status)) + 1
    _end_with_parent()
    _mount("none", "/", None, MS_REC | MS_PRIVATE, "")
    _mount("proc", "/proc", "proc", 0, "")
    return 0


def _end_with_parent() -> None:
    _checked(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL), "prctl(PR_SET_PDEATHSIG)")


def mount(source: str, target: Path, kind: str, options: str = "") -> None:
    """Mounts without access times, and without a line in the kernel's log for each mount."""
    _mount(source, str(target), kind, MS_NOATIME | MS_SILENT, options)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str) -> None:
    result = _libc.mount(
        source.encode(), os.fsencode(target), kind.encode() if kind else None, ctypes.c_ulong(flags), options.encode()
    )
    _checked(result, f"mount {source} on {target} as {kind} ({options})")


def unmount(target: Path) -> None:
    """Unmounts; on return nothing there is in use any more. Raises OSError if somebody holds a file there for too long."""
    deadline_s = time.monotonic() + BUSY_S
    while True:
        if _libc.umount2(os.fsencode(target), 0) == 0:
            return
        number = ctypes.get_errno()
        if time.monotonic() > deadline_s:
            raise OSError(number, f"unmount {target}: {os.strerror(number)}")
        time.sleep(0.001)


def detach(target: Path) -> None:
    """Takes the mount out of sight, busy or not; it ends with its last user. For cleaning up."""
    _libc.umount2(os.fsencode(target), MNT_DETACH)


class LoopDevice:
    """A loop device over the open file `backing`. It ends with `close`, or with this process."""

    def __init__(self, backing: int) -> None:
        with open("/dev/loop-control", "rb") as control:
            for attempt in range(ATTEMPTS):
                number = fcntl.ioctl(control, LOOP_CTL_GET_FREE)
                self.path = f"/dev/loop{number}"
                self._descriptor = os.open(self.path, os.O_RDWR)
                try:
                    fcntl.ioctl(self._descriptor, LOOP_CONFIGURE, _loop_config(backing))
                    return
                except OSError:
                    os.close(self._descriptor)
                    if attempt == ATTEMPTS - 1:
                        raise

    def forget_cache(self) -> None:
        """Drops what this kernel remembers of the device, whose image was changed behind its back."""
        fcntl.ioctl(self._descriptor, BLKFLSBUF)

    def close(self) -> None:
        os.close(self._descriptor)


def _loop_config(backing: int) -> bytes:
    config = bytearray(LOOP_CONFIG_BYTES)
    struct.pack_into("<II", config, 0, backing, 0)
    struct.pack_into("<I", config, LO_FLAGS_OFFSET, LO_FLAGS_AUTOCLEAR)
    return bytes(config)


def make_file_system(kind: str, device: str) -> None:
    """Makes an empty file system, as small as its kind can be. Raises OSError with what mkfs said."""
    tool = f"mkfs.{kind}"
    if shutil.which(tool) is None:
        raise OSError(f"{tool} is not installed")
    result = subprocess.run([tool, *MKFS_OPTIONS[kind], device], capture_output=True, timeout=MKFS_S, check=False)
    if result.returncode:
        raise OSError(f"{tool} {device}: {result.stderr.decode(errors='replace').strip()}")


def disk_at(root: Path, index: int) -> Path:
    """Path at which the file system of disk `index` is mounted."""
    return root / f"mounted{index}"


@contextmanager
def mounted_loops(root: Path, files: Sequence[Path], *, kind: str = "ext4") -> Iterator[list[LoopDevice]]:
    """Makes new file systems over loop devices over `files`, mounted at `disk_at` of `root`; unmounts them, by force if need be."""
    with ExitStack() as stack:
        loops = []
        for index, file in enumerate(files):
            backing = os.open(file, os.O_RDWR)
            try:
                loops.append(LoopDevice(backing))
            finally:
                os.close(backing)
            stack.callback(loops[-1].close)
            make_file_system(kind, loops[-1].path)
            target = disk_at(root, index)
            target.mkdir(exist_ok=True)
            stack.callback(detach, target)
            mount(loops[-1].path, target, kind)
        yield loops
        for index in range(len(files)):
            unmount(disk_at(root, index))


def shut_down(mounted: Path) -> None:
    """Shuts down the file system at `mounted`: all I/O fails from here on, and what its journal did not have is lost."""
    descriptor = os.open(mounted, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("<I", NOLOGFLUSH))
    finally:
        os.close(descriptor)


def make_image(size_bytes: int, *, owner: int) -> int:
    """Makes a memfd of zeros, named so that `sweep` finds a loop device over it."""
    descriptor = os.memfd_create(f"{PREFIX}{owner}")
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def sweep(directory: Path, *, blocks: Path = Path("/sys/block")) -> list[str]:
    """Removes what runs left whose process is gone: loop devices, and directories below `directory`. Returns their names."""
    swept = []
    for backing in sorted(blocks.glob("loop*/loop/backing_file")):
        with suppress(OSError):
            if _is_orphaned(backing.read_text()):
                name = backing.parts[-3]
                swept.append(name)
                with open(f"/dev/{name}", "rb") as device:
                    fcntl.ioctl(device, LOOP_CLR_FD)
    for left in sorted(directory.glob(f"{PREFIX}*")):
        if _is_orphaned(left.name):
            swept.append(left.name)
            shutil.rmtree(left, ignore_errors=True)
    return swept


def _is_orphaned(name: str) -> bool:
    """Whether `name` is one of ours, and its owner is gone."""
    owner = OWNER.search(name)
    return owner is not None and not Path("/proc", owner[1]).exists()
