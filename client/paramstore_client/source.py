"""What `nn`, the ring and the device tier need of the thing that gives them weights.

A namespace handle is an `ExpertSource`; so are `DeviceTier` and `RingMemory`, which stand in front of one. That is why
`StoredExperts` takes any of the three and has no branch for devices. `paramstore.testing.MemoryNamespace` is the fake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore.core.place import Identity
from paramstore.core.schema import Schema


class WeightLease(Protocol):
    """A right to the bytes of some keys, until released. Their tensors are read-only and wrong to use afterwards."""

    def __getitem__(self, key: ExpertKey, /) -> Mapping[str, Tensor]:
        """The fields of `key`, by name. Raises LeaseError after the release."""
        ...

    def identity(self, key: ExpertKey, /) -> Identity:
        """Which bytes of `key` these are."""
        ...

    def release(self) -> None:
        """Ends the lease; a second call does nothing."""
        ...

    def __enter__(self) -> WeightLease: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> object: ...


class AheadTicket(Protocol):
    """A prefetch under way. Nobody waits for it here: demand joins it."""

    def done(self) -> bool: ...

    def cancel(self) -> object: ...


class ExpertSource(Protocol):
    """Gives leases on experts and takes their gradients.

    lease_slots: how many keys this session may hold leased at once.
    """

    @property
    def schema(self) -> Schema: ...

    @property
    def layers(self) -> Sequence[int]: ...

    @property
    def experts(self) -> int: ...

    @property
    def lease_slots(self) -> int: ...

    def acquire(self, keys: Sequence[ExpertKey], /, part: str = "param", timeout_s: float | None = None) -> WeightLease:
        """All keys or none; waits. Raises CapacityError above `lease_slots`, LeaseError where own leases stand in the way."""
        ...

    def prefetch(self, keys: Sequence[ExpertKey], /, part: str = "param") -> AheadTicket:
        """Asks for what fits, ahead of use; returns at once."""
        ...

    def push(self, gradients: Mapping[ExpertKey, Mapping[str, Tensor]], /) -> Any:
        """Adds into the pending gradients; they may be freed on return. (Any: what it returns is the handle's affair.)"""
        ...
