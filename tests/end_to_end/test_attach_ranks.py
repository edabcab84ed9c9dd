"""Two ranks under torchrun train one model over one store, and compute what one process does with both ranks' batches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess
from paramstore_testkit.processes.forked_daemon import ForkedDaemon

pytestmark = pytest.mark.slow

LIMIT_S = 120.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""With the shared store gloo finds the addresses of the first start's processes after a restart."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


KINDS = ("ddp", "nested", "fsdp2", "scaler ddp", "early ddp", "early fsdp2", "checkpoint", "trainer")
"""The last one lets transformers and accelerate set up what they like."""
MODES = (
    *KINDS, *(f"parallel {kind}" for kind in KINDS), "parallel replicas ddp", "parallel replicas fsdp2", "parallel search ddp",
    "parallel search fsdp2", "parallel timeline",
    "parallel timeline fsdp2", "columns ddp", "columns fsdp2", "columns early ddp", "parallel columns checkpoint", "columns dense",
)  # fmt: skip


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    settings = {**QUIET, "PARAMSTORE_WAIT_TIMEOUT_S": "30"}
    with ForkedDaemon(tmp_path_factory.mktemp("ranks") / "store", "--host-budget", "256MiB", environment=settings) as daemon:
        yield daemon


ATTACHED = ("-m", "paramstore_testkit.training.attached_rank")


def run(
    daemon: DaemonProcess, *arguments: str, torchrun: tuple[str, ...] = (), program: tuple[str, ...] = ATTACHED
) -> subprocess.CompletedProcess[str]:
    """What the ranks wrote, and how the job ended."""
    command = [*TORCHRUN, *torchrun, *program, daemon.address, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env={**os.environ, **ENVIRONMENT}
    )


def run_well(daemon: DaemonProcess, *arguments: str, **named: tuple[str, ...]) -> str:
    """What the ranks wrote to stderr. Fails with it where one of them failed for good."""
    done = run(daemon, *arguments, **named)
    assert done.returncode == 0, f"{arguments}:\n{done.stdout}\n{done.stderr}"
    return done.stderr


@pytest.fixture(scope="module")
def job(daemon: DaemonProcess) -> subprocess.CompletedProcess[str]:
    """One job that goes through all modes, each in a namespace of its own: its start takes ten times what a mode takes."""
    return run(daemon, *MODES)


@pytest.mark.parametrize("mode", MODES)
def test_ranks_compute_what_one_process_does_with_all_batches(job: subprocess.CompletedProcess[str], mode: str) -> None:
    assert mode in job.stdout.splitlines(), f"{job.stdout}\n{job.stderr}"


def test_a_job_that_is_over_ends_well(job: subprocess.CompletedProcess[str]) -> None:
    assert job.returncode == 0, job.stderr


def test_ranks_under_mixed_precision_train_as_the_unmodified_model(daemon: DaemonProcess) -> None:
    run_well(daemon, program=(str(Path(__file__).with_name("mixed_precision_rank.py")),))


@pytest.mark.parametrize("mode", ["restart", "parallel restart"])
def test_a_restarted_job_fences_the_former_and_goes_on_from_its_commit(daemon: DaemonProcess, tmp_path: Path, mode: str) -> None:
    said = run_well(daemon, mode, str(tmp_path / "dense.pt"), torchrun=("--max-restarts", "1"))
    assert "exitcode" in said, "the first start died"
