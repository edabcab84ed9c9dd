"""A rank that generates with a served model whose experts are spread over the job's ranks.

`-m paramstore_testkit.training.parallel_generate ADDRESS FILE RANK WORLD_SIZE CHECKPOINT`: FILE is where the ranks meet. It writes
one line of JSON: its tokens, and how many experts were loaded into its slots.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import paramstore_client as ps
from paramstore_testkit.training.moe_models import tokens

NEW_TOKENS = (4, 9, 6, 1)
"""How many tokens each rank generates: those that are done go on with the others."""
BUFFER_EXPERTS = 3


def prompt(rank: int) -> torch.Tensor:
    return tokens(seed=10 + rank, batch=1, length=3 + 4 * rank)


def main() -> None:
    address, meeting, rank_text, world_size, checkpoint = sys.argv[1:]
    rank = int(rank_text)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=int(world_size))
    with ps.connect(address) as store:
        model = ps.hf.from_pretrained(
            AutoModelForCausalLM, checkpoint, store=store, mode="infer", name="served", expert_memory=BUFFER_EXPERTS,
            expert_parallel=ps.moe.ExpertParallel(timeout_s=60.0),
        )  # fmt: skip
        generated = model.generate(
            prompt(rank), max_new_tokens=NEW_TOKENS[rank], do_sample=False, eos_token_id=-1, pad_token_id=0, synced_gpus=True
        )
        counts = ps.hf.counts(model)
        dist.barrier()
    sys.stdout.write(json.dumps({"tokens": generated.tolist(), "loads": counts.loads}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
