"""What the experts cannot follow is refused when it is attached, with the reason."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from paramstore.core.optimizers import SGD, Adagrad, AdamW
from paramstore.core.schema import Schema
from paramstore.errors import ConfigError
from paramstore_client.training.options import MainGroup, options_class, trains_adapters, unwrapped

SCHEMA = Schema.adamw({"w": (2, 2)})
SENTINEL = torch.zeros(())


def weights(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def main_group(optimizer: torch.optim.Optimizer, **arguments: Any) -> MainGroup:
    return MainGroup(optimizer, SCHEMA, **{"sentinel": SENTINEL, "index": None, "weight_decay": None, **arguments})


def test_the_options_are_those_of_the_group_now() -> None:
    optimizer = torch.optim.AdamW(weights(4), lr=0.1, betas=(0.5, 0.6), eps=1e-4, weight_decay=0.3)
    main = main_group(optimizer)
    assert main.options() == AdamW(0.1, (0.5, 0.6), 1e-4, 0.3)
    optimizer.param_groups[0]["lr"] = 0.2
    assert main.options().lr == 0.2
    assert main_group(optimizer, weight_decay=0.0).options().weight_decay == 0.0


def test_the_largest_group_is_the_main_one() -> None:
    groups = [{"params": weights(2), "weight_decay": 0.0}, {"params": weights(3, 3), "weight_decay": 0.5}]
    assert main_group(torch.optim.AdamW(groups)).options().weight_decay == 0.5


def test_a_group_of_the_sentinel_alone_may_differ() -> None:
    sentinel = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.AdamW([{"params": [sentinel], "lr": 7.0}, {"params": weights(1)}], lr=0.1)
    assert main_group(optimizer, sentinel=sentinel).options().lr == 0.1


@pytest.mark.parametrize("trains_outside", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("peft", ["nothing trained", "adapters inside", "prompts around", "prompts around another"])
def test_adapters_are_known_by_a_sign_of_peft_alone(
    monkeypatch: pytest.MonkeyPatch, peft: str, is_frozen: bool, trains_outside: bool
) -> None:
    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(PeftModel=FakePeftModel))  # type: ignore[arg-type]
    model = nn.Linear(2, 2).requires_grad_(not is_frozen)
    sentinel = nn.Parameter(torch.zeros(()))
    model.register_parameter("sentinel", sentinel)
    if peft == "adapters inside":
        model.peft_config = {}
    owner = FakePeftModel(nn.Linear(2, 2) if peft == "prompts around another" else model)
    outside = [owner.prompts] if peft in ("prompts around", "prompts around another") else weights(3)
    optimizer = torch.optim.AdamW([*model.parameters(), *(outside if trains_outside else [])])
    expected = peft == "adapters inside" or (peft == "prompts around" and is_frozen and trains_outside)
    assert trains_adapters(model, optimizer, sentinel=sentinel) is expected


class FakePeftModel(nn.Module):
    """Trains prompts around a model, which it does not mark."""

    def __init__(self, base_model: nn.Module) -> None:
        super().__init__()
        self.base_model = base_model
        self.prompts = nn.Parameter(torch.zeros(3))


class OwnAdamW(torch.optim.AdamW):
    """May compute anything."""


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Adam, OwnAdamW])
def test_another_optimizer_is_refused(make: Any) -> None:
    name = re.escape(f"{make.__module__}.{make.__qualname__}")
    with pytest.raises(ConfigError, match=rf"'adamw' cannot follow {name}; served: torch.optim.AdamW \(schema 'adamw'\), torch"):
        main_group(make(weights(1)))


def test_an_optimizer_of_a_served_name_is_refused_by_its_module() -> None:
    theirs = type("AdamW", (torch.optim.Optimizer,), {"__module__": "bitsandbytes.optim.adamw"})
    with pytest.raises(ConfigError, match=r"cannot follow bitsandbytes\.optim\.adamw\.AdamW; served: torch\.optim\.AdamW"):
        main_group(theirs(weights(1), {}))


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.filterwarnings("ignore:FSDP", "ignore:.*FullyShardedDataParallel")
def test_parameters_of_fsdp1_are_refused_with_the_way_on(use_orig_params: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    finally:
        dist.destroy_process_group()
    with pytest.raises(ConfigError, match=r"FSDP1\): stored experts train under FSDP2 \(fully_shard\)"):
        main_group(torch.optim.AdamW(wrapped.parameters()))


def test_an_optimizer_that_is_not_the_schemas_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'adamw' cannot follow torch\.optim\.sgd\.SGD"):
        main_group(torch.optim.SGD(weights(1)))


def test_sgd_and_adagrad_are_read_whole() -> None:
    sgd = torch.optim.SGD(weights(1), lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=True)
    assert MainGroup(sgd, Schema.sgd({"w": (2,)}), sentinel=SENTINEL, index=None, weight_decay=None).options() == SGD(
        lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=True
    )
    adagrad = torch.optim.Adagrad(weights(1), lr=0.1, lr_decay=0.2, initial_accumulator_value=0.3)
    assert MainGroup(adagrad, Schema.adagrad({"w": (2,)}), sentinel=SENTINEL, index=None, weight_decay=None).options() == Adagrad(
        lr=0.1, lr_decay=0.2, initial_accumulator_value=0.3
    )


@pytest.mark.parametrize("flag", ["amsgrad", "maximize", "capturable", "differentiable"])
def test_flags_that_change_the_arithmetic_are_refused(flag: str) -> None:
    optimizer = torch.optim.AdamW(weights(1))
    optimizer.param_groups[0][flag] = True
    with pytest.raises(ConfigError, match=f"{flag}=True"):
        main_group(optimizer)


@pytest.mark.parametrize(("name", "value"), [("lr", 0.5), ("betas", (0.1, 0.2)), ("eps", 1e-3)])
def test_groups_that_differ_in_more_than_weight_decay_are_ambiguous(name: str, value: object) -> None:
    groups = [{"params": weights(5)}, {"params": weights(2), name: value}]
    optimizer = torch.optim.AdamW(groups)
    with pytest.raises(ConfigError, match=f"groups 0 and 1 differ in {name}: say with group="):
        main_group(optimizer)
    assert getattr(main_group(optimizer, index=1).options(), name) == value


def test_a_group_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="groups 0 to 0"):
        main_group(torch.optim.AdamW(weights(1)), index=1)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dict is not a torch.optim.Optimizer"):
        unwrapped({})


def test_a_param_schema_has_no_options() -> None:
    with pytest.raises(ConfigError, match="no optimizer states"):
        options_class(Schema.param({"w": ((2,), "float32")}))
