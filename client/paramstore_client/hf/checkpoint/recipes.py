"""Finds which tensors of a checkpoint make which expert's tensors, by transformers' own conversion mapping.

A mapping merges the tensors of all experts of a layer into the parameters of its experts module. Here its converters run on the
tensors of one expert at a time. The result is the same where experts are only stacked, which is checked before anything is read: a
converter must make `[1, *shape]` of one expert's tensors. Quantized tensors are not converted: they are read as they are, where
their conversion would only put them one below the other.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor, nn

from paramstore.core.key import ExpertKey
from paramstore.core.schema import Schema
from paramstore.errors import CheckpointError, SchemaMismatch
from paramstore_client.hf.checkpoint.quantized_tensors import (
    CheckpointTensor,
    QuantizedTensor,
    check_alike,
    check_piece,
    described,
    form_of,
    named,
    paired,
    spec_of,
    stored_of,
)
from paramstore_client.hf.checkpoint.shards import Checkpoint, check_unchanged
from paramstore_client.hf.compat.conversions import Conversions, natural_order
from paramstore_client.hf.model import module_list
from paramstore_client.hf.model.layout import ExpertLayout, ExpertTensor
from paramstore_client.quantized.packed import packed_tensors
from paramstore_client.safetensors_file import DTYPES, Files, StoredTensor
from paramstore_client.tensors import DTYPES as TORCH_DTYPES
from paramstore_client.tensors import mapped

Found = Mapping[str, Mapping[str | None, list[CheckpointTensor]]]
"""Per parameter of the model, per pattern of the converter that makes it (None without one), the tensors that it is made of."""
_Kind = tuple[ExpertTensor, tuple[tuple[str | None, tuple[int, ...], str], ...]]
"""A tensor of the experts, and what it is made of: by pattern, shape and dtype."""
_Seen = dict[_Kind, list[tuple[CheckpointTensor, ...]]]
"""By kind, the tensors of the checkpoint that each expert of it is made of."""
FLOATS = ("F32", "BF16", "F16")
"""Dtypes of weights that can be computed with as they are."""
SAMPLES_MAX = 1024
SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one tensor of the experts of a layer is made.

    target: the module's parameter. sources: by the converter's pattern (None without one), a tensor per expert, or one that has
    all of them in its first dimension.
    """

    target: str
    tensor: ExpertTensor
    sources: Mapping[str | None, tuple[CheckpointTensor, ...]]
    is_per_expert: bool

    def of(self, expert: int) -> dict[str | None, CheckpointTensor]:
        """The stored tensors of one expert, by pattern; where a tensor has all experts, the expert's row of it."""
        if self.is_per_expert:
            return {pattern: tensors[expert] for pattern, tensors in self.sources.items()}
        return {pattern: tensors[0].rows(expert, 1) for pattern, tensors in self.sources.items()}

    def whole(self, expert: int) -> tuple[CheckpointTensor, ...]:
        """The stored tensors of one expert as the checkpoint has them, the other experts' rows too."""
        return tuple(tensors[expert if self.is_per_expert else 0] for tensors in self.sources.values())


