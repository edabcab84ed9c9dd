"""The peer process is left out with a reason, or answers; what runs behind it is a stand-in of a few lines."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paramstore.errors import StoreUnavailable

SCRIPT = Path(__file__).parents[2] / "bench" / "deepspeed_peer.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_deepspeed_peer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peer = load()


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    script = tmp_path / "step.py"
    script.write_text(program)
    monkeypatch.setattr(peer, "SCRIPT", script)


def test_without_a_python_the_reason_names_the_variable() -> None:
    assert peer.VARIABLE in peer.missing_reason(None)
    assert peer.VARIABLE in peer.missing_reason("")
    assert "cannot be run" in peer.missing_reason("/nowhere/python")


@pytest.mark.slow
def test_a_python_without_deepspeed_is_a_reason() -> None:
    assert "has no DeepSpeed" in peer.missing_reason(sys.executable)


@pytest.mark.slow
def test_steps_are_answered_after_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys\nprint('ready', flush=True)\nfor n, _ in enumerate(sys.stdin): print(n, flush=True)\n"
    stand_in(tmp_path, monkeypatch, program)
    engine = peer.DeepSpeed(peer.PIPELINED, sys.executable, tmp_path, blocks=2, elements=8)
    try:
        assert engine.step() == peer.WARM_UP_STEPS
        assert engine.step() == peer.WARM_UP_STEPS + 1
    finally:
        engine.close()


@pytest.mark.slow
def test_a_peer_that_ends_is_told_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "import sys\nsys.exit('ran out of swap buffers')\n")
    with pytest.raises(StoreUnavailable, match="ran out of swap buffers"):
        peer.DeepSpeed(peer.PLAIN, sys.executable, tmp_path, blocks=2, elements=8)
