"""Scenarios in processes of their own: how they end is told, and nothing of them is left."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from paramstore_testkit.blocks.mounts import PREFIX
from paramstore_testkit.blocks.run import refusal, run_apart, told

pytestmark = pytest.mark.slow


def left() -> list[Path]:
    return sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}{os.getpid()}-*"))


def test_a_scenario_that_is_not_there_is_refused_and_its_directory_is_gone() -> None:
    result = run_apart("nonsense", limit_s=30.0)
    assert result.returncode == 2
    assert "nonsense" in result.stderr
    assert left() == []


def test_a_missing_tool_is_the_reason_why_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if refusal():
        pytest.skip("another reason comes before")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal() == "OSError: mkfs.ext4 is not installed"


def test_counts_are_told_in_the_order_of_their_names() -> None:
    assert told({"b": 2, "a": 1}) == "1 a, 2 b"
