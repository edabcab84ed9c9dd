"""What a lease on the keys of one visit says of them, wherever the slots are."""

from __future__ import annotations

from paramstore.core.key import ExpertKey
from paramstore.errors import LeaseError, UnknownKey
from paramstore.policy.slot_visit import Held, SlotVisit


class VisitLease:
    """The base of leases whose keys are those of a visit. where: names the place of the slots in messages, " on cuda:0"."""

    __slots__ = ("_by_key", "_visit", "_where")

    def __init__(self, visit: SlotVisit, where: str = "") -> None:
        self._visit = visit
        self._where = where
        self._by_key: dict[ExpertKey, Held] | None = None
        """What can be used now, once it was asked for; None again after each turn of a key that passes by."""

    @property
    def passing_count(self) -> int:
        """How many keys come and go while the lease is gone through; asked before that."""
        return len(self._visit.passing) + len(self._visit.through)

    @property
    def ahead(self) -> tuple[int, int]:
        """How many keys had been loaded ahead of this visit: that had come when it began, and that had not."""
        return self._visit.ahead_ready, self._visit.ahead_late

    def passes(self, key: ExpertKey) -> bool:
        """Whether the bytes of `key`, whose turn it is, can be used no more when the next key is asked for."""
        return self._held(key) in self._visit.through

    def _check_held(self, key: object) -> None:
        if self._visit.is_over:
            raise LeaseError(f"the lease of {key}{self._where} was released: acquire it again")

    def _held(self, key: ExpertKey) -> Held:
        """What stands for `key`. Raises LeaseError after the release and out of its turn, UnknownKey."""
        self._check_held(key)
        if self._by_key is None:
            there = (*self._visit.held, *self._visit.through)
            self._by_key = {held.key: held for held in there}  # type: ignore[misc]  # the names are keys here
        held = self._by_key.get(key)
        if held is None and key in self._visit.passing:
            raise LeaseError(f"{key} passes by: its bytes can be used in its turn alone")
        if held is None:
            raise UnknownKey(f"key {key} is not in this lease of {len(self._visit.held)} keys{self._where}")
        return held
