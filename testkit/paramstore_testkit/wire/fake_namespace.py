"""The namespaces of `FakeDaemon`: whole experts in memory, an update that is plain gradient descent, no disk.

It is good enough to lease, initialise, push, apply, commit and read, and wrong on purpose wherever a client must not look.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paramstore.config import SEGMENT_ALIGNMENT_BYTES
from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.schema import Field, Schema
from paramstore.errors import StepOutOfOrder, UnknownKey
from paramstore.memory.arena import PageKind, PageReport, Segment, allocate_shared, allocate_upload
from paramstore.wire.messages import BeginApply

PAGES = PageReport(shared=PageKind.SMALL, private=PageKind.SMALL, advice="")
SLOTS_PER_SEGMENT = 4

Values = dict[str, Tensor]


def segment_bytes(size_bytes: int) -> int:
    """Rounds `size_bytes` up to a size that a segment may have."""
    return -(-size_bytes // SEGMENT_ALIGNMENT_BYTES) * SEGMENT_ALIGNMENT_BYTES


def read_fields(segment: Segment, offset_bytes: int, fields: tuple[Field, ...]) -> Values:
    """Copies `fields` of the image at `offset_bytes`."""
    return {entry.name: _view(segment, offset_bytes, entry).clone() for entry in fields}


def write_fields(segment: Segment, offset_bytes: int, fields: tuple[Field, ...], values: Values) -> None:
    for entry in fields:
        _view(segment, offset_bytes, entry).copy_(values[entry.name])


def _view(segment: Segment, offset_bytes: int, entry: Field) -> Tensor:
    memory = segment.view(offset_bytes + entry.offset_bytes, entry.length_bytes)
    return torch.frombuffer(memory, dtype=getattr(torch, entry.dtype)).view(entry.shape)


class FakeMemory:
    """Segments by id, as the daemon hands them out; ids are never reused."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self._next_id = 1

    def add_shared(self, size_bytes: int) -> int:
        return self._add(allocate_shared(segment_bytes(size_bytes), PAGES))

    def add_upload(self, size_bytes: int) -> int:
        return self._add(allocate_upload(segment_bytes(size_bytes), PAGES))

    def _add(self, segment: Segment) -> int:
        number = self._next_id
        self._next_id += 1
        self.segments[number] = segment
        return number

    def drop(self, segment: int) -> None:
        self.segments.pop(segment).close()

    def close(self) -> None:
        for segment in list(self.segments):
            self.drop(segment)


@dataclass
class FakeNamespace:
    """One namespace. `values` are fp32 for adamw, else as given; slots are written once per (key, version)."""

    name: str
    schema: Schema
    space: KeySpace
    memory: FakeMemory
    committed_step: int | None = None
    prepared: tuple[int, bytes] | None = None
    epoch: int = 1
    values: dict[ExpertKey, Values] = field(default_factory=dict)
    versions: dict[ExpertKey, int] = field(default_factory=dict)
    pending: dict[ExpertKey, tuple[int, int]] = field(default_factory=dict)
    extras: dict[int, bytes] = field(default_factory=dict)
    slots: dict[tuple[ExpertKey, int], tuple[int, int]] = field(default_factory=dict)
    opened: BeginApply | None = None
    arena: int = 0
    used_slots: int = SLOTS_PER_SEGMENT

    def describe(self) -> dict[str, object]:
        return {
            "name": self.name, "schema": self.schema.describe(), "layers": list(self.space.layers),
            "experts": self.space.experts, "committed_step": self.committed_step,
            "prepared_step": self.prepared[0] if self.prepared is not None else None, "epoch": self.epoch,
        }  # fmt: skip

    def put(self, key: ExpertKey, segment: int, offset_bytes: int) -> None:
        self.values[key] = read_fields(self.memory.segments[segment], offset_bytes, self.schema.initial_fields())
        self.versions[key] = 0

    def slot(self, key: ExpertKey) -> tuple[int, int, int, int]:
        """Place of the key's param, which is written on first use."""
        if key not in self.values:
            raise UnknownKey(f"key {key} was never put into {self.name!r}")
        version = self.versions[key]
        if (key, version) not in self.slots:
            self.slots[key, version] = self._write_param(key)
        segment, offset_bytes = self.slots[key, version]
        return segment, offset_bytes, self.epoch, version

    def _write_param(self, key: ExpertKey) -> tuple[int, int]:
        part = self.schema.part("param")
        if self.used_slots == SLOTS_PER_SEGMENT:
            self.arena, self.used_slots = self.memory.add_shared(SLOTS_PER_SEGMENT * part.image_bytes), 0
        offset_bytes = self.used_slots * part.image_bytes
        self.used_slots += 1
        write_fields(self.memory.segments[self.arena], offset_bytes, part.fields, self.values[key])
        return self.arena, offset_bytes

    def forget_segment(self, segment: int) -> None:
        """Lets slots in that segment be written anew, elsewhere, when they are next asked for."""
        self.slots = {copy: place for copy, place in self.slots.items() if place[0] != segment}
        if self.arena == segment:
            self.used_slots = SLOTS_PER_SEGMENT

    def gradient(self, key: ExpertKey) -> Values:
        segment, offset_bytes = self.pending[key]
        return read_fields(self.memory.segments[segment], offset_bytes, self.schema.gradient_fields())

    def norm(self) -> float:
        squares = [tensor.double().square().sum() for key in self.pending for tensor in self.gradient(key).values()]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    def apply(self, lr: float, grad_scale: float) -> int:
        """Sets value -= lr * grad_scale * gradient. Returns how many records changed."""
        count = len(self.pending)
        for key in self.pending:
            gradient = self.gradient(key)
            self.values[key] = {
                name: value - lr * grad_scale * gradient[name].float() for name, value in self.values[key].items()
            }
            self.versions[key] += 1
        self.pending.clear()
        return count

    def write_record(self, key: ExpertKey, segment: int, offset_bytes: int) -> int:
        """Writes the record's stored image, with moments of zero. Returns its version."""
        stored = self.schema.stored
        zeros = {entry.name: torch.zeros(entry.shape) for entry in stored.fields}
        named = {f"master/{name}": value for name, value in self.values[key].items()}
        write_fields(self.memory.segments[segment], offset_bytes, stored.fields, {**zeros, **self.values[key], **named})
        return self.versions[key]

    def commit(self, step: int, extra: bytes) -> None:
        if self.committed_step is not None and step <= self.committed_step:
            raise StepOutOfOrder(f"step {step} of {self.name!r} is not above {self.committed_step}")
        self.committed_step = step
        self.extras[step] = extra
