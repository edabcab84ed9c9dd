"""A lease on any number of keys of a namespace: where not all may be leased at once, part after part.

- A part is half of what may be leased, so that the next one can load beside it; its lease ends when a key of another is asked for.
- All parts are of the view that the first one saw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.errors import LeaseError, StepMismatch
from paramstore_client.handle.base import plain_keys
from paramstore_client.source import HostSource, WeightLease, load_ahead

if TYPE_CHECKING:
    from torch import Tensor


class PartsLease:
    """An `ArrivingLease` of a source that has no slots of its own. Owner of the lease of the part whose turn it is.

    may_pass: whether the keys may come in parts; else all are leased at once. Raises what `acquire` raises.
    """

    def __init__(self, source: HostSource, keys: Sequence[ExpertKey], *, timeout_s: float | None, may_pass: bool) -> None:
        self._source = source
        self._keys = list(dict.fromkeys(plain_keys(keys)))
        self._timeout_s = timeout_s
        self._view = source.view_change_count
        most = source.lease_slots
        self._part_keys = max(1, most // 2) if may_pass and len(self._keys) > most else len(self._keys)
        self._is_over = False
        self._take_part(0)

    @property
    def passing_count(self) -> int:
        """All keys where they come in parts, else none."""
        return len(self._keys) if len(self._keys) > self._part_keys else 0

    @property
    def ahead(self) -> tuple[int, int]:
        """Nothing is known of loads ahead."""
        return 0, 0

    def passes(self, key: ExpertKey) -> bool:
        """Whether `key` is of a part."""
        return self.passing_count > 0

    def in_turn(self) -> Iterator[ExpertKey]:
        """Yields each key once, in the order given, and asks for the next part ahead. Raises what `acquire` raises, StepMismatch
        where the namespace moved since the first part."""
        for first in range(0, len(self._keys), max(1, self._part_keys)):
            self._move_to(first)
            yield from self._part_at(first)

    def turn_to(self, key: ExpertKey, /) -> Mapping[str, Tensor]:
        """The fields of `key`, valid until a key of another part is turned to, in whatever order. Raises as `in_turn` does."""
        if self.passing_count and key in self._keys:
            self._move_to(self._keys.index(key) // self._part_keys * self._part_keys)
        return self[key]

    def __getitem__(self, key: ExpertKey, /) -> Mapping[str, Tensor]:
        """The fields of `key`. Raises LeaseError where it is not its part's turn, and after the release."""
        return self._leased(key)[key]

    def identity(self, key: ExpertKey, /) -> Identity:
        """Epoch and version of the bytes of `key`."""
        return self._leased(key).identity(key)

    def release(self) -> None:
        """Ends it; idempotent."""
        self._is_over = True
        self._lease.release()

    def __enter__(self) -> PartsLease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def _leased(self, key: ExpertKey) -> WeightLease:
        if self.passing_count and key in self._keys and key not in self._part_at(self._first):
            raise LeaseError(f"{key} passes by: its bytes can be used in its turn alone")
        return self._lease

    def _part_at(self, first: int) -> list[ExpertKey]:
        return self._keys[first : first + self._part_keys]

    def _move_to(self, first: int) -> None:
        if self._is_over:
            raise LeaseError(f"the lease of {len(self._keys)} keys was released: acquire them again")
        if first == self._first:
            return
        if self._source.view_change_count != self._view:
            raise StepMismatch("the namespace moved while a layer was computed: call refresh and rollback between forwards")
        self._lease.release()
        self._take_part(first)

    def _take_part(self, first: int) -> None:
        """Leases the part that begins at `first`, and asks for the one after it ahead."""
        self._lease: WeightLease = self._source.acquire(self._part_at(first), timeout_s=self._timeout_s)
        self._first = first
        room = max(0, self._source.lease_slots - self._part_keys)
        load_ahead(self._source, self._part_at(first + self._part_keys)[:room])
