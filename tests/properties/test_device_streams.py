"""The device code waits for all that it must: it is right in every legal order of its streams, and wrong without any of its waits.

The code is that which runs on a GPU, `CudaCopier` among it; the device is simulated. `tests/gpu` runs the scenarios on a real one.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device.copier import BOUNCE_BUFFERS
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.early_router import EarlyRouter
from paramstore_client.nn import ResidentExperts, StoredExperts
from paramstore_testkit.streams.cuda import simulated_cuda
from paramstore_testkit.streams.faults import FAULTS
from paramstore_testkit.streams.layer_waits import layer_waits, most_load_waits, unmapped_late
from paramstore_testkit.streams.models import StoredModel
from paramstore_testkit.streams.scenario import (
    DEVICE,
    SCENARIOS,
    Outcome,
    Scenario,
    copy_and_close,
    live_in_tier,
    live_long,
    live_past_host,
    simulate,
)
from paramstore_testkit.streams.world import StreamWorld
from paramstore_testkit.training.moe_families import EXPERTS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SEEDS = 10
"""Seeds within which each fault reads wrong bytes."""
RUNS: list[tuple[Scenario, bool]] = [(scenario, can_register) for scenario in SCENARIOS for can_register in (True, False)]
"""Scenarios, with host memory registered and through bounce buffers."""
NO_EDGE = {"copies.DeviceCopies.note_arrivals: copy.ready.is_reached()"}
"""What decides which bytes the tier says are there, and orders no access."""
MODELS = [("qwen3_moe", "grouped_mm"), ("mixtral", "batched_mm"), ("olmoe", "eager")]


def in_one_run(seed: int) -> list[str]:
    return live_long(seed) + copy_and_close(seed)


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 200), marks=pytest.mark.soak)])
def test_no_order_of_the_streams_gives_wrong_bytes_or_a_race(seeds: range) -> None:
    for seed in seeds:
        for live in (live_in_tier, live_past_host):
            assert simulate(seed, live, can_register=seed % 2 == 0) == Outcome([], []), f"seed {seed}, {live.__name__}"


@pytest.mark.parametrize("can_register", [True, False])
def test_no_race_is_seen_where_the_streams_run_as_late_as_they_may(can_register: bool) -> None:
    assert simulate(0, in_one_run, is_lazy=True, can_register=can_register) == Outcome([], [])


@pytest.mark.parametrize("fault", FAULTS)
def test_every_wait_taken_away_and_every_planted_fault_gives_wrong_bytes_within_ten_seeds(fault: str) -> None:
    with FAULTS[fault]():
        runs = (simulate(seed, scenario, can_register=can) for seed in range(SEEDS) for scenario, can in RUNS)
        assert any(outcome.wrong for outcome in runs)


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - NO_EDGE))
def test_every_missing_edge_is_a_race_in_one_run(fault: str) -> None:
    with FAULTS[fault]():
        assert any(simulate(0, in_one_run, is_lazy=True, can_register=can_register).races for can_register in (True, False))


@pytest.mark.parametrize(("family", "kernel"), MODELS)
def test_whole_model_computes_the_bits_of_the_unmodified_one_through_a_tier(family: str, kernel: str) -> None:
    assert simulate(1, StoredModel(family, kernel).compute) == Outcome([], [])


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(("family", "kernel"), [("qwen3_moe", "grouped_mm"), ("gpt_oss", "grouped_mm"), ("mixtral", "batched_mm")])
def test_layers_of_more_experts_than_slots_run_through_them_with_the_same_bits(family: str, kernel: str, slots: int) -> None:
    assert simulate(slots, StoredModel(family, kernel, slots=slots).compute, is_lazy=slots == 1) == Outcome([], [])


def test_stored_experts_wait_for_the_device_no_more_often_through_few_slots() -> None:
    x, ids, gate = torch.randn(9, 8), torch.rand(9, 6).topk(3).indices, torch.rand(9, 3)
    waits, made = list[int](), list[torch.Tensor]()
    for slots in (6, 2):
        world, ns = StreamWorld(slots), MemoryNamespace.of_swiglu(layers=1, hidden=8, inner=8, seed=1)
        with simulated_cuda(world), unmapped_late(), torch.no_grad(), DeviceTier(ns, slots, device=DEVICE) as tier:
            given = [tensor.to(DEVICE) for tensor in (x, ids, gate)]
            before = world.host_waits
            y = StoredExperts(tier, 0)(*given)
            waits.append(world.host_waits - before)
            made.append(y.cpu())
        assert world.races.found == []
    assert waits[0] == waits[1]
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], ResidentExperts([ns.values((0, expert)) for expert in range(6)])(x, ids, gate))


@pytest.mark.parametrize("can_register", [True, False])
@pytest.mark.parametrize("lease_slots", [64, 16, 8, 4, 3, 2, 1])
def test_loads_ahead_wait_for_nothing_and_demand_as_often_as_is_said(
    lease_slots: int, can_register: bool
) -> None:
    """Where nothing comes before somebody waits for it."""
    world = StreamWorld(0, is_lazy=True)
    ns = MemoryNamespace.of_swiglu(layers=3, experts=16, hidden=8, inner=8, lease_slots=lease_slots, seed=1)
    simulated = simulated_cuda(world, can_register=can_register)
    with simulated, unmapped_late(), torch.no_grad(), DeviceTier(ns, 48, device=DEVICE) as tier:
        tier.prefetch([(0, expert) for expert in range(16)])
        assert world.host_waits == 0
        assert len(tier.keys) == min(16, lease_slots // 2, 64 if can_register else BOUNCE_BUFFERS)
        tier.acquire([(1, expert) for expert in range(16)]).release()
        if can_register:
            assert world.host_waits <= most_load_waits(16, lease_slots)
            assert world.host_waits or lease_slots >= 32, "the bound is one that is reached"
        for all_is_done in (False, True):
            if all_is_done:
                world.finish()
            waits = world.host_waits
            tier.prefetch([(2, expert) for expert in range(16)])
            assert world.host_waits == waits
    assert world.races.found == []


@pytest.mark.parametrize("slots", [EXPERTS, 3])
@pytest.mark.parametrize("kernel", ["grouped_mm", "batched_mm"])
def test_layer_waits_for_the_device_once(
    kernel: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A prompt and one token, with loads and guesses of experts among them, all at once or through few slots; the module's own loop
    waits for each of its experts besides."""
    world, guessed, ranked = StreamWorld(0), list[int](), EarlyRouter.ranked

    def noted(self: EarlyRouter, votes: Sequence[int]) -> list[int]:
        experts = ranked(self, votes)
        guessed.append(len(experts))
        return experts

    model = StoredModel("qwen3_moe", kernel, slots=slots, lease_slots=2 * EXPERTS)
    monkeypatch.setattr(EarlyRouter, "ranked", noted)
    with simulated_cuda(world), layer_waits(lambda: world.host_waits) as layers:
        assert model.compute(0) == []
    assert [layer.waits for layer in layers] == [1, 1, 1, 1]
    assert len(guessed) == 2, "one layer follows another, twice"
    assert all(guessed)


