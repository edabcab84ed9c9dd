"""The peers of `bench/peers.py` hold what they were given; how quick they are is none of a test's business."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from paramstore.bench.limits.pages import MemoryKind, Slab
from paramstore.bench.limits.raw import fill_incompressible

RECORD_BYTES, RECORD_COUNT = 64 << 10, 3
SCRIPT = Path(__file__).parents[2] / "bench" / "peers.py"


def load_peers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_peers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peers = load_peers()


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab(MemoryKind.PRIVATE_SMALL, RECORD_BYTES * RECORD_COUNT)
    fill_incompressible(slab.view[: RECORD_BYTES * RECORD_COUNT])
    yield slab
    slab.close()


@pytest.mark.parametrize("make", peers.PEERS, ids=lambda make: make.__name__)
def test_peer_reads_and_overwrites_its_records_and_leaves_nothing(make: type, tmp_path: Path, slab: Slab) -> None:
    stored = bytes(slab.view[: RECORD_BYTES * RECORD_COUNT])
    peer = make(tmp_path, slab, record_bytes=RECORD_BYTES, record_count=RECORD_COUNT)

    assert peer.write([1, 0]).work == 2 * RECORD_BYTES
    if make is not peers.TorchLoad:  # the one that loads into tensors of its own
        slab.view[:] = bytes(slab.length_bytes)
    assert peer.read([2, 0, 1]).work == 3 * RECORD_BYTES

    assert bytes(slab.view[: RECORD_BYTES * RECORD_COUNT]) == stored
    peer.close()
    assert list(tmp_path.iterdir()) == []
