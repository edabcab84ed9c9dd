"""Rows about memory: what the daemon takes above its arenas, and whether it keeps to the host budget."""

from __future__ import annotations

from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.bench.service.daemon import Service

MEGA = 1e6
OWN_MEMORY_MB_MAX = 300.0


def memory_row(service: Service, *, case: str) -> Row:
    """Measures the daemon's private memory without its arenas, now."""
    own_bytes = service.own_memory_bytes()
    row = Row(
        name="daemon's own memory", case=case, subject=SUBJECT, unit="MB", value=own_bytes / MEGA,
        target=Target("value", "<=", OWN_MEMORY_MB_MAX),
    )  # fmt: skip
    return judged(row)


def budget_row(service: Service, *, case: str) -> Row:
    """Gives the highest use of the host budget that was seen, as a share of it."""
    service.watch_budget()
    share = service.host_bytes_max / service.host_budget_bytes
    row = Row(
        name="host budget in use at most", case=case, subject=SUBJECT, unit="of the budget", value=share,
        target=Target("value", "<=", 1.0),
        parts={"bytes_max": service.host_bytes_max, "budget_bytes": service.host_budget_bytes},
    )  # fmt: skip
    return judged(row)
