"""SlotPlan: what a visit finds, what it evicts, what passes by, and that every counter is what a plain model counts."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import pytest

from paramstore.core.visits import ring_visits
from paramstore.errors import CapacityError, LeaseError
from paramstore.policy.base import Policy
from paramstore.policy.decayed_lfu import DecayedLfu
from paramstore.policy.lifo_inactive import LifoInactive
from paramstore.policy.lru import Lru
from paramstore.policy.ring_order import RingOrder
from paramstore.policy.schedule import Schedule
from paramstore.policy.slot_plan import SlotPlan
from paramstore.policy.slot_visit import Held, SlotVisit

LAYERS, EXPERTS = 4, 6


def scheduled() -> Schedule:
    policy = Schedule(Lru)
    policy.declare(ring_visits(range(LAYERS)))
    return policy


POLICIES: dict[str, Callable[[], Policy]] = {
    "lru": Lru, "lifo_inactive": LifoInactive, "ring": lambda: RingOrder(range(LAYERS)), "schedule": scheduled,
    "decayed_lfu": lambda: DecayedLfu(threshold=0.0, beta=0.5, decay_steps=8, capacity=8),
}  # fmt: skip


def loaded(plan: SlotPlan, keys: Sequence[Hashable], *, may_pass: bool = False) -> SlotVisit:
    """A visit whose bytes have come."""
    visit = plan.visit(keys, may_pass=may_pass)
    for held in (*visit.loads, *late_of(visit)):
        plan.arrive(held)
    return visit


def late_of(visit: SlotVisit) -> list[Held]:
    """Those of its keys that were on their way when it began, and have not come yet."""
    return [held for held in (*visit.held, *visit.through) if not held.is_ready and held not in visit.loads]


def used(plan: SlotPlan, *visits: Sequence[Hashable], may_pass: bool = False) -> None:
    for keys in visits:
        plan.end_visit(loaded(plan, keys, may_pass=may_pass))


def keys_of(held: Sequence[Held]) -> list[Hashable]:
    return [one.key for one in held]


# --- demand


def test_a_hit_is_a_key_that_was_there_when_the_visit_began() -> None:
    plan = SlotPlan(4, Lru())
    first = plan.visit("ab")
    assert keys_of(first.loads) == ["a", "b"]
    second = plan.visit("bc")  # b is still under way
    assert keys_of(late_of(second)) == ["b"]
    assert keys_of(second.loads) == ["c"]
    for held in (*first.loads, *second.loads):
        plan.arrive(held)
    third = plan.visit("abc")
    assert (third.loads, late_of(third), keys_of(third.held)) == ((), [], ["a", "b", "c"])
    assert (plan.counts.hits, plan.counts.late, plan.counts.misses) == (3, 1, 3)


def test_the_policys_victim_gives_room_and_nothing_that_is_used() -> None:
    plan = SlotPlan(3, Lru())
    used(plan, "a", "b", "c")
    held = plan.visit("a")
    assert keys_of(plan.visit("d").evicted) == ["b"]
    plan.end_visit(held)
    assert plan.find("a") is not None
    assert plan.find("b") is None


def test_hits_are_uses_to_the_policy_before_it_chooses() -> None:
    plan = SlotPlan(3, Lru())
    used(plan, "a", "b", "c", "a", "a", "a")
    assert keys_of(plan.visit("d").evicted) == ["b"]


def test_a_visit_that_finds_all_slots_in_use_is_refused_and_nothing_changes() -> None:
    plan = SlotPlan(2, Lru())
    visit = loaded(plan, "ab")
    before = replace(plan.counts)
    with pytest.raises(LeaseError, match=r"1 of 2 keys need a slot: 0 of 2 can be had"):
        plan.visit("bc")
    with pytest.raises(LeaseError, match="0 of 2 can be had"):
        plan.visit("bc", may_pass=True)
    assert plan.counts == before
    plan.end_visit(visit)
    assert keys_of(plan.visit("bc").loads) == ["c"]


def test_more_keys_than_slots_are_refused_where_none_may_pass() -> None:
    plan = SlotPlan(2, Lru())
    with pytest.raises(CapacityError, match="3 keys asked of 2 slots"):
        plan.visit("abc")


def test_a_visit_is_over_once() -> None:
    plan = SlotPlan(2, Lru())
    visit, other = loaded(plan, "ab"), loaded(plan, "a")
    plan.end_visit(visit)
    plan.end_visit(visit)
    assert other.held[0].users == 1


# --- what fails, what is stale


def test_a_failed_load_frees_its_slot_when_its_visit_is_over() -> None:
    plan = SlotPlan(1, Lru())
    visit = plan.visit("a")
    plan.fail(visit.loads[0])
    plan.fail(visit.loads[0])
    assert (plan.free, plan.find("a"), plan.counts.failed) == (0, None, 1)
    plan.end_visit(visit)
    assert plan.free == 1
    assert keys_of(plan.visit("a").loads) == ["a"]


def test_what_is_dropped_in_use_keeps_its_slot_until_then_and_comes_anew() -> None:
    plan = SlotPlan(2, Lru())
    visit = loaded(plan, "a")
    stale = visit.held[0]
    plan.drop(stale)
    fresh = plan.visit("a")
    assert keys_of(fresh.loads) == ["a"]
    assert fresh.loads[0] is not stale
    assert plan.free == 0
    plan.arrive(stale)  # late news of the old load make nothing of the new one ready
    assert not fresh.loads[0].is_ready
    plan.end_visit(visit)
    assert plan.free == 1
    assert plan.counts.dropped == 1


def test_a_use_of_what_was_dropped_since_does_not_make_the_policy_hold_it() -> None:
    plan = SlotPlan(2, Lru())
    used(plan, "a", "b", "a")  # the last of them is not told yet
    held = plan.find("a")
    assert held is not None
    plan.drop(held)
    used(plan, "c")
    assert keys_of(plan.visit("d").evicted) == ["b"]


def test_a_use_of_what_was_dropped_and_has_come_anew_since_does_not_hide_it_from_the_policy() -> None:
    plan = SlotPlan(6, Lru(), passing_slots=1, held_most=4)
    used(plan, "abcde")
    visit = plan.visit("abcdefgh", may_pass=True)
    standing = plan.let_in(visit)
    assert standing is not None
    plan.let_out(visit, standing)
    used(plan, "e")  # not told yet
    stale = plan.find("e")
    assert stale is not None
    plan.drop(stale)
    fresh = plan.let_in(visit)
    assert fresh is not None
    plan.arrive(fresh)
    plan.let_out(visit, fresh)  # into the slot that nobody needs
    plan.end_visit(visit)
    assert keys_of(plan.held) == list("abcde")
    assert keys_of(plan.visit("uvwxyz").evicted) == list("abcde")


def test_clearing_counts_nothing() -> None:
    plan = SlotPlan(3, Lru())
    used(plan, "a")
    visit = loaded(plan, "b")
    plan.ahead("c")
    before = replace(plan.counts)
    plan.clear()
    assert (plan.held, plan.free, plan.counts) == ([], 2, before)
    plan.end_visit(visit)
    assert plan.free == 3


# --- ahead


def test_what_was_loaded_ahead_is_spared_until_it_was_used() -> None:
    plan = SlotPlan(3, Lru())
    loads, _ = plan.ahead("ab")
    for held in loads:
        plan.arrive(held)
    used(plan, "x")
    assert keys_of(plan.visit("y").evicted) == ["x"]  # used later than `a` and `b` came
    used(plan, "a")
    assert keys_of(plan.visit("z").evicted) == ["a"]
    assert (plan.counts.ahead, plan.counts.useful, plan.counts.wasted) == (2, 1, 0)


def test_what_was_guessed_wrong_is_spared_until_its_layers_visit_and_no_longer() -> None:
    plan = SlotPlan(4, Lru())
    guesses = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for held in plan.ahead(guesses)[0]:
        plan.arrive(held)
    assert plan.ahead([(2, 0)]) == ([], [])
    used(plan, [(0, 0)])  # a visit that decides nothing
    assert keys_of(plan.ahead([(2, 0), (2, 1), (2, 2)])[1]) == [(0, 1), (0, 0)], "those of layer 1 are waited for"
    assert (plan.counts.useful, plan.counts.wasted) == (1, 1)


def test_what_was_guessed_wrong_and_is_asked_for_again_is_spared_again() -> None:
    plan = SlotPlan(3, Lru())
    for held in plan.ahead([(0, 0), (0, 1)])[0]:
        plan.arrive(held)
    used(plan, [(0, 2)])
    plan.ahead([(0, 0)])
    assert keys_of(plan.ahead([(1, 0), (1, 1), (1, 2)])[1]) == [(0, 1), (0, 2)]


def test_demand_that_finds_nothing_else_takes_what_was_loaded_ahead_and_it_counts_as_wasted() -> None:
    plan = SlotPlan(2, Lru())
    loads, _ = plan.ahead("ab")
    plan.arrive(loads[0])
    assert sorted(map(str, keys_of(plan.visit("cd").evicted))) == ["a", "b"]  # one of them still under way
    assert plan.counts.wasted == 2
    assert plan.counts.misses == 2


def test_loads_ahead_give_room_to_no_load_ahead() -> None:
    plan = SlotPlan(2, Lru())
    first, _ = plan.ahead("ab")
    assert plan.ahead("cd") == ([], [])
    plan.arrive(first[0])
    assert plan.ahead("cd") == ([], [])


def test_what_stands_is_not_loaded_ahead_again_and_is_not_evicted_for_the_rest_of_the_call() -> None:
    plan = SlotPlan(2, Lru())
    used(plan, "a", "b")
    loads, evicted = plan.ahead("ac")
    assert (keys_of(loads), keys_of(evicted)) == (["c"], ["b"])


def test_loads_ahead_are_at_most_as_many_as_asked_the_first_ones_first() -> None:
    plan = SlotPlan(4, Lru())
    used(plan, "a", "b", "c", "d")
    loads, evicted = plan.ahead("dxyz", most=2)
    assert (keys_of(loads), keys_of(evicted)) == (["x", "y"], ["a", "b"])
    assert plan.ahead("vw", most=0) == ([], [])


def test_loads_ahead_evict_all_that_no_visit_and_no_other_load_ahead_waits_for_and_nothing_more() -> None:
    plan = SlotPlan(4, Lru())
    used(plan, "a", "b", "c", "d")
    visit = plan.visit("d")
    assert [len(plan.ahead([name])[0]) for name in "wxyz"] == [1, 1, 1, 0]
    plan.end_visit(visit)
    assert {held.key for held in plan.held} == set("dwxy")


def test_what_comes_ahead_too_late_is_late_and_useful() -> None:
    plan = SlotPlan(2, Lru())
    plan.ahead("a")
    visit = plan.visit("a")
    assert keys_of(late_of(visit)) == ["a"]
    assert (plan.counts.hits, plan.counts.late, plan.counts.misses, plan.counts.useful) == (0, 1, 0, 1)


def test_a_visit_uses_what_it_evicted_nobody_for_while_others_load_ahead() -> None:
    plan = SlotPlan(2, Lru())
    visit = loaded(plan, "ab")
    assert plan.ahead("cd") == ([], [])
    plan.end_visit(visit)
    assert keys_of(plan.ahead("c")[1]) == ["a"]


# --- visits that do not fit


def test_a_visit_that_does_not_fit_takes_free_slots_and_lets_the_rest_pass() -> None:
    plan = SlotPlan(4, Lru(), passing_slots=2)
    visit = loaded(plan, "abcdef", may_pass=True)
    assert (keys_of(visit.loads), visit.passing, visit.passing_slots) == (["a", "b"], tuple("cdef"), 2)
    assert plan.free == 0
    plan.end_visit(visit)
    assert plan.free == 2


def test_it_evicts_nobody_but_for_the_slots_that_the_rest_runs_through() -> None:
    plan = SlotPlan(4, Lru(), passing_slots=1)
    used(plan, "w", "x", "y", "z")
    visit = plan.visit("abcdef", may_pass=True)
    assert (visit.loads, visit.passing, keys_of(visit.evicted)) == ((), tuple("abcdef"), ["w"])
    plan.end_visit(visit)
    assert keys_of(plan.visit("xyz").loads) == []


def test_where_all_slots_hold_keys_of_the_visit_one_of_them_passes_too() -> None:
    plan = SlotPlan(2, Lru())
    used(plan, "a", "b")
    visit = plan.visit("abc", may_pass=True)
    assert (keys_of(visit.held), visit.passing, visit.passing_slots) == (["b"], ("a", "c"), 1)
    assert (plan.counts.hits, plan.counts.passed) == (1, 2)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_through_however_few_slots_a_visit_goes(slots: int) -> None:
    plan = SlotPlan(slots, Lru())
    for _ in range(3):
        visit = loaded(plan, "abcde", may_pass=True)
        assert {*keys_of(visit.held), *visit.passing} == set("abcde")
        assert len(visit.held) + visit.passing_slots <= slots
        plan.end_visit(visit)


@pytest.mark.parametrize("name", POLICIES)
def test_a_dispatch_of_twice_the_slots_again_and_again_has_nine_tenths_of_the_most_hits(name: str) -> None:
    plan = SlotPlan(32, POLICIES[name](), passing_slots=4)
    keys = [(0, expert) for expert in range(64)]
    for _ in range(20):
        used(plan, keys, may_pass=True)
    bound = (32 - 4) / 64
    assert plan.counts.hits / (20 * 64) >= 0.9 * bound


def test_layers_that_do_not_fit_do_not_drive_each_other_out() -> None:
    plan = SlotPlan(8, Lru())
    for _ in range(10):
        for layer in range(2):
            used(plan, [(layer, expert) for expert in range(12)], may_pass=True)
    assert plan.counts.hits == 6 * 9, "two of the slots are for what passes by"


def test_a_few_of_the_slots_are_for_what_passes_by() -> None:
    sizes = (1, 4, 8, 16, 32, 64, 512)
    counts = [SlotPlan(slots, Lru()).visit(range(2 * slots), may_pass=True).passing_slots for slots in sizes]
    assert counts == [1, 1, 2, 4, 4, 8, 8]


def test_keys_pass_by_in_turn_through_the_slots_that_were_kept_for_them() -> None:
    plan = SlotPlan(3, Lru(), passing_slots=2)
    used(plan, "x")
    visit = plan.visit("abcd", may_pass=True)
    first, second = plan.let_in(visit), plan.let_in(visit)
    assert first is not None
    assert second is not None
    assert plan.let_in(visit) is None, "both slots are taken"
    plan.let_out(visit, first)
    third = plan.let_in(visit)
    assert third is not None
    assert [first.key, second.key, third.key] == ["a", "b", "c"]
    assert plan.find("a") is None
    plan.end_visit(visit)  # with two in their slots, and one that never came in
    assert (plan.free, keys_of(plan.held)) == (2, ["x"])


def test_what_was_loaded_ahead_of_a_visit_that_does_not_fit_passes_too() -> None:
    plan = SlotPlan(3, Lru(), passing_slots=1)
    used(plan, "x")
    (ahead,) = plan.ahead("b")[0]
    plan.arrive(ahead)
    visit = plan.visit("abcd", may_pass=True)
    assert (keys_of(visit.through), visit.passing) == (["b"], ("a", "c", "d"))
    assert (visit.ahead_ready, visit.ahead_late, plan.counts.hits, plan.counts.useful) == (1, 0, 1, 1)
    plan.let_out(visit, ahead)
    assert plan.find("b") is None
    assert plan.free == 0, "its slot is for the others"
    plan.end_visit(visit)
    assert plan.free == 2


def test_a_key_that_is_due_comes_beside_what_was_loaded_ahead_for_later_turns() -> None:
    plan = SlotPlan(4, Lru(), passing_slots=2)
    for held in plan.ahead("de")[0]:
        plan.arrive(held)
    visit = plan.visit("abcdef", may_pass=True)
    assert (keys_of(visit.through), visit.passing) == (["d", "e"], ("a", "b", "c", "f"))
    assert plan.let_in(visit) is None, "as many pass by as may"
    assert plan.let_in(visit, due="c") is None, "it is not the next"
    first = plan.let_in(visit, due="a")
    assert first is not None
    assert (first.key, plan.free) == ("a", 0)
    plan.let_out(visit, first)
    assert plan.let_in(visit) is None
    second = plan.let_in(visit, due="b")
    assert second is not None
    assert second.key == "b"
    plan.end_visit(visit)
    assert plan.free == 4


def test_what_was_loaded_ahead_of_an_earlier_visit_of_the_layer_is_not_loaded_ahead_of_this_one() -> None:
    plan = SlotPlan(4, Lru())
    old, new = (1, 0), (1, 1)
    plan.arrive(plan.ahead([old])[0][0])
    plan.end_visit(plan.visit([(1, 2)]))  # the guess was wrong
    plan.arrive(plan.ahead([new])[0][0])
    visit = plan.visit([old, new])
    assert (visit.ahead_ready, visit.ahead_late, plan.counts.useful) == (1, 0, 2)


def test_a_visit_that_may_pass_leaves_slots_to_others() -> None:
    plan = SlotPlan(5, Lru(), passing_slots=2, held_most=4)
    used(plan, "abcde")
    visit = plan.visit("abcde", may_pass=True)
    assert (keys_of(visit.held), visit.passing, visit.passing_slots) == (["a", "b", "c", "d"], ("e",), 0)
    other = plan.visit("x")  # takes the slot of e, which is not in use yet
    with pytest.raises(LeaseError):
        plan.let_in(visit)
    plan.end_visit(other)
    last = plan.let_in(visit)
    assert last is not None
    assert (last.key, plan.find("x")) == ("e", None)
    assert (plan.counts.hits, plan.counts.passed) == (4, 1)
    plan.end_visit(visit)


def test_what_passes_by_stays_in_slots_that_nobody_needs_until_something_is_loaded_ahead() -> None:
    plan = SlotPlan(6, Lru(), passing_slots=1, held_most=4)
    for _ in range(3):
        visit = loaded(plan, "abcdefgh", may_pass=True)
        while (one := plan.let_in(visit)) is not None:
            plan.arrive(one)
            plan.let_out(visit, one)
        plan.end_visit(visit)
    assert keys_of(plan.held) == list("abcde"), "two slots are left to others; one of them is no passing slot"
    assert plan.counts.hits == 2 * 5
    visit = plan.visit("abcdefgh", may_pass=True)
    ahead, evicted = plan.ahead("xyz", evicting=0)
    assert (keys_of(ahead), keys_of(evicted)) == (["x", "y"], ["d", "e"])
    plan.end_visit(visit)


# --- slots that come and go


def test_slots_that_come_are_used_and_those_that_go_are_free_ones_first_and_then_the_policys_victims() -> None:
    plan = SlotPlan(3, Lru())
    used(plan, "abc")
    plan.grow(2)
    used(plan, "de")
    assert [held.key for held in plan.held] == ["a", "b", "c", "d", "e"]
    plan.grow(1)
    assert plan.shrink(2) == 2
    assert ([held.key for held in plan.held], plan.slots, plan.free) == (["b", "c", "d", "e"], 4, 0)
    used(plan, "f")
    assert ([held.key for held in plan.held], plan.counts.evicted) == (["c", "d", "e", "f"], 2)


def test_a_slot_in_use_goes_no_earlier_than_its_visit_ends() -> None:
    plan = SlotPlan(4, Lru())
    used(plan, "ab")
    visit = loaded(plan, "cd")
    assert plan.shrink(3) == 2
    assert ([held.key for held in plan.held], plan.slots) == (["c", "d"], 2)
    assert plan.shrink(1) == 0
    plan.end_visit(visit)
    assert plan.shrink(5) == 1, "one stays"
    assert [held.key for held in plan.held] == ["d"]


def test_slots_that_a_visit_runs_the_rest_of_its_keys_through_stay_with_it() -> None:
    plan = SlotPlan(4, Lru(), passing_slots=2)
    visit = loaded(plan, "abcdef", may_pass=True)
    assert (keys_of(visit.held), visit.passing_slots) == (["a", "b"], 2)
    assert plan.shrink(4) == 0
    while (held := plan.let_in(visit)) is not None:
        plan.let_out(visit, held)
    plan.end_visit(visit)
    assert plan.shrink(4) == 3


def test_what_a_visit_still_waits_for_goes_no_earlier_than_the_visit_ends() -> None:
    plan = SlotPlan(5, Lru(), held_most=2)
    used(plan, "abcde")
    visit = plan.visit("abcd", may_pass=True)
    assert (keys_of(visit.held), visit.passing, visit.passing_slots) == (["a", "b"], ("c", "d"), 0)
    assert plan.shrink(4) == 1
    assert keys_of(plan.held) == list("abcd"), "nobody uses or waits for e"
    one = plan.let_in(visit)
    assert one is not None
    assert plan.shrink(4) == 0
    plan.let_out(visit, one)
    assert plan.shrink(1) == 1
    assert keys_of(plan.held) == list("abd"), "c has passed by"
    plan.end_visit(visit)
    assert plan.shrink(4) == 2
    assert plan.slots == 1


@pytest.mark.parametrize("how", ["drop", "ahead"])
def test_a_visit_of_which_all_stood_keeps_a_slot_whatever_becomes_of_what_it_waits_for(how: str) -> None:
    plan = SlotPlan(5, Lru(), held_most=4)
    used(plan, "abcde")
    visit = plan.visit("abcde", may_pass=True)
    if how == "drop":
        last = plan.find("e")
        assert last is not None
        plan.drop(last)
    else:
        assert keys_of(plan.ahead("x")[1]) == ["e"]
    assert plan.shrink(4) == 0
    one = plan.let_in(visit)
    assert one is not None
    assert one.key == "e"
    plan.end_visit(visit)
    assert plan.shrink(4) == 4


def test_after_slots_were_given_back_loads_ahead_evict_no_more_than_was_left_to_them() -> None:
    plan = SlotPlan(4, Lru())
    plan.grow(8)
    used(plan, [(0, expert) for expert in range(12)])
    for held in plan.ahead([(1, expert) for expert in range(9)])[0]:
        plan.arrive(held)
    plan.skip([1])
    assert plan.shrink(8) == 8
    assert len(plan.ahead([(2, expert) for expert in range(12)])[1]) == 4


def test_what_one_visit_may_take_and_what_loads_ahead_may_evict_go_with_the_slots() -> None:
    plan = SlotPlan(8, Lru(), held_most=7)
    plan.grow(4)
    assert (plan.slots, plan.held_most) == (12, 11)
    used(plan, range(12))
    assert len(plan.ahead([f"{number}" for number in range(20)])[1]) == 12
    plan.clear()
    plan.shrink(11)
    assert (plan.slots, plan.held_most) == (1, 1)
    plan.grow(3)
    assert plan.slots == 4


# --- all of it, at random


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_every_counter_is_what_a_plain_model_of_the_slots_counts(name: str, seed: int) -> None:
    rng = random.Random(seed)
    slots = rng.randint(1, 12)
    held_most = rng.choice([None, max(1, slots // 2)])
    plan = SlotPlan(slots, POLICIES[name](), passing_slots=rng.randint(1, 3), held_most=held_most)
    model = Slots(slots)
    visits: list[SlotVisit] = []
    for turn in range(600):
        layer = rng.randrange(LAYERS)
        keys = [(layer, expert) for expert in rng.sample(range(EXPERTS), rng.randint(1, EXPERTS))]
        if rng.random() < 0.1:  # of two layers
            keys += [((layer + 1) % LAYERS, expert) for expert in range(rng.randint(1, 3))]
        action = rng.random()
        if rng.random() < 0.06:
            before, count = list(plan.held), rng.randint(0, 4)
            if plan.slots < slots and rng.random() < 0.5:
                plan.grow(count)
                model.slots += count
            else:
                model.shrink(count, plan.shrink(count), [held for held in before if held.is_gone])
        elif action < 0.5:
            try:
                visits.append(plan.visit(keys, may_pass=rng.random() < 0.5))
                model.visit(keys, visits[-1], held_most=plan.held_most)
            except (LeaseError, CapacityError):
                model.refuse(keys)
        elif action < 0.6:
            evicting = rng.choice([None, None, 0])
            loads, evicted = plan.ahead(keys, evicting=evicting)
            assert evicting is None or set(evicted) <= model.spare
            model.ahead(keys, loads, evicted)
        elif action < 0.72 and visits:
            visit = rng.choice(visits)
            before = list(plan.held)
            try:
                one = plan.let_in(visit, due=visit.waiting[0] if visit.waiting and rng.random() < 0.3 else None)
            except LeaseError:
                assert plan.free <= 0
                assert all(held.users for held in plan.held)
                continue
            if one is not None:
                model.let_in(visit, one, [held for held in before if held.is_gone])
            elif visit.through:
                one = rng.choice(visit.through)
                plan.let_out(visit, one)
                model.let_out(visit, one)
        elif action < 0.85 and visits:
            visit = visits.pop(rng.randrange(len(visits)))
            plan.end_visit(visit)
            model.end(visit)
        elif model.under_way:
            held = rng.choice(model.under_way)
            if rng.random() < 0.8:
                plan.arrive(held)
                model.ready.add(held)
            else:
                plan.fail(held)
                model.remove(held)
        elif model.standing:
            held = rng.choice(list(model.standing.values()))
            plan.drop(held)
            model.remove(held)
        model.check(plan, f"{name}, seed {seed}, turn {turn}")


@pytest.mark.parametrize("in_order", [False, True], ids=["as they come", "in order"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(20))
def test_one_visit_at_a_time_always_goes_on_whatever_is_recalled_and_loaded_ahead_meanwhile(
    name: str, seed: int, in_order: bool
) -> None:
    """With one thread nothing raises: a visit that may pass finds at least a slot, and each of its keys gets its turn."""
    rng = random.Random(seed)
    slots = rng.randint(1, 8)
    held_most = rng.choice([None, max(1, slots - 1), max(1, slots // 2)])
    plan = SlotPlan(slots, POLICIES[name](), passing_slots=rng.choice([None, 1, 2]), held_most=held_most)

    def disturb() -> None:
        action = rng.randrange(8)
        if action < 2:
            plan.grow(rng.randint(0, 4))
        elif action < 4:
            before = plan.slots
            assert before - plan.shrink(rng.randint(0, 5)) == plan.slots >= 1
        elif action == 4:
            keys, evicting = [(rng.randrange(LAYERS), rng.randrange(EXPERTS)) for _ in range(8)], rng.choice([None, 0, 1])
            loads, evicted = plan.ahead(keys, most=rng.choice([None, 2]), evicting=evicting)
            assert len(evicted) <= len(loads)
        elif plan.held:
            held = rng.choice(plan.held)
            (plan.drop if held.is_ready else plan.arrive if action < 7 else plan.fail)(held)
        assert plan.free >= 0

    for _ in range(60):
        layer = rng.randrange(LAYERS)
        keys = [(layer, expert) for expert in rng.sample(range(EXPERTS), rng.randint(1, EXPERTS))]
        visit = plan.visit(keys, may_pass=True)
        came = [*keys_of(visit.held), *keys_of(visit.through)]
        for key in keys if in_order else ():
            while key in visit.waiting:
                if rng.random() < 0.5:
                    disturb()
                elif (one := plan.let_in(visit, due=key)) is not None:
                    came.append(one.key)
            for one in [one for one in visit.through if one.key == key]:
                plan.let_out(visit, one)
        while visit.waiting or visit.through:
            if rng.random() < 0.5:
                disturb()
            elif (one := plan.let_in(visit)) is not None:
                came.append(one.key)
            elif visit.through:
                plan.let_out(visit, rng.choice(visit.through))
        assert sorted(came, key=str) == sorted(keys, key=str)
        plan.end_visit(visit)
        assert not plan._passing
        disturb()
    plan.shrink(plan.slots)
    assert plan.slots == 1, "no visit is under way"


class Slots:
    """The slots one by one: what stands, who uses it, and what was counted."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.standing: dict[Hashable, Held] = {}
        self.ready: set[Held] = set()
        self.fresh: set[Held] = set()
        """Loaded ahead and not visited since."""
        self.awaited: set[Held] = set()
        """Of these, those whose layer was not visited since, or that were asked for again then."""
        self.users: dict[Held, int] = {}
        self.leaving: set[Held] = set()
        """Going once they were used."""
        self.spare: set[Held] = set()
        """Those that were to go, and stayed."""
        self.kept: dict[SlotVisit, int] = {}
        self.through: dict[SlotVisit, list[Held]] = {}
        self.waiting: dict[SlotVisit, list[Hashable]] = {}
        self.hits = self.late = self.misses = self.passed = self.wasted = self.useful = 0

    @property
    def under_way(self) -> list[Held]:
        return [held for held in self.standing.values() if held not in self.ready]

    def visit(self, keys: Sequence[Hashable], visit: SlotVisit, *, held_most: int) -> None:
        there = {key: held for key, held in self.standing.items() if key in keys}
        for held in visit.evicted:
            assert not self.users.get(held), "it was in use"
            self.remove(held)
        assert {held.key for held in visit.evicted} & set(keys) <= set(visit.passing)
        through = list(visit.through)
        assert all(held in self.fresh and not self.users.get(held) for held in through)
        expected = [key for key in keys if key not in visit.passing and key not in {held.key for held in through}]
        assert [held.key for held in visit.held] == expected
        self.passed += len(visit.passing)
        self.kept[visit], self.through[visit], self.waiting[visit] = visit.passing_slots, through, list(visit.passing)
        assert bool(visit.passing) >= bool(visit.passing_slots)
        assert not visit.passing or len(visit.held) + len(through) + visit.passing_slots <= held_most
        assert visit.ahead_ready == len({*visit.held, *through} & self.awaited & self.ready)
        assert visit.ahead_late == len({*visit.held, *through} & self.awaited - self.ready)
        self.leaving = self.leaving - set(visit.held) | set(through)
        loads = []
        for held in (*visit.held, *through):
            if there.get(held.key) is not held:
                assert held.key not in self.standing
                self.standing[held.key] = held
                loads.append(held)
                self.misses += 1
            elif held in self.ready:
                self.hits += 1
            else:
                self.late += 1
            self.useful += held in self.fresh
            self.fresh.discard(held)
            self.users[held] = self.users.get(held, 0) + 1
        assert list(visit.loads) == loads
        layers = {key[0] for key in keys}  # type: ignore[index]
        self.awaited = {held for held in self.awaited & self.fresh if held.key[0] not in layers}  # type: ignore[index]

    def shrink(self, count: int, given: int, evicted: Sequence[Held]) -> None:
        waited = {key for keys in self.waiting.values() for key in keys}
        unused = {held for held in self.standing.values() if not self.users.get(held)}
        idle = {held for held in unused if held.key not in waited}
        slotless = sum(bool(keys) and not self.kept[visit] for visit, keys in self.waiting.items())
        needed = max(slotless, len(unused - idle))
        assert given == max(0, min(count, self.slots - 1, self.free + len(unused) - needed))
        assert len(evicted) == max(0, given - self.free)
        assert idle.issuperset(evicted)
        spared = {held for held in idle if held in self.awaited or held not in self.ready}
        assert spared.isdisjoint(evicted) or idle - spared <= set(evicted), "loads ahead go last"
        for held in evicted:
            self.remove(held)
        self.slots -= given

    def refuse(self, keys: Sequence[Hashable]) -> None:
        missing = [key for key in keys if key not in self.standing]
        idle = [held for held in self.standing.values() if not self.users.get(held)]
        mine = [held for held in idle if held.key in keys]
        assert len(missing) > self.free + len(idle) - len(mine), "there was room"

    def ahead(self, keys: Sequence[Hashable], loads: Sequence[Held], evicted: Sequence[Held]) -> None:
        self.awaited |= {held for held in self.fresh if held.key in keys}
        for held in evicted:
            assert held in self.ready
            assert held not in self.awaited
            assert not self.users.get(held)
            self.remove(held)
        for held in loads:
            assert held.key not in self.standing
            self.standing[held.key] = held
            self.fresh.add(held)
            self.awaited.add(held)

    def let_in(self, visit: SlotVisit, held: Held, evicted: Sequence[Held]) -> None:
        assert held.key == self.waiting[visit].pop(0)
        for other in evicted:  # what it had found is gone, and so is its slot
            assert not self.users.get(other)
            assert not self.kept[visit]
            self.remove(other)
        self.useful += held in self.fresh
        self.fresh.discard(held)
        self.awaited.discard(held)
        if self.standing.get(held.key) is held:
            self.passed -= 1
            self.hits += held in self.ready
            self.late += held not in self.ready
        else:
            assert held.key not in self.standing
            self.standing[held.key] = held
            self.leaving.add(held)
            self.kept[visit] = max(0, self.kept[visit] - 1)
        self.users[held] = self.users.get(held, 0) + 1
        self.through[visit].append(held)

    def let_out(self, visit: SlotVisit, held: Held) -> None:
        self.through[visit].remove(held)
        self.users[held] -= 1
        if held in self.leaving and not self.users[held] and self.standing.get(held.key) is held:
            if self.waiting[visit] and self.free:
                self.leaving.remove(held)
                self.spare.add(held)
            else:
                self.remove(held)
            self.kept[visit] += bool(self.waiting[visit])

    def end(self, visit: SlotVisit) -> None:
        self.passed -= len(self.waiting[visit])
        self.waiting[visit] = []
        for held in list(self.through[visit]):
            self.let_out(visit, held)
        self.kept[visit] = 0
        for held in visit.held:
            self.users[held] -= 1

    def remove(self, held: Held) -> None:
        if self.standing.get(held.key) is held:
            del self.standing[held.key]
            self.wasted += held in self.fresh
            self.fresh.discard(held)

    @property
    def free(self) -> int:
        lingering = sum(count > 0 and self.standing.get(held.key) is not held for held, count in self.users.items())
        return self.slots - len(self.standing) - lingering - sum(self.kept.values())

    def check(self, plan: SlotPlan, where: str) -> None:
        assert plan.held == list(self.standing.values()), where
        assert plan.free == self.free >= 0, where
        counts = plan.counts
        assert (counts.hits, counts.late, counts.misses, counts.passed) == (self.hits, self.late, self.misses, self.passed), where
        assert (counts.wasted, counts.useful) == (self.wasted, self.useful), where


@pytest.mark.parametrize("seed", range(20))
def test_a_visit_that_passes_by_never_takes_the_slots_that_it_leaves_to_others(seed: int) -> None:
    numbers = random.Random(seed)
    plan = SlotPlan(4, Lru(), held_most=3)
    for _ in range(40):
        visit = plan.visit(numbers.sample(range(9), 9), may_pass=True)
        while visit.waiting or visit.through:
            held = plan.let_in(visit)
            assert len(visit.held) + len(visit.through) + visit.passing_slots <= plan.held_most
            assert visit.waiting or not visit.passing_slots, "nothing is left for what it keeps"
            other = plan.visit([numbers.randrange(9, 12)], may_pass=True)  # another thread's finds a slot at any time
            for load in other.loads:
                plan.arrive(load)
            plan.end_visit(other)
            if held is not None:
                plan.arrive(held)
            if visit.through and (held is None or numbers.random() < 0.5):
                plan.let_out(visit, numbers.choice(visit.through))
        plan.end_visit(visit)
