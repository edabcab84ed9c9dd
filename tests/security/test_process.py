"""Processes of the daemon's own user, root aside, do not get into it. A daemon that is not hardened shows that they would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.processes.other_user import Act, command, outcomes

pytestmark = pytest.mark.slow

USER = 65534 if os.getuid() == 0 else os.getuid()
INTRUSIONS = ("open_memory", "read_memory", "attach", "take_descriptor", "map", "descriptors", "environment")
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


def intrusions(pid: int) -> list[Act]:
    return [(name, pid) for name in INTRUSIONS]


def is_open_system() -> bool:
    """Whether the kernel lets processes of one user look into each other at all."""
    return not PTRACE_SCOPE.exists() or PTRACE_SCOPE.read_text().strip() == "0"


def test_no_process_of_the_same_user_gets_in(common_place: Path) -> None:
    with DaemonProcess(common_place / "store", command=command(USER)) as daemon:
        found = dict(zip(INTRUSIONS, outcomes(USER, intrusions(daemon.pid)), strict=True))
        assert {name: outcome for name, outcome in found.items() if outcome not in ("EPERM", "EACCES")} == {}
        assert outcomes(USER, [("talk", str(daemon.socket))]) == ["done"]


@pytest.mark.skipif(not is_open_system(), reason="this kernel forbids it for all processes (yama)")
def test_all_of_them_get_into_a_daemon_that_is_not_hardened(common_place: Path) -> None:
    with DaemonProcess(common_place / "store", command=command(USER, "--soft")) as daemon:
        assert outcomes(USER, intrusions(daemon.pid)) == ["done"] * len(INTRUSIONS)
