"""Policies by name."""

from __future__ import annotations

import pytest

from paramstore.config import PolicyConfig
from paramstore.errors import ConfigError
from paramstore.policy.decayed_lfu import DecayedLfu
from paramstore.policy.lifo_inactive import LifoInactive
from paramstore.policy.lru import Lru
from paramstore.policy.make import SLOT_POLICIES, make_policy, make_slot_policy
from paramstore.policy.ring_order import RingOrder
from paramstore.policy.schedule import Schedule
from paramstore.testing.policies import nothing


def test_each_name_makes_its_policy() -> None:
    assert isinstance(make_policy(PolicyConfig(), 4), Schedule)
    assert isinstance(make_policy(PolicyConfig(name="decayed_lfu"), 4), DecayedLfu)
    assert isinstance(make_policy(PolicyConfig(name="lru"), 4), Lru)


def test_the_settings_reach_the_policy() -> None:
    policy = make_policy(PolicyConfig(threshold=3.0, beta=0.25, decay_steps=1), 2)
    for name in "aabc":
        policy.record(name)
    assert policy.heat("a") == 0.5
    assert policy.victims(3, nothing) == ["a", "b", "c"]


def test_an_arena_without_slots_has_a_policy_too() -> None:
    policy = make_policy(PolicyConfig(), 0)
    policy.record("a")
    policy.record("b")
    assert policy.victims(1, nothing) == ["a"]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="belady"):
        make_policy(PolicyConfig(name="belady"), 4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("schedule", Schedule), ("decayed_lfu", DecayedLfu), ("lru", Lru), ("lifo_inactive", LifoInactive), ("ring", RingOrder)],
)
def test_each_name_makes_the_policy_of_slots(name: str, kind: type) -> None:
    assert name in SLOT_POLICIES
    policy = make_slot_policy(name, 4, [3, 1])
    assert isinstance(policy, kind)
    if isinstance(policy, Schedule):
        assert [visit.layer for visit in policy.visits] == [3, 1]


def test_an_unknown_name_of_slots_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="policy='belady': slots have schedule, decayed_lfu"):
        make_slot_policy("belady", 4, [0])
