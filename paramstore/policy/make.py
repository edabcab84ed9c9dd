"""The one place that makes a policy by its name."""

from __future__ import annotations

from paramstore.config import PolicyConfig
from paramstore.errors import ConfigError
from paramstore.policy.base import Policy
from paramstore.policy.decayed_lfu import DecayedLfu
from paramstore.policy.lru import Lru


def make_policy(config: PolicyConfig, capacity: int) -> Policy:
    """A new policy for an arena of `capacity` slots. Raises ConfigError on a name this version does not
    have."""
    if config.name == "lru":
        return Lru()
    if config.name == "decayed_lfu":
        return DecayedLfu(threshold=config.threshold, beta=config.beta, decay_steps=config.decay_steps, capacity=max(1, capacity))
    raise ConfigError(f"policy.name={config.name!r}: this version has decayed_lfu and lru")
