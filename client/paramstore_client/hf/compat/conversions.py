"""Every name of transformers and huggingface_hub that import and export rely on, beside those of `modeling`.

| name | status | seen the same in |
|---|---|---|
| `conversion_mapping.get_model_conversion_mapping(model, add_legacy=)` | semi-public, used by PEFT | 5.7 - 5.24 |
| `core_model_loading.rename_source_key(key, renamings, converters, prefix, targets)`, by position | semi-public | 5.7 - 5.24 |
| `WeightRenaming`, `WeightConverter`: `source_patterns`, `add_tensor`, `convert`, `was_used` | semi-public | 5.7 - 5.24 |
| `core_model_loading.PrefixChange`, `dot_natural_key` | semi-public | 5.7 - 5.24 |
| `core_model_loading.revert_weight_conversion`; it reads `_weight_conversions`, `config` of the model | semi-public | 5.7 - 5.24 |
| `modeling_utils.remove_tied_weights_from_state_dict` | internal, called by `save_pretrained` | 5.7 - 5.24 |
| `huggingface_hub.split_state_dict_into_shards_factory`, `huggingface_hub.snapshot_download` | documented | 1.x, 2.x |
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from paramstore_client.hf.compat.modeling import transformers

FILENAME_PATTERN = "model{suffix}.safetensors"


def _loading() -> Any:
    transformers()
    return importlib.import_module("transformers.core_model_loading")


def natural_order(name: str) -> Any:
    """The key by which transformers sorts the tensors of a checkpoint: numbers in names by their value."""
    return _loading().dot_natural_key(name)


class Conversions:
    """Converts names and values of a checkpoint to those of a model's parameters.

    steps: renamings and converters of transformers; None: all that it knows for the model.
    """

    def __init__(self, model: nn.Module, steps: Iterable[Any] | None = None) -> None:
        mapping = importlib.import_module("transformers.conversion_mapping")
        self._loading = _loading()
        self._model: Any = model
        self._steps = mapping.get_model_conversion_mapping(model) if steps is None else list(steps)
        self._renamings = [step for step in self._steps if isinstance(step, self._loading.WeightRenaming)]
        self._converters = [step for step in self._steps if isinstance(step, self._loading.WeightConverter)]
        self._by_pattern = {pattern: step for step in self._converters for pattern in step.source_patterns}

    def rename(self, name: str, targets: Mapping[str, object]) -> tuple[str, str | None]:
        """(parameter of the model that the checkpoint's tensor becomes, pattern of the converter that makes it or None).

        targets: the parameters that there are; by them it is seen whether a base model's prefix is to be added or dropped.
        """
        prefix = self._model.base_model_prefix or None
        found = self._loading.rename_source_key(name, self._renamings, self._converters, prefix, targets)
        return str(found[0]), found[1]

    def convert(self, target: str, sources: Mapping[str, Tensor], *, shape: tuple[int, ...]) -> Tensor | None:
        """`target` made of one tensor for each pattern of one converter; None if the converter does not make it.

        shape: that of `target` in the model, on which some operations depend.
        """
        like: Any = _Like(self._model, {target: torch.empty(shape, device="meta")})
        converter = deepcopy(self._by_pattern[next(iter(sources))])
        for pattern, tensor in sources.items():
            converter.add_tensor(target, pattern, pattern, tensor)
        made: Tensor | list[Tensor] | None = converter.convert(target, model=like, config=self._model.config).get(target)
        return made[0] if isinstance(made, list) else made

    def used(self) -> list[Any]:
        """The steps that have matched a name so far: a checkpoint of the same names is made by reverting these."""
        return [step for step in self._steps if step.was_used()]


class Reversion:
    """Turns a model's parameters into tensors as the checkpoint names and cuts them, in parts; `save_pretrained` does all at once.

    steps: as for `Conversions`; None: those the model was loaded with, else those of a model that was made anew.
    """

    def __init__(self, model: nn.Module, steps: Iterable[Any] | None = None) -> None:
        loading, mapping = _loading(), importlib.import_module("transformers.conversion_mapping")
        if steps is None:
            steps = getattr(model, "_weight_conversions", None)
        if steps is None:
            known = mapping.get_model_conversion_mapping(model, add_legacy=False)
            steps = [step for step in known if not isinstance(step, loading.PrefixChange)]
        self._revert = loading.revert_weight_conversion
        self._model, self._steps = model, list(steps)

    def revert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`tensors` of the model by the checkpoint's names, in the order in which they are saved."""
        reverted: dict[str, Tensor] = self._revert(_Like(self._model, tensors, self._steps), dict(tensors))
        return reverted


class _Like:
    """A model with other tensors for some parameters (those of one expert alone, or of stripped ones), and with conversions that
    are not looked for again each time."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor], steps: list[Any] | None = None) -> None:
        self._model = model
        self._parameters = parameters
        self._weight_conversions = steps

    def get_parameter(self, name: str) -> Tensor:
        """The tensor that stands for the parameter, else the model's own."""
        return self._parameters[name] if name in self._parameters else self._model.get_parameter(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def without_tied(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The `tensors` of the model that are saved: each under one name, without those that the model leaves out."""
    modeling = importlib.import_module("transformers.modeling_utils")
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    kept = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    result: dict[str, Tensor] = modeling.remove_tied_weights_from_state_dict(kept, model)
    return result


def split(tensors: Mapping[str, Tensor], *, shard_bytes_max: int) -> Any:
    """Which file each tensor (on meta) goes to: `filename_to_tensors`, `tensor_to_filename`, `metadata`, `is_sharded`.

    As in `save_pretrained`, tensors that a conversion cuts from one parameter without a copy count as one, and stay in one file.
    """
    hub = importlib.import_module("huggingface_hub")
    return hub.split_state_dict_into_shards_factory(
        dict(tensors), filename_pattern=FILENAME_PATTERN, max_shard_size=shard_bytes_max,
        get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
        get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,
    )  # fmt: skip
