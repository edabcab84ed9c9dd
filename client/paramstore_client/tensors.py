"""Tensors over mapped memory, and the checks of what callers hand in. The one file of this layer that needs torch.

A tensor made here keeps its mapping alive, so it can never point at memory that is gone; whether the bytes are still
its own is what the lease says.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Mapping as FieldMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch._subclasses.fake_tensor import FakeTensor

from paramstore.core.key import ExpertKey
from paramstore.core.schema import ITEM_BYTES, MASTER_DTYPE, Field, Schema
from paramstore.errors import LeaseError, SchemaMismatch
from paramstore.memory.shared import Mapping

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def field_view(mapping: Mapping, field: Field, start_bytes: int) -> Tensor:
    """`field` of the image that starts at `start_bytes` of `mapping`, without a copy."""
    with torch.inference_mode(False):  # it may outlive such a block, and autograd saves no tensor that was made in one
        flat = torch.frombuffer(
            mapping.buffer, dtype=DTYPES[field.dtype], count=field.elements, offset=start_bytes + field.offset_bytes
        )
        return flat.view(field.shape)


def image_view(mapping: Mapping, start_bytes: int, length_bytes: int) -> Tensor:
    """The bytes of a whole image, uint8, without a copy."""
    return torch.frombuffer(mapping.buffer, dtype=torch.uint8, count=length_bytes, offset=start_bytes)


def mapped(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in pages of their own, which go back to the system with the tensor. For few, large tensors: malloc keeps much of the
    memory that those leave, and more of it the larger the tensors were that it freed before."""
    elements = math.prod(shape)
    memory = mmap.mmap(-1, max(1, elements) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype)[:elements].view(tuple(shape))


@dataclass(slots=True)
class Guard:
    """Debug mode: whether tensors of one lease may be used. reason: None while they may; else the text of the error they raise."""

    reason: str | None = None

    def check(self) -> None:
        if self.reason is not None:
            raise LeaseError(self.reason)


class GuardedTensor(Tensor):
    """Debug mode: a tensor over leased bytes, or a view of one. Every use of it asks its guard first.

    What is computed from it is a plain tensor, unless it lies in the same memory.
    """

    guard: Guard

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: FieldMapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        used = list(_guarded([*args, *given.values()]))
        with DisableTorchFunctionSubclass():
            guards = {tensor.untyped_storage().data_ptr(): tensor.guard for tensor in used if hasattr(tensor, "guard")}
            for guard in guards.values():
                guard.check()
            return _keep_guarded(func(*args, **given), guards)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch gives its own no type
        if self.guard.reason is not None:
            return "<tensor of a released lease>"
        with DisableTorchFunctionSubclass():
            return repr(self.as_subclass(Tensor))

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.guard.check()
        with DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch left it so


def guarded(tensor: Tensor, guard: Guard) -> GuardedTensor:
    """`tensor` in debug mode: every use of it, and of views of it, raises LeaseError once `guard` has a reason."""
    view: GuardedTensor = tensor.as_subclass(GuardedTensor)
    view.guard = guard
    return view


def end_graphs_of(tensor: Tensor) -> None:
    """Marks `tensor` as changed, so that autograd, which asks no guard, refuses a backward that needs its old bytes."""
    with DisableTorchFunctionSubclass():
        if not tensor.is_inference():  # inference tensors have no graph and no version to count
            torch.autograd.graph.increment_version(tensor)


