"""Ranks under torchrun whose gradients have room for two layers train as those that have all of it, and never wait in a circle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paramstore_testkit.processes.daemon_process import QUIET
from paramstore_testkit.processes.forked_daemon import ForkedDaemon

LIMIT_S = 120.0
PROGRAM = Path(__file__).parent / "room_rank.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
SETTINGS = {**QUIET, "PARAMSTORE_WAIT_TIMEOUT_S": "30"}
"""A circle is a wait of that length."""
SHARE_MIB = 2
"""Of a rank: a little more than two of its twelve layers."""


def train(directory: Path, *, ranks: int, wrap: str, seed: int) -> None:
    budget = ("--host-budget", "64MiB", "--gradient-budget", f"{SHARE_MIB * ranks}MiB")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    with (
        ForkedDaemon(directory / "scarce", *budget, environment=SETTINGS) as scarce,
        ForkedDaemon(directory / "ample", *budget[:2], environment=SETTINGS) as ample,
    ):
        command = [*torchrun, str(PROGRAM), wrap, str(seed), scarce.address, ample.address]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env={**os.environ, **ENVIRONMENT}
        )
    assert done.returncode == 0, f"{ranks} ranks, {wrap}, seed {seed}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_two_ranks_train_with_room_for_two_layers(tmp_path: Path, wrap: str) -> None:
    train(tmp_path, ranks=2, wrap=wrap, seed=1)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks_train_with_room_for_two_layers(tmp_path: Path, ranks: int, wrap: str, seed: int) -> None:
    train(tmp_path, ranks=ranks, wrap=wrap, seed=seed)
