"""The one place that makes a policy by its name."""

from __future__ import annotations

from paramstore.config import PolicyConfig
from paramstore.errors import ConfigError
from paramstore.policy.base import Policy
from paramstore.policy.decayed_lfu import DecayedLfu
from paramstore.policy.lru import Lru
from paramstore.policy.schedule import Schedule


def make_policy(config: PolicyConfig, capacity: int) -> Policy:
    """Makes a policy for an arena of `capacity` slots. Raises ConfigError on a name that this version does not have."""
    if config.name == "lru":
        return Lru()
    if config.name == "decayed_lfu":
        return _decayed_lfu(config, capacity)
    if config.name == "schedule":
        return Schedule(lambda: _decayed_lfu(config, capacity))
    raise ConfigError(f"policy.name={config.name!r}: this version has schedule, decayed_lfu and lru")


def _decayed_lfu(config: PolicyConfig, capacity: int) -> DecayedLfu:
    return DecayedLfu(threshold=config.threshold, beta=config.beta, decay_steps=config.decay_steps, capacity=max(1, capacity))
