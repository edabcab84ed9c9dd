"""Where gradients lie that were pushed, and what an apply takes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paramstore.core.key import ExpertKey


class UploadMemory(Protocol):
    """A segment of a session's upload area."""

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class GradientRange:
    """Where a rank's pending gradient of one key lies: in its session's upload area, `length_bytes` from `offset_bytes`."""

    memory: UploadMemory
    offset_bytes: int
    length_bytes: int
    rank: int = 0

    def view(self) -> memoryview:
        return self.memory.view(self.offset_bytes, self.length_bytes)


Claimed = dict[ExpertKey, tuple[GradientRange, ...]]
"""What an apply updates, and with which gradients, summed in this order: none for zeros."""
