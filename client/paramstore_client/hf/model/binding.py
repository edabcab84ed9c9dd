"""Joins a stripped model of transformers with the store: each experts module finds its layer, and runs through it.

- A module finds its layer through a plain attribute that modules, state dicts and optimizers do not see. A copy of the model shares
  it; it cannot be pickled.
- Modules of a registry run the experts function "paramstore", which is registered when the first model is loaded, never at import.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paramstore.core.arguments import instance
from paramstore.errors import ConfigError, SchemaMismatch
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model import module_list
from paramstore_client.hf.model.kernels import make_kernel
from paramstore_client.hf.model.layer_experts import LayerExperts, ModelExperts
from paramstore_client.hf.model.layout import ExpertLayout, find_layout
from paramstore_client.source import ExpertSource

ATTRIBUTE = "_paramstore_layer"
IMPLEMENTATION = "paramstore"
"""Name of the experts function in transformers' registry."""


def bind(model: nn.Module, experts: ModelExperts, *, kernel: str) -> ExpertLayout:
    """Gives every experts module of a stripped model its layer. Raises SchemaMismatch where the source holds other experts."""
    layout = find_layout(model)
    _check_source(layout, experts.source)
    fields = tuple(tensor.name for tensor in layout.tensors)
    for layer, path in layout.modules.items():
        module = model.get_submodule(path)
        if module_list.is_container(module):
            module.__dict__[ATTRIBUTE] = LayerExperts(experts, layer, None, fields)
            module.__class__ = _stored_container(type(module))
        else:
            module.__dict__[ATTRIBUTE] = LayerExperts(experts, layer, make_kernel(kernel, module, fields), fields)
    if experts.speculates:
        experts.early.find_routers(model, layout)
    return layout


def find_experts(model: nn.Module) -> ModelExperts | None:
    """What gives the layers of `model` their stored experts; None where it has none. Raises ConfigError on what is no model."""
    for module in instance("model", model, nn.Module, "a torch module").modules():
        if isinstance(layer := module.__dict__.get(ATTRIBUTE), LayerExperts):
            return layer.model
    return None


def layer_of(module: nn.Module) -> LayerExperts:
    """The layer of a bound experts module. Raises ConfigError."""
    layer = module.__dict__.get(ATTRIBUTE)
    if not isinstance(layer, LayerExperts):
        raise ConfigError(
            f"this {type(module).__name__} has no stored experts: only ps.hf.from_pretrained and ps.hf.from_config set "
            "experts_implementation='paramstore'"
        )
    return layer


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch left it so
def stored_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """y [T, H] of hidden_states [T, H]: per token the sum over its experts of top_k_weights [T, k] times expert top_k_index [T, k].

    Bit for bit what the module's kernel answers with all experts in memory.
    """
    return layer_of(module).run(module, hidden_states, top_k_index, top_k_weights)


def register_experts_function() -> None:
    """Makes `experts_implementation="paramstore"` known to transformers."""
    modeling.register_experts_function(IMPLEMENTATION, stored_experts)


def _stored_container(container_class: type[Any]) -> type[Any]:
    """A subclass whose forward runs on stored experts."""
    original = container_class.forward

    def forward(self: Any, *args: Any) -> Tensor:
        return layer_of(self).run_container(self, original, args)

    return type(
        container_class.__name__,
        (container_class,),
        {"forward": torch.compiler.disable(forward), "__module__": container_class.__module__},  # type: ignore[no-untyped-call]
    )


def _check_source(layout: ExpertLayout, source: ExpertSource) -> None:
    held = {field.name: (field.shape, field.dtype) for field in source.schema.part("param").fields}
    wanted = {tensor.name: (tensor.shape, str(tensor.dtype).removeprefix("torch.")) for tensor in layout.tensors}
    if (tuple(source.layers), source.experts, held) != (layout.layers, layout.experts, wanted):
        raise SchemaMismatch(
            f"the model has {layout.experts} experts in layers {list(layout.layers)} with {wanted}; the namespace has "
            f"{source.experts} in {list(source.layers)} with {held}: name another namespace, or load with the same dtype"
        )