@pytest.mark.parametrize("lease_slots", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("slots", [EXPERTS, 3])
@pytest.mark.parametrize("kernel", ["grouped_mm", "batched_mm"])
def test_layer_waits_once_more_for_each_half_of_the_lease_slots_that_it_lacks_beyond_the_first(
    kernel: str, slots: int, lease_slots: int
) -> None:  # fmt: skip
    world = StreamWorld(0, is_lazy=True)
    model = StoredModel("qwen3_moe", kernel, slots=slots, lease_slots=lease_slots)
    with simulated_cuda(world), layer_waits(lambda: world.host_waits) as layers:
        assert model.compute(0) == []
    assert len(layers) == 4
    for layer in layers:
        assert 1 <= layer.waits <= 1 + most_load_waits(layer.lacked, lease_slots), layers
    assert lease_slots == EXPERTS or max(layer.waits for layer in layers) > 1, "and does so"


@pytest.mark.soak
@pytest.mark.parametrize("slots", [EXPERTS, 3])
@pytest.mark.parametrize("kernel", modeling.KERNELS)
def test_whole_models_do_so_in_many_orders_of_the_streams(kernel: str, slots: int) -> None:
    for family, _ in MODELS:
        model = StoredModel(family, kernel, slots=slots)
        for seed in range(35):
            assert simulate(seed, model.compute, can_register=seed % 2 == 0) == Outcome([], []), f"{family}, seed {seed}"


@pytest.mark.parametrize("kernel", modeling.KERNELS)
def test_model_whose_kernels_do_not_wait_for_their_experts_computes_something_else(kernel: str) -> None:
    model = StoredModel("qwen3_moe", kernel)
    with FAULTS["slots.DeviceSlots.begin_use: copy.ready.wait_on_stream()"]():
        outcome = simulate(0, model.compute, is_lazy=True)
    assert outcome.wrong == [f"qwen3_moe, {kernel}: prompt", f"qwen3_moe, {kernel}: one token"]
    assert outcome.races


@pytest.mark.parametrize("kernel", ["grouped_mm", "batched_mm"])
def test_model_whose_slots_are_overwritten_too_early_computes_something_else(kernel: str) -> None:
    model = StoredModel("qwen3_moe", kernel, slots=1)
    with FAULTS["what passes by is overwritten without a look at its kernel"]():
        outcome = simulate(0, model.compute, is_lazy=True)
    assert outcome.wrong
    assert outcome.races
