"""What is read from the daemon's counters."""

from __future__ import annotations

from paramstore.bench.service import counted_seconds


def test_counters_of_seconds_that_grew_become_parts_by_their_dotted_name() -> None:
    before = {"routes": {"read_s": 1.0, "bytes": 10}, "checksum_s": 0.5, "uptime_s": 1.0, "name": "x", "is_idle": True}
    after = {
        "routes": {"read_s": 1.5, "bytes": 90}, "checksum_s": 0.5, "verify_s": 0.25, "uptime_s": 9.0, "name": "x",
        "is_idle": False,
    }  # fmt: skip
    assert counted_seconds(before, after) == {"daemon.routes.read_s": 0.5, "daemon.verify_s": 0.25}
