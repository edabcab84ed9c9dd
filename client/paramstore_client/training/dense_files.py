"""Files of dense weights, each of one step: written and synced before the step is committed, which names it; whole, or refused.

- A file's name holds its checksum: no file is ever replaced by another, so that a step whose commit fails, or comes again after a
  rollback, leaves the file of the committed one as it is.
- A file goes when a step above its own is committed into the same directory and no step that can be opened names it. What lies
  above the newest step is left alone: a writer that came later may be about to commit it. Other directories are never looked into:
  a copy of this store may name files there, and nobody here knows of it. Who moves on to another one removes the old.
- Weights are loaded into the tensors that the model has, in place.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from paramstore.directories import flush_directory
from paramstore.errors import CheckpointError, ConfigError, SchemaMismatch, StepDropped
from paramstore_client.handle.dense_part import DensePart
from paramstore_client.namespace import Namespace
from paramstore_client.safetensors_file import DTYPES, NAMES, Files, Shard, StoredTensor
from paramstore_client.tensors import DTYPES as TORCH_DTYPES

_log = logging.getLogger(__name__)

METADATA = {"format": "pt"}
SHOWN_MAX = 3
"""Names that a message lists."""


class DenseFiles:
    """The dense weights of one namespace's steps in one directory, which is made. Used by the ranks that write the namespace."""

    def __init__(self, directory: Path, namespace: Namespace) -> None:
        self._directory = directory.absolute()
        self._namespace = namespace
        self._stem = f"{namespace.name}.{namespace.store_uuid[:8]}"
        self._ours = re.compile(rf"{re.escape(self._stem)}\.(\d+)\.\d+(\.[0-9a-f]{{16}}\.safetensors|\.partial)")

    def write(self, model: nn.Module, step: int, extra: bytes) -> bytes:
        """Writes the dense weights of `step`, durable on return, and returns what to commit with it. All ranks call it; rank 0
        writes. extra: the caller's bytes. Raises CheckpointError in all of them where rank 0 cannot write, ConfigError."""
        tensors, packed = dense_tensors(model), b""
        wholes = ((name, _whole(tensors[name])) for name in sorted(tensors))
        problem: Exception | None = None
        try:
            if self._namespace.rank == 0:
                packed = self._write(tensors, wholes, step, extra)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait to be told
            problem = error
        for _ in wholes:  # all ranks make each tensor whole, whatever has become of the file
            pass
        return self._told(packed, problem, step)

    def remove_old(self) -> None:
        """Removes files of steps that are no more, in rank 0. To be called after a commit, before the next one's `write`. What
        cannot be removed stays, and is logged."""
        if self._namespace.rank != 0:
            return
        named, steps = set(), self._namespace.steps()
        for step in steps:
            try:
                dense = DensePart.from_extra(self._namespace.extra(step))
            except StepDropped:
                continue
            except CheckpointError:
                return  # nobody here can tell which file it names
            if dense is not None:
                named.add(dense.file)
        try:
            for file in list(self._directory.iterdir()):
                found = self._ours.fullmatch(file.name)
                if found is not None and int(found[1]) < max(steps) and file.name not in named:
                    file.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("old files of dense weights stay in %s: %s", self._directory, error)

    def _write(self, tensors: Mapping[str, Tensor], wholes: Iterable[tuple[str, Tensor]], step: int, extra: bytes) -> bytes:
        shard = self._begin(tensors, step)
        try:
            for name, whole in wholes:
                shard.write(shard.tensors[name], _bytes(whole.cpu().contiguous()))
            return self._publish(shard, extra)
        finally:
            shard.discard()

    def _begin(self, tensors: Mapping[str, Tensor], step: int) -> Shard:
        if not self._directory.is_dir():
            self._directory.mkdir(parents=True, exist_ok=True)
            flush_directory(self._directory.parent)
        described = [(name, NAMES[str(tensor.dtype).removeprefix("torch.")], tensor.shape) for name, tensor in tensors.items()]
        return Shard(self._directory / f"{self._stem}.{step}.{self._namespace.epoch}", described, metadata=METADATA)

    def _publish(self, shard: Shard, extra: bytes) -> bytes:
        with Files() as files:
            size_bytes, xxh3 = files.checksum(shard.partial)
        name = f"{shard.file.name}.{xxh3}.safetensors"
        shard.publish(name)
        flush_directory(self._directory)
        return DensePart(str(self._directory), name, size_bytes, xxh3, extra).to_extra()

    def _told(self, packed: bytes, problem: Exception | None, step: int) -> bytes:
        """What rank 0 has made, in all ranks; or its error."""
        said: list[Any] = [packed, None if problem is None else str(problem)]
        if self._namespace.world_size > 1:
            torch.distributed.broadcast_object_list(said, src=0)
        made, reason = said
        if reason is not None:
            raise CheckpointError(
                f"the dense weights of step {step} cannot be written to {self._directory}, so it is not committed: {reason}"
            ) from problem
        assert isinstance(made, bytes), "rank 0 sends one of both"
        return made


