"""Processes forked off a server: what they say is heard in order, and how they end is told."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramstore_testkit.processes.fork_server import ForkServer

pytestmark = pytest.mark.slow

MODULE = """
import os, signal
from paramstore_testkit.processes.fork_server import say, serve_forks

def live(request):
    for word in request["words"]:
        say(word)
    if "error" in request:
        raise ValueError(request["error"])
    signal.pause()

serve_forks(live)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    (tmp_path / "talkers.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with ForkServer("talkers", log=tmp_path / "log") as server:
        yield server


def test_a_child_is_heard_and_killed(server: ForkServer) -> None:
    for number in range(3):
        server.fork({"words": [f"first {number}", "second"]})
        assert server.is_running
        assert server.heard() == f"first {number}"
        server.kill_within(0.0)
        assert server.wait_ended() in (["second"], [])
        assert not server.is_running


def test_a_child_that_ends_otherwise_is_an_error_with_its_log(server: ForkServer) -> None:
    server.fork({"words": [], "error": "the reason"})
    with pytest.raises(AssertionError, match=r"ended 1\n(.|\n)*the reason"):
        server.heard()
    assert not server.is_running


def test_a_stopped_child_can_be_killed(server: ForkServer) -> None:
    server.fork({"words": ["here"]})
    assert server.heard() == "here"
    server.signal(signal.SIGSTOP)
    assert server.kill() == []