class ExpertSource:
    """A checkpoint seen as experts. The constructor checks it as a whole: nothing is missing, and every shape and dtype fits.

    model: of the checkpoint's kind, stripped or not, on any device. Raises CheckpointError naming file and tensor.
    """

    def __init__(self, model: nn.Module, layout: ExpertLayout, checkpoint: Checkpoint) -> None:
        self._layout = layout
        self._directory, self._states = checkpoint.directory, checkpoint.states
        self._conversions = Conversions(model)
        self._orders: dict[tuple[ExpertTensor, tuple[str | None, ...]], list[str | None]] = {}
        """Of quantized pieces, by tensor and patterns: which lies below which."""
        found = find_experts(self._conversions, model, layout, checkpoint)
        self._recipes = {layer: [self._recipe(model, layer, tensor, found) for tensor in layout.tensors] for layer in layout.layers}
        self._check()

    def _recipe(self, model: nn.Module, layer: int, tensor: ExpertTensor, found: Found) -> Recipe:
        path, experts = self._layout.modules[layer], self._layout.experts
        module = model.get_submodule(path)
        if module_list.is_container(module):
            names = [f"{path}.{child}.{tensor.name}" for child in module_list.expert_names(module)]
            lacking = next((name for name in names if name not in found), None)
            if lacking is not None:
                raise CheckpointError(f"{self._directory}: no tensor {lacking!r} is in the checkpoint{_others(tensor, found)}")
            return Recipe(names[0], tensor, {None: tuple(found[name][None][0] for name in names)}, is_per_expert=True)
        target = f"{path}.{tensor.name}"
        if target not in found:
            raise CheckpointError(f"{self._directory}: no tensor of the checkpoint becomes {target!r}{_others(tensor, found)}")
        sources = {pattern: tuple(tensors) for pattern, tensors in found[target].items()}
        is_per_expert = not all(_has_all(tensors, experts) for tensors in sources.values())
        for tensors in sources.values():
            if is_per_expert and len(tensors) == 1 < experts:
                form = form_of(tensors[0].kind) if isinstance(tensors[0], QuantizedTensor) else ""
                raise CheckpointError(
                    f"{described(tensors[0])}: no other is like it, and it has no row for each of {experts} experts that make "
                    f"{target!r}{form}"
                )
            if is_per_expert and len(tensors) != experts:
                raise CheckpointError(f"{self._directory}: {_lacking(tensors, experts)}, one of {experts} that make {target!r}")
        return Recipe(target, tensor, sources, is_per_expert)

    def _check(self) -> None:
        seen: _Seen = {}
        quantized = set[ExpertTensor]()
        for recipes in self._recipes.values():
            for recipe in recipes:
                for expert in range(self._layout.experts):
                    self._check_one(recipe, expert, seen)
                    if _is_quantized(recipe.of(expert)):
                        quantized.add(recipe.tensor)
        for tensor in quantized:
            check_alike([found for (of, _), found in seen.items() if of == tensor])

    def _check_one(self, recipe: Recipe, expert: int, seen: _Seen) -> None:
        """Checks what `recipe` makes for one expert. seen: what need not be checked again; it is noted there."""
        sources, whole = recipe.of(expert), recipe.whole(expert)
        kind = recipe.tensor, tuple(
            (pattern, stored.shape, stored.dtype) for pattern, source in sources.items() for stored in stored_of(source)
        )  # fmt: skip
        if kind in seen:
            seen[kind].append(whole)
            return
        try:
            for source, tensor in zip(sources.values(), whole, strict=True):
                check_piece(source if recipe.is_per_expert or not isinstance(source, QuantizedTensor) else source.one(), tensor)
            shape = self._quantized_shape(recipe, sources) if _is_quantized(sources) else self._plain_shape(recipe, sources)
        except (RuntimeError, ValueError, IndexError, KeyError) as error:  # whatever a conversion makes of wrong shapes
            raise CheckpointError(f"{named(whole)}: cannot be converted to {recipe.target!r}: {error}") from error
        if shape != recipe.tensor.shape:
            wanted = list(recipe.tensor.shape)
            raise CheckpointError(f"{named(whole)}: makes {list(shape)} for an expert, {recipe.target!r} has {wanted}")
        seen[kind] = [whole]

    def _plain_shape(self, recipe: Recipe, sources: Mapping[str | None, CheckpointTensor]) -> tuple[int, ...]:
        metas = {}
        for pattern, source in sources.items():
            (stored,) = stored_of(source)
            if stored.dtype not in FLOATS:
                raise CheckpointError(
                    f"{stored} is {stored.dtype}: experts are read from {', '.join(FLOATS)}, and, to be served, from fp8 with "
                    "block scales and mxfp4; dequantize it first"
                )
            metas[pattern] = torch.empty(stored.shape, dtype=_torch_dtype(stored), device="meta")
        return tuple(self._made(recipe, metas).shape)

    def _quantized_shape(self, recipe: Recipe, sources: Mapping[str | None, CheckpointTensor]) -> tuple[int, ...]:
        """Raises CheckpointError where the pieces and their scales do not fit."""
        fields = {name: spec_of(stored) for name, stored in self._fields(recipe, sources)}
        try:
            (made,) = packed_tensors(Schema.param(fields))
        except SchemaMismatch as error:
            raise CheckpointError(f"{named(sources.values())}: {error}") from error
        return made.shape

    def _fields(
        self, recipe: Recipe, sources: Mapping[str | None, CheckpointTensor]
    ) -> Iterator[tuple[str, StoredTensor]]:  # fmt: skip
        """The fields that one expert's quantized `sources` are in a record, each with what it holds."""
        for piece, pattern in enumerate(self._order(recipe, sources)):
            source = sources[pattern]
            if not isinstance(source, QuantizedTensor):
                raise CheckpointError(f"{described(source)}, is not quantized, as others are that make {recipe.target!r}")
            yield from (source if recipe.is_per_expert else source.one()).fields(recipe.tensor.name, piece)

    def _order(self, recipe: Recipe, sources: Mapping[str | None, CheckpointTensor]) -> list[str | None]:
        """The patterns of pieces that their conversion puts one below the other, from the top. Raises CheckpointError where it does
        more than that."""
        known = recipe.tensor, tuple(sources)
        if known not in self._orders:
            self._orders[known] = [None] if [*sources] == [None] else self._tried_order(recipe, sources)
        return self._orders[known]

    def _tried_order(self, recipe: Recipe, sources: Mapping[str | None, CheckpointTensor]) -> list[str | None]:
        """Converts the numbers of the elements, and looks where they have gone."""
        numbers, start = {}, 0
        for pattern, source in sources.items():
            count = torch.Size(source.shape).numel()
            numbers[pattern] = torch.arange(start, start + count, dtype=torch.int32).view(source.shape)
            start += count
        made = self._made(recipe, numbers)
        for order in permutations(numbers):
            if torch.equal(made, torch.cat([numbers[pattern] for pattern in order], dim=-2).view(made.shape)):
                return list(order)
        raise CheckpointError(
            f"{named(sources.values())}: the conversion to {recipe.target!r} does more than put pieces one below the other, which "
            "is all that is done for quantized ones"
        )

    @property
    def schema(self) -> Schema:
        """The schema of records that hold the experts as they are in the checkpoint."""
        fields: dict[str, tuple[tuple[int, ...], str]] = {}
        for recipe in self._recipes[self._layout.layers[0]]:
            sources = recipe.of(0)
            if _is_quantized(sources):
                fields.update((name, spec_of(stored)) for name, stored in self._fields(recipe, sources))
            else:
                dtypes = sorted({spec_of(stored)[1] for source in sources.values() for stored in stored_of(source)})
                fields[recipe.tensor.name] = recipe.tensor.shape, dtypes[0] if len(dtypes) == 1 else "float32"
        return Schema.param(fields)

    @property
    def is_quantized(self) -> bool:
        """Whether any tensor of its experts is."""
        return any(_is_quantized(recipe.of(0)) for recipes in self._recipes.values() for recipe in recipes)

    def _made(self, recipe: Recipe, values: Mapping[str | None, Tensor]) -> Tensor:
        """The module's tensor of one expert. Raises what a conversion raises."""
        by_pattern = {pattern: value for pattern, value in values.items() if pattern is not None}
        if not by_pattern:
            (value,) = values.values()
            return value if recipe.is_per_expert else value[0]
        made = self._conversions.convert(recipe.target, by_pattern, shape=(1, *recipe.tensor.shape))
        if made is None or made.shape[0] != 1:
            raise ValueError("its conversion does not make one expert of one expert's tensors")
        return made[0]

    def sources(self, key: ExpertKey) -> Iterator[StoredTensor]:
        """The stored tensors that are read for one expert."""
        layer, expert = key
        for recipe in self._recipes[layer]:
            for tensor in recipe.of(expert).values():
                yield from stored_of(tensor)

    def read(self, key: ExpertKey, files: Files) -> dict[str, Tensor]:
        """The tensors of one expert, by name, in the checkpoint's dtype. At most twice their size is held meanwhile.

        Raises CheckpointError naming file and tensor, or a file that is not as it was when the checkpoint was opened.
        """
        layer, expert = key
        values: dict[str, Tensor] = {}
        for recipe in self._recipes[layer]:
            sources = recipe.of(expert)
            if _is_quantized(sources):
                values.update((name, read_tensor(stored, files)) for name, stored in self._fields(recipe, sources))
                continue
            parts = {pattern: read_tensor(stored, files) for pattern, source in sources.items() for stored in stored_of(source)}
            values[recipe.tensor.name] = self._made(recipe, parts)
        check_unchanged(self._states, {stored.file for stored in self.sources(key)})
        return values

    def stored(self) -> Iterator[StoredTensor]:
        """All tensors of the checkpoint that the experts are made of."""
        for recipes in self._recipes.values():
            for recipe in recipes:
                for tensors in recipe.sources.values():
                    for tensor in tensors:
                        yield from stored_of(tensor)

    def places(self, key: ExpertKey) -> Iterator[tuple[str, StoredTensor, int | None]]:
        """Yields the fields of a record of `schema`, each with the tensor of the checkpoint that it is, or is a row of, and that
        row. Raises CheckpointError where a field is more than that."""
        layer, expert = key
        for recipe in self._recipes[layer]:
            row, sources = None if recipe.is_per_expert else expert, recipe.of(expert)
            for name, stored in self._fields(recipe, sources) if _is_quantized(sources) else self._whole(recipe, sources):
                yield name, stored, row

    def _whole(self, recipe: Recipe, sources: Mapping[str | None, CheckpointTensor]) -> Iterator[tuple[str, StoredTensor]]:
        """The field that one expert's plain `sources` are in a record that holds quantized ones beside it."""
        if len(self._order(recipe, sources)) > 1:
            raise CheckpointError(
                f"{named(sources.values())}: {recipe.target!r} is made of several tensors, which a record does not keep apart"
            )
        (source,) = sources.values()
        (stored,) = stored_of(source)
        yield recipe.tensor.name, stored

    def fingerprint(self, files: Files) -> str:
        """Tells this checkpoint's experts from those of another: their names, shapes, dtypes, and up to SAMPLES_MAX samples of
        SAMPLE_BYTES of their values, whatever the files are called. Two that differ only in other values have the same."""
        everything = [*self.stored()]
        hashed = hashlib.blake2b(digest_size=16)
        for tensor in everything:
            hashed.update(repr((tensor.name, tensor.dtype, tensor.shape)).encode())
        for tensor in everything[:: -(-len(everything) // SAMPLES_MAX)]:
            count = min(SAMPLE_BYTES, tensor.length_bytes)
            at = tensor.offset_bytes + (tensor.length_bytes - count) // 2
            sample = memoryview(bytearray(count))
            files.read(StoredTensor(tensor.file, tensor.name, "U8", (count,), at), sample)
            hashed.update(sample)
        return hashed.hexdigest()


def read_tensor(stored: StoredTensor, files: Files) -> Tensor:
    """The tensor, in memory of its own. Raises CheckpointError naming file and tensor."""
    buffer = mapped((stored.length_bytes,), torch.uint8)
    files.read(stored, buffer.numpy().data)
    return buffer.view(_torch_dtype(stored)).reshape(stored.shape)


def _torch_dtype(stored: StoredTensor) -> torch.dtype:
    return TORCH_DTYPES[DTYPES[stored.dtype]]


def find_experts(conversions: Conversions, model: nn.Module, layout: ExpertLayout, checkpoint: Checkpoint) -> Found:
    """The tensors of `checkpoint` that become the experts' parameters."""
    targets = expert_parameters(model, layout)
    found: dict[str, dict[str | None, list[CheckpointTensor]]] = {}
    tensors = paired(checkpoint.tensors)
    for name in sorted(tensors, key=natural_order):
        target, pattern = conversions.rename(name, targets)
        if target in targets:
            found.setdefault(target, {}).setdefault(pattern, []).append(tensors[name])
    return found


def expert_parameters(model: nn.Module, layout: ExpertLayout) -> dict[str, int]:
    """The names of the experts' parameters in the model, each with its layer."""
    targets = {}
    for layer, path in layout.modules.items():
        module = model.get_submodule(path)
        children = module_list.expert_names(module) if module_list.is_container(module) else [""]
        for child in children:
            inner = f"{path}.{child}" if child else path
            targets.update({f"{inner}.{tensor.name}": layer for tensor in layout.tensors})
    return targets


def _is_quantized(sources: Mapping[str | None, CheckpointTensor]) -> bool:
    return any(isinstance(source, QuantizedTensor) for source in sources.values())


def _has_all(tensors: tuple[CheckpointTensor, ...], experts: int) -> bool:
    return len(tensors) == 1 and all(len(one.shape) > 1 and one.shape[0] == experts for one in stored_of(tensors[0]))


def _others(tensor: ExpertTensor, found: Found) -> str:
    """Words for an error where a layer lacks `tensor`: what others have."""
    for target, by_pattern in found.items():
        if target.endswith(f".{tensor.name}"):
            return f"; another layer has {named(tensors[0] for tensors in by_pattern.values())}"
    return ""


def _lacking(tensors: tuple[CheckpointTensor, ...], experts: int) -> str:
    """Words for an error where there is not one tensor for each expert: the missing name, where it can be told."""
    stored = [stored_of(tensor)[0] for tensor in tensors]
    split = [re.split(r"(\d+)", each.name) for each in stored]
    varying = [place for place in range(1, len(split[0]), 2) if len({parts[place] for parts in split}) > 1]
    if len(varying) == 1 and len({len(parts) for parts in split}) == 1:
        there = {int(parts[varying[0]]) for parts in split}
        missing = next((expert for expert in range(experts) if expert not in there), None)
        if missing is not None:
            parts = [*split[0]]
            parts[varying[0]] = str(missing)
            return f"tensor {''.join(parts)!r} is missing (others of its kind are in {stored[0].file.name})"
    return f"{len(tensors)} tensors like {stored[0].name!r} ({stored[0].file.name})"
