"""Memory of the host in which a layer's activations wait for backward; page-locked where they come from a GPU."""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

from paramstore.errors import CapacityError

ROUND_BYTES = 1 << 16
"""Buffers are multiples of it, so that one serves tensors of nearly the same size."""


class HostArena:
    """Buffers that are kept when nothing lies in them: the next pass needs about the same ones.

    limit_bytes: most bytes of all of them together; None: no limit.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._free: dict[tuple[int, bool], list[Tensor]] = {}
        self.size_bytes = 0
        """Of all buffers, used or free."""

    def hold(self, storage: torch.UntypedStorage) -> Held:
        """A copy of `storage`. Raises CapacityError where it does not fit."""
        return Held(self, storage)

    def take(self, size_bytes: int, *, is_pinned: bool) -> Tensor:
        """Takes a buffer of at least `size_bytes`."""
        size_bytes = -(-size_bytes // ROUND_BYTES) * ROUND_BYTES
        free = self._free.get((size_bytes, is_pinned), [])
        if free:
            return free.pop()
        if self._limit_bytes is not None and self.size_bytes + size_bytes > self._limit_bytes:
            self._drop_free()
            if self.size_bytes + size_bytes > self._limit_bytes:
                raise CapacityError(
                    f"activations for backward: {self.size_bytes + size_bytes} bytes on the host, the limit is "
                    f"{self._limit_bytes}: give more, or a reuse that recomputes (S4 needs none)"
                )
        self.size_bytes += size_bytes
        if is_pinned:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)

    def give_back(self, buffer: Tensor, *, is_pinned: bool) -> None:
        """Keeps a buffer for who takes one next."""
        self._free.setdefault((len(buffer), is_pinned), []).append(buffer)

    def _drop_free(self) -> None:
        self.size_bytes -= sum(size * len(buffers) for (size, _), buffers in self._free.items())
        self._free.clear()


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
