"""The expert buffer: what stands asks nobody, inactive experts give way first, and results are those of memory."""

from __future__ import annotations

import pytest
import torch

from paramstore.errors import CapacityError, ConfigError
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device.buffer import ExpertBuffer
from paramstore_client.device.slot_cache import open_slots
from paramstore_client.device.tier import DeviceTier
from paramstore_client.nn import ResidentExperts, StoredExperts
from paramstore_client.source import ExpertSource, SlotSource

HIDDEN, EXPERTS = 8, 6


def make_namespace(*, lease_slots: int = 64) -> MemoryNamespace:
    return MemoryNamespace.of_swiglu(layers=2, experts=EXPERTS, hidden=HIDDEN, lease_slots=lease_slots)


def test_it_is_a_source_with_slots() -> None:
    ns = make_namespace()
    with ExpertBuffer(ns, 4) as buffer:
        assert isinstance(buffer, ExpertSource)
        assert isinstance(buffer, SlotSource)
        assert (buffer.lease_slots, buffer.layers, buffer.experts, buffer.schema) == (4, ns.layers, ns.experts, ns.schema)
    assert ExpertBuffer(ns, 99).lease_slots == 12, "all there are"


def test_what_stands_asks_nobody_and_what_this_batch_does_not_use_gives_way_first() -> None:
    ns = make_namespace()
    with ExpertBuffer(ns, 3) as buffer:
        buffer.acquire([(0, 0), (0, 1), (0, 2)]).release()
        buffer.acquire([(0, 0), (0, 2)]).release()
        ns.events.clear()
        buffer.acquire([(1, 0)]).release()
        assert ns.events == [("release", ((0, 1),)), ("acquire", ((1, 0),))]
        assert (buffer.counts.hits, buffer.counts.misses) == (2, 4)
        assert buffer.bytes_loaded == 4 * ns.schema.part("param").image_bytes
    assert ns.leased == []


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 12])
def test_stored_experts_compute_what_memory_does_through_however_few_slots(slots: int) -> None:
    ns = make_namespace()
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(3))
    ids = torch.arange(7)[:, None] % EXPERTS + torch.tensor([0, 1, 2, 3])
    ids, gate = ids % EXPERTS, torch.full((7, 4), 0.25)
    with ExpertBuffer(ns, slots) as buffer, torch.no_grad():
        for layer in (0, 1, 0, 1):
            expected = ResidentExperts([ns.values((layer, expert)) for expert in range(EXPERTS)])(x, ids, gate)
            assert torch.equal(StoredExperts(buffer, layer)(x, ids, gate), expected)
    assert ns.leased == []
    assert ns.leased_keys_max <= slots


def test_what_was_loaded_ahead_is_counted_and_there() -> None:
    ns = make_namespace()
    with ExpertBuffer(ns, 4) as buffer:
        assert buffer.prefetch([(1, 1), (1, 2)]).done()
        with buffer.acquire([(1, 1), (1, 2)]) as lease:
            assert torch.equal(lease[1, 2]["down"], ns.values((1, 2))["down"])
        assert (buffer.counts.hits, buffer.counts.ahead, buffer.counts.useful) == (2, 2, 2)
        buffer.prefetch([(0, 1)])
        buffer.skip([0])
        assert repr(buffer) == "<ExpertBuffer of 4 slots, 2 hits, 3 loads>"


def test_slots_that_cannot_be_are_refused() -> None:
    ns = make_namespace(lease_slots=4)
    with pytest.raises(ConfigError, match="slots=0"):
        ExpertBuffer(ns, 0)
    with pytest.raises(ConfigError, match="policy="):
        ExpertBuffer(ns, 2, policy="best")
    with pytest.raises(ConfigError, match="namespace="):
        ExpertBuffer(object(), 2)  # type: ignore[arg-type]
    with pytest.raises(CapacityError, match=r"lease_slots=0 .* and max_lease_slots where that was given$"):
        ExpertBuffer(MemoryNamespace.of_swiglu(lease_slots=0), slots=4)
    with pytest.raises(CapacityError, match=r"slots=4: 3 experts may stand of lease_slots=4 .* or give fewer slots$"):
        ExpertBuffer(ns, 4)


def test_on_a_device_the_slots_are_its_memory() -> None:
    ns = make_namespace()
    cache = open_slots(ns, 3, device=torch.device("meta"), policy="lru")
    assert isinstance(cache, DeviceTier)
    assert (cache.device.type, cache.lease_slots) == ("meta", 3)
