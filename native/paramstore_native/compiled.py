"""Builds this package's C sources where they run, once per machine: no compiler is needed, but where one is found it is used.

- A library lies in the user's cache, under a name made of source, flags and CPU: it is never loaded where it does not fit.
- It appears there whole or not at all, however many processes build it at once.
- A directory that others may write to is not loaded from.
- Nothing here raises for what the machine lacks: `Unavailable` says why there is no library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

FLAGS = (
    "-std=c11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden",
    "-shared", "-fPIC",
)  # fmt: skip
COMPILERS = ("cc", "gcc", "clang")
"""Compilers to try, in this order, after the one that the variable CC names."""
BUILD_TIMEOUT_S = 60.0
CPU_LINES = ("model name", "flags", "CPU implementer", "CPU part", "Features")
"""Beginnings of the lines of /proc/cpuinfo that `-march=native` depends on."""


class Unavailable(NamedTuple):
    """Why there is no library, in words for a log."""

    reason: str


def build(source: Path, *, cache: Path | None = None) -> Path | Unavailable:
    """The shared library of `source`, from `cache` (default: the user's) or compiled into it now."""
    directory = _user_cache() if cache is None else cache
    try:
        text = source.read_bytes()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (objection := _objection(directory)) is not None:
            return objection
        library = directory / f"{source.stem}-{_key(text)}.so"
        if not library.is_file():
            return _compile(source, library)
    except OSError as error:
        return Unavailable(f"{source.name} cannot be built in {directory}: {error}")
    return library


def _compile(source: Path, library: Path) -> Path | Unavailable:
    compiler = next((found for name in (os.environ.get("CC"), *COMPILERS) if name and (found := shutil.which(name))), None)
    if compiler is None:
        return Unavailable(f"no C compiler is found (tried CC, {', '.join(COMPILERS)})")
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [compiler, *FLAGS, "-o", str(built), str(source), "-lm"]
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=BUILD_TIMEOUT_S, cwd=folder
            )
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
            return Unavailable(f"{compiler} refuses {source.name}: {lines[0]}")
        except subprocess.TimeoutExpired:
            return Unavailable(f"{compiler} did not finish {source.name} within {BUILD_TIMEOUT_S:g} s")
        built.replace(library)
    return library


def _objection(directory: Path) -> Unavailable | None:
    """Why no code can be loaded from `directory`, into which others may have put it; None where it can."""
    stat = directory.stat()
    if stat.st_uid != os.geteuid():
        return Unavailable(f"{directory} belongs to user {stat.st_uid}, not to the one that runs this: no code is loaded from it")
    if stat.st_mode & 0o022:
        mode = f"{stat.st_mode & 0o777:o}"
        return Unavailable(f"{directory} can be written by others (mode {mode}): chmod 700 it to have code loaded from it")
    return None


def _key(text: bytes) -> str:
    digest = hashlib.sha256(text)
    for fact in (*FLAGS, platform.machine(), *_cpu()):
        digest.update(b"\0" + fact.encode())
    return digest.hexdigest()[:24]


def _cpu() -> list[str]:
    """The first core's lines that tell which instructions it has."""
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    return [line for line in first.splitlines() if line.startswith(CPU_LINES)]


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "paramstore"
