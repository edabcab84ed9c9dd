"""The ring loads K layers ahead, holds one, and gives each layer its own weights, around and around."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from operator import itemgetter
from random import Random

import pytest
import torch
from torch import Tensor, nn

from paramstore.errors import CapacityError, ConfigError, LeaseError, UnknownKey, WaitTimeout
from paramstore.testing.clock import ManualClock
from paramstore.testing.memory_namespace import MemoryNamespace, MemoryTicket
from paramstore_client.device.ring import RingMemory
from paramstore_client.device.tier import DeviceTier
from paramstore_client.nn import ResidentExperts, StoredExperts
from paramstore_testkit.trial import Trial, telling

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
    assert ns.leased_keys_max == (layers if layers <= slots else 1) * EXPERTS, "what is loaded ahead is leased when it is visited"


def test_a_layer_that_is_done_makes_room_for_the_one_k_after_it() -> None:
    ns = make_namespace()
    with RingMemory(ns, 2) as ring:
        assert layers_of(ns, "prefetch") == [0] * EXPERTS + [1] * EXPERTS
        for layer in (0, 1, 2, 3, 4, 0):
            with ring.layer(layer):
                ns.events.clear()
            happened = [(kind, keys[0][0]) for kind, keys in ns.events]
            assert happened == [("release", layer)] * EXPERTS + [("prefetch", (layer + 2) % 5)] * EXPERTS


def test_known_routing_is_all_that_is_leased() -> None:
    ns = make_namespace()
    with RingMemory(ns, 2) as ring, ring.layer(0, [3, 1]) as experts:
        assert list(experts) == [1, 3]
        assert_weights(ns, 0, experts)
    assert list(ns.happened("acquire")) == [("acquire", ((0, 1),)), ("acquire", ((0, 3),))]


def test_where_whole_layers_do_not_fit_only_the_likely_experts_are_loaded_ahead() -> None:
    ns = make_namespace(lease_slots=5)
    with RingMemory(ns, 2) as ring:
        assert layers_of(ns, "prefetch") == [], "nothing is known yet"
        for experts in ([1, 3], [3], [2, 3]):
            for layer in range(5):
                with ring.layer(layer, experts):
                    pass
    asked = [key for _, (key,) in ns.happened("prefetch")]
    assert asked[-2:] == [(1, 3), (1, 2)]
    assert max(len(list(of_layer)) for _, of_layer in groupby(asked, key=itemgetter(0))) == 2


def test_experts_ahead_can_be_limited() -> None:
    ns = make_namespace()
    with RingMemory(ns, 2, experts_ahead=1) as ring:
        for layer in (0, 1, 2, 3, 4, 0):
            with ring.layer(layer):
                pass
    ahead = layers_of(ns, "prefetch")
    assert ahead
    assert len(set(ahead)) == len(ahead), "one of each layer"


def test_the_order_of_layers_is_the_callers() -> None:
    ns = make_namespace()
    with RingMemory(ns, 1, layers=[3, 0]) as ring:
        for layer in (3, 0, 3):
            with ring.layer(layer) as experts:
                assert_weights(ns, layer, experts)
        assert ring.stats.skipped_turns == 0
        with pytest.raises(UnknownKey, match="layer 1"), ring.layer(1):
            pass


def test_skipped_layers_give_their_room_up() -> None:
    ns = make_namespace()
    with RingMemory(ns, 2) as ring:
        for _ in range(3):
            for layer in (3, 4):
                with ring.layer(layer) as experts:
                    assert_weights(ns, layer, experts)
        assert ring.stats.skipped_turns == 9
        assert ring.counts.wasted == 3 * 2 * EXPERTS, "each time 0 and 1 gave room to 3 and 4"
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
    assert [ticket.is_cancelled for ticket in ns.tickets] == [True] * 2 * EXPERTS


def test_a_ring_needs_slots_and_layers_of_its_namespace() -> None:
    ns = make_namespace()
    with pytest.raises(ConfigError, match="slots=0"):
        RingMemory(ns, 0)
    for layers in ([], [0, 0], [9]):
        with pytest.raises(ConfigError, match="layers="):
            RingMemory(ns, 1, layers=layers)


# --- visits that fail ---


class FailingNamespace(MemoryNamespace):
    """Raises `acquire_error` and `prefetch_error` while they are set."""

    acquire_error: BaseException | None = None
    prefetch_error: BaseException | None = None

    def acquire(self, *arguments: object, **options: object) -> object:
        if self.acquire_error is not None:
            raise self.acquire_error
        return super().acquire(*arguments, **options)

    def prefetch(self, *arguments: object, **options: object) -> object:
        if self.prefetch_error is not None:
            raise self.prefetch_error
        return super().prefetch(*arguments, **options)


def make_failing(layers: int) -> FailingNamespace:
    return FailingNamespace.of_swiglu(layers=layers, experts=EXPERTS, hidden=HIDDEN, is_trainable=False)


@contextmanager
def failing(ns: FailingNamespace, name: str, error: BaseException) -> Iterator[None]:
    setattr(ns, name, error)
    try:
        yield
    finally:
        setattr(ns, name, None)


def test_a_visit_that_fails_costs_itself_and_no_other() -> None:
    ns = make_namespace()
    with RingMemory(ns, 2) as ring:
        with pytest.raises(UnknownKey, match="99"), ring.layer(0, [99]):
            pass
        assert ring.stats == type(ring.stats)(total_bytes=ring.stats.total_bytes), "nothing was visited"
        for _ in range(3):
            for layer in range(5):
                with ring.layer(layer, [1]) as experts:
                    assert_weights(ns, layer, experts)
        assert ring.stats.skipped_turns == 0
    assert ns.leased == []


def test_a_load_ahead_that_is_refused_fails_no_visit(caplog: pytest.LogCaptureFixture) -> None:
    ns = make_failing(3)
    with failing(ns, "prefetch_error", CapacityError("no room")), RingMemory(ns, 2) as ring:
        for layer in (0, 1, 2, 0, 2, 1):
            with ring.layer(layer) as experts:
                assert_weights(ns, layer, experts)
        assert list(ring.parts(2))
    assert ns.leased == []
    assert "layer 0 could not be loaded ahead: no room" in caplog.text


def test_a_ring_says_where_it_is() -> None:
    with RingMemory(make_namespace(), 2) as ring:
        assert repr(ring) == "<RingMemory of 5 layers in 2 slots, before its first visit>"
        with ring.layer(3):
            assert repr(ring) == "<RingMemory of 5 layers in 2 slots, at layer 3, holding 4 keys>"


def test_an_empty_routing_is_a_visit_without_weights() -> None:
    with RingMemory(make_namespace(), 2) as ring:
        for layer in range(5):
            with ring.layer(layer, []) as experts:
                assert experts == {}
        with pytest.raises(ConfigError, match="no keys"):
            ring.acquire([])
        assert ring.stats.skipped_turns == 0


def test_a_ring_outside_of_its_with_is_refused() -> None:
    ring = RingMemory(make_namespace(), 2)
    with pytest.raises(LeaseError, match="inside its `with`"), ring.layer(0):
        pass


def test_a_ring_that_has_ended_is_not_entered_again() -> None:
    ns = make_namespace()
    ring = RingMemory(ns, 2)
    with ring, ring.layer(0):
        pass
    ns.events.clear()
    with pytest.raises(LeaseError, match="has ended"), ring:
        pass
    with pytest.raises(LeaseError, match="inside its `with`"), ring.layer(1):
        pass
    assert ns.events == [], "nothing was asked for, which nobody would give back"


@pytest.mark.parametrize("in_order", [False, True], ids=["as they come", "in order"])
def test_a_layer_that_does_not_fit_goes_through_the_ring_in_one_visit(in_order: bool) -> None:
    ns = make_namespace(lease_slots=3)
    with RingMemory(ns, 1) as ring:
        for layer in (0, 1, 0):
            keys = [(layer, expert) for expert in range(ns.experts)]
            with ring.acquire_arriving(keys, may_pass=True) as lease:
                assert lease.passing_count > 0
                seen = []
                for key in keys if in_order else lease.in_turn():
                    weights = lease.turn_to(key) if in_order else lease[key]
                    assert torch.equal(weights["down"], ns.values(key)["down"])
                    seen.append(key)
                assert sorted(seen) == keys
                assert lease.ahead[0] >= 0
        assert (ring.stats.hits + ring.stats.waits, ring.stats.waits) == (3, 3)
        assert ring.stats.wait_s > 0
    assert ns.leased == []


class RingTrial(Trial):
    """A seeded life of good and bad visits. A ring's rule is all the model that it needs: a visit that began is the next turn of
    its layer, one that failed is none, and only a turn that is held stands in the way of the Kth after it."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.layers, self.slots = self.random.randint(1, 6), self.random.randint(1, 4)
        self.ns = make_failing(self.layers)
        self.ns.holds_prefetches = self.random.random() < 0.5
        self.turn, self.visits, self.skipped = -1, 0, 0
        self.held: list[int] = []

    def visit(self, steps: int) -> None:
        with telling(self.story), RingMemory(self.ns, self.slots) as self.ring:
            for _ in range(steps):
                self.step()
                assert not self.held
                assert self.ns.leased_key_count <= min(self.slots, self.layers) * EXPERTS
                stats = self.ring.stats
                assert (stats.hits + stats.waits, stats.skipped_turns) == (self.visits, self.skipped)
            for layer in range(self.layers):  # and all is as it was
                with self.ring.layer(layer) as experts:
                    assert_weights(self.ns, layer, experts)
        assert self.ns.leased == []

    def step(self) -> None:
        name = self.random.choice(("good", "good", "unknown", "stopped", "spoilt", "given_up", "nested", "unloaded"))
        self.log(name)
        getattr(self, name)()

    def layer(self) -> int:
        """Mostly the next one."""
        return self.random.choice(((self.turn + 1) % self.layers, self.random.randrange(self.layers)))

    def turn_of(self, layer: int) -> int:
        return self.turn + 1 + (layer - self.turn - 1) % self.layers

    def began(self, layer: int) -> None:
        turn = self.turn_of(layer)
        self.skipped += turn - self.turn - 1
        self.turn, self.visits = turn, self.visits + 1

    @contextmanager
    def visiting(self, layer: int) -> Iterator[None]:
        with self.ring.layer(layer, self.random.sample(range(EXPERTS), 2)) as experts:
            self.began(layer)
            self.held.append(self.turn)
            try:
                assert_weights(self.ns, layer, experts)
                yield
            finally:
                self.held.pop()

    def good(self) -> None:
        with self.visiting(self.layer()):
            pass

    def unknown(self) -> None:
        with pytest.raises((UnknownKey, ConfigError)), self.ring.layer(self.layer(), [self.random.choice((-1, EXPERTS))]):
            pass
        with pytest.raises(UnknownKey), self.ring.layer(self.layers):
            pass

    def stopped(self) -> None:
        error = self.random.choice((KeyboardInterrupt(), WaitTimeout("late")))
        for keeper in self.ns.keepers:  # what stands asks nobody
            keeper.give_back()
        with failing(self.ns, "acquire_error", error), pytest.raises(type(error)), self.ring.layer(self.layer()):
            pass

    def spoilt(self) -> None:
        with pytest.raises(ZeroDivisionError), self.visiting(self.layer()):
            raise ZeroDivisionError

    def unloaded(self) -> None:
        """The load ahead is refused, or interrupted: then the visit is over, having begun or not."""
        error = self.random.choice((CapacityError("no room"), KeyboardInterrupt()))
        layer = self.layer()
        with failing(self.ns, "prefetch_error", error):
            try:
                with self.ring.layer(layer):
                    pass
            except KeyboardInterrupt:
                pass
        self.began(layer)

    def given_up(self) -> None:
        layer = self.layer()
        for experts in self.ring.parts(layer, [0, 2]):
            assert_weights(self.ns, layer, experts)
            break
        self.began(layer)

    def nested(self) -> None:
        with ExitStack() as stack:
            for _ in range(self.random.randint(1, 5)):
                layer = self.layer()
                if self.held and self.held[0] <= self.turn_of(layer) - self.slots:
                    with pytest.raises(LeaseError, match="was not left"), self.ring.layer(layer):
                        pass
                else:
                    stack.enter_context(self.visiting(layer))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_fails_the_others_go_on(seed: int) -> None:
    RingTrial(seed).visit(40)


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
    assert ns.leased_keys_max == 2, "one is left to who else leases through the handle"
    assert ns.leased == []


