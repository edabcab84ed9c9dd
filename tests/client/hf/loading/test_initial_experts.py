from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch

from paramstore.errors import UnsupportedModel
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.loading import initial_experts
from paramstore_client.hf.loading.initial_experts import InitialExperts
from paramstore_client.hf.model.stripping import strip
from paramstore_client.tensors import mapped
from paramstore_testkit.training.moe_families import families, modeling_class, tiny_config
from paramstore_testkit.training.moe_models import FAMILIES, Twin

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_omni_moe"])  # whose sparse block initialises its experts
def test_equal_seeds_give_equal_weights(family: str, dtype: torch.dtype) -> None:
    Twin.of(tiny_config(family), dtype=dtype, seed=11, model_class=modeling_class(families()[family])).check_weights()


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


def test_asking_for_values_leaves_the_rest_of_the_model_alone() -> None:
    config = tiny_config("qwen3_omni_moe")
    model_class = modeling_class(families()["qwen3_omni_moe"])
    initial = InitialExperts(modeling.on_meta(model_class, copy.deepcopy(config)))
    with initial.building():
        model = modeling.build(model_class, config)
    initial.settle(model)
    strip(model)
    for parameter in model.parameters():
        parameter.data.fill_(3.0)
    initial.values((0, 0))
    assert all((parameter == 3.0).all() for parameter in model.parameters())


def test_one_layer_of_experts_has_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    peaks: list[int] = []

    def counted(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        made = mapped(shape, dtype)
        alive.append(weakref.ref(made))
        peaks.append(sum(one() is not None for one in alive))
        return made

    monkeypatch.setattr(initial_experts, "mapped", counted)
    initial = InitialExperts(modeling.on_meta(mixtral(), tiny_config("mixtral")))
    built(initial)
    for layer in (0, 1):
        initial.values((layer, 0))
    assert len(alive) > 4, "two layers were given memory, twice"
    assert max(peaks) == 2, "of a layer's two tensors"


INITIALISED_OTHERWISE = "save_pretrained the unmodified model"


@pytest.mark.parametrize("part", ["none", "one tensor", "all experts from the model"])
def test_experts_that_are_initialised_in_another_way_are_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def initialise(self: Any, module: torch.nn.Module) -> None:
        if part == "one tensor" and type(module).__name__ == "MixtralExperts":
            module.gate_up_proj.normal_()
        if part == "all experts from the model" and type(module).__name__ == "MixtralModel":
            for layer in module.layers:
                layer.mlp.experts.gate_up_proj.normal_()
                layer.mlp.experts.down_proj.normal_()

    monkeypatch.setattr(mixtral().__mro__[1], "_init_weights", initialise)
    with pytest.raises(UnsupportedModel, match=rf"layers\.0\.mlp\.experts\..*_proj.*{INITIALISED_OTHERWISE}"):
        initial_of("mixtral")


def test_second_initialisation_that_finds_no_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    base = mixtral().__mro__[1]
    original = base._init_weights

    def twice(self: Any, module: torch.nn.Module) -> None:
        original(self, module)
        if type(module).__name__ == "MixtralModel":
            module.layers[1].mlp.experts.down_proj.mul_(0.5)

    monkeypatch.setattr(base, "_init_weights", twice)
    with pytest.raises(UnsupportedModel, match=rf"layers\.1\.mlp\.experts\.down_proj.*{INITIALISED_OTHERWISE}"):
        initial_of("mixtral")


def test_experts_of_which_some_are_left_as_they_were_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_alone(self: Any, module: torch.nn.Module) -> None:
        if type(module).__name__ == "MixtralExperts":
            module.gate_up_proj.normal_()
            module.down_proj[0].normal_()

    monkeypatch.setattr(mixtral().__mro__[1], "_init_weights", first_alone)
    initial = initial_of("mixtral")
    with pytest.raises(UnsupportedModel, match=rf"down_proj.*{INITIALISED_OTHERWISE}"):
        initial.values((0, 0))


def mixtral() -> Any:
    return modeling.transformers().MixtralForCausalLM


def initial_of(family: str) -> InitialExperts:
    initial = InitialExperts(modeling.on_meta(mixtral(), tiny_config(family)))
    built(initial)
    return initial


def built(initial: InitialExperts) -> Any:
    torch.manual_seed(0)
    with initial.building():
        model = modeling.build(mixtral(), tiny_config("mixtral"), experts_implementation="eager", dtype=torch.float32)
    initial.settle(model)
    strip(model)
    return model
