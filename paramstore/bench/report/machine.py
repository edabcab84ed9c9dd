"""Describes what a result was measured on: machine, file system, page kinds, commit. Ratios travel; these figures say how far."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from paramstore import directories
from paramstore.bench.limits import pages
from paramstore.errors import CapacityError, ConfigError
from paramstore.sizes import format_size
from paramstore.storage.mounts import free_bytes
from paramstore_client.connection.address import PATH_BYTES_MAX

DEEPEST = Path("bench-xxxxxxxx") / "store" / "run" / "paramstore.sock"
"""Longest path that a run makes below its directory."""
PACKAGES = ("torch", "numpy", "msgspec", "lmdb", "aiofiles", "safetensors", "xxhash")
INSTRUCTIONS = frozenset({"avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve"})
"""Flags of a processor that decide how fast it computes: without those for bf16, matrices in bf16 take many times as long."""


def describe(directory: Path) -> dict[str, object]:
    """Collects facts of the machine and of the file system that `directory` is on. Names no host and no path."""
    flags = f"{_line_of('/proc/cpuinfo', 'flags')} {_line_of('/proc/cpuinfo', 'Features')}".split()  # of x86, of ARM
    return {
        "cpu": _line_of("/proc/cpuinfo", "model name"),
        "instructions": sorted(INSTRUCTIONS & {*flags}),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "file_system": file_system(directory),
        "huge_pages": pages.settings(),
        "page_kinds": [str(kind) for kind in pages.available_kinds()],
    }


def file_system(directory: Path) -> str:
    """Finds the type of the file system that holds `directory`, as the kernel names it."""
    here = directory.resolve()
    best, kind = Path("/"), "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        mount, found = Path(line.split()[1]), line.split()[2]
        if here.is_relative_to(mount) and mount.is_relative_to(best):
            best, kind = mount, found
    return kind


def commit() -> str:
    """Finds the commit of the checkout that this code runs from, with `+changes` if it has any; else the package's version."""
    root = Path(__file__).resolve().parents[2]
    try:
        name = _git(root, "rev-parse", "HEAD")
        return name + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return f"paramstore {_version('paramstore')}"


def now() -> str:
    """The date and time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def check_directory(directory: Path) -> None:
    """Raises ConfigError unless `directory` is a directory, and a daemon's socket can lie below it."""
    directories.check_directory("--dir", directory)
    deepest = directory.absolute() / DEEPEST
    if len(os.fsencode(deepest)) > PATH_BYTES_MAX:
        raise ConfigError(
            f"--dir {directory}: a daemon's socket there, {deepest}, would have a path of {len(os.fsencode(deepest))} bytes, the "
            f"limit is {PATH_BYTES_MAX}: give a shorter --dir"
        )


def check_free_space(directory: Path, needed_bytes: int, *, quick_bytes: int | None = None) -> None:
    """Raises CapacityError unless `directory` has room for `needed_bytes`. quick_bytes: the need of a run with --quick; None
    where there is no such flag."""
    if (left_bytes := free_bytes(directory)) < needed_bytes:
        or_quick = ", or run it with --quick" if quick_bytes is not None and quick_bytes <= left_bytes else ""
        raise CapacityError(
            f"{directory}: {format_size(left_bytes)} free, the benchmark needs {format_size(needed_bytes)} for a while: "
            f"choose another directory with --dir{or_quick}"
        )


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _line_of(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return platform.machine()
