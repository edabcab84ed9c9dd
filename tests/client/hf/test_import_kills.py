"""Clients and daemons die in the middle of an import: what was saved is there, nothing else is, and memory stays in its bound."""

from __future__ import annotations

import json
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
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.processes.importer import MODULE, Importers
from paramstore_testkit.training.saved_models import expert_values, load_stock, save_stock

LIMIT_S = 60.0
MIB = 1 << 20
BUDGETS = ("--host-budget", "64MiB", "--gradient-budget", "8MiB")


@pytest.fixture(scope="module")
def importers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Importers]:
    with Importers(tmp_path_factory.mktemp("importers") / "log") as importers:
        yield importers


@pytest.fixture(autouse=True)
def _no_import_outlives_its_test(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "importers" in request.fixturenames:
        request.getfixturevalue("importers").kill()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_stock("qwen3_moe", tmp_path_factory.mktemp("checkpoint") / "qwen3_moe")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[DaemonProcess]:
    with ForkedDaemon(tmp_path / "store", *BUDGETS) as daemon:
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
    served: DaemonProcess, importers: Importers, checkpoint: Path, victim: str, stop_at: int
) -> None:
    importers.begin(served.address, checkpoint, "moe", stop_at=stop_at, save_every_s=0.0)
    importers.until(f"record {stop_at}")
    if victim in ("client", "both"):
        importers.kill()
    if victim in ("daemon", "both"):
        served.kill()
        served.start()
    importers.kill()
    check_half(served.address, "moe")
    importers.begin(served.address, checkpoint, "moe")
    result = importers.result()
    assert result["resumed"] + result["records"] == 16
    # The save before the last was over, and had all but the two values in flight then.
    assert max(0, stop_at - 3) <= result["resumed"] <= stop_at
    check_whole(served.address, checkpoint, "moe")


@pytest.mark.slow
def test_a_kill_before_the_first_save_starts_over_and_one_after_the_last_has_nothing_to_do(
    served: DaemonProcess, importers: Importers, checkpoint: Path
) -> None:
    importers.begin(served.address, checkpoint, "moe", stop_at=9, save_every_s=1e9)
    importers.until("record 9")
    importers.kill()
    importers.begin(served.address, checkpoint, "moe", stop_at=16, save_every_s=0.0)
    importers.until("record 16")
    served.kill()
    served.start()
    importers.kill()
    importers.begin(served.address, checkpoint, "moe")
    result = importers.result()
    assert result["resumed"] + result["records"] == 16
    check_whole(served.address, checkpoint, "moe")


@pytest.mark.slow
def test_an_interrupt_saves_what_is_there(served: DaemonProcess, importers: Importers, checkpoint: Path) -> None:
    importers.begin(served.address, checkpoint, "moe", stop_at=9, save_every_s=1e9)
    importers.until("record 9")
    importers.signal(signal.SIGINT)
    importers.wait_ended()
    assert importers.status == 1, "it was interrupted"
    served.kill()
    served.start()
    check_half(served.address, "moe")
    importers.begin(served.address, checkpoint, "moe")
    assert importers.result()["resumed"] == 9
    check_whole(served.address, checkpoint, "moe")


def imported_alone(address: str, path: Path, *words: str) -> dict[str, Any]:
    """The result of an import in a process that has done nothing else."""
    command = [sys.executable, "-m", MODULE, address, str(path), *words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_the_memory_of_an_import_is_one_record_beyond_the_arenas(checkpoint: Path, tmp_path: Path) -> None:
    path = save_stock(
        "mixtral", tmp_path / "large", hidden_size=1024, intermediate_size=1536, num_attention_heads=8, shard_bytes_max=30 * MIB
    )
    budget, uploads = 256 * MIB, 64 * MIB
    with DaemonProcess(tmp_path / "store", "--host-budget", str(budget), "--gradient-budget", str(uploads)) as daemon:
        imported_alone(daemon.address, checkpoint, "small")  # the daemon has loaded torch
        daemon_before = resident_bytes(daemon.pid)
        reset_peak(daemon.pid)
        result = imported_alone(daemon.address, path, "moe", "-1", "0.0")
        daemon_peak = peak_bytes(daemon.pid) - daemon_before
    record = result["record_bytes"]
    checkpoint_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert record > 48 * MIB, "so that what Python itself takes is little beside it"
    assert checkpoint_bytes > 2 * record
    # Two initial values (4 of a record's 12 bytes each) are in upload memory; what is read and converted is the rest.
    assert result["peak_bytes"] <= record + 24 * MIB, f"{result['peak_bytes'] / record:.2f} records"
    assert daemon_peak <= budget + record + 32 * MIB, f"{daemon_peak / MIB:.0f} MiB over a budget of {budget / MIB:.0f}"
