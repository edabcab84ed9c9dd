"""What tests of updates share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from paramstore.optim import chunks, gradients
from paramstore.optim import update as update_module
from paramstore_testkit.trial import one_thread

CHUNK = 1 << 10


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every border of a chunk is met by small fields; and no test waits for torch's threads to find a
    core."""
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", CHUNK)
    monkeypatch.setattr(chunks, "REDUCED_CHUNK_ELEMENTS", CHUNK)
    for module in (update_module, gradients):
        monkeypatch.setattr(module, "_thread", threading.local())  # buffers of this size are nobody else's
    with one_thread():
        yield
