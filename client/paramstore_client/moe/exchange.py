"""Brings rows from each rank to each other: one protocol, and the flat exchange, one all-to-all of torch for each call.

What a backend says of a rank that is gone names no rank. So whoever is left calls the roll, in the store by which the job's ranks
met: who does not answer is named. In a job that writes a namespace the daemon knows first, and better.
"""

# T tokens, N rows of this rank's tokens, D model
# ruff: noqa: N803 - shape suffixes, as the legend says

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from paramstore.core.placement import ranks_named
from paramstore.errors import ParamStoreError, RankLost, StepMismatch
from paramstore_client.ranges import EXCHANGE, named

ROLL_S = 1.0
"""Longest that the others of a broken exchange are waited for, to say who is left."""


class Arriving(Protocol):
    """What is under way."""

    def wait(self) -> Tensor:
        """What has come. Raises RankLost, StepMismatch."""
        ...


class Exchange(Protocol):
    """All-to-all exchanges among the ranks of a job, each begun by all of them in one order, that of messages and that of rows.

    call_count: how many calls of layers have begun, or were refused, over it.
    """

    call_count: int

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def start_alike(self, sent: Tensor) -> Arriving:
        """Begins to bring the message of each rank to this one; sent: [ranks, ...], one to each. Raises RankLost, StepMismatch."""
        ...

    def start_rows(self, sent: Tensor, *, to_each: Sequence[int], from_each: Sequence[int]) -> Arriving:
        """Begins to bring the rows of each rank, in the order of the ranks; sent: those to each. Raises RankLost, StepMismatch."""
        ...

    def start_tokens(
        self, x_TD: Tensor, token_N: Tensor, *, to_each: Sequence[int], from_each: Sequence[int]
    ) -> Arriving:  # fmt: skip
        """Begins to bring the rows of each rank, as `start_rows`. x_TD: tokens. token_N: of which each row to send is a copy."""
        return self.start_rows(x_TD.index_select(0, token_N), to_each=to_each, from_each=from_each)

    def leave(self, error: ParamStoreError) -> None:
        """Ends it, as ranks do not stand before one exchange any more: whatever is begun after it raises `error`."""
        ...

    def alike(self, sent: Tensor) -> Tensor:
        """The message of each rank to this one, as `start_alike` brings it."""
        return self.start_alike(sent).wait()

    def rows(self, sent: Tensor, *, to_each: Sequence[int], from_each: Sequence[int]) -> Tensor:
        """The rows that come from each rank, as `start_rows` brings them."""
        return self.start_rows(sent, to_each=to_each, from_each=from_each).wait()


def left_by(error: BaseException) -> RankLost:
    """What an exchange ends with on a rank that `error` takes out of it."""
    return RankLost(f"expert-parallel ranks: this one left an exchange by {type(error).__name__}: start it again")


class FlatExchange(Exchange):
    """One all-to-all a call, over groups of `torch.distributed` that nothing else uses.

    messages, rows: a group each, so that rows are under way while messages are, and never meet one of another length: a backend
    ends the process where lengths differ. store: where the roll is called. timeout_s: longest that a wait is for the other ranks.
    lost: gives the error of whoever knows better which rank is gone, None where that one knows of none.
    """

    def __init__(
        self, messages: Any, rows: Any, store: Any, *, timeout_s: float, lost: Callable[[], ParamStoreError | None]
    ) -> None:
        self._messages = messages
        self._rows = rows
        self._store = store
        self._timeout_s = timeout_s
        self._lost = lost
        self._broken: ParamStoreError | None = None
        self.call_count = 0
        self.sent_bytes = 0
        """Bytes of rows that were sent to other ranks."""

    @property
    def rank(self) -> int:
        return int(self._messages.rank())

    @property
    def world_size(self) -> int:
        return int(self._messages.size())

    def start_alike(self, sent: Tensor) -> Arriving:
        ones = [1] * self.world_size
        return _Started(self, self._messages, torch.empty_like(sent), sent, ones, ones)

    def start_rows(self, sent: Tensor, *, to_each: Sequence[int], from_each: Sequence[int]) -> Arriving:
        received = sent.new_empty(sum(from_each), *sent.shape[1:])
        self.sent_bytes += (len(sent) - to_each[self.rank]) * sent[:1].nbytes
        return _Started(self, self._rows, received, sent, list(from_each), list(to_each))

    def leave(self, error: ParamStoreError) -> None:
        self._broken = self._broken or error

    def carry_out(self, step: Callable[[datetime.timedelta], None]) -> None:
        """Lets torch begin a call, or wait for it. Raises RankLost, StepMismatch, then and ever after."""
        if self._broken is not None:
            raise type(self._broken)(str(self._broken))
        began_s = time.monotonic()
        try:
            step(datetime.timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            self._broken = self._reason(error, waited_s=time.monotonic() - began_s)
            raise self._broken from error
        except BaseException as error:
            self._broken = left_by(error)
            raise

    def _reason(self, error: RuntimeError, *, waited_s: float) -> ParamStoreError:
        """Who is to blame for an exchange that failed with `error`."""
        if (known := self._lost()) is not None:
            return known
        missing = self._call_roll()
        if (known := self._lost()) is not None:
            return known
        who = ranks_named(missing) if missing else "one of them"
        if waited_s >= self._timeout_s:
            return StepMismatch(f"expert-parallel ranks: {who} did not come to an exchange within {self._timeout_s:g} s: {error}")
        return RankLost(f"expert-parallel ranks: {who} left an exchange; the group is broken: {error}")

    def _call_roll(self) -> tuple[int, ...]:
        """The ranks that do not answer within ROLL_S; none where the store does not either: it may be the rank that keeps it which
        stands still, and then calls of it never return."""
        names = [f"roll/{rank}" for rank in range(self.world_size)]
        missing: list[int] = []

        def call() -> None:
            with suppress(RuntimeError):  # the store's own: it went with the rank that kept it
                self._store.set(names[self.rank], b"1")
                with suppress(RuntimeError):  # some did not come
                    self._store.wait(names, datetime.timedelta(seconds=ROLL_S))
                missing.extend(rank for rank, name in enumerate(names) if not self._store.check([name]))

        calling = threading.Thread(target=call, name="paramstore-roll", daemon=True)
        calling.start()
        calling.join(2 * ROLL_S)
        return () if calling.is_alive() else tuple(missing)


class _Started(Arriving):
    """An all-to-all that torch carries out."""

    def __init__(
        self, exchange: FlatExchange, group: Any, received: Tensor, sent: Tensor, from_each: list[int], to_each: list[int]
    ) -> None:  # fmt: skip
        self._exchange = exchange
        self._received = received
        self._sent = sent  # torch reads it meanwhile
        self._work: Any = None

        def begin(_: datetime.timedelta) -> None:
            self._work = group.alltoall_base(received, sent, from_each, to_each)

        exchange.carry_out(begin)

    def wait(self) -> Tensor:
        with named(EXCHANGE):
            self._exchange.carry_out(self._work.wait)
        return self._received
