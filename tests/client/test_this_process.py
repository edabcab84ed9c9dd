"""The process's number is right in a forked child too."""

from __future__ import annotations

import os

import pytest

from paramstore_client import this_process


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_knows_its_own_number() -> None:
    parent = os.getpid()
    assert this_process.pid == parent
    if (child := os.fork()) == 0:
        os._exit(0 if this_process.pid == os.getpid() != parent else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert this_process.pid == parent
