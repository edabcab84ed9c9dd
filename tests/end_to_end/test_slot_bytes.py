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


def test_what_was_loaded_ahead_and_evicted_before_its_visit_is_a_miss_and_read_again(served: str) -> None:
    ahead = [(0, expert) for expert in range(EXPERTS)]
    with ps.connect(served) as store, store.open_namespace("served", min_lease_slots=SLOTS + 1) as reader:
        buffer, record_bytes = ps.ExpertBuffer(reader, SLOTS), reader.schema.record_bytes
        with buffer:
            buffer.prefetch(ahead).wait()
            reader.evict(ahead[:1]).wait()
            before = bytes_read(store)
            buffer.acquire(ahead).release()
            counts = buffer.counts
            assert (counts.hits, counts.late, counts.misses, counts.wasted, counts.loads) == (EXPERTS - 1, 0, 1, 1, EXPERTS + 1)
            assert record_bytes <= bytes_read(store) - before <= record_bytes + 8192


def test_dispatches_of_twice_the_slots_read_what_cannot_stand(tmp_path: Path, serve: Callable[..., object]) -> None:
    """Of 24 experts 12 have slots, of which 3 pass: 9 can stand. In parts, under any policy, none would be found."""
    experts, slots, passing, rounds = LAYERS * EXPERTS, 12, 3, 10
    daemon = serve(tmp_path / "store", "--host-budget", "4MiB").start()  # type: ignore[attr-defined]
    with ps.connect(daemon.address) as store:
        schema = ps.param_schema({"w": (SHAPE, "float32")})
        with store.create_namespace("wide", schema, layers=1, experts=experts) as namespace:
            namespace.initialize(lambda key: {"w": torch.full(SHAPE, float(key[1]))})
            namespace.commit(0).wait()
        with store.open_namespace("wide", min_lease_slots=slots + 1) as reader, ps.ExpertBuffer(reader, slots) as buffer:
            layer = ps.nn.StoredExperts(buffer, 0, lambda x, weights: x * weights["w"][0, 0])
            ids = torch.arange(experts)[:, None]
            before, image = bytes_read(store), reader.schema.part("param").image_bytes
            with torch.no_grad():
                for _ in range(rounds):
                    y = layer(torch.ones(experts, 1), ids, torch.ones(experts, 1))
                    assert y[:, 0].tolist() == [float(expert) for expert in range(experts)]
            uses, bound = rounds * experts, (slots - passing) / experts
            read = (bytes_read(store) - before) / (image + 4096)
            assert read <= (1 - 0.9 * bound) * uses
            assert buffer.counts.hits / uses >= 0.9 * bound
            assert read <= buffer.counts.loads == uses - buffer.counts.hits - buffer.counts.late


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
