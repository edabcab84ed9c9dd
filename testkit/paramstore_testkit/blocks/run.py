"""`python -m paramstore_testkit.blocks.run SCENARIO`: runs what needs mounts in a process whose mounts end with it.

`run_apart` is the other end: a scenario has a deadline, after which it is killed with everything it started. Its output is
the report; what goes wrong is a traceback on stderr and exit status 1. Without root, /dev/fuse or loop devices it says why.
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from paramstore_testkit.blocks.device import BlockDevices
from paramstore_testkit.blocks.mounts import DISK_BYTES, PREFIX, disk_at, enter_namespaces, make_image, mounted_loops, sweep

MODULE = "paramstore_testkit.blocks.run"
PROBE_S = 60.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def run_apart(*arguments: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a scenario to its end. Raises AssertionError if it took too long; then nothing of it is left."""
    directory = Path(tempfile.gettempdir())
    sweep(directory)
    root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=directory))
    command = [sys.executable, "-m", MODULE, *arguments, "--root", str(root), "--owner", str(os.getpid())]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        out, err = _killed(process)
        raise AssertionError(f"{arguments} took more than {limit_s} s\n{out}\n{err}") from error
    except BaseException:
        _killed(process)
        raise
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _killed(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kills the process with everything it started, the server of block devices too, so that nobody waits for its answers."""
    os.killpg(process.pid, signal.SIGKILL)
    return process.communicate(timeout=PROBE_S)


def refusal(kind: str = "ext4") -> str:
    """Says why scenarios on file systems of that kind cannot run here; empty if they can."""
    result = run_apart("probe", "--kind", kind, limit_s=PROBE_S)
    if result.returncode == 0:
        return result.stdout.strip()
    return (result.stderr.strip().splitlines() or [f"the probe ended with status {result.returncode}"])[-1]


def probe(root: Path, *, kind: str, owner: int) -> None:
    """Prints why the scenarios cannot run. Tries all they need: a FUSE device, a loop device over it, a file system."""

    try:
        image = make_image(DISK_BYTES[kind], owner=owner)
        with BlockDevices(root / "fuse", [image]) as devices, mounted_loops(root, [devices.path(0)], kind=kind):
            devices.note("probed")
    except OSError as error:
        say(f"{type(error).__name__}: {error}")


def replay(root: Path, arguments: argparse.Namespace) -> None:
    """Records one life, with a bug if one is named, and plays its crashes."""
    import torch

    from paramstore_testkit.blocks.life import SHORT_ACTS, full_acts
    from paramstore_testkit.blocks.replay import Replay, record
    from paramstore_testkit.bugs.block_bugs import plant

    torch.set_num_threads(1)  # records have a few KiB: more threads would only wait for each other
    logging.getLogger("paramstore").setLevel(logging.CRITICAL)
    if arguments.bug:
        plant(arguments.bug)
    acts, owner, started_s = SHORT_ACTS if arguments.short else full_acts(arguments.seed), arguments.owner, time.perf_counter()
    recording = record(
        root, acts, seed=arguments.seed, volume_count=arguments.volumes, owner=owner, kind=arguments.kind
    )
    recorded_s = time.perf_counter()
    found = Replay(
        root, recording, seed=arguments.seed, volume_count=arguments.volumes, states_per_event=arguments.states,
        resume_every=arguments.resume_every, owner=owner,
    )  # fmt: skip
    say(f"seed {arguments.seed}: {arguments.kind}, {arguments.volumes} volumes and the catalog, each on a device of its own")
    try:
        found.run()
    finally:
        figures, replay_s = found.figures, time.perf_counter() - recorded_s
        say(f"events: {told(figures.events)}; acts: {told(figures.acts)}")
        say(f"{figures.resumed} daemons went on; {figures.refused} states with torn blocks were refused by the file system itself")
        say(f"{'kind':<24}{'states':>8}{'distinct':>10}")
        for kind, number in sorted(figures.states.items()):
            say(f"{kind:<24}{number:>8}{figures.mounted[kind]:>10}")
        states, distinct, core_s = figures.states.total(), figures.mounted.total(), sum(os.times()[:4])
        say(f"{'all':<24}{states:>8}{distinct:>10}")
        say(
            f"recorded in {recorded_s - started_s:.1f} s, replayed in {replay_s:.1f} s, "
            f"{1000 * replay_s / max(1, distinct):.1f} ms per distinct state; {core_s:.1f} s of one core"
        )
    say(
        json.dumps({
            "states": states, "distinct": distinct, "resumed": figures.resumed, "refused": figures.refused, "core_s": core_s,
            "kinds": figures.mounted,
        })
    )  # fmt: skip


def hang(root: Path, owner: int) -> None:
    """Waits for a device that does not answer, in a way that no signal ends; for tests that such a wait can be ended."""

    image = make_image(DISK_BYTES["ext4"], owner=owner)
    with (
        BlockDevices(root / "fuse", [image]) as devices,
        mounted_loops(root, [devices.path(0)]),
        (disk_at(root, 0) / "file").open("wb") as file,
    ):
        file.write(bytes(mmap.PAGESIZE))
        file.flush()
        devices.stop()
        say("waiting")
        os.fsync(file)


def told(counts: Mapping[str, int] | Counter[str]) -> str:
    return ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def parse(arguments: Iterable[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=MODULE)
    parser.add_argument("scenario", choices=("probe", "replay", "shutdown", "thin", "hang"))
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--owner", type=int, required=True)
    parser.add_argument("--kind", default="ext4", choices=sorted(DISK_BYTES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--volumes", type=int, default=1)
    parser.add_argument("--states", type=float, default=1.0)
    parser.add_argument("--resume-every", type=int, default=0)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--bug", default="")
    parser.add_argument("--cycles", type=int, default=30)
    parser.add_argument("--place", default="volume")
    return parser.parse_args([*arguments])


def main() -> int:
    arguments = parse(sys.argv[1:])
    ended = enter_namespaces()
    if ended:
        return ended - 1
    root, seed, owner, bug = arguments.root, arguments.seed, arguments.owner, arguments.bug
    match arguments.scenario:
        case "probe":
            probe(root, kind=arguments.kind, owner=owner)
        case "replay":
            replay(root, arguments)
        case "shutdown":
            from paramstore_testkit.blocks.shutdown import ShutdownCycles

            cycles = ShutdownCycles(root, seed=seed, owner=owner, bugs=[bug] if bug else [])
            cycles.repeat(arguments.cycles)
            say(json.dumps(cycles.figures))
        case "thin":
            from paramstore_testkit.blocks.thin import fill_up

            say(fill_up(root, place=arguments.place, seed=seed, bug=bug))
        case "hang":
            hang(root, owner)
    return 0


if __name__ == "__main__":
    sys.exit(main())
