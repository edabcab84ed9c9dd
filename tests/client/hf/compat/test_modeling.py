from __future__ import annotations

from typing import Any

import pytest
import torch

from paramstore.errors import ConfigError, UnsupportedModel
from paramstore_client.hf.compat import modeling
from paramstore_testkit.training.moe_families import tiny_config

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
