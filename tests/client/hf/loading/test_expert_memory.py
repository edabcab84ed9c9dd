from __future__ import annotations

import os
from typing import Any

import pytest

from paramstore.core.schema import Schema
from paramstore.errors import CapacityError, ConfigError
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
    assert ExpertMemory.of(None, "auto", mode="train").given is None


@pytest.mark.parametrize(
    ("expert_memory", "residency", "mode", "message"),
    [
        (0, "auto", "infer", "expert_memory=0: give a number of experts from 1, or a size"),
        (-1, "auto", "infer", "expert_memory"), (1.5, "auto", "infer", "expert_memory"), (True, "auto", "infer", "expert_memory"),
        ("many", "auto", "infer", "expert_memory='many': give a size with its unit, as in '12GiB', or a number of experts"),
        ("16", "auto", "infer", "expert_memory='16': give a size .*, as in '12GiB', or 16 for as many experts"),
        (None, "lru", "infer", "residency"), ("1GiB", "auto", "train", "mode='infer'"), (None, "ring", "train", "mode='infer'"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_before_anything_is_loaded(expert_memory: Any, residency: Any, mode: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExpertMemory.of(expert_memory, residency, mode=mode)


def test_room_for_no_expert_is_refused_with_the_size_of_one() -> None:
    with pytest.raises(ConfigError, match=f"expert_memory='1MiB' holds no expert: one takes {IMAGE_BYTES} bytes"):
        slots_of("1MiB")


def test_where_so_many_slots_are_not_left_the_error_names_what_the_caller_gave() -> None:
    memory = ExpertMemory.of("64MiB", "auto", mode="infer")
    with pytest.raises(CapacityError, match=r"^'moe': expert_memory='64MiB' takes 15 slots, but 2 are left$"), memory.named(15):
        raise CapacityError("'moe': min_lease_slots=15, but 2 are left")
    for other, slots in ((memory, 14), (ExpertMemory.of(None, "auto", mode="infer"), 15)):
        with pytest.raises(CapacityError, match="min_lease_slots=15"), other.named(slots):
            raise CapacityError("'moe': min_lease_slots=15, but 2 are left")


@pytest.mark.parametrize("given", ["64MiB", None])
def test_where_this_process_has_the_slots_the_error_says_how_it_gives_them_back(given: str | None) -> None:
    memory = ExpertMemory.of(given, "auto", mode="infer")
    for pid, is_ours in ((os.getpid(), True), (1, False)):
        with pytest.raises(CapacityError, match=f"the reader pid {pid} ") as told, memory.named(15):
            raise CapacityError(f"'moe': the reader pid {pid} (python) was promised 9; close one")
        assert ("namespace(model).close()" in str(told.value)) == is_ours
