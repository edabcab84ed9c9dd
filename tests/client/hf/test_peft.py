"""PEFT's adapters around a model with stored experts train as around the unmodified one, and leave the experts alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import paramstore as ps
from paramstore_client.hf.compat import modeling
from paramstore_testkit.training.moe_families import tiny_config
from paramstore_testkit.training.moe_models import tokens

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    *map(pytest.mark.filterwarnings, ("ignore::UserWarning:peft", "ignore::DeprecationWarning", "ignore::FutureWarning")),
]

TARGETS = ["q_proj", "v_proj"]


def add_adapter(model: Any) -> Any:
    try:
        model.add_adapter(peft.LoraConfig(target_modules=TARGETS))
    except ValueError as error:  # a release of transformers may ask for a later one of peft than there is
        if "version of PEFT" in str(error):
            pytest.skip(str(error))
        raise
    return model


def wrapping(make_config: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda model: peft.get_peft_model(model, make_config())


WAYS: dict[str, Callable[[Any], Any]] = {
    "lora": wrapping(lambda: peft.LoraConfig(target_modules=TARGETS, task_type="CAUSAL_LM")),
    "lora and more": wrapping(lambda: peft.LoraConfig(target_modules=TARGETS, bias="all", modules_to_save=["lm_head"])),
    "ia3": wrapping(lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")),
    "layer norms": wrapping(lambda: peft.LNTuningConfig(target_modules=["input_layernorm"], task_type="CAUSAL_LM")),
    "prompt": wrapping(lambda: peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")),
    "add_adapter": add_adapter,
}


def train(model: Any, attach: Callable[[torch.optim.Optimizer], object]) -> list[float]:
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    attach(optimizer)
    losses = []
    for step in range(3):
        ids = tokens(seed=step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make(way: str, store: ps.Store | None = None) -> Any:
    torch.manual_seed(0)
    auto, config = modeling.transformers().AutoModelForCausalLM, tiny_config("qwen3_moe")
    if store is None:
        model = auto.from_config(config)
    else:
        model = ps.hf.from_config(auto, config, store=store, name=way.replace(" ", "-"))
    torch.manual_seed(1)
    return WAYS[way](model)


@pytest.mark.parametrize("way", WAYS)
def test_attach_leaves_the_experts_of_a_peft_model_alone(store: ps.Store, way: str) -> None:
    model = make(way, store)
    namespace = ps.hf.namespace(model)
    before = {key: namespace.read(key)["master/down_proj"] for key in namespace.space}
    assert train(model, lambda optimizer: ps.hf.experts(model).attach(optimizer)) == train(make(way), lambda optimizer: None)
    assert namespace.pending_count == 0
    assert ps.hf.experts(model).commit(1).wait()["records"] == 0
    assert all(torch.equal(namespace.read(key)["master/down_proj"], value) for key, value in before.items())
    train(model, lambda optimizer: ps.hf.experts(model).attach(optimizer, experts=True))
    ps.hf.experts(model).settle()
    assert not any(torch.equal(namespace.read(key)["master/down_proj"], value) for key, value in before.items())
    namespace.close()


def test_a_peft_model_whose_experts_are_forgotten_warns(store: ps.Store) -> None:
    model = make("lora", store)
    with pytest.warns(UserWarning, match="experts=False"):
        train(model, lambda optimizer: None)
    ps.hf.namespace(model).close()
