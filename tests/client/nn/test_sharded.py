"""Weights that are spread over ranks are hidden from what takes a parameter for one that all ranks have alike."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paramstore.errors import ConfigError
from paramstore_client.nn.sharded import DDP_IGNORES, ShardedModule, leave_out_of_ddp, sharded_modules


class Part(ShardedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(2, 2).weight.detach())

    def norm_of(self, gradient: Tensor | None) -> float:
        return 0.0


def test_ddp_and_fully_shard_collect_nothing_and_an_optimizer_the_weight() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Part())
    assert [name for module in model.modules() for name, _ in module.named_parameters(recurse=False)] == ["weight", "bias"]
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.weight"]
    assert [name for name, _ in model[1].named_buffers("x", recurse=False)] == ["x.weight"]
    assert sharded_modules(model) == [model[1]]


def test_ddp_s_names_are_those_of_the_module_it_wraps_beside_what_was_there() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Part()))
    setattr(model, DDP_IGNORES, ["0.bias"])
    for _ in range(2):
        leave_out_of_ddp(model)
    assert getattr(model, DDP_IGNORES) == ["0.bias", "1.0.weight"]
    managed = list(DistributedDataParallel._get_data_parallel_params(model))  # those that its mixed precision casts
    assert [id(parameter) for parameter in managed] == [id(parameter) for parameter in model[0].parameters()]
    alone = Part()
    leave_out_of_ddp(alone)
    assert getattr(alone, DDP_IGNORES) == ["weight"]


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="a torch module"):
        leave_out_of_ddp([])  # type: ignore[arg-type]
