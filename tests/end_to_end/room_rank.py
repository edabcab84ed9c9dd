"""One rank of a job, for torchrun: `room_rank.py WRAP SEED SCARCE AMPLE`. WRAP: "ddp" or "fsdp2".

It trains one model on two daemons. SCARCE has upload memory for less than half of the experts' gradients, where updates begin in
backward; AMPLE has no limit, and updates begin at the step. The losses are equal bit for bit.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import paramstore_client as ps
from paramstore_client.nn import StoredExperts
from paramstore_client.training import bind, launched

LAYERS, EXPERTS, HIDDEN, INNER, STEPS = 12, 8, 64, 64, 3
FIELDS = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}


def initial_value(key: tuple[int, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * key[0] + key[1])
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in FIELDS.items()}


class Model(nn.Module):
    """Residual layers of router and experts."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.routers = nn.ModuleList(nn.Linear(HIDDEN, EXPERTS) for _ in layers)
        self.experts = nn.ModuleList(layers)

    def forward(self, x_TD: Tensor) -> Tensor:  # noqa: N803
        for router, experts in zip(self.routers, self.experts, strict=True):
            gates, ids = router(x_TD).softmax(-1).topk(2)
            x_TD = functional.layer_norm(x_TD + experts(x_TD, ids, gates), (HIDDEN,))  # noqa: N806
        return x_TD.square().mean() + x_TD[:, 0].mean()


def batch(number: int, seed: int) -> Tensor:
    """Few tokens or many: some experts, and on some ranks whole layers, get none."""
    generator = torch.Generator().manual_seed(1000 * seed + number)
    count = int(torch.randint(0, 12, (), generator=generator))
    return torch.randn(max(1, count), HIDDEN, generator=generator)


def wrapped(model: Model, wrap: str) -> nn.Module:
    if wrap == "ddp":
        return DistributedDataParallel(model)
    for router in model.routers:
        fully_shard(router)
    fully_shard(model)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(store: ps.Store, wrap: str, seed: int, *, is_early: bool) -> list[str]:
    schema = ps.adamw_schema(FIELDS, param_dtype="float32")
    namespace = store.create_namespace("moe", schema, layers=LAYERS, experts=EXPERTS, **launched())
    namespace.initialize(initial_value)
    namespace.commit(0).wait()
    stored = Model([StoredExperts(namespace, layer) for layer in range(LAYERS)])
    experts = bind(stored, namespace)
    model = wrapped(stored, wrap)
    optimizer, losses = optimizer_of(model), []
    experts.attach(optimizer, updates_in_backward=is_early)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step * dist.get_world_size() + dist.get_rank(), seed))
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    experts.commit(1).wait()
    all_bytes = len(namespace.space) * schema.gradient_bytes
    assert namespace._area.size_bytes < all_bytes / 2 or not is_early, f"{namespace._area.size_bytes} of {all_bytes}"
    return losses


def main() -> None:
    wrap, seed, addresses = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses = []
    try:
        for address, is_early in zip(addresses, (True, False), strict=True):
            with ps.connect(address) as store:
                losses.append(train(store, wrap, seed, is_early=is_early))
                dist.barrier()
    finally:
        dist.destroy_process_group()
    assert losses[0] == losses[1], f"{losses[0]} instead of {losses[1]}"


if __name__ == "__main__":
    main()
