"""Writes a model with its experts in a store as a checkpoint of the hub: names, dtypes and values of `save_pretrained`.

- Streamed: each expert goes from a lease to its place in the files. Beyond the leases this process holds the pieces of one expert,
  and, of the dense weights, the copies that a conversion makes for one layer.
- Complete or not there: files are written under other names and flushed; the index, or the one file of a checkpoint without, gets
  its name last. The files of an earlier checkpoint in the directory are removed first.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from paramstore.clock import MonotonicClock
from paramstore.directories import flush_directory
from paramstore.errors import CheckpointError, ConfigError
from paramstore_client.hf.checkpoint.hub_names import HubNames, PackedNames, dense_groups
from paramstore_client.hf.checkpoint.progress import Progress, Report, reported
from paramstore_client.hf.checkpoint.quantized_tensors import stored_of
from paramstore_client.hf.checkpoint.recipes import ExpertSource, expert_parameters, find_experts, read_tensor
from paramstore_client.hf.checkpoint.shards import INDEX, WEIGHTS, Checkpoint
from paramstore_client.hf.compat.conversions import Conversions, Reversion, natural_order, split, without_tied
from paramstore_client.hf.import_checkpoint import check_schema
from paramstore_client.hf.model.layout import ExpertLayout, find_layout
from paramstore_client.namespace import Namespace
from paramstore_client.quantized.packed import is_packed
from paramstore_client.safetensors_file import DTYPES, NAMES, Files, Shard, StoredTensor
from paramstore_client.source import load_ahead
from paramstore_client.tensors import DTYPES as TORCH_DTYPES

SHARD_BYTES_MAX = 50 * 10**9
"""Largest file: the default of `save_pretrained` in transformers 5."""
LEASED_AT_ONCE = 4
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
METADATA = {"format": "pt"}
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model", "chat_template*",
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote. step: that of the experts; None for the writer's working state. files: paths in `directory`.
    bytes_written: of tensors."""

    directory: Path
    step: int | None
    records: int
    files: tuple[str, ...]
    bytes_written: int
    seconds: float


def export_checkpoint(
    model: nn.Module, directory: str | Path, *, namespace: Namespace | None = None, at: int | None = None,
    dense: Checkpoint | None = None, tokenizer: object = None, max_shard_bytes: int = SHARD_BYTES_MAX,
    progress: Report | bool | None = None,
) -> Exported:  # fmt: skip
    """Writes the whole model into `directory` as a checkpoint of the hub, durable on return.

    Quantized experts go as they are into a checkpoint like their own, which is given as `dense`: the bytes that were imported.

    namespace: where the experts are; None: the one `model` is bound to. at: a committed step; None: what the handle sees, a
    writer's working state or a reader's step. dense: take everything else, as it is, from this checkpoint, and of `model` only its
    configuration and shape (it may be on meta). tokenizer: a directory whose tokenizer files are copied, or a tokenizer, which is
    saved. Raises ConfigError before anything is touched where `directory` is no place for it: it lies in a file, or shares one with
    a directory that is read from. SchemaMismatch, UnsupportedModel, StepDropped, CheckpointError, OSError; then there is no index.
    """
    clock = MonotonicClock()
    started_s = clock.now_s()
    layout = find_layout(model)
    source = _bound(model) if namespace is None else namespace
    check_schema(layout, source)
    _check_named(source, dense)
    target = Path(directory)
    if dense is not None:
        _check_apart(target, dense.directory)
    if isinstance(tokenizer, str | os.PathLike):
        _check_apart(target, Path(tokenizer))
    with ExitStack() as stack:
        view = source if at is None else stack.enter_context(source.reader(at))
        report = stack.enter_context(reported("export", progress))
        weights = _FileWeights(model, layout, dense) if dense is not None else _ModelWeights(model, layout)
        stack.callback(weights.close)
        names = _names(model, layout, weights, view)
        everything = weights.everything(names)
        _prepare(target)
        with TemporaryDirectory(prefix="configuration.partial.", dir=target) as fresh:
            like = None if dense is None else dense.directory
            _write_configuration(model, Path(fresh), tokenizer=tokenizer, like=like, is_packed=is_packed(view.schema))
            files = _move_files(Path(fresh), target)
        plan = split(everything, shard_bytes_max=max_shard_bytes)
        shards = _Shards(target, plan.filename_to_tensors, everything)
        stack.callback(shards.discard)
        weights.write(shards)
        for number, (key, values) in enumerate(_experts(view), start=1):
            for place, piece in names.pieces(key, values).items():
                shards.write(place.name, piece, row=place.row)
            report(Progress(number, len(view.keys()), shards.bytes_written))
        shards.publish()
        files += plan.filename_to_tensors
        if plan.is_sharded:
            files.append(INDEX)
            _write_index(target, plan.tensor_to_filename, {**_parameter_count(model, everything, names), **plan.metadata})
        flush_directory(target)
        seconds = clock.now_s() - started_s
        return Exported(target, view.view_step, len(view.keys()), tuple(sorted(files)), shards.bytes_written, seconds)


