"""Plans an exported checkpoint: the names, shapes and files of all tensors, known before any value is.

Names come from transformers' own reversion of its conversions, run on tensors without memory (meta), so they are those, in that
order and those files, of a `save_pretrained` of the unmodified model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paramstore.core.key import ExpertKey
from paramstore.core.schema import Schema
from paramstore.errors import CheckpointError, SchemaMismatch, UnsupportedModel
from paramstore_client.hf.checkpoint.recipes import ExpertSource
from paramstore_client.hf.compat.conversions import Reversion, natural_order
from paramstore_client.hf.model import module_list
from paramstore_client.hf.model.layout import ExpertLayout
from paramstore_client.safetensors_file import DTYPES
from paramstore_client.tensors import DTYPES as TORCH_DTYPES


@dataclass(frozen=True, slots=True)
class HubPlace:
    """The place of a piece of one expert: all of tensor `name` (row None), or row `row` of its first dimension."""

    name: str
    row: int | None


class HubNames:
    """The experts of a model as a checkpoint names and cuts them. dtypes: of each tensor of an expert, as it is exported.

    Raises UnsupportedModel where a conversion cannot be reverted for one expert alone.
    """

    def __init__(self, model: nn.Module, layout: ExpertLayout, reversion: Reversion, *, dtypes: Mapping[str, torch.dtype]) -> None:
        self._layout = layout
        self._reversion = reversion
        self._dtypes = dtypes
        self._children = {
            layer: module_list.expert_names(module) if module_list.is_container(module) else None
            for layer, module in ((layer, model.get_submodule(path)) for layer, path in layout.modules.items())
        }
        self._places = {layer: self._places_of(layer) for layer in layout.layers}

    def parameters(self) -> dict[str, Tensor]:
        """All expert parameters of the model, on meta, by the model's names."""
        found: dict[str, Tensor] = {}
        for layer in self._layout.layers:
            found.update(self._stacked(layer, self._layout.experts))
        return found

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that the experts are in the checkpoint, on meta, by its names."""
        return self._reversion.revert(self.parameters())

    def pieces(self, key: ExpertKey, values: Mapping[str, Tensor]) -> dict[HubPlace, Tensor]:
        """One expert's `values` (by tensor name) as they are cut in the checkpoint."""
        layer, expert = key
        places = self._places[layer]
        reverted = self._reversion.revert(self._named(layer, expert, values))
        return {places[name][expert]: tensor for name, tensor in self._by_first(layer, expert, reverted).items()}

    def _by_first(self, layer: int, expert: int, reverted: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """`reverted` by the names that the first expert's tensors have."""
        if self._children[layer] is None:
            return reverted  # one expert alone is the first
        first = self._reversion.revert(self._named(layer, 0, self._metas()))
        own = (reverted[name] for name in sorted(reverted, key=natural_order))
        return dict(zip(sorted(first, key=natural_order), own, strict=True))

    def _places_of(self, layer: int) -> dict[str, list[HubPlace]]:
        """The places of a tensor for every expert, by the name that it has for the first expert."""
        experts = self._layout.experts
        whole = self._reversion.revert(self._stacked(layer, experts))
        kinds: dict[str, list[str]] = {}
        for name in sorted(whole, key=natural_order):
            kinds.setdefault(_kind(name), []).append(name)
        places = {}
        for name, one in self._reversion.revert(self._named(layer, 0, self._metas())).items():
            alike = kinds.get(_kind(name), [])
            shapes = {tuple(whole[other].shape) for other in alike}
            if len(alike) == experts and shapes == {tuple(one.shape)}:
                places[name] = [HubPlace(other, None) for other in alike]
            elif len(alike) == 1 and shapes == {(experts, *one.shape[1:])}:
                places[name] = [HubPlace(name, row) for row in range(experts)]
            else:
                raise UnsupportedModel(
                    f"{self._layout.modules[layer]}: {name!r} of a checkpoint cannot be made of one expert alone, of all it has "
                    f"shapes {shapes}"
                )
        return places

    def _metas(self) -> dict[str, Tensor]:
        dtypes = self._dtypes
        return {one.name: torch.empty(one.shape, dtype=dtypes[one.name], device="meta") for one in self._layout.tensors}

    def _named(self, layer: int, expert: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's parameters as if `expert` were its only one."""
        path, children = self._layout.modules[layer], self._children[layer]
        if children is None:
            return {f"{path}.{name}": value.unsqueeze(0) for name, value in values.items()}
        return {f"{path}.{children[expert]}.{name}": value for name, value in values.items()}

    def _stacked(self, layer: int, experts: int) -> dict[str, Tensor]:
        path, children = self._layout.modules[layer], self._children[layer]
        if children is None:
            return {f"{path}.{name}": value.new_empty((experts, *value.shape)) for name, value in self._metas().items()}
        return {name: value for expert in range(experts) for name, value in self._named(layer, expert, self._metas()).items()}


class PackedNames:
    """Quantized experts as the checkpoint `source` names and cuts them, whose records are of `schema`. Raises SchemaMismatch where
    they would have other fields."""

    def __init__(self, source: ExpertSource, schema: Schema) -> None:
        if source.schema != schema:
            raise SchemaMismatch(f"the experts have fields {schema.specs}, those of dense= {source.schema.specs}: give their own")
        self._source = source

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that the experts are in the checkpoint, on meta, by its names."""
        return {
            stored.name: torch.empty(stored.shape, dtype=TORCH_DTYPES[DTYPES[stored.dtype]], device="meta")
            for stored in self._source.stored()
        }

    def pieces(self, key: ExpertKey, values: Mapping[str, Tensor]) -> dict[HubPlace, Tensor]:
        """One expert's `values` (by field) as they are cut in the checkpoint. Raises CheckpointError where they were converted."""
        found = {}
        for field, stored, row in self._source.places(key):
            if stored.length_bytes != values[field].nbytes:
                raise CheckpointError(f"{stored} is {stored.dtype}, and was imported as {values[field].dtype}")
            found[HubPlace(stored.name, row)] = values[field]
        return found


def dense_groups(names: Iterable[str]) -> list[list[str]]:
    """Groups of parameter names that no conversion crosses: those of one layer, or those outside of all layers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        numbered = re.match(r".*?\.\d+\.", name)
        groups.setdefault(numbered.group() if numbered else "", []).append(name)
    return list(groups.values())


def _kind(name: str) -> str:
    """`name` without its last number: what the tensors of all experts of a layer have in common."""
    return re.sub(r"\.\d+\.(?!.*\.\d+\.)", ".#.", name)
