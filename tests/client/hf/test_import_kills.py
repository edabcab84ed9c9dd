"""Clients and daemons die in the middle of an import: what was saved is there, nothing else is, and memory stays in its bound."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore_client as ps
from paramstore.bench.process import peak_bytes, reset_peak, resident_bytes
from paramstore.errors import StepFailed
from paramstore_client.hf.model.layout import find_layout
from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.training.saved_models import expert_values, load_stock, save_stock

LIMIT_S = 60.0
MIB = 1 << 20
BUDGETS = ("--host-budget", "64MiB", "--gradient-budget", "8MiB")


class Importer:
    """`paramstore_testkit.processes.importer` in a process of its own. A context manager: on leaving it the process is gone."""

    def __init__(self, address: str, path: Path, name: str, *, stop_at: int = -1, save_every_s: float = 10.0) -> None:
        arguments = [address, str(path), name, str(stop_at), str(save_every_s)]
        command = [sys.executable, "-m", "paramstore_testkit.processes.importer", *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._said = ""

    def until(self, line: str) -> None:
        """Returns when it has printed `line`."""
        assert self.process.stdout is not None
        while f"{line}\n" not in self._said:
            ready, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
            assert ready, f"it says nothing after {self._said!r}"
            data = os.read(self.process.stdout.fileno(), 4096)  # a buffered line would be nothing that select sees
            assert data, self.process.communicate(timeout=LIMIT_S)[1]
            self._said += data.decode()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        out, error = self.process.communicate(timeout=LIMIT_S)
        assert self.process.returncode == 0, error
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found

    def __enter__(self) -> Importer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=LIMIT_S)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_stock("qwen3_moe", tmp_path_factory.mktemp("checkpoint") / "qwen3_moe")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path / "store", *BUDGETS) as daemon:
        yield daemon


def check_whole(address: str, checkpoint: Path, name: str) -> None:
    stock = load_stock(checkpoint)
    layout = find_layout(stock)
    with ps.connect(address) as store, store.open_namespace(name) as reader:
        for key in reader.space:
            record = reader.read(key)
            for tensor, value in expert_values(stock, layout, key).items():
                assert torch.equal(record[tensor], value)


def check_half(address: str, name: str) -> None:
    with ps.connect(address) as store, pytest.raises(StepFailed, match="no committed step yet"):
        store.open_namespace(name)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "stop_at"), [("client", 7), ("daemon", 15), ("both", 1)])
def test_after_a_kill_only_what_was_not_saved_is_imported_again(
    served: DaemonProcess, checkpoint: Path, victim: str, stop_at: int
) -> None:
    with Importer(served.address, checkpoint, "moe", stop_at=stop_at, save_every_s=0.0) as importer:
        importer.until(f"record {stop_at}")
        if victim in ("client", "both"):
            importer.process.send_signal(signal.SIGKILL)
            importer.process.wait(LIMIT_S)
        if victim in ("daemon", "both"):
            served.kill()
            served.start()
    check_half(served.address, "moe")
    with Importer(served.address, checkpoint, "moe") as again:
        result = again.result()
    assert result["resumed"] + result["records"] == 16
    # The save before the last was over, and had all but the two values in flight then.
    assert max(0, stop_at - 3) <= result["resumed"] <= stop_at
    check_whole(served.address, checkpoint, "moe")


@pytest.mark.slow
def test_a_kill_before_the_first_save_starts_over_and_one_after_the_last_has_nothing_to_do(
    served: DaemonProcess, checkpoint: Path
) -> None:
    with Importer(served.address, checkpoint, "moe", stop_at=9, save_every_s=1e9) as importer:
        importer.until("record 9")
        importer.process.kill()
        importer.process.wait(LIMIT_S)
    with Importer(served.address, checkpoint, "moe", stop_at=16, save_every_s=0.0) as importer:
        importer.until("record 16")
        served.kill()
        served.start()
    with Importer(served.address, checkpoint, "moe") as again:
        result = again.result()
    assert result["resumed"] + result["records"] == 16
    check_whole(served.address, checkpoint, "moe")


@pytest.mark.slow
def test_an_interrupt_saves_what_is_there(served: DaemonProcess, checkpoint: Path) -> None:
    with Importer(served.address, checkpoint, "moe", stop_at=9, save_every_s=1e9) as importer:
        importer.until("record 9")
        importer.process.send_signal(signal.SIGINT)
        assert importer.process.wait(LIMIT_S) != 0
    served.kill()
    served.start()
    check_half(served.address, "moe")
    with Importer(served.address, checkpoint, "moe") as again:
        assert again.result()["resumed"] == 9
    check_whole(served.address, checkpoint, "moe")


@pytest.mark.slow
def test_the_memory_of_an_import_is_one_record_beyond_the_arenas(checkpoint: Path, tmp_path: Path) -> None:
    path = save_stock(
        "mixtral", tmp_path / "large", hidden_size=1024, intermediate_size=1536, num_attention_heads=8, shard_bytes_max=30 * MIB
    )
    budget, uploads = 256 * MIB, 64 * MIB
    with DaemonProcess(tmp_path / "store", "--host-budget", str(budget), "--gradient-budget", str(uploads)) as daemon:
        with Importer(daemon.address, checkpoint, "small") as importer:
            importer.result()  # the daemon has loaded torch
        daemon_before = resident_bytes(daemon.pid)
        reset_peak(daemon.pid)
        with Importer(daemon.address, path, "moe", save_every_s=0.0) as importer:
            result = importer.result()
        daemon_peak = peak_bytes(daemon.pid) - daemon_before
    record = result["record_bytes"]
    checkpoint_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert record > 48 * MIB, "so that what Python itself takes is little beside it"
    assert checkpoint_bytes > 2 * record
    # Two initial values (4 of a record's 12 bytes each) are in upload memory; what is read and converted is the rest.
    assert result["peak_bytes"] <= record + 24 * MIB, f"{result['peak_bytes'] / record:.2f} records"
    assert daemon_peak <= budget + record + 32 * MIB, f"{daemon_peak / MIB:.0f} MiB over a budget of {budget / MIB:.0f}"