def test_parts_that_are_not_finished_are_released() -> None:
    ns = make_namespace(lease_slots=2)
    with RingMemory(ns, 1) as ring:
        for _ in ring.parts(0):
            break
        assert "holding 0 keys" in repr(ring)
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
        assert ring.stats.wait_s == 3 * EXPERTS * 1.5


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
        assert tier.stats.bytes_copied > 0
    assert ns.leased == []


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("policy", ["ring", "decayed_lfu", "lifo_inactive"])
def test_what_a_ring_has_loaded_ahead_is_there_when_its_visit_begins_and_was_copied_once(slots: int, policy: str) -> None:
    ns, turns = make_namespace(), 40 * 5
    with DeviceTier(ns, slots * EXPERTS, device="cpu", policy=policy) as tier, RingMemory(tier, slots) as ring:
        for turn in range(turns):
            with ring.layer(turn % 5) as experts:
                assert_weights(ns, turn % 5, experts)
        assert (ring.stats.hits, ring.stats.waits) == (turns, 0)
        stats = tier.stats
        assert (stats.hits, stats.late, stats.misses) == (turns * EXPERTS, 0, 0)
        copied = stats.bytes_copied / sum(field.length_bytes for field in ns.schema.part("param").fields)
        assert copied == sum(len(leased) for _, leased in ns.happened("acquire")), "a copy is one host lease of its key"
        assert copied <= 1.06 * turns * EXPERTS


