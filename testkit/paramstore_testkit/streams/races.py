"""Finds accesses to one byte that nothing orders, with torch's own checker of CUDA programs (`torch.cuda._sanitizer`).

The checker sees what was given to streams, not when it ran: one run shows every missing edge, whichever order it took. The host is
a stream of its own here: what it writes into memory that copies read is checked too, which torch leaves out. Overlap counts, not
equal addresses: an access is to every granule of GRANULE_BYTES that it touches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor
from torch.cuda._sanitizer import EventHandler, UnsynchronizedAccessError

GRANULE_BYTES = 64
"""Fields and torch's own allocations begin at multiples of it."""
FOUND_MAX = 100
_HOST = _HOST_EVENT = -1

Granules = set[int]


def granules(tensors: Iterable[Tensor]) -> Granules:
    """The granules from the first to the last byte of each tensor of host memory."""
    found: Granules = set()
    for tensor in tensors:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel():
            found |= granules_between(tensor.data_ptr(), (last + 1) * tensor.element_size())
    return found


def granules_between(address: int, length_bytes: int) -> Granules:
    """The granules that a range touches."""
    return set(range(address // GRANULE_BYTES, (address + length_bytes - 1) // GRANULE_BYTES + 1))


class Races:
    """The accesses so far. found: of each race the two operations and their streams, FOUND_MAX at most."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._handler = EventHandler()
        self.add_stream(_HOST)
        self.add_event(_HOST_EVENT)

    def add_stream(self, stream: int) -> None:
        self._handler._handle_stream_creation(stream)

    def add_event(self, event: int) -> None:
        self._handler._handle_event_creation(event)

    def record(self, event: int, stream: int) -> None:
        self._handler._handle_event_record(event, stream)

    def wait(self, event: int, stream: int) -> None:
        self._handler._handle_event_wait(event, stream)

    def synchronize_event(self, event: int) -> None:
        """Orders everything from here on after the event: the host has waited for it, or seen it reached."""
        self._handler._handle_event_synchronization(event)

    def synchronize_stream(self, stream: int) -> None:
        self._handler._handle_stream_synchronization(stream)

    def launch(self, stream: int, *, reads: Granules, writes: Granules, operation: str) -> None:
        """Notes work that the host gives to a stream: it comes after all that the host did before."""
        self.record(_HOST_EVENT, _HOST)
        self.wait(_HOST_EVENT, stream)
        self._access(stream, reads, writes, operation)

    def touch(self, *, reads: Granules, writes: Granules, operation: str) -> None:
        """Notes what the host itself reads and writes."""
        self._access(_HOST, reads, writes, operation)

    def forget(self, memory: Granules) -> None:
        """Forgets accesses to memory that goes back to the system: whoever gets these addresses next has no part in them."""
        for granule in memory & self._handler.tensors_accessed.accesses.keys():
            self._handler._handle_memory_deallocation(granule)

    def _access(self, stream: int, reads: Granules, writes: Granules, operation: str) -> None:
        errors = self._handler._handle_kernel_launch(stream, reads - writes, writes, set(), operation, defaultdict(list))
        for error in errors[: FOUND_MAX - len(self.found)]:
            assert isinstance(error, UnsynchronizedAccessError)
            access, before = error.current_access, error.previous_access
            self.found.append(f"{_place(access.stream)}: {access.operator}, not after {_place(before.stream)}: {before.operator}")


def _place(stream: int) -> str:
    return "host" if stream == _HOST else f"stream {stream}"
