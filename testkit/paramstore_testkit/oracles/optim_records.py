"""Records for tests of updates: images made from tensors, and torch's own optimizer beside them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from paramstore.core.optimizers import Options
from paramstore.core.schema import Schema
from paramstore.optim.initial import fill_initial
from paramstore.optim.tensors import field_tensor
from paramstore_testkit.oracles.experts import Tensors
from paramstore_testkit.oracles.images import fill


def buffer(length_bytes: int, fill: int = 0xA5) -> memoryview:
    """Makes memory that holds rubbish."""
    return memoryview(bytearray([fill]) * length_bytes)


def gradient_image(schema: Schema, gradients: Tensors) -> memoryview:
    return fill(buffer(schema.gradient_bytes), schema.gradient_fields(), gradients)


def initial_image(schema: Schema, values: Tensors) -> memoryview:
    return fill(buffer(schema.initial_bytes), schema.initial_fields(), values)


def filled_record(schema: Schema, values: Tensors) -> memoryview:
    """Makes the image of a record with these initial values."""
    image = buffer(schema.record_bytes)
    fill_initial(schema, initial_image(schema, values), image)
    return image


def part_tensor(schema: Schema, part: str, image: memoryview, name: str) -> Tensor:
    """Gives a field of an image, where it lies."""
    field = schema.part(part).field(name)
    return field_tensor(image, field).view(field.shape)


class TorchOptimizer:
    """torch's optimizer with these options, on fp32 parameters of these values."""

    def __init__(self, values: Tensors, options: Options, **how: bool) -> None:
        """how: torch's `fused`, `foreach`; fused by default."""
        self.params = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
        self._options = options
        self.optimizer: Any = torch_optimizer(list(self.params.values()), options, **(how or {"fused": True}))

    def step(self, gradients: Tensors, grad_scale: float = 1.0) -> None:
        for name, param in self.params.items():
            param.grad = gradients[name].mul(grad_scale).float()
        self.optimizer.step()

    def state(self, name: str) -> dict[str, Tensor]:
        """Gives `master` and what torch keeps of the parameter, by the names of a record's fields."""
        kept = self.optimizer.state[self.params[name]]
        states = {state.name: kept[state.name] for state in self._options.states if kept.get(state.name) is not None}
        return {"master": self.params[name].detach(), **states}


def torch_optimizer(params: list[torch.nn.Parameter], options: Options, **how: bool) -> torch.optim.Optimizer:
    """Makes torch's optimizer of the same name; ours has only options that torch has, under torch's names."""
    made: torch.optim.Optimizer = getattr(torch.optim, type(options).__name__)(params, **asdict(options), **how)
    return made
