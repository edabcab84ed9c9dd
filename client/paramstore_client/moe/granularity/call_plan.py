"""What one call of a layer does, and how it is timed: between the layer and its search."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch

from paramstore_client.moe.exchange import Exchange
from paramstore_client.moe.granularity.clock import Clock
from paramstore_client.moe.granularity.probe import measured
from paramstore_client.moe.granularity.search import Kind, Search
from paramstore_client.moe.pipeline_plan import Pipeline


class CallPlan(Protocol):
    """pipeline: of the call. word: what ranks compare of it beside that."""

    @property
    def pipeline(self) -> Pipeline: ...

    @property
    def word(self) -> int: ...

    def telling(self, rows: int) -> Sequence[int]:
        """What this rank tells with the header. rows: it has."""
        ...

    def agreed(self, exchange: Exchange, call: int, told: Sequence[Sequence[int]]) -> Clock | None:
        """Goes on where all ranks have agreed on the call; gives its clock, where it is timed. told: what each rank told."""
        ...


class FixedPlan(CallPlan):
    """A call whose pipeline is not searched for."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    @property
    def pipeline(self) -> Pipeline:
        return self._pipeline

    @property
    def word(self) -> int:
        return 0

    def telling(self, rows: int) -> Sequence[int]:
        return ()

    def agreed(self, exchange: Exchange, call: int, told: Sequence[Sequence[int]]) -> Clock | None:
        return None


class SearchedPlan(CallPlan):
    """A call whose pipeline a search knows, or tries. is_fixed: whether it must be one part, with nothing tried: what recomputes it
    has to do the same."""

    def __init__(self, search: Search, kind: Kind, device: torch.device, *, is_fixed: bool) -> None:
        self._search = search
        self._kind = kind
        self._device = device
        self._plan = search.base if is_fixed else search.next(kind)
        self._clock: Clock | None = None
        if self._plan.rows:
            self._clock = Clock(device)
            self._clock.begin()

    @property
    def pipeline(self) -> Pipeline:
        return self._plan.pipeline

    @property
    def word(self) -> int:
        return self._search.word(self._plan)

    def telling(self, rows: int) -> Sequence[int]:
        if self._clock is not None:
            self._clock.lap()
        return self._search.telling(rows)

    def agreed(self, exchange: Exchange, call: int, told: Sequence[Sequence[int]]) -> Clock | None:
        is_timed = self._search.hear(self._kind, call, self._plan, told)
        if sizes_bytes := self._plan.sizes_bytes:
            self._search.note_exchanges(self._kind, self._plan, measured(exchange, sizes_bytes, self._device))
        if not is_timed or self._clock is None:
            return None
        self._clock.ended = partial(self._search.end, call)
        self._clock.skip()
        return self._clock
