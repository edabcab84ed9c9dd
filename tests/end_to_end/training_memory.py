"""Trains a model of transformers with stored experts and prints how much of its heap the C library held for nothing, in bytes.

`training_memory.py ADDRESS`, on glibc. Experts are streamed one by one, tokens are few: what torch allocates for a step is small.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import paramstore_client as ps
from paramstore_client import hf

LAYERS, EXPERTS, HIDDEN, INNER, STEPS = 4, 16, 512, 384, 10
CONFIG = Qwen3MoeConfig(
    hidden_size=HIDDEN, moe_intermediate_size=INNER, intermediate_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=4, head_dim=64, num_experts=EXPERTS, num_experts_per_tok=4, vocab_size=100,
)  # fmt: skip


def own_bytes() -> int:
    """Memory of this process that no file and no other process has."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with ps.connect(sys.argv[1]) as store:
        model = hf.from_config(AutoModelForCausalLM, CONFIG, store=store, experts_kernel="eager")
        experts, optimizer = hf.experts(model), torch.optim.AdamW(model.parameters(), lr=1e-3)
        experts.attach(optimizer)
        for _ in range(STEPS):
            tokens = torch.randint(CONFIG.vocab_size, (2, 16))
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        experts.settle()
        gc.collect()
        before = own_bytes()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        sys.stdout.write(f"{before - own_bytes()}\n")


if __name__ == "__main__":
    main()
