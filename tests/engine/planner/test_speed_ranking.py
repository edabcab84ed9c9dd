"""Where the next extent should lie: by the policy's heat, by that of an initialization, by none where nobody knows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest

from paramstore.config import Retention
from paramstore.core.heat import NO_HEAT, GivenHeat
from paramstore.core.key import ExpertKey
from paramstore.core.schema import Schema
from paramstore.engine.planner.speed_ranking import RANKED_FOR, SpeedRanking
from paramstore.policy.decayed_lfu import DecayedLfu
from paramstore.policy.lru import Lru
from paramstore.storage.volume.base import VolumeError
from paramstore_testkit.stores.small_planner import SCHEMA, SmallPlanner

PARAM = Schema.param({"w": ((4,), "float32")})
KEYS = 8


def small(schema: Schema = SCHEMA, *, fast: int = 3, policy: type = DecayedLfu, is_committed: bool = True) -> SmallPlanner:
    """A planner with a slow volume, 0, and a fast one, 1, that `fast` extents fit on."""
    made = SmallPlanner(
        experts=KEYS, schema=schema, param_slots=KEYS, working_slots=KEYS, extents=64, is_committed=is_committed,
        policy=lambda: Lru() if policy is Lru else DecayedLfu(threshold=1.0, beta=0.5, decay_steps=64, capacity=KEYS),
    )  # fmt: skip
    made.space.add_volume(1, start_bytes=0, size_bytes=fast * schema.record_bytes, written_bytes=0)
    made.space.preference.set_classes({0: 1, 1: 0})
    return made


def use(made: SmallPlanner, uses: Sequence[int]) -> None:
    """Lets the policy count so many uses of each key, in key order."""
    for key, count in zip(made.keys, uses, strict=True):
        made.param_arena.policy.record_all([key] * count)


def hot(made: SmallPlanner, keys: Sequence[ExpertKey] | None = None) -> list[int]:
    """The experts whose next extent should be of the fast class."""
    asked = made.keys if keys is None else list(keys)
    found = made.planner.working.speed_ranking.speed_classes(made.namespace, asked)
    return [key[1] for key, speed_class in zip(asked, found, strict=True) if speed_class == 0]


def test_where_nothing_was_counted_no_class_is_preferred() -> None:
    made = small()
    assert made.planner.working.speed_ranking.speed_classes(made.namespace, made.keys) == [None] * KEYS


def test_where_all_volumes_are_alike_no_class_is_preferred() -> None:
    made = small()
    use(made, range(KEYS))
    made.space.preference.set_classes({0: 0, 1: 0})
    assert made.planner.working.speed_ranking.speed_classes(made.namespace, made.keys) == [None] * KEYS


@pytest.mark.parametrize(("fast", "expected"), [(3, [7]), (6, [6, 7]), (9, [5, 6, 7]), (99, [1, 2, 3, 4, 5, 6, 7])])
def test_records_that_the_newest_step_changed_take_an_extent_for_each_retained_step_and_one_more(
    fast: int, expected: list[int]
) -> None:
    made = small(fast=fast)
    use(made, range(KEYS))
    made.planner.working.speed_ranking = SpeedRanking(made.space, Retention(retained_steps=2))
    assert hot(made) == expected


def test_records_that_it_did_not_change_take_those_that_they_hold() -> None:
    made = small(fast=6)
    use(made, range(KEYS))
    made.update(made.keys[7])
    made.commit(1)
    made.planner.working.speed_ranking = SpeedRanking(made.space, Retention(retained_steps=2))
    assert hot(made) == [4, 5, 6, 7], "three extents for the hottest, one for each other"


def test_of_trained_records_as_many_of_the_hottest_as_the_param_arena_has_slots_come_last() -> None:
    made = small(fast=6)
    use(made, range(KEYS))
    made.param_arena.planned_slots = 3
    assert hot(made) == [3, 4]
    made.update(*made.keys[5:])
    made.commit(1)
    made.planner.working.speed_ranking = SpeedRanking(made.space, Retention(retained_steps=2))
    assert hot(made) == [1, 2, 3, 4, 7], "one extent for each that the newest step did not change, and room for more"


def test_records_for_inference_are_there_once() -> None:
    made = small(PARAM)
    use(made, range(KEYS))
    assert hot(made) == [5, 6, 7]


def test_a_policy_that_forgets_what_it_does_not_hold_places_nothing() -> None:
    made = small(PARAM, policy=Lru)
    use(made, [1] * KEYS)
    assert made.planner.working.speed_ranking.speed_classes(made.namespace, made.keys) == [None] * KEYS


def test_a_fast_class_that_is_fenced_is_nobody_s_goal() -> None:
    made = small(PARAM)
    use(made, range(KEYS))
    made.space.fences.fail_flush(1, VolumeError("the disk is gone"))
    assert hot(made) == []


def test_a_namespace_has_the_share_of_the_fast_class_that_it_has_of_all_entitlements() -> None:
    made = small(PARAM, fast=6)
    use(made, range(KEYS))
    made.space.entitle(made.namespace.name, 100)
    made.space.entitle("other", 200)
    assert hot(made) == [6, 7]


def test_one_ranking_holds_for_some_extents_and_no_more() -> None:
    made = small(PARAM)
    use(made, range(KEYS))
    assert hot(made) == [5, 6, 7]
    use(made, [0, 99, 98, 97, 0, 0, 0, 0])
    assert hot(made, made.keys[:1] * (RANKED_FOR - KEYS - 1)) == []
    assert 5 in hot(made)
    assert hot(made) == [1, 2, 3]


def test_an_initialization_goes_by_the_heat_that_it_came_with_until_its_end() -> None:
    made = small(PARAM, is_committed=False)
    use(made, range(KEYS))
    made.planner.begin_initialization(made.namespace, GivenHeat.of({(0, 0): 3.0, (0, 2): 5.0, (0, 3): 1.0, (0, 4): 2.0}))
    assert hot(made) == [0, 2, 4]
    made.planner.end_initialization(made.namespace)
    assert hot(made) == [5, 6, 7]


def test_an_initialization_of_which_nobody_knows_the_heat_prefers_no_class() -> None:
    made = small(PARAM, is_committed=False)
    use(made, range(KEYS))
    made.planner.begin_initialization(made.namespace, NO_HEAT)
    assert made.planner.working.speed_ranking.speed_classes(made.namespace, made.keys) == [None] * KEYS


def test_records_without_heat_take_room_of_the_fast_class_that_hot_ones_leave_whenever_these_come() -> None:
    made = small(PARAM, fast=4, is_committed=False)
    assert made.space.reserve_many(56, PARAM.record_bytes, speed_classes=[1] * 56), "by free share all would go to the fast volume"
    made.planner.begin_initialization(made.namespace, GivenHeat.of({(0, 6): 1.0, (0, 7): 2.0}))
    found = dict[int, int]()
    for key in made.keys:
        made.planner.reserve_extents(made.namespace, [key])
        extent = made.namespace.residency.working[key].reserved
        assert extent is not None
        found[key[1]] = extent.volume
    assert list(found.values()) == [1] * 2 + [0] * 4 + [1] * 2


def test_records_without_heat_go_to_the_slow_class_where_hot_ones_leave_no_room() -> None:
    made = small(PARAM, fast=2, is_committed=False)
    made.planner.begin_initialization(made.namespace, GivenHeat.of({(0, 6): 1.0, (0, 7): 2.0}))
    assert made.planner.working.speed_ranking.speed_classes(made.namespace, made.keys) == [1] * 6 + [0] * 2


def test_a_hot_record_that_is_asked_for_twice_counts_once() -> None:
    made = small(PARAM, fast=1, is_committed=False)
    made.planner.begin_initialization(made.namespace, GivenHeat.of({(0, 6): 1.0, (0, 7): 2.0}))
    hot(made, [(0, 7)])
    hot(made, [(0, 7)])
    assert made.planner.working.speed_ranking.speed_classes(made.namespace, made.keys[:1]) == [1], "(0, 6) is to come"


def test_what_came_with_an_initialization_is_forgotten_at_its_end_and_at_a_rollback() -> None:
    for is_ended in (True, False):
        made = small(PARAM, is_committed=False)
        given = GivenHeat.of({(0, 1): 1.0})
        made.planner.begin_initialization(made.namespace, given)
        seen = weakref.ref(given)
        del given
        assert seen() is not None
        if is_ended:
            made.planner.end_initialization(made.namespace)
        else:
            made.planner.begin_rollback(made.namespace)
        assert seen() is None


def test_an_apply_reserves_by_heat() -> None:
    made = small(fast=4)  # two records and their next step
    use(made, range(KEYS))
    made.planner.reserve_extents(made.namespace, made.keys[4:])
    found = [made.namespace.residency.working[key].reserved for key in made.keys[4:]]
    assert [extent and extent.volume for extent in found] == [0, 0, 1, 1]


@pytest.mark.parametrize(("expert", "volume"), [(7, 1), (1, 0)])
def test_a_write_without_a_reserved_extent_takes_one_by_heat(expert: int, volume: int) -> None:
    made = small(fast=6)
    use(made, range(KEYS))
    key = made.keys[expert]
    made.update(key)
    working = made.namespace.residency.working[key]
    assert working.reserved is not None
    made.space.release(working.reserved)
    working.reserved = None
    located = made.begin_write(key).located
    assert located is not None
    assert located.extent.volume == volume
