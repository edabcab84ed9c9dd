"""bench/bench_device.py on a real device: every measurement is made, and its figures are kept."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paramstore.bench.report.rows import decode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False"),
]

SCRIPT = Path(__file__).parents[2] / "bench" / "bench_device.py"


def test_the_quick_bench_measures_everything_but_what_is_not_installed(tmp_path: Path) -> None:
    out = tmp_path / "device.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--dir", str(tmp_path), "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = decode(out.read_bytes()).rows
    missing = [row for row in rows if row.note.startswith("not measured") and "kvikio" not in row.name]
    assert missing == []
    assert {"pin a read-only mapping of a memfd", "copy to the device", "copy to the host", "host sync of a layer", "decoding"} <= {
        row.name for row in rows
    }
