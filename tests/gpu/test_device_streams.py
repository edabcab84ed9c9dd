"""The scenarios of simulated streams on a CUDA device, under torch's sanitizer: it ends the program at the first race."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from paramstore_testkit.streams.faults import FAULTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False"),
]

LIMIT_S = 300.0
SCRIPT = """
import sys
from contextlib import nullcontext
from paramstore_testkit.streams.faults import FAULTS
from paramstore_testkit.streams.scenario import SCENARIOS

with FAULTS.get(sys.argv[1], nullcontext)():
    for seed in range(20):
        for scenario in SCENARIOS:
            wrong = scenario(seed)
            assert wrong == [], f"seed {seed}: {wrong}"
"""
FOUND = ["slots.DeviceSlots.begin_use: copy.ready.wait_on_stream()", "copier.CudaCopier.copy: after.wait_on_stream()"]
"""Faults between streams alone: of what the host does beside them the sanitizer knows nothing."""


def run(fault: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, fault], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_scenarios_are_right_on_a_device_and_the_sanitizer_sees_no_race() -> None:
    done = run("")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("fault", FOUND)
def test_sanitizer_sees_a_wait_that_was_taken_away(fault: str) -> None:
    assert fault in FAULTS
    done = run(fault)
    assert done.returncode != 0
    assert "CSAN detected a possible data race" in done.stderr