@pytest.mark.parametrize("kind", ["host", "twin"])
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_with_whole_layers_ahead_nothing_is_absent_and_an_expert_is_loaded_once_a_use(slots: int, kind: str) -> None:
    ns, turns = make_namespace(), 40 * 5
    with ExitStack() as stack:
        source = ns if kind == "host" else stack.enter_context(DeviceTier(ns, slots * EXPERTS, device="cpu", policy="ring"))
        ring = stack.enter_context(RingMemory(source, slots))
        for turn in range(turns):
            with ring.layer(turn % 5) as experts:
                assert_weights(ns, turn % 5, experts)
        counts = ring.counts
        assert (ring.stats.hits, ring.stats.waits) == (turns, 0)
        assert (counts.hits, counts.late, counts.misses, counts.passed) == (turns * EXPERTS, 0, 0, 0)
        asked = [key for _, keys in ns.happened("prefetch") for key in keys]
        assert counts.loads == len(asked) <= 1.06 * turns * EXPERTS
        leased = [key for _, keys in ns.happened("acquire") for key in keys]
        assert len(leased) == (turns * EXPERTS if kind == "host" else counts.loads), "on the host a load is leased when it is used"


def test_a_ring_of_which_few_experts_are_used_never_stops_loading_ahead() -> None:
    ns, random = make_namespace(), Random(5)
    with RingMemory(ns, 2) as ring:
        for turn in range(100):
            with ring.layer(turn % 5, random.sample(range(EXPERTS), 2)):
                pass
        assert (ring.stats.hits, ring.stats.waits) == (100, 0)


def test_where_no_lease_may_stand_each_ends_with_its_visit() -> None:
    ns = make_namespace()
    ns.may_stand = False
    with RingMemory(ns, 5) as ring:
        for turn in range(10):
            with ring.layer(turn % 5) as experts:
                assert_weights(ns, turn % 5, experts)
            assert ns.leased == []
        assert (ring.stats.hits, ring.stats.waits) == (10, 0)


def test_a_visit_whose_load_ahead_was_skipped_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    ns = make_namespace()
    monkeypatch.setattr(MemoryTicket, "wait", lambda ticket: {"loaded": 0, "resident": 0, "skipped": 1, "bytes": 0})
    with RingMemory(ns, 2) as ring:
        with ring.layer(0):
            pass
        assert (ring.stats.hits, ring.stats.waits) == (0, 1)
