"""The daemon under measurement: started by the client as any user's would be, stopped, and looked at from outside."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import paramstore as ps
from paramstore.bench.process import cpu_s, rss_anon_bytes
from paramstore.clock import Clock
from paramstore.errors import StoreUnavailable, WaitTimeout
from paramstore_client.connection.address import parse_address
from paramstore_client.connection.autostart import started_in
from paramstore_client.running import find_daemon

if TYPE_CHECKING:
    from paramstore_client import Store

STARTUP_S = 60.0
STOP_S = 60.0
FILL_S = 120.0
QUIET_S = 1.0
POLL_S = 0.05


class Service:
    """Owner of one daemon in a directory of its own and of a connection to it."""

    def __init__(
        self, directory: Path, *, host_budget_bytes: int, settings: Mapping[str, object], volumes: Sequence[str | Path] = ()
    ) -> None:
        self.host_budget_bytes = host_budget_bytes
        options = ps.ServeOptions(dir=directory, host_budget=host_budget_bytes, settings=settings, volumes=volumes)
        try:
            self.store: Store = ps.connect(autostart=options, timeout_s=STARTUP_S)
            self.pid = int(self.stats()["daemon"]["pid"])
        except BaseException:
            # Interrupted, or never ready: nobody else knows of the daemon, which would outlive this process.
            if (process := started_in(directory)) is not None:
                process.kill()
                process.wait()
            raise
        self.host_bytes_max = 0

    def stats(self) -> dict[str, Any]:
        """The daemon's counters."""
        return self.store.stats()

    def wait_until_quiet(self, clock: Clock) -> None:
        """Returns when the daemon's zero-fill of its volumes is over, or has stood still for QUIET_S.

        It writes whenever nothing else moves, which is just when the limit is sampled. Raises WaitTimeout.
        """
        pause, started_s = threading.Event(), clock.now_s()
        missing_bytes, moved_s = self._unwritten_bytes(), started_s
        while missing_bytes and clock.now_s() - moved_s < QUIET_S:
            if clock.now_s() - started_s > FILL_S:
                raise WaitTimeout(f"the daemon's zero-fill goes on after {FILL_S:g} s: {missing_bytes} bytes are left")
            pause.wait(POLL_S)
            before_bytes, missing_bytes = missing_bytes, self._unwritten_bytes()
            if missing_bytes < before_bytes:
                moved_s = clock.now_s()

    def _unwritten_bytes(self) -> int:
        return sum(int(volume["size_bytes"]) - int(volume["written_bytes"]) for volume in self.stats()["volumes"].values())

    def watch_budget(self) -> None:
        """Updates the highest use of the host budget seen so far, by the daemon's books and by the kernel's count."""
        host = self.stats()["tiers"]["host"]
        self.host_bytes_max = max(self.host_bytes_max, int(host["used_bytes"]), int(host["kernel_peak_bytes"]))

    def cpu_s(self) -> float:
        """CPU time that the daemon has used so far."""
        return cpu_s(self.pid)

    def own_memory_bytes(self) -> int:
        """The daemon's private memory above its arenas: interpreter, libraries, tables. (Shared arenas are not private.)"""
        return rss_anon_bytes(self.pid) - int(self.stats()["tiers"]["host"]["private_bytes"])

    def stop(self) -> None:
        """Ends the daemon, by force if it does not end in time: then raises StoreUnavailable, once it is dead."""
        daemon = find_daemon(parse_address(self.store.address))
        self.store.close()
        if daemon is None:
            return  # it has ended before
        with daemon:
            daemon.send(signal.SIGTERM)
            if not daemon.has_ended(STOP_S):
                daemon.send(signal.SIGKILL)
                raise StoreUnavailable(f"the daemon (pid {self.pid}) did not end within {STOP_S:g} s of SIGTERM")


@contextmanager
def serving(
    directory: Path, *, host_budget_bytes: int, settings: Mapping[str, object] = MappingProxyType({}),
    volumes: Sequence[str | Path] = (),
) -> Iterator[Service]:  # fmt: skip
    """Runs a daemon for as long as the block runs. settings, volumes: of `ps.ServeOptions`."""
    service = Service(directory, host_budget_bytes=host_budget_bytes, settings=settings, volumes=volumes)
    try:
        yield service
    finally:
        service.stop()


def counted_seconds(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Growth of each of the daemon's counters of seconds (names ending in `_s`, its uptime apart), by dotted name."""
    earlier = _flat(before)
    grown = {name: value - earlier.get(name, 0.0) for name, value in _flat(after).items() if name.endswith("_s")}
    return {f"daemon.{name}": value for name, value in grown.items() if value > 0 and not name.endswith("uptime_s")}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[f"{prefix}{name}"] = float(value)
    return flat
