"""One call of a layer over ranks: how its rows travel in parts, and what ranks tell each other beside them.

- All ranks are known to stand before the same exchange of rows before they are sent on their way there, in either pass (`header`):
  nothing is sent whose size is not agreed on.
- What one rank fails at meanwhile, it tells beside the rows that come back; it goes on sending as many as were agreed on, zeros. So
  all raise it, and are in step after it.
"""

# T tokens of this rank, N rows of them, M rows of this rank's experts, D model
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor

from paramstore.errors import ConfigError, ParamStoreError
from paramstore_client.moe.exchange import Arriving, Exchange, left_by
from paramstore_client.moe.granularity.clock import Clock
from paramstore_client.moe.header import DTYPE_AT, DTYPES, UNKNOWN, Header, Phase, check_told, messages, phases, refusal
from paramstore_client.moe.row_plan import Incoming, Outgoing, inverse


class Call:
    """One call of a layer: how its rows travel, either way."""

    def __init__(
        self, exchange: Exchange, header: Header, outgoing: Outgoing, incoming: tuple[Incoming, ...], device: torch.device,
        *, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self._exchange = exchange
        self._header = header
        self._outgoing = outgoing
        self._device = device
        self._clock = clock
        self.incoming = incoming
        """By part."""
        self.computed: torch.dtype | None = None
        """Of what this rank's experts gave; None where they had no rows."""
        self.is_done = False
        """Whether its backward was run."""
        self._is_settled = False
        self._returned: torch.dtype | None = None
        """Of what the experts of this rank's tokens gave."""

    @property
    def parts(self) -> int:
        return len(self.incoming)

    @property
    def row_count(self) -> int:
        """Rows of this rank's tokens."""
        return sum(map(sum, self._outgoing.by_rank))

    def order(self, part: int) -> Tensor | None:
        """The rows of this rank's tokens in `part`, in the order in which they are sent; None where that is all, as they are."""
        return self._outgoing.orders[part]

    def start_there(self, part: int, sent: Tensor) -> Arriving:
        """Sends rows, or gradients of rows, to the ranks of their experts. sent: in their `order`."""
        return self._exchange.start_rows(sent, to_each=self._outgoing.by_rank[part], from_each=self.incoming[part].by_rank)

    def start_tokens(self, part: int, x_TD: Tensor, token_N: Tensor) -> Arriving:
        """Sends this rank's tokens to the ranks of their experts. token_N: the token of each of its rows."""
        order = self.order(part)
        return self._exchange.start_tokens(
            x_TD, token_N if order is None else token_N.index_select(0, order),
            to_each=self._outgoing.by_rank[part], from_each=self.incoming[part].by_rank,
        )  # fmt: skip

    def computable(self, part: int, arriving: Arriving) -> Tensor:
        """The rows that came, in the order of computation."""
        rows_MD = arriving.wait().index_select(0, self.incoming[part].order_M)
        self._lap()
        return rows_MD

    def start_back(self, part: int, rows_MD: Tensor | None) -> Arriving:
        """Sends rows of this rank's experts, or gradients, back to the ranks of their tokens; where they are None, zeros."""
        incoming = self.incoming[part]
        self._lap(is_computing=True)
        if rows_MD is None:
            sent = torch.zeros(len(incoming.place_M), self._header.width, dtype=DTYPES[self._header.dtype], device=self._device)
        else:
            sent = rows_MD.index_select(0, incoming.place_M)
        return self._exchange.start_rows(sent, to_each=incoming.by_rank, from_each=self._outgoing.by_rank[part])

    def meet(self, phase: Phase) -> None:
        """Sees to it that all ranks stand before the same exchange of rows. Raises StepMismatch, and what another rank tells."""
        check_met(self._exchange, self._start_word(phase, None).wait().cpu())
        if self._clock is not None:
            self._clock.begin(is_backward=True)

    def settle(self, phase: Phase, arriving: Sequence[Arriving], failure: BaseException | None = None) -> list[Tensor]:
        """The rows that came back last, after all ranks have told how they fared. Raises `failure`, else what another rank tells;
        StepMismatch where one does something else, which ends the exchange."""
        told = self._start_word(phase, failure).wait().cpu()
        if phases(told) != {phase}:
            check_met(self._exchange, told)
        rows = [each.wait() for each in arriving]
        self._lap()
        self._is_settled = True
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None  # it would know itself, by this frame
        check_told(told, this=self._exchange.rank)
        known = {DTYPES[dtype] for dtype in told[:, DTYPE_AT].tolist() if dtype != UNKNOWN}
        self._returned = known.pop() if len(known) == 1 else None
        return rows

    def done(self) -> None:
        """Notes that its last exchange is over: of backward, where there is one."""
        self.is_done = True
        if clock := self._take_clock():
            clock.end()

    def there(self, rows_ND: Tensor) -> Tensor:
        """All rows at once there, in the order of computation."""
        order = self.order(0)
        return self.computable(0, self.start_there(0, rows_ND.contiguous() if order is None else rows_ND.index_select(0, order)))

    def back(self, phase: Phase, rows_MD: Tensor) -> Tensor:
        """All rows at once back, in the order that this rank's tokens have. Raises as `settle`."""
        (arrived,) = self.settle(phase, [self.start_back(0, rows_MD)])
        order = self.order(0)
        return arrived if order is None else arrived.index_select(0, inverse(order))

    def checked(self, y_MD: Tensor, x_MD: Tensor) -> Tensor:
        """What this rank's experts gave for `x_MD`, in the dtype in which it travels. Raises ConfigError where it cannot."""
        is_held = y_MD.dtype in DTYPES and torch.promote_types(y_MD.dtype, x_MD.dtype) == x_MD.dtype
        if y_MD.shape != x_MD.shape or not is_held:
            raise ConfigError(
                f"expert-parallel experts gave rows {list(y_MD.shape)} of {y_MD.dtype} for rows {list(x_MD.shape)} of "
                f"{x_MD.dtype}: give as many, of the same width, and of no longer dtype"
            )
        self.computed = y_MD.dtype
        return y_MD.to(x_MD.dtype)

    def returned(self, rows_ND: Tensor) -> Tensor:
        """The rows that came back in the dtype in which experts gave them."""
        rows_ND = rows_ND if self._returned is None else rows_ND.to(self._returned)
        self._lap()
        return rows_ND

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """From where all ranks have agreed on rows to where they `settle`: what is raised within it before that ends the exchange,
        as this rank sends no more of them."""
        self._is_settled = False
        with ending(self._exchange, unless=lambda: self._is_settled):
            try:
                yield
            except BaseException:
                if clock := self._take_clock():
                    clock.fail()
                raise

    @contextmanager
    def guard(self, phase: Phase) -> Iterator[None]:
        """What is raised within it, before all rows go `back` at once, the other ranks learn there."""
        try:
            yield
        except BaseException as error:
            with suppress(ParamStoreError):  # the exchange's own, which they learn from that; or `error`
                self.settle(phase, [self.start_back(0, None)], error)
            raise

    def _take_clock(self) -> Clock | None:
        clock, self._clock = self._clock, None
        return clock

    def _lap(self, *, is_computing: bool = False) -> None:
        if self._clock is not None:
            self._clock.lap(is_computing=is_computing)

    def _start_word(self, phase: Phase, failure: BaseException | None) -> Arriving:
        if failure is not None:
            told = refusal(failure, phase=phase, device=self._device).repeat(self._exchange.world_size, 1)
        else:
            header = replace(self._header, phase=phase)
            told = messages(header, self._exchange.world_size, computed=self.computed, device=self._device)
        return self._exchange.start_alike(told)


@contextmanager
def telling(exchange: Exchange, phase: Phase, device: torch.device) -> Iterator[None]:
    """What is raised within it, the other ranks learn in place of this one's next header, of `phase`."""
    try:
        yield
    except BaseException as error:
        with suppress(ParamStoreError):  # the exchange's own: they learn it from that
            exchange.alike(refusal(error, phase=phase, device=device).repeat(exchange.world_size, 1))
        raise


@contextmanager
def ending(exchange: Exchange, *, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """What is raised within it ends the exchange, as other ranks wait for rows that this one does not send."""
    try:
        yield
    except BaseException as error:
        if not unless():
            exchange.leave(left_by(error))
        raise


def check_met(exchange: Exchange, told: Tensor) -> None:
    """Raises what `check_told` raises; where a rank waits for rows, the exchange ends with it."""
    try:
        check_told(told, this=exchange.rank)
    except ParamStoreError as error:
        if not phases(told).isdisjoint((Phase.RETURN, Phase.RETURN_BACKWARD)):
            exchange.leave(error)
        raise


def check_first_derivative() -> None:
    """Raises ConfigError in a backward that is recorded itself, on all ranks alike: before the local graph says so where there is
    one."""
    if torch.is_grad_enabled():
        raise ConfigError("create_graph=True: stored experts have no second derivatives; leave it out")
