"""The peer computes what the model in memory does, with the asked share of its layers on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from paramstore_bench.decode.offload_peer import drop_pages, offloaded

CONFIG = Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    intermediate_size=16, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
)  # fmt: skip


@pytest.mark.slow
@torch.no_grad()
def test_half_of_the_layers_come_from_disk_and_the_logits_are_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    memory = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    memory.save_pretrained(tmp_path / "checkpoint")
    (folder := tmp_path / "offloaded").mkdir()
    peer = offloaded(tmp_path / "checkpoint", folder, layers=4, share=0.5)
    on_disk = {name.split(".")[2] for name, parameter in peer.named_parameters() if parameter.device.type == "meta"}
    assert {"2", "3"} <= on_disk
    assert {name.split(".")[2] for name in os.listdir(folder)} == {"2", "3"}, "what lies there is of the last two layers"
    tokens = torch.arange(8)[None]
    for _ in range(2):
        drop_pages([folder, tmp_path / "checkpoint"])
        assert peer(input_ids=tokens).logits.equal(memory(input_ids=tokens).logits)
