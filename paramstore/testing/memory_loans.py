"""Loans in memory: lease slots beyond a promise that a test lends and asks back, without a daemon."""

from __future__ import annotations

from paramstore.errors import ParamStoreError
from paramstore_client.source import LeaseKeeper, Loan


class MemoryLoanTicket:
    """A request to borrow: it takes effect at once, and is answered unless answers are held back."""

    def __init__(self, loans: MemoryLoans) -> None:
        self._loans = loans
        self._lent = loans.count
        self.is_abandoned = False

    @property
    def is_settled(self) -> bool:
        return not self._loans.holds_answers

    def done(self) -> bool:
        return self.is_settled

    def wait(self) -> Loan:
        if self._loans.error is not None:
            raise self._loans.error
        return self._lent, self._loans.word

    def abandon(self) -> None:
        self.is_abandoned = True


class MemoryLoans:
    """Lends slots beyond `lease_slots`: up to `to_lend`, which a test sets, and `recall` asks them back. Owner of the word.

    holds_answers: requests are answered when that is false again. error: what they are refused with.
    """

    def __init__(self) -> None:
        self.to_lend = 0
        self.count = 0
        self.word = [0]
        self.holds_answers = False
        self.error: ParamStoreError | None = None
        self.asked: list[int] = []
        """What was asked for, in order."""
        self.given_back: list[int] = []
        """What was kept, each time slots were given back."""
        self.has_left = False

    def begin_borrow(self, keeper: LeaseKeeper, count: int) -> MemoryLoanTicket | None:
        self.asked.append(count)
        if self.error is None:
            self.count = self.word[0] = max(self.count, min(count, self.to_lend))
        return MemoryLoanTicket(self)

    def give_back(self, kept: int) -> None:
        self.given_back.append(kept)
        self.count = min(self.count, kept)

    def leave(self) -> None:
        assert self.count == 0, "what is lent to the handle would be lost"
        self.has_left = True

    def recall(self, kept: int) -> None:
        """Asks all but `kept` slots back, and lends no more than these."""
        self.to_lend = self.word[0] = kept
