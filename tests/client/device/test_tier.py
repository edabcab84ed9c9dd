"""The device tier on its CPU twin: a cache that never serves a stale copy and never takes a slot in use."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Schema
from paramstore.errors import CapacityError, ConfigError, LeaseError, SchemaMismatch, StepMismatch, UnknownKey, WaitTimeout
from paramstore.testing.memory_namespace import MemoryLease, MemoryNamespace, MemoryTicket
from paramstore_client.device.copier import HostCopier, Mark
from paramstore_client.device.slots import DeviceSlots
from paramstore_client.device.tier import REPORT_EVERY, DeviceTier
from paramstore_client.nn import ResidentExperts, StoredExperts
from paramstore_client.quantized.packed import packed_tensors, unpack_all, unpacked
from paramstore_testkit.streams.cuda import simulated_cuda
from paramstore_testkit.streams.world import StreamWorld
from paramstore_testkit.training.small_tier import KEYS, WatchfulCopier, assert_holds, make_namespace, make_tier, update, use


def test_a_fetch_gives_views_of_the_slots() -> None:
    ns = make_namespace()
    tier = make_tier(ns)
    with tier.fetch(KEYS[:3]) as held:
        assert_holds(ns, held, KEYS[:3])
        inside = tier.slots.fields["gate_up"]
        assert held[0, 1]["gate_up"].untyped_storage().data_ptr() == inside.untyped_storage().data_ptr()
    assert ns.leased == []


def test_a_second_fetch_asks_the_host_for_nothing() -> None:
    ns = make_namespace()
    tier = make_tier(ns)
    use(tier, KEYS[:3])
    ns.events.clear()
    use(tier, KEYS[:3])
    assert ns.events == []
    assert (tier.stats.hits, tier.stats.misses) == (3, 3)


def test_more_keys_than_lease_slots_come_in_several_host_leases() -> None:
    ns = make_namespace(lease_slots=2)
    tier = make_tier(ns, 5)
    with tier.fetch(KEYS[:5]) as held:
        assert_holds(ns, held, KEYS[:5])
    assert [len(keys) for _, keys in ns.happened("acquire")] == [1, 1, 1, 1, 1]


def test_copies_under_way_are_waited_for_where_others_lease_through_the_same_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    ns, copier = make_namespace(lease_slots=8), LateCopier()
    monkeypatch.setattr("paramstore_client.device.tier.make_copier", lambda *arguments, **options: copier)
    tier = make_tier(ns, 6)
    tier.fetch(KEYS[:3]).release()
    with ns.acquire(KEYS[:4]), tier.fetch(KEYS[3:5]) as held:
        copier.run_until(4)
        assert_holds(ns, held, KEYS[3:5])


def test_a_lease_that_no_copy_under_way_blocks_is_refused() -> None:
    ns = make_namespace(lease_slots=4)
    with ns.acquire(KEYS[:4]), pytest.raises(LeaseError, match="own leases hold 4 of 4"):
        make_tier(ns, 6).fetch(KEYS[:1])


def test_an_updated_expert_is_fetched_again_and_the_others_are_not() -> None:
    ns = make_namespace()
    tier = make_tier(ns)
    use(tier, KEYS[:3])
    copied = tier.stats.bytes_copied
    update(ns, KEYS[1:2])
    with tier.fetch(KEYS[:3]) as held:
        assert_holds(ns, held, KEYS[:3])
        assert held.identity(KEYS[1]) == Identity(epoch=0, version=1)
    assert tier.stats.refetches == 1
    assert tier.stats.bytes_copied == copied * 4 // 3


def test_a_held_copy_keeps_its_bytes_while_a_newer_one_is_fetched() -> None:
    ns = make_namespace()
    tier = make_tier(ns)
    with tier.fetch(KEYS[:1]) as old:
        before = old[KEYS[0]]["down"].clone()
        update(ns, KEYS[:1])
        with tier.fetch(KEYS[:1]) as new:
            assert_holds(ns, new, KEYS[:1])
            assert torch.equal(old[KEYS[0]]["down"], before)
            assert tier.slots.free_count == 2
    assert tier.slots.free_count == 3, "the superseded copy's slot came back with its last lease"


def test_eviction_takes_the_least_used_that_nobody_needs() -> None:
    ns = make_namespace()
    tier = make_tier(ns)
    use(tier, KEYS[:4])
    use(tier, [KEYS[0], KEYS[2], KEYS[3]])
    use(tier, [KEYS[4]])
    assert sorted(tier.keys) == [KEYS[0], KEYS[2], KEYS[3], KEYS[4]]
    assert tier.stats.evictions == 1


def test_eviction_spares_what_the_fetch_itself_needs() -> None:
    ns = make_namespace()
    tier = make_tier(ns, 3, policy="lru")
    use(tier, KEYS[:3])
    with tier.fetch([KEYS[0], KEYS[3], KEYS[4]]) as held:
        assert_holds(ns, held, [KEYS[0], KEYS[3], KEYS[4]])


def test_eviction_spares_what_is_held() -> None:
    ns = make_namespace()
    tier = make_tier(ns, policy="lru")
    with tier.fetch(KEYS[:2]) as held:
        use(tier, KEYS[2:4])
        use(tier, KEYS[4:6])
        assert_holds(ns, held, KEYS[:2])
        with pytest.raises(LeaseError, match="need a slot: 1 of 4 can be had"):
            tier.fetch(KEYS[2:5])
        assert_holds(ns, held, KEYS[:2])
    with tier.fetch(KEYS[2:5]) as held:
        assert_holds(ns, held, KEYS[2:5])
    assert ns.leased == []


def test_a_slot_held_twice_is_free_only_after_both() -> None:
    ns = make_namespace()
    tier = make_tier(ns, 1)
    first, second = tier.fetch(KEYS[:1]), tier.fetch(KEYS[:1])
    first.release()
    first.release()
    with pytest.raises(LeaseError):
        tier.fetch(KEYS[1:2])
    second.release()
    use(tier, KEYS[1:2])


def test_more_keys_than_slots_are_refused_with_the_fix() -> None:
    with pytest.raises(CapacityError, match="5 keys asked of a device tier of 4 slots"):
        make_tier(make_namespace()).fetch(KEYS[:5])
    with pytest.raises(ConfigError, match="slots=0: give a whole number from 1"):
        make_tier(make_namespace(), 0)


def test_an_error_of_the_host_leaves_nothing_leased_and_the_tier_usable() -> None:
    ns = make_namespace(lease_slots=2)
    tier = make_tier(ns)
    with pytest.raises(UnknownKey):
        tier.fetch([KEYS[0], KEYS[1], (0, 99)])
    assert ns.leased == []
    with tier.fetch(KEYS[:4]) as held:
        assert_holds(ns, held, KEYS[:4])


# --- more keys than slots

ALL = [(layer, expert) for layer in range(2) for expert in range(6)]


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 11, 12])
def test_any_number_of_keys_runs_through_any_number_of_slots(slots: int) -> None:
    ns = make_namespace(lease_slots=2)
    tier = make_tier(ns, slots)
    for _ in range(2):
        with tier.acquire_arriving(ALL, may_pass=True) as held:
            seen = []
            for key in held.in_turn():
                assert_holds(ns, held, [key])
                seen.append(key)
            assert sorted(seen) == ALL
    assert ns.leased == []
    assert [held for held in tier.plan.held if held.users] == []
    assert tier.slots.free_count == tier.plan.free


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 11, 12])
def test_keys_are_turned_to_in_their_order_through_any_number_of_slots(slots: int) -> None:
    ns = make_namespace(lease_slots=2)
    tier = make_tier(ns, slots)
    for _ in range(2):
        tier.prefetch(ALL[-3:])  # of turns that come late
        ns.finish_prefetches()
        with tier.acquire_arriving(ALL, may_pass=True) as held:
            for key in ALL:
                for _ in range(2):
                    for name, value in ns.values(key).items():
                        assert torch.equal(held.turn_to(key)[name], value), key
            if held.passing_count:
                with pytest.raises(LeaseError, match="passes by"):
                    held.turn_to(next(key for key in ALL if not tier.has([key])))
    assert ns.leased == []
    assert [held for held in tier.plan.held if held.users] == []
    assert tier.slots.free_count == tier.plan.free


def test_what_passes_by_is_gone_after_its_turn_and_what_stands_stays() -> None:
    tier = make_tier(make_namespace())
    use(tier, KEYS[:4])
    copied = tier.stats.bytes_copied
    with tier.acquire_arriving(KEYS, may_pass=True) as held:
        assert held.passing_count == 3
        turns = [(key, held.passes(key)) for key in held.in_turn()]
        assert [passes for _, passes in turns] == [False] * 3 + [True] * 3
        with pytest.raises(LeaseError, match="passes by"):
            held[turns[-1][0]]
        assert held[turns[0][0]]["down"] is not None
    image_bytes = sum(value.nbytes for value in tier.namespace.values(KEYS[0]).values())
    assert tier.stats.bytes_copied == copied + 3 * image_bytes
    assert (tier.stats.hits, tier.stats.misses, tier.stats.passed) == (3, 4, 3)
    assert len(set(tier.keys) & set(KEYS[:4])) == 3


def test_a_visit_that_is_left_halfway_leaves_nothing() -> None:
    ns = make_namespace()
    tier = make_tier(ns, 2)
    use(tier, [(1, 0), (1, 1)])
    with tier.acquire_arriving(KEYS, may_pass=True) as held:
        assert (held.passing_count, [one for one in tier.plan.held if one.users]) == (6, [])
        with pytest.raises(LeaseError, match="in use"):
            tier.shrink()
        turns = held.in_turn()
        assert [next(turns) for _ in range(3)]
    with pytest.raises(LeaseError, match="was released"):
        list(turns)
    assert [held for held in tier.plan.held if held.users] == []
    with tier.fetch(KEYS[:2]) as held:
        assert_holds(ns, held, KEYS[:2])
    assert tier.slots.free_count == tier.plan.free == 0
    assert ns.leased == []


def test_an_error_of_a_load_in_its_turn_leaves_a_tier_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ns = make_namespace()
    tier = make_tier(ns, 2)
    with monkeypatch.context() as patch, tier.acquire_arriving([*KEYS[:4], (0, 99)], may_pass=True) as held:
        patch.setattr("paramstore_client.device.device_lease.TURN_KEYS", 1)
        with pytest.raises(UnknownKey):
            list(held.in_turn())
    assert [held for held in tier.plan.held if held.users] == []
    assert tier.slots.free_count == tier.plan.free
    with tier.acquire_arriving(KEYS, may_pass=True) as held:
        for key in held.in_turn():
            assert_holds(ns, held, [key])
    assert ns.leased == []


def test_a_view_that_changes_under_a_visit_that_goes_through_ends_it() -> None:
    ns = make_namespace()
    tier = make_tier(ns, 2)
    with tier.acquire_arriving(KEYS, may_pass=True) as held:
        turns = held.in_turn()
        next(turns)
        update(ns, KEYS[:1])
        with pytest.raises(StepMismatch, match="moved while a layer was computed"):
            list(turns)
    assert ns.leased == []


def test_what_was_not_loaded_yet_is_loaded_by_whoever_asks_first() -> None:
    ns = make_namespace()
    tier = make_tier(ns, 6)
    with tier.acquire_arriving(KEYS[:3]) as held:
        assert ns.events == [], "nothing was asked for"
        with tier.fetch(KEYS[1:2]) as other:
            assert_holds(ns, other, KEYS[1:2])
        assert list(held.in_turn()) == [KEYS[1], KEYS[0], KEYS[2]], "what is there comes first"
        assert_holds(ns, held, KEYS[:3])
    with tier.acquire_arriving(KEYS[3:5]):
        pass
    assert (tier.counts.failed, sorted(tier.keys)) == (2, KEYS[:3]), "what nobody asked for was not loaded"


def test_loads_ahead_take_free_slots_alone_while_a_visit_goes_through() -> None:
    ns = make_namespace()
    tier = make_tier(ns)
    use(tier, [(1, 4), (1, 5)])
    with tier.acquire_arriving(KEYS, may_pass=True) as held:
        for key in held.in_turn():
            if key != KEYS[-1]:  # then its slot is free
                tier.prefetch([(1, 0), (1, 1)])
            assert_holds(ns, held, [key])
        assert {(1, 4), (1, 5)} <= set(tier.keys)
        assert {(1, 0), (1, 1)} & set(tier.keys) == set()
    tier.prefetch([(1, 0), (1, 1)])
    assert {(1, 0), (1, 1)} <= set(tier.keys)


class LateMark:
    """Reached when somebody waits on the host for it, or for a later one of the same stream."""

    def __init__(self, copier: "LateCopier", number: int) -> None:
        self.copier = copier
        self.number = number

    def is_reached(self) -> bool:
        return self.number < self.copier.done_count

    def wait_on_host(self) -> None:
        self.copier.run_until(self.number)

    def wait_on_stream(self) -> None:
        return


class LateCopier(HostCopier):
    """Copies in order, as late as it may, as a busy stream does."""

    def __init__(self) -> None:
        self.queue: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self.done_count = 0

    def copy(self, fields: list[tuple[torch.Tensor, torch.Tensor]], *, after: Mark) -> LateMark:
        after.wait_on_host()
        self.queue.append(list(fields))
        return LateMark(self, len(self.queue) - 1)

    def run_until(self, number: int) -> None:
        for fields in self.queue[self.done_count : number + 1]:
            for target, source in fields:
                target.copy_(source)
        self.done_count = max(self.done_count, number + 1)


def test_host_leases_live_until_their_copies_are_done_and_within_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    ns, copier = make_namespace(lease_slots=2), LateCopier()
    monkeypatch.setattr("paramstore_client.device.tier.make_copier", lambda *arguments, **options: copier)
    tier = make_tier(ns, 6)
    held = tier.fetch(KEYS[:5])
    assert copier.done_count == 3, "the third host lease waited for the copy from the first, and so on"
    assert ns.leased_keys_max == 2
    assert ns.leased_key_count == 2, "the last two copies are under way"
    copier.run_until(4)
    tier.settle()
    assert ns.leased == []
    assert_holds(ns, held, KEYS[:5])


def late_tier(monkeypatch: pytest.MonkeyPatch, lease_slots: int, slots: int = 6) -> tuple[MemoryNamespace, DeviceTier, LateCopier]:
    ns, copier = make_namespace(lease_slots=lease_slots), LateCopier()
    monkeypatch.setattr("paramstore_client.device.tier.make_copier", lambda *arguments, **options: copier)
    return ns, make_tier(ns, slots), copier


def test_loads_ahead_wait_for_no_copy_and_go_on_as_host_leases_come_free(monkeypatch: pytest.MonkeyPatch) -> None:
    ns, tier, copier = late_tier(monkeypatch, lease_slots=4)
    ticket = tier.prefetch(KEYS)
    assert (copier.done_count, tier.keys) == (0, KEYS[:2]), "half of the host leases, the first keys first"
    assert not ticket.done()
    copier.run_until(1)
    tier.settle()
    assert tier.keys == KEYS[:4]
    copier.run_until(3)
    assert ticket.done()
    assert (copier.done_count, tier.keys, ns.leased_keys_max) == (4, KEYS, 2)
    copier.run_until(5)
    with tier.fetch(KEYS) as held:
        assert_holds(ns, held, KEYS)
    assert (tier.stats.hits, tier.stats.prefetched, tier.stats.useful) == (6, 6, 6)
    assert ns.leased == []


def test_demand_finds_half_of_the_host_leases_whatever_is_loaded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    ns, tier, copier = late_tier(monkeypatch, lease_slots=4)
    tier.prefetch(KEYS[:4])
    lease = tier.fetch([(1, 0), (1, 1)])
    assert (copier.done_count, ns.leased_key_count) == (0, 4)
    lease.release()
    lease = tier.fetch([(1, 2), (1, 3)])
    assert copier.done_count >= 2, "now somebody has to wait, for what was loaded ahead"
    lease.release()


def test_bounce_buffers_bound_what_is_loaded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateCopier, "keys_at_once", 1)
    _, tier, copier = late_tier(monkeypatch, lease_slots=64)
    tier.prefetch(KEYS[:3])
    assert (copier.done_count, tier.keys) == (0, KEYS[:1])


@pytest.mark.parametrize("begins", [True, False])
def test_what_still_waits_to_be_copied_ahead_is_given_up_when_its_layer_begins_or_is_skipped(
    begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns, tier, copier = late_tier(monkeypatch, lease_slots=4)
    ticket = tier.prefetch(KEYS)
    if begins:
        use(tier, KEYS[4:5])
    else:
        tier.skip([0])
    copier.run_until(len(copier.queue) - 1)
    assert ticket.done()
    assert tier.keys == KEYS[:2] + (KEYS[4:5] if begins else [])
    assert ns.leased == []


def test_a_visit_of_another_layer_gives_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tier, copier = late_tier(monkeypatch, lease_slots=4)
    ticket = tier.prefetch(KEYS[:4])
    use(tier, [(1, 0)])
    copier.run_until(len(copier.queue) - 1)
    assert ticket.done()
    assert sorted(tier.keys) == [*KEYS[:4], (1, 0)]


def test_host_leases_end_after_the_copies_before_a_load_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    ns, tier, copier = late_tier(monkeypatch, lease_slots=2)
    view = tier.fetch(KEYS[:1])[KEYS[0]]["down"]
    with monkeypatch.context() as patch:
        patch.setattr(DeviceSlots, "place", fail)
        with pytest.raises(RuntimeError, match="planted"):
            tier.fetch(KEYS[1:2])
    tier.close()
    copier.run_until(0)
    assert torch.equal(view, ns.values(KEYS[0])["down"]), "what it was copied from was there until it was"


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("planted")


def test_a_released_lease_and_a_foreign_key_are_refused() -> None:
    tier = make_tier(make_namespace())
    with tier.fetch(KEYS[:1]) as held, pytest.raises(UnknownKey, match=r"\(0, 1\)"):
        held[KEYS[1]]
    with pytest.raises(LeaseError, match="was released"):
        held[KEYS[0]]
    with pytest.raises(SchemaMismatch, match="optim"):
        tier.acquire(KEYS[:1], part="optim")


def test_a_slot_that_was_given_away_is_never_read() -> None:
    tier = make_tier(make_namespace(), 1)
    with tier.fetch(KEYS[:1]):
        (copy,) = tier.copies._copies.values()
    use(tier, KEYS[1:2])
    with pytest.raises(LeaseError, match="was given away"):
        tier.slots.views(copy)


def test_a_prefetch_reaches_the_device_when_the_host_has_it() -> None:
    ns = make_namespace()
    ns.holds_prefetches = True
    tier = make_tier(ns)
    ticket = tier.prefetch(KEYS[:2])
    assert not ticket.done()
    assert tier.keys == []
    ns.finish_prefetches()
    assert ticket.done()
    use(tier, KEYS[:2])
    assert tier.stats.prefetched == 2
    assert tier.stats.hits == 2


def test_keys_that_the_host_skipped_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ns = make_namespace()
    monkeypatch.setattr(MemoryTicket, "wait", lambda ticket: {"loaded": 1, "resident": 1, "skipped": 2, "bytes": 0})
    tier = make_tier(ns)
    assert tier.prefetch(KEYS[:4]).done()
    assert tier.keys == KEYS[:2]


def test_a_prefetch_takes_no_slot_that_is_held_and_a_cancelled_one_takes_none() -> None:
    ns = make_namespace()
    tier = make_tier(ns)
    with tier.fetch(KEYS[:3]):
        tier.prefetch(KEYS[3:6])
        assert sorted(tier.keys) == KEYS[:4]
    ns.holds_prefetches = True
    ticket = tier.prefetch(KEYS[4:6])
    ticket.cancel()
    ns.finish_prefetches()
    tier.settle()
    assert sorted(tier.keys) == KEYS[:4]


def test_a_prefetch_that_fails_is_logged_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    ns = make_namespace(lease_slots=2)
    tier = make_tier(ns)
    with ns.acquire(KEYS[4:6]):
        assert tier.prefetch(KEYS[:1]).done()
    assert "prefetch of 1 keys to cpu given up" in caplog.text
    use(tier, KEYS[:1])


@pytest.mark.parametrize("lease_slots", [2, 4, 64])
def test_what_the_host_evicted_after_a_prefetch_costs_the_others_nothing(
    lease_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns = make_namespace(lease_slots=lease_slots)
    tier, evicted, acquire = make_tier(ns, 6), {KEYS[1], KEYS[4]}, ns.acquire

    def acquire_those_there(keys: Sequence[ExpertKey], part: str = "param", timeout_s: float | None = None) -> MemoryLease:
        if timeout_s == 0.0 and not evicted.isdisjoint(keys):
            raise WaitTimeout("still loading")
        return acquire(keys, part, timeout_s)

    monkeypatch.setattr(ns, "acquire", acquire_those_there)
    assert tier.prefetch(KEYS).done()
    there = [key for key in KEYS if key not in evicted]
    assert tier.keys == there
    ns.events.clear()
    with tier.fetch(there) as held:
        assert_holds(ns, held, there)
    assert ns.events == [], "their bytes were here"
    assert (tier.stats.useful, tier.stats.bytes_copied) == (4, 4 * sum(value.nbytes for value in ns.values(KEYS[0]).values()))
    with tier.fetch(KEYS) as held:
        assert_holds(ns, held, KEYS)
    assert ns.leased == []


def test_residency_and_use_are_reported() -> None:
    ns = make_namespace()
    tier = make_tier(ns)
    for _ in range(REPORT_EVERY):
        use(tier, KEYS[:2])
    assert ns.device_reports == [(KEYS[:2], KEYS[:2], 2 * ns.schema.part("param").image_bytes)]
    tier.close()
    assert ns.device_reports[-1] == ([], [], 0)


def test_description_tells_the_way_of_copying_and_the_counts() -> None:
    tier = make_tier(make_namespace())
    use(tier, KEYS[:2])
    description = tier.describe()
    assert description["host_memory"] == "host: copied at once"
    assert (description["slots"], description["free_slots"], description["misses"]) == (4, 2, 2)


def test_memory_is_forgotten_before_it_goes_and_no_more_once_the_tier_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ns, copier = make_namespace(), WatchfulCopier()
    monkeypatch.setattr("paramstore_client.device.tier.make_copier", lambda *arguments, **options: copier)
    with make_tier(ns) as tier:
        use(tier, KEYS[:3])
        assert len(copier.forgotten) == 3
    use_host = ns.acquire(KEYS[:1])
    use_host.release()
    assert len(copier.forgotten) == 3
    assert ns.watchers == {}


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="belady"):
        make_tier(make_namespace(), policy="belady")


@pytest.mark.parametrize("slots", [12, 3, 1])
def test_training_through_the_tier_equals_resident_experts(slots: int) -> None:
    ns = make_namespace(lease_slots=2)
    tier = make_tier(ns, slots)
    resident = ResidentExperts([ns.values((1, expert)) for expert in range(6)])
    ids, gate = torch.rand(10, 6).topk(2).indices, torch.rand(10, 2)
    for step in range(2):
        x = torch.randn(10, 8, generator=torch.Generator().manual_seed(step))
        loss, expected = (layer(x, ids, gate).square().sum() for layer in (StoredExperts(tier, 1), resident))
        loss.backward()
        expected.backward()
        assert torch.equal(loss, expected)
        for expert, fields in enumerate(resident.weights):
            for name, parameter in fields.items():
                if parameter.grad is not None:
                    assert torch.equal(ns.pending[1, expert][name], parameter.grad)
        ns.apply(AdamW())
        resident = ResidentExperts([ns.values((1, expert)) for expert in range(6)])
    assert ns.leased == []


def test_a_tier_that_shrinks_keeps_its_counts_and_serves_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    ns = make_namespace()
    make, sizes = DeviceSlots.__init__, list[int]()

    def made(self: DeviceSlots, part: Any, count: int, **options: Any) -> None:
        sizes.append(count)
        if len(sizes) == 2:
            raise torch.OutOfMemoryError("planted")
        make(self, part, count, **options)

    monkeypatch.setattr(DeviceSlots, "__init__", made)
    with DeviceTier(ns, 8, device="cpu") as tier:
        with tier.fetch(KEYS[:2]) as held, pytest.raises(LeaseError, match="in use"):
            tier.shrink()
        misses = tier.stats.misses
        tier.shrink()
        assert (sizes, tier.lease_slots, tier.keys, ns.leased) == ([8, 4, 2], 2, [], [])
        with tier.fetch(KEYS[:2]) as held:
            assert_holds(ns, held, KEYS[:2])
        assert tier.stats.misses == misses + 2
        tier.shrink()
        with pytest.raises(CapacityError, match="slots have no more to give"):
            tier.shrink()
        with tier.fetch(KEYS[:1]) as held:
            assert_holds(ns, held, KEYS[:1])
    assert ns.leased == []


def test_device_without_an_index_is_the_current_one_as_tensors_have_it() -> None:
    with simulated_cuda(StreamWorld(0)), DeviceTier(make_namespace(), 1, device="cuda") as tier:
        assert tier.device == tier.slots.fields["down"].device == torch.device("cuda", 0)


def test_cuda_device_where_there_is_none_is_a_clear_error() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(ConfigError, match=r"device='cuda': torch .* finds no CUDA device here"):
            DeviceTier(make_namespace(), 1, device="cuda")


def test_a_tier_for_which_no_slot_could_be_made_says_so_at_every_use(monkeypatch: pytest.MonkeyPatch) -> None:
    ns = make_namespace()

    def full(*_: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    with make_tier(ns) as tier:
        use(tier, KEYS[:2])
        monkeypatch.setattr(DeviceSlots, "__init__", full)
        with pytest.raises(CapacityError, match="slots have no more to give"):
            tier.shrink()
        counts = tier.stats
        uses: list[Callable[[], object]] = [
            lambda: tier.acquire(KEYS[:1]), lambda: tier.fetch(KEYS[:1]), lambda: tier.acquire_arriving(KEYS, may_pass=True),
            lambda: tier.prefetch(KEYS[:1]), lambda: tier.lease_slots, lambda: tier.slots, tier.describe, tier.shrink,
            lambda: StoredExperts(tier, 0),
        ]  # fmt: skip
        for call in uses:
            with pytest.raises(CapacityError, match="has no slots since memory ran out"):
                call()
        assert (tier.keys, tier.has(KEYS[:1]), tier.stats) == ([], False, counts)
    assert ns.leased == []
    assert ns.device_reports[-1] == ([], KEYS[:2], 0)


def test_quantized_experts_stand_in_the_dtype_that_was_asked_for() -> None:
    schema = Schema.param({"w:mxfp4:blocks": ((8, 2, 16), "uint8"), "w:mxfp4:scales": ((8, 2), "uint8"), "b": ((8,), "bfloat16")})
    ns, generator = MemoryNamespace(schema, layers=1, experts=6, lease_slots=4), torch.Generator().manual_seed(9)
    ns.initialize(lambda key: {name: torch.randint(100, 140, shape, generator=generator) for name, shape, _ in schema.specs})
    for dtype in (torch.bfloat16, torch.float32):
        tier = DeviceTier(ns, 2, device="cpu", dtype=dtype)
        assert tier.schema == unpacked(schema, str(dtype).removeprefix("torch."))
        expected = {tensor.name: torch.empty(tensor.shape, dtype=dtype) for tensor in packed_tensors(schema)}
        for key in KEYS:
            unpack_all(packed_tensors(schema), ns.values(key), expected)
            with tier.fetch([key]) as held:
                assert {name: tensor.dtype for name, tensor in held[key].items()} == dict.fromkeys(("w", "b"), dtype)
                assert all(torch.equal(held[key][name].nan_to_num(), value.nan_to_num()) for name, value in expected.items())
        assert tier.stats.bytes_copied == len(KEYS) * (8 * 2 * 17 + 16), "what moves is what is stored"
        tier.close()
