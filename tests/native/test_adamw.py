"""Which AdamW runs: the native kernel where it can be had and gives torch's bits, else torch, and the log says which and why."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from paramstore_native import adamw, adamw_check
from paramstore_native.adamw_kernel import Kernel
from paramstore_native.compiled import Unavailable

pytestmark = pytest.mark.skipif(isinstance(adamw.load(), Unavailable), reason="the native kernel cannot be had here")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(adamw, "_found", [])
    monkeypatch.delenv(adamw.SWITCH_VARIABLE, raising=False)


def test_the_kernel_is_found_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert adamw.known_state() == ""
    first = adamw.kernel()
    assert isinstance(first, Kernel)
    assert adamw.kernel() is first
    assert adamw.known_state() == "native"
    assert [record.message for record in caplog.records] == ["AdamW runs in the native kernel"]


def test_it_can_be_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(adamw.SWITCH_VARIABLE, "0")
    assert adamw.kernel() is None
    assert adamw.known_state() == "torch (PARAMSTORE_NATIVE=0)"
    assert [record.message for record in caplog.records] == ["AdamW runs in torch: PARAMSTORE_NATIVE=0"]


def test_a_kernel_that_differs_from_torch_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_check, "difference", lambda _: "3 of 5 master differ")
    assert adamw.kernel() is None
    assert adamw.known_state() == "torch (3 of 5 master differ)"


def test_a_file_that_is_no_library_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "adamw.so").write_bytes(b"not a library")
    monkeypatch.setattr(adamw, "build", lambda *_, **__: tmp_path / "adamw.so")
    assert adamw.kernel() is None
    assert "cannot be loaded" in adamw.known_state()


@pytest.mark.slow
def test_where_torch_computes_otherwise_torch_is_used() -> None:
    program = "from paramstore_native import adamw; adamw.kernel(); print(adamw.known_state())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    if platform.machine() == "x86_64":
        assert "differ from those of torch" in done.stdout
        assert "(DEFAULT)" in done.stdout
