"""What the ranks of a job are asked to measure: a file in a folder, and the answer beside it. Starts the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from paramstore.errors import StoreUnavailable
from paramstore_bench.moe.found import Compared
from paramstore_bench.moe.sizes import RANKS, Sizes

TASKS, FOUND = "tasks.json", "found.json"


class Part(StrEnum):
    """What stands beside our layer."""

    SERVICE = "service"
    BARE = "bare"
    LOADED = "loaded"
    CAPACITY = "capacity"
    ELASTIC = "elastic"
    AUTO = "auto"


class Task(msgspec.Struct, frozen=True):
    """One comparison. address: of the daemon, where the part has one. quotas: groups that ranks enter, and do not leave."""

    part: Part
    sizes: Sizes
    address: str = ""
    quotas: tuple[str, ...] = ()


def found_by_ranks(tasks: Sequence[Task], folder: Path) -> list[Compared]:
    """Has ranks do tasks, one after the other; in an empty folder. Raises StoreUnavailable where one of them ends early."""
    (folder / TASKS).write_bytes(msgspec.json.encode(tasks))
    run_by_torchrun("paramstore_bench.moe.rank", folder)
    return msgspec.json.decode((folder / FOUND).read_bytes(), type=list[Compared])


def run_by_torchrun(module: str, folder: Path, *, ranks: int = RANKS) -> None:
    """Runs a module as each rank, of one thread, all on this machine. Raises StoreUnavailable where a rank ends early."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", module, str(folder),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}  # a profiler tells of itself otherwise
    code = subprocess.run(command, check=False, env=environment).returncode
    if code:
        raise StoreUnavailable(f"the ranks ended with {code}; what they said is above")
