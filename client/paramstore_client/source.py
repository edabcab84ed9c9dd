"""The protocols of what gives weights to `nn`, the ring and the device tier, and the one way to ask it for what may come next.

A namespace handle is a `HostSource`, the kind that a `DeviceTier` can stand in front of. It is an `ExpertSource` too, as
are `DeviceTier` and `RingMemory`: that is why `StoredExperts` takes any of the three and has no branch for devices.
`paramstore.testing.MemoryNamespace` is the fake.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.schema import Schema
from paramstore.errors import ParamStoreError
from paramstore.policy.slot_visit import SlotCounts

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

T_co = TypeVar("T_co", covariant=True)

Loan = tuple[int, Sequence[int]]
"""Lease slots beyond the promise: how many there are now, and a word whose one number says how many may be kept. It falls when
others need them."""


class WeightLease(Protocol):
    """The right to the bytes of some keys, until it is released. Their tensors are read-only, and wrong to use afterwards."""

    def __getitem__(self, key: ExpertKey, /) -> Mapping[str, Tensor]:
        """The fields of `key`, by name. Raises LeaseError after the release."""
        ...

    def identity(self, key: ExpertKey, /) -> Identity:
        """Epoch and version of the leased bytes of `key`."""
        ...

    def release(self) -> None:
        """Ends the lease; a second call does nothing."""
        ...

    def __enter__(self) -> WeightLease: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> object: ...


class HostLease(WeightLease, Protocol):
    """A lease of bytes in host memory."""

    @property
    def absent_count(self) -> int:
        """How many of its keys had to be waited for, as their bytes were not there."""
        ...

    @property
    def is_released(self) -> bool: ...


class ArrivingLease(WeightLease, Protocol):
    """The right to the bytes of any number of keys: of those that were on their way when it began, and of those that pass by, one
    after the other, where not all of them fit in memory at once. Asking for a key that is on its way waits for it."""

    @property
    def passing_count(self) -> int:
        """How many keys come and go while the lease is gone through; asked before that."""
        ...

    @property
    def ahead(self) -> tuple[int, int]:
        """How many keys had been loaded ahead of this visit: that had come when it began, and that had not."""
        ...

    def passes(self, key: ExpertKey) -> bool:
        """Whether the bytes of `key`, whose turn it is, can be used no more when the next key is asked for."""
        ...

    def in_turn(self) -> Iterator[ExpertKey]:
        """Yields each key once, in whatever order spares waiting. Raises what a load raises."""
        ...

    def turn_to(self, key: ExpertKey, /) -> Mapping[str, Tensor]:
        """The fields of `key`, for whoever asks for the keys in the order given: valid until another is turned to. Raises
        LeaseError where the bytes of `key` come and go and it is asked for out of order, and what a load raises."""
        ...

    def __enter__(self) -> ArrivingLease: ...


class AheadTicket(Protocol):
    """A prefetch under way. Nobody waits for it here: demand joins it."""

    def done(self) -> bool: ...

    def cancel(self) -> object: ...


@runtime_checkable
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
        """Leases all keys or none; waits. Raises CapacityError above `lease_slots`, LeaseError where own leases are in the way."""
        ...

    def acquire_arriving(
        self, keys: Sequence[ExpertKey], /, timeout_s: float | None = None, *, may_pass: bool = False
    ) -> ArrivingLease:
        """Leases the part `param` of all keys or none, and waits for as few as it can. may_pass: any number of keys, those beyond
        what fits one after the other (`in_turn`); else CapacityError above `lease_slots`. Raises what `acquire` raises."""
        ...

    def prefetch(self, keys: Sequence[ExpertKey], /, part: str = "param") -> AheadTicket:
        """Asks for what fits, ahead of use; returns at once."""
        ...

    def push(self, gradients: Mapping[ExpertKey, Mapping[str, Tensor]], /) -> Any:
        """Adds to the pending gradients; the tensors may be freed on return. (Any: what it returns is the handle's affair.)"""
        ...


@runtime_checkable
class SlotSource(ExpertSource, Protocol):
    """An `ExpertSource` with slots of its own, whose decisions are a `SlotPlan`'s."""

    @property
    def counts(self) -> SlotCounts:
        """What was counted so far."""
        ...

    @property
    def is_on_host(self) -> bool:
        """Whether its slots are host memory, where leases stand: a load ahead takes a slot there at once, or none."""
        ...

    def lacking(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Those of `keys` that neither stand nor are on their way."""
        ...

    def skip(self, layers: Sequence[int]) -> None:
        """Notes that these layers are not visited this time: what was loaded ahead for them is spared no more."""
        ...


class HostTicket(AheadTicket, Protocol):
    """A prefetch into host memory."""

    def wait(self, timeout_s: float | None = None) -> Mapping[str, int]:
        """{loaded, resident, skipped, bytes}: how many keys are there now, and how many there was no room for."""
        ...

    def cancel(self) -> bool:
        """Gives up what can be given up; whether something was."""
        ...


class TicketFor(Protocol[T_co]):
    """A request under way, for a lease or a loan."""

    @property
    def is_settled(self) -> bool:
        """Whether there is an outcome, as far as was heard; `done` listens first."""
        ...

    def done(self) -> bool: ...

    def wait(self) -> T_co:
        """The lease, as soon as all its keys are there, or what was lent, all in all; raises what the service refuses it with."""
        ...

    def abandon(self) -> None:
        """Gives it up: what was or will be leased is released."""
        ...


LeaseTicket = TicketFor[HostLease]
LoanTicket = TicketFor[Loan]


@runtime_checkable
class LeaseKeeper(Protocol):
    """Keeps leases beyond their use, so that the next use asks nobody."""

    def give_back(self) -> None:
        """Releases every lease that nobody uses: others lack the slots. Waits for calls of this keeper that are under way."""
        ...

    def let_go(self) -> None:
        """Releases every lease that nobody uses: the session ends. Must neither wait nor raise."""
        ...


class Lender(Protocol):
    """Lends one keeper of leases slots beyond the promise of its handle, of which one keeper at a time has a loan."""

    def begin_borrow(self, keeper: LeaseKeeper, count: int, /) -> LoanTicket | None:
        """Asks for `count` slots in all, and returns at once; None where nothing can be lent to this keeper."""
        ...

    def give_back(self, kept: int, /) -> None:
        """Gives all borrowed slots back but `kept`, whose leases were released before. What is asked for and not answered yet is
        given up by it. Must neither wait nor raise."""
        ...

    def leave(self) -> None:
        """Notes that the keeper keeps no lease beyond its use any more, and has given back what it borrowed: the next one may
        borrow. A second call does nothing."""
        ...


@runtime_checkable
class HostSource(ExpertSource, Protocol):
    """An `ExpertSource` whose leases are host memory; it also tells what the owner of copies elsewhere must know."""

    @property
    def view_change_count(self) -> int:
        """Grows whenever the bytes behind a key may have become others for this handle (apply, refresh, rollback): a copy
        whose identity was compared at the present count is current, without asking again."""
        ...

    def acquire(self, keys: Sequence[ExpertKey], /, part: str = "param", timeout_s: float | None = None) -> HostLease: ...

    def begin_acquire(self, keys: Sequence[ExpertKey], /, part: str = "param", timeout_s: float | None = None) -> LeaseTicket:
        """Begins an `acquire` and returns at once."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """What this thread asks for and releases inside is sent in one go, at the end or before a wait."""
        ...

    def let_stand(self, keeper: LeaseKeeper, /) -> Lender | None:
        """Notes who keeps leases beyond their use, and has to be asked for them. Returns where it may borrow slots; None where
        nothing may stand."""
        ...

    def check_usable(self) -> None:
        """Returns while the handle can be used; else raises what its calls would raise."""
        ...

    def prefetch(self, keys: Sequence[ExpertKey], /, part: str = "param") -> HostTicket:
        """Asks for what fits in host memory, ahead of use; returns at once."""
        ...

    def before_unmap(self, fn: Callable[[int, int], None], /) -> Callable[[], object]:
        """Has `fn(address, length_bytes)` called before leased memory is unmapped, from any thread: the last moment to
        unregister it. It must not raise. Returns the function that ends this."""
        ...

    def report_device(self, *, resident: Sequence[ExpertKey], touched: Sequence[ExpertKey], bytes_resident: int) -> None:
        """Tells the service which keys have a copy in HBM, and which were used there since the last report."""
        ...


def load_ahead(source: ExpertSource, keys: Sequence[ExpertKey]) -> AheadTicket | None:
    """Asks for keys that are worth loading ahead. It fails nobody's work: where they cannot be asked for, that is logged, and None
    comes, as for no keys."""
    if not keys:
        return None
    try:
        return source.prefetch(keys)
    except ParamStoreError as error:  # demand will ask again and raise the error where it matters
        _log.warning("%d experts of layer %d could not be loaded ahead: %s", len(keys), keys[0][0], error)
        return None
