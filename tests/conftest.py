"""What tests of every folder may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes on one thread: those of small tensors only wait for each other, and some sums depend on how many there are."""
    import torch  # not everybody's

    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)
