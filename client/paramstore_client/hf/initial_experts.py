"""The first weights of a new model's experts, one layer at a time, bit for bit those of the unmodified model.

While the model is built its experts' parameters are on meta. When the model would initialise them, one layer gets memory, is
initialised so that the random numbers go on as they would, and loses its memory again; the generator's state from before is
kept. `values` repeats that for one layer with the same state. So equal seeds give equal dense and expert weights, and the peak
is one layer of experts.

It holds for experts that go through the registry, on the CPU's generator. A model with one module per expert is built whole, and
its values are taken from it (`whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from paramstore.core.key import ExpertKey
from paramstore_client.hf import _compat, module_list
from paramstore_client.hf.layout import experts_modules, find_layout, stacked_tensors
from paramstore_client.tensors import mapped


class InitialExperts:
    """Owner of the generator states, and of the layer of experts that was made last.

    probe: the same model on meta.
    """

    def __init__(self, probe: nn.Module) -> None:
        self._layout = find_layout(probe)
        self._types = {type(module) for module in experts_modules(probe).values() if not module_list.is_container(module)}
        self._names = {tensor.name for tensor in self._layout.tensors}
        self._states: dict[int, tuple[Any, Tensor]] = {}
        self._modules: dict[int, nn.Module] = {}
        self._made: tuple[int, dict[str, Tensor]] | None = None
        self._whole: dict[ExpertKey, dict[str, Tensor]] = {}

    @contextmanager
    def building(self) -> Iterator[None]:
        """Around the model's construction: the experts stay on meta, the random numbers go on as if they did not."""
        hook = register_module_parameter_registration_hook(self._to_meta)  # type: ignore[arg-type]  # as documented
        try:
            with _compat.initializing(self._before):
                yield
        finally:
            hook.remove()

    def settle(self, model: nn.Module) -> None:
        """After the construction and before the stripping: takes what `values` will need of the model."""
        for layer, path in find_layout(model).modules.items():
            module = model.get_submodule(path)
            self._modules[layer] = module
            if module_list.is_container(module):
                for expert in range(self._layout.experts):
                    values = module_list.values_of(module, expert)
                    self._whole[layer, expert] = {name: value.detach() for name, value in values.items()}

    def values(self, key: ExpertKey) -> Mapping[str, Tensor]:
        """The first value of one expert, by tensor. Cheapest in key order."""
        layer, expert = key
        if key in self._whole:
            return self._whole[key]
        if self._made is None or self._made[0] != layer:
            self._made = None  # before the next layer takes memory
            self._made = (layer, self._make(layer))
        return {name: stacked[expert] for name, stacked in self._made[1].items()}

    def _make(self, layer: int) -> dict[str, Tensor]:
        module = self._modules[layer]
        owner, state = self._states[id(module)]
        before = {name: module.__dict__[name] for name in self._names}
        made = {name: mapped(before[name].shape, before[name].dtype) for name in self._names}
        module.__dict__.update(made)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.set_rng_state(state)
                owner._init_weights(module)
        finally:
            module.__dict__.update(before)
        return made

    def _to_meta(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if type(module) not in self._types or name not in self._names or parameter is None:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    def _before(self, owner: Any, module: nn.Module) -> Callable[[], None] | None:
        """Gives the experts module memory for its initialisation; returns what takes it away again."""
        if type(module) not in self._types or id(module) in self._states:
            return None
        self._states[id(module)] = (owner, torch.get_rng_state())
        metas = {name: module._parameters[name] for name in stacked_tensors(module)}
        for name, meta in metas.items():
            assert meta is not None, f"{name} was listed as a parameter"
            module._parameters[name] = nn.Parameter(mapped(meta.shape, meta.dtype))
        return lambda: module._parameters.update(metas)


