"""The bench of a trainer beside a reader runs as a user runs it, and says what it is for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_quick_run_writes_a_row_for_each_number_of_threads_and_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("b")  # a socket's path is short
    file = directory / "following.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PARAMSTORE_")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "bench_following.py"), "--quick", "--dir", str(directory), "--out", str(file)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr  # 1: a figure falls short, which says nothing of a small model
    rows = json.loads(file.read_text())["rows"]
    assert [row["case"] for row in rows] == ["a commit a step, 1 threads", "a commit a step, 2 threads"]
    for row in rows:
        assert row["target"] == {"quantity": "ratio", "relation": ">=", "bound": 0.95}
        assert (row["parts"]["standing"], row["parts"]["experts"]) == (4.0, 16.0)
        assert row["parts"]["changed_bytes"] > 0, "the reader's experts were others at each step"
    assert [path.name for path in directory.iterdir()] == ["following.json"]
