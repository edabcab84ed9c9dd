"""Serves older models that keep one module per expert in a container (Switch Transformers, NLLB-MoE).

The container's own forward runs, with a view of it whose experts are called with leased weights: in a shallow copy of the expert's
modules, made for the call, they stand as plain attributes where its parameters were. In the expert itself meta tensors do.
A field is named by its path in the expert: `wi.weight`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from paramstore.errors import UnsupportedModel

STRIPPED = "_paramstore_fields"
"""Attribute of a stripped container: the fields of each expert."""


def expert_names(container: nn.Module) -> list[str]:
    """The names of the children that are experts, in expert order."""
    return [name for name in container._modules if re.fullmatch(r"(expert_)?\d+", name)]


def is_container(module: nn.Module) -> bool:
    """Whether `module` is a ModuleDict or ModuleList of experts that are alike, with a forward of its own."""
    if not isinstance(module, nn.ModuleDict | nn.ModuleList) or type(module) in (nn.ModuleDict, nn.ModuleList):
        return False
    names = expert_names(module)
    if "Experts" not in type(module).__name__ or type(module).forward is nn.Module.forward or not names:
        return False
    return len({type(module.get_submodule(name)) for name in names}) == 1


def check_parallel(model: nn.Module, paths: Iterable[str]) -> None:
    """Raises UnsupportedModel where one of the experts modules at `paths` is a container: it brings its tokens to its experts by
    itself, so that nobody else can bring them to other ranks."""
    for path in paths:
        if is_container(container := model.get_submodule(path)):
            raise UnsupportedModel(
                f"{type(container).__name__} keeps a module for each expert and dispatches to them itself: leave out "
                "expert_parallel; each rank computes what its own tokens choose then"
            )


def fields_of(container: nn.Module) -> dict[str, Tensor]:
    """The tensors of the first expert, parameters or stripped, by field."""
    first = container.get_submodule(expert_names(container)[0])
    stripped: tuple[str, ...] | None = getattr(container, STRIPPED, None)
    if stripped is None:
        return dict(first.named_parameters())
    return {field: first.get_submodule(path).__dict__[name] for field, path, name in map(_split, stripped)}


def values_of(container: nn.Module, expert: int) -> dict[str, Tensor]:
    """The parameters of one expert that is not stripped yet."""
    return dict(container.get_submodule(expert_names(container)[expert]).named_parameters())


def strip_container(container: nn.Module) -> None:
    """Puts meta tensors, which are no parameters, where the experts' parameters were."""
    container.__dict__[STRIPPED] = tuple(fields_of(container))
    for name in expert_names(container):
        expert = container.get_submodule(name)
        for _, path, leaf in map(_split, container.__dict__[STRIPPED]):
            module = expert.get_submodule(path)
            meta = module._parameters.pop(leaf)
            assert meta is not None, f"{path}.{leaf} was listed as a parameter"
            module.__dict__[leaf] = meta.detach().to("meta")


class ContainerView:
    """The `self` that a container's forward sees: experts that compute with the weights of the store, all else its own.

    weights_of: (expert index) -> its tensors by field, valid until the next call. rows: takes how many rows each expert was given.
    """

    def __init__(
        self, container: nn.Module, weights_of: Callable[[int], Mapping[str, Tensor]], rows: Counter[int]
    ) -> None:  # fmt: skip
        self._container = container
        self._weights_of = weights_of
        self._rows = rows
        self._index = {name: index for index, name in enumerate(expert_names(container))}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container, name)

    def __getitem__(self, key: str | int) -> Callable[..., Any]:
        name = str(key)
        index = self._index[name]
        expert = self._container.get_submodule(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._rows[index] += args[0].shape[:-1].numel()
            return _filled(expert, self._weights_of(index))(*args, **kwargs)

        return call

    def __len__(self) -> int:
        return len(self._container._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._container._modules)


def _filled(expert: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A copy of an expert's modules that has `weights`, and shares all else: other threads compute with other copies."""
    filled = _shallow(expert)
    for field, path, leaf in map(_split, weights):
        filled.get_submodule(path).__dict__[leaf] = weights[field]
    return filled


def _shallow(module: nn.Module) -> nn.Module:
    again: nn.Module = module.__new__(type(module))
    children = {name: None if child is None else _shallow(child) for name, child in module._modules.items()}
    again.__dict__.update(module.__dict__, _modules=children)
    return again


def _split(field: str) -> tuple[str, str, str]:
    """(field, path of the module in the expert, name of the tensor in it)."""
    path, _, leaf = field.rpartition(".")
    return field, path, leaf
