"""What the ranks of a layer in parts are asked to measure, and what they find."""

from __future__ import annotations

from statistics import median

import msgspec

from paramstore.bench.pairs import Pairs
from paramstore_bench.moe.sizes import Sizes

TASKS, FOUND = "parts_tasks.json", "parts_found.json"
COUNTS = 2, 4, 8


class PartsTask(msgspec.Struct, frozen=True):
    """A layer and how often its pairs are taken. row_us: how long an expert takes for a row."""

    sizes: Sizes
    row_us: float
    rounds: int


class PartsFound(msgspec.Struct, frozen=True):
    """What one number of parts took beside one. expected_s: what a search's model says that it takes. is_chosen: whether that
    search has chosen it."""

    split: str
    parts: int
    pairs: Pairs
    expected_s: float
    is_chosen: bool

    @property
    def seconds(self) -> float:
        """What it took."""
        return median(pair.ours.seconds for pair in self.pairs.pairs)

    @property
    def one_part_s(self) -> float:
        """What one part took."""
        return median(pair.limit.seconds for pair in self.pairs.pairs)


class PartsRun(msgspec.Struct, frozen=True):
    """What a task's ranks found. exchange_s, compute_s: of the exchanges and of the busiest rank's experts alone. curve: seconds of
    an exchange by the bytes of a rank."""

    found: list[PartsFound]
    exchange_s: float
    compute_s: float
    curve: list[tuple[int, float]]
