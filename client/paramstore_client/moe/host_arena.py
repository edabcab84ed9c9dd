"""Memory of the host in which a layer's activations wait for backward; page-locked where they come from a GPU."""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

from paramstore.errors import CapacityError

ROUND_BYTES = 1 << 16
STEPS = 8
"""Buffers have one of so many sizes between a power of two and the next, multiples of ROUND_BYTES: one serves what is nearly as
large, as numbers of rows change from step to step."""


def buffer_bytes(size_bytes: int) -> int:
    """The size of a buffer in which `size_bytes` lie."""
    step = max(ROUND_BYTES, (1 << size_bytes.bit_length()) // (2 * STEPS))
    return -(-size_bytes // step) * step


class HostArena:
    """Buffers that are kept when nothing lies in them, as the next pass needs about the same ones: used and free together no more
    than were ever used at once.

    limit_bytes: most bytes of all of them together; None: no limit.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._free: dict[tuple[int, bool], list[Tensor]] = {}
        self._used_bytes = 0
        self._most_used_bytes = 0
        self.size_bytes = 0
        """Of all buffers, used or free."""

    def hold(self, storage: torch.UntypedStorage) -> Held:
        """A copy of `storage`. Raises CapacityError where it does not fit."""
        return Held(self, storage)

    def take(self, size_bytes: int, *, is_pinned: bool) -> Tensor:
        """Takes a buffer of at least `size_bytes`."""
        size_bytes = buffer_bytes(size_bytes)
        used_bytes = self._used_bytes + size_bytes
        if self._limit_bytes is not None and used_bytes > self._limit_bytes:
            raise CapacityError(
                f"activations for backward: {used_bytes} bytes on the host, the limit is {self._limit_bytes}: give more, or a "
                "reuse that recomputes (S4 needs none)"
            )
        self._used_bytes, self._most_used_bytes = used_bytes, max(self._most_used_bytes, used_bytes)
        if free := self._free.get((size_bytes, is_pinned)):
            return free.pop()
        self._drop_free(self._most_used_bytes - size_bytes)
        self.size_bytes += size_bytes
        if is_pinned:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)

    def give_back(self, buffer: Tensor, *, is_pinned: bool) -> None:
        """Keeps a buffer for who takes one next."""
        self._used_bytes -= len(buffer)
        self._free.setdefault((len(buffer), is_pinned), []).append(buffer)

    def _drop_free(self, down_to_bytes: int) -> None:
        """Drops free buffers until there are no more bytes than that, or none is free."""
        for (size_bytes, _), buffers in self._free.items():
            while buffers and self.size_bytes > down_to_bytes:
                buffers.pop()
                self.size_bytes -= size_bytes


class Held:
    """Bytes that wait on the host: a storage of torch's as a whole, whose views are had from the copy as they lay in it, since a
    kernel may round by how its arguments lie. The buffer is given back with it."""

    def __init__(self, arena: HostArena, storage: torch.UntypedStorage) -> None:
        is_pinned = storage.device.type == "cuda"
        buffer = arena.take(max(1, storage.nbytes()), is_pinned=is_pinned)
        self._device = storage.device
        self._copy = buffer[: storage.nbytes()]
        self._copy.copy_(torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage), non_blocking=is_pinned)
        weakref.finalize(self, arena.give_back, buffer, is_pinned=is_pinned)

    def bytes(self) -> Tensor:
        """The bytes where they were; on the CPU the copy itself."""
        return self._copy.to(self._device, non_blocking=True)
