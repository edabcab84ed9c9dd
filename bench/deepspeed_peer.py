"""DeepSpeed ZeRO-Infinity beside us: the owner of a process that steps its optimizer, states on the same disk.

It lives in an environment of its own (bench/README.md says how it is made); BENCH_DEEPSPEED_PYTHON names its Python.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paramstore.errors import StoreUnavailable

VARIABLE = "BENCH_DEEPSPEED_PYTHON"
SCRIPT = Path(__file__).with_name("deepspeed_step.py")
MEGA = 1_000_000
PLAIN, PIPELINED = "DeepSpeed ZeRO-Infinity NVMe, plain", "DeepSpeed ZeRO-Infinity NVMe, pipelined"
VARIANTS = {PLAIN: ("plain", 5, 30 * MEGA), PIPELINED: ("pipelined", 16, 30 * MEGA)}
"""Kind, number of buffers and values in each, by name. These were fastest: fewer buffers fail, smaller ones are slower."""
WARM_UP_STEPS = 2


class DeepSpeed:
    """Owner of one process: AdamW over `blocks` blocks of `elements` parameters in bf16, states in `directory`."""

    def __init__(self, name: str, python: str, directory: Path, *, blocks: int, elements: int) -> None:
        """Starts the process; returns when its states lie on the disk. Raises StoreUnavailable with its last words if it ends."""
        self.name = name
        kind, buffers, buffer_elements = VARIANTS[name]
        self._log = directory / "deepspeed.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, str(SCRIPT), *map(str, (directory, blocks, elements, buffers, buffer_elements, kind))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(),
            )  # fmt: skip
        try:
            self._answer()
            for _ in range(WARM_UP_STEPS):
                self.step()
        except BaseException:
            self.close()
            raise

    def step(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            code, words = self._process.wait(), self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise StoreUnavailable(f"{self.name} ended with {code}: {' '.join(words)}")
        return answer


def environment() -> dict[str, str]:
    """Our environment, without what would make the peer's Python import our packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def missing_reason(python: str | None) -> str:
    """Says why the peer is left out; empty where it can run."""
    if not python:
        return f"{VARIABLE} does not name a Python with DeepSpeed (see bench/README.md)"
    question = "import importlib.metadata; importlib.metadata.version('deepspeed')"
    try:
        done = subprocess.run([python, "-c", question], capture_output=True, text=True, check=False, env=environment())
    except OSError as error:
        return f"{python} cannot be run: {error.strerror}"
    return f"{python} has no DeepSpeed: {done.stderr.strip().splitlines()[-1]}" if done.returncode else ""


def start_all(python: str, directory: Path, *, blocks: int, elements: int) -> Sequence[DeepSpeed]:
    """Starts both variants, each in a folder of its own. What was started is stopped if a later one fails."""
    started: list[DeepSpeed] = []
    try:
        for name, (kind, *_) in VARIANTS.items():
            folder = directory / kind
            folder.mkdir()
            started.append(DeepSpeed(name, python, folder, blocks=blocks, elements=elements))
    except BaseException:
        for peer in started:
            peer.close()
        raise
    return started