@dataclass(frozen=True, slots=True)
class DenseFile:
    """A file of dense weights that was found whole, and is open. size_bytes: of the file."""

    tensors: Mapping[str, StoredTensor]
    size_bytes: int
    files: Files

    def check_fits(self, model: nn.Module) -> None:
        """Raises SchemaMismatch naming the tensors in which the file and the model differ: in name, shape, or kind of dtype."""
        targets = dense_tensors(model)
        for names, whose in (
            (targets.keys() - self.tensors.keys(), "are missing in the file of the dense weights"),
            (self.tensors.keys() - targets.keys(), "of the file of the dense weights are not in the model"),
        ):
            if names:
                raise SchemaMismatch(f"{_list(names)} {whose}: it is of another model")
        for name, target in targets.items():
            stored = self.tensors[name]
            dtype = _dtype(stored)
            is_alike = dtype == target.dtype or (dtype.is_floating_point and target.is_floating_point())
            if stored.shape != tuple(target.shape) or not is_alike:
                raise SchemaMismatch(
                    f"{name!r} has shape {list(target.shape)}, {target.dtype} in the model, and {list(stored.shape)}, {dtype} in "
                    "the file of the dense weights: it is of another model"
                )

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Loads the weights into the model's own tensors; floating point ones are cast to the dtype that they have there.

        Raises CheckpointError where the file cannot be read any more; the model's weights are then partly those of before.
        """
        for name, target in dense_tensors(model).items():
            stored = self.tensors[name]
            value = torch.empty(stored.shape, dtype=_dtype(stored))
            self.files.read(stored, _bytes(value))
            if isinstance(target, DTensor):
                target.copy_(distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None))
            else:
                target.copy_(value)


@contextmanager
def opened(dense: DensePart, directory: Path | None = None) -> Iterator[DenseFile]:
    """Opens the file of `dense`, found whole. directory: where it lies now; None: where it lay.

    Raises CheckpointError naming the file, where it is missing, cut off, or has other bytes than those that were committed."""
    file = dense.path if directory is None else directory / dense.file
    with Files() as files:
        size_bytes, xxh3 = files.checksum(file)
        if size_bytes != dense.size_bytes:
            raise CheckpointError(f"{file}: {size_bytes} bytes, where {dense.size_bytes} were committed")
        if xxh3 != dense.xxh3:
            raise CheckpointError(f"{file}: its checksum is {xxh3}, where {dense.xxh3} was committed")
        yield DenseFile(files.header(file), size_bytes, files)


def dense_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model's state dict by name, as aliases: parameters and buffers that are saved. Of tied ones the first.

    Raises ConfigError where something else is in the state dict, or a tensor has no memory."""
    owners: dict[str, object] = dict(model.named_parameters(remove_duplicate=False))
    owners.update(model.named_buffers(remove_duplicate=False))
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            raise ConfigError(f"{name!r} in the model's state dict is no tensor in memory: a file of dense weights cannot hold it")
        owner = id(owners.get(name, tensor))
        if owner not in seen:
            seen.add(owner)
            tensors[name] = tensor
    return tensors


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    data: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return data


def _dtype(stored: StoredTensor) -> torch.dtype:
    return TORCH_DTYPES[DTYPES[stored.dtype]]


def _list(names: set[str]) -> str:
    shown = ", ".join(map(repr, sorted(names)[:SHOWN_MAX]))
    return shown if len(names) <= SHOWN_MAX else f"{shown} and {len(names) - SHOWN_MAX} more"
