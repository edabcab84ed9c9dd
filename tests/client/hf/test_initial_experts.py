from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from paramstore.testing.moe_families import tiny_config
from paramstore.testing.moe_models import FAMILIES, Twin
from paramstore_client.hf import _compat, initial_experts
from paramstore_client.hf.initial_experts import InitialExperts
from paramstore_client.hf.stripping import stripped_class
from paramstore_client.tensors import mapped

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_seeds_give_equal_weights(family: str, dtype: torch.dtype) -> None:
    Twin.of(tiny_config(family), dtype=dtype, seed=11).check_weights()


def test_values_may_be_asked_for_again_and_in_any_order() -> None:
    twin, initial = Twin.of(tiny_config("mixtral")), initial_of("mixtral")
    for key in [(1, 3), (0, 0), (1, 3), (0, 7)]:
        for name, value in initial.values(key).items():
            assert torch.equal(value, twin.expert_values(key)[name])


def test_asking_for_values_leaves_the_random_numbers_alone() -> None:
    initial = initial_of("mixtral")
    before = torch.get_rng_state()
    initial.values((0, 0))
    initial.values((1, 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_one_layer_of_experts_has_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []

    def counted(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        made = mapped(shape, dtype)
        alive.append(made.numel())
        return made

    monkeypatch.setattr(initial_experts, "mapped", counted)
    model = built(initial := initial_of("mixtral", build=False))
    experts = [module for name, module in model.named_modules() if name.endswith("experts")]
    assert all(module.gate_up_proj.device.type == "meta" for module in experts)
    assert len(alive) == 2 * len(experts), "two tensors a layer, each made when its layer was initialised"
    initial.values((0, 0))
    first = initial._made
    initial.values((1, 0))
    assert first is not None
    assert initial._made is not None
    assert initial._made[0] == 1


def initial_of(family: str, *, build: bool = True) -> InitialExperts:
    config = tiny_config(family)
    initial = InitialExperts(_compat.on_meta(_compat.transformers().MixtralForCausalLM, copy.deepcopy(config)))
    if build:
        built(initial)
    return initial


def built(initial: InitialExperts) -> Any:
    torch.manual_seed(0)
    stripped = stripped_class(
        _compat.transformers().MixtralForCausalLM, around=initial.building, before_strip=initial.settle
    )
    return _compat.build(stripped, tiny_config("mixtral"), experts_implementation="eager", dtype=torch.float32)
