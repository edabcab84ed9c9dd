"""The exchange in two hops: rows go within their node first, then between ranks of one local rank, as `plan.TwoHops` plans it.

- Rows, and their order, are those of the flat exchange, bit for bit.
- Each hop is a flat exchange among all ranks, empty but for the ranks of its hop: so whoever is gone breaks it for all at once,
  and is named as there.
- A thread of this exchange sends rows, and what ranks tell each other of them, call after call: all ranks do so in one order, and
  rows are under way between nodes while the caller computes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

from paramstore.errors import ParamStoreError
from paramstore_client.moe.exchange import Arriving, Exchange, FlatExchange, left_by
from paramstore_client.moe.hops.choice import ExchangeChoice
from paramstore_client.moe.hops.nodes import Nodes
from paramstore_client.moe.hops.plan import TwoHops
from paramstore_client.ranges import EXCHANGE, named


class TwoHopExchange(Exchange):
    """Rows in two hops where a choice says so, else in one.

    flat: of the same ranks; nothing else sends rows over it. choose: makes the choice on the device of the first rows; all ranks'
    are the same.
    """

    def __init__(self, flat: FlatExchange, nodes: Nodes, choose: Callable[[torch.device], ExchangeChoice]) -> None:
        self.flat = flat
        self.nodes = nodes
        self._choose = choose
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._worker: threading.Thread | None = None
        weakref.finalize(self, self._tasks.put, None)
        self.chosen: ExchangeChoice | None = None
        """How rows travel; None before the first."""
        self.call_count = 0

    @property
    def rank(self) -> int:
        return self.flat.rank

    @property
    def world_size(self) -> int:
        return self.flat.world_size

    def start_alike(self, sent: Tensor) -> Arriving:
        return self.flat.start_alike(sent)

    def leave(self, error: ParamStoreError) -> None:
        self.flat.leave(error)

    def choice(self, device: torch.device) -> ExchangeChoice:
        """How rows travel. All ranks ask at once, the first time."""
        if self.chosen is None:
            self.chosen = self._choose(device)
        return self.chosen

    def start_rows(self, sent: Tensor, *, to_each: Sequence[int], from_each: Sequence[int]) -> Arriving:
        choice = self.choice(sent.device)
        if not choice.ways:
            return self.flat.start_rows(sent, to_each=to_each, from_each=from_each)
        return self.in_turn(partial(self.sent_rows, choice, sent, to_each, from_each))

    def sent_rows(self, choice: ExchangeChoice, sent: Tensor, to_each: Sequence[int], from_each: Sequence[int]) -> Tensor:
        """The rows of each rank, in the order of the ranks. In its turn alone."""
        if "two_hops" not in choice.ways:
            return self.flat.rows(sent, to_each=to_each, from_each=from_each)
        telling = torch.tensor(TwoHops.telling(self.nodes, self.rank, to_each))
        sent_bytes = torch.full((self.world_size, 1), len(sent) * row_bytes(sent))
        told = self.told(torch.cat([sent_bytes, telling], dim=1).to(sent.device)).cpu()
        if not choice.hops(int(told[:, 0].max())):
            return self.flat.rows(sent, to_each=to_each, from_each=from_each)
        hops = TwoHops.of(self.nodes, self.rank, to_each=to_each, from_each=from_each, told=told[:, 1:].tolist())
        inside = self.flat.rows(hops.inside.brought(sent), to_each=hops.inside_to, from_each=hops.inside_from)
        between = self.flat.rows(hops.between.brought(inside), to_each=hops.between_to, from_each=hops.between_from)
        return hops.last.brought(between)

    def told(self, telling: Tensor) -> Tensor:
        """What each rank tells this one, [ranks, ...], among rows and in their order."""
        ones = [1] * self.world_size
        return self.flat.rows(telling, to_each=ones, from_each=ones)

    def in_turn(self, send: Callable[[], Tensor]) -> Arriving:
        """Runs what sends rows, after what is under way."""

        if self._worker is None:  # a daemon: a process that ends waits for no rows
            self._worker = threading.Thread(target=_work, args=(self._tasks,), name="paramstore-hops", daemon=True)
            self._worker.start()
        rows: Future[Tensor] = Future()

        def run() -> None:
            try:
                with torch.no_grad():  # a word for one thread
                    rows.set_result(send())
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for; nothing is sent after it
                self.leave(left_by(error))
                rows.set_exception(error)

        self._tasks.put(run)
        return _Sent(rows)


class _Sent(Arriving):
    """Rows that the exchange's thread sends."""

    def __init__(self, rows: Future[Tensor]) -> None:
        self._rows = rows

    def wait(self) -> Tensor:
        with named(EXCHANGE):
            return self._rows.result()


def _work(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    """Does tasks until one is None."""
    while (task := tasks.get()) is not None:
        task()
        del task  # it knows the exchange, which ends this when nobody has it any more


def row_bytes(rows: Tensor) -> int:
    """Bytes of one row, where there are none too."""
    return rows.new_empty(1, *rows.shape[1:]).nbytes
