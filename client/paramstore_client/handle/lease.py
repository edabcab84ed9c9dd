"""A lease: the right to read the bytes of some keys where they lie, until it is released.

- Its tensors are views of the daemon's memory, mapped read-only: writing into one is a memory fault that ends the
  process. They are made when indexed.
- After `release` the bytes may become another expert's. Using a tensor then is wrong and cannot be noticed, except in
  debug mode, where every use of a tensor that was handed out, and of its views, raises LeaseError.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.schema import Part
from paramstore.errors import LeaseError, ProtocolError, UnknownKey
from paramstore.wire.messages import Granted, Release
from paramstore_client.connection.segments import Slot
from paramstore_client.connection.shared_socket import Connection

if TYPE_CHECKING:
    from torch import Tensor

    from paramstore_client.tensors import Guard

_log = logging.getLogger(__name__)


class Releasable(Protocol):
    """A lease of any kind, as its handle knows it."""

    def release(self) -> None:
        """Gives back what is leased. Idempotent, after an interrupt too."""


class FieldTensors(Mapping[str, "Tensor"]):
    """One leased key's fields by name. Each tensor is made the first time it is asked for."""

    __slots__ = ("_lease", "_made", "_slot")

    def __init__(self, lease: Lease, slot: Slot) -> None:
        self._lease = lease
        self._slot = slot
        self._made: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        self._lease.check_held()
        tensor = self._made.get(name)
        if tensor is None:
            tensor = self._made[name] = self._lease.make_view(self._slot, name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return any(field.name == name for field in self._lease.part.fields)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in self._lease.part.fields)

    def __len__(self) -> int:
        return len(self._lease.part.fields)

    def __repr__(self) -> str:
        return f"FieldTensors({', '.join(self)})"


