"""What tests of every folder may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paramstore_testkit import trial


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes on one thread: those of small tensors only wait for each other, and some sums depend on how many there are."""
    with trial.one_thread():
        yield
