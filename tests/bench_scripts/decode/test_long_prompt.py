"""The prompt that hides a ring's loads is the first that a layer computes long enough, and the longest where none is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from paramstore_bench.decode import long_prompt
from paramstore_bench.decode.long_prompt import FIRST, LONGEST, find_long_prompt, layer_seconds

CONFIG = Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    intermediate_size=16, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
)  # fmt: skip


def models(rate: float) -> Any:
    """Ten experts a layer of 100 bytes each, read at `rate` bytes a second."""
    return SimpleNamespace(
        memory=None, slots=SimpleNamespace(experts=10), raw=SimpleNamespace(record_bytes=100), raw_rate=lambda records: rate
    )


@pytest.fixture(autouse=True)
def a_layer_computes_a_thousand_tokens_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prompt, "layer_seconds", lambda model, prompt: [prompt.numel() / 1000] * 3)


@pytest.mark.parametrize(("rate", "tokens"), [(3000.0, FIRST), (1000.0, 2048), (500.0, 4096)])
def test_the_first_length_is_found_that_takes_one_and_a_half_times_as_long_as_its_experts(rate: float, tokens: int) -> None:
    found = find_long_prompt(models(rate))
    assert (found.tokens, found.compute_s, found.load_s, found.is_enough) == (tokens, tokens / 1000, 1000 / rate, True)
    assert tokens == FIRST or tokens / 2 / 1000 < 1.5 * found.load_s, "no shorter one is enough"


def test_where_no_length_is_enough_the_longest_is_given() -> None:
    found = find_long_prompt(models(1.0))
    assert (found.tokens, found.is_enough) == (LONGEST, False)
    assert found.facts() == {"layer_compute_s": LONGEST / 1000, "layer_load_s": 1000.0}


def test_each_layer_of_a_model_is_timed_and_no_hook_is_left() -> None:
    model: Any = AutoModelForCausalLM.from_config(CONFIG)
    seconds = layer_seconds(model, torch.arange(8)[None])
    assert len(seconds) == 3
    assert min(seconds) > 0
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.model.layers)
