"""The fine-tuning example as a user runs it, two ranks and FSDP2: killed with its daemon, it goes on to the same weights."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import paramstore_client as ps
from paramstore_client.connection.address import parse_address
from paramstore_client.handle.dense_part import DensePart
from paramstore_client.running import RunningDaemon, find_daemon

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "finetune_qwen3_moe.py"
STEPS = 8
KILLED_AFTER = 7
"""Two steps beyond the checkpoint of step 5."""
LIMIT_S = 120.0
"""Of each wait."""


class Run:
    """One folder in which the example runs, time and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses: dict[tuple[int, int], str] = {}
        """By rank and step: the digits that were printed last."""

    def start(self) -> subprocess.Popen[str]:
        """In a process group of its own, which takes the daemon along that it starts."""
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(EXAMPLE), "--out", str(self.folder), "--steps", str(STEPS),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
        )

    def read(self, process: subprocess.Popen[str], *, until_step: int | None = None) -> str:
        """Keeps the losses; ends with the process, or when a rank has made `until_step`. Gives what was printed."""
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            for rank, step, loss in re.findall(r"rank (\d) step (\d+) loss (\d+\.\d+)", line):
                self.losses[int(rank), int(step)] = loss
                if int(step) == until_step:
                    return "".join(printed)
        return "".join(printed)

    def finish(self) -> None:
        with self.start() as process:
            printed = self.read(process)
            assert process.wait(LIMIT_S) == 0, printed

    def kill(self) -> None:
        """Ranks, launcher and daemon, after step `KILLED_AFTER`."""
        with self.start() as process:
            printed = self.read(process, until_step=KILLED_AFTER)
            assert process.poll() is None, printed
            daemon = self.daemon()
            assert daemon is not None
            with daemon:
                daemon.send(signal.SIGKILL)
                os.killpg(process.pid, signal.SIGKILL)
                assert daemon.has_ended(LIMIT_S)

    def daemon(self) -> RunningDaemon | None:
        """The daemon, whichever run started it."""
        return find_daemon(parse_address(self.folder / "store"))

    def experts(self) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
        """Every field of every record, as the last commit has it."""
        with ps.connect(str(self.folder / "store")) as store, store.open_namespace("experts") as reader:
            assert reader.view_step == STEPS
            dense = DensePart.from_extra(reader.extra(STEPS))
            assert dense is not None
            assert dense.path.stat().st_size == dense.size_bytes, "a served model can follow it"
            return {(layer, expert): reader.read((layer, expert)) for layer in reader.layers for expert in range(reader.experts)}

    def end(self) -> None:
        """Ends the daemon, if it was started and has not gone."""
        if (daemon := self.daemon()) is not None:
            with daemon:
                daemon.send(signal.SIGTERM)
                assert daemon.has_ended(LIMIT_S)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[tuple[Run, Run]]:
    whole, killed = Run(tmp_path / "whole"), Run(tmp_path / "killed")
    yield whole, killed
    whole.end()
    killed.end()


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_to_the_same_losses_and_experts(runs: tuple[Run, Run]) -> None:
    whole, killed = runs
    whole.finish()
    killed.kill()
    before = dict(killed.losses)
    killed.finish()
    assert {step for _, step in whole.losses} == set(range(1, STEPS + 1))
    assert killed.losses == whole.losses
    assert all(whole.losses[place] == loss for place, loss in before.items())
    first, second = whole.experts(), killed.experts()
    assert first.keys() == second.keys()
    for key, fields in first.items():
        assert all(torch.equal(value, second[key][name]) for name, value in fields.items()), key
    assert float(whole.losses[0, STEPS]) < float(whole.losses[0, 1])
