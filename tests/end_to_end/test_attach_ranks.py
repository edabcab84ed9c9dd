"""Two ranks under torchrun train one model over one store, and compute what one process does with both ranks' batches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess

pytestmark = pytest.mark.slow

LIMIT_S = 120.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""With the shared store gloo finds the addresses of the first start's processes after a restart."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    settings = {**QUIET, "PARAMSTORE_WAIT_TIMEOUT_S": "30"}
    with DaemonProcess(tmp_path / "store", "--host-budget", "64MiB", environment=settings) as daemon:
        yield daemon


ATTACHED = ("-m", "paramstore_testkit.training.attached_rank")


def run(
    daemon: DaemonProcess, *arguments: str, torchrun: tuple[str, ...] = (), program: tuple[str, ...] = ATTACHED
) -> str:
    """What the ranks wrote. Fails with it where one of them failed for good."""
    command = [*TORCHRUN, *torchrun, *program, daemon.address, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env={**os.environ, **ENVIRONMENT}
    )
    assert done.returncode == 0, f"{arguments}:\n{done.stdout}\n{done.stderr}"
    return done.stderr


@pytest.mark.parametrize("mode", ["ddp", "nested", "fsdp2", "trainer", "early ddp", "early fsdp2"])
def test_ranks_compute_what_one_process_does_with_all_batches(daemon: DaemonProcess, mode: str) -> None:
    run(daemon, mode)


def test_ranks_under_mixed_precision_train_as_the_unmodified_model(daemon: DaemonProcess) -> None:
    run(daemon, program=(str(Path(__file__).with_name("mixed_precision_rank.py")),))


def test_a_distributed_checkpoint_under_fsdp2_is_trained_on_bit_for_bit(daemon: DaemonProcess) -> None:
    run(daemon, "checkpoint")


def test_a_restarted_job_fences_the_former_and_goes_on_from_its_commit(daemon: DaemonProcess, tmp_path: Path) -> None:
    said = run(daemon, "restart", str(tmp_path / "dense.pt"), torchrun=("--max-restarts", "1"))
    assert "exitcode" in said, "the first start died"
