from __future__ import annotations

from typing import Any

import pytest

from paramstore.core.schema import Schema
from paramstore.errors import ConfigError
from paramstore.policy.make import SLOT_POLICIES
from paramstore_client.hf.loading.expert_memory import POLICIES, ExpertMemory

SCHEMA = Schema.param({"w": ((1024, 1024), "float32")})
IMAGE_BYTES = SCHEMA.part("param").image_bytes


def slots_of(expert_memory: str | int | None, key_count: int = 100) -> int | None:
    return ExpertMemory.of(expert_memory, "auto", mode="infer").slots_for(SCHEMA, key_count)


def test_a_number_is_of_experts_and_a_text_is_a_size() -> None:
    assert slots_of(None) is None
    assert (slots_of(7), slots_of(101)) == (7, 100)
    assert slots_of(f"{3 * IMAGE_BYTES + 5}B") == 3
    assert slots_of("64MiB") == (64 << 20) // IMAGE_BYTES
    assert slots_of("1TiB") == 100


def test_every_residency_is_a_policy_of_slots() -> None:
    assert set(POLICIES.values()) <= set(SLOT_POLICIES)
    assert [ExpertMemory.of(None, name, mode="infer").policy for name in POLICIES] == ["schedule", "ring", "lifo_inactive"]


def test_training_with_the_defaults_is_no_mistake() -> None:
    assert ExpertMemory.of(None, "auto", mode="train").slots is None


@pytest.mark.parametrize(
    ("expert_memory", "residency", "mode", "message"),
    [
        (0, "auto", "infer", "expert_memory"), (-1, "auto", "infer", "expert_memory"), (1.5, "auto", "infer", "expert_memory"),
        ("many", "auto", "infer", "many"), ("12", "auto", "infer", "no unit"), (None, "lru", "infer", "residency"),
        ("1GiB", "auto", "train", "mode='infer'"), (None, "ring", "train", "mode='infer'"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_before_anything_is_loaded(expert_memory: Any, residency: Any, mode: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExpertMemory.of(expert_memory, residency, mode=mode)


def test_room_for_no_expert_is_refused_with_the_size_of_one() -> None:
    with pytest.raises(ConfigError, match=f"one takes {IMAGE_BYTES}"):
        slots_of("1MiB")
