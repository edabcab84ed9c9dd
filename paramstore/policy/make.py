"""The one place that makes a policy by its name: of a daemon's arena, or of a client's slots."""

from __future__ import annotations

from collections.abc import Sequence

from paramstore.config import PolicyConfig
from paramstore.core.visits import ring_visits
from paramstore.errors import ConfigError
from paramstore.policy.base import CountingPolicy, Policy
from paramstore.policy.decayed_lfu import DecayedLfu
from paramstore.policy.lifo_inactive import LifoInactive
from paramstore.policy.lru import Lru
from paramstore.policy.ring_order import RingOrder
from paramstore.policy.schedule import Schedule

SLOT_POLICIES = ("schedule", "decayed_lfu", "lru", "lifo_inactive", "ring")
"""Names that `make_slot_policy` knows."""


def make_policy(config: PolicyConfig, capacity: int) -> CountingPolicy:
    """Makes a policy for an arena of `capacity` slots. Raises ConfigError on a name that this version does not have."""
    if config.name == "lru":
        return Lru()
    if config.name == "decayed_lfu":
        return _decayed_lfu(config, capacity)
    if config.name == "schedule":
        return Schedule(lambda: _decayed_lfu(config, capacity))
    raise ConfigError(f"policy.name={config.name!r}: this version has schedule, decayed_lfu and lru")


def make_slot_policy(name: str, slots: int, layers: Sequence[int]) -> Policy:
    """Makes a policy for a client's cache of `slots` slots. layers: the order of their visits, again and again. Raises ConfigError
    on a name that is none of SLOT_POLICIES."""
    if name == "lifo_inactive":
        return LifoInactive()
    if name == "ring":
        return RingOrder(layers)
    if name not in SLOT_POLICIES:
        raise ConfigError(f"policy={name!r}: slots have {', '.join(SLOT_POLICIES)}")
    policy = make_policy(PolicyConfig(name=name), slots)
    if isinstance(policy, Schedule):
        policy.declare(ring_visits(layers))
    return policy


def _decayed_lfu(config: PolicyConfig, capacity: int) -> DecayedLfu:
    return DecayedLfu(threshold=config.threshold, beta=config.beta, decay_steps=config.decay_steps, capacity=max(1, capacity))
