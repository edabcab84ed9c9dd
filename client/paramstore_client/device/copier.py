"""Copies from leased host memory into device slots: on a CUDA stream of their own, or at once where the slots are on the host.

- A copy never overtakes the last use of the slot it overwrites, and its mark is reached only when the bytes are there.
- The source must stay leased until the copy's mark is reached.
- Host memory is registered with CUDA on first use; its owner tells us before it is unmapped, and a range is unregistered
  then, never later. Where registration is refused, bytes go through two pinned buffers. `describe` says which it is.

Proven on simulated streams; never run on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from paramstore.core.schema import PAGE_BYTES, round_up

REGISTER_READ_ONLY = 8
"""cudaHostRegisterReadOnly: what a mapping without write permission needs, where the platform has it."""
REGISTER_DEFAULT = 0
BOUNCE_BUFFERS = 2

_log = logging.getLogger(__name__)


class Mark(Protocol):
    """A point in a stream's work."""

    def is_reached(self) -> bool: ...

    def wait_on_host(self) -> None: ...

    def wait_on_stream(self) -> None:
        """Makes the caller's current stream wait until the mark is reached."""
        ...


Then = Callable[[], None]
"""Work on tensors of the slots' device, given to the current stream."""


def nothing_more() -> None:
    """For copies alone."""


class Copier(Protocol):
    """Moves one key's fields at a time."""

    @property
    def keys_at_once(self) -> int | None:
        """Most copies on their way for which none waits on the host; None for any number."""
        ...

    def copy(self, fields: Sequence[tuple[Tensor, Tensor]], *, after: Mark, then: Then = nothing_more) -> Mark:
        """Copies each (target, source), not before `after`, and computes `then` of what is there; the mark is reached when all that
        is over."""
        ...

    def mark_use(self) -> Mark:
        """A mark behind all work that the caller's current stream has been given so far."""
        ...

    def forget_memory(self, address: int, length_bytes: int) -> None:
        """Forgets host memory that is about to be unmapped; no copy from it is under way."""
        ...

    def describe(self) -> str: ...

    def close(self) -> None: ...


class Reached:
    """The mark of work that is done when its call returns."""

    def is_reached(self) -> bool:
        return True

    def wait_on_host(self) -> None:
        return

    def wait_on_stream(self) -> None:
        return


REACHED = Reached()


class HostCopier:
    """The copier between host tensors: copies at once."""

    @property
    def keys_at_once(self) -> int | None:
        return None

    def copy(self, fields: Sequence[tuple[Tensor, Tensor]], *, after: Mark, then: Then = nothing_more) -> Mark:
        assert after.is_reached(), "a host slot is not used by anything asynchronous"
        for target, source in fields:
            target.copy_(source)
        then()
        return REACHED

    def mark_use(self) -> Mark:
        return REACHED

    def forget_memory(self, address: int, length_bytes: int) -> None:
        return

    def describe(self) -> str:
        return "host: copied at once"

    def close(self) -> None:
        return


