"""Makes the first weights of a new model's experts, one layer at a time, bit for bit those of the unmodified model.

While the model is built its experts' parameters are on meta. They get memory while a module is initialised that has one experts
module in it (the experts module itself, the block or the layer around it): so the random numbers go on as in the unmodified model.
If they were written, the generator's state from before is kept. `values` repeats the writes to one layer with the same states. So
equal seeds give equal dense and expert weights, and the peak of memory is one layer of experts.

This holds for experts that go through the registry, on the CPU's generator. A model with one module per expert is built whole, and
its values are taken from it (`whole`). Experts that the model initialises in another way are refused, never stored as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from paramstore.core.key import ExpertKey
from paramstore.errors import UnsupportedModel
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model import module_list
from paramstore_client.hf.model.layout import experts_modules, find_layout
from paramstore_client.tensors import mapped


@dataclass(frozen=True, slots=True)
class _Write:
    """One initialisation that wrote to an experts module: `owner._init_weights(module)` with the generator in `state`."""

    owner: Any
    module: nn.Module
    state: Tensor


class InitialExperts:
    """Owner of the writes to each layer's experts, and of the layer that was made last; needed until `values` was asked for all.

    probe: the same model on meta.
    """

    def __init__(self, probe: nn.Module) -> None:
        self._layout = find_layout(probe)
        self._types = {type(module) for module in experts_modules(probe).values() if not module_list.is_container(module)}
        self._names = {tensor.name for tensor in self._layout.tensors}
        self._writes: dict[nn.Module, list[_Write]] = {}
        self._written: set[tuple[nn.Module, str]] = set()
        self._modules: dict[int, nn.Module] = {}
        self._made: tuple[int, dict[str, Tensor]] | None = None
        self._whole: dict[ExpertKey, dict[str, Tensor]] = {}

    @contextmanager
    def building(self) -> Iterator[None]:
        """A block for the model's construction: the experts stay on meta, and the random numbers go on as if they did not."""
        hook = register_module_parameter_registration_hook(self._to_meta)  # type: ignore[arg-type]  # as documented
        try:
            with modeling.initializing(self._before):
                yield
        finally:
            hook.remove()

    def settle(self, model: nn.Module) -> None:
        """Takes what `values` will need of the model; to be called after its construction and before its stripping.

        Raises UnsupportedModel where the model initialises its experts in a way that cannot be repeated for one layer.
        """
        for layer, path in self._layout.modules.items():
            module = self._modules[layer] = model.get_submodule(path)
            if module_list.is_container(module):
                for expert in range(self._layout.experts):
                    values = module_list.values_of(module, expert)
                    self._whole[layer, expert] = {name: value.detach() for name, value in values.items()}
                continue
            for name in self._names:  # an in-place write counts a version up; one on meta was lost
                if (module, name) not in self._written or module.get_parameter(name)._version > 0:
                    raise self._refusal(layer, name)

    def values(self, key: ExpertKey) -> Mapping[str, Tensor]:
        """The first values of one expert, by tensor name. Cheapest in key order. Raises UnsupportedModel as `settle` does."""
        layer, expert = key
        if key in self._whole:
            return self._whole[key]
        if self._made is None or self._made[0] != layer:
            self._made = None  # before the next layer takes memory
            self._made = (layer, self._make(layer))
        return {name: stacked[expert] for name, stacked in self._made[1].items()}

    def _make(self, layer: int) -> dict[str, Tensor]:
        module = self._modules[layer]
        before = {name: module.__dict__[name] for name in self._names}
        made = {name: mapped(before[name].shape, before[name].dtype).fill_(torch.nan) for name in self._names}
        module.__dict__.update(made)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                for write in self._writes[module]:
                    with _unchanged(write.module):
                        torch.set_rng_state(write.state)
                        write.owner._init_weights(write.module)
        finally:
            module.__dict__.update(before)
        for name, tensor in made.items():
            if tensor.isnan().any():
                raise self._refusal(layer, name)
        return made

    def _refusal(self, layer: int, name: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self._layout.modules[layer]}.{name}: the model does not initialise it from its experts module, block or layer "
            "alone, so its first values cannot be made layer by layer: save_pretrained the unmodified model, and load that with "
            "ps.hf.from_pretrained"
        )

    def _to_meta(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if type(module) not in self._types or name not in self._names or parameter is None:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    def _before(self, owner: Any, module: nn.Module) -> Callable[[], None] | None:
        """Gives the one experts module in `module` memory for its initialisation; returns what takes it away again."""
        inside = [found for found in module.modules() if type(found) in self._types]
        if len(inside) != 1:
            return None
        experts, state = inside[0], torch.get_rng_state()
        metas = {name: experts.get_parameter(name) for name in self._names}
        memory = {name: nn.Parameter(mapped(meta.shape, meta.dtype)) for name, meta in metas.items()}
        experts._parameters.update(memory)

        def after() -> None:
            experts._parameters.update(metas)
            written = {(experts, name) for name, parameter in memory.items() if parameter._version > 0}
            if written:
                self._writes.setdefault(experts, []).append(_Write(owner, module, state))
                self._written |= written

        return after


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """A block after which the module's parameters and buffers are again as they were."""
    tensors = [*module.parameters(), *module.buffers()]
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
