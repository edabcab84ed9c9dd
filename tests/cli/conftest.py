"""Commands run as a user types them, in this process or in one of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from paramstore.cli import signals


@pytest.fixture(autouse=True)
def _signals_of_a_terminal() -> None:
    """Signals as a terminal has them, whatever started the tests."""
    for number in signals.ENDING:
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def modules_of() -> Callable[..., set[str]]:
    """Runs `paramstore` with these words in a process of its own; gives the modules it imported."""

    def run(*words: str, code: int = 0) -> set[str]:
        command = [sys.executable, "-X", "importtime", "-m", "paramstore", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONWARNINGS": ""}
        )
        assert done.returncode == code, done.stderr[-2000:]
        lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
        return {line.rpartition("|")[2].strip() for line in lines}

    return run