class Lease:
    """Slots granted for a list of keys. Owner of the tensors made over them. A context manager."""

    __slots__ = (
        "__weakref__", "_all_held", "_connection", "_guard", "_handed_out", "_has_views", "_id", "_index", "_is_debug",
        "_is_given_back", "_is_released", "_keys", "_slots", "absent_count", "namespace", "part",
    )  # fmt: skip

    def __init__(
        self, connection: Connection, answer: object, *, namespace: str, part: Part, keys: Sequence[ExpertKey],
        all_held: WeakSet[Releasable], is_debug: bool,
    ) -> None:  # fmt: skip
        """answer: what the daemon said to an `acquire` of `keys`. all_held: the handle's leases; gets this one too, and lives as
        long as it does, or its tensors. Raises ProtocolError."""
        self._is_given_back = True
        if not isinstance(answer, Granted) or len(answer.slots) != len(keys):
            raise ProtocolError(f"no lease of {len(keys)} keys came for an acquire of as many")
        self.namespace = namespace
        self.part = part
        self._connection = connection
        self._id = answer.id
        self._keys = keys
        self._slots: list[Slot] = answer.slots
        self.absent_count = answer.absent
        """How many of the keys had to be waited for, as their bytes were not in memory; 0 by a daemon before protocol 1.9."""
        self._is_debug = is_debug
        self._has_views = False
        self._index: dict[ExpertKey, FieldTensors | Slot] | None = None
        self._guard: Guard | None = None
        self._handed_out: list[Tensor] = []
        self._is_released = False
        self._all_held = all_held
        all_held.add(self)
        self._is_given_back = False  # last: what an interrupt leaves half made gives nothing back, as it will be made again

    def __getitem__(self, key: ExpertKey) -> FieldTensors:
        """The key's fields by name, as read-only tensors. Raises LeaseError after release, UnknownKey for another key."""
        self.check_held()
        index, entry = self._slot_index(), self._entry(key)
        if not isinstance(entry, FieldTensors):
            entry = index[key] = FieldTensors(self, entry)
        return entry

    def image(self, key: ExpertKey) -> Tensor:
        """The key's whole part as one read-only uint8 tensor, its fields at their `offset_bytes`: for one copy of it all."""
        from paramstore_client import tensors

        self.check_held()
        segment, offset_bytes, _, _ = self._slot(key)
        return self._keep(
            tensors.image_view(self._connection.segments.leased(segment), offset_bytes, self.part.image_bytes)
        )

    def identity(self, key: ExpertKey) -> Identity:
        """Epoch and version of the key's bytes: equal identities of one key have equal bytes."""
        return Identity(*self._slot(key)[2:])

    def keys(self) -> list[ExpertKey]:
        """The keys, in the order asked."""
        return [(layer, expert) for layer, expert in self._keys]

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._slot_index()

    def __iter__(self) -> Iterator[ExpertKey]:
        return iter(self.keys())

    def clone(self) -> dict[ExpertKey, dict[str, Tensor]]:
        """Copies that may outlive the lease. Raises LeaseError after release."""
        return {key: {name: tensor.clone() for name, tensor in self[key].items()} for key in self.keys()}

    def release(self) -> None:
        """Gives the slots back: every tensor of this lease is dead from here on. Idempotent, after an interrupt too."""
        if self._is_given_back:
            return
        self._is_released = True
        self._index = None  # breaks the cycle with FieldTensors, so that their tensors go with the last user
        if self._guard is not None:
            self._spoil(self._guard)
        connection = self._connection
        connection.post(Release([self._id]))
        connection.end_lease(self._id)
        self._is_given_back = True

    @property
    def is_released(self) -> bool:
        return self._is_released

    def __enter__(self) -> Lease:
        self.check_held()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self._is_released else "held"
        return f"<Lease of {len(self._keys)} keys of {self.namespace!r}, part {self.part.name!r}, {state}>"

    def check_held(self) -> None:
        """Returns while the lease is held; else raises LeaseError."""
        if self._is_released:
            raise LeaseError(self._released_reason())

    def make_view(self, slot: Slot, name: str) -> Tensor:
        """A tensor over `name` in `slot`. For FieldTensors, which keeps it."""
        from paramstore_client import tensors

        segment, offset_bytes, _, _ = slot
        view = tensors.field_view(self._connection.segments.leased(segment), self.part.field(name), offset_bytes)
        return self._keep(view)

    def _keep(self, view: Tensor) -> Tensor:
        if not self._has_views:
            self._connection.segments.viewed[self._id] = self._all_held
            self._has_views = True
        if self._is_debug:
            from paramstore_client import tensors

            if self._guard is None:
                self._guard = tensors.Guard()
            view = tensors.guarded(view, self._guard)
            self._handed_out.append(view)  # kept: a graph may need its bytes when the caller has dropped it
        return view

    def _released_reason(self) -> str:
        return f"this lease of {self.namespace!r} was released: acquire again, or clone() what must outlive it"

    def _slot_index(self) -> dict[ExpertKey, FieldTensors | Slot]:
        if self._index is None:
            self._index = dict(zip(self.keys(), self._slots, strict=True))
        return self._index

    def _entry(self, key: ExpertKey) -> FieldTensors | Slot:
        try:
            return self._slot_index()[key]
        except (KeyError, TypeError) as error:  # TypeError: `key` cannot be hashed
            raise UnknownKey(f"key {key!r:.80} is not in this lease of {len(self._keys)} keys of {self.namespace!r}") from error

    def _slot(self, key: ExpertKey) -> Slot:
        entry = self._entry(key)
        return entry._slot if isinstance(entry, FieldTensors) else entry

    def _spoil(self, guard: Guard) -> None:
        from paramstore_client import tensors

        guard.reason = self._released_reason()
        for view in self._handed_out:
            tensors.end_graphs_of(view)
        self._handed_out.clear()

    def __del__(self) -> None:
        if getattr(self, "_is_given_back", True) or self._connection.is_failed:
            return
        if self._has_views and not self._is_released:
            # Its tensors may live on: giving the slots back would change their bytes under the caller's hands.
            _log.warning("a %r was dropped without release(): its slots stay taken until the store is closed", self)
        else:
            self.release()
