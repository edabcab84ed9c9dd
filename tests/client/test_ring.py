"""The ring loads K layers ahead, holds one, and gives each layer its own weights, around and around."""

import pytest
import torch
from torch import Tensor, nn

from paramstore.errors import CapacityError, ConfigError, LeaseError, UnknownKey
from paramstore.testing.clock import ManualClock
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device import DeviceTier
from paramstore_client.nn import ResidentExperts, StoredExperts
from paramstore_client.ring import RingMemory

EXPERTS, HIDDEN = 4, 8


def make_namespace(*, layers: int = 5, lease_slots: int = 64) -> MemoryNamespace:
    return MemoryNamespace.of_swiglu(layers=layers, experts=EXPERTS, hidden=HIDDEN, lease_slots=lease_slots, is_trainable=False)


def layers_of(ns: MemoryNamespace, kind: str) -> list[int]:
    return [keys[0][0] for _, keys in ns.happened(kind)]


def assert_weights(ns: MemoryNamespace, layer: int, experts: dict) -> None:
    for expert, fields in experts.items():
        for name, value in ns.values((layer, expert)).items():
            assert torch.equal(fields[name], value), f"{(layer, expert)} {name}"


# --- visits ---


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_every_visit_finds_the_weights_of_its_layer(layers: int, slots: int) -> None:
    ns = make_namespace(layers=layers)
    with RingMemory(ns, slots) as ring:
        for _ in range(3):
            for layer in range(layers):
                with ring.layer(layer) as experts:
                    assert list(experts) == list(range(EXPERTS))
                    assert_weights(ns, layer, experts)
    assert ns.leased == []
    assert ns.leased_keys_max == EXPERTS


def test_a_layer_that_is_done_makes_room_for_the_one_k_after_it() -> None:
    ns = make_namespace()
    with RingMemory(ns, 2) as ring:
        assert layers_of(ns, "prefetch") == [0, 1]
        for layer in (0, 1, 2, 3, 4, 0):
            with ring.layer(layer):
                ns.events.clear()
            assert [(kind, keys[0][0]) for kind, keys in ns.events] == [("release", layer), ("prefetch", (layer + 2) % 5)]


def test_known_routing_is_all_that_is_leased() -> None:
    ns = make_namespace()
    with RingMemory(ns, 2) as ring, ring.layer(0, [3, 1]) as experts:
        assert list(experts) == [1, 3]
        assert_weights(ns, 0, experts)
    assert next(ns.happened("acquire")) == ("acquire", ((0, 1), (0, 3)))


def test_where_whole_layers_do_not_fit_only_the_likely_experts_are_loaded_ahead() -> None:
    ns = make_namespace(layers=2, lease_slots=4)
    with RingMemory(ns, 2) as ring:
        assert layers_of(ns, "prefetch") == [], "nothing is known yet"
        for experts in ([1, 3], [3], [2, 3]):
            for layer in range(2):
                with ring.layer(layer, experts):
                    pass
    assert list(ns.happened("prefetch"))[-1] == ("prefetch", ((1, 3), (1, 2)))
    assert all(len(keys) <= 2 for _, keys in ns.happened("prefetch"))


def test_experts_ahead_can_be_limited() -> None:
    ns = make_namespace()
    with RingMemory(ns, 2, experts_ahead=1) as ring, ring.layer(0, [2]):
        pass
    with RingMemory(ns, 2, experts_ahead=1) as ring:
        for layer in (0, 1, 2, 3, 4, 0):
            with ring.layer(layer, [2]):
                pass
    assert {len(keys) for _, keys in ns.happened("prefetch")} == {1}


def test_the_order_of_layers_is_the_callers() -> None:
    ns = make_namespace()
    with RingMemory(ns, 1, layers=[3, 0]) as ring:
        for layer in (3, 0, 3):
            with ring.layer(layer) as experts:
                assert_weights(ns, layer, experts)
        assert ring.stats.skipped_turns == 0
        with pytest.raises(UnknownKey, match="layer 1"), ring.layer(1):
            pass


def test_skipped_layers_give_their_slots_up() -> None:
    ns = make_namespace()
    ns.holds_prefetches = True
    with RingMemory(ns, 2) as ring:
        with ring.layer(3) as experts:
            assert_weights(ns, 3, experts)
        assert ring.stats.skipped_turns == 3
        assert [ticket.is_cancelled for ticket in ns.tickets] == [True, True, True, True, False, False], "3 was used as it was"
        with ring.layer(4) as experts:
            assert_weights(ns, 4, experts)
        with ring.layer(0) as experts:
            assert_weights(ns, 0, experts)


def test_a_layer_that_was_not_left_keeps_its_slot() -> None:
    ns = make_namespace()
    with RingMemory(ns, 2) as ring:
        with ring.layer(0) as held, ring.layer(1):
            with pytest.raises(LeaseError, match="layer 2: its slot still holds layer 0"), ring.layer(2):
                pass
            assert_weights(ns, 0, held)
        with ring.layer(2) as experts:
            assert_weights(ns, 2, experts)


