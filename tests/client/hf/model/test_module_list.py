"""Models with one module per expert compute what they computed before, with one expert in memory at a time."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

from paramstore.core.key import ExpertKey
from paramstore.core.trace import TraceEventKind
from paramstore.errors import UnsupportedModel
from paramstore_client.hf import find_layout
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model import module_list
from paramstore_client.hf.model.binding import find_experts
from paramstore_client.hf.model.recording import Recording
from paramstore_testkit.training.moe_families import EXPERTS
from paramstore_testkit.training.moe_models import Twin, tokens

A, U = TraceEventKind.ACQUIRE, TraceEventKind.PUSH
SWITCH: dict[str, Any] = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_sparse_encoder_layers": 1, "num_decoder_layers": 2,
    "num_sparse_decoder_layers": 1, "num_heads": 4, "num_experts": EXPERTS, "vocab_size": 64, "expert_capacity": 64,
    "router_jitter_noise": 0.0, "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
NLLB: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_experts": EXPERTS, "vocab_size": 64, "expert_capacity": 64,
    "encoder_sparse_step": 2, "decoder_sparse_step": 2, "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "moe_token_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "decoder_start_token_id": 2, "scale_embedding": True,
}  # fmt: skip


def config_of(family: str, **changes: Any) -> Any:
    options = {"switch_transformers": SWITCH, "nllb-moe": NLLB}[family]
    return modeling.transformers().AutoConfig.for_model(family, **{**options, **changes})


def twin_of(family: str, *, lease_slots: int = 2, is_trained: bool = True) -> Twin:
    seq2seq = modeling.transformers().AutoModelForSeq2SeqLM
    return Twin.of(config_of(family), lease_slots=lease_slots, model_class=seq2seq, is_trained=is_trained)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["switch_transformers", "nllb-moe"])
def test_stored_model_equals_the_unmodified_one(family: str) -> None:
    twin = twin_of(family)
    twin.check_weights()
    assert not [name for name, _ in twin.stored.named_parameters() if ".expert_" in name]
    losses = []
    for model in (twin.stock, twin.stored):
        model.train()
        torch.manual_seed(3)
        output = model(input_ids=tokens(), labels=tokens(seed=2))
        output.loss.backward()
        losses.append(output)
    assert torch.equal(losses[0].logits, losses[1].logits)
    twin.check_gradients()
    assert twin.namespace.pending
    assert twin.namespace.leased_keys_max == 1
    assert not twin.namespace.leased


@pytest.mark.slow
@pytest.mark.parametrize("family", ["switch_transformers", "nllb-moe"])
def test_a_recording_has_the_rows_that_each_expert_of_the_unmodified_model_computes(family: str) -> None:
    twin, rows = twin_of(family), Counter[ExpertKey]()

    def count(key: ExpertKey, _: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        rows[key] += inputs[0].shape[:-1].numel()

    for layer, expert in twin.namespace.space:
        path = f"{twin.layout.modules[layer]}.expert_{expert}"
        twin.stock.get_submodule(path).register_forward_pre_hook(partial(count, (layer, expert)))
    twin.stock(input_ids=tokens(), labels=tokens(seed=2))
    stored = find_experts(twin.stored)
    assert stored is not None
    with Recording(stored, twin.namespace.schema, applies=lambda: 0, file=None, name="m", how="") as recording:
        twin.stored(input_ids=tokens(), labels=tokens(seed=2)).loss.backward()
    events = recording.recorded().events
    assert [(event.kind, event.layer) for event in events] == [(A, 0), (A, 1), (A, 1), (U, 1), (A, 0), (U, 0)]
    for pass_ in (events[:2], (events[2], events[4])):
        found = {(event.layer, expert): count for event in pass_ for expert, count in zip(event.experts, event.tokens, strict=True)}
        assert found == rows
    assert [event.experts for event in (events[3], events[5])] == [event.experts for event in (events[2], events[4])]


@pytest.mark.slow
def test_threads_that_compute_with_one_expert_have_weights_of_their_own() -> None:
    twin, both = twin_of("switch_transformers"), threading.Barrier(2)
    container = twin.stored.get_submodule(twin.layout.modules[0])
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))

    def weights(expert: int, _: int) -> Any:
        return twin.expert_values((0, expert))

    views = [module_list.ContainerView(container, partial(weights, expert), Counter()) for expert in (1, 2)]
    with torch.no_grad():
        expected = [view["expert_0"](x) for view in views]
    made = dict[int, torch.Tensor]()

    def meet(*_: Any) -> None:
        both.wait(30)

    container.get_submodule("expert_0.wo").register_forward_pre_hook(meet)

    def run(index: int) -> None:
        with torch.no_grad():
            made[index] = views[index]["expert_0"](x)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(torch.equal(made[index], expected[index]) for index in range(2))


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["switch_transformers", "nllb-moe"])
@pytest.mark.parametrize("lease_slots", [1, 2])
def test_threads_generate_with_one_model(family: str, lease_slots: int) -> None:
    twin = twin_of(family, lease_slots=lease_slots, is_trained=False)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    prompts = [tokens(seed=seed)[:1] for seed in range(3)]
    expected = [twin.stock.eval().generate(prompt, **options) for prompt in prompts]
    stored, made = twin.stored.eval(), dict[int, torch.Tensor]()

    def run(index: int) -> None:
        for _ in range(3):
            made[index] = stored.generate(prompts[index], **options)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(made[index], expected[index]) for index in range(3))


@pytest.mark.slow
def test_experts_stand_on_meta_between_calls() -> None:
    twin = twin_of("switch_transformers")
    with torch.no_grad():
        twin.stored(input_ids=tokens(), decoder_input_ids=tokens())
    for path in twin.layout.modules.values():
        fields = module_list.fields_of(twin.stored.get_submodule(path))
        assert [field.device.type for field in fields.values()] == ["meta"] * len(fields)


@pytest.mark.slow
def test_layers_of_encoder_and_decoder_have_numbers_of_their_own() -> None:
    layout = twin_of("switch_transformers").layout
    assert layout.modules == {
        0: "encoder.block.1.layer.1.mlp.experts",
        1: "decoder.block.1.layer.2.mlp.experts",
    }
    assert [tensor.name for tensor in layout.tensors] == ["wi.weight", "wo.weight"]


@pytest.mark.slow
def test_encoder_and_decoder_experts_of_different_widths_are_refused() -> None:
    config = config_of("nllb-moe", decoder_ffn_dim=40)
    model = modeling.on_meta(modeling.transformers().NllbMoeForConditionalGeneration, config)
    with pytest.raises(UnsupportedModel, match="different shapes"):
        find_layout(model)
