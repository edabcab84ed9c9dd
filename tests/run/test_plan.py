"""What a run is told before it begins: sizes of the engine's own rules, and what is missing by the byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paramstore.errors import CapacityError, ConfigError
from paramstore.run import plan
from paramstore.run.home import Home
from paramstore.run.plan import Plan, plan_of
from paramstore.run.store import RunStore
from paramstore_client import hf
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.loading.expert_memory import ExpertMemory
from paramstore_testkit.training.moe_families import families, modeling_class, tiny_config

MIB = 1 << 20
MADE = Plan(
    name="m", key_count=64, expert_bytes=MIB, budget_bytes=100 * MIB, least_budget_bytes=4 * MIB, standing=64, leasable=60,
    unpacked_slots=None, unpacked_bytes=3 * MIB, leased=None, lacking_bytes=0, free_bytes=1000 * MIB, directory=Path("/s"),
    is_running=False,
)  # fmt: skip


def test_the_line_says_what_stays_what_streams_and_what_is_imported() -> None:
    assert MADE.line() == "m: 64 experts, 64 MiB: all stay in memory of 100 MiB host budget"
    few = replace(MADE, standing=9, lacking_bytes=70 * MIB)
    assert few.line() == (
        "m: 64 experts, 64 MiB: 9 stay in memory of 100 MiB host budget, the others stream from /s; "
        "up to 70 MiB are imported into /s"
    )
    assert replace(MADE, unpacked_slots=8).line().endswith("host budget, 8 of them unpacked in 24 MiB of this process")
    assert replace(MADE, leased=7).line().endswith("host budget, 7 of them at hand between tokens")


def test_what_is_missing_is_named_by_the_byte() -> None:
    MADE.check()
    replace(MADE, lacking_bytes=1000 * MIB).check()
    with pytest.raises(CapacityError, match=r"take 1048576007 bytes in /s, .* has 1048576000 left: 7 bytes are missing"):
        replace(MADE, lacking_bytes=1000 * MIB + 7).check()
    with pytest.raises(CapacityError, match="a host budget of 3 MiB is too small, the least is 4 MiB: give --host-budget 4MiB"):
        replace(MADE, budget_bytes=3 * MIB).check()
    with pytest.raises(CapacityError, match=r"end the daemon that has it \(`paramstore stop /s`\), and give --host-budget 4MiB"):
        replace(MADE, budget_bytes=3 * MIB, is_running=True).check()


def test_more_experts_at_hand_than_a_new_store_can_lease_are_refused() -> None:
    replace(MADE, lacking_bytes=MIB, leased=60).check()
    with pytest.raises(CapacityError, match=r"of 100 MiB 60 experts can be at hand .* asks for 61: give that number"):
        replace(MADE, lacking_bytes=MIB, leased=61).check()
    replace(MADE, leased=61).check()  # of a store that is there the daemon knows


@pytest.fixture
def skeleton() -> Any:
    return modeling.on_meta(modeling_class(families()["mixtral"]), tiny_config("mixtral"))


def test_a_plan_asks_room_for_a_store_that_is_new_and_for_no_other(
    skeleton: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, home = hf.find_layout(skeleton), Home("m", tmp_path, tmp_path / "none" / "store", "n", is_default=True)
    monkeypatch.setattr(plan, "free_bytes", lambda place: 5 if place == tmp_path else 0)  # the nearest directory that is there

    def planned(memory: int | None = None, there: RunStore = RunStore(is_new=True)) -> Plan:
        asked = ExpertMemory.of(memory, "auto", mode="infer")
        return plan_of(home, layout, skeleton, is_quantized=False, memory=asked, budget_bytes=64 * MIB, there=there)

    first = planned()
    assert (first.standing, first.free_bytes, first.unpacked_slots) == (first.key_count, 5, None)
    assert first.lacking_bytes > first.key_count * first.expert_bytes
    assert (planned(3).standing, planned(3).leased, planned(3).leasable) == (first.key_count, 3, first.key_count)
    assert not first.is_running
    stopped, served = planned(there=RunStore(is_new=False)), planned(there=RunStore(is_new=False, budget_bytes=MIB))
    assert [(later.lacking_bytes, later.is_running) for later in (stopped, served)] == [(0, False), (0, True)]


def test_the_budget_is_the_daemons_else_the_callers_else_the_variables_else_half_of_what_the_dense_part_leaves(
    skeleton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, whole = hf.find_layout(skeleton), sum(tensor.nbytes for tensor in skeleton.parameters())
    experts = sum(layout.schema(None).part("param").image_bytes for _ in range(len(layout.layers) * layout.experts))
    dense = plan.dense_bytes(skeleton, layout)
    assert 0 < dense < whole
    assert whole - dense <= experts  # images are padded
    monkeypatch.setattr(plan, "available_bytes", lambda: 10 * MIB + dense)
    monkeypatch.delenv(plan.BUDGET_VARIABLE, raising=False)

    def budget(asked: str | None = None, running_bytes: int | None = None) -> int:
        return plan.budget_of(skeleton, layout, asked=asked, running_bytes=running_bytes)

    assert budget() == 5 * MIB
    monkeypatch.setenv(plan.BUDGET_VARIABLE, "7MiB")
    assert (budget(), budget("6MiB"), budget("6MiB", 4 * MIB)) == (7 * MIB, 6 * MIB, 4 * MIB)
    monkeypatch.setenv(plan.BUDGET_VARIABLE, "much")
    with pytest.raises(ConfigError, match=f"variable {plan.BUDGET_VARIABLE}: host_budget"):
        budget()
    monkeypatch.delenv(plan.BUDGET_VARIABLE)
    monkeypatch.setattr(plan, "available_bytes", lambda: 0)
    assert budget() == 0
