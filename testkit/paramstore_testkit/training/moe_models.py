"""Tiny random models of transformers, and equal ones with stored experts over a namespace in memory.

Their configs come without a network, their weights from a seed. `Twin` holds an unmodified model and a stored one with equal
weights, and compares what they compute, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paramstore.core.key import ExpertKey
from paramstore.core.trace import TraceEvent, TraceEventKind
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device.host_slots import standing
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.loading.initial_experts import InitialExperts
from paramstore_client.hf.model.binding import IMPLEMENTATION, bind, register_experts_function
from paramstore_client.hf.model.layer_experts import ModelExperts
from paramstore_client.hf.model.layout import ExpertLayout, find_layout
from paramstore_client.hf.model.stripping import strip
from paramstore_testkit.training.moe_families import VOCABULARY

FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss",
)  # fmt: skip
"""Families that between them have whatever differs between families: they are tested closely, all others from outside."""


@dataclass
class Twin:
    """Two equal models. stock: the unmodified one. stored: with experts in `namespace`. layout: of both."""

    stock: Any
    stored: Any
    namespace: MemoryNamespace
    layout: ExpertLayout
    anchor: Tensor

    @classmethod
    def of(
        cls, config: Any, *, kernel: str = "eager", lease_slots: int = 64, seed: int = 0, is_trained: bool = True,
        dtype: torch.dtype = torch.float32, model_class: Any = None, is_poisoned: bool = True,
    ) -> Twin:  # fmt: skip
        """Makes both models of one config, from one seed. kernel: what the stock model runs, and the stored one on its weights."""
        auto = modeling.transformers().AutoModelForCausalLM if model_class is None else model_class
        concrete = modeling.concrete_class(auto, config)
        torch.manual_seed(seed)
        stock = modeling.build(concrete, copy.deepcopy(config), experts_implementation=kernel, dtype=dtype)
        initial = InitialExperts(modeling.on_meta(concrete, copy.deepcopy(config)))
        register_experts_function()
        torch.manual_seed(seed)
        with initial.building():
            stored = modeling.build(concrete, copy.deepcopy(config), experts_implementation=IMPLEMENTATION, dtype=dtype)
        initial.settle(stored)
        strip(stored)
        layout = find_layout(stored)
        schema = layout.schema("adamw" if is_trained else None, updates="touched")
        namespace = MemoryNamespace(schema, layers=layout.layers, experts=layout.experts, lease_slots=lease_slots)
        namespace.initialize(initial.values)
        anchor = torch.zeros((), requires_grad=True)
        source = namespace if is_trained else standing(namespace)
        joined = ModelExperts(source, anchor=(lambda layer: anchor) if is_trained else None, is_poisoned=is_poisoned)
        bind(stored, joined, kernel=kernel)
        return cls(stock, stored, namespace, layout, anchor)

    def expert_values(self, key: ExpertKey) -> Mapping[str, Tensor]:
        """Gives one expert's tensors in the unmodified model, by field."""
        values = self._parts(key, lambda parameter: parameter.detach())
        return {name: value for name, value in values.items() if value is not None}

    def check_weights(self) -> None:
        """Asserts that both models start from equal weights."""
        reference = self.stock.state_dict()
        for name, value in self.stored.state_dict().items():
            assert torch.equal(value, reference[name]), f"dense weight {name} differs"
        for key in self.namespace.space:
            for name, value in self.namespace.values(key).items():
                assert torch.equal(value, self.expert_values(key)[name]), f"expert {key}, field {name} differs"

    def check_gradients(self) -> None:
        """Asserts that both models have equal gradients, and that experts that no token chose have none in the store."""
        reference = dict(self.stock.named_parameters())
        for name, parameter in self.stored.named_parameters():
            computed, expected = _whole(parameter.grad), _whole(reference[name].grad)
            assert (computed is None) == (expected is None), f"dense gradient {name}"
            assert computed is None or expected is None or torch.equal(computed, expected), f"dense gradient {name} differs"
        for key in self.namespace.space:
            pending = self.namespace.pending.get(key)
            for name, expected in self._parts(key, lambda parameter: _whole(parameter.grad)).items():
                if pending is None:
                    assert expected is None or not expected.any(), f"expert {key}, field {name}: its gradient was not pushed"
                else:
                    assert expected is not None, f"expert {key}, field {name}: a gradient that the model has not"
                    assert torch.equal(pending[name], expected), f"expert {key}, field {name}: gradients differ"

    def _parts(self, key: ExpertKey, of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor | None]:
        """Takes one expert's part of a tensor that belongs to each of its parameters in the unmodified model."""
        layer, expert = key
        module: nn.Module = self.stock.get_submodule(self.layout.modules[layer])
        names = [tensor.name for tensor in self.layout.tensors]
        if isinstance(module, nn.ModuleDict):
            return {name: of(module.get_submodule(f"expert_{expert}").get_parameter(name)) for name in names}
        whole = {name: of(module.get_parameter(name)) for name in names}
        return {name: None if value is None else value[expert] for name, value in whole.items()}


def _whole(gradient: Tensor | None) -> Tensor | None:
    """Gathers a gradient that FSDP2 may have sharded."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def tokens(*, seed: int = 1, batch: int = 2, length: int = 17) -> Tensor:
    """Draws random token ids [batch, length]."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def watch_routers(model: Any) -> list[TraceEvent]:
    """A list to which every dispatch of a model is added, as its experts modules are told it by its routers."""
    found: list[TraceEvent] = []
    layout = find_layout(model)

    def note(layer: int, module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        chosen = arguments[1]
        if chosen.dim() == 3:  # one-hot, as Switch has it
            counts = chosen.sum(dim=(0, 1)).tolist()
        else:
            counts = torch.bincount(chosen.reshape(-1), minlength=layout.experts).tolist()
        used = tuple(expert for expert, count in enumerate(counts) if count)
        found.append(TraceEvent(TraceEventKind.ACQUIRE, layer, used, tuple(counts[expert] for expert in used)))

    for layer, path in layout.modules.items():
        model.get_submodule(path).register_forward_pre_hook(partial(note, layer))
    return found
