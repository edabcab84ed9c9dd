"""One rank of a job that trains a model of transformers under FSDP2's mixed precision, for torchrun: its argument is the address.

Every rank trains the unmodified model beside the stored one, under the same policy: what differs ends it with an error.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import paramstore as ps
from paramstore_client.hf.compat import modeling
from paramstore_testkit.training.moe_families import tiny_config
from paramstore_testkit.training.moe_models import tokens

STEPS = 3
TOLERANCES = {torch.float32: 0.0, torch.bfloat16: 2.0**-9}
"""The losses' relative ones, by the dtype of the reduction: in bfloat16 the unmodified model rounds the ranks' sum of gradients,
the stored experts' sum stays in fp32."""


def train(model: Any, policy: MixedPrecisionPolicy, *, is_stored: bool) -> list[float]:
    """The losses of this rank's batches."""
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1, fused=True)
    if is_stored:
        ps.hf.experts(model).attach(optimizer)
    losses = []
    for step in range(STEPS):
        ids = tokens(seed=step * dist.get_world_size() + dist.get_rank())
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make(store: ps.Store | None, name: str = "") -> nn.Module:
    """The model, equal on all ranks: with its experts in namespace `name` of `store`, or unmodified."""
    torch.manual_seed(0)
    auto, config = modeling.transformers().AutoModelForCausalLM, tiny_config("qwen3_moe")
    if store is None:
        model: nn.Module = auto.from_config(config)
    else:
        model = ps.hf.from_config(auto, config, store=store, name=name)
    return model


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        with ps.connect(sys.argv[1]) as store:
            for dtype, rtol in TOLERANCES.items():
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)
                expected = train(make(None), policy, is_stored=False)
                seen = train(make(store, f"reduced-{dtype.itemsize}"), policy, is_stored=True)
                torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=rtol, atol=0.0)
            dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
