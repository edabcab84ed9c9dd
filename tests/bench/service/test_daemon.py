"""What is read from the daemon's counters."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paramstore.bench.service.daemon import Service, counted_seconds
from paramstore_client.connection import autostart


def test_an_interrupt_while_the_daemon_starts_leaves_none_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[subprocess.Popen[bytes]] = []

    def interrupted(path: Path, timeout_s: float) -> None:
        if (process := autostart.started_in(tmp_path / "store")) is not None:
            seen.append(process)
            raise KeyboardInterrupt

    source = "import signal; print('ready', flush=True); signal.pause()"
    monkeypatch.setattr(autostart, "SERVE_COMMAND", (sys.executable, "-c", source))
    monkeypatch.setattr(autostart, "try_connect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Service(tmp_path / "store", host_budget_bytes=4 << 20, settings={})
    (process,) = seen
    assert process.returncode == -signal.SIGKILL


def test_counters_of_seconds_that_grew_become_parts_by_their_dotted_name() -> None:
    before = {"routes": {"read_s": 1.0, "bytes": 10}, "checksum_s": 0.5, "uptime_s": 1.0, "name": "x", "is_idle": True}
    after = {
        "routes": {"read_s": 1.5, "bytes": 90}, "checksum_s": 0.5, "verify_s": 0.25, "uptime_s": 9.0, "name": "x",
        "is_idle": False,
    }  # fmt: skip
    assert counted_seconds(before, after) == {"daemon.routes.read_s": 0.5, "daemon.verify_s": 0.25}
