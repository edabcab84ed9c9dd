"""bench/bench_device.py on a real device: every measurement is made, and its figures are kept."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paramstore_bench.device.battery import BatteryReport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False"),
]

SCRIPT = Path(__file__).parents[2] / "bench" / "bench_device.py"
PARTS = "registration,waits,logits,memory,ring,groups,copies,tier copies,speed,sums,fp8,kvikio"
"""All but those that run the tests of this folder."""
MAY_LACK = {"read into the device by kvikio", "fp8 grouped_mm on slots"}


def test_every_part_is_done_and_measures_all_but_what_is_not_installed(tmp_path: Path) -> None:
    out = tmp_path / "device.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--dir", str(tmp_path), "--out", str(out), "--only", PARTS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [row for part in BatteryReport.read(out).parts for row in part.rows]
    assert [row.name for row in rows if row.note.startswith("not measured") and row.name not in MAY_LACK] == []
    assert {row.on for row in rows} == {torch.cuda.get_device_name()}
