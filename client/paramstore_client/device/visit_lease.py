"""What a lease on the keys of one visit says of them, wherever the slots are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore.errors import LeaseError, UnknownKey
from paramstore.policy.slot_visit import Held, SlotVisit


class VisitLease(ABC):
    """The base of leases whose keys are those of a visit. view: the view that it began with. where: names the place of the slots in
    messages, " on cuda:0"."""

    __slots__ = ("_by_key", "_timeout_s", "_turn", "_view", "_visit", "_where")

    def __init__(self, visit: SlotVisit, *, view: int, timeout_s: float | None, where: str = "") -> None:
        self._visit = visit
        self._view = view
        self._timeout_s = timeout_s
        self._where = where
        self._by_key: dict[ExpertKey, Held] | None = None
        """What can be used now, once it was asked for; None again after each turn of a key that passes by."""
        self._turn: Held | None = None
        """What passes by and was turned to."""

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

    def turn_to(self, key: ExpertKey, /) -> Mapping[str, Tensor]:
        """The fields of `key`, once they are there; what passes by is used until another key is turned to, on a device by what is
        given to the current stream until then, and the next ones come meanwhile. Raises LeaseError where `key` has passed by, or
        comes before others that have not, and what a load raises."""
        visit, turn = self._visit, self._turn
        if not (visit.passing or visit.through) or (turn is not None and turn.key == key):
            return self[key]
        self._check_held(key)
        self._turn = self._by_key = None
        if turn is not None:
            self._let_out(turn)
        self._let_in(due=key)
        self._by_key = None
        fields, held = self[key], self._held(key)
        self._turn = held if held in visit.through else None
        return fields

    @abstractmethod
    def __getitem__(self, key: ExpertKey, /) -> Mapping[str, Tensor]:
        """The fields of `key`, once they are there. Raises LeaseError after the release, UnknownKey, and what the load raises."""

    @abstractmethod
    def release(self) -> None:
        """Ends the visit; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    @abstractmethod
    def _let_in(self, due: ExpertKey | None = None) -> None:
        """Begins to load as many keys that pass by as there are slots for. due: the key that is used next."""

    @abstractmethod
    def _let_out(self, held: Held) -> None:
        """Gives back the slot of what has passed by."""

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