def test_an_error_in_a_layer_releases_it() -> None:
    ns = make_namespace()
    with pytest.raises(ZeroDivisionError), RingMemory(ns, 2) as ring, ring.layer(0):
        raise ZeroDivisionError
    assert ns.leased == []


def test_closing_cancels_what_still_loads() -> None:
    ns = make_namespace()
    ns.holds_prefetches = True
    with RingMemory(ns, 2):
        pass
    assert [ticket.is_cancelled for ticket in ns.tickets] == [True, True]


def test_a_ring_needs_slots_and_layers_of_its_namespace() -> None:
    ns = make_namespace()
    with pytest.raises(ConfigError, match="0 slots"):
        RingMemory(ns, 0)
    for layers in ([], [0, 0], [9]):
        with pytest.raises(ConfigError, match="layers="):
            RingMemory(ns, 1, layers=layers)


# --- parts ---


def test_a_layer_above_the_lease_cap_streams_in_parts() -> None:
    ns = make_namespace(lease_slots=3)
    with RingMemory(ns, 1) as ring:
        with pytest.raises(CapacityError, match=r"ring\.parts\(0\)"), ring.layer(0):
            pass
        for layer in range(5):
            seen = []
            for experts in ring.parts(layer):
                assert_weights(ns, layer, experts)
                seen += experts
            assert seen == list(range(EXPERTS))
    assert ns.leased_keys_max == 3
    assert ns.leased == []


def test_parts_that_are_not_finished_are_released() -> None:
    ns = make_namespace(lease_slots=2)
    with RingMemory(ns, 1) as ring:
        for _ in ring.parts(0):
            break
        assert ns.leased == []


# --- counts ---


def test_a_visit_whose_load_is_done_is_a_hit_and_one_that_waits_is_not() -> None:
    ns = make_namespace()
    ns.holds_prefetches = True
    with RingMemory(ns, 2) as ring:
        with ring.layer(0):
            pass
        ns.finish_prefetches()
        with ring.layer(1):
            pass
        assert (ring.stats.hits, ring.stats.waits) == (1, 1)


def test_the_time_waited_is_counted() -> None:
    ns, clock = make_namespace(), ManualClock()
    acquire = ns.acquire

    def slow_acquire(*arguments: object, **options: object) -> object:
        clock.advance(1.5)
        return acquire(*arguments, **options)

    ns.acquire = slow_acquire
    with RingMemory(ns, 2, clock=clock) as ring:
        for layer in range(3):
            with ring.layer(layer):
                pass
        assert ring.stats.wait_s == 4.5


def test_the_fraction_held_at_most_is_told() -> None:
    ns = make_namespace()
    with RingMemory(ns, 2) as ring:
        for layer in range(5):
            with ring.layer(layer, [0, 1]):
                pass
        assert ring.stats.resident_fraction == pytest.approx(2 / (5 * EXPERTS))
        assert ring.stats.total_bytes == 5 * EXPERTS * ns.schema.part("param").image_bytes


# --- models ---


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            ids = (torch.arange(6)[:, None] + torch.tensor([index, index + 1])) % EXPERTS
            x = x + layer(x, ids, torch.full((6, 2), 0.5))
        return x


@pytest.mark.parametrize("lease_slots", [64, 4, 2, 1])
def test_a_model_of_stored_experts_generates_through_the_ring(lease_slots: int) -> None:
    ns = make_namespace(lease_slots=lease_slots)
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(3))
    expected = Model([ResidentExperts([ns.values((layer, e)) for e in range(EXPERTS)]) for layer in range(5)])(x)
    with RingMemory(ns, 2) as ring, torch.no_grad():
        model = Model([StoredExperts(ring, layer) for layer in range(5)])
        for _ in range(3):
            assert torch.equal(model(x), expected)
        assert ring.stats.hits + ring.stats.waits == 15, "parts of one layer are one visit"
        assert ring.stats.skipped_turns == 0
    assert ns.leased == []


def test_a_layer_that_comes_again_at_once_is_a_new_visit() -> None:
    ns = make_namespace(layers=1, lease_slots=2)
    with RingMemory(ns, 1) as ring, torch.no_grad():
        model = Model([StoredExperts(ring, 0)])
        for _ in range(3):
            model(torch.zeros(6, HIDDEN))
        assert ring.stats.hits + ring.stats.waits == 3


def test_a_ring_over_device_slots_gives_the_same_weights() -> None:
    ns = make_namespace()
    with DeviceTier(ns, 2 * EXPERTS, device="cpu") as tier, RingMemory(tier, 2) as ring:
        for _ in range(2):
            for layer in range(5):
                with ring.layer(layer) as experts:
                    assert_weights(ns, layer, experts)
        assert ring.stats.hits == 10, "the prefetches had brought every layer to the device"
        assert tier.stats.bytes_copied > 0
    assert ns.leased == []
