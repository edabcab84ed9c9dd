"""An interrupt ends a command between two steps, not within one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from paramstore.cli.signals import held_back


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Whatever ran before, or started this process, may have taken Ctrl-C away."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_within_the_block_is_raised_at_its_end() -> None:
    made = []

    def call() -> None:
        with held_back():
            os.kill(os.getpid(), signal.SIGINT)
            made.append("what the block makes")

    with pytest.raises(KeyboardInterrupt):
        call()
    assert made == ["what the block makes"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_happens() -> None:
    with held_back():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
