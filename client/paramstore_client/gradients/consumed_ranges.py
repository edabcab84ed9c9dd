"""Keeps which pending gradients each request under way consumes, and what becomes of them if it is refused.

- A request that took effect has consumed its ranges, and they are free. One that was refused leaves them pending here, as it
  does in the daemon: `leaves_pending` is the rule.
- The daemon takes requests in their order, so what a refused one has left is consumed by the next one that was sent behind it,
  even if that was sent before the refusal was known.
- `settle` takes no lock and may run at any moment, on the thread that reads; all else belongs to one thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paramstore.core.key import ExpertKey
from paramstore.errors import (
    ConfigError,
    LeaseError,
    ParamStoreError,
    RankLost,
    SchemaMismatch,
    StepMismatch,
    StepOutOfOrder,
    StepPrepared,
    StoreUnavailable,
    WriterFenced,
)
from paramstore.wire.messages import Abort, Apply, CloseNamespace, EndApply, InitializeBegin, Rollback
from paramstore_client.connection.ticket import Ticket
from paramstore_client.gradients.upload_area import Range, UploadArea

Consumer = Abort | Apply | CloseNamespace | EndApply | InitializeBegin | Rollback
"""Requests that consume or drop everything pending."""

ENDED = (LeaseError, RankLost, StoreUnavailable, WriterFenced)
"""Errors after which the handle writes no more, whatever was asked: the daemon has dropped what was pending."""
NOT_BEGUN = (ConfigError, SchemaMismatch, StepMismatch, StepPrepared)
"""Errors with which the daemon refuses an apply before it begins. After any other it has begun, or the namespace was broken before:
then nothing reads what is pending until a rollback drops it."""


def leaves_pending(request: Consumer, error: ParamStoreError) -> bool:
    """Whether everything pending stays so after the daemon has answered `request` with `error`."""
    if isinstance(request, CloseNamespace) or isinstance(error, ENDED):
        return False
    if isinstance(request, EndApply) and isinstance(error, StepOutOfOrder):
        return True  # no apply was open
    return not isinstance(request, Apply | EndApply) or isinstance(error, NOT_BEGUN)


@dataclass(eq=False, slots=True)
class Claim:
    """The ranges that one request consumes if it takes effect. inherited: those that refused requests before it have left."""

    request: Consumer
    ranges: dict[ExpertKey, Range]
    ticket: Ticket[Any] | None = None
    inherited: dict[ExpertKey, Range] = field(default_factory=dict)
    is_refused: bool = False
    is_settled: bool = False


class ConsumedRanges:
    """Owner of the claims of one handle whose outcome may still matter, oldest first."""

    def __init__(self, area: UploadArea) -> None:
        self._area = area
        self._claims: list[Claim] = []

    def add(self, request: Consumer, ranges: dict[ExpertKey, Range]) -> Claim:
        """Adds a claim for `request`. To be called before it is sent: its answer may come before the sending call returns."""
        claim = Claim(request, ranges)
        self._claims.append(claim)
        return claim

    def withdraw(self, claim: Claim) -> None:
        """Removes a claim whose request was never sent."""
        self._claims.remove(claim)

    def settle(self, claim: Claim, error: ParamStoreError | None) -> None:
        """Notes that the request of `claim` is answered, with `error` if it failed; frees its ranges unless they stay pending.
        Called again after an interrupt, it does the rest."""
        claim.is_refused = error is not None and leaves_pending(claim.request, error)
        if not claim.is_refused:
            self._area.give_back_all(claim.ranges)
        claim.is_settled = True

    def under_way(self) -> list[Ticket[Any]]:
        """The tickets of the requests that are not answered yet, oldest first."""
        return [claim.ticket for claim in self._claims if claim.ticket is not None and not claim.is_settled]

    def take_left(self) -> dict[ExpertKey, Range]:
        """Returns the ranges that refused requests have left and no request behind them consumes: they are the caller's again."""
        left: dict[ExpertKey, Range] = {}
        kept: list[Claim] = []
        for claim in reversed(self._claims):
            if claim.is_settled and claim.is_refused:
                heir = kept[-1].inherited if kept else left
                heir.update(claim.ranges)
                heir.update(claim.inherited)
            else:
                kept.append(claim)
        self._claims = self._without_the_past(kept[::-1])
        return left

    def _without_the_past(self, claims: list[Claim]) -> list[Claim]:
        """Frees what requests that took effect inherited, and drops those of them to which no earlier one can leave anything."""
        kept: list[Claim] = []
        for claim in claims:
            if claim.is_settled and not claim.is_refused:
                self._area.give_back(claim.inherited.values())
                claim.inherited.clear()
                if not kept or kept[-1].is_settled:
                    continue
            kept.append(claim)
        return kept
