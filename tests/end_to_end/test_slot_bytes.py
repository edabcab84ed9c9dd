"""What the slots in front of a namespace count, beside the bytes that the daemon read from its volume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import paramstore_client as ps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_time")]

SHAPE, LAYERS, EXPERTS = (256, 256), 6, 4
SLOTS = 8
"""Of 15 that the daemon has in 4 MiB, and 24 experts."""


def fill(address: str) -> None:
    with ps.connect(address) as store:
        schema = ps.param_schema({"w": (SHAPE, "float32")})
        with store.create_namespace("served", schema, layers=LAYERS, experts=EXPERTS) as namespace:
            namespace.initialize(lambda key: {"w": torch.full(SHAPE, float(10 * key[0] + key[1]))})
            namespace.commit(0).wait()


def bytes_read(store: ps.Store) -> int:
    return sum(volume["bytes_read"] for volume in store.stats()["volumes"].values())


@pytest.fixture
def served(tmp_path: Path, serve: Callable[..., object]) -> str:
    """The address of a daemon that was started anew, with nothing in its host memory."""
    daemon = serve(tmp_path / "store", "--host-budget", "4MiB").start()  # type: ignore[attr-defined]
    fill(daemon.address)
    daemon.stop()
    again = serve(tmp_path / "store", "--host-budget", "4MiB").start()  # type: ignore[attr-defined]
    return str(again.address)


def test_each_load_of_a_buffer_is_one_record_read_and_a_hit_is_none(served: str) -> None:
    with ps.connect(served) as store, store.open_namespace("served", min_lease_slots=SLOTS + 1) as reader:
        record_bytes = reader.schema.record_bytes
        with ps.ExpertBuffer(reader, SLOTS) as buffer:
            before = bytes_read(store)
            for layer in range(LAYERS):
                with buffer.acquire([(layer, expert) for expert in range(EXPERTS)]) as lease:
                    assert lease[layer, 3]["w"][0, 0] == 10 * layer + 3
            assert buffer.counts.loads == LAYERS * EXPERTS
            assert record_bytes <= (bytes_read(store) - before) / buffer.counts.loads <= record_bytes + 8192, "and its header"
            read = bytes_read(store)
            for _ in range(3):
                buffer.acquire([(LAYERS - 1, expert) for expert in range(EXPERTS)]).release()
            assert (buffer.counts.hits, bytes_read(store)) == (3 * EXPERTS, read)


def test_a_ring_reads_no_more_records_than_it_counts_loads(served: str) -> None:
    rounds = 5
    with ps.connect(served) as store, store.open_namespace("served", min_lease_slots=SLOTS + 1) as reader:
        before, image = bytes_read(store), reader.schema.part("param").image_bytes
        with ps.RingMemory(reader, 2) as ring:
            for turn in range(rounds * LAYERS):
                with ring.layer(turn % LAYERS) as experts:
                    assert experts[1]["w"][0, 0] == 10 * (turn % LAYERS) + 1
            counts = ring.counts
        uses = rounds * LAYERS * EXPERTS
        assert counts.hits + counts.late + counts.misses == uses
        assert counts.loads <= 1.08 * uses, "two layers are ahead at the end"
        read = (bytes_read(store) - before) / image
        kept = store.stats()["namespaces"]["served"]["param"]["slots"]
        assert SLOTS < kept < LAYERS * EXPERTS
        assert rounds * (LAYERS * EXPERTS - kept) <= read <= counts.loads, "what the daemon still has is not read again"
