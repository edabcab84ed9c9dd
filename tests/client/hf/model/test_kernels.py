from __future__ import annotations

from typing import Any

import pytest
import torch

from paramstore.errors import ConfigError
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.kernels import ExpertIndex, ModuleView, choose_kernel, make_kernel
from paramstore_client.hf.model.layout import experts_modules, stacked_tensors
from paramstore_testkit.training.moe_families import tiny_config
from paramstore_testkit.training.moe_models import FAMILIES

pytestmark = pytest.mark.slow


def model_of(family: str) -> Any:
    config = tiny_config(family)
    return modeling.on_meta(modeling.concrete_class(modeling.transformers().AutoModelForCausalLM, config), config)


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_loops_take_one_expert_after_the_other(family: str) -> None:
    module = next(iter(experts_modules(model_of(family)).values()))
    fields = tuple(stacked_tensors(module))
    assert make_kernel("eager", module, fields).is_streamed
    assert not make_kernel("grouped_mm", module, fields).is_streamed


def test_loop_that_uses_a_field_as_a_whole_is_not_streamed() -> None:
    class Whole(torch.nn.Module):
        def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            return torch.einsum("th,eih->tei", hidden_states, self.gate_up_proj) + self.down_proj[0]

    original = Whole.forward
    Whole.forward = lambda self, *args: original(self, *args)  # type: ignore[method-assign]
    Whole.forward.__wrapped__ = original  # type: ignore[attr-defined]
    assert not make_kernel("eager", Whole(), ("gate_up_proj", "down_proj")).is_streamed


def test_auto_is_what_the_model_would_run() -> None:
    model = model_of("mixtral")
    assert choose_kernel(model, "auto", None) == model.get_correct_experts_implementation(None)
    assert choose_kernel(model, "auto", "eager") == "eager"
    assert choose_kernel(model, "auto", "batched_mm") == "batched_mm"
    assert choose_kernel(model, "grouped_mm", "eager") == "grouped_mm"


def test_kernels_that_need_the_whole_module_are_refused() -> None:
    with pytest.raises(ConfigError, match="sonicmoe"):
        choose_kernel(model_of("mixtral"), "auto", "sonicmoe")
    with pytest.raises(ConfigError, match="experts_kernel='fast'"):
        choose_kernel(model_of("mixtral"), "fast", None)


def test_view_has_the_weights_and_the_rest_of_the_module() -> None:
    module = torch.nn.Linear(2, 3)
    view = ModuleView(module, {"gate_up_proj": "here"}, count=5)
    assert (view.num_experts, view.gate_up_proj, view.in_features) == (5, "here", 2)


def test_index_takes_numbers_and_scalar_tensors() -> None:
    tensors = [torch.zeros(1), torch.ones(1)]
    index = ExpertIndex("w", lambda position: {"w": tensors[position]})
    assert index[torch.tensor(1)] is tensors[1]
    assert index[0] is tensors[0]
