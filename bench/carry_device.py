"""Packs what the battery needs on a machine with a CUDA device and no network, and sets it up there.

Here: `python bench/carry_device.py make [FOLDER] [--python 3.11 ...]` downloads wheels into FOLDER (default `.carry`), of the
versions of this environment, for each Python; `make carry` does so. There, in a checkout of the same commit that has the folder:
`python3 bench/carry_device.py install [FOLDER]` makes an environment out of them, offline, and says how to go on.

- torch with CUDA is not carried, nor numpy: its wheels are gigabytes, LIMIT_BYTES may be carried. It must be on the machine, for
  the python3 that installs; that is looked at first. kvikio is left out too, with what it needs 114 MB; where the machine has it,
  it is used.
- No compiler is needed: paramstore builds its one kernel where there is one, and does without it elsewhere.

Installing needs the standard library and pip, and linux of 64-bit x86 with glibc 2.28 or newer.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from importlib.metadata import requires, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_BYTES = 64 << 20
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = tuple(f"manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "_2_12", "2010", "_2_5", "1"))
WANTED = ("paramstore[hf]", "accelerate", "pytest", "hypothesis")
"""What is needed, and with it all that these need."""
ON_THE_MACHINE = {"torch", "numpy"}
"""What must be there, with all that it needs itself."""
TORCH_MIN = (2, 10)
PIP = ("-m", "pip", "--disable-pip-version-check")
COMMIT, PINS = "commit.txt", "pins.txt"
PATHS = tuple(str(ROOT / folder) for folder in ("", "client", "native", "testkit", "bench"))


class CarryError(Exception):
    """What is carried cannot be made, or not be installed; the message says why."""


def main(words: Sequence[str] | None = None) -> int:
    """Makes the folder, or installs from it. Gives 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["make", "install"])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / ".carry")
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="versions of Python that the machine may have")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-carried", help="the environment that install makes")
    parser.add_argument("--twin", action="store_true", help="install where there is no CUDA device: a check of the folder itself")
    arguments = parser.parse_args(words)
    try:
        if arguments.verb == "make":
            make(arguments.folder, arguments.python)
        else:
            install(arguments.folder, arguments.venv, needs_device=not arguments.twin)
    except CarryError as error:
        sys.stderr.write(f"carry_device: {error}\n")
        return 1
    return 0


def make(folder: Path, pythons: Sequence[str]) -> None:
    """Downloads the wheels into `folder`, and writes their names and the commit there. Raises CarryError."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    pinned = pins()
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    for python in pythons:
        command = [sys.executable, *PIP, "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
        if subprocess.run(
            [*command, "--implementation", "cp", "--python-version", python, *platforms, *pinned], check=False
        ).returncode:
            raise CarryError(f"not every wheel can be had for Python {python}, as pip says above: leave it out with --python")
    (folder / PINS).write_text("\n".join(pinned) + "\n")
    (folder / COMMIT).write_text(_commit() + "\n")
    wheels = list(folder.glob("*.whl"))
    size_bytes = check_size([*folder.iterdir(), *(ROOT / name for name in _git("ls-files", "-z").split("\0") if name)])
    print(f"{folder}: {len(wheels)} wheels for Python {', '.join(pythons)}, with the checkout {size_bytes / 2**20:.1f} MiB")


def check_size(files: Sequence[Path]) -> int:
    """The bytes of `files`. Raises CarryError above LIMIT_BYTES."""
    size_bytes = sum(path.stat().st_size for path in files if path.is_file())
    if size_bytes > LIMIT_BYTES:
        raise CarryError(
            f"folder and checkout have {size_bytes} bytes, {LIMIT_BYTES} may be carried: give fewer versions of --python"
        )
    return size_bytes


def pins() -> list[str]:
    """NAME==VERSION of everything that is carried, as it is in this environment."""
    from packaging.requirements import Requirement

    found: dict[str, str] = {}
    waiting = [Requirement(wanted) for wanted in WANTED]
    seen: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = requirement.name.lower().replace("_", "-")
        if name in ON_THE_MACHINE or str(requirement) in seen:
            continue
        seen.add(str(requirement))
        if name != "paramstore":
            found[name] = version(name)
        for extra in requirement.extras or {""}:
            needed = [Requirement(text) for text in requires(name) or ()]
            waiting += [one for one in needed if one.marker is None or one.marker.evaluate({"extra": extra})]
    return [f"{name}=={found[name]}" for name in sorted(found)]


def install(folder: Path, target: Path, *, needs_device: bool) -> None:
    """Makes the environment `target` of this Python: the checkout, and what is carried in front of what this Python has itself.

    Raises CarryError where torch, or its device, or a wheel is missing.
    """
    told = check_torch(needs_device=needs_device)
    if not (folder / PINS).exists():
        raise CarryError(f"{folder} has no {PINS}: make it with `python bench/carry_device.py make` where there is a network")
    venv.EnvBuilder(system_site_packages=True, clear=True, with_pip=False, symlinks=True).create(target)
    python = target / "bin" / "python"
    site = target / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    pinned = (folder / PINS).read_text().split()
    command = [sys.executable, *PIP, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    if subprocess.run([*command, "--find-links", str(folder), "--target", str(site), *pinned], check=False).returncode:
        raise CarryError(
            f"{folder} lacks a wheel for Python {platform.python_version()} on {platform.machine()}: make it with --python "
            f"{sys.version_info[0]}.{sys.version_info[1]}"
        )
    # Where this python3 is itself that of an environment, the system's packages that the new one sees are not those with torch.
    paths = dict.fromkeys([*PATHS, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (site / "carried.pth").write_text("\n".join(paths) + "\n")
    check = "import paramstore, paramstore_testkit, paramstore_bench, transformers, torch; print(transformers.__version__)"
    done = subprocess.run([python, "-c", check], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CarryError(f"{target} was made, and does not work: {done.stderr}")
    commit = (folder / COMMIT).read_text().strip()
    print(f"{told}; {len(pinned)} packages in {target}, transformers {done.stdout.strip()}; go on with\n"
          f"{python} bench/bench_device.py --commit {commit}{'' if needs_device else ' --twin'}")  # fmt: skip


def check_torch(*, needs_device: bool) -> str:
    """What torch and its device are. Raises CarryError where they do not do."""
    try:
        import torch
    except ImportError as error:
        raise CarryError(
            f"{sys.executable} has no torch ({error}): it must be on the machine, in a build with CUDA, since its wheels are "
            "far too large to be carried. Run this with the Python that has it"
        ) from error
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < TORCH_MIN:
        raise CarryError(f"torch {torch.__version__} is too old: {'.'.join(map(str, TORCH_MIN))} or newer is needed")
    if torch.cuda.is_available():
        return f"torch {torch.__version__} with {torch.cuda.get_device_name()}"
    if needs_device:
        raise CarryError(
            f"torch {torch.__version__} finds no CUDA device: it needs a build with CUDA and a driver. --twin installs all the same"
        )
    return f"torch {torch.__version__} without a device"


def _commit() -> str:
    """The commit of this checkout, with `+changes` if it has any."""
    return _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