def _guarded(values: Iterable[Any]) -> Iterator[GuardedTensor]:
    for value in values:
        if isinstance(value, GuardedTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _guarded(value)
        elif isinstance(value, dict):
            yield from _guarded(value.values())


def _keep_guarded(result: Any, guards: FieldMapping[int, Guard]) -> Any:
    """`result`, with every tensor in it that lies in guarded memory guarded too."""
    if isinstance(result, list | tuple) and type(result) in (list, tuple):
        return type(result)(_keep_guarded(value, guards) for value in result)
    if not isinstance(result, Tensor) or isinstance(result, GuardedTensor) or result.layout is not torch.strided:
        return result
    guard = guards.get(result.untyped_storage().data_ptr())
    return result if guard is None else guarded(result, guard)


def check_values(key: ExpertKey, values: FieldMapping[str, Tensor], fields: Sequence[Field], *, schema: Schema) -> None:
    """Returns if `values` has exactly `fields`, each of its shape and of a dtype that converts without loss.

    Raises SchemaMismatch naming key and field.
    """
    if not isinstance(values, FieldMapping):
        raise SchemaMismatch(f"key {key}: a {type(values).__name__} is no mapping: give {{field: tensor}}")
    wanted = [field.name for field in fields]
    missing = [name for name in wanted if name not in values]
    unknown = [str(name) for name in values if name not in wanted]
    if missing or unknown:
        wrong = [f"{word} {', '.join(map(repr, names))}" for word, names in (("missing", missing), ("unknown", unknown)) if names]
        raise SchemaMismatch(f"key {key}: {'; '.join(wrong)}: give every field of the schema: {', '.join(wanted)}")
    for field in fields:
        tensor = values[field.name]
        if not isinstance(tensor, Tensor):
            raise SchemaMismatch(f"key {key}, field {field.name!r}: a {type(tensor).__name__} is no tensor")
        if kind := _kind_without_values(tensor):
            raise SchemaMismatch(f"key {key}, field {field.name!r}: a {kind} has not every value in memory: give a dense one")
        if tuple(tensor.shape) != field.shape:
            raise SchemaMismatch(f"key {key}, field {field.name!r}: shape {tuple(tensor.shape)}, the schema has {field.shape}")
        if NAMES.get(tensor.dtype) not in _accepted_dtypes(field.dtype, schema=schema):
            raise SchemaMismatch(f"key {key}, field {field.name!r}: dtype {tensor.dtype}, the schema takes {field.dtype}")


def _kind_without_values(tensor: Tensor) -> str | None:
    """The kind of a tensor that cannot be copied into a field; None for one that can."""
    if isinstance(tensor, FakeTensor):
        return "FakeTensor"
    if tensor.is_meta or tensor.is_nested:  # a nested one may call itself strided, and has no shape
        return "meta tensor" if tensor.is_meta else "nested tensor"
    return None if tensor.layout is torch.strided else f"{tensor.layout} tensor"


def copy_into(values: FieldMapping[str, Tensor], fields: Sequence[Field], mapping: Mapping, start_bytes: int) -> None:
    """Writes checked `values`, on whichever devices they are, to their places."""
    for field in fields:
        field_view(mapping, field, start_bytes).copy_(values[field.name].detach())


def add_into(values: FieldMapping[str, Tensor], fields: Sequence[Field], mapping: Mapping, start_bytes: int) -> None:
    """Adds checked `values` to the fields that are there, in their dtypes."""
    for field in fields:
        target = field_view(mapping, field, start_bytes)
        target.add_(values[field.name].detach().to(device="cpu", dtype=target.dtype))


def stored_copies(schema: Schema, mapping: Mapping, start_bytes: int) -> dict[str, Tensor]:
    """Copies of every stored field of the record image at `start_bytes`, and of its param fields by name."""
    copies = {field.name: field_view(mapping, field, start_bytes).clone() for field in schema.stored.fields}
    if schema.is_trainable:
        for field in schema.part("param").fields:
            # `to` returns `master` itself where the dtypes are equal: the caller gets two tensors, never one twice.
            copies[field.name] = copies[f"master/{field.name}"].to(DTYPES[field.dtype], copy=True)
    return copies


def _accepted_dtypes(dtype: str, *, schema: Schema) -> tuple[str, ...]:
    """Dtypes that may be written where `dtype` is kept: itself and, for training, the shorter floats that fp32 holds exactly."""
    if schema.is_trainable and dtype == MASTER_DTYPE:
        return ("float32", "bfloat16", "float16")
    return (dtype,)
