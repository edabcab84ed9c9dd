"""No record ever misses more steps than the log has, and no apply has to take many along."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from paramstore.core.apply_log import MISSED_MAX
from paramstore.core.place import Identity
from paramstore.engine.catch_up import LATE_AFTER, due_keys, missed_steps
from paramstore_testkit.stores.small_planner import OPTIONS, SCHEMA, SmallPlanner

EXACT = replace(SCHEMA, updates="exact")


def desk(experts: int) -> SmallPlanner:
    return SmallPlanner(schema=EXACT, experts=experts, extents=3 * experts)


def ages(small: SmallPlanner) -> list[int]:
    """How many steps each record will have missed once the applies called so far have run."""
    targets = [working.target for working in small.namespace.working.values()]
    return [small.namespace.log.last - target.version for target in targets if target is not None]


@pytest.mark.parametrize("experts", [1, 3, 63, 64, 65, 200])
def test_a_record_that_is_never_asked_for_catches_up_in_time_and_few_do_at_once(experts: int) -> None:
    small, most = desk(experts), -(-experts // LATE_AFTER)
    for _ in range(5 * MISSED_MAX):
        claimed = small.planner.begin_apply(small.namespace, OPTIONS)
        small.namespace.applies += 1
        assert len(claimed) <= most
        assert max(ages(small)) <= MISSED_MAX
        assert len(small.namespace.log.entries) <= MISSED_MAX + 1


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_holds_over_random_gradients_and_rollbacks(seed: int) -> None:
    source, small = Random(seed), desk(40)
    for step in range(1, 12):
        for _ in range(source.randint(1, 2 * MISSED_MAX)):
            chosen = source.sample(small.keys, source.choice((0, 0, 1, 5)))
            claimed = {**small.planner.begin_apply(small.namespace, OPTIONS), **dict.fromkeys(chosen)}
            small.namespace.applies += 1
            for key in claimed:
                working = small.namespace.working[key]
                working.target = working.identity = Identity(small.namespace.epoch, small.namespace.log.last)
            assert max(ages(small)) <= MISSED_MAX, f"seed {seed}, step {step}"


def test_what_has_a_gradient_often_is_never_taken_along() -> None:
    small = desk(8)
    for number in range(4 * MISSED_MAX):
        small.begin_apply(*([] if number % LATE_AFTER else small.keys))
        small.namespace.applies += 1
        assert due_keys(small.namespace) == []


def test_an_apply_makes_the_steps_before_its_own_and_without_a_gradient_its_own_too() -> None:
    small = desk(4)
    for _ in range(3):
        small.begin_apply()
        small.namespace.applies += 1
    working = small.namespace.working[small.keys[0]]
    assert len(missed_steps(small.namespace, working, has_gradient=True)) == 2
    assert len(missed_steps(small.namespace, working, has_gradient=False)) == 3


def test_where_idle_records_miss_nothing_nobody_catches_up() -> None:
    small = SmallPlanner()
    small.update(small.keys[0])
    working = small.namespace.working[small.keys[1]]
    assert missed_steps(small.namespace, working, has_gradient=True) == ()
    assert small.namespace.log.entries == ()


def test_an_apply_before_there_are_values_takes_nothing_along() -> None:
    small = SmallPlanner(schema=EXACT, is_committed=False)
    for _ in range(2 * LATE_AFTER):
        assert small.planner.begin_apply(small.namespace, OPTIONS) == {}
        small.namespace.applies += 1
