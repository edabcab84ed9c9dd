"""The places of a model's experts and the tensors of each: the bridge between a model's modules and a namespace's keys.

- One layout per model: every layer has equally many experts, of equal tensors. What differs is refused.
- A layer's index is the number in its module's path where each has one and those differ (the decoder layer), else its place.
- It reads modules, stripped or not, on any device; meta too. It changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paramstore.core.arguments import instance
from paramstore.core.schema import PARAM_DTYPES, Schema, dtype_name
from paramstore.errors import SchemaMismatch, UnsupportedModel
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.compat.refusals import why_no_experts
from paramstore_client.hf.model import module_list

STRIPPED = "_paramstore_stripped"
"""Attribute of a stripped experts module: the names of the tensors that were its parameters."""


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One tensor of one expert: the module's parameter `name` without its expert dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """A model's experts. modules: layer index -> path of its experts module. experts: per layer. tensors: of each, in record
    order."""

    modules: Mapping[int, str]
    experts: int
    tensors: tuple[ExpertTensor, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layer indices, ascending."""
        return tuple(sorted(self.modules))

    @property
    def expert_elements(self) -> int:
        """Number of parameters of one expert."""
        return sum(torch.Size(tensor.shape).numel() for tensor in self.tensors)

    def schema(self, optimizer: str | None = "adamw", *, updates: str = "exact", **options: Any) -> Schema:
        """The schema of a namespace of these experts. optimizer: None for an inference schema, the checkpoint's own dtypes.

        options: further arguments of the schema function. Raises SchemaMismatch, and UnsupportedModel where training needs
        one dtype of float32, bfloat16, float16 and the tensors have others.
        """
        if optimizer is None:
            return Schema.param({tensor.name: (tensor.shape, tensor.dtype) for tensor in self.tensors})
        make = getattr(Schema, optimizer, None)
        if optimizer not in ("adamw", "sgd", "adagrad") or make is None:
            raise SchemaMismatch(f"optimizer={optimizer!r}: use 'adamw', 'sgd' or 'adagrad'")
        dtypes = sorted({dtype_name(tensor.dtype) for tensor in self.tensors})
        if len(dtypes) != 1 or dtypes[0] not in PARAM_DTYPES:
            raise UnsupportedModel(
                f"expert tensors of dtype {', '.join(dtypes)}: training needs one of {', '.join(PARAM_DTYPES)}; load with dtype=..."
            )
        shapes = {tensor.name: tensor.shape for tensor in self.tensors}
        try:
            schema: Schema = make(shapes, param_dtype=dtypes[0], updates=updates, **options)
        except TypeError as error:
            raise SchemaMismatch(f"schema_options {sorted(options)}: {error}; `dtype=` is of model and experts") from error
        return schema


def find_layout(model: nn.Module) -> ExpertLayout:
    """The layout of a model's experts. Raises UnsupportedModel with the reason where they cannot be stored."""
    instance("model", model, nn.Module, "a torch module")
    found = {path: expert_tensors(module) for path, module in experts_modules(model).items()}
    if not found:
        raise UnsupportedModel(why_no_experts(model))
    _check_tied(model, list(found))
    _check_kinds(list(found))
    first_path, (experts, tensors) = next(iter(found.items()))
    if not tensors:
        raise UnsupportedModel(f"{first_path}: a {type(model.get_submodule(first_path)).__name__} without a tensor per expert")
    for path, (other_experts, other_tensors) in found.items():
        if (other_experts, other_tensors) != (experts, tensors):
            raise UnsupportedModel(
                f"experts of different shapes: {first_path} has {_described(experts, tensors)}, {path} has "
                f"{_described(other_experts, other_tensors)}; a namespace holds experts of one shape: load the part of the model "
                "that has one kind (its text model, its thinker) by its own class"
            )
    return ExpertLayout(_indexed(list(found)), experts, tensors)


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The experts modules by path, in the model's order: those of the registry, and containers of one module per expert."""
    return {
        path: module
        for path, module in model.named_modules()
        if modeling.is_experts_module(module) or module_list.is_container(module)
    }


def expert_tensors(module: nn.Module) -> tuple[int, tuple[ExpertTensor, ...]]:
    """(number of experts, the tensors of one) of an experts module."""
    if module_list.is_container(module):
        fields = module_list.fields_of(module)
        tensors = tuple(ExpertTensor(name, tuple(tensor.shape), tensor.dtype) for name, tensor in fields.items())
        return len(module_list.expert_names(module)), tensors
    stacked = stacked_tensors(module)
    experts = int(module.num_experts)  # type: ignore[arg-type]
    return experts, tuple(ExpertTensor(name, tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in stacked.items())


def stacked_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a registry module that have an expert dimension, parameters or stripped, by name in their order."""
    stripped: tuple[str, ...] | None = getattr(module, STRIPPED, None)
    if stripped is not None:
        return {name: getattr(module, name) for name in stripped}
    experts = int(module.num_experts)  # type: ignore[arg-type]
    return {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() >= 2 and parameter.shape[0] == experts
    }


def _check_tied(model: nn.Module, paths: list[str]) -> None:
    """Raises UnsupportedModel where the model ties parameters of its experts modules."""
    for name, source in modeling.tied_weights(model).items():
        if any(f"{tied}.".startswith(f"{path}.") for tied in (name, source) for path in paths):
            raise UnsupportedModel(
                f"{type(model).__name__}: {name} is {source} (tied weights); a namespace would hold and train "
                "them as two: load it with transformers alone"
            )


def _check_kinds(paths: list[str]) -> None:
    """Raises UnsupportedModel where a layer has experts of several kinds."""
    layers: dict[str, str] = {}
    for path in paths:
        numbered = re.match(r"(?:.*\.)?\d+\.", path)
        layer = numbered.group() if numbered else path
        if layer in layers:
            raise UnsupportedModel(
                f"two kinds of experts in one layer: {layers[layer]} and {path}; a checkpoint has them as one list, which cannot "
                "be read expert by expert, and no class of the model has one kind alone: load it with transformers alone"
            )
        layers[layer] = path


def _indexed(paths: list[str]) -> dict[int, str]:
    numbers = [re.findall(r"\.(\d+)\.", f".{path}.") for path in paths]
    single = {int(found[0]) for found in numbers if len(found) == 1}
    indices = [int(found[0]) for found in numbers] if len(single) == len(paths) else list(range(len(paths)))
    return dict(zip(indices, paths, strict=True))


def _described(experts: int, tensors: tuple[ExpertTensor, ...]) -> str:
    return f"{experts} x ({', '.join(f'{tensor.name} {list(tensor.shape)} {dtype_name(tensor.dtype)}' for tensor in tensors)})"
