from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from paramstore.errors import ConfigError, UnsupportedModel
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.layer_experts import LayerExperts
from paramstore_testkit.training.moe_families import tiny_config
from paramstore_testkit.training.moe_models import Twin, tokens

pytestmark = pytest.mark.slow


def test_older_transformers_are_refused_with_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling.transformers(), "__version__", "5.6.2")
    with pytest.raises(ConfigError, match=r"transformers>=5\.7, found 5\.6\.2"):
        modeling.transformers()


@pytest.mark.parametrize("version", ["5.7.0", "5.10.0.dev0", "6.0"])
def test_newer_transformers_are_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = modeling.transformers()
    monkeypatch.setattr(package, "__version__", version)
    assert modeling.transformers() is package


def test_code_of_ones_own_is_refused() -> None:
    class Mine(torch.nn.Module):
        pass

    with pytest.raises(UnsupportedModel, match="use_experts_implementation"):
        modeling.concrete_class(Mine, None)


def test_auto_class_that_does_not_know_the_config_says_so() -> None:
    with pytest.raises(UnsupportedModel, match="MixtralConfig"):
        modeling.concrete_class(modeling.transformers().AutoModelForSeq2SeqLM, tiny_config("mixtral"))


def test_observer_of_initialisation_is_gone_afterwards() -> None:
    base = modeling.transformers().PreTrainedModel
    original = base._initialize_weights
    seen: list[str] = []

    def before(owner: Any, module: torch.nn.Module) -> None:
        seen.append(type(module).__name__)

    def build_and_fail() -> None:
        with modeling.initializing(before):
            modeling.transformers().MixtralForCausalLM(tiny_config("mixtral"))
            raise ValueError

    with pytest.raises(ValueError):
        build_and_fail()
    assert base._initialize_weights is original
    assert seen.count("MixtralExperts") >= 2


def test_an_unmodified_model_keeps_its_kernel_in_generate_where_it_is_told_to() -> None:
    """On any device but the CPU, meta among them, transformers decodes with another one."""
    config = tiny_config("qwen3_moe")
    concrete = modeling.concrete_class(modeling.transformers().AutoModelForCausalLM, config)
    config._experts_implementation = "grouped_mm"
    model = modeling.on_meta(concrete, config)
    with model._optimize_model_for_decode():
        assert model.get_experts_implementation()[""] == "batched_mm"
    with modeling.fixed_kernel(model), model._optimize_model_for_decode():
        assert model.get_experts_implementation()[""] == "grouped_mm"
    assert "_optimize_model_for_decode" not in vars(model)


def generate_as_on_a_device(model: Any) -> tuple[torch.Tensor, list[str]]:
    """(the tokens of `generate`, the experts function of each forward), where transformers takes the model for one on a device when
    it asks whether to decode with another function."""
    functions, original, described = list[str](), type(model)._optimize_model_for_decode, type(model)

    @contextmanager
    def optimized(self: Any) -> Iterator[None]:
        switching = original(self)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(described, "device", torch.device("meta"))
            switching.__enter__()
        try:
            yield
        finally:
            switching.__exit__(None, None, None)

    def note(self: Any, *_: Any) -> None:
        functions.append(self.get_experts_implementation()[""])

    with pytest.MonkeyPatch.context() as patch, model.register_forward_pre_hook(note):
        patch.setattr(described, "_optimize_model_for_decode", optimized)
        return model.generate(tokens(), max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0), functions


@pytest.mark.usefixtures("one_thread")
def test_a_model_with_stored_experts_keeps_its_kernel_in_generate() -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False, dtype=torch.bfloat16)
    stock, stored = twin.stock.eval(), twin.stored.eval()
    _, functions = generate_as_on_a_device(stock)
    assert functions == ["grouped_mm", "batched_mm", "batched_mm"], "by itself it does not"
    with modeling.fixed_kernel(stock):
        expected, functions = generate_as_on_a_device(stock)
    assert functions == ["grouped_mm"] * 3
    kernels, run = set[str](), LayerExperts.run

    def noted(self: LayerExperts, *inputs: Any) -> Any:
        kernels.add(self._kernel.name)  # type: ignore[union-attr]  # of a registry module
        return run(self, *inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerExperts, "run", noted)
        found, functions = generate_as_on_a_device(stored)
    assert functions == ["paramstore"] * 3
    assert kernels == {"grouped_mm"}
    assert torch.equal(found, expected)
