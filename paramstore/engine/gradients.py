"""Places of pushed gradients, and the form in which an apply takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paramstore.core.key import ExpertKey


class UploadMemory(Protocol):
    """A segment of a session's upload area."""

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class GradientRange:
    """The place of a rank's pending gradient of one key: `length_bytes` at `offset_bytes` of its session's upload area."""

    memory: UploadMemory
    offset_bytes: int
    length_bytes: int
    rank: int = 0

    def view(self) -> memoryview:
        return self.memory.view(self.offset_bytes, self.length_bytes)


Claimed = dict[ExpertKey, tuple[GradientRange, ...]]
"""The keys that an apply updates, each with its gradients, which are summed in this order; an empty tuple stands for zeros."""
