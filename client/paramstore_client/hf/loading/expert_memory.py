"""How many experts stand for a model that is served, and which of them give way first."""

from __future__ import annotations

from dataclasses import dataclass

from paramstore.config import parse_size
from paramstore.core.arguments import choice, whole_number
from paramstore.core.schema import Schema
from paramstore.errors import ConfigError

POLICIES = {"auto": "schedule", "ring": "ring", "buffer": "lifo_inactive"}
"""residency -> the policy of the slots, one of `paramstore.policy.make.SLOT_POLICIES`. auto is the best of them on decoding traces
(`bench/bench_hits.py`). ring goes by the turns of the layers, as ring memory does (SE-MoE, arXiv 2205.10034, section 3.3.2). buffer
gives up what this batch does not use, the last to come first ("Towards MoE Deployment", arXiv 2303.06182, section VI). Both papers
give each layer slots of its own; here all layers share them."""


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """The memory that a caller asked for, checked. slots, size_bytes: at most one of them, else what the namespace is promised."""

    slots: int | None
    size_bytes: int | None
    policy: str

    @classmethod
    def of(cls, expert_memory: str | int | None, residency: str, *, mode: str) -> ExpertMemory:
        """Checks the arguments of `from_pretrained`. Raises ConfigError."""
        policy = POLICIES[choice("residency", residency, tuple(POLICIES))]
        if mode != "infer" and (expert_memory is not None or residency != "auto"):
            raise ConfigError(
                f"expert_memory={expert_memory!r}, residency={residency!r}: for mode='infer' alone; a trainer has the slots that "
                "it is promised (min_lease_slots, host_budget)"
            )
        if isinstance(expert_memory, str):
            return cls(None, parse_size(expert_memory), policy)
        return cls(None if expert_memory is None else whole_number("expert_memory", expert_memory, least=1), None, policy)

    def slots_for(self, schema: Schema, key_count: int) -> int | None:
        """The number of experts that stand, at most all of them; None for what the namespace is promised. Raises ConfigError where
        there is no room for one."""
        image_bytes = schema.part("param").image_bytes
        slots = self.slots if self.size_bytes is None else self.size_bytes // image_bytes
        if slots == 0:
            raise ConfigError(f"expert_memory of {self.size_bytes} bytes holds no expert: one takes {image_bytes}; give more")
        return None if slots is None else min(slots, key_count)
