"""A process that trains with stored experts gives its memory back: nothing of the client's own is kept by malloc."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from paramstore_testkit.processes.daemon_process import QUIET
from paramstore_testkit.processes.forked_daemon import ForkedDaemon

PROGRAM = Path(__file__).parent / "training_memory.py"
STATE_BYTES = 12 * 4 * 16 * 3 * 512 * 384
KEPT_SHARE = 0.1
"""Of the states. It is torch's: the unmodified model, whose experts lie in mapped memory, leaves malloc more."""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_malloc_keeps_at_most_a_tenth_of_the_states_for_nothing(tmp_path: Path) -> None:
    with ForkedDaemon(tmp_path / "store", "--host-budget", f"{STATE_BYTES // 4}", environment=QUIET) as daemon:
        done = subprocess.run(
            [sys.executable, str(PROGRAM), daemon.address], capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) <= KEPT_SHARE * STATE_BYTES
