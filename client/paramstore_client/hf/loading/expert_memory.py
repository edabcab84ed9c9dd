"""How many experts stand for a model that is served, and which of them give way first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paramstore.core.arguments import choice, integer, wrong
from paramstore.core.schema import Schema
from paramstore.errors import CapacityError, ConfigError
from paramstore.sizes import parse_size

POLICIES = {"auto": "schedule", "ring": "ring", "buffer": "lifo_inactive"}
"""residency -> the policy of the slots, one of `paramstore.policy.make.SLOT_POLICIES`. auto is the best of them on decoding traces
(`bench/bench_hits.py`). ring goes by the turns of the layers, as ring memory does (SE-MoE, arXiv 2205.10034, section 3.3.2). buffer
gives up what this batch does not use, the last to come first ("Towards MoE Deployment", arXiv 2303.06182, section VI). Both papers
give each layer slots of its own; here all layers share them."""

OURS = "What this process has it gives back when a model is dropped (`del model`), or by ps.hf.namespace(model).close()"
"""What a reader of its own that is in the way means to a program, as a notebook whose cell is run again."""


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """The memory that a caller asked for, checked. policy: of its slots. given: what the caller wrote, a number of experts or their
    size; None for what the namespace is promised."""

    policy: str
    given: str | int | None = None

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
            try:
                parse_size(expert_memory)
            except ConfigError as error:
                number = expert_memory.strip()
                way_out = f", or {number} for as many experts" if number.isdecimal() else ", or a number of experts"
                raise wrong("expert_memory", expert_memory, f"a size with its unit, as in '12GiB'{way_out}") from error
        elif expert_memory is not None and (integer(expert_memory) or 0) < 1:
            raise wrong("expert_memory", expert_memory, "a number of experts from 1, or a size as in '12GiB'")
        return cls(policy, expert_memory)

    def slots_for(self, schema: Schema, key_count: int) -> int | None:
        """The number of experts that stand, at most all of them; None for what the namespace is promised. Raises ConfigError where
        there is no room for one."""
        if self.given is None:
            return None
        image_bytes = schema.part("param").image_bytes
        slots = parse_size(self.given) // image_bytes if isinstance(self.given, str) else int(self.given)
        if slots == 0:
            raise ConfigError(f"expert_memory={self.given!r} holds no expert: one takes {image_bytes} bytes; give more")
        return min(slots, key_count)

    @contextmanager
    def named(self, slots: int | None) -> Iterator[None]:
        """A block that asks for `slots` lease slots, and whose CapacityError names `expert_memory`, as the caller did, for them,
        and says how a model of this process lets go of its own."""
        try:
            yield
        except CapacityError as error:
            told = str(error)
            if self.given is not None:
                told = told.replace(f"min_lease_slots={slots},", f"expert_memory={self.given!r} takes {slots} slots,")
            if f" pid {os.getpid()} " in told:
                told = f"{told}. {OURS}"
            if told == str(error):
                raise
            raise CapacityError(told) from error
