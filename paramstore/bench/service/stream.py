"""Another client, which reads a namespace from the volume at full speed while something else is timed.

`python -m paramstore.bench.service.stream ADDRESS NAMESPACE EXPERTS` evicts and loads all keys over and over until stdin closes;
it says `ready` after the first sweep and, at its end, the bytes and seconds of the later ones.
"""

from __future__ import annotations

import select
import subprocess
import sys

import paramstore as ps
from paramstore.bench.pairs import Sample
from paramstore.clock import MonotonicClock
from paramstore.errors import StoreUnavailable

WAIT_S = 60.0


class Stream:
    """Owner of one streaming process; it streams from the end of the constructor until `stop`."""

    def __init__(self, address: str, namespace: str, *, experts: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paramstore.bench.service.stream", address, namespace, str(experts)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if self._line() != "ready":
            raise StoreUnavailable(f"the streaming process did not start (exit code {self._process.wait()})")

    def stop(self) -> Sample:
        """Ends the process after the sweep under way; gives the bytes and seconds it streamed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        loaded_bytes, _, seconds = self._line().partition(" ")
        self._process.wait()
        self._process.stdout.close()
        return Sample(float(loaded_bytes), float(seconds))

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def run(address: str, name: str, experts: int) -> None:
    """Runs the streaming process."""
    clock = MonotonicClock()
    store = ps.connect(address)
    namespace = store.open_namespace(name, mode="read")
    keys = [(0, expert) for expert in range(experts)]

    def sweep() -> int:
        namespace.evict().wait(WAIT_S)
        return int(namespace.prefetch(keys, part="param").wait(WAIT_S)["bytes"])

    sweep()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    loaded_bytes, started_s = 0, clock.now_s()
    while not select.select([sys.stdin], [], [], 0)[0]:
        loaded_bytes += sweep()
    sys.stdout.write(f"{loaded_bytes} {clock.now_s() - started_s}\n")
    sys.stdout.flush()
    store.close()


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]))
