"""Starts one process per rank on the nodes of a network, as `torchrun` would: the script needs `init_process_group("gloo")` alone.

Ranks are numbered node by node. Every wait is bounded, and when `start_ranks` ends, so has every rank with all that it
started: each leads a process group, whose number stays its own until it is waited for.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from paramstore_testkit.nodes.links import Topology
from paramstore_testkit.nodes.namespaces import Network
from paramstore_testkit.nodes.quota import Quota

MASTER_PORT = 29500
"""Free on every node, as nobody else is there."""
LOOK_S = 0.01
KILL_S = 10.0
"""Longest wait for the end of a process that is killed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What is left of a rank."""

    exit_code: int | None
    """Negative: the signal that ended it. None: it had not ended in time, and was killed."""
    output: str
    errors: str


@dataclass(frozen=True, slots=True)
class _Process:
    popen: subprocess.Popen[bytes]
    pidfd: int
    output: int
    errors: int
    """Descriptors of memory that the process writes to."""

    def has_ended(self, timeout_s: float) -> bool:
        """Waits at most so long for the end of the process. It is not reaped."""
        return bool(select.select([self.pidfd], [], [], max(0.0, timeout_s))[0])

    def kill(self) -> int:
        """Kills the process with its group, and reaps it. Gives its exit code."""
        if self.popen.returncode is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        return self.popen.wait(timeout=KILL_S)


class Ranks:
    """Owner of the ranks' processes."""

    def __init__(self) -> None:
        self._processes: list[_Process] = []

    def pid(self, rank: int) -> int:
        return self._processes[rank].popen.pid

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the next rank."""
        output, errors = os.memfd_create("output"), os.memfd_create("errors")
        popen = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        self._processes.append(_Process(popen, os.pidfd_open(popen.pid), output, errors))

    def send(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to a rank and all that it started."""
        process = self._processes[rank].popen
        assert process.returncode is None, "its number may be another's"
        os.killpg(process.pid, number)

    def output(self, rank: int) -> str:
        """What a rank has written so far."""
        return _text(self._processes[rank].output)

    def await_output(self, rank: int, text: str, *, timeout_s: float) -> None:
        """Waits until a rank has written `text`. Raises TimeoutError, with its errors, when it ends without or takes longer."""
        process, deadline_s = self._processes[rank], time.monotonic() + timeout_s
        while text not in self.output(rank):
            if (process.has_ended(LOOK_S) and text not in self.output(rank)) or time.monotonic() > deadline_s:
                raise TimeoutError(f"rank {rank} has not written {text!r}: {_text(process.errors)}")

    def wait(self, *, timeout_s: float) -> list[Ended]:
        """Waits for the end of all ranks, kills those that take longer, and gives what is left of each."""
        deadline_s = time.monotonic() + timeout_s
        is_in_time = [process.has_ended(deadline_s - time.monotonic()) for process in self._processes]
        codes = [process.kill() for process in self._processes]
        return [
            Ended(code if in_time else None, _text(process.output), _text(process.errors))
            for process, code, in_time in zip(self._processes, codes, is_in_time, strict=True)
        ]

    def close(self) -> None:
        """Ends all ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            for descriptor in (process.pidfd, process.output, process.errors):
                os.close(descriptor)


@contextmanager
def start_ranks(
    network: Network, command: Sequence[str], *, ranks_per_node: int = 1, quotas: Sequence[Quota] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Ranks]:
    """Starts `command` as each rank; at the end all have ended.

    quotas: one for each rank, or none. environment: what every rank has beside, or in place of, what `place_of` gives.
    """  # fmt: skip
    topology, ranks = network.topology, Ranks()
    try:
        for rank in range(len(topology.machines) * ranks_per_node):
            words = network.entering(rank // ranks_per_node)
            if quotas:
                words += quotas[rank].entering()
            place = place_of(rank, topology, ranks_per_node=ranks_per_node)
            ranks.start([*words, *command], {**place, **(environment or {})})
        yield ranks
    finally:
        ranks.close()


def place_of(rank: int, topology: Topology, *, ranks_per_node: int) -> dict[str, str]:
    """Environment that tells a rank of `torch.distributed` where it stands. Computing takes one thread."""
    node = rank // ranks_per_node
    machine = topology.machines[node]
    first_rank = topology.machines.index(machine) * ranks_per_node
    values = {
        "RANK": rank,
        "WORLD_SIZE": len(topology.machines) * ranks_per_node,
        "GROUP_RANK": machine,
        "LOCAL_RANK": rank - first_rank,
        "LOCAL_WORLD_SIZE": topology.machines.count(machine) * ranks_per_node,
        "MASTER_ADDR": topology.address(0),
        "MASTER_PORT": MASTER_PORT,
        "GLOO_SOCKET_IFNAME": topology.interface(node),
        "OMP_NUM_THREADS": 1,
    }
    return {name: str(value) for name, value in values.items()}


def _text(descriptor: int) -> str:
    """All that was written so far. It does not move the place where the writer goes on."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