def _write_index(target: Path, weight_map: Mapping[str, str], metadata: Mapping[str, object]) -> None:
    index = {"metadata": metadata, "weight_map": weight_map}
    _write_text(target / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")


def _check_named(source: Namespace, dense: Checkpoint | None) -> None:
    """Raises ConfigError where nobody says how quantized experts are named in a checkpoint."""
    if is_packed(source.schema) and dense is None:
        raise ConfigError(f"namespace {source.name!r} holds quantized experts: give their checkpoint as dense=, which names them")


def _bound(model: nn.Module) -> Namespace:
    experts = getattr(getattr(model, "paramstore", None), "experts", None)
    if experts is None:
        way_on = "give namespace=, of a served one ps.hf.namespace(model)"
        raise ConfigError(f"export_checkpoint: the model is bound to no namespace: {way_on}")
    bound: Namespace = experts.namespace
    return bound


def _names(
    model: nn.Module, layout: ExpertLayout, weights: _ModelWeights | _FileWeights, view: Namespace
) -> HubNames | PackedNames:  # fmt: skip
    if is_packed(view.schema):
        assert isinstance(weights, _FileWeights), "refused before"
        return PackedNames(ExpertSource(model, layout, weights.checkpoint), view.schema)
    return HubNames(model, layout, weights.reversion, dtypes=_dtypes(view))


def _parameter_count(model: nn.Module, everything: Mapping[str, Tensor], names: HubNames | PackedNames) -> dict[str, int]:
    """Number of parameters as transformers counts them: without buffers. None where elements of tensors are no parameters."""
    if isinstance(names, PackedNames):
        return {}
    buffers = {name for name, _ in model.named_buffers()}
    return {"total_parameters": sum(tensor.numel() for name, tensor in everything.items() if name not in buffers)}


def _dtypes(namespace: Namespace) -> dict[str, torch.dtype]:
    """The dtype of each tensor of an expert, as a lease has it."""
    return {field.name: TORCH_DTYPES[field.dtype] for field in namespace.schema.part("param").fields}


def _experts(namespace: Namespace) -> Iterator[tuple[tuple[int, int], Mapping[str, Tensor]]]:
    """Every key with its tensors, valid until the next; while a few are leased and written, the next few are fetched."""
    keys = namespace.keys()
    count = max(1, min(LEASED_AT_ONCE, namespace.lease_slots // 2))
    parts = [keys[start : start + count] for start in range(0, len(keys), count)]
    for number, part in enumerate(parts):
        if number + 1 < len(parts):
            load_ahead(namespace, parts[number + 1])
        with namespace.acquire(part) as lease:
            for key in part:
                yield key, {field.name: lease[key][field.name] for field in namespace.schema.part("param").fields}


class _Shards:
    """The files that are being made. Owner of them until they are published."""

    def __init__(self, directory: Path, files: Mapping[str, list[str]], tensors: Mapping[str, Tensor]) -> None:
        self._shards: list[Shard] = []
        self._places: dict[str, tuple[Shard, StoredTensor]] = {}
        self.bytes_written = 0
        try:
            for file, names in files.items():
                described = [(name, NAMES[str(tensors[name].dtype).removeprefix("torch.")], tensors[name].shape) for name in names]
                shard = Shard(directory / file, described, metadata=METADATA)
                self._shards.append(shard)
                self._places.update({name: (shard, place) for name, place in shard.tensors.items()})
        except BaseException:
            self.discard()
            raise

    def write(self, name: str, tensor: Tensor, *, row: int | None = None) -> None:
        """Writes `tensor`, the whole of `name` or, as `[1, ...]`, row `row` of it."""
        shard, place = self._places[name]
        data = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        shard.write(place if row is None else place.rows(row, 1), data.numpy().data)
        self.bytes_written += data.numel()

    def publish(self) -> None:
        """Gives all files their names; on return they are there."""
        for shard in self._shards:
            shard.publish()

    def discard(self) -> None:
        """Removes what was not published."""
        for shard in self._shards:
            shard.discard()


class _ModelWeights:
    """Everything but the experts, from a model in memory."""

    def __init__(self, model: nn.Module, layout: ExpertLayout) -> None:
        self.reversion = Reversion(model)
        experts = expert_parameters(model, layout)
        self._dense = without_tied(model, {name: tensor for name, tensor in model.state_dict().items() if name not in experts})
        sharded = next((name for name, tensor in self._dense.items() if hasattr(tensor, "full_tensor")), None)
        if sharded is not None:
            raise ConfigError(
                f"export_checkpoint: {sharded!r} is sharded over ranks: gather the dense weights first "
                "(torch.distributed.checkpoint.state_dict.get_model_state_dict(full_state_dict=True)), or give dense="
            )

    def everything(self, names: HubNames | PackedNames) -> dict[str, Tensor]:
        """All tensors of the checkpoint, on meta, in the order in which they are saved."""
        assert isinstance(names, HubNames), "quantized experts go beside their checkpoint's own dense part"
        metas = {name: torch.empty_like(tensor, device="meta") for name, tensor in self._dense.items()}
        return self.reversion.revert({**metas, **names.parameters()})

    def write(self, shards: _Shards) -> None:
        for group in dense_groups(self._dense):
            for name, tensor in self.reversion.revert({name: self._dense[name] for name in group}).items():
                shards.write(name, tensor)

    def close(self) -> None:
        self._dense = {}


class _FileWeights:
    """Everything but the experts, as another checkpoint has it. If it has experts, it says how they are named and cut."""

    def __init__(self, model: nn.Module, layout: ExpertLayout, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        conversions = Conversions(model)
        found = find_experts(conversions, model, layout, checkpoint)
        everything = (tensor for sources in found.values() for tensors in sources.values() for tensor in tensors)
        experts = {stored.name for tensor in everything for stored in stored_of(tensor)}
        self.reversion = Reversion(model, conversions.used() if experts else None)
        self._tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in experts}
        if not self._tensors:
            raise CheckpointError(f"{checkpoint.directory} has no dense weights")
        self._files = Files()

    def everything(self, names: HubNames | PackedNames) -> dict[str, Tensor]:
        metas = {
            name: torch.empty(tensor.shape, dtype=TORCH_DTYPES[DTYPES[tensor.dtype]], device="meta")
            for name, tensor in self._tensors.items()
        }
        found = {**metas, **names.tensors()}
        return {name: found[name] for name in sorted(found, key=natural_order)}

    def write(self, shards: _Shards) -> None:
        for name, tensor in self._tensors.items():
            shards.write(name, read_tensor(tensor, self._files))

    def close(self) -> None:
        self._files.close()


def _check_apart(target: Path, source: Path) -> None:
    """Raises ConfigError where a file of `target` is one of `source` too, by whatever path or link: it would be replaced."""
    kept = {(status.st_dev, status.st_ino) for status in map(Path.stat, filter(Path.is_file, source.glob("*")))}
    for file in filter(Path.is_file, target.glob("*")):
        status = file.stat()
        if (status.st_dev, status.st_ino) in kept:
            raise ConfigError(f"{target} is {source}, which is read, or shares {file.name} with it: export into another directory")


def _prepare(directory: Path) -> None:
    """Makes the directory, and removes a checkpoint from it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{directory} is no directory, or lies in a file: export into another") from error
    old = [directory / INDEX, directory / WEIGHTS, *(file for file in directory.iterdir() if SHARD_NAME.fullmatch(file.name))]
    for file in old:  # the index first
        file.unlink(missing_ok=True)
    flush_directory(directory)


def _write_configuration(model: Any, directory: Path, *, tokenizer: object, like: Path | None, is_packed: bool) -> None:
    """Writes what `save_pretrained` has beside the weights. model: of transformers; its own configuration stays as it is. like: a
    checkpoint whose generation config is the model's, and where its experts are packed the configuration too: a loaded model's says
    how it was dequantized."""
    config = deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(directory)
    if is_packed and like is not None:
        shutil.copyfile(like / CONFIG, directory / CONFIG)
    if like is not None and (like / GENERATION_CONFIG).exists():
        shutil.copyfile(like / GENERATION_CONFIG, directory / GENERATION_CONFIG)
    elif model.can_generate():
        model.generation_config.save_pretrained(directory)
    if isinstance(tokenizer, str | os.PathLike):
        for pattern in TOKENIZER_FILES:
            for file in sorted(Path(tokenizer).glob(pattern)):
                shutil.copyfile(file, directory / file.name)
    elif tokenizer is not None:
        tokenizer.save_pretrained(directory)  # type: ignore[attr-defined]  # any of transformers' tokenizers and processors


def _move_files(source: Path, target: Path) -> list[str]:
    """Moves all files from `source` to `target`, in place of those of their names. Returns their paths in it."""
    files = [file.relative_to(source) for file in source.rglob("*") if file.is_file()]
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).replace(target / file)
    return [str(file) for file in files]


def _write_text(file: Path, text: str) -> None:
    """Writes `text` to `file`, which is there as a whole on return."""
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    partial.rename(file)