class _EventMark:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def is_reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait_on_host(self) -> None:
        self._event.synchronize()

    def wait_on_stream(self) -> None:
        # The stream is that of the tier's device, which need not be the caller's current one.
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaCopier:
    """Owner of the copy stream, of the registered ranges and of the bounce buffers.

    bounce_bytes: at least one key's fields, each rounded up to a page. may_register: False where nobody will call
    `forget_memory` before the sources are unmapped.
    """

    def __init__(self, device: torch.device, *, bounce_bytes: int, may_register: bool = True) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._may_register = may_register
        self._refusal = "" if may_register else "its owner does not tell before it unmaps"
        self._flags: int | None = None
        self._registered: dict[int, int] = {}
        self._bounce_bytes = bounce_bytes
        self._bounce: list[tuple[Tensor, Mark]] = []

    @property
    def keys_at_once(self) -> int | None:
        return None if self._flags is not None and not self._refusal else BOUNCE_BUFFERS

    def copy(self, fields: Sequence[tuple[Tensor, Tensor]], *, after: Mark, then: Then = nothing_more) -> Mark:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            after.wait_on_stream()
            if all(self._is_registered(source) for _, source in fields):
                for target, source in fields:
                    target.copy_(source, non_blocking=True)
            else:
                self._copy_through_bounce(fields)
            then()
            return self._mark(self._stream)

    def mark_use(self) -> Mark:
        return self._mark(torch.cuda.current_stream(self._device))

    def forget_memory(self, address: int, length_bytes: int) -> None:
        # A copy of the table first: another thread may end the last lease of a segment while this one registers in another.
        for start in [start for start in list(self._registered) if address <= start < address + length_bytes]:
            del self._registered[start]
            code = int(torch.cuda.cudart().cudaHostUnregister(start))  # type: ignore[no-untyped-call]
            if code:
                _log.warning("cudaHostUnregister of %d bytes at %#x failed with code %d", length_bytes, start, code)

    def describe(self) -> str:
        if self._refusal:
            return f"bounce: copied through {BOUNCE_BUFFERS} pinned buffers, because {self._refusal}"
        if self._flags is None:
            return "registered: nothing copied yet"
        return f"registered{' read-only' if self._flags == REGISTER_READ_ONLY else ''}: copied without a detour"

    def close(self) -> None:
        self._stream.synchronize()
        for start, length_bytes in list(self._registered.items()):
            self.forget_memory(start, length_bytes)

    def _mark(self, stream: torch.cuda.Stream) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return _EventMark(event, self._device)

    def _is_registered(self, source: Tensor) -> bool:
        """Whether the tensor's pages are registered, after trying to; one refusal ends all further tries."""
        start = source.data_ptr() & -PAGE_BYTES
        if start in self._registered:
            return True
        if not self._may_register:
            return False
        length_bytes = round_up(source.data_ptr() + source.nbytes - start, PAGE_BYTES)
        for flags in (REGISTER_READ_ONLY, REGISTER_DEFAULT) if self._flags is None else (self._flags,):
            code = int(torch.cuda.cudart().cudaHostRegister(start, length_bytes, flags))  # type: ignore[no-untyped-call]
            if code == 0:
                self._registered[start], self._flags = length_bytes, flags
                return True
            self._clear_last_error()
        self._may_register = False
        self._refusal = f"cudaHostRegister refused {length_bytes} bytes with code {code}"
        _log.warning("%s: host memory is copied through pinned buffers from here on", self._refusal)
        return False

    def _clear_last_error(self) -> None:
        """Launches a kernel that takes up the refusal: CUDA keeps it as its last error, and the next launch would report it."""
        with suppress(RuntimeError):
            torch.empty(1, device=self._device).fill_(0.0)

    def _copy_through_bounce(self, fields: Sequence[tuple[Tensor, Tensor]]) -> None:
        buffer, last_use = self._take_bounce()
        if not last_use.is_reached():
            last_use.wait_on_host()
        offset_bytes = 0
        for target, source in fields:
            staged = buffer[offset_bytes : offset_bytes + source.nbytes].view(source.dtype).view(source.shape)
            staged.copy_(source)
            target.copy_(staged, non_blocking=True)
            offset_bytes = round_up(offset_bytes + source.nbytes, PAGE_BYTES)
        self._bounce.append((buffer, self._mark(self._stream)))

    def _take_bounce(self) -> tuple[Tensor, Mark]:
        """The buffer whose last use is oldest; made on first need."""
        if len(self._bounce) < BOUNCE_BUFFERS:
            with torch.inference_mode(False):  # as the slots
                return torch.empty(self._bounce_bytes, dtype=torch.uint8, pin_memory=True), REACHED
        return self._bounce.pop(0)


def make_copier(device: torch.device, *, bounce_bytes: int) -> Copier:
    if device.type == "cuda":
        return CudaCopier(device, bounce_bytes=bounce_bytes)
    return HostCopier()
