"""One order of blocks tells FSDP2 which dense slices come next, and agrees with the order in which experts are fetched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from paramstore.core.schema import Schema
from paramstore.errors import ConfigError
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.nn import ExpertSchedule, StoredExperts
from paramstore_client.training.prefetch_plan import plan_prefetch

WIDTH, EXPERTS = 8, 4
# ruff: noqa: N803, N806 - T tokens, D model


class Block(nn.Module):
    """A dense layer, and stored experts where a namespace is given."""

    def __init__(self, namespace: MemoryNamespace | None, layer: int, schedule: ExpertSchedule) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = None if namespace is None else StoredExperts(namespace, layer, group=schedule)

    def forward(self, x_TD: Tensor) -> Tensor:
        x_TD = self.dense(x_TD)
        if self.experts is None:
            return x_TD
        ids_TK = torch.arange(len(x_TD)).remainder(EXPERTS).view(-1, 1)
        return x_TD + self.experts(x_TD, ids_TK, torch.ones(len(x_TD), 1))


class Model(nn.Module):
    """`order`: per block its stored layer, None for a dense one."""

    def __init__(self, namespace: MemoryNamespace, order: list[int | None]) -> None:
        super().__init__()
        schedule = ExpertSchedule()
        self.layers = nn.ModuleList(Block(None if layer is None else namespace, layer or 0, schedule) for layer in order)

    def forward(self, x_TD: Tensor) -> Tensor:
        for layer in self.layers:
            x_TD = layer(x_TD)
        return x_TD


@pytest.fixture
def namespace() -> MemoryNamespace:
    schema = Schema.adamw({"gate_up": (2 * WIDTH, WIDTH), "down": (WIDTH, WIDTH)}, param_dtype="float32")
    made = MemoryNamespace(schema, layers=3, experts=EXPERTS, lease_slots=EXPERTS)
    made.initialize(lambda _: {"gate_up": torch.randn(2 * WIDTH, WIDTH), "down": torch.randn(WIDTH, WIDTH)})
    return made


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[object]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_blocks_are_the_modules_of_the_list_with_the_layers_in_them(namespace: MemoryNamespace) -> None:
    plan = plan_prefetch(Model(namespace, [None, 0, 1, None, 2]))
    assert plan.blocks == ("layers.0", "layers.1", "layers.2", "layers.3", "layers.4")
    assert plan.layers == ((), (0,), (1,), (), (2,))
    assert plan.dense_ahead == 0  # nothing is sharded


def test_a_model_without_stored_experts_has_no_order(namespace: MemoryNamespace) -> None:
    with pytest.raises(ConfigError, match="no stored experts"):
        plan_prefetch(Model(namespace, [None, None]))


def test_blocks_in_another_order_than_the_layers_are_refused(namespace: MemoryNamespace) -> None:
    with pytest.raises(ConfigError, match=r"\[1, 0\]"):
        plan_prefetch(Model(namespace, [1, 0]))
    with pytest.raises(ConfigError, match="-1"):
        plan_prefetch(Model(namespace, [0, 1]), dense_ahead=-1)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [1, 2])
def test_fsdp_gathers_the_next_blocks_ahead_both_ways(namespace: MemoryNamespace, mesh: object, ahead: int) -> None:
    torch.manual_seed(3)
    plain = Model(namespace, [0, None, 1, 2])
    expected = plain(torch.ones(6, WIDTH)).detach()
    model = Model(namespace, [0, None, 1, 2])
    model.load_state_dict(plain.state_dict())
    for block in model.layers:
        fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)  # type: ignore[arg-type]
    plan = plan_prefetch(model, dense_ahead=ahead)
    assert (plan.layers, plan.dense_ahead) == (((0,), (), (1,), (2,)), ahead)
    x = torch.ones(6, WIDTH)
    model(x).sum().backward()  # the first pass builds FSDP's own order
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        y = model(x)
        y.sum().backward()
    assert torch.equal(y.detach(), expected)
    names = [event.name for event in profiled.events() if event.name.startswith("FSDP::") and "prefetch for" in event.name]
    forward = [name.rsplit(" ", 1)[1] for name in names if "forward" in name]
    backward = [name.rsplit(" ", 1)[1] for name in names if "backward" in name]
    assert forward == [name for index in range(4) for name in plan.blocks[index + 1 : index + 1 + ahead]]
    assert backward == [name for index in (3, 2, 1, 0) for name in reversed(plan.blocks[max(0, index - ahead) : index])]
